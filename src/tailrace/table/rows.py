"""The rows of a mirrored table: one for each document, made of changes, column by column.

A document is (vbucket, key): the server takes any key in any vbucket, and plain memcached clients use
vbucket 0 for all keys. Keys and values are text if they are UTF-8, otherwise base64 in a separate column.
A typed table also has columns of the documents' fields (`document_columns`).
"""

from __future__ import annotations

import base64
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ..columns.batch import SCHEMA as CHANGE_SCHEMA
from ..columns.row_kinds import are_mutations
from .document_columns import DocumentColumns
from .typed import RESCUED

__all__ = [
    "DELETED",
    "TABLE_SCHEMA",
    "as_text",
    "key_bytes",
    "rows_of",
    "table_schema",
    "with_document_columns",
]

TABLE_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("key_base64", pa.string()),
        ("value", pa.string()),
        ("value_base64", pa.string()),
        *map(
            CHANGE_SCHEMA.field,
            ("vbucket", "vb_uuid", "seqno", "cas", "rev", "flags", "expiry", "datatype", "event_time"),
        ),
    ]
)
"""One row per live document."""

DELETED = pa.field("deleted", pa.bool_())
"""An additional column, if deletions stay visible."""

_TEXT = ("key", "key_base64", "value", "value_base64")
_VALUE = ("value", "value_base64")


def table_schema(*, keep_deletes: bool, documents: DocumentColumns | None = None) -> pa.Schema:
    """The schema of a mirrored table; ``documents`` are the columns of a typed one."""
    schema = TABLE_SCHEMA.append(DELETED) if keep_deletes else TABLE_SCHEMA
    if documents is None:
        return schema
    own = [field for field in schema if documents.keep_value or field.name not in _VALUE]
    return pa.schema([*own, pa.field(RESCUED, pa.string()), *documents.columns])


def rows_of(changes: pa.Table, *, keep_deletes: bool = False) -> pa.Table:
    """Changes as rows of the table; deletions are left out, or kept without a value and marked."""
    is_mutation = are_mutations(changes)
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


def with_document_columns(rows: pa.Table, documents: DocumentColumns) -> tuple[pa.Table, DocumentColumns]:
    """Rows with the columns of their documents; and those columns, including fields that are new."""
    typed, documents = documents.parse(rows["value"])
    if rows["value_base64"].null_count < rows.num_rows:
        typed = typed.set_column(0, RESCUED, _with_binary(typed[RESCUED], rows["value_base64"], documents))
    for name, column in zip(typed.column_names, typed.columns, strict=True):
        rows = rows.append_column(name, column)
    return (rows if documents.keep_value else rows.drop_columns(list(_VALUE))), documents


def _with_binary(
    rescued: pa.ChunkedArray, encoded: pa.ChunkedArray, documents: DocumentColumns
) -> pa.ChunkedArray:
    """The rescued column, with an entry for each value that is not text and so not a document."""
    texts = rescued.to_pylist()
    for row, text in enumerate(encoded.to_pylist()):
        if text is not None:
            whole = {} if documents.keep_value else {"value_base64": text}
            texts[row] = json.dumps({"": {**whole, "reason": "no text"}}, separators=(",", ":"))
    return pa.chunked_array([pa.array(texts, pa.string())])


def key_bytes(rows: pa.Table) -> pa.ChunkedArray:
    """The keys of rows of the table as bytes, whichever column they are in."""
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
    """`as_text` value by value, for columns in which some values are not text."""
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
