"""Something else changes a mirror's table: the mirror goes on correctly, or stops with one line."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyroaring import BitMap

from table.independent import SCHEMA, SOURCE, NaiveMirror, check_rows, own_rows, query_rows
from tailrace.clock import ManualClock
from tailrace.model import Position
from tailrace.rng import unique_name
from tailrace.table.contract import (
    FOREIGN,
    Commit,
    DataFile,
    ForeignRows,
    TableChanged,
    TableDamaged,
    UnknownFeature,
)
from tailrace.table.delta.log import DeltaLog, commit_path
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.file_reading import read_rows_at
from tailrace.table.hashing import KeyHash
from tailrace.table.index import open_index, row_numbers
from tailrace.table.merging import MergeSource, merge_files
from tailrace.table.rows import table_schema
from tailrace.table.store import TableStore

NOW_MS = 1_700_000_000_000


@pytest.fixture
def table(tmp_path: Path) -> DeltaMirrorTable:
    table = DeltaMirrorTable.open_or_create(tmp_path / "t", schema=SCHEMA, source=SOURCE, clock=ManualClock())
    table.claim("first")
    return table


@pytest.fixture
def mirror(table: DeltaMirrorTable) -> NaiveMirror:
    mirror = NaiveMirror(table)
    mirror.change([f"key::{number}" for number in range(40)])
    mirror.change([f"key::{number}" for number in range(10)], deleted=["key::20"])
    return mirror


def foreign_commit(table: DeltaMirrorTable, operation: str, actions: Sequence[Mapping[str, Any]]) -> int:
    """A commit as delta-spark makes it."""
    state = DeltaLog(table.store).load()
    assert state is not None
    info = {
        "timestamp": NOW_MS,
        "operation": operation,
        "engineInfo": "Apache-Spark/4.0 Delta-Lake/4.0",
    }
    lines = [{"commitInfo": info}, *actions]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    assert table.store.put_if_absent(commit_path(state.version + 1), text)
    return state.version + 1


def optimize(table: DeltaMirrorTable, *, data_change: bool = False, drop: str | None = None) -> int:
    """All live rows in one new file, without our tags and statistics."""
    other = DeltaMirrorTable.open(table.uri)
    rows = [row for row in own_rows(other).values() if row[0] != drop]
    content = pa.table([pa.array(column) for column in zip(*rows, strict=True)], names=SCHEMA.names).cast(
        SCHEMA
    )
    sink = io.BytesIO()
    pq.write_table(content, sink)
    path = f"part-00000-{unique_name()}-c000.snappy.parquet"
    table.store.put(path, sink.getvalue())
    state = DeltaLog(table.store).load()
    assert state is not None
    actions = [
        {"remove": add.removed(NOW_MS, data_change=data_change).to_json()} for add in state.files.values()
    ]
    new = {
        "path": path,
        "partitionValues": {},
        "size": len(sink.getvalue()),
        "modificationTime": NOW_MS,
        "dataChange": data_change,
    }
    return foreign_commit(table, "OPTIMIZE" if drop is None else "DELETE", [*actions, {"add": new}])


def test_optimize_is_taken_as_it_is(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    version = optimize(table)
    table.refresh()
    assert table.version == version
    (file,) = table.files()
    assert file.kind == FOREIGN and file.index_offset is None
    assert (file.low, file.high) == (0, (1 << 64) - 1)
    assert file.rows == len(mirror.rows)  # from the file itself: the log does not say
    check_rows(table, mirror.rows)
    keys = list(own_rows(table))
    table.commit(Commit("TAILRACE ROUND", masked={file.path: BitMap([keys.index("key::5")])}))
    expected = {key: row for key, row in mirror.rows.items() if key != "key::5"}
    check_rows(table, expected)
    table.checkpoint()
    check_rows(DeltaMirrorTable.open(table.uri), expected)


def test_optimize_in_between_computes_the_round_again(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    optimize(table)
    with pytest.raises(TableChanged, match="changed by somebody else"):
        table.commit(Commit("TAILRACE ROUND", positions={1: Position.at(1, 100)}))
    assert table.files()[0].kind == FOREIGN  # what the round is now computed from
    table.commit(Commit("TAILRACE ROUND", positions={1: Position.at(1, 100)}))
    check_rows(table, mirror.rows)


def test_a_note_in_the_log_changes_nothing(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    foreign_commit(table, "VACUUM START", [])
    foreign_commit(table, "VACUUM END", [])
    before = table.version
    table.commit(Commit("TAILRACE ROUND", positions={1: Position.at(1, 100)}))
    assert table.version == before + 3
    check_rows(table, mirror.rows)


def test_deleted_rows_stop_the_mirror(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    version = optimize(table, data_change=True, drop="key::7")
    says = rf"changed rows of the table at .* in version {version}: run 'tailrace verify --repair'"
    with pytest.raises(ForeignRows, match=says) as error:
        table.refresh()
    assert "\n" not in str(error.value)
    with pytest.raises(ForeignRows):
        table.commit(Commit("TAILRACE ROUND"))
    again = DeltaMirrorTable.open(table.uri)  # reading is possible
    with pytest.raises(ForeignRows):
        again.claim()
    repairing = DeltaMirrorTable.open(table.uri)
    repairing.claim("repair", accept_foreign=True)
    with pytest.raises(ForeignRows):  # the repair was killed half-way
        DeltaMirrorTable.open(table.uri).claim()
    repairing.claim("repair again", accept_foreign=True)
    repairing.commit(Commit("TAILRACE REPAIR", repaired=True))
    fine = DeltaMirrorTable.open(table.uri)
    fine.claim("fine")
    fine.commit(Commit("TAILRACE ROUND"))
    # no vbucket may return to what somebody else made of it
    wrong = set(range(version, fine.version - 2))
    for vbucket in range(8):
        assert not wrong & {known for known, _ in fine.lineage(vbucket)}
        assert [known for known, _ in fine.lineage(vbucket)]


def test_deleted_rows_behind_a_checkpoint(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    version = optimize(table, data_change=True, drop="key::7")
    foreign_commit(table, "SET TBLPROPERTIES", [])
    log = DeltaLog(table.store)
    state = log.load()
    assert state is not None
    log.write_checkpoint(state)
    with pytest.raises(ForeignRows, match=f"version {version}"):
        DeltaMirrorTable.open(table.uri).claim()


def test_a_checkpoint_of_another_writer(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    DeltaTable(table.uri).create_checkpoint()
    assert (Path(table.uri) / f"_delta_log/{table.version:020d}.checkpoint.parquet").exists()
    again = DeltaMirrorTable.open(table.uri)
    assert again.current == table.current
    assert again.files() == table.files()
    mirror.change(["key::1"])
    check_rows(table, mirror.rows)
    DeltaTable(table.uri).create_checkpoint()
    for version in range(table.version):
        table.store.delete([commit_path(version)])
    again = DeltaMirrorTable.open(table.uri)
    again.claim()
    check_rows(again, mirror.rows)
    assert dict(again.current.positions) == dict(table.current.positions)


def test_a_checkpoint_of_a_claim_that_has_just_been_made(
    table: DeltaMirrorTable, mirror: NaiveMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is valid, and not taken for one that is far out of date."""
    begun = table.version

    def at(place: str) -> None:
        if place == "table.after-commit" and table.version == begun:
            monkeypatch.undo()
            DeltaTable(table.uri).create_checkpoint()

    monkeypatch.setattr("tailrace.table.delta.log.crash_point", at)
    again = DeltaMirrorTable.open(table.uri)
    again.claim("second")
    again.commit(Commit("TAILRACE ROUND", positions={1: Position.at(1, 100)}))
    check_rows(again, mirror.rows)
    assert again.current.position(1).seqno == 100


def test_a_checkpoint_in_several_parts(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    table.checkpoint()
    folder = Path(table.uri) / "_delta_log"
    whole = folder / f"{table.version:020d}.checkpoint.parquet"
    rows = pq.read_table(whole)
    whole.unlink()
    parts = 3
    for part in range(parts):
        some = rows.take(list(range(part, rows.num_rows, parts)))
        pq.write_table(some, folder / f"{table.version:020d}.checkpoint.{part + 1:010d}.{parts:010d}.parquet")
    hint = {"version": table.version, "size": rows.num_rows, "parts": parts}
    (folder / "_last_checkpoint").write_text(json.dumps(hint))
    for version in range(table.version):
        table.store.delete([commit_path(version)])
    check_rows(DeltaMirrorTable.open(table.uri), mirror.rows)
    # without one of its parts it does not count
    (folder / f"{table.version:020d}.checkpoint.{2:010d}.{parts:010d}.parquet").unlink()
    with pytest.raises(TableDamaged, match="is missing"):
        DeltaMirrorTable.open(table.uri)


def test_a_vacuum_takes_nothing_that_is_needed(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    mirror.change([f"big::{number}" for number in range(3000)])
    mirror.change([f"big::{number}" for number in range(0, 3000, 2)])
    assert any(file.path.startswith("_dv/") for file in table.store.list())
    delta = DeltaTable(table.uri)
    doomed = delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True, full=True)
    live = {file.path for file in table.files()}
    assert not live & set(doomed)
    assert not [path for path in doomed if path.startswith("_dv/")]
    table.store.delete(doomed)
    check_rows(table, mirror.rows)


@pytest.mark.parametrize("which", ["data", "vector"])
def test_files_that_are_deleted_by_hand(table: DeltaMirrorTable, mirror: NaiveMirror, which: str) -> None:
    mirror.change([f"big::{number}" for number in range(3000)])
    mirror.change([f"big::{number}" for number in range(0, 3000, 2)])
    folder = "_dv" if which == "vector" else ""
    gone = next(
        file.path
        for file in table.store.list(folder)
        if file.path.endswith(".bin" if folder else ".parquet") and not file.path.startswith("_delta_log")
    )
    table.store.delete([gone])
    again = DeltaMirrorTable.open(table.uri)
    with pytest.raises(
        TableDamaged, match=f"the file {gone} of the table at .* is gone: .*restore it"
    ) as error:
        again.claim()
    assert "\n" not in str(error.value)
    if which == "vector":
        with pytest.raises(TableDamaged, match="is gone"):
            own_rows(again)


def test_settings_that_ask_too_much_of_a_writer(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    state = DeltaLog(table.store).load()
    assert state is not None and state.metadata is not None
    metadata = state.metadata.to_json()
    metadata["configuration"]["delta.enableChangeDataFeed"] = "true"
    foreign_commit(table, "SET TBLPROPERTIES", [{"metaData": metadata}])
    assert query_rows(table.uri) == mirror.rows
    again = DeltaMirrorTable.open(table.uri)
    with pytest.raises(UnknownFeature, match=r"delta\.enableChangeDataFeed.*set them back"):
        again.claim()
    metadata["configuration"]["delta.enableChangeDataFeed"] = "false"
    foreign_commit(table, "SET TBLPROPERTIES", [{"metaData": metadata}])
    again = DeltaMirrorTable.open(table.uri)
    again.claim()
    check_rows(again, mirror.rows)


def test_statistics_by_somebody_else(table: DeltaMirrorTable, mirror: NaiveMirror) -> None:
    """ANALYZE adds the same files again; their tags keep what they are to us."""
    before = table.files()
    state = DeltaLog(table.store).load()
    assert state is not None
    actions = []
    for add in state.files.values():
        fields = add.to_json()
        stats = json.loads(fields["stats"])
        stats["nullCount"]["value"] = 0
        actions.append({"add": {**fields, "stats": json.dumps(stats), "dataChange": False}})
    foreign_commit(table, "COMPUTE STATS", actions)
    table.refresh()
    assert [(file.path, file.kind, file.vector) for file in table.files()] == [
        (file.path, file.kind, file.vector) for file in before
    ]
    check_rows(table, mirror.rows)


def test_a_file_of_views_is_merged(tmp_path: Path) -> None:
    """Some writers keep Arrow's views in the file's schema, which hardly any compute function accepts."""
    schema = table_schema(keep_deletes=False)
    store = TableStore(tmp_path)
    key_hash = KeyHash(bytes(16))
    rows = [
        {"vbucket": number % 4, "key": f"k{number}", "value": "v", "seqno": number} for number in range(9)
    ]
    views = [
        field.with_type(pa.string_view()) if pa.types.is_string(field.type) else field for field in schema
    ]
    content = pa.Table.from_pylist(rows, schema=schema).cast(pa.schema(views))
    sink = io.BytesIO()
    pq.write_table(content, sink)
    assert pq.read_schema(io.BytesIO(sink.getvalue())).field("key").type == pa.string_view()
    store.put("theirs.parquet", sink.getvalue())
    theirs = DataFile("theirs.parquet", len(sink.getvalue()), 9, FOREIGN, 0, (1 << 64) - 1, None, "", 0)
    wanted = BitMap(range(0, 9, 2))
    (file,) = merge_files(store, [MergeSource(theirs, wanted.serialize())], schema, key_hash, kind="tier1")
    merged = pa.Table.from_batches(read_rows_at(store, file, np.ones(file.rows, np.bool_), schema))
    assert sorted(merged["key"].to_pylist()) == [f"k{number}" for number in wanted]
    assert open_index(store, file, key_hash).h1.tolist() == sorted(
        open_index(store, theirs, key_hash).at(row_numbers(wanted))[0].tolist()
    )


def test_a_version_whose_files_vanish_is_nothing_to_go_back_to(
    table: DeltaMirrorTable, mirror: NaiveMirror
) -> None:
    """Even if they were there at the last look."""
    vbucket = next(iter(mirror.seqnos))
    first = {file.path for file in table.files(mirror.change(["key::0"]))}
    masked = [f"key::{number}" for number in range(40)]
    mirror.change(masked)
    before = [version for version, _ in table.lineage(vbucket)]
    assert before[1:], "there is something to go back to"
    gone = first - {file.path for file in table.files()}
    table.store.delete(sorted(gone))
    clock = table._clock
    assert isinstance(clock, ManualClock)
    clock.advance(2)
    assert [version for version, _ in table.lineage(vbucket)] == before[:1]
