"""A dump while the source takes changes back: what was lost is not in it. And a large dump."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from tailrace.client import export
from tailrace.client.export import KeptChanges, documents
from tailrace.columns.batch import SCHEMA


def batch(*changes: tuple[str, int, int, str, str]) -> pa.RecordBatch:
    """Rows of (op, vbucket, seqno, key, value)."""
    empty: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    rows = [
        {**empty, "op": op, "vbucket": vbucket, "seqno": seqno, "key": key.encode(), "value": value.encode()}
        for op, vbucket, seqno, key, value in changes
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


class Source:
    """Two vbuckets; the first loses its newest changes while it is read."""

    def __init__(self, *batches: pa.RecordBatch) -> None:
        self._batches = batches

    async def high_seqnos(self) -> dict[int, int]:
        return {0: 4, 1: 3, 2: 0}

    async def batches(self, end: dict[int, int]) -> AsyncIterator[pa.RecordBatch]:
        for batch in self._batches:
            if batch["vbucket"][0].as_py() in end:
                yield batch


@pytest.fixture(params=["in memory", "in a file"], autouse=True)
def held_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in a file":
        monkeypatch.setattr(export, "HELD_BYTES", 100)


def dumped(source: Any) -> tuple[dict[bytes, bytes], int]:
    advanced: list[int] = []

    async def run() -> list[pa.Table]:
        return [table async for table in documents(source, advanced.append)]

    rows = [row for table in asyncio.run(run()) for row in table.to_pylist()]
    assert len(rows) == len({row["key"] for row in rows}), "a document is there once"
    return {row["key"]: row["value"] for row in rows}, sum(advanced)


def test_changes_that_were_taken_back_are_not_dumped() -> None:
    source = Source(
        batch(("mutation", 0, 1, "a", "old"), ("mutation", 0, 2, "b", "1"), ("mutation", 1, 2, "z", "kept")),
        batch(("mutation", 0, 3, "a", "lost"), ("deletion", 0, 4, "b", "")),
        batch(("rollback", 0, 2, "", "")),
        batch(("mutation", 0, 3, "c", "new"), ("deletion", 1, 3, "y", "")),
    )
    assert dumped(source) == ({b"a": b"old", b"b": b"1", b"z": b"kept", b"c": b"new"}, 7)


def test_without_a_rollback_the_newest_change_counts() -> None:
    source = Source(
        batch(("mutation", 0, 1, "a", "old"), ("mutation", 0, 2, "b", "1")),
        batch(("mutation", 0, 3, "a", "new"), ("deletion", 0, 4, "b", "")),
    )
    assert dumped(source) == ({b"a": b"new"}, 7)


@pytest.mark.parametrize("value_bytes", [1, 64_000, 1_000_000])
def test_what_is_held_is_bounded_in_bytes(value_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a vbucket has, only the keys and some of the values are in memory."""
    monkeypatch.setattr(export, "HELD_BYTES", 1 << 20)
    before, count = pa.total_allocated_bytes(), 80
    with KeptChanges() as kept:
        for number in range(count):
            value = "v" * value_bytes
            kept.add(batch(("mutation", 0, number + 1, f"k{number % 40}", value)))
            assert pa.total_allocated_bytes() - before < (4 << 20) + 2 * value_bytes
        tables = 0
        for table in kept.documents():
            assert table.nbytes < (1 << 20) + 2 * value_bytes
            tables += table.num_rows
    assert tables == 40
