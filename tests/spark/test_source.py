"""The Spark source against a real node: batch and streaming reads, offsets, limits, rollbacks, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from tailrace.columns import SCHEMA
from tailrace.spark.source.data_source import DDL

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

Node = Any


@pytest.fixture
def node() -> Any:
    with tailrace.testing.node(vbuckets=8) as running:
        yield running


def read(spark: Any, node: Node, **options: str) -> Any:
    return spark.read.format("tailrace").option("connectionString", node.url).options(**options).load()


def fill(node: Node, count: int, prefix: str = "k") -> None:
    for number in range(count):
        node.set(f"{prefix}{number}", {"n": number})


def test_the_columns_are_those_of_the_decoder(spark: Any) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    assert to_arrow_schema(StructType.fromDDL(DDL), timezone="UTC") == SCHEMA  # type: ignore[arg-type]


def test_a_batch_read_gives_every_change(spark: Any, node: Node) -> None:
    fill(node, 300)
    node.delete("k7")
    rows = read(spark, node).collect()
    assert {row.op for row in rows} == {"mutation", "deletion"}
    newest = {bytes(row.key): row for row in sorted(rows, key=lambda row: row.seqno)}
    assert len(newest) == 300
    assert newest[b"k7"].op == "deletion"
    fifth = newest[b"k5"]
    assert json.loads(bytes(fifth.value)) == {"n": 5}
    assert (fifth.bucket, fifth.scope, fifth.collection, fifth.datatype, fifth.rev) == (
        "default", "_default", "_default", "json", 1,
    )  # fmt: skip
    assert fifth.vb_uuid == node.failover_log(fifth.vbucket)[0][0]


def test_a_batch_between_offsets(spark: Any, node: Node) -> None:
    fill(node, 100)
    middle = {
        str(vbucket): {
            "vb_uuid": str(node.failover_log(vbucket)[0][0]),
            "seqno": node.high_seqno(vbucket),
            "snapshot": [node.high_seqno(vbucket)] * 2,
        }
        for vbucket in range(8)
    }
    fill(node, 40, "later")
    later = read(spark, node, startingOffsets=json.dumps(middle))
    assert later.count() == 40
    assert read(spark, node, endingOffsets=json.dumps(middle)).where("key like 'k%'").count() == 100
    assert read(spark, node, vbuckets="0-3").select("vbucket").distinct().count() == 4


class Sink:
    """Collects micro-batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def __call__(self, frame: Any, _batch: int) -> None:
        self.batches.append(frame.collect())

    @property
    def rows(self) -> list[Any]:
        return [row for batch in self.batches for row in batch]


def run_once(
    spark: Any, node: Node, checkpoint: Path, sink: Callable[[Any, int], None], **options: str
) -> Any:
    query = (
        spark.readStream.format("tailrace")
        .option("connectionString", node.url)
        .options(**{"startingOffsets": "earliest", **options})
        .load()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


def test_a_stream_resumes_from_its_checkpoint_and_respects_its_limit(
    spark: Any, node: Node, tmp_path: Path
) -> None:
    fill(node, 500)
    first = Sink()
    query = run_once(spark, node, tmp_path, first, maxOffsetsPerTrigger="120")
    assert len(first.rows) == 500
    assert max(len(batch) for batch in first.batches) <= 120
    end = json.loads(query.lastProgress["sources"][0]["endOffset"])
    assert {int(v): end[v]["seqno"] for v in end} == {v: node.high_seqno(v) for v in range(8)}
    fill(node, 60, "more")
    second = Sink()
    run_once(spark, node, tmp_path, second)
    assert {bytes(row.key)[:4] for row in second.rows} == {b"more"}
    assert len(second.rows) == 60
    # what the stream reports may be given as it is
    assert read(spark, node, startingOffsets=json.dumps(end)).count() == 60


def test_a_rollback_is_a_row_before_the_first_of_the_new_branch(
    spark: Any, node: Node, tmp_path: Path
) -> None:
    for number in range(30):
        node.set(f"k{number}", {"n": number}, vbucket=3)
    run_once(spark, node, tmp_path, Sink())
    node.rewind(3, 20)
    node.set("other", {"n": 1}, vbucket=3)
    after = Sink()
    run_once(spark, node, tmp_path, after)
    ours = [row for row in after.rows if row.vbucket == 3]
    assert ours[0].op == "rollback"
    assert ours[0].seqno <= 20
    assert [bytes(row.key) for row in ours if row.op == "mutation"][-1] == b"other"
    assert ours[-1].vb_uuid == node.failover_log(3)[0][0]


def test_a_query_can_fail_on_a_rollback(spark: Any, node: Node, tmp_path: Path) -> None:
    for number in range(30):
        node.set(f"k{number}", {"n": number}, vbucket=3)
    run_once(spark, node, tmp_path, Sink())
    node.rewind(3, 20)
    with pytest.raises(Exception, match="took changes back"):
        run_once(spark, node, tmp_path, Sink(), onRollback="fail")
