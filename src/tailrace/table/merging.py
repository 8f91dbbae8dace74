"""Rows of several files become one file, or several that don't overlap, in the order of h1.

Files are read from front to back, a piece of each at a time, so that memory is bounded whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap

from .contract import DataFile
from .datafile import MAX_FILE_BYTES, MAX_FILE_ROWS, DataFileWriter
from .file_reading import read_rows_at
from .hashing import Hashes, KeyHash
from .index import Rows, open_index, row_numbers
from .store import TableStore

__all__ = ["MergeSource", "merge_files"]

_PIECE_BYTES = 16 << 20
"""Roughly the size of rows in memory as one table, while pieces of all files are put in order."""
_READ_BYTES = 64 << 20
"""Roughly how much the readers of all files hold together, however many there are."""
_LEAST_BATCH_BYTES, _MOST_BATCH_BYTES = 256 << 10, 8 << 20


@dataclass(frozen=True)
class MergeSource:
    """Rows of a file; ``rows`` is a portable roaring bitmap, so that it can be sent."""

    file: DataFile
    rows: bytes

    def wanted(self) -> BitMap:
        """The rows that are taken."""
        return BitMap.deserialize(self.rows)


def merge_files(
    store: TableStore,
    sources: Sequence[MergeSource],
    schema: pa.Schema,
    key_hash: KeyHash,
    *,
    kind: str,
    max_rows: int = MAX_FILE_ROWS,
    max_bytes: int = MAX_FILE_BYTES,
) -> list[DataFile]:
    """Write the wanted rows of all sources; the new files."""
    batch_bytes = max(_LEAST_BATCH_BYTES, min(_MOST_BATCH_BYTES, _READ_BYTES // max(1, len(sources))))
    readers = [_Reader(store, source, schema, key_hash, batch_bytes) for source in sources]
    readers = [reader for reader in readers if len(reader.h1)]
    if not readers:
        return []
    h1 = np.concatenate([reader.h1 for reader in readers])
    h2 = np.concatenate([reader.h2 for reader in readers])
    origin = np.repeat(np.arange(len(readers)), [len(reader.h1) for reader in readers])
    order = np.argsort(h1, kind="stable")
    per_piece = max(1, _PIECE_BYTES // max(reader.bytes_per_row for reader in readers))
    files: list[DataFile] = []
    writer: DataFileWriter | None = None
    try:
        for first in range(0, len(order), per_piece):
            piece = order[first : first + per_piece]
            if writer is None:
                writer = DataFileWriter(store, schema, kind=kind)
            writer.write(_in_order(readers, origin[piece]), h1[piece], h2[piece])
            if writer.rows >= max_rows or writer.bytes >= max_bytes:
                done, writer = writer, None
                files.append(done.close())
        if writer is not None:
            done, writer = writer, None
            files.append(done.close())
    finally:
        if writer is not None:
            writer.abandon()
    return files


def _in_order(readers: Sequence[_Reader], origin: NDArray[np.intp]) -> pa.Table:
    """The next rows of each reader, interleaved as ``origin`` says."""
    counts = np.bincount(origin, minlength=len(readers))
    parts = [reader.take(int(count)) for reader, count in zip(readers, counts, strict=True) if count]
    if len(parts) == 1:
        return parts[0]
    # row i of the result is the next one of reader origin[i]: the inverse of a stable sort by origin
    places = np.empty(len(origin), dtype=np.int64)
    places[np.argsort(origin, kind="stable")] = np.arange(len(origin))
    return pa.concat_tables(parts).take(pa.array(places))


class _Reader:
    """The wanted rows of a file, in the order of h1, some at a time."""

    def __init__(
        self,
        store: TableStore,
        source: MergeSource,
        schema: pa.Schema,
        key_hash: KeyHash,
        batch_bytes: int,
    ) -> None:
        self._schema = schema
        index = open_index(store, source.file, key_hash)
        wanted = np.zeros(source.file.rows, dtype=np.bool_)
        wanted[row_numbers(source.wanted())] = True
        self.bytes_per_row = max(1, 2 * source.file.size // max(1, source.file.rows))
        chosen = wanted if index.rows is None else wanted[index.rows]
        self.h1: Hashes = index.h1[chosen]
        self.h2: Hashes = index.h2[chosen]
        self._batches = read_rows_at(store, source.file, wanted, schema, batch_bytes=batch_bytes)
        if index.rows is not None:
            self._batches = _reordered(self._batches, wanted, index.rows[chosen])
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0

    def take(self, count: int) -> pa.Table:
        while self._waiting_rows < count:
            batch = next(self._batches)
            self._waiting.append(batch)
            self._waiting_rows += batch.num_rows
        rows = pa.Table.from_batches(self._waiting, schema=self._schema)
        rest = rows.slice(count)
        self._waiting = rest.to_batches()
        self._waiting_rows = rest.num_rows
        return rows.slice(0, count)


def _reordered(
    batches: Iterator[pa.RecordBatch], wanted: NDArray[np.bool_], order: Rows
) -> Iterator[pa.RecordBatch]:
    """Rows of a foreign file, which has an order of its own and is therefore read whole."""
    rows = pa.Table.from_batches(list(batches))
    place = np.cumsum(wanted) - 1
    yield from rows.take(pa.array(place[order])).to_batches()
