"""The streaming reader, called as Spark calls it, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from tailrace.spark.offsets import from_offset
from tailrace.spark.stream import StreamReader


@pytest.mark.parametrize("ends", [True, False])
def test_a_batch_that_took_the_whole_spool_leaves_room_for_the_next(tmp_path: Path, ends: bool) -> None:
    """Spark commits a batch only when there is a next one; a full spool must not wait for that."""
    with tailrace.testing.node(vbuckets=2) as node:
        for number in range(60):
            node.set(f"k{number}", {"n": number})
        reader = StreamReader(
            {
                "connectionString": node.url,
                "startingOffsets": "earliest",
                "spoolDir": str(tmp_path),
                "spoolSize": "1",
                "maxOffsetsPerTrigger": "7",
            }
        )
        if ends:
            reader.prepareForTriggerAvailableNow()
        start: dict[str, Any] = reader.initialOffset()
        limit = reader.getDefaultReadLimit()
        rows = 0
        while rows < 60:
            end = reader.latestOffset(start, limit)
            for partition in reader.partitions(start, end):
                rows += sum(batch.num_rows for batch in reader.read(partition))
            start = end
        assert {vbucket: p.seqno for vbucket, p in from_offset(start).items()} == {
            vbucket: node.high_seqno(vbucket) for vbucket in range(2)
        }
        reader.stop()
