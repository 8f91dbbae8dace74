"""The documents of a bucket as they are now: what `tailrace dump` writes.

A stream gives every change since some point, not the state: a document that changes while it is read comes
twice, and deletions come too. So the changes of a vbucket are kept until its stream has ended, and then only
the newest change of each document counts. The vbuckets are read in groups, so this is a small part of the
bucket at a time. Where even that is large, the values wait in a temporary file.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns.batch import SCHEMA
from ..columns.row_kinds import ROLLBACK, are_changes, are_mutations, kind_of
from ..files import scratch_file, scratch_folder
from .aio import Source
from .events import Mutation
from .jsonlines import CollectionNames, json_line

__all__ = ["as_json_lines", "documents"]

_GROUPS = 64
HELD_BYTES = 32 << 20
"""About how much is kept of changes in memory, and handed on of documents in one table."""
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_IDENTITY = ["vbucket", "scope", "collection", "key"]


async def documents(source: Source, advance: Callable[[int], None]) -> AsyncIterator[pa.Table]:
    """All live documents, some at a time; ``advance`` gets the seqnos that were read."""
    ends = await source.high_seqnos()
    vbuckets = [vbucket for vbucket, seqno in ends.items() if seqno]
    size = max(1, len(ends) // _GROUPS)
    for first in range(0, len(vbuckets), size):
        group = vbuckets[first : first + size]
        with KeptChanges() as kept:
            async for batch in source.batches(end={vbucket: ends[vbucket] for vbucket in group}):
                if kind_of(batch) == ROLLBACK:
                    kept.roll_back(batch["vbucket"][0].as_py(), batch["seqno"][0].as_py())
                else:
                    kept.add(batch)
            advance(sum(ends[vbucket] for vbucket in group))
            for table in kept.documents():
                yield table


class KeptChanges:
    """The changes of some vbuckets, in the order in which they came."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._file: BinaryIO | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._outlines: list[pa.RecordBatch] = []
        """All batches, without the values."""
        self._rows = 0
        self._rollbacks: list[tuple[int, int, int]] = []
        """How many rows had come, which vbucket went back, and to which seqno."""

    def __enter__(self) -> KeptChanges:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep more changes."""
        self._outlines.append(batch.select(["op", "seqno", *_IDENTITY]))
        self._rows += batch.num_rows
        self._batches.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes > HELD_BYTES:
            self._put_aside()

    def roll_back(self, vbucket: int, seqno: int) -> None:
        """Discard what has come of a vbucket above a seqno."""
        self._rollbacks.append((self._rows, vbucket, seqno))

    def documents(self) -> Iterator[pa.Table]:
        """What the changes leave behind, some at a time."""
        if not self._rows:
            return
        is_alive = self._newest()
        first, size = 0, 0
        tables: list[pa.RecordBatch] = []
        for batch in self._all_batches():
            alive = batch.filter(pa.array(is_alive[first : first + batch.num_rows]))
            first += batch.num_rows
            if not alive.num_rows:
                continue
            tables.append(alive)
            size += alive.nbytes
            if size > HELD_BYTES:
                yield pa.Table.from_batches(tables, SCHEMA)
                tables, size = [], 0
        if tables:
            yield pa.Table.from_batches(tables, SCHEMA)

    def _newest(self) -> npt.NDArray[np.bool_]:
        """Which rows are the newest change of their document, and a mutation."""
        outline = pa.Table.from_batches(self._outlines)
        row_numbers = np.arange(self._rows)
        counts = np.asarray(are_changes(outline))
        vbuckets, seqnos = np.asarray(outline["vbucket"]), np.asarray(outline["seqno"])
        for rows, vbucket, seqno in self._rollbacks:
            counts &= ~((row_numbers < rows) & (vbuckets == vbucket) & (seqnos > seqno))
        numbered = outline.append_column("row", pa.array(row_numbers)).filter(pa.array(counts))
        last = numbered.group_by(_IDENTITY, use_threads=False).aggregate([("row", "max")])["row_max"]
        is_alive = np.zeros(self._rows, np.bool_)
        is_alive[np.asarray(last)] = True
        is_alive &= np.asarray(are_mutations(outline))
        return is_alive

    def _put_aside(self) -> None:
        """Move what is in memory to the file."""
        try:
            if self._writer is None:
                self._file = scratch_file()
                self._writer = pa.ipc.new_stream(self._file, self._batches[0].schema)
            for batch in self._batches:
                self._writer.write_batch(batch)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(scratch_folder())) from error
        self._batches, self._held_bytes = [], 0

    def _all_batches(self) -> Iterator[pa.RecordBatch]:
        if self._file is not None and self._writer is not None:
            self._put_aside()
            self._writer.close()
            self._file.flush()
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as reader:
                yield from reader
        yield from self._batches


def as_json_lines(table: pa.Table, names: CollectionNames, *, no_value: bool = False) -> Iterator[bytes]:
    """Documents as the lines that `tail --json` has for mutations."""
    # of two with the same name the first is the bucket's, the other was dropped
    numbers = {path: number for number, path in reversed(list(names.items()))}
    columns = ["vbucket", "vb_uuid", "seqno", "rev", "cas", "key", "value", "flags", "expiry", "datatype"]
    columns += ["snapshot_start", "snapshot_end", "scope", "collection", "xattrs"]
    rows = (
        row
        for batch in table.to_batches()
        for row in zip(*(batch[name].to_pylist() for name in columns), strict=True)
    )
    for row in rows:
        vbucket, vb_uuid, seqno, rev, cas, key, value, flags, expiry, datatype, start, end, *more = row
        scope, collection, xattrs = more
        yield json_line(
            Mutation(
                vbucket,
                vb_uuid & _U64,
                seqno & _U64,
                rev & _U64,
                cas & _U64,
                key,
                value or b"",
                flags & 0xFFFF_FFFF,
                expiry,
                int(datatype == "json"),
                (start & _U64, end & _U64),
                numbers[scope, collection],
                None if xattrs is None else json.loads(xattrs),
            ),
            names,
            no_value=no_value,
        )
