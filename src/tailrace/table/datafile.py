"""A data file of the table: rows in the order of h1, and their index between the last page and the footer.

Parquet's offsets are absolute and its footer is found from the end of the file, so readers of Parquet never
see what is between pages and footer.
"""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .. import rng as dice
from ..clock import SYSTEM, Clock
from ..files import Buffer, WriteOnly
from .contract import DataFile
from .hashing import Hashes
from .nested import leaf_columns, leaf_paths
from .store import TableStore, Writable
from .typed import RESCUED

__all__ = [
    "BASE",
    "FIRST_TIER",
    "MAX_FILE_BYTES",
    "MAX_FILE_ROWS",
    "TIER",
    "DataFileWriter",
    "FileStatistics",
    "new_name",
    "size_of",
]

BASE = "base"
"""The kind of a file whose range no other file of the base overlaps."""
TIER = "tier"
"""... with a number: a file of rows that lie above the base."""
FIRST_TIER = f"{TIER}0"

MAX_FILE_ROWS = 320_000
MAX_FILE_BYTES = 96 << 20
"""The most that a data file holds, as rows in memory. A single document may be larger."""

_GROUP_ROWS = 64 << 10
_GROUP_BYTES = 8 << 20
"""The size of a row group, which a reader of even a few rows must decode."""

_GATHERED_BYTES = 1 << 20

_STATISTICS = ("key", "vbucket", "seqno", "event_time")
"""Columns whose smallest and largest values let engines skip files."""
_OF_A_LOG = "log_version"
"""... and this one, in a change log."""
_MORE_STATISTICS = 32
"""... and at most this many columns of documents."""
_LONG = frozenset({"value", "value_base64", "key_base64", RESCUED})
_DISTINCT = frozenset({"key", "value", "seqno", "cas", "event_time"})
"""Columns whose values hardly repeat: dictionaries of them would be wasted."""
_LOOKED_AT = 2048
"""How many rows are sampled to see whether the values of a document's column repeat."""

_STATISTICS_CHARACTERS = 32
_HIGHEST = "\U0010ffff"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def size_of(rows: pa.Table | pa.RecordBatch) -> int:
    """Bytes of rows in memory; of a slice, only its own rows."""
    return int(rows.nbytes)


def new_name(rng: random.Random) -> str:
    """A name that no other file has."""
    return f"part-{uuid.UUID(bytes=rng.randbytes(16), version=4)}.parquet"


@dataclass
class _Range:
    """The smallest and the largest value of a column, over all rows of a file."""

    low: Any = None
    high: Any = None

    def add(self, column: pa.ChunkedArray | pa.Array) -> None:
        low, high = pc.min_max(column).as_py().values()
        if low is not None:
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)


class FileStatistics:
    """What Delta's log says of the rows of a file: how many, and the range of some columns."""

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = 0
        self._ranges = {name: _Range() for name in _with_statistics(schema)}
        self._nulls = dict.fromkeys(self._ranges, 0)

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        """More rows of the file."""
        self.rows += rows.num_rows
        for name, values in self._ranges.items():
            values.add(rows[name])
            self._nulls[name] += rows[name].null_count

    def to_json(self) -> str:
        """The statistics as the log has them."""
        ranges = {name: values for name, values in self._ranges.items() if values.low is not None}
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {name: _smallest(values.low) for name, values in ranges.items()},
                "maxValues": {name: _largest(values.high) for name, values in ranges.items()},
                "nullCount": self._nulls,
            },
            separators=(",", ":"),
        )


class DataFileWriter:
    """Writes one file. Rows must come in ascending order of h1; nothing is visible before `close`."""

    def __init__(
        self,
        store: TableStore,
        schema: pa.Schema,
        *,
        kind: str,
        clock: Clock = SYSTEM,
        rng: random.Random | None = None,
    ) -> None:
        self.path = new_name(rng or dice.source())
        self.kind = kind
        self._clock = clock
        self._schema = schema
        self._creating = store.create(self.path)
        self._out = _GatheredWrites(self._creating.__enter__())
        self._h1: list[Hashes] = []
        self._h2: list[Hashes] = []
        self._statistics = FileStatistics(schema)
        self._parquet: pq.ParquetWriter | None = None
        """Made for the first rows: how a column is written depends on what is in it."""
        self.bytes = 0
        """The size of the rows in memory."""

    def write(self, rows: pa.Table, h1: Hashes, h2: Hashes) -> None:
        """Append rows."""
        if not rows.num_rows:
            return
        try:
            size = size_of(rows)
            per_group = max(1, min(_GROUP_ROWS, _GROUP_BYTES * rows.num_rows // max(1, size)))
            if self._parquet is None:
                self._parquet = self._pages(rows)
            self._parquet.write_table(rows, row_group_size=per_group)
        except BaseException as error:
            self._abandon(error)
            raise
        self._statistics.add(rows)
        self._h1.append(h1)
        self._h2.append(h2)
        self.bytes += size

    def _pages(self, rows: pa.Table) -> pq.ParquetWriter:
        return pq.ParquetWriter(self._out, self._schema, **_parquet_options(rows))

    @property
    def rows(self) -> int:
        """How many were written."""
        return self._statistics.rows

    def close(self) -> DataFile:
        """Write index and footer; the file is durable when this returns."""
        h1 = np.concatenate(self._h1) if self._h1 else np.zeros(0, np.uint64)
        try:
            parquet = self._parquet or self._pages(self._schema.empty_table())
            offset = self._out.tell()
            self._out.write(h1.astype("<u8", copy=False).tobytes())
            for part in self._h2:
                self._out.write(part.astype("<u8", copy=False).tobytes())
            parquet.close()
            self._out.flush()
            size = self._out.tell()
        except BaseException as error:
            self._abandon(error)
            raise
        self._creating.__exit__(None, None, None)
        return DataFile(
            path=self.path,
            size=size,
            rows=self.rows,
            kind=self.kind,
            low=int(h1[0]) if self.rows else 0,
            high=int(h1[-1]) if self.rows else 0,
            index_offset=offset,
            stats=self._statistics.to_json(),
            modified_ms=self._clock.time_ns() // 1_000_000,
        )

    def abandon(self) -> None:
        """Discard the file; nothing of it stays."""
        if self._parquet is not None:
            self._parquet.is_open = False  # else it writes its footer when it is collected
        self._abandon(_Abandoned())

    def _abandon(self, error: BaseException) -> None:
        try:
            self._creating.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is not error:
                raise


class _GatheredWrites(WriteOnly):
    """Passes writes on a mebibyte or so at a time.

    Arrow writes every page and its header separately: thousands of calls for a file of many columns.
    """

    def __init__(self, out: Writable) -> None:
        self._out = out
        self._parts: list[bytes] = []
        self._waiting = 0

    def write(self, data: Buffer) -> int:
        part = bytes(data)  # Arrow reuses its memory; what is bytes already is not copied
        self._parts.append(part)
        self._waiting += len(part)
        if self._waiting >= _GATHERED_BYTES:
            self.flush()
        return len(part)

    def flush(self) -> None:
        """Pass on what waits."""
        parts, self._parts, self._waiting = self._parts, [], 0
        if parts:
            self._out.write(b"".join(parts))

    def tell(self) -> int:
        return self._out.tell() + self._waiting


class _Abandoned(Exception):
    """Tells the store that a file is discarded on purpose."""


def _with_statistics(schema: pa.Schema) -> list[str]:
    """The columns whose smallest and largest values go into the log."""
    names = [name for name in _STATISTICS if name in schema.names]
    if _OF_A_LOG in schema.names and RESCUED not in schema.names:
        names.append(_OF_A_LOG)
    made = [field.name for field in _made_of_documents(schema) if _has_order(field.type)]
    return names + made[:_MORE_STATISTICS]


def _made_of_documents(schema: pa.Schema) -> list[pa.Field]:
    """The columns that only a typed table has."""
    return list(schema)[schema.get_field_index(RESCUED) + 1 :] if RESCUED in schema.names else []


def _has_order(kind: pa.DataType) -> bool:
    """Whether engines skip by values of this type, and agree on how they are written."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_moment = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    return bool(is_number or is_moment or pa.types.is_string(kind))


def _parquet_options(rows: pa.Table) -> dict[str, Any]:
    """How to write rows like these."""
    made = {field.name for field in _made_of_documents(rows.schema)}
    dictionaries: list[str] = []
    statistics: list[str] = []
    for field in rows.schema:
        leaves = leaf_paths(field.name, field.type)
        if field.name not in _LONG:
            statistics += leaves
        if field.name in made:
            dictionaries += _repetitive(field.name, rows[field.name])
        elif field.name not in _DISTINCT:
            dictionaries += leaves
    return {
        "compression": "snappy",
        "use_dictionary": dictionaries,
        "write_statistics": statistics,
        "store_schema": False,
    }


def _repetitive(name: str, column: pa.ChunkedArray) -> list[str]:
    """The parts of a column in which most values repeat."""
    sample = column.slice(0, _LOOKED_AT)
    first = pa.concat_arrays(sample.chunks) if sample.num_chunks else pa.array([], column.type)
    return [
        path
        for path, values in leaf_columns(name, first)
        if 2 * len(pc.unique(values)) <= max(2, len(values))
    ]


def _smallest(value: Any) -> Any:
    """A lower bound for Delta's statistics: a text may be cut, which does not make it larger."""
    if isinstance(value, str):
        return value[:_STATISTICS_CHARACTERS]
    if isinstance(value, datetime):
        return _instant(value)
    # the zero that is smaller to engines that tell the two apart
    return -0.0 if isinstance(value, float) and value == 0 else _plain(value)


def _largest(value: Any) -> Any:
    """An upper bound: a text that is cut gets a character after it that is above all others."""
    if isinstance(value, str):
        cut = _STATISTICS_CHARACTERS
        while value[cut : cut + 1] == _HIGHEST:
            cut += 1
        return value if len(value) <= cut else value[:cut] + _HIGHEST
    if isinstance(value, datetime):  # Delta keeps milliseconds, so it is rounded up
        return _instant(value, up=True)
    return 0.0 if isinstance(value, float) and value == 0 else _plain(value)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value


def _instant(value: datetime, *, up: bool = False) -> str:
    micros = (value.astimezone(UTC) - _EPOCH) // _MICROSECOND
    millis = -(-micros // 1000) if up else micros // 1000
    moment = _EPOCH + millis * 1000 * _MICROSECOND
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
