"""Earlier versions: which are kept, that they come back as they were, and that their cost is bounded."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from table.independent import SCHEMA, SOURCE, NaiveMirror, check_rows, own_rows, write_file
from tailrace.clock import ManualClock
from tailrace.crashpoints import TABLE_CRASH_POINTS
from tailrace.model import Position
from tailrace.table.contract import Commit, TableChanged, TableVersion
from tailrace.table.delta import cleaning
from tailrace.table.delta import log as delta_log
from tailrace.table.delta import table as delta_table
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.delta.undo import MINUTE_MS, UndoPolicy, kept_versions
from tailrace.table.opening import TableOptions, open_or_create, open_table

HOUR_MS = 60 * MINUTE_MS
NO_LIMIT = UndoPolicy(size=1 << 50)


def real_clock() -> ManualClock:
    """A clock that begins now: files have the time of the disk."""
    return ManualClock(time.time())


def make(path: Path, clock: ManualClock, policy: UndoPolicy = NO_LIMIT, every: int = 20) -> DeltaMirrorTable:
    table = DeltaMirrorTable.open_or_create(
        path, schema=SCHEMA, source=SOURCE, clock=clock, undo=policy, checkpoint_every=every
    )
    table.claim("run")
    return table


def keys(numbers: range | list[int]) -> list[str]:
    return [f"key::{number}" for number in numbers]


# the rule


def test_which_versions_are_kept() -> None:
    now_ms = 10_000 * HOUR_MS + 12_345
    versions = [
        TableVersion(number, now_ms - age_ms, "", {})
        for number, age_ms in enumerate(range(30 * HOUR_MS, -1, -10_000))
    ]
    ages = {version.version: now_ms - version.timestamp_ms for version in versions}
    kept = [ages[version] for version in kept_versions(versions, now_ms, UndoPolicy())]
    assert len([age for age in kept if age <= 10 * MINUTE_MS]) == 61
    assert 49 <= len([age for age in kept if 10 * MINUTE_MS < age <= HOUR_MS]) <= 51
    assert 137 <= len([age for age in kept if age > HOUR_MS]) <= 139
    assert max(kept) <= 24 * HOUR_MS
    # What has been kept stays until it is too old: there is never a gap.
    for later_ms in range(0, 3 * HOUR_MS, 7 * MINUTE_MS):
        still = {ages[version] for version in kept_versions(versions, now_ms + later_ms, UndoPolicy())}
        assert still <= set(kept) | {0}
    none = kept_versions(versions, now_ms, UndoPolicy(span_ms=0))
    assert max(ages[version] for version in none) <= 5 * MINUTE_MS  # somebody may be reading them
    assert kept_versions(versions[:3], now_ms, UndoPolicy(span_ms=0)) == [2]


def test_the_policy_is_the_mirrors(tmp_path: Path) -> None:
    """Maintenance without options keeps what the table's mirror wants kept."""
    clock = real_clock()
    week = UndoPolicy(span_ms=7 * 24 * HOUR_MS, size=1 << 40)
    table = make(tmp_path / "t", clock, week, every=5)
    mirror = NaiveMirror(table)
    for _ in range(12):
        clock.advance(5 * 3600)
        mirror.change(keys(range(5)))
    stranger = DeltaMirrorTable.open(table.uri, clock=clock)
    assert stranger.maintain(force=True).versions_kept == 13  # version 0 and the claim share ten minutes
    assert len(list(stranger.lineage(next(iter(mirror.seqnos))))) == 12


def test_what_is_not_said_stays_as_the_mirror_has_it(tmp_path: Path) -> None:
    """`maintain --undo-size 1g` does not shorten the time."""
    week_s = 7 * 86_400.0
    path = tmp_path / "t"
    options = TableOptions(undo_s=week_s, undo_bytes=1 << 40)
    open_or_create(path, schema=SCHEMA, source=SOURCE, options=options).claim()
    for given, expected in (
        (TableOptions(), (week_s, 1 << 40)),
        (TableOptions(undo_bytes=5), (week_s, 5)),
        (TableOptions(undo_s=60.0), (60.0, 1 << 40)),
    ):
        table = open_table(path, given)
        assert isinstance(table, DeltaMirrorTable)
        assert (table._undo.span_ms / 1000, table._undo.size) == expected


# ways back


def test_lineage_leaves_out_what_a_rollback_undid(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock)
    at: dict[int, int] = {}
    for seqno in (10, 20, 30):
        at[seqno] = table.commit(Commit("TAILRACE ROUND", positions={3: Position.at(1, seqno)}))
    back = table.commit(Commit("TAILRACE ROLLBACK", positions={3: Position.at(1, 10)}, resets={3: 10}))
    forward = table.commit(Commit("TAILRACE ROUND", positions={3: Position.at(2, 25)}))
    expected = [(forward, 25), (back, 10), (at[10], 10)]
    assert [(version, position.seqno) for version, position in table.lineage(3)] == expected
    assert list(table.lineage(4)) == []
    again = DeltaMirrorTable.open(table.uri, clock=clock)
    assert [(version, position.seqno) for version, position in again.lineage(3)] == expected
    table.checkpoint()
    table.commit(Commit("TAILRACE ROLLBACK", positions={3: Position.at(0, 0)}, resets={3: 0}))
    assert list(table.lineage(3)) == []


def test_lineage_leaves_out_versions_whose_files_are_gone(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock)
    mirror = NaiveMirror(table)
    first = mirror.change(keys(range(50)))
    (old,) = table.files()
    second = mirror.change(keys(range(50)))
    vbucket = next(iter(mirror.seqnos))
    assert [version for version, _ in table.lineage(vbucket)] == [second, first]
    table.store.delete([old.path])
    clock.advance(120)
    assert [version for version, _ in table.lineage(vbucket)] == [second]


def test_a_day_of_rounds(tmp_path: Path) -> None:
    """Kept versions come back exactly, with the log cleaned behind them, and nothing grows for ever."""
    clock = real_clock()
    rng = random.Random(7)
    table = make(tmp_path / "t", clock)
    mirror = NaiveMirror(table)
    mirror.change(keys(range(40)))
    written: dict[int, int] = {}
    for number in range(180):
        clock.advance(rng.choice((5, 20, 60, 600, 1800)))
        version = mirror.change(
            keys(rng.sample(range(60), 6)), deleted=rng.sample(sorted(mirror.rows), min(3, len(mirror.rows)))
        )
        written[version] = clock.time_ns() // 1_000_000
        report = table.maintain(busy_since_ms=clock.time_ns() // 1_000_000)
        assert not report.more
        if number % 60 == 59:
            table = mirror.table = DeltaMirrorTable.open(
                table.uri, clock=clock, undo=NO_LIMIT, checkpoint_every=20
            )
            table.claim("run")
            check_rows(table, mirror.rows)
    kept = {version.version: version for version in table.versions()}
    now_ms = clock.time_ns() // 1_000_000
    for version, written_ms in written.items():
        if now_ms - written_ms < 10 * MINUTE_MS:
            assert version in kept
    old = [v for v, known in kept.items() if HOUR_MS < now_ms - known.timestamp_ms < 23 * HOUR_MS]
    assert len(old) > 30
    for vbucket in (0, 5):
        for version, position in table.lineage(vbucket):
            if version in mirror.states:
                mine = {key: row for key, row in mirror.states[version].items() if row[2] == vbucket}
                assert {k: row for k, row in own_rows(table, version).items() if row[2] == vbucket} == mine
                assert all(row[3] <= position.seqno for row in mine.values())
    assert len(list(table.lineage(0))) > 30
    log_files = list(table.store.list("_delta_log"))
    assert len(log_files) < 150
    assert len(list(table.store.list("_tailrace"))) < 150
    check_rows(table, mirror.rows)
    assert DeltaTable(table.uri).version() == table.version


def test_undo_has_a_size(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock, UndoPolicy(size=200_000))
    mirror = NaiveMirror(table)
    value = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
    for number in range(60):
        clock.advance(120)
        mirror.change(keys(range(40)), value=f"{number}{value[number:]}{number}")
        table.maintain(busy_since_ms=clock.time_ns() // 1_000_000)
    table.maintain(force=True)
    size = sum(file.size for file in table.store.list() if file.path.endswith(".parquet"))
    data = size - sum(file.size for file in table.store.list("_delta_log"))
    newest = sum(file.size for file in table.files())
    assert data <= newest + 200_000 + 4 * 30_000  # those of the last five minutes stay anyway
    check_rows(table, mirror.rows)
    ways_back = [version for version, _ in table.lineage(vbucket=next(iter(mirror.seqnos)))]
    assert 2 <= len(ways_back) < 20
    for version in ways_back:
        if version in mirror.states:
            assert own_rows(table, version) == mirror.states[version]


def test_a_clock_that_was_wrong_for_a_while(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock, every=5)
    mirror = NaiveMirror(table)
    for number in range(60):
        if number in (10, 30):
            clock.jump(400 * 86_400 * (1 if number == 10 else -1))
        clock.advance(240)
        mirror.change(keys(range(number, number + 5)))
        table.maintain(busy_since_ms=clock.time_ns() // 1_000_000)
    assert table.current.timestamp_ms == clock.time_ns() // 1_000_000
    clock.advance(3600)
    for _ in range(3):
        table.maintain(force=True)
    assert len(list(table.store.list("_delta_log"))) < 30
    check_rows(table, mirror.rows)
    for version, _ in table.lineage(next(iter(mirror.seqnos))):
        if version in mirror.states:
            assert own_rows(table, version) == mirror.states[version]


# cleaning


def test_orphans_go_after_an_hour(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock)
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    orphan = write_file(table.store, [("a", "b", 1, 1)]).file.path
    table.store.put("_dv/deletion_vector_00000000-0000-0000-0000-000000000000.bin", b"\x01")
    table.store.put("torn.parquet.new", b"half")
    for theirs in ("notes.txt", "_symlink_format_manifest/manifest", "_hidden/x.parquet", "_SUCCESS"):
        table.store.put(theirs, b"somebody else's")
    clock.advance(30 * 60)
    assert table.maintain(force=True).files_removed == 0
    clock.advance(31 * 60)
    began_ms = clock.time_ns() // 1_000_000
    assert table.maintain(force=True, busy_since_ms=began_ms - 2 * HOUR_MS).files_removed == 0
    stranger = DeltaMirrorTable.open(table.uri, clock=clock)
    assert stranger.maintain(force=True).files_removed == 0
    assert stranger.maintain(dry_run=True).files_waiting == 3
    shown = table.maintain(dry_run=True, busy_since_ms=began_ms)
    assert shown.files_removed == 3
    assert table.store.head(orphan) is not None
    assert table.maintain(force=True, busy_since_ms=began_ms).files_removed == 3
    assert table.store.head(orphan) is None
    names = {file.path for file in table.store.list()}
    assert {"notes.txt", "_symlink_format_manifest/manifest", "_hidden/x.parquet", "_SUCCESS"} <= names
    check_rows(table, mirror.rows)


def test_files_of_a_running_task_stay_when_the_clock_is_ahead_of_the_store(tmp_path: Path) -> None:
    """The store dates files by its own clock."""
    clock = real_clock()
    clock.jump(2 * 3600)
    table = make(tmp_path / "t", clock)
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    began_ms = clock.time_ns() // 1_000_000
    underway = write_file(table.store, [("a", "b", 1, 1)]).file.path
    for busy_since_ms in (began_ms, None):
        report = table.maintain(force=True, busy_since_ms=busy_since_ms)
        assert (report.files_removed, report.files_waiting) == (0, 1)
    assert table.store.head(underway) is not None
    clock.advance(61 * 60)
    assert table.maintain(force=True, busy_since_ms=began_ms).files_removed == 0
    assert table.maintain(force=True).files_removed == 1
    check_rows(table, mirror.rows)


def test_what_lies_in_folders_inside_the_table_is_left_alone(tmp_path: Path) -> None:
    """A change log, the table of a collection, an export: none of it is waste of this table."""
    clock = real_clock()
    table = make(tmp_path / "t", clock)
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    inner = {
        "changes/part-1.parquet",
        "a.b/part-1.parquet",
        "changes/_dv/deletion_vector_1.bin",
        "x/y/z.parquet",
    }
    for path in inner:
        table.store.put(path, b"somebody else's")
    clock.advance(48 * 3600)
    assert table.maintain(dry_run=True).files_removed == 0
    table.maintain(force=True)
    assert inner <= {file.path for file in table.store.list()}
    check_rows(table, mirror.rows)


def test_files_of_others_in_folders_go_when_no_version_needs_them(tmp_path: Path) -> None:
    """Some engines write into folders."""
    clock = real_clock()
    table = make(tmp_path / "t", clock, UndoPolicy(span_ms=0, size=0))
    mirror = NaiveMirror(table)
    mirror.change(keys(range(10)))
    new = write_file(table.store, [("a", "b", 1, 1)])
    there = replace(new, file=replace(new.file, path="ab/part-1.parquet"))
    table.store.put(there.file.path, table.store.read(new.file.path))
    table.commit(Commit("OPTIMIZE", added=[there]))
    table.commit(Commit("OPTIMIZE", removed=[there.file.path]))
    clock.advance(3 * 3600)
    mirror.change(keys(range(10)))
    table.maintain()
    assert table.store.head(there.file.path) is None


def test_a_long_round_whose_files_were_cleaned_is_not_committed(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock)
    new = write_file(table.store, [("a", "b", 1, 1)], now_ms=clock.time_ns() // 1_000_000)
    clock.advance(2 * 3600)
    table.maintain(force=True)
    with pytest.raises(TableChanged, match="gone before"):
        table.commit(Commit("TAILRACE ROUND", added=[new]))


def test_maintenance_by_the_minute(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock)
    assert table.maintain().versions_kept == 2
    assert table.maintain().versions_kept == 0  # nothing was looked at
    clock.advance(61)
    assert table.maintain().versions_kept == 2


def test_removed_files_stay_for_readers(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock, UndoPolicy(span_ms=0), every=5)
    mirror = NaiveMirror(table)
    mirror.change(keys(range(50)))
    (old,) = table.files()
    mirror.change(keys(range(50)))
    for minutes, there in ((1, True), (5, True), (50, True), (10, False)):
        clock.advance(60 * minutes)
        mirror.change(["x"])
        table = mirror.table = DeltaMirrorTable.open(
            table.uri, clock=clock, undo=UndoPolicy(span_ms=0), checkpoint_every=5
        )
        table.claim()
        now_s = clock.time_ns() / 1e9  # the disk's clock has advanced as much
        os.utime(tmp_path / "t" / "_delta_log" / f"{table.version:020}.json", (now_s, now_s))
        table.maintain(force=True)
        assert (table.store.head(old.path) is not None) == there, minutes
    check_rows(table, mirror.rows)


def test_version_files_that_are_damaged_cost_ways_back_only(tmp_path: Path) -> None:
    clock = real_clock()
    table = make(tmp_path / "t", clock, every=5)
    mirror = NaiveMirror(table)
    for _ in range(40):
        clock.advance(60)
        mirror.change(keys(range(5)))
        table.maintain()
    version_files = [file.path for file in table.store.list("_tailrace")]
    assert len(version_files) > 5
    table.store.put(version_files[3], b"garbage")
    table.store.delete([version_files[4]])
    again = DeltaMirrorTable.open(table.uri, clock=clock, undo=NO_LIMIT)
    vbucket = next(iter(mirror.seqnos))
    fewer = {version for version, _ in again.lineage(vbucket)}
    all_of_them = {version for version, _ in table.lineage(vbucket)}
    assert len(all_of_them - fewer) == 2
    for version in fewer:
        if version in mirror.states:
            assert own_rows(again, version) == mirror.states[version]


def test_somebody_else_cleans_beside_the_mirror(tmp_path: Path) -> None:
    """The mirror finds its log shortened, and continues with the ways back that are left."""
    clock = real_clock()
    table = make(tmp_path / "t", clock, every=5)
    mirror = NaiveMirror(table)
    vbucket = 0
    for number in range(70):
        clock.advance(25)
        mirror.change(keys(range(number, number + 5)))
        if number == 10:
            assert list(table.lineage(vbucket))  # it knows its history from here on
        if number > 40 and number % 10 == 9:
            stranger = DeltaMirrorTable.open(table.uri, clock=clock)
            assert stranger.maintain(force=True).log_files_removed > 0
    for turn in range(2):
        for version, _ in table.lineage(vbucket):
            if version in mirror.states:
                assert own_rows(table, version) == mirror.states[version]
        clock.advance(120)
        table.maintain(force=bool(turn))
        mirror.change(keys(range(5)))
    assert len(list(table.lineage(vbucket))) > 10
    check_rows(table, mirror.rows)


# kills


def live(path: Path, now: float) -> Iterator[float]:
    """A mirror that begins with what the table holds, and makes rounds of five changes; the time of each."""
    clock = ManualClock(now)
    table = DeltaMirrorTable.open_or_create(
        path, schema=SCHEMA, source=SOURCE, clock=clock, undo=UndoPolicy(size=1 << 50), checkpoint_every=4
    )
    table.claim()
    mirror = NaiveMirror(table)
    mirror.rows = own_rows(table)
    for file in table.files():
        dead = table.mask(file)
        with table.store.open(file.path) as opened:
            for number, row in enumerate(pq.read_table(opened).to_pylist()):
                if number not in dead:
                    mirror.places[row["key"]] = (file.path, number)
    mirror.seqnos = {vb: position.seqno for vb, position in table.current.positions.items()}
    for number in range(30):
        clock.advance(240)
        yield clock.time_ns() / 1e9
        mirror.change([f"key::{(number * 7 + k) % 40}" for k in range(5)])
        table.maintain(force=True)


class Killed(BaseException):
    """The process is gone: nothing is cleaned up."""


def live_until(path: Path, now: float, place: str, count: int) -> float:
    """Run a life that is killed at a place when it gets there the nth time; when it ended."""
    left = count

    def at(name: str) -> None:
        nonlocal left
        left -= name == place
        if not left:
            raise Killed

    with contextlib.ExitStack() as stack:
        for module in (delta_table, delta_log, cleaning):
            stack.enter_context(mock.patch.object(module, "crash_point", at))
        stack.enter_context(pytest.raises(Killed))
        for moment in live(path, now):
            now = moment
    return now


def check_after_a_kill(path: Path, now: float) -> None:
    table = DeltaMirrorTable.open(path, clock=ManualClock(now), undo=NO_LIMIT)
    check_rows(table, own_rows(table))
    total = sum(position.seqno for position in table.current.positions.values())
    assert total % 5 == 0  # rounds have five changes: only whole ones, and their rows are there
    rows = own_rows(table)
    for vbucket, position in table.current.positions.items():
        assert max(row[3] for row in rows.values() if row[2] == vbucket) == position.seqno
    for version in table.versions():
        if any(known == version.version for known, _ in table.lineage(0)):
            assert own_rows(table, version.version) is not None


@pytest.mark.parametrize("place", TABLE_CRASH_POINTS)
def test_kills(tmp_path: Path, place: str) -> None:
    """Killed at a named place again and again: every version that can be read is whole."""
    path = tmp_path / "t"
    now = time.time()
    for count in (1, 2, 5):
        now = live_until(path, now, place, count)
        if (path / "_delta_log/00000000000000000000.json").exists():
            check_after_a_kill(path, now)
    final = DeltaMirrorTable.open(path, clock=ManualClock(now + 60), undo=NO_LIMIT)
    final.claim()
    final.maintain(force=True)
    final.commit(Commit("TAILRACE ROUND", positions={900: Position.at(1, 1)}))


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "t"
    now = time.time()
    code = "import sys; from table.test_undo import live; list(live(sys.argv[1], float(sys.argv[2])))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path), str(now)],
        env={
            **os.environ,
            "TAILRACE_CRASH_AT": "table.before-commit:9",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -9, ended.stderr
    check_after_a_kill(path, now + 9 * 240)
