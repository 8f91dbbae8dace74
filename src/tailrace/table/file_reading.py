"""The live rows of a table: files read in bounded batches, without the rows that are masked."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyroaring import BitMap

from .contract import DataFile
from .damage import damage_named
from .hashing import KeyHash
from .index import open_index, row_numbers
from .nested import with_parts
from .store import TableStore

__all__ = ["read_rows_at", "rows_per_batch", "scan"]

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 64 << 10
_MOST_FOOTERS = 64


def scan(
    store: TableStore,
    files: Iterable[DataFile],
    masks: Mapping[str, BitMap],
    schema: pa.Schema,
    *,
    key_hash: KeyHash,
    columns: Sequence[str] | None = None,
    vbuckets: tuple[int, int] | None = None,
    where: pc.Expression | None = None,
) -> Iterator[pa.RecordBatch]:
    """Live rows of files; ``masks`` has the dead ones by path.

    ``vbuckets`` is the first and the last that is wanted, ``where`` a condition on rows; row groups whose
    statistics rule it out are not read. A column that a file does not have is null.
    """
    for file in files:
        if vbuckets is not None and (file.high >> 48 < vbuckets[0] or file.low >> 48 > vbuckets[1]):
            continue
        alive = np.ones(file.rows, dtype=np.bool_)
        mask = masks.get(file.path)
        if mask:
            alive[row_numbers(mask)] = False
        if vbuckets is not None:
            alive &= _of_vbuckets(store, file, key_hash, *vbuckets)
        yield from read_rows_at(store, file, alive, schema, columns=columns, where=where)


def read_rows_at(
    store: TableStore,
    file: DataFile,
    wanted: NDArray[np.bool_],
    schema: pa.Schema,
    *,
    columns: Sequence[str] | None = None,
    where: pc.Expression | None = None,
    batch_bytes: int = _BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    """The wanted rows of a file, in their order; row groups without any are not read.

    With small batches a row group is also read page by page, for callers that read many files together.
    """
    if not wanted.any():
        return
    names = schema.names if columns is None else list(columns)
    with damage_named(file):
        buffered = batch_bytes if batch_bytes < _BATCH_BYTES else 0
        parquet = pq.ParquetFile(store.open(file.path), buffer_size=buffered)
    with parquet:
        if where is None:
            yield from _read(parquet, file, wanted, _fields(schema, names), batch_bytes)
            return
        wanted = wanted & _may_fit(parquet, store, file, schema, where)
        # the condition may use columns that are not asked for
        for rows in _read(parquet, file, wanted, schema):
            fitting = rows.filter(where)
            if fitting.num_rows:
                yield fitting.select(names)


def rows_per_batch(store: TableStore, files: Iterable[DataFile], most: int) -> int:
    """How many rows make a few mebibytes, for engines that count their batches in rows.

    The files with the longest rows decide; their footers have the uncompressed size.
    """
    per_row = 1
    for file in heapq.nlargest(_MOST_FOOTERS, files, key=lambda file: file.size / max(1, file.rows)):
        with damage_named(file), pq.ParquetFile(store.open(file.path)) as parquet:
            for number in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(number)
                per_row = max(per_row, group.total_byte_size // max(1, group.num_rows))
    return max(1, min(most, _BATCH_BYTES // per_row))


def _fields(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names])


def _read(
    parquet: pq.ParquetFile,
    file: DataFile,
    wanted: NDArray[np.bool_],
    fields: pa.Schema,
    batch_bytes: int = _BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    there = set(parquet.schema_arrow.names)
    names = [name for name in fields.names if name in there]
    first = 0
    for number in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(number)
        chosen = wanted[first : first + group.num_rows]
        first += group.num_rows
        if not chosen.any():
            continue
        per_batch = max(1, min(_BATCH_ROWS, batch_bytes * group.num_rows // max(1, group.total_byte_size)))
        done = 0
        with damage_named(file):
            for batch in _batches(parquet, number, per_batch, names):
                is_wanted = chosen[done : done + batch.num_rows]
                done += batch.num_rows
                # cast to our types first: some types that others write, such as views, can't be filtered
                rows = _shaped(batch, fields)
                rows = rows if is_wanted.all() else rows.filter(pa.array(is_wanted))
                # a caller that reads many files together leaves all but one waiting here: hold no rows
                handed_on = [rows] if rows.num_rows else []
                del batch, rows
                while handed_on:
                    yield handed_on.pop()


def _batches(parquet: pq.ParquetFile, group: int, rows: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    """A row group in batches of so many rows. If it is a single batch, no decoder keeps its pages."""
    if rows < parquet.metadata.row_group(group).num_rows:
        yield from parquet.iter_batches(batch_size=rows, row_groups=[group], columns=names)
        return
    batches = parquet.read_row_group(group, columns=names).to_batches()
    batches.reverse()
    while batches:
        yield batches.pop()


def _may_fit(
    parquet: pq.ParquetFile, store: TableStore, file: DataFile, schema: pa.Schema, where: pc.Expression
) -> NDArray[np.bool_]:
    """The rows of row groups whose statistics do not rule them out."""
    with damage_named(file):
        fragment = ds.ParquetFileFormat().make_fragment(store.open(file.path))
        groups = {group.id for group in fragment.subset(where, schema=schema).row_groups}
    sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
    return np.repeat([number in groups for number in range(len(sizes))], sizes)


def _shaped(rows: pa.RecordBatch, fields: pa.Schema) -> pa.RecordBatch:
    there = set(rows.schema.names)
    columns = [
        with_parts(rows[field.name], field.type)
        if field.name in there
        else pa.nulls(rows.num_rows, field.type)
        for field in fields
    ]
    return pa.record_batch(columns, schema=fields)


def _of_vbuckets(
    store: TableStore, file: DataFile, key_hash: KeyHash, first: int, last: int
) -> NDArray[np.bool_]:
    index = open_index(store, file, key_hash)
    low, high = index.bounds(first, last)
    chosen = np.zeros(file.rows, dtype=np.bool_)
    chosen[np.arange(low, high) if index.rows is None else index.rows[low:high]] = True
    return chosen
