"""Errors that people run into name the option, file or port, and say what to do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace.testing
from tailrace.cli.main import main
from tailrace.cli.spark_options import explained_query_error
from tailrace.client.kv import KvClient
from tailrace.errors import ConnectError
from tailrace.testing.running import RunningNode
from unmeasured import unmeasured


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4) as running:
        running.set("k", 1)
        yield running


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield str(listening.getsockname()[1])


def error(capfd: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """The one line that a command ends with; a node that does not start needs a process of its own to end."""
    words = [str(argument) for argument in arguments]
    if words[0] == "serve":
        assert subprocess.run([sys.executable, "-m", "tailrace", *words], check=False).returncode == code
    else:
        assert main(words) == code
    out, err = capfd.readouterr()
    assert not out and err.startswith("tailrace: error: ") and err.count("\n") == 1, (out, err)
    return err


def test_a_command_of_a_group_that_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    # not the whole help in one line
    assert error(capfd, 2, "cluster") == "tailrace: error: missing command, see 'tailrace cluster --help'\n"


def test_a_port_in_use_is_that_of_its_option(
    capfd: pytest.CaptureFixture[str], taken: str, tmp_path: Path, node: RunningNode
) -> None:
    serve = ("serve", "--memory", "--vbuckets", "1")
    assert error(capfd, 1, *serve, "--port", taken).endswith("choose another --port\n")
    assert error(capfd, 1, *serve, "--port", 0, "--http-port", taken).endswith("choose another --http-port\n")
    where = error(capfd, 1, *serve, "--port", 0, "--user", "a:b", "--host", "no.invalid")
    assert where.endswith("choose another --host or --port\n")
    recording = tmp_path / "stream.rec"
    assert main(["record", node.url, str(recording)]) == 0
    capfd.readouterr()
    assert error(capfd, 1, "replay", recording, "--port", taken).endswith("in use, choose another --port\n")


def test_files_are_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    absent, junk = tmp_path / "absent.pem", tmp_path / "junk"
    junk.write_text("junk")
    serve = ("serve", "--memory", "--port", 0)
    assert "absent.pem" in error(capfd, 2, *serve, "--tls-cert", junk, "--tls-key", absent)
    wrong = error(capfd, 2, *serve, "--tls-cert", junk, "--tls-key", junk)
    assert "PEM" in wrong and "None" not in wrong
    assert "'/proc/no'" in error(capfd, 1, "serve", "--port", 0, "--data", "/proc/no")
    assert "choose another" in error(capfd, 1, "serve", "--port", 0, "--data", tmp_path)


def test_what_the_server_refuses(capfd: pytest.CaptureFixture[str], node: RunningNode) -> None:
    highest = str((1 << 64) - 1)  # a CAS is any 64-bit number
    assert "CAS has changed" in error(capfd, 1, "set", node.url, "k", "2", "--cas", highest)
    assert "no such document" in error(capfd, 1, "set", node.url, "nobody", "2", "--cas", "1")
    assert "CAS has changed" in error(capfd, 1, "delete", node.url, "k", "--cas", highest)
    assert "tailrace collections" in error(capfd, 1, "get", node.url, "k", "--collection", "no.where")
    assert node.get("k") == 1


def test_readers_that_can_not_connect(capfd: pytest.CaptureFixture[str], node: RunningNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for command in ("tail", "stats"):
        refused = error(capfd, 3, command, f"couchbase://127.0.0.1:{port}")
        assert f"can't connect to 127.0.0.1:{port}: Connection refused; is the node" in refused
        no_tls = error(capfd, 3, command, node.url.replace("couchbase://", "couchbases://"))
        assert "no TLS connection" in no_tls and "does it speak TLS" in no_tls


@pytest.mark.parametrize("command", ["tail", "replicate"])
def test_a_name_is_for_tap(capfd: pytest.CaptureFixture[str], node: RunningNode, command: str) -> None:
    target = [node.url] if command == "replicate" else []
    line = error(capfd, 2, command, node.url, *target, "--to", "now", "--tap-name", "me")
    assert "--dialect tap" in line and "tap_settings" not in line


@pytest.mark.parametrize(
    ("closed", "command", "code"),
    [
        (">&-", "get {} k", 0),
        (">&-", "tail {} --to now --json", 0),
        ("2>&-", "get {} nobody", 1),
        ("<&-", "set {} k", 2),
    ],
)
def test_a_closed_stream_is_no_bug(node: RunningNode, closed: str, command: str, code: int) -> None:
    line = f"{sys.executable} -m tailrace {command.format(node.url)} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and "bug" not in done.stderr, done
    assert node.get("k") == 1


def test_a_node_that_stops_with_a_full_disk_says_what_is_lost(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    options = f"--vbuckets 1 --port 0 --data '{tmp_path}/data' --ready-file '{ready}'"
    line = f"ulimit -f 64; exec {sys.executable} -m tailrace serve {options}"  # no file above 64 KiB
    process = subprocess.Popen(
        ["bash", "-c", line], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=unmeasured()
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert process.stdout is not None
        port = process.stdout.readline().rpartition(":")[2].strip()
        with KvClient(f"couchbase://127.0.0.1:{port}") as client:
            client.set("large", os.urandom(1 << 17))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1].endswith("the node has stopped, and what was not on disk is lost")


def test_a_query_that_lost_its_node_is_no_difference() -> None:
    """`verify` ends with 1 if there are differences, so with 3 if there is no node to ask."""
    wrapped = (
        "[STREAM_FAILED] Query stopped\nTraceback:\n  File x\ntailrace.errors.LoginError: refused, check it\n"
    )
    explained = explained_query_error(RuntimeError(wrapped))
    assert isinstance(explained, ConnectError) and str(explained) == "refused, check it"
    loss = explained_query_error(RuntimeError(wrapped.replace("errors.LoginError", "errors.DataLoss")))
    assert not isinstance(loss, ConnectError) and str(loss) == "refused, check it"
    own = ConnectError("gone")
    assert explained_query_error(own) is own
    other = explained_query_error(RuntimeError("no\nidea"))
    assert str(other) == "the query stopped: no, see --debug for all of it"


@pytest.mark.parametrize("command", ["plan", "vacuum"])
def test_a_table_is_no_file(
    capfd: pytest.CaptureFixture[str], node: RunningNode, tmp_path: Path, command: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    url = [node.url] if command == "plan" else []
    assert "is a file, not a folder; choose another path" in error(capfd, 2, command, *url, file)


def test_a_retention_without_a_change_log(
    capfd: pytest.CaptureFixture[str], node: RunningNode, tmp_path: Path
) -> None:
    said = error(capfd, 2, "mirror", node.url, tmp_path / "table", "--once", "--changes-keep", "1d")
    assert "--changes-keep is for a change log, but there is none: give --changes too" in said
    assert not (tmp_path / "table").exists()
