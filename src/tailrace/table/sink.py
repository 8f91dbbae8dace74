"""The executors' half of a round: changes of a stream become files of the table, and masks of older rows.

Changes are gathered until they fill a file, each document once, and are written in the order of h1. The rows
that a file replaces are looked up right away, in the files of the table and in those that the same sink wrote
before. So memory does not grow with a snapshot, and nothing is visible before the driver commits the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyroaring import BitMap

from ..columns.row_kinds import are_changes, are_mutations
from ..crashpoints import crash_point
from .contract import DataFile, NewFile, TaskResult
from .datafile import BASE, FIRST_TIER, MAX_FILE_BYTES, MAX_FILE_ROWS, DataFileWriter, size_of
from .document_columns import DocumentColumns
from .hashing import Hashes, KeyHash
from .index import FileIndex
from .lookup import DocumentHashes, find_rows, rows_of_vbuckets
from .rows import rows_of, vbuckets_of, with_document_columns
from .store import TableStore
from .typed import RESCUED

__all__ = ["RowSink", "TableWriter", "newest_of_each"]


@dataclass(frozen=True)
class TableWriter:
    """What a task needs to write to a table; picklable."""

    store: TableStore
    schema: pa.Schema
    secret: bytes
    files: tuple[DataFile, ...]
    """The files of the version that the round is based on."""
    keep_deletes: bool = False
    documents: DocumentColumns | None = None
    """The columns of a typed table."""
    max_bytes: int = MAX_FILE_BYTES
    max_rows: int = MAX_FILE_ROWS

    def sink(self, fresh: Iterable[int] = ()) -> RowSink:
        """A sink for the changes of one task; ``fresh`` are vbuckets without a row in the table."""
        return RowSink(self, frozenset(fresh))


@dataclass
class _Written:
    """A file that this sink has written."""

    file: DataFile
    index: FileIndex
    masked: BitMap = field(default_factory=BitMap)

    def overlaps(self, other: DataFile) -> bool:
        return self.file.low <= other.high and other.low <= self.file.high


class RowSink:
    """Takes the changes of a task, in the order in which each vbucket's stream has them."""

    def __init__(self, writer: TableWriter, fresh: frozenset[int]) -> None:
        self._writer = writer
        self._fresh = fresh
        self._hash = KeyHash(writer.secret)
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self._waiting_rows = 0
        self._written: list[_Written] = []
        self._masked: dict[str, BitMap] = {}
        self._discarded: set[int] = set()
        self._complete: set[int] = set()
        self._changes = 0
        self._documents = writer.documents
        self._rescued = 0

    def add(self, changes: pa.Table | pa.RecordBatch) -> None:
        """Add changes of this table's collection; rows of a stream that are not changes are left out here."""
        table = pa.Table.from_batches([changes]) if isinstance(changes, pa.RecordBatch) else changes
        table = table.filter(are_changes(table))
        for part in self._cut(table):
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += size_of(part)
            self._changes += part.num_rows
            if self._waiting_bytes >= self._writer.max_bytes or self._waiting_rows >= self._writer.max_rows:
                self._make_room()

    def _cut(self, table: pa.Table) -> Iterable[pa.Table]:
        """Parts that each fit into a file."""
        size = size_of(table)
        if size <= self._writer.max_bytes:
            return [table] if table.num_rows else []
        half = table.num_rows // 2
        if not half:
            return [table]
        return [*self._cut(table.slice(0, half)), *self._cut(table.slice(half))]

    def discard(self, vbuckets: Iterable[int]) -> None:
        """Ignore these vbuckets: what has come of them, and what still comes."""
        self._discarded.update(vbuckets)

    def complete(self, vbucket: int) -> None:
        """Note that nothing more comes of a vbucket."""
        self._complete.add(vbucket)

    def _make_room(self) -> None:
        """Write what waits of complete vbuckets, if that is most of it, otherwise everything. If neighbouring
        vbuckets arrive together, the files then don't overlap.
        """
        changes = self._take_waiting()
        if not changes.num_rows:
            return
        complete = pc.is_in(changes["vbucket"], value_set=pa.array(sorted(self._complete), pa.int32()))
        if 2 * pc.sum(complete).as_py() >= changes.num_rows:
            rest = changes.filter(pc.invert(complete))
            changes = changes.filter(complete)
            self._waiting = [rest]
            self._waiting_rows, self._waiting_bytes = rest.num_rows, size_of(rest)
        self._store(changes)

    def flush(self) -> None:
        """Write what waits to a file."""
        changes = self._take_waiting()
        if changes.num_rows:
            self._store(changes)

    def _store(self, changes: pa.Table) -> None:
        h1, h2 = self._hash.hash(changes["key"], vbuckets_of(changes))
        newest = newest_of_each(h1, h2)
        self._mask(DocumentHashes(h1[newest], h2[newest]))
        if not self._writer.keep_deletes:
            newest = newest[_is_mutation(changes)[newest]]
        if len(newest):
            rows = rows_of(changes.take(pa.array(newest)), keep_deletes=self._writer.keep_deletes)
            if self._documents is not None:
                rows, self._documents = with_document_columns(rows, self._documents)
                self._rescued += rows.num_rows - rows[RESCUED].null_count
            self._write(rows, h1[newest], h2[newest])

    def finish(self) -> TaskResult:
        """Write the rest. The files are durable; the driver's commit makes them part of the table."""
        self.flush()
        self._mask_discarded()
        added = []
        for written in self._written:
            if len(written.masked) < written.file.rows:  # files without a live row are left to the cleaning
                file = replace(written.file, kind=self._kind(written))
                added.append(NewFile(file, written.masked.serialize() if written.masked else b""))
        return TaskResult(
            added=tuple(added),
            masked={path: rows.serialize() for path, rows in self._masked.items() if rows},
            changes=self._changes,
            rows_written=sum(written.file.rows for written in self._written),
            bytes_written=sum(written.file.size for written in self._written),
            rescued=self._rescued,
            documents=self._documents if self._documents != self._writer.documents else None,
        )

    def _take_waiting(self) -> pa.Table:
        waiting, self._waiting = self._waiting, []
        self._waiting_rows = self._waiting_bytes = 0
        if not waiting:
            return pa.table({})
        changes = pa.concat_tables(waiting)
        if self._discarded:
            gone = pa.array(sorted(self._discarded), pa.int32())
            changes = changes.filter(pc.invert(pc.is_in(changes["vbucket"], value_set=gone)))
        return changes

    def _mask(self, documents: DocumentHashes) -> None:
        """Mask the earlier rows of these documents, in the table and in this sink's own files."""
        crash_point("table.in-lookup")
        for file, rows in find_rows(self._writer.store, self._writer.files, self._hash, documents):
            self._masked.setdefault(file.path, BitMap()).update(rows)
        for written in self._written:
            near = documents.between(written.file.low, written.file.high)
            if len(near):
                written.masked.update(written.index.find(near.h1, near.h2))

    def _write(self, rows: pa.Table, h1: Hashes, h2: Hashes) -> None:
        writer = DataFileWriter(self._writer.store, rows.schema, kind=FIRST_TIER)
        writer.write(rows, h1, h2)
        crash_point("table.in-write")
        self._written.append(_Written(writer.close(), FileIndex(h1, h2)))

    def _mask_discarded(self) -> None:
        if not self._discarded:
            return
        for written in self._written:
            for vbucket in self._discarded:
                written.masked.update(written.index.of_vbucket(vbucket))
        looked_up = [file for file in self._writer.files if file.path in self._masked]
        for path, rows in rows_of_vbuckets(
            self._writer.store, looked_up, self._hash, self._discarded
        ).items():
            self._masked[path] -= rows

    def _kind(self, written: _Written) -> str:
        """``base`` if its vbuckets are new to the table and no other file overlaps its range."""
        vbuckets = range(written.file.low >> 48, (written.file.high >> 48) + 1)
        if not self._fresh.issuperset(vbuckets):
            return FIRST_TIER
        others = [other.file for other in self._written if other is not written]
        others += [file for file in self._writer.files if file.kind == BASE]
        return FIRST_TIER if any(written.overlaps(other) for other in others) else BASE


def newest_of_each(h1: Hashes, h2: Hashes) -> NDArray[np.intp]:
    """The place of the last change of each document, in the order of h1 (and h2)."""
    order = np.argsort(h1, kind="stable")
    if len(order) < 2:
        return order
    same_h1 = h1[order][1:] == h1[order][:-1]
    if (same_h1 & (h2[order][1:] != h2[order][:-1])).any():  # two documents with one h1
        order = np.lexsort((h2, h1))
        same_h1 = h1[order][1:] == h1[order][:-1]
    same = same_h1 & (h2[order][1:] == h2[order][:-1])
    newest: NDArray[np.intp] = order[np.append(~same, True)]
    return newest


def _is_mutation(changes: pa.Table) -> NDArray[np.bool_]:
    return np.asarray(are_mutations(changes).to_numpy(), dtype=np.bool_)
