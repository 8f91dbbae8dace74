"""A job for spark-submit on a cluster: ``executor_kill.py DIR``.

A task of the mirror kills the JVM of its executor when it has written all its files, in a round that also
rolls back. Spark repeats what was lost; the table must be equal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import tailrace.spark as ts
import tailrace.testing
from spark.core_scenario import assert_equal
from tailrace.spark.rounds import round_runner
from tailrace.spark.rounds.planning import ReadRange
from tailrace.spark.rounds.task import RoundTask, TaskAnswer

_EXECUTOR = "CoarseGrainedExecutorBackend"


class KillsItsExecutor(RoundTask):
    """The executors' half of a round; the first task of a run kills its executor instead of answering."""

    def __call__(self, ranges: Mapping[int, ReadRange]) -> TaskAnswer:
        answer = super().__call__(ranges)
        if _is_first(Path(self.targets[0].writer.store.uri).parent / "killed"):
            os.kill(_executor_of(os.getpid()), signal.SIGKILL)
            signal.pause()  # this worker goes with its JVM
        return answer


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _executor_of(pid: int) -> int:
    """The JVM above a Python worker."""
    while pid > 1:
        if _EXECUTOR in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError("no executor above this process")


def run(spark: Any, node: Any, directory: Path) -> int:
    """How many executors were lost."""
    table = str(directory / "table")
    killed = 0

    def once() -> None:
        nonlocal killed
        with mock.patch.object(round_runner, "RoundTask", KillsItsExecutor):
            ts.mirror(spark, node.url, table, once=True).awaitTermination()
        if (directory / "killed").exists():
            killed += 1
            (directory / "killed").unlink()

    for number in range(160):
        node.set(f"k{number}", {"v": number})
    once()
    assert_equal(spark, node, table)
    for number in range(0, 160, 2):
        node.set(f"k{number}", {"lost": number})
    once()
    for vbucket in range(node.vbuckets):
        node.rewind(vbucket, node.high_seqno(vbucket) - 3)
    for number in range(3, 160, 8):
        node.delete(f"k{number}")
    once()
    assert_equal(spark, node, table)
    return killed


def main(directory: str) -> None:
    spark = ts.session("an executor is killed")
    with tailrace.testing.node(vbuckets=8) as node:
        killed = run(spark, node, Path(directory))
    print("killed" if killed == 3 else f"{killed} of 3")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
