"""The mirror without Spark: rewrite, commit and restore on a real Delta table, against a model of a source.

The model keeps every version of every document; the table must be equal to it at each commit.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.columns import SCHEMA
from tailrace.history import FailoverLog, rollback_seqno
from tailrace.model import Position
from tailrace.spark.fold import TABLE_SCHEMA, documents_of
from tailrace.spark.rewrite import GroupResult, Rewrite, Target
from tailrace.spark.table import Fenced, MirrorTable, write_file

VBUCKETS = 8
GROUP_OF = tuple(vbucket // 4 for vbucket in range(VBUCKETS))
SOURCE = {"bucket": "default", "scope": "_default", "collection": "_default", "groups": 2}


@dataclass
class Change:
    seqno: int
    key: bytes
    value: bytes | None
    cas: int


@dataclass
class ModelVBucket:
    """One vbucket of the model: its whole history, which a failover cuts."""

    log: FailoverLog
    changes: list[Change] = field(default_factory=list)

    @property
    def high(self) -> int:
        return self.changes[-1].seqno if self.changes else 0

    def write(self, key: bytes, value: bytes | None, cas: int) -> None:
        self.changes.append(Change(self.high + 1, key, value, cas))

    def fail_over(self, seqno: int, vb_uuid: int) -> None:
        self.changes = [change for change in self.changes if change.seqno <= seqno]
        self.log = self.log.branched_at(seqno, vb_uuid)

    def state(self) -> dict[bytes, tuple[bytes, int, int]]:
        found: dict[bytes, tuple[bytes, int, int]] = {}
        for change in self.changes:
            if change.value is None:
                found.pop(change.key, None)
            else:
                found[change.key] = (change.value, change.seqno, change.cas)
        return found

    def snapshot(self, after: int) -> list[Change]:
        """Everything above ``after``, each key once."""
        newest = {change.key: change for change in self.changes if change.seqno > after}
        return sorted(newest.values(), key=lambda change: change.seqno)


class Model:
    """A bucket, and a reader that turns its streams into the rows of the source."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cas = 1 << 60
        self.vbuckets = [ModelVBucket(FailoverLog.new(self._uuid())) for _ in range(VBUCKETS)]

    def _uuid(self) -> int:
        return self.rng.randrange(1, 1 << 48)

    def write_some(self, count: int) -> None:
        for _ in range(count):
            number = self.rng.randrange(VBUCKETS)
            key = b"key-%d" % self.rng.randrange(12)
            if self.rng.random() < 0.05:
                key = b"\xff" + key
            self.cas += self.rng.randrange(1, 1000)
            value = None if self.rng.random() < 0.25 else b'{"n":%d}' % self.cas
            if value and self.rng.random() < 0.05:
                value = b"\x80\x81"
            self.vbuckets[number].write(key, value, self.cas)

    def fail_over_some(self) -> None:
        for vbucket in self.rng.sample(self.vbuckets, 3):
            vbucket.fail_over(self.rng.randint(max(0, vbucket.high - 6), vbucket.high), self._uuid())

    def rows(self, table: MirrorTable, positions: dict[int, Position], *, split: bool) -> pa.Table:
        """The rows of the next batch, as the source would hand them out; moves ``positions``."""
        found: list[dict[str, object]] = []
        for number, vbucket in enumerate(self.vbuckets):
            held = positions.get(number, Position.BEGINNING)
            back = rollback_seqno(held, vbucket.log, high_seqno=vbucket.high)
            if back is not None:
                back_to = ((v, p) for v, p in table.lineage(number) if p.seqno <= back)
                version, held = next(back_to, (None, Position.BEGINNING))
                value = json.dumps({"versions": [version]}).encode()
                found.append(_row("rollback", number, held.vb_uuid, held.seqno, value=value))
            uuid = vbucket.log.newest.vb_uuid
            changes = vbucket.snapshot(held.exact_at if held.is_partial else held.seqno)
            end = vbucket.high
            if split and len(changes) > 1:
                changes = changes[: self.rng.randint(1, len(changes) - 1)]
            start = held.exact_at
            for change in changes:
                op = "deletion" if change.value is None else "mutation"
                found.append(
                    _row(op, number, vbucket.log.branch_of(change.seqno), change.seqno, change.key,
                         change.value, change.cas)
                )  # fmt: skip
            seqno = changes[-1].seqno if changes else held.seqno
            now = (
                Position(uuid, seqno, min(start, seqno), max(end, seqno)) if changes else held.on_branch(uuid)
            )
            positions[number] = now
            found.append(
                {
                    **_row("position", number, now.vb_uuid, now.seqno),
                    "snapshot_start": now.snapshot_start,
                    "snapshot_end": now.snapshot_end,
                }
            )
        return pa.Table.from_pylist(found, schema=ROWS)


ROWS = SCHEMA


def _row(  # noqa: PLR0917
    op: str, vbucket: int, vb_uuid: int, seqno: int, key: bytes | None = None, value: bytes | None = None,
    cas: int = 0,
) -> dict[str, object]:  # fmt: skip
    return {
        "op": op, "key": key, "value": value, "scope": "_default", "collection": "_default",
        "vbucket": vbucket, "vb_uuid": vb_uuid, "seqno": seqno, "rev": 1, "cas": cas, "flags": 0, "expiry": 0,
        "datatype": "json", "event_time": 0,
    }  # fmt: skip


class Driver:
    """What the mirror's driver does with a batch, without Spark."""

    def __init__(self, path: Path) -> None:
        self.table = MirrorTable.open_or_create(str(path / "table"), schema=TABLE_SCHEMA, source=SOURCE)
        self.table.claim()
        self.staging = path / "staging"
        self.staging.mkdir(exist_ok=True)
        self.staged: dict[int, tuple[str, ...]] = {}

    def apply(self, rows: pa.Table) -> None:
        files = self.table.files()
        by_group = {
            group: tuple(file.path for file in files if GROUP_OF[file.first_vbucket] == group)
            for group in set(GROUP_OF)
        }
        target = Target(self.table.uri, "_default", "_default", by_group)
        rewrite = Rewrite((target,), GROUP_OF, str(self.staging), dict(self.staged))
        results = [
            GroupResult.from_json(row["target"], row["group"], row["result"])
            for batch in rewrite(rows.to_batches(max_chunksize=7))
            for row in batch.to_pylist()
        ]
        positions = dict(self.table.current.positions)
        for result in results:
            positions.update(result.positions)
            self.staged[result.group] = result.staged
        added = [file for result in results for file in result.added]
        resets = {vbucket: seqno for result in results for vbucket, seqno in result.resets.items()}
        self.table.commit(added, [path for result in results for path in result.removed], positions, resets)

    def state(self) -> dict[int, dict[bytes, tuple[bytes, int, int]]]:
        import pyarrow.parquet as pq

        found: dict[int, dict[bytes, tuple[bytes, int, int]]] = {n: {} for n in range(VBUCKETS)}
        for file in self.table.files():
            rows = pq.read_table(self.table.absolute(file.path))
            for key, row in zip(documents_of(rows).to_pylist(), rows.to_pylist(), strict=True):
                value = _bytes(row["value"], row["value_base64"])
                assert key not in found[row["vbucket"]], "a document stands twice"
                found[row["vbucket"]][key] = (value, row["seqno"], row["cas"])
        return found


def _bytes(text: str | None, encoded: str | None) -> bytes:
    import base64

    return base64.b64decode(encoded or "") if text is None else text.encode()


@pytest.mark.parametrize("seed", range(12))
def test_the_table_is_equal_to_the_source_after_every_catch_up(tmp_path: Path, seed: int) -> None:
    """Writes, deletes, divergent failovers, batches that end inside snapshots, and restarts."""
    model, driver = Model(seed), Driver(tmp_path)
    positions: dict[int, Position] = {}
    for _ in range(14):
        model.write_some(model.rng.randrange(25))
        if model.rng.random() < 0.4:
            model.fail_over_some()
            model.write_some(model.rng.randrange(10))
        if model.rng.random() < 0.3:  # a restart: only the table is left
            driver = Driver(tmp_path)
            positions = dict(driver.table.current.positions)
        if model.rng.random() < 0.4:
            driver.apply(model.rows(driver.table, positions, split=True))
        driver.apply(model.rows(driver.table, positions, split=False))
        assert driver.state() == {n: vbucket.state() for n, vbucket in enumerate(model.vbuckets)}


def test_a_second_mirror_fences_the_first(tmp_path: Path) -> None:
    first = Driver(tmp_path)
    second = Driver(tmp_path)
    model = Model(1)
    model.write_some(10)
    with pytest.raises(Fenced, match="taken over by another mirror"):
        first.apply(model.rows(first.table, {}, split=False))
    second.apply(model.rows(second.table, {}, split=False))
    assert second.state() == {n: vbucket.state() for n, vbucket in enumerate(model.vbuckets)}


def test_versions_are_numbered_right_while_another_writes(tmp_path: Path) -> None:
    """A reader that numbers commits from the version that it has opened brings back wrong rows."""
    uri = str(tmp_path / "table")
    writer = MirrorTable.open_or_create(uri, schema=TABLE_SCHEMA, source=SOURCE)
    writer.claim()
    for seqno in range(1, 4):
        writer.commit([], [], {0: Position.at(7, seqno)})
    reader = MirrorTable.open(uri)
    for seqno in range(4, 6):
        writer.commit([], [], {0: Position.at(7, seqno)})
    expected = {seqno: seqno + 1 for seqno in range(1, 6)}  # made and claimed before that
    assert {position.seqno: version for version, position in reader.lineage(0)} == expected
    assert writer.current.version == writer.version == 6


def test_a_vacuum_keeps_the_ways_back_that_it_is_told_to_keep(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    table = MirrorTable.open_or_create(uri, schema=TABLE_SCHEMA, source=SOURCE)
    table.claim()
    before: list[str] = []
    for seqno in range(1, 6):
        row = {"key": "k", "value": "1", "vbucket": 0, "vb_uuid": 7, "seqno": seqno}
        rows = [row]
        file = write_file(pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), uri, f"part-{seqno}.parquet")
        table.commit([file], before, {0: Position.at(7, seqno)})
        before = [file.path]
    write_file(pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), uri, "orphan.parquet")
    assert [position.seqno for _, position in table.lineage(0)] == [5, 4, 3, 2, 1]
    gone = table.vacuum(keep_hours=0, keep_versions=3)
    assert sorted(gone) == ["orphan.parquet", "part-1.parquet", "part-2.parquet"]
    assert [position.seqno for _, position in MirrorTable.open(uri).lineage(0)] == [5, 4, 3]
    table.refresh()
    table.commit([], [], {0: Position.at(7, 6)})  # a vacuum makes commits of its own, and fences nobody


def test_a_table_knows_its_source_when_the_beginning_of_its_log_is_gone(tmp_path: Path) -> None:
    source = {"bucket": "b", "scope": "s", "collection": "c", "vbuckets": 4, "groups": 2}
    table = MirrorTable.open_or_create(str(tmp_path), schema=TABLE_SCHEMA, source=source)
    table.claim("first")
    table.commit([], [], {1: Position.at(7, 3)})
    DeltaTable(str(tmp_path)).create_checkpoint()
    for version in range(table.version):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    again = MirrorTable.open(str(tmp_path))
    assert again.source == source
    assert again.current.position(1) == Position.at(7, 3)
    again.claim("second")
    assert MirrorTable.open_or_create(str(tmp_path), schema=TABLE_SCHEMA, source=source).source == source
