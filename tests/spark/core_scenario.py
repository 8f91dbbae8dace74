"""What every kind of Spark must do: mirror, roll back, verify.

As a job for spark-submit: ``core_scenario.py DIR``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tailrace.spark as ts
import tailrace.testing
from spark.naive import bucket_state, table_state
from tailrace.table.opening import open_table


def run(spark: Any, node: Any, directory: Path) -> None:
    """Documents, overwrites and deletes, a divergent branch, and a comparison each time."""
    table = str(directory / "table")

    def once() -> None:
        ts.mirror(spark, node.url, table, once=True).awaitTermination()

    for number in range(160):
        node.set(f"k{number}", {"v": number})
    once()
    assert_equal(spark, node, table)
    marks = {vbucket: node.high_seqno(vbucket) for vbucket in range(node.vbuckets)}
    for number in range(0, 160, 2):
        node.set(f"k{number}", {"lost": number})
    for number in range(1, 160, 4):
        node.delete(f"k{number}")
    once()
    assert_equal(spark, node, table)
    for vbucket, seqno in marks.items():
        node.rewind(vbucket, seqno)
    for number in range(3, 160, 8):  # a divergent branch with equal seqnos
        node.set(f"k{number}", {"other": number})
    assert not ts.verify(spark, node.url, table).equal
    once()
    assert_equal(spark, node, table)
    # no vbucket started over: the table's own history was the way back
    resets = [seqno for version in open_table(table).versions() for seqno in version.resets.values()]
    assert resets and all(resets)


def assert_equal(spark: Any, node: Any, table: str) -> None:
    """`verify` and the naive reader agree, and nothing differs."""
    verdict = ts.verify(spark, node.url, table)
    naive_bucket, naive_table = bucket_state("127.0.0.1", node.port), table_state(table)
    assert verdict.equal == (naive_bucket == naive_table), "verify and the naive reader disagree"
    assert naive_table == naive_bucket
    assert (verdict.documents, verdict.rows, verdict.behind) == (len(naive_bucket), len(naive_table), 0)


def main(directory: str) -> None:
    spark = ts.session("tailrace on a cluster")
    with tailrace.testing.node(vbuckets=8) as node:
        run(spark, node, Path(directory))
    executors = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    print(len(executors) - 1)  # the driver is counted too
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
