"""Comparing the documents of a table with those of the bucket, in plain Arrow.

Both sides are brought into one form, a row per document, in which a hash of 112 bits stands for the value: so
memory does not depend on the size of values. In a typed table another hash stands for the columns made from
the document, which is parsed again for this. A document is identified by (vbucket, key), because a server
takes any key in any vbucket.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...columns.row_kinds import are_mutations
from ...table.document_columns import DocumentColumns
from ...table.hashing import KeyHash
from ...table.row_digest import digest_rows
from ...table.rows import TABLE_SCHEMA, as_text, key_bytes, with_document_columns
from ...table.typed import RESCUED

__all__ = ["COMPARED", "DIGEST_SCHEMA", "Difference", "Digester", "compare", "newest"]

_NUMBERS = ("cas", "rev", "flags", "expiry", "datatype", "seqno", "vb_uuid")
COMPARED = ("value_1", "value_2", *_NUMBERS, "columns")
"""The columns in which a document must be the same on both sides, the telling ones first."""

DIGEST_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("vbucket", pa.int32()),
        ("deleted", pa.bool_()),
        ("value_1", pa.uint64()),
        ("value_2", pa.uint64()),
        *map(TABLE_SCHEMA.field, ("cas", "rev", "flags", "expiry", "datatype", "seqno", "vb_uuid")),
        ("columns", pa.uint64()),
    ]
)

_TABLE_COLUMNS = ("key", "key_base64", "vbucket", *_NUMBERS)
_VALUE_COLUMNS = ("value", "value_base64")


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that is not the same on both sides."""

    kind: str
    """``missing`` in the table, ``extra`` in the table, or ``different``."""
    vbucket: int
    key: str
    key_base64: str | None
    what: str
    """For people: what is different."""
    newer: bool
    """The bucket's change is above the table's position: the mirror has not read it yet."""

    def __str__(self) -> str:
        late = " (newer than the table's position)" if self.newer else ""
        return f"{self.kind} {self.key} (vbucket {self.vbucket}): {self.what}{late}"


class Digester:
    """Brings rows into the form in which they are compared; ``documents`` are columns of a typed table."""

    def __init__(self, secret: bytes, documents: DocumentColumns | None = None) -> None:
        self._hash = KeyHash(secret)
        # a field for which the table has no column is not a difference
        self._documents = None if documents is None else replace(documents, evolve=False)
        self._has_value = documents is None or documents.keep_value

    def columns(self) -> list[str]:
        """The columns to read from a table."""
        names = [*_TABLE_COLUMNS, *(_VALUE_COLUMNS if self._has_value else ())]
        return names if self._documents is None else [*names, *self._made()]

    def _made(self) -> list[str]:
        return [] if self._documents is None else [RESCUED, *self._documents.columns.names]

    def of_changes(self, changes: pa.Table) -> pa.Table:
        """The form of rows of the source: mutations, deletions and expirations."""
        typed = None
        if self._documents is not None:
            texts = pa.table(as_text(changes["value"]), names=list(_VALUE_COLUMNS))
            typed, _ = with_document_columns(texts, self._documents)
        deleted = pc.invert(are_mutations(changes))
        return self._digest(changes, changes["key"], changes["value"], deleted, typed)

    def of_rows(self, rows: pa.Table) -> pa.Table:
        """The form of rows of a table, without kept deletions."""
        values = _value_bytes(rows) if self._has_value else None
        return self._digest(rows, key_bytes(rows), values, None, None if self._documents is None else rows)

    def _digest(
        self, rows: pa.Table, keys: Any, values: Any, deleted: Any, typed: pa.Table | None
    ) -> pa.Table:
        nothing = np.zeros(rows.num_rows, dtype=np.int32)
        value_1 = value_2 = made = nothing.astype(np.uint64)
        if self._has_value:
            value_1, value_2 = self._hash.hash(pc.fill_null(values.cast(pa.binary()), b""), nothing)
        if typed is not None:
            made = digest_rows(typed.select(self._made()), self._hash)
        columns = {
            "key": keys,
            "vbucket": rows["vbucket"],
            "deleted": pa.array(np.zeros(rows.num_rows, np.bool_)) if deleted is None else deleted,
            "value_1": pa.array(value_1),
            "value_2": pa.array(value_2),
            "columns": pa.array(made),
            **{name: rows[name] for name in _NUMBERS},
        }
        return pa.table(
            [_plain(columns[field.name]).cast(field.type) for field in DIGEST_SCHEMA], schema=DIGEST_SCHEMA
        )


def _plain(column: Any) -> Any:
    return pa.chunked_array([column]) if isinstance(column, pa.Array) else column


def _value_bytes(rows: pa.Table) -> pa.ChunkedArray:
    values = rows["value"].cast(pa.binary())
    encoded = rows["value_base64"]
    if encoded.null_count == len(encoded):
        return values
    decoded = [None if text is None else base64.b64decode(text) for text in encoded.to_pylist()]
    return pc.coalesce(values, pa.chunked_array([pa.array(decoded, pa.binary())]))


def newest(parts: Sequence[pa.Table]) -> pa.Table:
    """The last row of each document, given rows in the order in which they came."""
    rows = pa.concat_tables(parts) if parts else DIGEST_SCHEMA.empty_table()
    if not rows.num_rows:
        return rows
    numbers = _numbers(rows, _dictionary(rows))
    _, from_behind = np.unique(numbers[::-1], return_index=True)
    return rows.take(pa.array(np.sort(len(numbers) - 1 - from_behind)))


def compare(bucket: pa.Table, table: pa.Table, positions: NDArray[np.int64]) -> Iterator[Difference]:
    """The differences between both sides; ``positions`` has the table's seqno by vbucket.

    The bucket has one row per document, including deletions.
    """
    keys = _dictionary(pa.concat_tables([bucket.select(["key"]), table.select(["key"])]))
    in_bucket, in_table = _numbers(bucket, keys), _numbers(table, keys)
    order = np.argsort(in_bucket, kind="stable")
    place = np.searchsorted(in_bucket, in_table, sorter=order)
    is_known = np.zeros(len(in_table), dtype=np.bool_)
    match = np.zeros(len(in_table), dtype=np.intp)
    if len(order):
        match = order[np.minimum(place, len(order) - 1)]
        is_known = (place < len(order)) & (in_bucket[match] == in_table)
    living = ~bucket["deleted"].to_numpy()
    is_on_both = is_known & living[match] if len(order) else is_known
    for row in np.flatnonzero(~is_on_both).tolist():
        newer = bool(is_known[row]) and _is_newer(bucket, int(match[row]), positions)
        why = "the bucket has deleted it" if is_known[row] else "the bucket has no such document"
        yield _difference("extra", table, row, why, newer=newer)
    pairs = np.flatnonzero(is_on_both)
    again = np.setdiff1d(pairs, pairs[np.unique(match[pairs], return_index=True)[1]])
    for row in again.tolist():
        yield _difference("extra", table, row, "it is in the table more than once", newer=False)
    yield from _differing(bucket, match[pairs], table, pairs, positions)
    missing = np.flatnonzero(living & ~np.isin(np.arange(bucket.num_rows), match[is_known]))
    for row in missing.tolist():
        newer = _is_newer(bucket, row, positions)
        yield _difference("missing", bucket, row, "the table has no such document", newer=newer)


def _dictionary(rows: pa.Table) -> pa.Array:
    return pc.unique(rows["key"])


def _numbers(rows: pa.Table, keys: pa.Array) -> NDArray[np.int64]:
    """A number for each document: the place of its key, and its vbucket."""
    places = pc.index_in(rows["key"], value_set=keys).to_numpy().astype(np.int64)
    numbers: NDArray[np.int64] = (places << 16) | rows["vbucket"].to_numpy().astype(np.int64)
    return numbers


def _differing(
    bucket: pa.Table,
    bucket_rows: NDArray[np.intp],
    table: pa.Table,
    table_rows: NDArray[np.intp],
    positions: NDArray[np.int64],
) -> Iterator[Difference]:
    ours, theirs = bucket.take(pa.array(bucket_rows)), table.take(pa.array(table_rows))
    wrong: dict[int, list[str]] = {}
    for name in COMPARED:
        same = pc.fill_null(pc.equal(ours[name], theirs[name]), False)
        same = pc.or_(same, pc.and_(pc.is_null(ours[name]), pc.is_null(theirs[name])))
        for row in np.flatnonzero(~same.to_numpy()).tolist():
            wrong.setdefault(row, []).append(name)
    for row, names in sorted(wrong.items()):
        texts = [_difference_text(name, ours[name][row].as_py(), theirs[name][row].as_py()) for name in names]
        newer = _is_newer(ours, row, positions)
        yield _difference("different", ours, row, "; ".join(dict.fromkeys(texts)), newer=newer)


def _difference_text(name: str, in_bucket: Any, in_table: Any) -> str:
    if name.startswith("value"):
        return "the value differs"  # a log or a terminal is no place for documents
    if name == "columns":
        return "its columns are not what the document has"
    return f"{name} is {in_bucket} in the bucket, {in_table} in the table"


def _is_newer(bucket: pa.Table, row: int, positions: NDArray[np.int64]) -> bool:
    return bool(bucket["seqno"][row].as_py() > positions[bucket["vbucket"][row].as_py()])


def _difference(kind: str, rows: pa.Table, row: int, what: str, *, newer: bool) -> Difference:
    key: bytes = rows["key"][row].as_py()
    vbucket = rows["vbucket"][row].as_py()
    try:
        return Difference(kind, vbucket, key.decode(), None, what, newer)
    except UnicodeDecodeError:
        encoded = base64.b64encode(key).decode()
        return Difference(kind, vbucket, f"base64:{encoded}", encoded, what, newer)
