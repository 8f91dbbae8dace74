"""The rows of a mirrored table: one for each document, made of changes, column by column.

A document is (vbucket, key): the server takes any key in any vbucket, and plain memcached clients use
vbucket 0 for all of them. Keys and values are text where they are UTF-8, otherwise base64 in a column beside.
"""

from __future__ import annotations

import base64

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = ["DELETED", "TABLE_SCHEMA", "as_text", "document_ops", "key_bytes", "rows_of", "table_schema"]

TABLE_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("key_base64", pa.string()),
        ("value", pa.string()),
        ("value_base64", pa.string()),
        ("vbucket", pa.int32()),
        ("vb_uuid", pa.int64()),
        ("seqno", pa.int64()),
        ("cas", pa.int64()),
        ("rev", pa.int64()),
        ("flags", pa.int32()),
        ("expiry", pa.int64()),
        ("datatype", pa.string()),
        ("event_time", pa.timestamp("us", tz="UTC")),
    ]
)
"""One row per live document."""

DELETED = pa.field("deleted", pa.bool_())
"""The column that a table has more when deletions stay visible."""

_TEXT = ("key", "key_base64", "value", "value_base64")


def document_ops() -> pa.Array:
    """The kinds of change that concern a document; all others say something about the stream."""
    return pa.array(["mutation", "deletion", "expiration"])


def table_schema(*, keep_deletes: bool) -> pa.Schema:
    """The schema of a mirrored table."""
    return TABLE_SCHEMA.append(DELETED) if keep_deletes else TABLE_SCHEMA


def rows_of(changes: pa.Table, *, keep_deletes: bool = False) -> pa.Table:
    """Changes as rows of the table; deletions are left out, or kept without a value and marked."""
    is_mutation = pc.equal(changes["op"], "mutation")
    if not keep_deletes:
        changes = changes.filter(is_mutation)
    key, key_base64 = as_text(changes["key"])
    value, value_base64 = as_text(changes["value"])
    made = dict(zip(_TEXT, (key, key_base64, value, value_base64), strict=True))
    columns = [
        made[field.name] if field.name in made else changes[field.name].cast(field.type)
        for field in TABLE_SCHEMA
    ]
    if keep_deletes:
        columns.append(pc.invert(is_mutation))
    return pa.table(columns, schema=table_schema(keep_deletes=keep_deletes))


def key_bytes(rows: pa.Table) -> pa.ChunkedArray:
    """The keys of rows of the table as bytes, whichever column they stand in."""
    keys = rows["key"].cast(pa.binary())
    if not keys.null_count:
        return keys
    decoded = [None if text is None else base64.b64decode(text) for text in rows["key_base64"].to_pylist()]
    return pc.coalesce(keys, pa.chunked_array([pa.array(decoded, pa.binary())]))


def as_text(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Bytes as text where they are UTF-8, else as base64 in the second column."""
    try:
        return column.cast(pa.string()), pa.chunked_array([pa.nulls(len(column), pa.string())])
    except pa.ArrowInvalid:
        return _split_text(column)


def _split_text(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Chunk by chunk is too coarse where a single value is no text: value by value."""
    text: list[str | None] = []
    encoded: list[str | None] = []
    for data in column.to_pylist():
        try:
            text.append(None if data is None else data.decode())
            encoded.append(None)
        except UnicodeDecodeError:
            text.append(None)
            encoded.append(base64.b64encode(data).decode())
    return pa.chunked_array([pa.array(text, pa.string())]), pa.chunked_array([pa.array(encoded, pa.string())])


def vbuckets_of(rows: pa.Table) -> NDArray[np.int32]:
    """The column ``vbucket`` as an array."""
    return np.asarray(rows["vbucket"].to_numpy(), dtype=np.int32)
