"""VBuckets go back to the rows that they had in an earlier version of the table.

Inside a vbucket that goes back, every file gets the mask that it had then, and files added since are masked.
A file that a compaction has removed comes back whole, with a mask, if many of its rows return; otherwise
those rows are copied. Nothing outside these vbuckets changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pyroaring import BitMap

from .contract import Commit, DataFile, NewFile, Table
from .datafile import FIRST_TIER
from .hashing import KeyHash
from .lookup import rows_of_vbuckets
from .merging import MergeSource, merge_files

__all__ = ["RowsBack", "roll_back"]

_MUCH = 0.5
"""A file comes back whole if this share of its rows returns."""


@dataclass
class RowsBack:
    """The part of a commit that sets vbuckets back."""

    vectors: dict[str, BitMap] = field(default_factory=dict)
    """By path, the complete mask that a file gets."""
    readded: list[DataFile] = field(default_factory=list)
    added: list[NewFile] = field(default_factory=list)
    rows_back: int = 0
    rows_gone: int = 0

    def commit(self, operation: str = "TAILRACE ROLLBACK") -> Commit:
        """As a commit of its own, without positions."""
        return Commit(
            operation=operation,
            vectors=self.vectors,
            readded=self.readded,
            added=self.added,
            counts={"rows_back": self.rows_back, "rows_gone": self.rows_gone},
        )


def roll_back(table: Table, back: Mapping[int, int | None]) -> RowsBack:
    """Set vbuckets back, each to its rows in a version, or (None) to no rows."""
    key_hash = KeyHash(table.secret)
    store = table.store
    now = {file.path: file for file in table.files()}
    masks = {path: table.mask(file) for path, file in now.items()}
    before = {path: mask.copy() for path, mask in masks.items()}
    returning: dict[str, tuple[DataFile, BitMap]] = {}
    for path, rows in rows_of_vbuckets(store, list(now.values()), key_hash, back).items():
        masks[path] |= rows
    by_version: dict[int, list[int]] = {}
    for vbucket, version in back.items():
        if version is not None:
            by_version.setdefault(version, []).append(vbucket)
    for version, vbuckets in by_version.items():
        then = table.files(version)
        reach = rows_of_vbuckets(store, then, key_hash, vbuckets)
        for file in then:
            if file.path not in reach:
                continue
            alive = reach[file.path] - table.mask(file)
            if file.path in now:
                masks[file.path] -= alive
            elif alive:
                _, known = returning.setdefault(file.path, (file, BitMap()))
                known |= alive
    done = RowsBack()
    copied: list[MergeSource] = []
    for path, (file, rows) in returning.items():
        done.rows_back += len(rows)
        if len(rows) >= _MUCH * file.rows:
            # no longer base: other files may now hold rows of its range
            done.readded.append(replace(file, kind=FIRST_TIER))
            done.vectors[path] = BitMap(range(file.rows)) - rows
        else:
            copied.append(MergeSource(file, rows.serialize()))
    for path, mask in masks.items():
        if mask != before[path]:
            done.vectors[path] = mask
            done.rows_back += len(before[path] - mask)
            done.rows_gone += len(mask - before[path])
    for file in merge_files(store, copied, table.schema, key_hash, kind=FIRST_TIER):
        done.added.append(NewFile(file, b""))
    return done
