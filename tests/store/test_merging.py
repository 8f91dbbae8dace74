"""Sealing or merging many vbuckets together gives the same as one after the other."""

from __future__ import annotations

import copy
import json
import random
from itertools import pairwise
from typing import Any

import pytest

from tailrace.clock import ManualClock
from tailrace.files import MemoryFiles
from tailrace.frames import CHUNK_BYTES
from tailrace.rng import source
from tailrace.store import compaction, merging
from tailrace.store.base import Compaction, StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.store.segment import Segment, concatenate

VBUCKETS = 16
ASKED = {
    "superseded": Compaction(),
    "tombstones": Compaction(drop_tombstones=True),
    "some vbuckets": Compaction(vbuckets=[0, 1, 4, 7, 8], drop_tombstones=True),
}


def open_store(files: MemoryFiles) -> Engine:
    settings = StoreSettings(history_changes=5, segment_fanout=100, garbage_share=1.0, quiet_time=1e9)
    return Engine(files=files, settings=settings, clock=ManualClock(), rng=source(5))


def fill(bucket: EngineBucket, rng: random.Random) -> None:
    """Vbuckets of all sizes: none, few changes, more than a block, a frame that is larger than a block."""
    for number, count in enumerate((0, 1, 40, 300, 2, 0, 90, 5, 120, 30, 7, 3)):
        vb = bucket.vbuckets[number]
        for _ in range(rng.randint(0, count)):
            key = rng.choice((b"\0k%d", b"\x08k%d" if bucket.collections.collection(8) else b"\0c%d"))
            key %= rng.randrange(20)
            if rng.random() < 0.2 and vb.get(key) is not None:
                vb.delete(key)
            else:
                size = 3_000 if number == 3 else rng.randrange(200)
                vb.set(key, rng.randbytes(size), expiry=rng.choice((0, 0, 4_000_000_000 + size)))
        if number == 8:
            vb.set(b"\0large", rng.randbytes(CHUNK_BYTES + 1))


def set_collections(bucket: EngineBucket, uid: int, *names: str) -> None:
    collections = [{"name": "_default", "uid": "0"}, *({"name": name, "uid": "8"} for name in names)]
    manifest = {"uid": f"{uid:x}", "scopes": [{"name": "_default", "uid": "0", "collections": collections}]}
    bucket.set_manifest(json.dumps(manifest).encode())


def a_store(seed: int) -> MemoryFiles:
    """Some segments, with collections that came and went, and vbuckets that were rolled back."""
    files = MemoryFiles()
    rng = random.Random(seed)
    with open_store(files) as engine:
        bucket = engine.create_bucket("default", VBUCKETS)
        for generation in range(5):
            fill(bucket, rng)
            bucket.seal()
            if generation in {1, 3}:
                set_collections(bucket, generation + 1, *(["c"] if generation == 1 else []))
            if generation == 2:
                for number in (3, 6, 9):
                    vb = bucket.vbuckets[number]
                    bucket.rollback({number: rng.randint(vb.rollback_floor, vb.high_seqno)}, branch=True)
        assert len(bucket.segments) == 5
    return files


def content(segment: Segment) -> list[tuple[object, ...]]:
    """Everything that a segment says, except where its blocks begin."""
    rows: list[tuple[object, ...]] = []
    for number in range(VBUCKETS):
        piece = segment.piece(number)
        if piece is not None:
            frames = concatenate(list(piece.blocks()))
            columns = [column.tobytes() for column in (*frames, *piece.pairs())]
            rows.append((number, piece.traits, piece.min_expiry, piece.first, piece.last, columns))
    return rows


def merged(files: MemoryFiles, asked: Compaction) -> tuple[object, ...]:
    files = copy.deepcopy(files)
    with open_store(files) as engine:
        bucket = engine.buckets["default"]
        bucket.compact(asked)
        losses = [(vb.rollback_floor, vb.purge_seqno, vb.forgotten.rev_floor) for vb in bucket]
        return losses, [content(segment) for segment in bucket.segments]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("seed", range(3))
def test_together_or_alone(monkeypatch: pytest.MonkeyPatch, seed: int, asked: str) -> None:
    files = a_store(seed)
    monkeypatch.setattr(merging, "GROUP_BYTES", 1)
    alone = merged(files, ASKED[asked])
    for group_bytes in (20_000, 400_000, 1 << 24):
        monkeypatch.setattr(merging, "GROUP_BYTES", group_bytes)
        assert merged(files, ASKED[asked]) == alone


def test_sealed_together_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    every = []
    for group_bytes in (1, 20_000, 1 << 24):
        monkeypatch.setattr(compaction, "GROUP_BYTES", group_bytes)
        every.append({name: bytes(data) for name, data in a_store(1).files.items() if "/segment-" in name})
    assert every[0] == every[1] == every[2]


def test_blocks_of_a_large_vbucket_are_full() -> None:
    """A backfill costs by the block: what a part of a merge leaves over begins the next part's first."""
    rng = random.Random(1)
    with open_store(MemoryFiles()) as engine:
        bucket = engine.create_bucket("default", 1)
        vb = bucket.vbuckets[0]
        for generation in range(10):
            for number in range(300):
                vb.set(b"\0k%d.%d" % (generation, number), rng.randbytes(rng.randrange(2_000)))
            bucket.seal()
        bucket.compact()
        (piece,) = vb.pieces
        lengths = [block.lengths.tolist() for block in piece.blocks()]
    assert sum(map(len, lengths)) == 3_000
    assert sum(map(sum, lengths)) > 2 * merging.GROUP_BYTES
    for block, next_block in pairwise(lengths):
        assert sum(block) <= CHUNK_BYTES < sum(block) + next_block[0]


def test_sealed_as_it_was_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a commit noted about its frames is what they say, even after a rollback and a restart."""
    known: list[bool] = []
    ask = compaction._logged_columns

    def asked(*args: Any) -> Any:
        answer = ask(*args)
        known.append(answer is not None)
        return answer

    every = []
    for answer in (asked, lambda *_args: None):
        monkeypatch.setattr(compaction, "_logged_columns", answer)
        files = a_store(1)
        with open_store(files) as engine:
            bucket = engine.buckets["default"]
            fill(bucket, random.Random(2))
            bucket.flush()
            vb = bucket.vbuckets[3]
            bucket.rollback({3: vb.high_seqno - 2}, branch=True)
            fill(bucket, random.Random(3))
            bucket.flush()
            files = copy.deepcopy(files)
            files.unlock()
        with open_store(files) as engine:
            fill(engine.buckets["default"], random.Random(4))
            engine.buckets["default"].seal()
        every.append({name: bytes(data) for name, data in files.files.items() if "/segment-" in name})
    assert every[0] == every[1]
    assert set(known) == {True, False}
