"""Public functions show what they take: to mypy, to `help`, and at run time in one line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import tailrace
import tailrace.testing
from tailrace.cli.main import main
from tailrace.client.options import SourceKeywords, SourceOptions
from tailrace.errors import TailraceError, UsageError
from tailrace.table.mutation_tokens import wait_for

URL = "couchbase://127.0.0.1"


def test_the_keywords_are_the_options() -> None:
    hints = get_type_hints(SourceOptions)
    assert get_type_hints(SourceKeywords) == {
        field.name: hints[field.name] for field in fields(SourceOptions)
    }


@pytest.mark.parametrize("function", [tailrace.connect, tailrace.connect_sync])
def test_signatures_show_them(function: Any) -> None:
    shown = inspect.signature(function).parameters
    assert list(shown) == ["url", *(field.name for field in fields(SourceOptions))]
    assert shown["retry_for_s"].default == 60.0
    assert function(url=URL) is not None


@pytest.mark.parametrize("function", [tailrace.connect, tailrace.connect_sync])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"statte": "x"}, "did you mean 'state'"),
        ({"retry_for_s": "x"}, "retry_for_s must be a number, not 'x'"),
        ({"retry_for_s": True}, "retry_for_s must be a number"),
        ({"retry_for_s": float("nan")}, "retry_for_s must be a number"),
        ({"flow_control_buffer": 1.5}, "whole number"),
        ({"no_value": "yes"}, "true or false"),
        ({"collections": "shop.orders"}, "list of names"),
        ({"collections": [1]}, "list of names"),
        ({"state": 5}, "StateStore"),
        ({"rollback_points": [1]}, "a function"),
        ({"username": b"x"}, "must be text or None"),
        ({"tls": True}, "a TlsOptions or None"),
        ({"tls": tailrace.TlsOptions(verify="no")}, "verify must be true or false"),  # type: ignore[arg-type]
        ({"tap_settings": tailrace.TapSettings(name=5)}, "name must be text"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_is_said_in_one_line(function: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        function(URL, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [tailrace.connect, tailrace.connect_sync])
@pytest.mark.parametrize("url", [5, None, b"couchbase://127.0.0.1"])
def test_a_url_is_a_text(function: Any, url: Any) -> None:
    with pytest.raises(UsageError, match="url must be text or a ConnectionString, not"):
        function(url)


@pytest.mark.parametrize("vbuckets", ["x", 0, 3, True, 2048])
def test_a_node_for_tests(vbuckets: Any) -> None:
    with pytest.raises(UsageError, match="power of two"):
        tailrace.testing.node(vbuckets)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bucket": 5}, "bucket must be text"),
        ({"buckets": "one"}, "buckets must be a list"),
        ({"buckets": [5]}, "name must be text"),
        ({"data": 5}, "data must be text or a Path or None"),
        ({"users": {"ada": 5}}, "users must be a dictionary of texts or None"),
        ({"settings": "max_value=5"}, "settings must be a dictionary or None"),
        ({"tls": True}, "tls must be an? SSLContext or None"),
    ],
)
def test_what_a_node_for_tests_takes(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tailrace.testing.node(**given)


def test_what_its_methods_take() -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        wrong: Any = "1"
        for call in (
            lambda: node.set(5, "v"),  # type: ignore[arg-type]
            lambda: node.set_many({5: "v"}),  # type: ignore[dict-item]
            lambda: node.get(None),  # type: ignore[arg-type]
            lambda: node.set("k", "v", vbucket=wrong),
            lambda: node.high_seqno(wrong),
            lambda: node.rewind(wrong, 0),
            lambda: node.rewind(0, wrong),
            lambda: node.slow_disk(wrong),
            lambda: node.cut_after(wrong),
            lambda: node.replicate([0], wrong),
        ):
            with pytest.raises(TailraceError):
                call()


@pytest.mark.parametrize(
    "given",
    [
        {"start": 5},
        {"end": 5},
        {"start": {0: 5}},
        {"end": {0: "x"}},
        {"end": {"0": 5}},
        {"vbuckets": "0"},
        {"vbuckets": [0.5]},
        {"vbuckets": [0, "1"]},
        {"vbuckets": 5},
    ],
)
def test_what_a_reading_takes(given: dict[str, Any]) -> None:
    with tailrace.testing.node(vbuckets=2) as node, tailrace.connect_sync(node.url) as source:
        for read in (source.changes, source.batches):
            with pytest.raises(UsageError):
                next(iter(read(**given)))


def test_what_a_source_is_asked() -> None:
    with tailrace.testing.node(vbuckets=2) as node, tailrace.connect_sync(node.url) as source:
        node.set("k", 1)
        changes = source.changes()
        assert next(changes) is not None
        wrong: Any
        for wrong in (5, "0", ["0"]):
            for call in (source.pause, source.resume, source.failover_logs):
                with pytest.raises(UsageError, match="vbuckets must be a list"):
                    call(wrong)
        changes.close()
        with pytest.raises(UsageError, match="there is no vbucket 99"):
            source.failover_logs([99])


def test_a_slip_does_not_end_a_source() -> None:
    with tailrace.testing.node(vbuckets=2) as node, tailrace.connect_sync(node.url) as source:
        with pytest.raises(UsageError, match="there is no vbucket 99"):
            next(source.changes(vbuckets=[99]))
        assert [change.vbucket for change in source.changes(end="now")] == [0, 1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": 5}, "the table is a path, not '5'"),
        ({"version": "3"}, "version must be a whole number or None"),
        ({"columns": "key"}, "columns must be a list of names or None"),
        ({"filter": "vbucket = 7"}, "filter must be an Expression or a list or None"),
        ({"storage_options": "x=y"}, "storage_options must be a dictionary of texts or None"),
    ],
)
def test_what_reading_a_table_takes(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(UsageError, match=says):
        tailrace.read_table(**{"path": tmp_path, **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"timeout_s": "5"}, "timeout_s must be a number"),
        ({"storage_options": []}, "storage_options must be a dict"),
    ],
)
def test_what_waiting_for_a_table_takes(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(UsageError, match=says):
        wait_for(tmp_path, "7:1:12", **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": 5}, "url must be text or a ConnectionString"),
        ({"tables": 5}, "tables must be text or a path or a dictionary"),
        ({"tables": {"shop.orders": 5}}, "tables must be text or a path or a dictionary"),
        ({"options": {"maxOffsetsPerTrigger": 5}}, "options must be a dictionary of texts"),
        ({"onec": True}, "did you mean 'once'"),
    ],
)
def test_what_a_mirror_takes(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    pytest.importorskip("pyspark")
    from tailrace.spark.api import mirror

    with pytest.raises(UsageError, match=says):
        mirror(None, **{"url": URL, "tables": tmp_path, **given})  # type: ignore[arg-type]


def test_a_session_has_settings_of_spark(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They have dots in their names; anything else is a slip."""
    pytest.importorskip("pyspark")
    from tailrace.spark import session

    with pytest.raises(UsageError, match="no setting of a session 'mastr'; did you mean 'master'"):
        session(mastr="local[1]")
    assert main(["verify", URL, str(tmp_path), "--conf", "master=local"]) == 2
    assert "--conf must be NAME=VALUE, such as spark.driver.memory=2g" in capfd.readouterr().err


def test_a_schema_is_a_text_or_a_type() -> None:
    pytest.importorskip("pyspark")
    from tailrace.spark.documents import _struct

    wrong: Any = 5
    with pytest.raises(UsageError, match="a schema is a StructType or DDL text, not '5'"):
        _struct(wrong)


@pytest.mark.parametrize("name", ["trigger_s", "changes_keep_s", "undo_s", "undo_bytes"])
@pytest.mark.parametrize("value", [-1, float("inf")])
def test_limits_of_a_mirror(tmp_path: Path, name: str, value: Any) -> None:
    pytest.importorskip("pyspark")
    from tailrace.spark.rounds.setup import build_mirror

    jobs: Any = None
    with pytest.raises(UsageError, match=f"{name} must be 0 or more"):
        build_mirror(jobs, URL, tmp_path, **{"changes": tmp_path / "log", name: value})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": 5}, "url must be text"),
        ({"options": "x"}, "options must be"),
        ({"on_progress": 5}, "on_progress must be"),
    ],
)
def test_what_verifying_takes(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    pytest.importorskip("pyspark")
    from tailrace.spark.api import verify

    with pytest.raises(UsageError, match=says):
        verify(None, **{"url": URL, "table": tmp_path, **given})  # type: ignore[arg-type]


def test_mypy_sees_names_and_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("pyspark")
    code = tmp_path / "user.py"
    code.write_text(
        "import tailrace, tailrace.testing\n"
        "tailrace.connect('x', state='f', retry_for_s=5)\n"
        "tailrace.connect('x', statte='f')\n"
        "tailrace.connect_sync('x', retry_for_s='x')\n"
        "tailrace.testing.node(vbukets=16)\n"
        "tailrace.testing.node(vbuckets='16')\n"
        "from pyspark.sql import SparkSession\n"
        "from tailrace.spark import mirror\n"
        "def run(spark: SparkSession) -> None:\n"
        "    mirror(spark, 'x', 't', once=True, trigger_s=5)\n"
        "    mirror(spark, 'x', 't', onec=True)\n"
        "    mirror(spark, 'x', 't', trigger_s='5')\n"
    )
    # with our settings, to reuse mypy's cache of the package from `make lint`
    options = ["--config-file", "pyproject.toml", "--strict", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(code)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert sorted(set(lines)) == [3, 4, 5, 6, 11, 12], done.stdout
