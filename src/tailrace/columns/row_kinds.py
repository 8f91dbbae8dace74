"""The kinds of rows of a source and how to tell them apart: no other module looks at the words of ``op``.

Changes come in batches of any size; everything else comes in a batch of one row, in its place among them:

    op        what it says                                       filled besides vbucket
    rollback  the bucket took back what is above ``seqno``        vb_uuid (of the branch that goes on), seqno
    flush     all documents of the vbucket are gone
    system    a collection or scope came, went or changed        seqno, vb_uuid, key (its name), value (JSON),
                                                                 scope and collection, where they are known
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .batch import OPS, SCHEMA, strings_of

__all__ = [
    "ALL_OPS",
    "CHANGE_OPS",
    "DELETING_OPS",
    "FLUSH",
    "ROLLBACK",
    "SYSTEM",
    "are_changes",
    "are_mutations",
    "empties_collection",
    "kind_of",
    "no_rows",
    "rollback_row",
    "rollback_rows",
    "signed",
    "single_row",
    "unsigned",
]

ROLLBACK, FLUSH, SYSTEM = "rollback", "flush", "system"
CHANGE_OPS = OPS
"""Rows that change a document."""
MUTATION, DELETING_OPS = OPS[0], OPS[1:]
ALL_OPS = (*CHANGE_OPS, ROLLBACK, FLUSH, SYSTEM)

_CHANGES = strings_of(CHANGE_OPS)
_WIDTH = 1 << 64
_EMPTYING = ("collection_created", "collection_dropped")


def kind_of(batch: pa.RecordBatch) -> str | None:
    """`ROLLBACK`, `FLUSH` or `SYSTEM`; None if the batch holds changes of documents or is empty."""
    if batch.num_rows != 1:
        return None
    op = batch["op"][0].as_py()
    return None if op in CHANGE_OPS else str(op)


def are_changes(rows: pa.Table | pa.RecordBatch) -> Any:
    """For each row whether it changes a document."""
    return pc.is_in(rows["op"], value_set=_CHANGES)


def are_mutations(rows: pa.Table | pa.RecordBatch) -> Any:
    """For each row whether the document exists after it."""
    return pc.equal(rows["op"], MUTATION)


def empties_collection(batch: pa.RecordBatch) -> bool:
    """Whether a `SYSTEM` row leaves a collection empty: one that ends or begins.

    A beginning counts because the end before it may not have been seen.
    """
    value = batch["value"][0].as_py()
    return bool(value) and json.loads(value).get("event") in _EMPTYING


def rollback_rows(rollbacks: Iterable[tuple[int, int, int]]) -> pa.RecordBatch:
    """A row for each (vbucket, vb_uuid, seqno)."""
    return pa.RecordBatch.from_pylist([rollback_row(*rollback) for rollback in rollbacks], schema=SCHEMA)


def rollback_row(vbucket: int, vb_uuid: int, seqno: int) -> dict[str, Any]:
    """The columns of a `ROLLBACK` row that are not null."""
    return {"op": ROLLBACK, "vbucket": vbucket, "vb_uuid": signed(vb_uuid), "seqno": signed(seqno)}


def single_row(columns: dict[str, Any]) -> pa.RecordBatch:
    """A batch of one row; columns that are not given are null."""
    return pa.RecordBatch.from_pylist([columns], schema=SCHEMA)


def no_rows() -> pa.RecordBatch:
    """An empty batch; made of nulls because Arrow imports pandas when it sees a list, which takes a while."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA)


def signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one that Arrow and Spark have for it."""
    return number - _WIDTH if number >= _WIDTH >> 1 else number


def unsigned(number: int) -> int:
    """What `signed` made a signed number of."""
    return number % _WIDTH
