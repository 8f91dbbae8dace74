"""Rows of the pipeline that are no changes of documents, and how to tell them apart.

Changes come in batches of any size; everything else stands in a batch of one row, in its place among them:

    op        what it says                                       filled beside vbucket
    rollback  the bucket took back what lies above ``seqno``      vb_uuid (of the branch that goes on), seqno
    flush     all documents of the vbucket are gone
    system    a collection or scope came, went or changed        seqno, vb_uuid, key (its name), value (JSON),
                                                                 scope and collection, where they are known
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from .batch import SCHEMA

__all__ = [
    "CHANGE_OPS",
    "FLUSH",
    "ROLLBACK",
    "SYSTEM",
    "empties_collection",
    "kind_of",
    "no_rows",
    "rollback_rows",
    "signed",
    "single_row",
]

ROLLBACK, FLUSH, SYSTEM = "rollback", "flush", "system"
CHANGE_OPS = ("mutation", "deletion", "expiration")
"""Rows that change a document."""

_WIDTH = 1 << 64
_EMPTYING = ("collection_created", "collection_dropped")


def kind_of(batch: pa.RecordBatch) -> str | None:
    """`ROLLBACK`, `FLUSH` or `SYSTEM`; None if the batch holds changes of documents, or nothing."""
    if batch.num_rows != 1:
        return None
    op = batch["op"][0].as_py()
    return None if op in CHANGE_OPS else str(op)


def empties_collection(batch: pa.RecordBatch) -> bool:
    """Whether a `SYSTEM` row ends a collection, or begins one, which then has nothing either: its end may not
    have been seen.
    """
    value = batch["value"][0].as_py()
    return bool(value) and json.loads(value).get("event") in _EMPTYING


def rollback_rows(rollbacks: Iterable[tuple[int, int, int]]) -> pa.RecordBatch:
    """Rows for (vbucket, vb_uuid, seqno) each."""
    rows = [
        {"op": ROLLBACK, "vbucket": vbucket, "vb_uuid": signed(vb_uuid), "seqno": signed(seqno)}
        for vbucket, vb_uuid, seqno in rollbacks
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def single_row(columns: dict[str, Any]) -> pa.RecordBatch:
    """A batch of one row; columns that are not given are null."""
    return pa.RecordBatch.from_pylist([columns], schema=SCHEMA)


def no_rows() -> pa.RecordBatch:
    """An empty batch; made of nulls because Arrow imports pandas when it sees a list, which takes a while."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA)


def signed(number: int) -> int:
    """64 bits of the wire as Arrow and Spark have them."""
    return number - _WIDTH if number >= _WIDTH >> 1 else number
