"""What every session must do, however it was made. A program: Spark has one kind of session per process.

``every_way.py DIR [sc://HOST:PORT]``: mirror, rollback and `verify` (`core_scenario`), `ts.table`, a typed
table, the source as a batch and as a stream, the change log, the handle. Its last line is Spark's version.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyspark

import tailrace.spark as ts
import tailrace.testing
from spark import core_scenario
from spark.too_slow import PATIENT, PYTHON_WAS_TOO_SLOW, STARTS
from tailrace.errors import UsageError
from tailrace.spark.rounds.jobs import SparkJobs

HAS_STREAMS = tuple(int(part) for part in pyspark.__version__.split(".")[:2]) >= (4, 2)
PATIENCE_S = 240.0


def tell_progress(spark: Any) -> None:
    """The caller of a job is told of each piece that is done."""
    jobs, done = SparkJobs(spark, "tailrace-progress"), set[int]()
    answers = jobs.run(abs, [-5, -6, -7, -8, -9], "five numbers", done.add)
    assert sorted(answers) == [5, 6, 7, 8, 9] and done == set(range(5)), (answers, done)
    assert not jobs.is_waiting()


def run(spark: Any, node: Any, directory: Path) -> None:
    tell_progress(spark)
    core_scenario.run(spark, node, directory)
    table = str(directory / "table")
    live = ts.table(spark, table)
    assert live.count() == 160
    assert live.where("vbucket = 3").select("key", "seqno").count() == len(
        [row for row in live.collect() if row.vbucket == 3]
    )
    assert ts.table(spark, table, version=2).count() == 160
    a_typed_table(spark, node, directory)
    source_reads(spark, node)
    a_stream(spark, node, directory)
    a_running_mirror(spark, node, directory)


def a_typed_table(spark: Any, node: Any, directory: Path) -> None:
    table = directory / "typed"
    ts.mirror(spark, node.url, table, schema="infer", once=True, on_schema=print).awaitTermination()
    assert {"v", "other", "_rescued"} <= set(ts.table(spark, table).columns)
    assert ts.table(spark, table).where("_rescued is not null").count() == 0
    some = ts.table(spark, table, columns=["key", "v"], filter=[("vbucket", "=", 3)])
    assert some.columns == ["key", "v"]
    assert some.count() == ts.table(spark, table).where("vbucket = 3").count() > 0
    assert ts.verify(spark, node.url, table).equal


def source_reads(spark: Any, node: Any) -> None:
    ts.register(spark)
    changes = spark.read.format("tailrace").option("connectionString", node.url).load()
    assert {row.op: row["count"] for row in changes.groupBy("op").count().collect()} == {"mutation": 160}
    typed = ts.typed(changes, "v INT, lost INT")
    assert (typed.count(), ts.rescued_count(typed)) == (160, 0)
    try:
        assert {"v", "other"} <= set(ts.infer_schema(changes).fieldNames())
    except UsageError as error:
        assert "needs Spark 4" in str(error) and not pyspark.__version__.startswith("4.3")


def a_stream(spark: Any, node: Any, directory: Path) -> None:
    def read() -> None:
        changes = spark.readStream.format("tailrace").option("connectionString", node.url)
        changes = changes.option("startingOffsets", "earliest").load()
        writing = changes.writeStream.format("parquet").option(
            "checkpointLocation", str(directory / "places")
        )
        writing.trigger(availableNow=True).start(str(directory / "rows")).awaitTermination()

    try:
        patiently(read)
    except Exception as error:
        if HAS_STREAMS:
            raise
        assert "readStream needs Spark 4.2 or newer" in str(error), error
    else:
        assert HAS_STREAMS
        assert spark.read.parquet(str(directory / "rows")).count() == 160


def patiently(work: Callable[[], None]) -> None:
    """Spark's ten seconds for a Python that starts may be too few on a busy machine."""
    for start in range(STARTS):
        try:
            work()
            return
        except Exception as error:
            if PYTHON_WAS_TOO_SLOW not in str(error) or start == STARTS - 1:
                raise


def a_running_mirror(spark: Any, node: Any, directory: Path) -> None:
    table, changes = str(directory / "table"), str(directory / "changes")
    run = ts.mirror(spark, node.url, table, changes=changes)
    node.set("late", {"v": 1})
    until(lambda: ts.table(spark, table).where("key = 'late'").count() == 1, run)
    assert run.isActive and run.lastProgress is not None
    run.stop()
    assert not run.isActive and run.exception() is None
    assert ts.live_changes(ts.table(spark, changes)).where("op = 'mutation'").count() == 161


def until(check: Callable[[], bool], handle: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert handle.isActive, handle.exception()
        assert time.monotonic() < deadline, handle
        time.sleep(0.2)


def main(directory: str, remote: str | None = None) -> None:
    if remote is not None:
        from pyspark.sql import SparkSession

        spark = SparkSession.builder.remote(remote).getOrCreate()
        assert "connect" in type(spark).__module__
    else:
        spark = ts.session(
            "every way",
            master="local[2,3]",
            **{"spark.ui.enabled": "false", "spark.log.level": "ERROR", **PATIENT},
        )
    with tailrace.testing.node(vbuckets=8) as node:
        run(spark, node, Path(directory))
    print(spark.version)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
