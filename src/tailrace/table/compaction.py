"""What keeps a table small and quick to read: tiers are merged, and worn ranges of the base are rewritten.

A round adds files of tier 0 and masks the rows that they replace. `next_step` finds the one step that is most
worth its cost, `CompactionStep.run` does it in any process, and `finish_step` makes the commit: rows that
were masked in the meantime are masked in the new files. All files are in the order of h1, so a range of the
base can be rewritten together with the rows that lie above it, and without the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from ..crashpoints import crash_point
from .contract import Commit, DataFile, NewFile, Table, TableDamaged
from .datafile import BASE, MAX_FILE_BYTES, TIER
from .hashing import KeyHash
from .index import FileIndex, open_index, row_numbers
from .merging import MergeSource, merge_files
from .store import TableStore

__all__ = ["CompactionPolicy", "CompactionStep", "finish_step", "next_step"]

_LAST = (1 << 64) - 1


@dataclass(frozen=True)
class CompactionPolicy:
    """When a step is due."""

    tier_files: int = 16
    """This many files of a tier are merged into one of the next tier."""
    tier_masked: float = 0.5
    """... or fewer, once this share of their rows is masked."""
    overlay: float = 0.25
    """A range of the base is rewritten when this many rows lie above it, as a share of its own."""
    base_masked: float = 0.375
    """... or when this share of it is masked."""
    least_rows: int = 20_000
    """Smaller ranges count as this large: rewriting them gains nothing."""
    step_bytes: int = 2 * MAX_FILE_BYTES
    """Roughly the most that a step takes from above a range."""


@dataclass(frozen=True)
class CompactionStep:
    """What is merged, and into what; picklable."""

    kind: str
    """The kind of the new files."""
    sources: tuple[MergeSource, ...]
    """The live rows that are taken."""
    whole: frozenset[str]
    """Files of which nothing is left."""
    taken: Mapping[str, bytes]
    """For each other file, all its rows in the range that is rewritten, live or not."""
    why: str

    def reach(self, file: DataFile) -> BitMap:
        """All rows of a file that are in the step's range, live or not."""
        if file.path in self.whole:
            return BitMap(range(file.rows))
        return BitMap.deserialize(self.taken[file.path])

    def run(self, store: TableStore, schema: pa.Schema, secret: bytes) -> list[DataFile]:
        """Write the new files; nothing is visible yet."""
        files = merge_files(store, self.sources, schema, KeyHash(secret), kind=self.kind)
        crash_point("table.after-compaction")
        return files


def next_step(table: Table, policy: CompactionPolicy | None = None) -> CompactionStep | None:
    """The step that is due, if any: a range of the base first, because that removes what is above it."""
    planner = _Planner(table, policy or CompactionPolicy())
    return planner.worst_range() or planner.full_tier()


def finish_step(table: Table, step: CompactionStep, written: Sequence[DataFile]) -> Commit | None:
    """What to commit when a step is done; None if the table has changed so that the step is of no use.

    A row that was masked after the step began is masked in the new file. If a row came back (a rollback) or a
    file is gone, the step is dropped.
    """
    key_hash = KeyHash(table.secret)
    now = {file.path: file for file in table.files()}
    dead: list[BitMap] = [BitMap() for _ in written]
    for source in step.sources:
        file = now.get(source.file.path)
        if file is None:
            return None
        masked, wanted = table.mask(file), source.wanted()
        if step.reach(file) - masked - wanted:
            return None
        gone = wanted & masked
        if gone:
            h1, h2 = open_index(table.store, file, key_hash).at(row_numbers(gone))
            for new, rows in zip(written, dead, strict=True):
                try:
                    index = open_index(table.store, new, key_hash)
                except TableDamaged:  # somebody's cleaning removed it: it is not part of the table yet
                    return None
                rows.update(index.find(h1, h2))
    return Commit(
        operation="TAILRACE COMPACT",
        added=[
            NewFile(file, rows.serialize() if rows else b"")
            for file, rows in zip(written, dead, strict=True)
            if len(rows) < file.rows
        ],
        removed=sorted(step.whole),
        masked={path: BitMap.deserialize(rows) for path, rows in step.taken.items()},
        data_change=False,
        counts={
            "rows": sum(file.rows for file in written),
            "bytes": sum(file.size for file in written),
            "files": len(step.sources),
        },
    )


class _Planner:
    """Looks for the step that is due."""

    def __init__(self, table: Table, policy: CompactionPolicy) -> None:
        self._table = table
        self._policy = policy
        self._key_hash = KeyHash(table.secret)
        files = table.files()
        self._base = sorted((file for file in files if file.kind == BASE), key=lambda file: file.low)
        self._above = [file for file in files if file.kind != BASE]

    def full_tier(self) -> CompactionStep | None:
        """A tier with too many files, or too many masked rows."""
        tiers: dict[int, list[DataFile]] = defaultdict(list)
        for file in self._above:
            # a foreign file counts as tier 0; merging gives its rows an index
            tiers[int(file.kind.removeprefix(TIER)) if file.kind.startswith(TIER) else 0].append(file)
        for number, members in sorted(tiers.items()):
            rows = sum(file.rows for file in members)
            masked = rows - sum(file.live_rows for file in members)
            worn = (
                len(members) > 1
                and rows >= self._policy.least_rows
                and masked > self._policy.tier_masked * rows
            )
            if len(members) >= self._policy.tier_files or worn:
                sources = tuple(MergeSource(file, self._alive(file).serialize()) for file in members)
                paths = frozenset(file.path for file in members)
                why = f"{len(members)} files of tier {number}"
                return CompactionStep(f"{TIER}{number + 1}", sources, paths, {}, why)
        return None

    def worst_range(self) -> CompactionStep | None:
        """A range of the base with too many rows above it, or too many masked ones."""
        starts = [0, *(file.low for file in self._base[1:])]
        overlay = self._overlay(starts)
        scores = []
        for number in range(len(starts)):
            file = self._base[number] if self._base else None
            rows = max(file.rows if file else 0, self._policy.least_rows)
            masked = file.rows - file.live_rows if file else 0
            scores.append(
                max(
                    overlay[number] / (self._policy.overlay * rows),
                    masked / (self._policy.base_masked * rows),
                )
            )
        number = int(np.argmax(scores))
        if scores[number] < 1:
            return None
        end = starts[number + 1] - 1 if number + 1 < len(starts) else _LAST
        return self._rewrite(self._base[number] if self._base else None, starts[number], end)

    def _overlay(self, starts: Sequence[int]) -> list[int]:
        """How many live rows of files above the base lie in each range."""
        counts = np.zeros(len(starts), dtype=np.int64)
        lows = np.array(starts, dtype=np.uint64)
        for file in self._above:
            index = self._index(file)
            counts += np.diff(np.append(np.searchsorted(index.h1, lows), len(index.h1)))
            if file.live_rows < file.rows:
                h1, _ = index.at(row_numbers(self._table.mask(file)))
                counts -= np.diff(np.append(np.searchsorted(h1, lows), len(h1)))
        return [int(count) for count in counts]

    def _rewrite(self, base_file: DataFile | None, low: int, high: int) -> CompactionStep:
        """A file of the base with all that lies above it, up to a limit past the file's own rows."""
        high = self._cut(base_file, low, high)
        sources: list[MergeSource] = []
        whole: set[str] = set()
        taken: dict[str, bytes] = {}
        if base_file is not None:
            sources.append(MergeSource(base_file, self._alive(base_file).serialize()))
            whole.add(base_file.path)
        for file in self._above:
            index = self._index(file)
            first, last = _between(index, low, high)
            if first == last:
                continue
            places = np.arange(first, last, dtype=np.uint32)
            reach = BitMap(places if index.rows is None else index.rows[first:last])
            masked = self._table.mask(file)
            sources.append(MergeSource(file, (reach - masked).serialize()))
            if len(reach | masked) == file.rows:
                whole.add(file.path)
            else:
                taken[file.path] = reach.serialize()
        last_hash = min(high, base_file.high) if base_file else high
        why = f"vbuckets {low >> 48} to {last_hash >> 48} of the base"
        return CompactionStep(BASE, tuple(sources), frozenset(whole), taken, why)

    def _cut(self, base_file: DataFile | None, low: int, high: int) -> int:
        """Where the step ends: at the end of the range, or where enough has been taken from above it."""
        hashes, sizes = [np.zeros(0, np.uint64)], [np.zeros(0)]
        for file in self._above:
            index = self._index(file)
            first, last = _between(index, low, high)
            hashes.append(index.h1[first:last])
            sizes.append(np.full(last - first, file.size / max(1, file.rows)))
        h1 = np.concatenate(hashes)
        order = np.argsort(h1)
        place = int(np.searchsorted(np.cumsum(np.concatenate(sizes)[order]), self._policy.step_bytes))
        if place >= len(order):
            return high
        return min(high, max(int(h1[order[place]]), base_file.high if base_file is not None else 0))

    def _alive(self, file: DataFile) -> BitMap:
        return BitMap(range(file.rows)) - self._table.mask(file)

    def _index(self, file: DataFile) -> FileIndex:
        return open_index(self._table.store, file, self._key_hash)


def _between(index: FileIndex, low: int, high: int) -> tuple[int, int]:
    """Where the rows with an h1 from ``low`` to ``high`` begin and end."""
    first = int(np.searchsorted(index.h1, np.uint64(low), side="left"))
    return first, int(np.searchsorted(index.h1, np.uint64(high), side="right"))
