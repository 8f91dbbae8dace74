"""Made-up documents."""

from __future__ import annotations

from itertools import islice

import pytest

from tailrace.client import load
from tailrace.client.cluster_map import vbucket_of


def test_the_first_batch_does_not_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of documents are placed while they are written, not before."""
    placed = []

    def place(key: bytes, count: int) -> int:
        placed.append(key)
        return vbucket_of(key, count)

    monkeypatch.setattr(load, "vbucket_of", place)
    made_up = load.MadeUp(docs=100_000, size=64, deletes=0.5)
    batches = made_up.batches(1024, collections=True, json_type=True, most=100)
    first, second = islice(batches, 2)
    assert len(placed) == 200
    assert first.vbuckets == [vbucket_of(made_up.key(number), 1024) for number in range(100)]
    frames = bytes(second.select(None))
    length = len(frames) // 100
    assert [int.from_bytes(frames[at + 6 : at + 8], "big") for at in range(0, len(frames), length)] == list(
        second.vbuckets
    )
