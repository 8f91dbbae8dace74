"""The mirror against a real node and a real Spark, each time compared by `verify` and by a naive reader."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import tailrace.spark as ts
import tailrace.testing
from spark.core_scenario import assert_equal
from spark.core_scenario import run as run_core_scenario
from spark.naive import bucket_state, table_state
from tailrace.spark.api import repair
from tailrace.spark.table import MirrorTable

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

_PATIENCE_S = 120.0


@pytest.fixture
def node() -> Any:
    with tailrace.testing.node(vbuckets=8) as running:
        yield running


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def once(spark: Any, node: Any, table: str, **more: Any) -> None:
    ts.mirror(spark, node.url, table, once=True, **more).awaitTermination()


def fill(node: Any, count: int, step: int = 1, what: str = "v") -> None:
    for number in range(0, count, step):
        node.set(f"k{number}", {what: number})


def wait_until_equal(query: Any, node: Any, table: str) -> None:
    """Where a query that runs on comes to. Spark's own `processAllAvailable` is done as soon as there is
    nothing to do, which is also so before anything has been received.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while table_state(table) != bucket_state("127.0.0.1", node.port):
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline, f"the mirror does not come to its end: {query.lastProgress}"
        time.sleep(0.1)


def test_documents_overwrites_and_deletes_arrive(spark: Any, node: Any, table: str) -> None:
    fill(node, 200)
    once(spark, node, table)
    assert_equal(spark, node, table)
    fill(node, 200, 3, "w")
    for number in range(0, 200, 7):
        node.delete(f"k{number}")
    node.set(b"\xff\xfe", {"binary": "key"})
    once(spark, node, table)
    assert_equal(spark, node, table)


def test_the_core_scenario(spark: Any, node: Any, tmp_path: Path) -> None:
    run_core_scenario(spark, node, tmp_path)


def test_a_rollback_below_everything_starts_over_and_replaces(spark: Any, node: Any, table: str) -> None:
    fill(node, 80)
    once(spark, node, table)
    for vbucket in range(8):
        node.rewind(vbucket, 3)
    fill(node, 20, 1, "new")
    once(spark, node, table)
    assert_equal(spark, node, table)


def test_snapshots_larger_than_a_batch_are_published_whole(spark: Any, node: Any, table: str) -> None:
    for number in range(400):
        node.set(f"k{number}", {"n": number}, vbucket=1)
    seen: list[int] = []
    once(
        spark,
        node,
        table,
        options={"maxOffsetsPerTrigger": "90"},
        on_applied=lambda _: seen.append(len(table_state(table))),
    )
    assert len(seen) > 3
    assert set(seen) == {0, 400}, "a part of a snapshot was published"
    assert_equal(spark, node, table)


def test_a_flush_empties_the_table(spark: Any, node: Any, table: str) -> None:
    fill(node, 50)
    once(spark, node, table)
    node.flush()
    node.set("only", {"n": 1})
    once(spark, node, table)
    assert_equal(spark, node, table)


def test_a_purge_behind_the_mirror(spark: Any, node: Any, table: str) -> None:
    fill(node, 64)
    once(spark, node, table)
    for number in range(0, 64, 2):
        node.delete(f"k{number}")
    node.compact(drop_tombstones=True)
    once(spark, node, table)
    assert_equal(spark, node, table)


def test_verify_names_what_differs_and_repairs_it(spark: Any, node: Any, table: str) -> None:
    fill(node, 40)
    once(spark, node, table)
    held = MirrorTable.open(table)
    held.claim("somebody")
    lost = held.files()[0]
    held.commit([], [lost.path], held.current.positions)
    verdict = ts.verify(spark, node.url, table)
    assert not verdict.equal
    assert {one.kind for one in verdict.differences} == {"missing"}
    assert all(lost.first_vbucket <= one.vbucket <= lost.last_vbucket for one in verdict.differences)
    repair(spark, node.url, table, {one.vbucket for one in verdict.differences})
    assert_equal(spark, node, table)


def test_two_mirrors_on_one_table_and_one_is_fenced(spark: Any, node: Any, table: str) -> None:
    fill(node, 20)
    first = ts.mirror(spark, node.url, table)
    wait_until_equal(first, node, table)
    second = ts.mirror(spark, node.url, table)
    fill(node, 20, 1, "w")
    wait_until_equal(second, node, table)
    with pytest.raises(Exception, match="taken over by another mirror"):
        first.awaitTermination(_PATIENCE_S)  # type: ignore[arg-type]
    assert second.isActive
    second.stop()
    assert_equal(spark, node, table)


def test_a_table_of_another_bucket_is_refused(spark: Any, node: Any, table: str) -> None:
    fill(node, 5)
    once(spark, node, table)
    with (
        tailrace.testing.node(vbuckets=4) as other,
        pytest.raises(Exception, match="choose another path"),
    ):
        once(spark, other, table)


def test_kept_deletes_are_rows_that_say_so(spark: Any, node: Any, table: str) -> None:
    fill(node, 10)
    once(spark, node, table, keep_deletes=True)
    node.delete("k3")
    once(spark, node, table, keep_deletes=True)
    rows = spark.read.parquet(*(f"{table}/{file.path}" for file in MirrorTable.open(table).files()))
    assert rows.where("deleted").collect()[0].key == "k3"
    assert rows.where("not deleted").count() == 9
    assert ts.verify(spark, node.url, table).equal
