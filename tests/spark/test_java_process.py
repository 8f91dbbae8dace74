"""A Java process that is gone is said to be gone; other refused connections are not blamed on it."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped]
from pyspark import SparkContext

from tailrace.cli.common import ProgramRun
from tailrace.cli.main import _report
from tailrace.cli.spark_options import explained_query_error
from tailrace.errors import SparkLost
from tailrace.spark.java_process import lost_java
from tailrace.spark.rounds.mirror import _is_passing


def refused_by_java() -> Exception:
    """What py4j lets through where its connection is refused; its own leaves a socket open in tests."""
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
