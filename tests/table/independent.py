"""Readers of a Delta table that we did not write, and files for a table that need no mirror."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from pyroaring import BitMap

from tailrace.model import Position
from tailrace.rng import unique_name
from tailrace.table.contract import Commit, DataFile, NewFile, Table
from tailrace.table.store import TableStore

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("value", pa.string()),
        pa.field("vbucket", pa.int32()),
        pa.field("seqno", pa.int64()),
    ]
)
SOURCE = {"bucket": "default", "scope": "_default", "collection": "_default"}

Row = tuple[str, str, int, int]
"""Key, value, vbucket, seqno."""


def vbucket_of(key: str) -> int:
    return hashlib.sha256(key.encode()).digest()[0] % 8


def write_file(
    store: TableStore, rows: Iterable[Row], *, kind: str = "tier0", now_ms: int = 0, dead: Iterable[int] = ()
) -> NewFile:
    """A data file in a table's store, not yet committed."""
    some = list(rows)
    columns = list(zip(*some, strict=True))
    table = pa.table([pa.array(column) for column in columns], names=SCHEMA.names).cast(SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    path = f"{kind}-{unique_name()}.parquet"
    store.put(path, sink.getvalue())
    vbuckets, keys = columns[2], columns[0]
    stats = {
        "numRecords": len(some),
        "minValues": {"key": min(keys), "vbucket": min(vbuckets)},
        "maxValues": {"key": max(keys), "vbucket": max(vbuckets)},
        "nullCount": {"key": 0, "vbucket": 0},
    }
    file = DataFile(
        path,
        len(sink.getvalue()),
        len(some),
        kind,
        min(vbuckets) << 48,
        max(vbuckets) << 48 | 0xFFFF_FFFF_FFFF,
        None,
        json.dumps(stats),
        now_ms,
    )
    masked = BitMap(dead)
    return NewFile(file, bytes(masked.serialize()) if masked else b"")


class NaiveMirror:
    """Writes rounds into a table the simplest way, and knows what must be in it."""

    def __init__(self, table: Table, now_ms: int = 1) -> None:
        self.table = table
        self.rows: dict[str, Row] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.seqnos: dict[int, int] = {}
        self.now_ms = now_ms
        self.states: dict[int, dict[str, Row]] = {table.version: {}}

    def change(self, keys: Iterable[str], deleted: Iterable[str] = (), value: str = "") -> int:
        """One round: some keys are written, some deleted."""
        masked: dict[str, BitMap] = {}
        rows: list[Row] = []
        gone = list(deleted)
        for key in [*keys, *gone]:
            vbucket = vbucket_of(key)
            self.seqnos[vbucket] = self.seqnos.get(vbucket, 0) + 1
            if key in self.places:
                path, number = self.places.pop(key)
                masked.setdefault(path, BitMap()).add(number)
                del self.rows[key]
            if key not in gone:
                rows.append((key, value or f"v{self.seqnos[vbucket]}", vbucket, self.seqnos[vbucket]))
        added = [write_file(self.table.store, rows, now_ms=self.now_ms)] if rows else []
        for number, row in enumerate(rows):
            self.rows[row[0]] = row
            self.places[row[0]] = (added[0].file.path, number)
        version = self.table.commit(
            Commit(
                "TAILRACE ROUND",
                positions={vb: Position.at(1000 + vb, seqno) for vb, seqno in self.seqnos.items()},
                added=added,
                masked=masked,
                counts={"changes": len(rows) + len(gone)},
            )
        )
        self.states[version] = dict(self.rows)
        return version


def query_rows(
    uri: str, options: Mapping[str, str] | None = None, version: int | None = None
) -> dict[str, Row]:
    """The rows as delta-rs' query engine sees them."""
    delta = DeltaTable(uri, storage_options=dict(options or {}), version=version)
    result = (
        QueryBuilder().register("t", delta).execute("select key, value, vbucket, seqno from t").read_all()
    )
    return as_rows(pa.table(result).to_pylist())


def polars_rows(
    uri: str, options: Mapping[str, str] | None = None, version: int | None = None
) -> dict[str, Row]:
    """The rows as polars sees them."""
    frame = pl.read_delta(uri, storage_options=dict(options or {}) or None, version=version)
    return as_rows(frame.to_dicts())


def as_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    by_key: dict[str, Row] = {}
    for row in rows:
        assert row["key"] not in by_key, f"{row['key']} is there twice"
        by_key[row["key"]] = (row["key"], row["value"], row["vbucket"], row["seqno"])
    return by_key


def own_rows(table: Table, version: int | None = None) -> dict[str, Row]:
    """The rows by our own reading of files and masks."""
    rows: list[dict[str, Any]] = []
    for file in table.files(version):
        dead = table.mask(file)
        with table.store.open(file.path) as opened:
            content = pq.read_table(opened).to_pylist()
        assert len(content) == file.rows
        rows += [row for number, row in enumerate(content) if number not in dead]
    return as_rows(rows)


def check_rows(table: Table, expected: Mapping[str, Row], options: Mapping[str, str] | None = None) -> None:
    """All three readers agree."""
    assert own_rows(table) == dict(expected)
    assert query_rows(table.uri, options) == dict(expected)
    assert polars_rows(table.uri, options) == dict(expected)
