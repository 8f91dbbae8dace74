"""`ts.table` and `tailrace.read_table`: live rows at any version and position, for any name of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import tailrace
import tailrace.spark as ts
from table.test_table_model import VBUCKETS, Model, World
from tailrace.errors import UsageError
from tailrace.model import Position
from tailrace.table.contract import Commit
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.rows import TABLE_SCHEMA

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


class PositionedWorld(World):
    """Every commit of a round has the position of the vbuckets that it changed."""

    def __init__(self, folder: Path, seed: int, table: DeltaMirrorTable) -> None:
        super().__init__(folder, seed, table)
        self.positions: dict[int, dict[int, int]] = {}

    def commit(self, commit: Commit) -> None:
        moved = {vbucket: Position.at(1, self.seqno) for vbucket in range(VBUCKETS)}
        super().commit(Commit(commit.operation, moved, commit.added, commit.removed, commit.masked))
        self.positions[self.table.version] = dict.fromkeys(range(VBUCKETS), self.seqno)


@pytest.fixture(scope="module", params=["plain", "a #b? [c]{d,e}* ü%41"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PositionedWorld:
    folder = tmp_path_factory.mktemp("live") / request.param
    table = DeltaMirrorTable.open_or_create(folder, schema=TABLE_SCHEMA, source={"bucket": "b"})
    table.claim()
    world = PositionedWorld(folder, 5, table)
    for _ in range(8):
        world.round()
    world.folder = folder  # type: ignore[attr-defined]
    return world


def as_model(rows: Any) -> Model:
    model = {(row["vbucket"], row["key"]): (row["seqno"], row["value"]) for row in rows}
    assert len(model) == len(rows)
    return model


def test_the_newest_rows(spark: Any, world: Any) -> None:
    frame = ts.table(spark, world.folder)
    assert as_model([row.asDict() for row in frame.collect()]) == world.documents
    assert as_model(tailrace.read_table(world.folder).to_arrow().to_pylist()) == world.documents
    assert frame.count() == tailrace.read_table(world.folder).count() == len(world.documents)


def test_an_earlier_version(spark: Any, world: Any) -> None:
    version = sorted(world.positions)[3]
    frame = ts.table(spark, str(world.folder), version=version)
    assert as_model([row.asDict() for row in frame.collect()]) == world.history[version]
    rows = tailrace.read_table(world.folder, version=version).to_polars().to_dicts()
    assert as_model(rows) == world.history[version]


def test_each_vbucket_at_its_own_position(spark: Any, world: Any) -> None:
    early, late = sorted(world.positions)[2], sorted(world.positions)[5]
    at = {
        vbucket: world.positions[early][vbucket] if vbucket % 2 else world.positions[late][vbucket] + 1
        for vbucket in range(VBUCKETS)
    }
    at[0] = 0
    expected = {
        document: row
        for version, odd in ((early, 1), (late, 0))
        for document, row in world.history[version].items()
        if document[0] % 2 == odd and document[0]
    }
    frame = ts.table(spark, world.folder, at=at)
    assert as_model([row.asDict() for row in frame.collect()]) == expected
    assert as_model(tailrace.read_table(world.folder, at=at).to_arrow().to_pylist()) == expected


def test_a_position_that_no_version_has(world: Any) -> None:
    first = sorted(world.positions)[0]
    with pytest.raises(UsageError, match=r"can't show vbucket 3 at seqno .* the oldest that is kept has"):
        tailrace.read_table(world.folder, at={3: world.positions[first][3] - 1 or 1}).to_arrow()


def test_a_position_is_a_position_or_a_seqno(world: Any) -> None:
    newest = max(world.positions)
    at: Any = {np.int32(vbucket): np.int64(world.positions[newest][vbucket]) for vbucket in range(VBUCKETS)}
    assert as_model(tailrace.read_table(world.folder, at=at).to_arrow().to_pylist()) == world.documents
    wrong: Any
    for wrong in (5, [3], {"3": 5}, {3: "5"}):
        with pytest.raises(UsageError, match="at is a mapping of vbucket to Position or seqno"):
            tailrace.read_table(world.folder, at=wrong)


def test_rows_as_a_stream(world: Any) -> None:
    rows = tailrace.read_table(world.folder)
    assert as_model(rows.reader().read_all().to_pylist()) == world.documents


@pytest.mark.parametrize(
    "where", [[("nme", "=", 3)], [("vbucket", "~", 3)], [("vbucket",)], pc.field("nme") == 3, ["vbucket=3"]]
)
def test_a_filter_that_can_not_be_applied(world: Any, where: Any) -> None:
    with pytest.raises(UsageError, match="is no filter of this table"):
        tailrace.read_table(world.folder, filter=where)


def test_columns_and_filters_reach_the_files(spark: Any, world: Any) -> None:
    expected = {key for (vbucket, key), _ in world.documents.items() if vbucket == 3}
    frame = ts.table(spark, world.folder).where("vbucket = 3").select("key")
    assert {row.key for row in frame.collect()} == expected
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "EqualTo(vbucket,3)" in plan
    assert "value" not in plan.partition("ReadSchema")[2].partition("\n")[0]
    for where in ([("vbucket", "=", 3)], pc.field("vbucket") == 3):
        rows = tailrace.read_table(world.folder, columns=["key"], filter=where).to_arrow()
        assert rows.column_names == ["key"]
        assert set(rows["key"].to_pylist()) == expected


def test_a_column_that_is_not_there(world: Any) -> None:
    with pytest.raises(UsageError, match="has no column 'nme'; it has key"):
        tailrace.read_table(world.folder, columns=["nme"])
