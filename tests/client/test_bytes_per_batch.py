"""A batch has so many bytes at the most, whatever the values have: on the way from a socket to a file nothing
gathers more than its limit and one value beyond it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa
import pytest

import tailrace
import tailrace.testing
from tailrace.client import export
from tailrace.testing.running import RunningNode

WINDOW = 1 << 20
OVERHEAD = 1 << 16
"""Of keys, metadata and offsets."""
SIZES = {"1 KiB": (1 << 10, 2_000), "64 KiB": (64 << 10, 120), "1 MiB": (1 << 20, 12), "5 MiB": (5 << 20, 4)}


@pytest.fixture(scope="module", params=SIZES)
def kept(request: pytest.FixtureRequest) -> Iterator[tuple[RunningNode, int, int]]:
    """One vbucket, all of it in one snapshot; the size of a value and how many there are."""
    size, count = SIZES[request.param]
    with tailrace.testing.node(vbuckets=1) as node:
        node.set_many({f"k{number}": b"v" * size for number in range(count)})
        yield node, size, count


def check(batches: list[pa.RecordBatch] | list[pa.Table], limit: int, size: int, count: int) -> None:
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.nbytes for batch in batches) <= limit + size + OVERHEAD


def test_of_a_reader_and_so_of_spark(kept: tuple[RunningNode, int, int]) -> None:
    """A task of Spark hands on the batches of a reader, in a batch read and in a round of a mirror."""
    node, size, count = kept
    with tailrace.connect_sync(node.url, flow_control_buffer=WINDOW) as source:
        check(list(source.batches(end="now")), WINDOW, size, count)


def test_of_a_dump(kept: tuple[RunningNode, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    node, size, count = kept
    monkeypatch.setattr(export, "HELD_BYTES", WINDOW)

    async def all_of() -> list[pa.Table]:
        async with tailrace.connect(node.url, flow_control_buffer=WINDOW) as source:
            return [table async for table in export.documents(source, lambda _: None)]

    check(asyncio.run(all_of()), 2 * WINDOW, size, count)
