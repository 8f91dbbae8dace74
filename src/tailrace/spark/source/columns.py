"""The columns of the source by name, with Spark's types. Light to import: Spark loads it to find the source.

They are those of `tailrace.columns.SCHEMA`, in its order; a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .options import Options

__all__ = ["COLUMN_TYPES", "TEXT_OR_BINARY", "column_types", "ddl"]

COLUMN_TYPES = {
    "op": "string",
    "key": "binary",
    "value": "binary",
    "bucket": "string",
    "scope": "string",
    "collection": "string",
    "vbucket": "int",
    "vb_uuid": "bigint",
    "seqno": "bigint",
    "rev": "bigint",
    "cas": "bigint",
    "flags": "int",
    "expiry": "bigint",
    "datatype": "string",
    "xattrs": "string",
    "event_time": "timestamp",
    "snapshot_start": "bigint",
    "snapshot_end": "bigint",
}

TEXT_OR_BINARY = ("key", "value")
"""Columns that are bytes on the wire, and that a query may read as text."""


def column_types(options: Options) -> dict[str, str]:
    """The columns that leave a reader, with their types."""
    types = dict(COLUMN_TYPES)
    types["key"], types["value"] = options.key_format, options.value_format
    return types if options.columns is None else {name: types[name] for name in options.columns}


def ddl(types: dict[str, str]) -> str:
    """Columns as Spark reads them."""
    return ", ".join(f"{name} {type_.upper()}" for name, type_ in types.items())
