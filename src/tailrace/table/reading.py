"""Tables read without Spark: live rows as Arrow, pandas or polars.

    rows = tailrace.read_table("/data/people", columns=["key", "value"])
    rows.to_pandas()

A table is read at its newest version, at an earlier one, or at a vector of positions: then each vbucket is
read in the newest state that it had at or before its position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap

from ..errors import UsageError
from ..keywords import check_values, is_by_vbucket
from ..model import Position, parse_positions
from .contract import DataFile, Table
from .file_reading import scan
from .hashing import KeyHash
from .lookup import rows_of_vbuckets
from .opening import TableOptions, open_table

if TYPE_CHECKING:
    import pandas
    import polars

__all__ = ["LiveFile", "LiveRows", "live_files", "read_table"]

PositionVector = Mapping[int, "Position | int"] | str
"""By vbucket a position, or only a seqno; or positions as JSON, as readers and Spark's offsets have them."""

_BESIDES = ("bucket", "failover_log", "points", "purge_seqno", "origin")
"""Members other than a position's own, in offsets and in saved states of readers."""


def read_table(
    path: str | os.PathLike[str],
    version: int | None = None,
    at: PositionVector | None = None,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | Sequence[Any] | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> LiveRows:
    """The live rows of a mirrored table, without Spark.

    Give either ``version``, a version of the table, or ``at``, a position by vbucket (a `Position`, a seqno,
    or all of them as JSON), or neither for the newest rows. ``filter`` is an expression of pyarrow or a list
    such as ``[("vbucket", "=", 7)]``; files and row groups that can't have a matching row are not read.
    """
    given = {"version": version, "columns": columns, "filter": filter, "storage_options": storage_options}
    check_values(read_table, given)
    table = open_table(path, TableOptions(storage_options or {}))
    schema = table.schema if version is None else table.schema_of(version)
    names = list(schema.names if columns is None else columns)
    unknown = [name for name in names if name not in schema.names]
    if unknown:
        raise UsageError(f"the table has no column {unknown[0]!r}; it has {', '.join(schema.names)}")
    files = live_files(table, version, at)
    return LiveRows(table, tuple(files), schema, tuple(names), _condition(filter, schema))


def _condition(filter: pc.Expression | Sequence[Any] | None, schema: pa.Schema) -> pc.Expression | None:
    """The filter as an expression; `UsageError` if it can't be applied to rows of the schema."""
    if filter is None:
        return None
    try:
        where = filter if isinstance(filter, pc.Expression) else pq.filters_to_expression(filter)
        schema.empty_table().filter(where)
    except (ValueError, TypeError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f'{str(filter)[:80]} is no filter of this table, write [("vbucket", "=", 7)]: {reason}'
        ) from None
    return where


@dataclass(frozen=True)
class LiveFile:
    """A data file, and its dead rows."""

    file: DataFile
    dead: BitMap


def live_files(table: Table, version: int | None = None, at: PositionVector | None = None) -> list[LiveFile]:
    """The files to read, with the rows that are dead at that version or position."""
    if at is None:
        return [LiveFile(file, table.mask(file)) for file in table.files(version)]
    if version is not None:
        raise UsageError("version and at exclude each other")
    by_version: dict[int, list[int]] = {}
    wanted = parse_positions(at, besides=_BESIDES) if isinstance(at, str) else at
    if not is_by_vbucket(wanted, Position, Integral):
        raise UsageError("at is a mapping of vbucket to Position or seqno, or their JSON")
    wanted = {
        int(vbucket): place if isinstance(place, Position) else int(place)
        for vbucket, place in wanted.items()
    }
    for vbucket, position in wanted.items():
        chosen = _version_at(table, vbucket, position)
        if chosen is not None:
            by_version.setdefault(chosen, []).append(vbucket)
    rest = [vbucket for vbucket in table.current.positions if vbucket not in wanted]
    by_version.setdefault(table.version, []).extend(rest)
    alive: dict[str, tuple[DataFile, BitMap]] = {}
    key_hash = KeyHash(table.secret)
    for number, vbuckets in by_version.items():
        files = {file.path: file for file in table.files(number)}
        for path, rows in rows_of_vbuckets(table.store, list(files.values()), key_hash, vbuckets).items():
            _, known = alive.setdefault(path, (files[path], BitMap()))
            known |= rows - table.mask(files[path])
    return [LiveFile(file, BitMap(range(file.rows)) - rows) for file, rows in alive.values() if rows]


def _version_at(table: Table, vbucket: int, wanted: Position | int) -> int | None:
    """The newest version in which a vbucket was at or before a position; None if it had nothing then.

    Versions on branches older than the position's own count too: they are on the way to it.
    """
    seqno = wanted.seqno if isinstance(wanted, Position) else wanted
    if seqno == 0:
        return None
    branch = wanted.vb_uuid if isinstance(wanted, Position) else None
    is_on_the_way = branch is None
    oldest: Position | None = None
    for version, position in table.lineage(vbucket):
        is_on_the_way = is_on_the_way or position.vb_uuid == branch
        if is_on_the_way and position.seqno <= seqno:
            return version
        oldest = position
    if oldest is None and vbucket not in table.current.positions:
        return None
    reach = "no version of it is kept" if oldest is None else f"the oldest that is kept has {oldest.seqno}"
    if oldest is not None and not is_on_the_way:
        reach = f"no version that is kept stands on branch {branch}"
    raise UsageError(f"the table can't show vbucket {vbucket} at seqno {seqno} or before: {reach}")


@dataclass(frozen=True)
class LiveRows:
    """Rows of a table that have not been read yet."""

    table: Table
    files: tuple[LiveFile, ...]
    table_schema: pa.Schema
    columns: tuple[str, ...]
    where: pc.Expression | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return pa.schema([self.table_schema.field(name) for name in self.columns])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows in batches of at most a few megabytes."""
        dead = {live.file.path: live.dead for live in self.files}
        return scan(
            self.table.store,
            [live.file for live in self.files],
            dead,
            self.table_schema,
            key_hash=KeyHash(self.table.secret),
            columns=self.columns,
            where=self.where,
        )

    def reader(self) -> pa.RecordBatchReader:
        """The rows as a stream that tools built on Arrow (DuckDB, DataFusion) read."""
        return pa.RecordBatchReader.from_batches(self.schema, self.batches())

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return pa.Table.from_batches(self.batches(), schema=self.schema)

    def to_pandas(self) -> pandas.DataFrame:
        """All rows as a pandas frame."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """All rows as a polars frame."""
        import polars

        frame = polars.from_arrow(self.to_arrow())
        assert isinstance(frame, polars.DataFrame)
        return frame

    def count(self) -> int:
        """How many rows there are; without ``filter`` no file is read for it."""
        if self.where is None:
            return sum(live.file.rows - len(live.dead) for live in self.files)
        return sum(batch.num_rows for batch in self.batches())
