"""Every version of a document, while it is retained: what streams of the store give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.helpers_store import maintain, seqno_of
from tailrace.clock import ManualClock
from tailrace.files import MemoryFiles
from tailrace.rng import source
from tailrace.store.base import Compaction, StoreSettings
from tailrace.store.engine import Engine
from tailrace.store.format import StoredDocument
from tailrace.wire.codes import VBucketState

KEYS = [b"\0k%d" % number for number in range(5)]
QUIET: dict[str, Any] = {"segment_fanout": 100, "garbage_share": 1.0, "quiet_time": 1e9, "history_changes": 0}


def opened(
    files: MemoryFiles | None = None, clock: ManualClock | None = None, **more: Any
) -> tuple[Engine, Any]:
    engine = Engine(
        files=files or MemoryFiles(),
        settings=StoreSettings(**QUIET | more),
        clock=clock or ManualClock(),
        rng=source(3),
    )
    bucket = engine.buckets.get("b") or engine.create_bucket("b", 1)
    return engine, bucket


def chunks(snapshot: Any, max_bytes: int = 256 << 10) -> Iterator[list[bytes]]:
    while (chunk := snapshot.read(max_bytes)) is not None:
        ends = [*chunk.offsets.tolist()[1:], len(chunk.data)]
        yield [chunk.data[a:b].tobytes() for a, b in zip(chunk.offsets.tolist(), ends, strict=True)]


def versions(vbucket: Any, after: int = 0, **how: Any) -> list[tuple[int, bytes]]:
    """Everything after a seqno, as seqno and value; ascending, and no chunk spans the two parts."""
    read: list[tuple[int, bytes]] = []
    while (snapshot := vbucket.snapshot_after(after, history=True, **how)) is not None:
        for frames in chunks(snapshot):
            seqnos = [seqno_of(frame) for frame in frames]
            assert (seqnos[0] < snapshot.history_start) == (seqnos[-1] < snapshot.history_start)
            read += [(seqno_of(frame), StoredDocument.of(frame).value) for frame in frames]
        assert read[-1][0] == snapshot.end
        after = snapshot.end
    assert [seqno for seqno, _ in read] == sorted({seqno for seqno, _ in read})
    return read


def seal(bucket: Any) -> None:
    bucket.seal()
    bucket.forget_memory()


def written(vbucket: Any, count: int, *, keys: list[bytes] = KEYS) -> list[tuple[int, bytes]]:
    """New versions of a few keys in turn; where each stands, and its value."""
    made = []
    for number in range(count):
        value = b"%d" % (vbucket.high_seqno + 1)
        made.append((vbucket.set(keys[number % len(keys)], value).seqno, value))
    return made


@pytest.mark.parametrize("place", ["memory", "disk", "both", "merged", "opened again"])
def test_every_version_wherever_it_is(place: str) -> None:
    files = MemoryFiles()
    engine, bucket = opened(files, history_retention_bytes=1 << 30)
    vbucket = bucket.vbuckets[0]
    every = written(vbucket, 40)
    if place != "memory":
        seal(bucket)
        every += written(vbucket, 40)
    if place in ("merged", "opened again"):
        seal(bucket)
        bucket.compact()
    if place == "opened again":
        engine.close()
        engine, bucket = opened(files, history_retention_bytes=1 << 30)
        vbucket = bucket.vbuckets[0]
    elif place == "disk":
        seal(bucket)
    assert versions(vbucket) == every
    assert versions(vbucket, 33) == every[33:]
    bucket.flush()
    assert versions(vbucket, memory=False) == every
    assert vbucket.history_start == 1
    plain = vbucket.snapshot_after(0)
    assert sum(map(len, chunks(plain))) == len(KEYS) and not plain.history_start
    engine.close()


def test_without_a_retention_nobody_gets_more() -> None:
    _, bucket = opened()
    written(bucket.vbuckets[0], 20)
    seal(bucket)
    assert [seqno for seqno, _ in versions(bucket.vbuckets[0])] == [16, 17, 18, 19, 20]
    assert bucket.vbuckets[0].history_start == 0


def test_retention_by_size() -> None:
    _, bucket = opened(history_retention_bytes=4_000)
    vbucket = bucket.vbuckets[0]
    every = written(vbucket, 400)
    seal(bucket)
    bucket.compact()
    start = vbucket.history_start
    kept = sum(len(vbucket.frame_at(seqno)) for seqno in range(start, 401))
    assert start > 1 and 3_800 <= kept <= 4_100
    got = versions(vbucket)
    assert got[-(401 - start) :] == every[start - 1 :]
    assert all(seqno < start for seqno, _ in got[: -(401 - start)]) and len(got) <= 401 - start + len(KEYS)
    assert versions(vbucket, start + 7) == every[start + 7 :]


def test_retention_by_age() -> None:
    clock = ManualClock()
    _, bucket = opened(clock=clock, history_retention_seconds=100.0)
    vbucket = bucket.vbuckets[0]
    written(vbucket, 50)
    clock.advance(60)
    every = written(vbucket, 50)
    clock.advance(60)
    seal(bucket)
    bucket.compact()
    assert vbucket.history_start == 50, "what was superseded 120 s ago went, what was after that stays"
    assert versions(vbucket)[-50:] == every
    clock.advance(3_000)
    bucket.compact()
    assert versions(vbucket) == every[-5:]


def test_a_size_smaller_than_the_number_of_vbuckets_is_no_retention_without_end() -> None:
    engine = Engine(
        files=MemoryFiles(),
        settings=StoreSettings(**QUIET | {"history_retention_bytes": 100}),
        clock=ManualClock(),
        rng=source(3),
    )
    bucket = engine.create_bucket("b", 128)
    vbucket = bucket.vbuckets[0]
    written(vbucket, 200)
    seal(bucket)
    bucket.compact()
    assert versions(vbucket) == [(seqno, b"%d" % seqno) for seqno in range(196, 201)]


def test_a_purged_tombstone_of_nothing_is_missing_in_the_history() -> None:
    _, bucket = opened(history_retention_bytes=1 << 30)
    vbucket = bucket.vbuckets[0]
    written(vbucket, 3)
    purged = vbucket.delete_with_meta(b"\0gone", 0, 1, 1, 1).seqno
    written(vbucket, 3)
    seal(bucket)
    bucket.compact(Compaction(drop_tombstones=True))
    assert purged not in dict(versions(vbucket))
    assert vbucket.history_start >= purged


def test_merges_by_themselves_keep_it_within_bounds() -> None:
    """Retained versions are not garbage that makes a merge of everything due again and again."""
    _, bucket = opened(history_retention_bytes=20_000, garbage_share=0.5)
    vbucket = bucket.vbuckets[0]
    merges = 0
    for _ in range(60):
        written(vbucket, 50)
        seal(bucket)
        before = len(bucket.segments)
        maintain(bucket)
        merges += len(bucket.segments) < before
    assert 1 < merges < 30
    assert vbucket.disk_bytes < 100_000


def test_a_collection_without_history() -> None:
    _, bucket = opened(history_retention_bytes=1 << 30)
    collections = [{"name": "_default", "uid": "0"}, {"name": "latest", "uid": "8", "history": False}]
    scopes = [{"name": "_default", "uid": "0", "collections": collections}]
    bucket.set_manifest(json.dumps({"uid": "1", "scopes": scopes}).encode())
    assert bucket.manifest["scopes"][0]["collections"][1]["history"] is False
    vbucket = bucket.vbuckets[0]
    for place in ("memory", "disk"):
        every = written(vbucket, 20)
        written(vbucket, 20, keys=[b"\x08a", b"\x08b"])
        if place == "disk":
            seal(bucket)
        got = [pair for pair in versions(vbucket) if pair[0] >= every[0][0]]
        newest = [(seqno, b"%d" % seqno) for seqno in (vbucket.high_seqno - 1, vbucket.high_seqno)]
        assert got == [*every, *newest]


def set_history(bucket: Any, uid: int, *, latest: bool | None = None, default: bool | None = None) -> None:
    """A manifest with the default collection and 8, ``latest``."""
    collections: list[dict[str, Any]] = [{"name": "_default", "uid": "0"}, {"name": "latest", "uid": "8"}]
    for collection, history in zip(collections, (default, latest), strict=True):
        collection |= {} if history is None else {"history": history}
    scopes = [{"name": "_default", "uid": "0", "collections": collections}]
    bucket.set_manifest(json.dumps({"uid": f"{uid:x}", "scopes": scopes}).encode())


LATEST = [b"\x08a", b"\x08b"]


def test_a_collection_without_history_costs_no_room() -> None:
    """Its old versions go with the next merge; others keep theirs, from the same seqno on."""
    files = MemoryFiles()
    engine, bucket = opened(files, history_retention_bytes=1 << 30)
    set_history(bucket, 1, latest=False)
    vbucket = bucket.vbuckets[0]
    every = written(vbucket, 20)
    written(vbucket, 2_000, keys=LATEST)
    every += written(vbucket, 20)
    bucket.seal()
    before = vbucket.disk_bytes
    bucket.compact(Compaction())
    assert vbucket.disk_bytes < before / 10
    for _ in range(2):
        assert vbucket.history_start == 1
        assert vbucket.rollback_floor > 2_000, "states between can't come back"
        newest = [pair for pair in versions(vbucket) if 20 < pair[0] - 1 <= 2_020]
        assert versions(vbucket)[1:] == sorted([*every, *newest]) and len(newest) == 2
        engine.close()
        engine, bucket = opened(files, history_retention_bytes=1 << 30)
        vbucket = bucket.vbuckets[0]


@pytest.mark.parametrize("place", ["memory", "disk", "merged", "opened again"])
def test_a_history_is_switched_off_and_on_again(place: str) -> None:
    """What was made while it was on stays, whatever comes later."""
    files = MemoryFiles()
    engine, bucket = opened(files, history_retention_bytes=1 << 30)
    vbucket = bucket.vbuckets[0]
    every = written(vbucket, 20)
    set_history(bucket, 1, default=False)
    off = vbucket.high_seqno
    written(vbucket, 20)
    set_history(bucket, 2, default=True)
    on = vbucket.high_seqno
    every += written(vbucket, 20)
    set_history(bucket, 3, default=False)
    last = written(vbucket, 20)[-len(KEYS) :]
    if place != "memory":
        seal(bucket)
    if place == "merged":
        bucket.compact(Compaction())
    if place == "opened again":
        engine.close()
        _, bucket = opened(files, history_retention_bytes=1 << 30)
    got = versions(bucket.vbuckets[0])
    assert [pair for pair in got if pair[1].isdigit()] == [*every, *last]
    assert not [seqno for seqno, value in got if off < seqno < on and value.isdigit()]


def test_a_replica_of_mixed_collections_keeps_their_history() -> None:
    """A snapshot with history lacks only what no history should have."""
    _, source_bucket = opened(history_retention_bytes=1 << 30)
    set_history(source_bucket, 1, latest=False)
    active = source_bucket.vbuckets[0]
    _, bucket = opened(history_retention_bytes=1 << 30)
    bucket.set_state(0, VBucketState.REPLICA)
    replica = bucket.vbuckets[0]
    every = []
    for _ in range(3):
        written(active, 5, keys=LATEST)
        every += written(active, 7)
        snapshot = active.snapshot_after(replica.high_seqno, history=True)
        replica.begin_snapshot(snapshot.start, snapshot.end, history=True)
        for frames in chunks(snapshot):
            for frame in frames:
                replica.receive(frame)
    assert replica.history_start == 1
    assert [pair for pair in versions(replica) if pair in every] == every
    assert replica.exact_seqno(10) < 10, "but no state between can come back"


def test_a_replica_knows_what_it_lacks() -> None:
    """What the sender folded away is missing; from there on everything is here."""
    _, source_bucket = opened()
    active = source_bucket.vbuckets[0]
    every = written(active, 30)
    frames = [active.frame_at(seqno) for seqno, _ in every]
    _, bucket = opened(history_retention_bytes=1 << 30)
    bucket.set_state(0, VBucketState.REPLICA)
    vbucket = bucket.vbuckets[0]
    vbucket.begin_snapshot(0, 15)
    for frame in frames[10:15]:
        vbucket.receive(frame)
    vbucket.begin_snapshot(16, 30)
    for frame in frames[15:]:
        vbucket.receive(frame)
    assert vbucket.history_start == 15
    assert versions(vbucket) == every[10:]
    seal(bucket)
    assert versions(vbucket) == every[10:]


STEPS = ["write", "delete", "seal", "compact", "back"]


@given(st.lists(st.sampled_from(STEPS), max_size=30), st.integers(0, 9))
def test_a_reader_that_keeps_up_misses_nothing(steps: list[str], size: int) -> None:
    """Whatever is merged meanwhile, everything from the history's start on is complete."""
    _, bucket = opened(history_retention_bytes=100 + 200 * size)
    vbucket = bucket.vbuckets[0]
    model: dict[int, bytes] = {}
    for step in steps:
        if step == "write":
            model.update(written(vbucket, 7))
        elif step == "delete" and vbucket.get(KEYS[1]) is not None:
            model[vbucket.delete(KEYS[1]).seqno] = b""
        elif step == "seal":
            seal(bucket)
        elif step == "compact":
            bucket.compact()
        elif step == "back" and vbucket.high_seqno > 3 and vbucket.high_seqno - 3 >= vbucket.rollback_floor:
            bucket.rollback({0: vbucket.high_seqno - 3}, branch=True)
            model = {seqno: value for seqno, value in model.items() if seqno <= vbucket.high_seqno}
        for after in (0, vbucket.high_seqno // 2):
            got = dict(versions(vbucket, after))
            start = max(vbucket.history_start, after + 1)
            retained = {seqno: value for seqno, value in got.items() if seqno >= start}
            assert retained == {seqno: value for seqno, value in model.items() if seqno >= start}
            assert got.items() <= model.items()
