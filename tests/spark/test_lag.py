"""How far a query is behind, and how that is reported."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import functions as sf

import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.model import Position
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.source.lag import Lag, LagListener, lag_by_vbucket
from tailrace.spark.source.offsets import to_offset


def offset(**seqnos: int) -> str:
    return json.dumps(to_offset({int(name[1:]): Position.at(7, seqno) for name, seqno in seqnos.items()}))


def test_the_lag_is_what_lies_between_two_offsets() -> None:
    assert lag_by_vbucket(offset(v0=5, v1=9), offset(v0=12, v1=9, v2=4)) == {0: 7, 1: 0, 2: 4}
    assert lag_by_vbucket(offset(v0=12), offset(v0=5)) == {0: 0}, "the bucket went back"
    assert lag_by_vbucket(None, None) == lag_by_vbucket("null", "null") == {}


def test_the_time_that_is_left() -> None:
    def lag(changes: int, rate: float) -> Lag:
        return Lag("q", 1, 10, rate, {0: changes}, {})

    assert (lag(100, 50.0).eta_s, lag(0, 0.0).eta_s, lag(3, 0.0).eta_s) == (2.0, 0.0, None)


def test_a_mirror_tells_a_listener_the_same_figures(tmp_path: Path) -> None:
    """A mirror is not a streaming query, so Spark's listeners never hear of it."""
    heard: list[Lag] = []
    listener = LagListener(heard.append)
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"n": number}, vbucket=number % 4)
        options = {"maxOffsetsPerTrigger": "8"}
        for _ in range(2):
            build_mirror(
                LocalJobs(),
                node.url,
                tmp_path / "t",
                once=True,
                options=options,
                on_progress=listener.of_mirror("people"),
            ).start().awaitTermination()
            node.rewind(vbucket=1, to_seqno=2)
    assert [lag.query for lag in heard] == ["people"] * len(heard) and len(heard) > 2
    assert sum(lag.rows for lag in heard) >= 20 and heard[0].changes > 0
    last = heard[-1]
    assert (last.changes, set(last.by_vbucket)) == (0, {0, 1, 2, 3})
    assert last.observed["rolled_back"] == [1] and last.observed["went_back"] == {"1": [5, 0]}
    assert last.lag_s is not None and listener.lags == {"people": last}


class _Time:
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_how_long_a_query_has_been_behind() -> None:
    time, heard = _Time(), list[Lag]()
    listener = LagListener(heard.append, clock=time)  # type: ignore[arg-type]

    def report(now: float, end: str, latest: str) -> float | None:
        time.now = now
        source = SimpleNamespace(endOffset=end, latestOffset=latest)
        progress = SimpleNamespace(
            name="q",
            id=1,
            runId="r",
            batchId=1,
            numInputRows=1,
            processedRowsPerSecond=1.0,
            observedMetrics={},
            sources=[source],
        )
        listener.onQueryProgress(SimpleNamespace(progress=progress))  # type: ignore[arg-type]
        return heard[-1].lag_s

    assert report(100.0, offset(v0=0), offset(v0=9)) == 0.0
    assert report(105.0, offset(v0=4), offset(v0=20)) == 5.0
    assert report(110.0, offset(v0=9), offset(v0=30)) == 10.0, "it has what the bucket had at 100"
    assert report(112.0, offset(v0=30), offset(v0=40)) == 2.0, "... and now what it had at 110"
    assert report(113.0, offset(v0=40), offset(v0=40)) == 0.0


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_a_listener_hears_of_every_batch_of_a_query(spark: Any, tmp_path: Path) -> None:
    heard: list[Lag] = []
    changed = threading.Condition()

    def hear(lag: Lag) -> None:
        with changed:
            heard.append(lag)
            changed.notify_all()

    def own() -> list[Lag]:
        """Our query's reports: a listener also gets late ones of queries that ended before it was added."""
        return [lag for lag in heard if lag.query == query.name]

    listener = LagListener(hear)
    spark.streams.addListener(listener)
    try:
        with tailrace.testing.node(vbuckets=4) as node:
            for number in range(30):
                node.set(f"k{number}", {"n": number})
            frame = (
                spark.readStream.format("tailrace")
                .option("connectionString", node.url)
                .option("startingOffsets", "earliest")
                .option("maxOffsetsPerTrigger", "10")
                .load()
            )
            query = (
                frame.observe("seen", sf.count(sf.lit(1)).alias("changes"))
                .writeStream.format("noop")
                .queryName("a query with a lag")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            with changed:
                is_told = changed.wait_for(lambda: sum(lag.observed["changes"] for lag in own()) >= 30, 60)
                assert is_told, heard
                seen = own()
    finally:
        spark.streams.removeListener(listener)
    assert len(seen) > 2
    assert seen[-1].changes == 0 < seen[0].changes
    assert set(seen[-1].by_vbucket) == {0, 1, 2, 3}
    assert seen[-1].lag_s == 0.0
