"""Every option and argument that is a path takes every name, however it is written, or refuses it in a line.

`FILES` and `DIRECTORIES` say how each is used. The command line itself lists them, so none is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import tailrace
import tailrace.testing
from certificates import make_certificate
from spark.local_jobs import LocalJobs
from tailrace.cli.common import LocalPath, TablePath
from tailrace.cli.main import cli, main
from tailrace.client.tls import TlsOptions
from tailrace.spark.source.checkpoint import check_checkpoint
from tailrace.spark.source.spool_place import open_place
from tailrace.testing.running import RunningNode

NAMES = ["größe #1 a?b", "a%41b"]
DOCUMENTS = 20


@dataclass
class Case:
    """A path as written, and what it means."""

    node: RunningNode
    given: str
    target: Path
    elsewhere: Path
    capture: Any

    def run(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; PATH is replaced by the path."""
        given = [word.replace("PATH", self.given) for word in arguments]
        given = [self.node.url if word == "URL" else word for word in given]
        self.capture.readouterr()
        assert main(given) == code, (given, self.capture.readouterr())
        printed: str = self.capture.readouterr().out
        return printed

    def only(self, *names: str) -> None:
        """Check that nothing else is beside the target: no folder of another name was made."""
        assert sorted(path.name for path in self.target.parent.iterdir()) == sorted(
            [self.target.name, *names]
        )

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[str]:
        """Start a command that keeps running, in a process of its own; its first line."""
        words = [word.replace("PATH", self.given) for word in arguments]
        command = [sys.executable, "-m", "tailrace", *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline()
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


# files


def state_of_tail(case: Case) -> None:
    command = ["tail", "URL", "--to", "now", "--json", "--state", "PATH"]
    assert case.run(*command).count('"mutation"') == DOCUMENTS
    assert case.run(*command).count('"mutation"') == 0
    assert json.loads(case.target.read_text())["tailrace_state"] == 1
    case.only()
    assert case.run("tail", "URL", "--to", "now", "--json", "--from", "PATH").count('"mutation"') == 0


def state_of_replicate(case: Case) -> None:
    with tailrace.testing.node(vbuckets=4) as copy:
        case.run("replicate", "URL", copy.url, "--to", "now", "--state", "PATH")
        assert copy.get("k1") is not None
    assert case.target.is_file()
    case.only()


def out_of_dump(case: Case) -> None:
    case.run("dump", "URL", "--out", "PATH")
    assert len(case.target.read_text().splitlines()) == DOCUMENTS
    case.only()
    case.run("load", "URL", "--from", "PATH")


def recording(case: Case) -> None:
    case.run("record", "URL", "PATH", "--to", "now")
    case.only()
    with case.started("replay", "PATH", "--port", "0") as said:
        port = said.strip().rpartition(":")[2]
        printed = case.run("tail", f"couchbase://127.0.0.1:{port}", "--to", "now", "--json")
        assert printed.count('"mutation"') == DOCUMENTS


def decoded(case: Case) -> None:
    case.target.write_text("80 0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00")
    assert "NOOP" in case.run("decode", "PATH").upper()


def configuration(case: Case) -> None:
    case.target.write_text('[tail]\nto = "now"\n')
    assert "now" in case.run("config", "--config", "PATH", "--json")
    assert case.run("tail", "URL", "--json", "--config", "PATH").count('"mutation"') == DOCUMENTS


def metrics_of_mirror(case: Case) -> None:
    case.run("mirror", "URL", str(case.elsewhere), "--once", "--metrics-file", "PATH")
    assert "tailrace_" in case.target.read_text()
    case.only()


def users_of_serve(case: Case) -> None:
    case.target.write_text("ada:secret\n")
    with case.started("serve", "--memory", "--port", "0", "--users-file", "PATH") as said:
        assert "127.0.0.1" in said
    case.run("tail", "URL", "--to", "now", "--http-port", "0", "--http-users-file", "PATH")


def ready_file_of_serve(case: Case) -> None:
    with case.started("serve", "--memory", "--port", "0", "--ready-file", "PATH") as said:
        assert "127.0.0.1" in said
    case.only()


def certificates(case: Case) -> None:
    certificate, key = make_certificate(case.target.parent.parent, "node")
    case.target.write_bytes(certificate.read_bytes() + key.read_bytes())  # each reads what it looks for
    assert TlsOptions(ca_file=case.given).context().get_ca_certs()
    keys = "--tls-cert", "PATH", "--tls-key", "PATH"
    with case.started("serve", "--memory", "--port", "0", "--tls-port", "0", *keys) as said:
        assert "127.0.0.1" in said
    pages = "--http-port", "0", "--http-cert", "PATH", "--http-key", "PATH"
    case.run("tail", "URL", "--to", "now", *pages)
    url = "couchbases://127.0.0.1:1"
    case.run("stats", url, "--tls-ca", "PATH", "--tls-cert", "PATH", "--tls-key", "PATH", code=3)


# directories


def data_of_serve(case: Case) -> None:
    with case.started("serve", "--data", "PATH", "--port", "0", "--vbuckets", "4") as said:
        assert "127.0.0.1" in said
    assert (case.target / "default").is_dir() or list(case.target.iterdir())
    case.only()


def full_text(case: Case) -> None:
    pytest.importorskip("tantivy")
    case.run("index", "URL", "PATH", "--to", "now")
    case.only()
    assert "k7" in case.run("search", "PATH", "seven")


def cluster(case: Case) -> None:
    case.run("cluster", "start", "--nodes", "1", "--replicas", "0", "--vbuckets", "4", "--dir", "PATH")
    try:
        assert "n1" in case.run("cluster", "status", "--dir", "PATH")
        case.only()
    finally:
        case.run("cluster", "stop", "--dir", "PATH")


def group_store(case: Case) -> None:
    case.run("tail", "URL", "--group", "g", "--group-store", "PATH", "--to", "now", code=2)  # not now
    with tailrace.connect_sync(case.node.url, group="g", group_store=case.given) as source:
        assert next(iter(source.changes())) is not None
    assert list(case.target.iterdir())
    case.only()


def spool(case: Case) -> None:
    place = open_place(case.given, {})
    assert list(case.target.iterdir())
    place.remove()
    case.only()


def checkpoint(case: Case) -> None:
    for name in ("offsets", "commits"):
        (case.target / name).mkdir(parents=True)
    (case.target / "metadata").write_text('{"id":"1"}')
    assert check_checkpoint(case.given) == 0
    assert "whole" in case.run("doctor", "URL", "--checkpoint", "PATH")


def mirrored_table(case: Case) -> None:
    case.run("mirror", "URL", "PATH", "--once")
    case.only()
    assert "resume" in case.run("plan", "URL", "PATH")
    assert '"equal": true' in case.run("verify", "URL", "PATH", "--json")
    assert '"dry_run": true' in case.run("maintain", "PATH", "--dry-run", "--json")
    assert "table" in case.run("doctor", "URL", "PATH")
    rows = tailrace.read_table(case.given)
    assert rows.count() == DOCUMENTS
    (vbucket, position), *_ = rows.table.current.positions.items()
    case.run("wait", "PATH", "--token", f"{vbucket}:{position.vb_uuid}:{position.seqno}", "--timeout", "10s")
    refused = 2 if "%41" in str(case.target) else 0  # by the engine, which would look in another folder
    printed = case.run("query", "PATH", "select count(*) n from t", "--json", code=refused)
    assert refused or json.loads(printed) == {"n": DOCUMENTS}
    case.only()


def changes_of_mirror(case: Case) -> None:
    case.run("mirror", "URL", str(case.elsewhere), "--once", "--changes", "PATH")
    assert (case.target / "_delta_log").is_dir()
    case.only()


def table_of_a_collection(case: Case) -> None:
    of_default = "--collection", "_default._default=PATH"
    case.run("mirror", "URL", str(case.elsewhere), "--once", *of_default)
    assert tailrace.read_table(case.target).count() == DOCUMENTS
    assert not case.elsewhere.exists()
    case.only()


def exported(case: Case) -> None:
    case.run("mirror", "URL", str(case.elsewhere), "--once")
    case.run("export", str(case.elsewhere), "PATH", "--format", "parquet")
    assert list(case.target.glob("*.parquet"))
    case.only()
    shutil.rmtree(case.target)
    refused = 2 if "%41" in str(case.target) else 0
    case.run("export", str(case.elsewhere), "PATH", code=refused)
    assert refused == 2 or (case.target / "_delta_log").is_dir()


FILES: dict[Callable[[Case], None], str] = {
    state_of_tail: "tail --state; tail --from",
    state_of_replicate: "replicate --state",
    out_of_dump: "dump --out; load --from",
    recording: "record file; replay file",
    decoded: "decode file",
    configuration: "--config; * --config",
    metrics_of_mirror: "mirror --metrics-file",
    users_of_serve: "serve --users-file; * --http-users-file",
    ready_file_of_serve: "serve --ready-file",
    certificates: "* --tls-ca; * --tls-cert; * --tls-key; * --http-cert; * --http-key",
}
DIRECTORIES: dict[Callable[[Case], None], str] = {
    data_of_serve: "serve --data",
    full_text: "index directory; search directory",
    cluster: "cluster start --dir; cluster status --dir; cluster stop --dir",
    group_store: "tail --group-store",
    spool: "",
    checkpoint: "doctor --checkpoint",
    mirrored_table: "mirror table; plan table; verify table; maintain table; doctor table; wait table; "
    "query table",
    changes_of_mirror: "mirror --changes",
    table_of_a_collection: "mirror --collection",
    exported: "export table; export path",
}
IN_PROCESSES = {recording, users_of_serve, ready_file_of_serve, certificates, data_of_serve, cluster}
"""Cases that cost a process each: not tried in every way."""
ALIKE = {
    "invalidate --state": "as tail --state; it needs a cache",
    "cluster add --dir": "status reads the same option",
    "cluster remove --dir": "status reads the same option",
    "cluster failover --dir": "status reads the same option",
    "cluster rebalance --dir": "status reads the same option",
    "demo --dir": "it starts Spark; a node and a mirror below one directory, as above",
    "bench path": "files of the repository",
}


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    words = {7: "seven"}
    with tailrace.testing.node(vbuckets=4) as running:
        for number in range(DOCUMENTS):
            running.set(f"k{number}", {"n": number, "word": words.get(number, "other")})
        yield running


@pytest.fixture(autouse=True)
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def open_spark(*_arguments: Any, **_settings: Any) -> Any:
        yield None

    for command in ("mirror", "verify"):
        monkeypatch.setattr(f"tailrace.cli.{command}.open_spark", open_spark)
    monkeypatch.setattr("tailrace.spark.api._jobs", lambda _spark, _given: LocalJobs())


def written(folder: Path, name: str, *, is_directory: bool) -> list[tuple[str, Path]]:
    """The same path in the ways people may write it, and the current folder."""
    around = folder / name
    around.mkdir()
    target = around / f"{name}.x"
    link = folder / "link"
    link.symlink_to(around)
    ways = [
        (str(target), folder),
        (f"{name}/{target.name}", folder),
        (f"./{target.name}", around),
        (target.as_uri(), folder),
        (str(link / target.name), folder),
    ]
    return [*ways, (f"{target}/", folder)] if is_directory else ways


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", [*FILES, *DIRECTORIES], ids=lambda use: use.__name__)
def test_every_path(
    use: Callable[[Case], None], name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    node, capsys = request.getfixturevalue("node"), request.getfixturevalue("capsys")
    monkeypatch = request.getfixturevalue("monkeypatch")
    is_directory = use in DIRECTORIES
    for number in range(6 if is_directory else 5):
        if use in IN_PROCESSES and number not in (1, 3):
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        ways = written(folder, name, is_directory=is_directory)
        given, stand = ways[number]
        monkeypatch.chdir(stand)
        use(Case(node, given, folder / name / f"{name}.x", folder / "elsewhere", capsys))


WRONG = [
    "",
    "file://host/x",
    "file:///a#b",
    "http://x/y",
    "a\0b",
    "x" * 5000,
    "file/below",
    "az://x/a?b",
]


@pytest.mark.parametrize("given", WRONG, ids=lambda given: repr(given)[:20])
def test_every_path_that_can_not_be_is_refused_before_anything_is_made(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even before anything is connected: nobody listens there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    for words, command, parameter in parameters():
        if not is_path(parameter):
            continue
        shown = f"_default._default={given}" if parameter.name == "collections" else given
        arguments = [*words]
        for other in command.params:  # in order: arguments are positional
            if other is parameter:
                arguments += [shown] if isinstance(other, click.Argument) else [other.opts[0], shown]
            elif other.required:
                arguments += _sample(other)
        assert main(arguments) == 2, (words, parameter.opts, capsys.readouterr().err)
        said = capsys.readouterr().err
        assert said.startswith("tailrace: error: "), (words, parameter.opts, said)
        assert said.count("\n") == 1, said
        assert "secret" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _sample(parameter: click.Parameter) -> list[str]:
    samples = {"url": "couchbase://127.0.0.1:1", "target": "couchbase://127.0.0.1:1", "tokens": "1:2:3"}
    value = samples.get(str(parameter.name), "there" if is_path(parameter) else "x")
    return [value] if isinstance(parameter, click.Argument) else [parameter.opts[0], value]


def parameters() -> Iterator[tuple[list[str], click.Command, click.Parameter]]:
    """All parameters of the command line."""

    def below(words: list[str], command: click.Command) -> Iterator[Any]:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                yield from below([*words, name], inner)
        for parameter in command.params:
            yield words, command, parameter

    yield from below([], cli)


def is_path(parameter: click.Parameter) -> bool:
    is_by_hand = parameter.name == "group_store" or str(parameter.metavar).endswith(("=PATH]", "|FILE"))
    return is_by_hand or isinstance(parameter.type, LocalPath | TablePath)


def test_every_path_of_the_command_line_is_tried() -> None:
    tried = {use for uses in (*FILES.values(), *DIRECTORIES.values()) for use in uses.split("; ")} | {*ALIKE}
    for words, _, parameter in parameters():
        name = str(parameter.name) if isinstance(parameter, click.Argument) else parameter.opts[0]
        shown = set(re.split(r"[^a-z]+", f"{parameter.metavar} {name}".lower()))
        if is_path(parameter):
            assert " ".join([*words, name]) in tried or f"* {name}" in tried, (words, name)
        else:
            looks_like_one = shown & {"file", "path", "dir", "folder", "table"}
            assert name == "--as-of-table" or not looks_like_one, (words, name)
