"""The mirror against a real node and a real Spark, each time compared by `verify` and by a naive reader."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

import tailrace.spark as ts
import tailrace.testing
from spark.core_scenario import assert_equal
from spark.core_scenario import run as run_core_scenario
from spark.naive import bucket_state, table_state
from tailrace.spark.api import repair
from tailrace.table.contract import Commit
from tailrace.table.opening import open_table

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
    """Wait until a running mirror's table equals the bucket."""
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


def test_verify_names_what_differs_and_repairs_it(spark: Any, node: Any, table: str) -> None:
    fill(node, 40)
    once(spark, node, table)
    held = open_table(table)
    held.claim("somebody")
    lost = held.files()[0]
    held.commit(Commit("TAILRACE ROUND", removed=[lost.path]))
    verdict = ts.verify(spark, node.url, table)
    assert not verdict.equal
    assert {difference.kind for difference in verdict.differences} == {"missing"}
    assert len(verdict.differences) == lost.rows
    repair(spark, node.url, table, {difference.vbucket for difference in verdict.differences})
    assert_equal(spark, node, table)


def test_two_mirrors_on_one_table_and_one_is_fenced(spark: Any, node: Any, table: str) -> None:
    fill(node, 20)
    first = ts.mirror(spark, node.url, table)
    wait_until_equal(first, node, table)
    second = ts.mirror(spark, node.url, table)
    fill(node, 20, 1, "w")
    wait_until_equal(second, node, table)
    with pytest.raises(Exception, match="taken over by another mirror"):
        first.awaitTermination(_PATIENCE_S)
    assert second.isActive and not first.isActive
    assert "taken over" in str(first.exception())
    assert second.lastProgress is not None and second.lastProgress["changes"] and second.status["message"]
    assert second.recentProgress[-1] == second.lastProgress
    second.stop()
    assert not second.isActive and second.exception() is None
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
    rows = QueryBuilder().register("kept", DeltaTable(table)).execute("select key, deleted from kept")
    kept = {row["key"]: row["deleted"] for row in pa.table(rows.read_all()).to_pylist()}
    assert kept == {f"k{number}": number == 3 for number in range(10)}
    assert ts.verify(spark, node.url, table).equal
