"""Disk errors at every call that writes: the table stays what it was, or becomes what it should."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from table.independent import SCHEMA, SOURCE, NaiveMirror, Row, own_rows, polars_rows, query_rows
from tailrace.clock import ManualClock
from tailrace.files import DiskFiles
from tailrace.table.contract import TableChanged
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.delta.undo import UndoPolicy
from tailrace.table.store import TableStore
from tailrace.testing.faulty_files import Fault, FaultyFiles, at_call, io_error, no_space


def keys(numbers: range) -> list[str]:
    return [f"key::{number}" for number in numbers]


def open_faulty(path: Path, clock: ManualClock, files: FaultyFiles) -> DeltaMirrorTable:
    return DeltaMirrorTable.open_or_create(
        path,
        schema=SCHEMA,
        source=SOURCE,
        clock=clock,
        store=TableStore(path, files=files),
        undo=UndoPolicy(span_ms=0),
        checkpoint_every=4,
    )


def live(path: Path, clock: ManualClock, files: FaultyFiles) -> dict[int, dict[str, Row]]:
    """A short life of a mirror: a claim, rounds with vectors in files, a checkpoint, cleaning."""
    table = open_faulty(path, clock, files)
    table.claim()
    mirror = NaiveMirror(table)
    mirror.change(keys(range(1500)))
    for step in (2, 3, 5):
        clock.advance(400)
        mirror.change(keys(range(0, 1500, step)), deleted=keys(range(1, 20)) if step == 2 else ())
        table.maintain(force=True)
    clock.advance(7200)
    table.maintain(force=True)
    return mirror.states


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "step"), [(no_space, 1), (io_error, 4)])
def test_an_error_at_every_write(tmp_path: Path, fault: Callable[[], OSError], step: int) -> None:
    counting = FaultyFiles(DiskFiles(tmp_path / "whole", mode=0o666), syncs=False)
    expected = live(tmp_path / "whole", ManualClock(time.time()), counting)
    values = list(expected.values())
    assert counting.calls > 60
    names = {name for name, _ in counting.trace}
    assert {"create", "append", "sync", "link", "unlink", "rename", "sync_directory"} <= names
    for call in range(1, counting.calls + 1, step):
        path = tmp_path / f"{fault.__name__}-{call}"
        clock = ManualClock(time.time())
        plan = at_call(call, lambda size: Fault(fault(), size // 2))
        files = FaultyFiles(DiskFiles(path, mode=0o666), plan, syncs=False)
        with contextlib.suppress(OSError, TableChanged):  # it fails, and is started again
            live(path, clock, files)
        if not (path / "_delta_log/00000000000000000000.json").exists():
            continue
        table = DeltaMirrorTable.open(path, clock=clock)
        rows = own_rows(table)
        assert rows in values, f"call {call}: {files.trace[call - 1]}"
        if call % 7 == 0:
            assert query_rows(str(path)) == rows
            assert polars_rows(str(path)) == rows
        table.claim()
        table.maintain(force=True)
        assert own_rows(DeltaMirrorTable.open(path)) == rows
