"""Bugs planted in the table's parts: the comparison with a dictionary must see each of them.

A test that cannot fail proves nothing; these show that `test_model` can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from pyroaring import BitMap

from table.test_table_model import World, play, weaken
from tailrace.table import compaction, rollback, sink
from tailrace.table.contract import Commit, DataFile, Table
from tailrace.table.hashing import Hashes
from tailrace.table.index import FileIndex, Rows

Plant = Callable[[pytest.MonkeyPatch], None]

SEEDS = 40


def masks_by_h1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked the wrong row on a hash collision."""
    weaken(monkeypatch)

    def find(self: FileIndex, h1: Hashes, h2: Hashes) -> Rows:
        at = np.searchsorted(self.h1, h1)
        inside = at < len(self.h1)
        same = self.h1[at[inside]] == h1[inside]
        rows: Rows = at[inside][same].astype(np.uint32)
        return rows

    monkeypatch.setattr(FileIndex, "find", find)


def forgets_masks_of_the_meantime(monkeypatch: pytest.MonkeyPatch) -> None:
    """A concurrent compaction loses a mask."""
    finish = compaction.finish_step

    def planted(table: Table, step: compaction.CompactionStep, written: list[DataFile]) -> Commit | None:
        done = finish(table, step, written)
        if done is None:
            return None
        added = [type(new)(new.file, b"") for new in done.added]
        return Commit(
            done.operation, added=added, removed=done.removed, masked=done.masked, data_change=False
        )

    monkeypatch.setattr("table.test_table_model.finish_step", planted)


def finishes_whatever_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction that a rollback has overtaken is committed all the same."""
    monkeypatch.setattr(compaction.CompactionStep, "reach", lambda self, file: BitMap())


def restores_only_files_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo without the rows that a compaction moved."""

    def planted(table: Table, back: Mapping[int, int | None]) -> rollback.RowsBack:
        done = roll_back(table, back)
        for file in done.readded:
            del done.vectors[file.path]
        done.readded, done.added = [], []
        return done

    roll_back = rollback.roll_back
    monkeypatch.setattr("table.test_table_model.roll_back", planted)


def forgets_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that comes twice in a round, in two files, is in the table twice."""
    write = sink.RowSink._write

    def planted(self: sink.RowSink, *rows: object) -> None:
        write(self, *rows)  # type: ignore[arg-type]
        self._written[-1].index = FileIndex(np.zeros(0, np.uint64), np.zeros(0, np.uint64))

    monkeypatch.setattr(sink.RowSink, "_write", planted)


def leaves_what_was_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that broke off leaves its rows behind."""
    monkeypatch.setattr(sink.RowSink, "_mask_discarded", lambda self: None)


def keeps_the_oldest_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two changes to a document in a file the first wins."""
    newest = sink.newest_of_each

    def planted(h1: Hashes, h2: Hashes) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        return len(h1) - 1 - newest(h1[::-1], h2[::-1])

    monkeypatch.setattr(sink, "newest_of_each", planted)


@pytest.mark.parametrize(
    "plant",
    [
        masks_by_h1_alone,
        forgets_masks_of_the_meantime,
        finishes_whatever_came_back,
        restores_only_files_that_are_there,
        forgets_its_own_files,
        leaves_what_was_discarded,
        keeps_the_oldest_of_each,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_seen(tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS):
        try:
            play(World(tmp_path / str(seed), seed), 40)
        except (AssertionError, KeyError):
            return
    raise AssertionError(f"{SEEDS} seeds did not see it")
