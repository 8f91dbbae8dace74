"""Live rows for engines without deletion vectors: a plain Delta table, or a folder of Parquet files.

A second export replaces a Delta table in one commit, which its readers see as a whole, and swaps a folder of
Parquet files for a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .. import rng
from ..clock import SYSTEM
from ..errors import TailraceError, UsageError
from ..files import DiskFiles, remove_tree, whole_file
from ..paths import location
from .datafile import MAX_FILE_BYTES, MAX_FILE_ROWS, FileStatistics, new_name
from .delta.delta_rs import ExportedFile, OrdinaryTable, check_engine_path
from .opening import check_not_inside
from .reading import LiveRows, PositionVector, read_table
from .store import TableStore

__all__ = ["ExportReport", "export_table"]

_NAME = "tailrace export"
_MARK = "_tailrace_export.json"
"""Marks our folder of Parquet files, so that no other folder is replaced."""


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    rows: int
    version: int
    """The version of the mirrored table."""
    format: str


def export_table(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str = "delta",
    version: int | None = None,
    at: PositionVector | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write the live rows of a mirrored table to another place, replacing an earlier export there."""
    if format not in ("delta", "parquet"):
        raise UsageError(f"there is no format {format!r}; write delta or parquet")
    place = location(target, "the path of the export")
    if format == "delta":
        check_engine_path(place.text, "write --format parquet")
    elif not place.is_local:
        raise UsageError(f"{place.text!r} is not a folder on this machine; write --format delta")
    rows = read_table(path, version, at, storage_options=storage_options)
    check_not_inside(place.text, storage_options or {})
    if format == "delta":
        count = _to_delta(rows, place.text, storage_options)
    else:
        count = _to_parquet(rows, place.path)
    return ExportReport(count, rows.table.version if version is None else version, format)


class _CountedRows:
    """Passes rows on and counts them."""

    def __init__(self, rows: LiveRows) -> None:
        self.rows = 0
        self._source = rows

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._source.batches():
            self.rows += batch.num_rows
            yield batch


def _to_delta(rows: LiveRows, target: str, storage_options: Mapping[str, str] | None) -> int:
    """Files are written here, batch by batch; the engine would hold the whole table in memory."""
    ordinary = OrdinaryTable(target, storage_options or {}, _NAME)
    store = TableStore(target, storage_options or {})
    counted = _CountedRows(rows)
    written: list[ExportedFile] = []
    try:
        batches = iter(counted)
        for first in batches:  # _write_part consumes more of them
            name = new_name(rng.source())
            statistics = FileStatistics(rows.schema)
            with store.create(name) as out:
                _write_part(first, batches, out, rows.schema, statistics)
                size = out.tell()
            written.append(ExportedFile(name, size, SYSTEM.time_ns() // 1_000_000, statistics.to_json()))
    except BaseException:
        with contextlib.suppress(TailraceError, OSError):
            store.delete([file.path for file in written])
        raise
    # From here on the files stay: a commit whose answer was lost may have happened.
    note = {"tailrace.version": str(rows.table.version)}
    ordinary.replace(written, rows.schema, note, f"live rows of {rows.table.uri}")
    return counted.rows


def _to_parquet(rows: LiveRows, target: Path) -> int:
    if target.exists() and not (target / _MARK).exists():
        raise UsageError(f"there is something at {target} that is not an export; choose another path")
    beside = target.with_name(f".{target.name}.{rng.unique_name()}")
    files = DiskFiles(target.parent, mode=0o666)
    files.make_directory(beside.name)
    counted = _CountedRows(rows)
    try:
        batches = iter(counted)
        for number, first in enumerate(batches):  # _write_part consumes more of them
            with whole_file(beside / f"part-{number:05d}.parquet") as out:
                _write_part(first, batches, out, rows.schema, FileStatistics(rows.schema))
        with whole_file(beside / _MARK) as out:
            out.write(json.dumps({"table": rows.table.uri, "version": rows.table.version}).encode())
        if target.exists():
            old = target.with_name(f"{beside.name}.old")
            files.rename(target.name, old.name)
            files.rename(beside.name, target.name)
            remove_tree(old)
        else:
            files.rename(beside.name, target.name)
        files.sync_directory("")
    except BaseException:
        remove_tree(beside)
        raise
    return counted.rows


def _write_part(
    first: pa.RecordBatch,
    batches: Iterator[pa.RecordBatch],
    out: object,
    schema: pa.Schema,
    statistics: FileStatistics,
) -> None:
    """As many rows as one file takes."""
    with pq.ParquetWriter(out, schema, compression="snappy") as writer:
        size = 0
        batch: pa.RecordBatch | None = first
        while batch is not None:
            writer.write_batch(batch)
            statistics.add(batch)
            size += batch.nbytes
            if statistics.rows >= MAX_FILE_ROWS or size >= MAX_FILE_BYTES:
                return
            batch = next(batches, None)
