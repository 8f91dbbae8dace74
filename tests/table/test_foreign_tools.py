"""Everything that people do to a Delta table, with delta-rs itself and as other engines would leave it: the
mirror goes on correctly, or stops with one line that says what to do. Never a wrong row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, TableFeatures, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.schema import PrimitiveType

from chaos.tidying import optimize, vacuum
from table.test_table_model import World, read_by_others
from tailrace.errors import TailraceError
from tailrace.table.contract import ForeignRows, TableDamaged, UnknownFeature
from tailrace.table.delta.log import DeltaLog, commit_path
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.delta.undo import UndoPolicy
from tailrace.table.rows import TABLE_SCHEMA
from tailrace.table.store import TableStore


@dataclass(frozen=True)
class Hand:
    """Something done to a table, and the outcome."""

    name: str
    act: Callable[[Path], Any]
    is_refused: bool = False
    """delta-rs does not do it: our tables have a feature that it can't write."""
    stops: type[TailraceError] | None = None
    """How the mirror ends; None: it goes on correctly."""
    says: str = ""
    goes_on_if_open: bool = False
    """A running mirror is not affected."""


def foreign_commit(path: Path, operation: str, actions: list[dict[str, Any]]) -> None:
    """A version as another engine would make it."""
    state = DeltaLog(TableStore(path)).load()
    assert state is not None
    info = {"commitInfo": {"timestamp": 1_700_000_000_000, "operation": operation, "engineInfo": "Spark"}}
    text = "\n".join(json.dumps(action) for action in [info, *actions])
    (path / commit_path(state.version + 1)).write_text(text)


def state_of(path: Path) -> Any:
    state = DeltaLog(TableStore(path)).load()
    assert state is not None
    return state


def append(path: Path) -> None:
    """A file with a row of somebody else's."""
    row = dict.fromkeys(TABLE_SCHEMA.names) | {"key": "foreign", "value": "{}", "vbucket": 1, "seqno": 1}
    pq.write_table(pa.Table.from_pylist([row], schema=TABLE_SCHEMA), path / "part-0.parquet")
    add = {"path": "part-0.parquet", "partitionValues": {}, "modificationTime": 1, "dataChange": True}
    add["size"] = (path / "part-0.parquet").stat().st_size
    foreign_commit(path, "WRITE", [{"add": add}])


def delete_a_file_of_rows(path: Path) -> None:
    add = next(iter(state_of(path).files.values()))
    foreign_commit(path, "DELETE", [{"remove": add.removed(1, data_change=True).to_json()}])


def set_properties(path: Path, **properties: str) -> None:
    metadata = state_of(path).metadata.to_json()
    metadata["configuration"] |= {name.replace("_", "."): value for name, value in properties.items()}
    foreign_commit(path, "SET TBLPROPERTIES", [{"metaData": metadata}])


def set_protocol(path: Path, reader: list[str], writer: list[str]) -> None:
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors", *reader]}
    protocol["writerFeatures"] = ["deletionVectors", "domainMetadata", *writer]
    foreign_commit(path, "UPGRADE PROTOCOL", [{"protocol": protocol}])


def compute_statistics(path: Path) -> None:
    actions = []
    for add in state_of(path).files.values():
        stats = {**json.loads(add.to_json()["stats"]), "nullCount": {"value": 0}}
        actions.append({"add": {**add.to_json(), "stats": json.dumps(stats), "dataChange": False}})
    foreign_commit(path, "COMPUTE STATS", actions)


def lose_statistics(path: Path) -> None:
    actions = []
    for add in state_of(path).files.values():
        fields = {name: value for name, value in add.to_json().items() if name != "stats"}
        rows = json.loads(add.to_json()["stats"])["numRecords"]
        actions.append({"add": {**fields, "stats": json.dumps({"numRecords": rows}), "dataChange": False}})
    foreign_commit(path, "COMPUTE STATS", actions)


def log_file(path: Path, back: int) -> Path:
    newest = max((path / "_delta_log").glob("*.json"))
    return newest.with_name(f"{int(newest.stem) - back:020d}.json")


def checkpoint_and_lose_it(path: Path) -> None:
    table = DeltaTable(str(path))
    table.create_checkpoint()
    for file in (path / "_delta_log").glob("*.json"):
        if int(file.stem) < table.version():
            file.unlink()
    next((path / "_delta_log").glob("*.checkpoint.parquet")).unlink()


def checkpoint_and_shorten(path: Path) -> None:
    table = DeltaTable(str(path))
    table.create_checkpoint()
    for file in (path / "_delta_log").glob("*.json"):
        if int(file.stem) < table.version():
            file.unlink()


def a_row_more(path: Path) -> pa.Table:
    row = dict.fromkeys(TABLE_SCHEMA.names) | {"key": "foreign", "value": "{}", "vbucket": 1, "seqno": 1}
    return pa.Table.from_pylist([row], schema=TABLE_SCHEMA)


def delta(act: Callable[[DeltaTable], Any]) -> Callable[[Path], Any]:
    return lambda path: act(DeltaTable(str(path)))


def vacuum_for_good(table: DeltaTable, *, full: bool) -> None:
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=full)


def optimize_and_vacuum(path: Path) -> None:
    optimize(str(path))
    vacuum(str(path))


def a_data_file(path: Path) -> Path:
    name: str = next(iter(state_of(path).files))
    return path / name


def merge(path: Path) -> None:
    merger = DeltaTable(str(path)).merge(
        a_row_more(path), "t.key = s.key", source_alias="s", target_alias="t"
    )
    merger.when_not_matched_insert_all().execute()


def add_column(table: DeltaTable) -> None:
    table.alter.add_columns([Field("extra", PrimitiveType("string"))])


GONE, DAMAGED = "is gone: somebody deleted it; restore it, or make a new table", "is damaged"
HANDS = (
    # delta-rs, for real
    Hand("optimize.compact", delta(lambda table: table.optimize.compact()), is_refused=True),
    Hand("optimize.z_order", delta(lambda table: table.optimize.z_order(["key"])), is_refused=True),
    Hand("delete", delta(lambda table: table.delete("vbucket = 1")), is_refused=True),
    Hand("delete all", delta(lambda table: table.delete()), is_refused=True),
    Hand("update", delta(lambda table: table.update({"value": "'x'"})), is_refused=True),
    Hand("restore", delta(lambda table: table.restore(1)), is_refused=True),
    Hand("vacuum", delta(lambda table: vacuum_for_good(table, full=False))),
    Hand("vacuum full", delta(lambda table: vacuum_for_good(table, full=True))),
    Hand("repair", delta(lambda table: table.repair())),
    Hand("append", lambda path: write_deltalake(str(path), a_row_more(path), mode="append"), is_refused=True),
    Hand(
        "overwrite",
        lambda path: write_deltalake(str(path), a_row_more(path), mode="overwrite"),
        is_refused=True,
    ),
    Hand("merge", merge, is_refused=True),
    Hand("add column", delta(add_column), is_refused=True),
    Hand("constraint", delta(lambda table: table.alter.add_constraint({"c": "seqno > 0"})), is_refused=True),
    Hand(
        "feature", delta(lambda table: table.alter.add_feature(TableFeatures.ChangeDataFeed)), is_refused=True
    ),
    Hand("description", delta(lambda table: table.alter.set_table_description("ours")), is_refused=True),
    Hand(
        "properties",
        delta(
            lambda table: table.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 days"})
        ),
        is_refused=True,
    ),
    Hand("checkpoint", delta(lambda table: table.create_checkpoint())),
    Hand("cleanup_metadata", delta(lambda table: table.cleanup_metadata())),
    Hand("checkpoint, and the log shortened", checkpoint_and_shorten),
    # as other engines leave it
    Hand("OPTIMIZE", lambda path: optimize(str(path))),
    Hand("VACUUM of everything old", lambda path: vacuum(str(path))),
    Hand("OPTIMIZE and VACUUM", optimize_and_vacuum),
    Hand("statistics", compute_statistics),
    Hand("statistics lost", lose_statistics),
    Hand("DELETE", delete_a_file_of_rows, stops=ForeignRows, says="run 'tailrace verify --repair'"),
    Hand("INSERT", append, stops=ForeignRows, says="run 'tailrace verify --repair'"),
    Hand(
        "harmless property", lambda path: set_properties(path, delta_logRetentionDuration="interval 1 days")
    ),
    Hand(
        "change data feed",
        lambda path: set_properties(path, delta_enableChangeDataFeed="true"),
        stops=UnknownFeature,
        says="set them back",
    ),
    Hand(
        "append only",
        lambda path: set_properties(path, delta_appendOnly="true"),
        stops=UnknownFeature,
        says="set them back",
    ),
    Hand(
        "protocol for readers",
        lambda path: set_protocol(path, ["columnMapping"], ["columnMapping"]),
        stops=UnknownFeature,
        says="make a new table",
    ),
    Hand(
        "protocol for writers",
        lambda path: set_protocol(path, [], ["rowTracking"]),
        stops=UnknownFeature,
        says="make a new table",
    ),
    # by hand
    Hand("a data file deleted", lambda path: a_data_file(path).unlink(), stops=TableDamaged, says=GONE),
    Hand(
        "a data file emptied",
        lambda path: a_data_file(path).write_bytes(b""),
        stops=TableDamaged,
        says=DAMAGED,
    ),
    Hand(
        "a file of the log deleted",
        lambda path: log_file(path, 2).unlink(),
        stops=TableDamaged,
        says="is missing",
    ),
    Hand("the newest file of the log deleted", lambda path: log_file(path, 0).unlink()),
    Hand(
        "a file of the log damaged",
        lambda path: log_file(path, 2).write_text('{"add": {"pa'),
        stops=TableDamaged,
        says=DAMAGED,
    ),
    Hand(
        "a checkpoint lost with its log",
        checkpoint_and_lose_it,
        stops=TableDamaged,
        says="is missing",
        goes_on_if_open=True,
    ),
    Hand("the hint deleted", lambda path: (path / "_delta_log/_last_checkpoint").unlink(missing_ok=True)),
    Hand("the hint damaged", lambda path: (path / "_delta_log/_last_checkpoint").write_text("{}")),
    Hand("a file that is nobody's", lambda path: pq.write_table(a_row_more(path), path / "part-1.parquet")),
)


def open_table(path: Path) -> DeltaMirrorTable:
    table = DeltaMirrorTable.open_or_create(
        path, schema=TABLE_SCHEMA, source={"bucket": "b"}, undo=UndoPolicy(span_ms=0)
    )
    table.claim()
    return table


CASES = [(hand, is_open) for hand in HANDS for is_open in ((False,) if hand.is_refused else (False, True))]


@pytest.mark.parametrize(
    ("hand", "is_open"),
    [pytest.param(*case, id=f"{case[0].name}{', while it runs' if case[1] else ''}") for case in CASES],
)
def test_a_mirror_goes_on_right_or_says_what_to_do(tmp_path: Path, hand: Hand, is_open: bool) -> None:
    path = tmp_path / "table"
    world = World(tmp_path, 7, open_table(path))
    for _ in range(4):
        world.round()
    before = dict(world.documents)
    refused = False
    try:
        hand.act(path)
    except (DeltaError, OSError) as error:
        refused = True
        assert hand.is_refused, error
    assert refused == hand.is_refused
    if hand.name == "the newest file of the log deleted":
        before = dict(world.history[world.table.version - 1])
        world.documents = dict(before)
        if is_open:  # nobody can tell that from a version that was never made; the next one is missing one
            return
    stops = None if is_open and hand.goes_on_if_open else hand.stops
    try:
        if not is_open:
            world.table = open_table(path)
        for _ in range(3):
            go_on(world)
    except TailraceError as error:
        assert stops is not None and isinstance(error, stops), error
        assert hand.says in str(error)
        assert "\n" not in str(error)
        return
    assert stops is None, "it goes on as if nothing had happened"
    world.check()
    assert world.documents != before
    if hand.goes_on_if_open and is_open:
        return  # it knows what others can't read any more
    expected = {(vbucket, key, *row) for (vbucket, key), row in world.documents.items()}
    for engine, rows in read_by_others(path).items():
        seen = [(row["vbucket"], row["key"], row["seqno"], row["value"]) for row in rows]
        assert sorted(seen) == sorted(expected), engine


def go_on(world: World) -> None:
    """A round, computed again if somebody changed the table meanwhile; a compaction and a cleaning."""
    world.table.refresh()
    random_state, seqno = world.random.getstate(), world.seqno
    try:
        world.round()
    except TailraceError as error:
        if type(error).__name__ != "TableChanged":
            raise
        world.random = random.Random()
        world.random.setstate(random_state)
        world.seqno = seqno
        world.round()
    world.begin_compaction()
    world.end_compaction()
    world.table.maintain(force=True)
