"""A Java process that is gone is reported as gone; other refused connections are not blamed on it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkContext

from tailrace.cli.common import ProgramRun
from tailrace.cli.main import _report
from tailrace.cli.spark_options import explained_query_error
from tailrace.errors import SparkLost
from tailrace.spark import java_process
from tailrace.spark.java_process import lost_java
from tailrace.spark.rounds.mirror import _is_passing


def refused_by_java() -> Exception:
    """The error of a refused connection, as from py4j, which itself would leave a socket open in tests."""
    inside: dict[str, Any] = {"__name__": "py4j.clientserver"}
    exec("def connect(): raise ConnectionRefusedError(111, 'Connection refused')", inside)
    with pytest.raises(ConnectionRefusedError) as caught:
        inside["connect"]()
    return caught.value


@pytest.fixture
def killed_java(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))


def test_a_killed_java_is_named(killed_java: None) -> None:
    error = refused_by_java()
    lost = lost_java(error)
    assert isinstance(lost, SparkLost)
    assert "was killed (SIGKILL)" in str(lost)
    assert "start again" in str(lost)
    assert "\n" not in str(lost)
    assert not _is_passing(error), "no round has more luck without Java"
    assert str(explained_query_error(error)) == str(lost)


def test_a_command_names_it_wherever_it_is_noticed(
    killed_java: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report(refused_by_java(), ProgramRun()) == 1, "no peer is away"
    said = capsys.readouterr().err
    assert "Spark's Java process was killed (SIGKILL)" in said
    assert said.count("\n") == 1


def test_one_that_is_just_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are closed before anybody can ask how it ended."""
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    monkeypatch.setattr(java_process, "_ENDING_S", 60.0)
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
    assert "was killed (SIGKILL)" in str(lost_java(refused_by_java()))


def test_one_that_ended_by_itself_has_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_process, "_stderr", [])
    with tempfile.TemporaryFile() as stderr:
        said = (
            "ERROR JavaUtils: Failed to create directory /x/blockmgr-1\n"
            "java.nio.file.FileSystemException: /x/blockmgr-1: No space left on device\n"
            "\tat java.base/sun.nio.fs.UnixException: nothing for people\n"
            "26/11/18 15:56:42 ERROR DiskBlockManager: Failed to create any local dir.\n"
        )
        code = f"import sys; sys.stderr.write({said!r}); sys.exit(53)"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=stderr)
        process.wait()
        java_process.listen_to(stderr)
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        why = "java.nio.file.FileSystemException: /x/blockmgr-1: No space left on device"
        assert f"ended with 53 ({why}); start again when" in str(lost_java(refused_by_java()))


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os._exit(143)", "was killed (SIGTERM); start again, nothing"),
        ("os.kill(os.getpid(), 40)", "was killed (signal 40); start again, nothing"),
        ("os._exit(53)", "ended with 53 (java.io.IOException: of a task, hours ago)"),
    ],
)
def test_what_it_said_before_is_not_why_a_signal_ended_it(
    monkeypatch: pytest.MonkeyPatch, end: str, told: str
) -> None:
    """Java catches SIGTERM and exits with 143, which has nothing to do with its last exception."""
    monkeypatch.setattr(java_process, "_stderr", [])
    with tempfile.TemporaryFile() as stderr:
        code = f"import os; os.write(2, b'java.io.IOException: of a task, hours ago\\n'); {end}"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=stderr)
        process.wait()
        java_process.listen_to(stderr)
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        assert told in str(lost_java(refused_by_java()))


def test_what_java_said_last_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)
    error = RuntimeError("a job failed")
    error.__cause__ = Py4JNetworkError("Error while sending or receiving")
    assert "does not answer" in str(lost_java(error))


def test_other_connections_are_not_javas() -> None:
    assert lost_java(ConnectionRefusedError(111, "Connection refused")) is None
    assert lost_java(ValueError("x")) is None


def test_a_chain_of_errors_that_leads_back_to_itself_comes_to_an_end() -> None:
    error, other = ValueError("x"), ValueError("y")
    error.__context__, other.__cause__ = other, error
    assert lost_java(error) is None
