"""Whether a table holds what the bucket holds: document by document, as plain Arrow.

Both sides are rows of the mirror's table, the bucket's with the column ``deleted``: a stream from the
beginning folded to its last state. A document is compared by value, CAS, rev, flags, expiry, datatype and
seqno.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from .fold import DELETED, number_documents

__all__ = ["COMPARED", "Difference", "compare"]

COMPARED = ("value", "value_base64", "cas", "rev", "flags", "expiry", "datatype", "seqno", "vb_uuid")
"""The columns in which a document must be the same on both sides, the telling ones first."""


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
    """The bucket's change lies above the table's position: the mirror has not come to it yet."""

    def __str__(self) -> str:
        late = " (newer than the table's position)" if self.newer else ""
        return f"{self.kind} {self.key} (vbucket {self.vbucket}): {self.what}{late}"


def compare(bucket: pa.Table, table: pa.Table, positions: NDArray[np.int64]) -> Iterator[Difference]:
    """The differences between two tables of rows; ``positions`` has the table's seqno by vbucket."""
    alive = pc.invert(bucket[DELETED.name])
    in_bucket, in_table = number_documents(bucket, table)
    order = np.argsort(in_bucket)
    at = np.searchsorted(in_bucket, in_table, sorter=order)
    at_safe = np.minimum(at, max(len(order) - 1, 0))
    match = order[at_safe] if len(order) else np.zeros(len(in_table), dtype=np.intp)
    found = (
        (at < len(order)) & (in_bucket[match] == in_table) if len(order) else np.zeros(len(in_table), bool)
    )
    living = alive.to_numpy(zero_copy_only=False) if bucket.num_rows else np.zeros(0, bool)

    both = found & living[match] if len(living) else found
    for row in np.flatnonzero(~both).tolist():
        newer = bool(found[row]) and _is_newer(bucket, int(match[row]), positions)
        why = "the bucket has deleted it" if found[row] else "the bucket has no such document"
        yield _difference("extra", table, row, why, newer=newer)
    pairs = np.flatnonzero(both)
    again = np.setdiff1d(pairs, pairs[np.unique(match[pairs], return_index=True)[1]])
    for row in again.tolist():
        yield _difference("extra", table, row, "it stands in the table more than once", newer=False)
    yield from _differing(bucket, match[pairs], table, pairs, positions)
    missing = np.flatnonzero(living & ~np.isin(np.arange(bucket.num_rows), match[found]))
    for row in missing.tolist():
        newer = _is_newer(bucket, row, positions)
        yield _difference("missing", bucket, row, "the table has no such document", newer=newer)


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
        for row in np.flatnonzero(~same.to_numpy(zero_copy_only=False)).tolist():
            wrong.setdefault(row, []).append(name)
    for row, names in sorted(wrong.items()):
        what = "; ".join(_both(name, ours[name][row].as_py(), theirs[name][row].as_py()) for name in names)
        newer = _is_newer(ours, row, positions)
        yield _difference("different", ours, row, what, newer=newer)


def _both(name: str, in_bucket: Any, in_table: Any) -> str:
    if name.startswith("value"):
        return "the value differs"  # a log or a terminal is no place for documents
    return f"{name} is {in_bucket} in the bucket, {in_table} in the table"


def _is_newer(bucket: pa.Table, row: int, positions: NDArray[np.int64]) -> bool:
    return bool(bucket["seqno"][row].as_py() > positions[bucket["vbucket"][row].as_py()])


def _difference(kind: str, rows: pa.Table, row: int, what: str, *, newer: bool) -> Difference:
    key, encoded = rows["key"][row].as_py(), rows["key_base64"][row].as_py()
    shown = key if key is not None else f"base64:{encoded}"
    return Difference(kind, rows["vbucket"][row].as_py(), shown, encoded, what, newer)
