"""How changes become rows: the mirror's rewrite of one group of vbuckets, as plain Arrow.

A group's rows are read from the files that hold them, the changes of a batch are folded in, and the result is
what the new file will hold. Nothing here knows Spark or Delta; everything is columnar, because a group is
rewritten whole whenever one of its documents changes.

A document is (vbucket, key): the server takes any key in any vbucket, and plain memcached clients use
vbucket 0 for all of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = [
    "DELETED",
    "DOCUMENT_OPS",
    "TABLE_SCHEMA",
    "as_text",
    "documents_of",
    "fold",
    "number_documents",
    "rows_of",
    "table_schema",
]

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

DOCUMENT_OPS = pa.array(["mutation", "deletion", "expiration"])
"""Rows that change a document; all others say something about the stream."""

_NO_DOCUMENT = np.iinfo(np.int64).max


def table_schema(*, keep_deletes: bool) -> pa.Schema:
    """The schema of a mirror's table."""
    return TABLE_SCHEMA.append(DELETED) if keep_deletes else TABLE_SCHEMA


def fold(
    held: pa.Table,
    changes: pa.Table,
    *,
    reset: Mapping[int, pa.Table] | None = None,
    keep_deletes: bool = False,
) -> pa.Table:
    """The group's rows after the changes, ordered by vbucket and seqno.

    ``held`` are the rows before, ``changes`` rows of the source in the order in which they came. ``reset``
    names vbuckets whose rows are not those held but the ones given: an earlier version's after a rollback,
    or none at all. Of several changes to a document the last one counts.
    """
    base = held
    if reset:
        kept = pc.invert(pc.is_in(held["vbucket"], value_set=pa.array(list(reset), pa.int32())))
        base = pa.concat_tables([held.filter(kept), *reset.values()])
    changes = changes.filter(pc.is_in(changes["op"], value_set=DOCUMENT_OPS))
    if changes.num_rows:
        changed_documents, base_documents = _number(
            changes["key"], changes["vbucket"], documents_of(base), base["vbucket"]
        )
        last = _last_of_each(changed_documents)
        gone = np.isin(base_documents, changed_documents[last])
        changed = changes.take(pa.array(last))
        base = pa.concat_tables([base.filter(pa.array(~gone)), rows_of(changed, keep_deletes=keep_deletes)])
    return base.sort_by([("vbucket", "ascending"), ("seqno", "ascending")])


def rows_of(changes: pa.Table, *, keep_deletes: bool = False) -> pa.Table:
    """Changes in the mirror's columns; deletions are left out, or kept without a value and marked."""
    is_mutation = pc.equal(changes["op"], "mutation")
    if not keep_deletes:
        changes = changes.filter(is_mutation)
    key, key_base64 = as_text(changes["key"])
    value, value_base64 = as_text(changes["value"])
    columns = [key, key_base64, value, value_base64]
    columns += [changes[field.name].cast(field.type) for field in list(TABLE_SCHEMA)[4:]]
    if keep_deletes:
        columns.append(pc.invert(is_mutation))
    return pa.table(columns, schema=table_schema(keep_deletes=keep_deletes))


def documents_of(rows: pa.Table) -> pa.ChunkedArray:
    """The keys of mirror rows as bytes, whichever column they stand in."""
    keys = rows["key"].cast(pa.binary())
    if not keys.null_count:
        return keys
    decoded = [None if text is None else base64.b64decode(text) for text in rows["key_base64"].to_pylist()]
    return pc.coalesce(keys, pa.chunked_array([pa.array(decoded, pa.binary())]))


def number_documents(first: pa.Table, second: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A number for each document of two tables of mirror rows: the same where it is the same document."""
    return _number(documents_of(first), first["vbucket"], documents_of(second), second["vbucket"])


def _number(
    keys: pa.ChunkedArray, vbuckets: pa.ChunkedArray, others: pa.ChunkedArray, other_vbuckets: pa.ChunkedArray
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers are (place of the key among ``keys``, vbucket); those only in ``others`` have none."""
    encoded = keys.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    numbers = _numbered(encoded.indices.to_numpy(zero_copy_only=False), vbuckets)
    found = pc.fill_null(pc.index_in(others, value_set=encoded.dictionary), -1)
    places = found.to_numpy() if isinstance(found, pa.ChunkedArray) else found.to_numpy(zero_copy_only=False)
    other_numbers = _numbered(places, other_vbuckets)
    other_numbers[other_numbers < 0] = _NO_DOCUMENT
    return numbers, other_numbers


def _numbered(key_numbers: NDArray[np.int32], vbuckets: pa.ChunkedArray) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = (key_numbers.astype(np.int64) << 16) | vbuckets.to_numpy().astype(np.int64)
    return numbers


def _last_of_each(numbers: NDArray[np.int64]) -> NDArray[np.intp]:
    """Where each number stands for the last time, in rising order."""
    _, from_behind = np.unique(numbers[::-1], return_index=True)
    return np.sort(len(numbers) - 1 - from_behind)


def as_text(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Bytes as text where they are UTF-8, else as base64 in the second column."""
    nothing = pa.chunked_array([pa.nulls(len(column), pa.string())])
    try:
        return column.cast(pa.string()), nothing
    except pa.ArrowInvalid:
        pass
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
