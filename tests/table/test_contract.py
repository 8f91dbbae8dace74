"""The contract of a table, kept by every format that there is; and the types that join the parts of a table.

`FORMATS` has the formats: a new one is added there, and must pass all of this.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from pyroaring import BitMap

from table.independent import SCHEMA, SOURCE, NaiveMirror, own_rows, vbucket_of
from table.memory_table import MemoryTable
from tailrace.model import Position
from tailrace.table.contract import Commit, DataFile, Fenced, NewFile, Table, TaskResult, Vector
from tailrace.table.opening import open_or_create

FORMATS: dict[str, Callable[[Path], Table]] = {
    "delta": lambda folder: open_or_create(folder, schema=SCHEMA, source=SOURCE),
    "memory": lambda folder: MemoryTable(folder, SCHEMA),
}
KEYS = [f"key::{number}" for number in range(60)]

FILE = DataFile(
    "tier0-1.parquet", 100, 10, "tier0", 5, (1 << 64) - 1, 4, '{"numRecords":10}', 1_700_000_000_000
)


def test_a_result_goes_to_the_driver_and_arrives_whole() -> None:
    masked = BitMap([1, 70_000]).serialize()
    other = DataFile("größe #1.parquet", 1, 1, "base", 0, 1, None, "{}", 1, Vector("u", "x", 1, 2, 3), 4)
    result = TaskResult(
        (NewFile(FILE, BitMap([3]).serialize()), NewFile(other)), {"a b.parquet": masked, "c": b""}, 5, 6, 7
    )
    for again in (TaskResult.from_bytes(result.to_bytes()), pickle.loads(pickle.dumps(result))):
        assert again == result
        assert BitMap.deserialize(again.masked["a b.parquet"]) == BitMap([1, 70_000])
    assert TaskResult.from_bytes(TaskResult().to_bytes()) == TaskResult()


def test_live_rows() -> None:
    assert FILE.live_rows == 10
    assert DataFile("a", 1, 10, "base", 0, 1, None, "{}", 1, Vector("i", "", None, 2, 3)).live_rows == 7


@pytest.fixture(params=FORMATS)
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    table = FORMATS[request.param](tmp_path / "t")
    table.claim("run")
    return table


def test_rows_and_positions_of_every_version(table: Table) -> None:
    assert (table.source, table.schema, len(table.secret)) == (SOURCE, SCHEMA, 16)
    mirror = NaiveMirror(table)
    mirror.change(KEYS)
    mirror.change(KEYS[::3], deleted=KEYS[1::10])
    mirror.change(KEYS[:1], value="last")
    assert table.version == table.current.version == max(mirror.states)
    assert table.current.positions == {vb: Position.at(1000 + vb, n) for vb, n in mirror.seqnos.items()}
    for version, rows in mirror.states.items():
        assert own_rows(table, version) == rows
        assert table.schema_of(version) == SCHEMA
    assert [version.version for version in table.versions()][:4] == sorted(mirror.states, reverse=True)


def test_a_mask_is_a_copy(table: Table) -> None:
    mirror = NaiveMirror(table)
    mirror.change(KEYS)
    mirror.change(KEYS[:5])
    (masked,) = [file for file in table.files() if file.vector is not None]
    table.mask(masked).clear()
    assert len(table.mask(masked)) == 5
    assert masked.live_rows == len(KEYS) - 5


def test_a_commit_that_sets_a_vbucket_back(table: Table) -> None:
    """Exact masks, files that come back, positions and resets; other vbuckets stay where they are."""
    mirror = NaiveMirror(table)
    first = mirror.change(KEYS)
    (file,) = table.files()
    moved = [key for key in KEYS if vbucket_of(key) == 3]
    mirror.change(moved)
    (newer,) = [added for added in table.files() if added.path != file.path]
    then = {version.version: version for version in table.versions()}[first].position(3)
    vectors = {file.path: BitMap(), newer.path: BitMap(range(len(moved)))}
    table.commit(
        Commit("TAILRACE ROLLBACK", {3: then}, vectors=vectors, resets={3: then.seqno}, data_change=True)
    )
    assert own_rows(table) == mirror.states[first]
    assert table.current.position(3) == then
    assert table.current.resets == {3: then.seqno}
    assert first in [version for version, _ in table.lineage(3)]
    assert all(at.seqno <= then.seqno for _, at in table.lineage(3))
    other = next(vbucket for vbucket in mirror.seqnos if vbucket != 3)
    assert table.current.position(other).seqno == mirror.seqnos[other]


def test_files_that_a_compaction_takes_away_can_come_back(table: Table) -> None:
    mirror = NaiveMirror(table)
    first = mirror.change(KEYS)
    (file,) = table.files()
    table.commit(Commit("TAILRACE COMPACT", removed=[file.path], data_change=False))
    assert own_rows(table) == {}
    assert own_rows(table, first) == mirror.rows
    table.commit(Commit("TAILRACE ROLLBACK", readded=[file], vectors={file.path: BitMap([0])}))
    assert own_rows(table) == {key: row for key, row in mirror.rows.items() if key != KEYS[0]}


def test_what_maintenance_keeps(table: Table) -> None:
    mirror = NaiveMirror(table)
    mirror.change(KEYS)
    mirror.change(KEYS[:9])
    table.maintain(force=True)
    table.refresh()
    assert own_rows(table) == mirror.rows
    assert table.current.positions


@pytest.mark.parametrize("name", FORMATS)
def test_a_claim_beside_a_table_that_is_another_s_by_now(name: str, tmp_path: Path) -> None:
    first = FORMATS["delta"](tmp_path / "first")
    first.claim("ours")
    second = FORMATS[name](tmp_path / "second")
    second.claim("ours", and_still=[first])
    FORMATS["delta"](tmp_path / "first").claim("theirs")
    with pytest.raises(Fenced, match="taken over by another mirror"):
        second.claim("ours again", and_still=[first])
