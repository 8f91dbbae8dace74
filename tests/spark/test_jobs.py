"""Jobs on Spark: who runs them, and what they leave behind in the thread that asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tailrace.spark as ts
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.jobs import SparkJobs
from tailrace.spark.rounds.setup import build_mirror

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

_PROPERTIES = ("spark.jobGroup.id", "spark.job.description")


def test_every_piece_is_told_and_the_thread_keeps_its_own_names(spark: Any) -> None:
    """`ts.verify` runs in a notebook's thread, whose other jobs are not ours."""
    context = spark.sparkContext
    context.setJobGroup("mine", "my own job")
    context.addJobTag("mine-too")
    try:
        jobs = SparkJobs(spark, "tailrace-test")
        for _ in range(2):
            done: set[int] = set()
            assert sorted(jobs.run(abs, list(range(-9, -4)), "five numbers", done.add)) == [5, 6, 7, 8, 9]
            assert done == set(range(5))
        assert [context.getLocalProperty(name) for name in _PROPERTIES] == ["mine", "my own job"]
        assert set(context.getJobTags()) == {"mine-too"}
        (told,) = {
            context.statusTracker().getJobInfo(job).status
            for job in context.statusTracker().getJobIdsForGroup("tailrace-test-1")
        }
        assert told == "SUCCEEDED", "on Spark's pages it has a name"
        assert not jobs.is_waiting()
    finally:
        context.clearJobTags()
        for name in _PROPERTIES:
            context.setLocalProperty(name, None)


def descriptions(context: Any) -> set[str]:
    """The names of past jobs on Spark's pages."""
    jobs = context._jsc.sc().statusStore().jobsList(None)
    told = (jobs.apply(number).description() for number in range(jobs.size()))
    return {each.get() for each in told if each.isDefined()}


def test_the_jobs_of_a_mirror_say_what_they_are(spark: Any, tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(24):  # enough small files for a compaction; without Spark they are made faster
            node.set(f"k{number}", {"n": number})
            made = build_mirror(
                LocalJobs(), node.url, table, once=True, maintenance=False, in_background=False
            )
            made.prepare()
            made.run()
        for number in range(30):
            node.set(f"late{number}", {"n": number})
        ts.mirror(spark, node.url, table, once=True).awaitTermination()
        assert ts.verify(spark, node.url, table).equal
    close_idle_sources()
    told = descriptions(spark.sparkContext)
    assert "tailrace mirror of default: round 0, 30 changes" in told
    assert any(text.startswith("tailrace mirror: compaction of ") for text in told), told
    assert f"tailrace verify: {table}" in told


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_jobs_that_nobody_runs_are_known(spark: Any, tmp_path: Path) -> None:
    """As on a cluster whose executors are all busy, or that has none."""

    def touch_and_wait(piece: tuple[str, str]) -> None:  # travels as it is: workers don't know this module
        from pathlib import Path
        from time import sleep

        mark, end = map(Path, piece)
        mark.touch()
        while not end.exists():
            sleep(0.02)

    places = spark.sparkContext.defaultParallelism
    end = tmp_path / "end"
    marks = [tmp_path / f"mark-{number}" for number in range(places)]
    busy, late = SparkJobs(spark, "tailrace-busy"), SparkJobs(spark, "tailrace-late")
    first = threading.Thread(
        target=busy.run, args=(touch_and_wait, [(str(mark), str(end)) for mark in marks], "all places")
    )
    second = threading.Thread(target=late.run, args=(abs, [-1, -2], "no place"))
    first.start()
    try:
        until(lambda: all(mark.exists() for mark in marks))
        until(lambda: not busy.is_waiting())
        second.start()
        until(late.is_waiting)
        assert not busy.is_waiting()
    finally:
        end.touch()
        first.join()
        if second.ident is not None:
            second.join()
    assert not late.is_waiting()
