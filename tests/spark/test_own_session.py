"""Sessions that users made themselves: errors say what is missing in them, and what to set."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.errors import LoginError, StorageError, UsageError
from tailrace.spark import spark_session
from tailrace.spark.rounds.jobs import _Task, own_error, python_trouble, what_failed
from tailrace.spark.source.data_source import TailraceDataSource, register
from tailrace.spark.worker_python import python_of_workers


class Session:
    """As much of a session as `register` takes."""

    def __init__(self, python: str, master: str = "local[2]") -> None:
        self.sparkContext = SimpleNamespace(pythonExec=python, master=master)
        self.registered: list[Any] = []
        self.dataSource = SimpleNamespace(register=self.registered.append)


def program(folder: Path, text: str) -> str:
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("python", [sys.executable, python_of_workers()])
def test_a_session_with_our_python(python: str) -> None:
    session = Session(python)
    register(session)  # type: ignore[arg-type]
    assert session.registered == [TailraceDataSource]


def test_a_python_without_us(tmp_path: Path) -> None:
    other = program(tmp_path, "exit 1")
    with pytest.raises(UsageError) as caught:
        register(Session(other))  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"Spark starts '{other}' for its workers, which can't import tailrace; before the session is made, "
        f"set PYSPARK_PYTHON to {python_of_workers()} or call ts.prepare_environment()"
    )
    with pytest.raises(UsageError, match="which can't be started; before"):
        register(Session(str(tmp_path / "nothing")))  # type: ignore[arg-type]
    register(Session(program(tmp_path, f'exec {sys.executable} "$@"')))  # type: ignore[arg-type]
    register(Session(str(tmp_path / "nothing"), "spark://far:7077"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spark_says",
    [
        'Job aborted: Task 0 failed\njava.io.IOException: Cannot run program "python9": error=2',
        "org.apache.spark.SparkException: Python worker failed to connect back.",
        "Traceback:\nModuleNotFoundError: No module named 'tailrace'",
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11",
    ],
)
def test_workers_without_a_python(spark_says: str) -> None:
    trouble = python_trouble(RuntimeError(spark_says))
    assert trouble is not None and own_error(RuntimeError(spark_says)) is None
    assert str(trouble).startswith("Spark's workers don't get a Python with Tailrace in it (")
    assert "set PYSPARK_PYTHON to the tailrace-python" in str(trouble)
    assert python_trouble(RuntimeError("an executor was lost")) is None


def test_a_broken_neighbour_hides_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's search ends at it, so our session registers the source itself."""
    assert spark_session._is_found_by_spark()
    (tmp_path / "pyspark_broken.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not spark_session._is_found_by_spark()


def test_the_python_of_workers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "mine")
    spark_session.prepare_environment()
    assert os.environ["PYSPARK_PYTHON"] == "mine"
    spark_session.prepare_environment("/opt/there/bin/python")
    assert os.environ["PYSPARK_PYTHON"] == "/opt/there/bin/python"


@pytest.mark.parametrize(
    "spark_says",
    [
        "Traceback:\n  File x\ntailrace.errors.LoginError: no: such user\n SQLSTATE: 38000",
        "Job aborted: Task 0 (TID 3): org.apache.PythonException: tailrace.errors.LoginError: no: such user",
    ],
)
def test_our_own_error_is_told_from_what_is_around_it(spark_says: str) -> None:
    own = own_error(RuntimeError(spark_says))
    assert isinstance(own, LoginError) and str(own) == "no: such user"
    assert own_error(RuntimeError("File tailrace.py: line 3")) is None


SPARK_WRAPS = {
    """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/spark/worker.py", line 1, in main
  File "/x/task.py", line 7, in write
    raise ValueError("a: b")
ValueError: a: b
""": "ValueError: a: b",
    """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 1 times
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
Caused by: java.io.IOException: No space left on device
""": "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 failed 1 times",
    "An error occurred while calling o42.start": "An error occurred while calling o42.start",
    "the disk is away\nand so on": "the disk is away",
    "": "RuntimeError",
}


@pytest.mark.parametrize("spark_says", SPARK_WRAPS)
def test_what_failed_is_not_that_something_failed(spark_says: str) -> None:
    assert what_failed(RuntimeError(spark_says)) == SPARK_WRAPS[spark_says]


def full(_: object) -> None:
    raise OSError(28, "No space left on device", "/table/part-1.parquet")


def test_a_full_disk_of_an_executor_is_named() -> None:
    task = _Task(full, (pickle.dumps(None),))
    with pytest.raises(StorageError, match=r"No space left on device \(/table/part-1.parquet\)"):
        list(task.answers([0]))
