"""A batch is limited in bytes, however large the values are: on the way from a socket to a file nothing
gathers more than its limit plus one value.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.client import export
from tailrace.client.events import Event, Mutation
from tailrace.client.fulltext import FullText, follow
from tailrace.spark.rounds.compare import Digester
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table import file_reading
from tailrace.table.opening import open_table
from tailrace.testing.running import RunningNode

WINDOW = 1 << 20
OVERHEAD = 1 << 16
"""What keys, metadata and offsets take."""
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


def test_of_an_index(
    kept: tuple[RunningNode, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes one document at a time, and keeps none."""
    pytest.importorskip("tantivy")
    node, size, count = kept
    held: list[int] = []
    take = FullText.take

    def watched(self: FullText, event: Event) -> None:
        if len(held) % (count // 4) == 0:
            held.append(sum(len(there.value) for there in gc.get_objects() if isinstance(there, Mutation)))
        else:
            held.append(0)
        take(self, event)

    monkeypatch.setattr(FullText, "take", watched)
    index = FullText(tmp_path / "index", bucket="default")
    try:
        assert asyncio.run(follow(node.url, index, end="now", flow_control_buffer=WINDOW)) == count
        assert index.count() == count
    finally:
        index.close()
    assert len(held) >= count
    assert max(held) <= WINDOW + size + OVERHEAD


def test_of_verify(
    kept: tuple[RunningNode, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes at a time from bucket and table; only digests of it are kept."""
    node, size, count = kept
    made = build_mirror(LocalJobs(), node.url, tmp_path / "table", once=True, in_background=False)
    made.prepare()
    made.run()
    seen: dict[str, list[pa.Table]] = {"of_changes": [], "of_rows": []}
    for name, tables in seen.items():
        digest = getattr(Digester, name)

        def watched(self: Digester, rows: pa.Table, digest: Any = digest, tables: Any = tables) -> pa.Table:
            tables.append(rows)
            digests = digest(self, rows)
            assert digests.nbytes < OVERHEAD * 10
            return digests

        monkeypatch.setattr(Digester, name, watched)
    given = source_options(node.url, {"flowControlBuffer": str(WINDOW)})
    verdict = verify_table(LocalJobs(), given, open_table(tmp_path / "table"))
    close_idle_sources()
    assert verdict.equal
    assert (verdict.documents, verdict.rows) == (count, count)
    check(seen["of_changes"], WINDOW, size, count)
    check(seen["of_rows"], file_reading._BATCH_BYTES, size, count)
