"""Many documents at once are stored as they are one by one."""

from __future__ import annotations

import json
import random

import pytest

from tailrace.clock import ManualClock
from tailrace.errors import DocumentRefused
from tailrace.files import MemoryFiles
from tailrace.rng import source
from tailrace.store.base import StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.store.vbucket import EngineVBucket
from tailrace.wire.codes import Status

VBUCKETS = 4
MANIFEST = {
    "uid": "1",
    "scopes": [{"name": "_default", "uid": "0", "collections": [{"name": "c", "uid": "8"}]}],
}


def a_bucket() -> tuple[Engine, EngineBucket, ManualClock]:
    clock = ManualClock()
    settings = StoreSettings(checkpoint_items=7, max_value=500)
    engine = Engine(files=MemoryFiles(), settings=settings, clock=clock, rng=source(1))
    return engine, engine.create_bucket("default", VBUCKETS), clock


def state(bucket: EngineBucket) -> dict[str, object]:
    return {
        "pending": list(zip(bucket.queue.frames, bucket.queue.notes, strict=True)),
        "memory": bucket.memory_bytes,
        "cas": bucket.clock.last,
        "vbuckets": [
            (vb.high_seqno, vb.item_count, vb.checkpoint_id, vb.collection_high_seqno([0, 8]), vb._index)
            for vb in bucket
        ],
        "tails": [(vb._tail.frames(), vb._tail.notes()) for vb in bucket],
    }


def prepare(bucket: EngineBucket, rng: random.Random) -> None:
    """What makes a vbucket unusual: locks, answers that are kept, collections, deletions, no index."""
    if rng.random() < 0.3:
        bucket.set_manifest(json.dumps(MANIFEST).encode())
    for vb in bucket:
        for _ in range(rng.randrange(12)):
            vb.set(b"\0k%d" % rng.randrange(9), b"before")
        key = b"\0k%d" % rng.randrange(9)
        if vb.get(key) is not None:
            unusual = rng.randrange(4)
            if unusual == 0:
                vb.delete(key)
            elif unusual == 1:
                _, cas = vb.get_locked(key, 10)
                vb.unlock(key, cas)
            elif unusual == 2:
                bucket.cache[key] = "the answer to a get"
        if rng.random() < 0.3:
            vb.collection_high_seqno([0, 8])
        if rng.random() < 0.2:
            bucket.rollback({vb.id: vb.high_seqno // 2}, branch=True)  # its index is gone


@pytest.mark.parametrize("datatype", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_as_one_by_one(seed: int, datatype: int) -> None:
    outcomes = []
    for way in ("set", "put", "set_many"):
        rng = random.Random(seed)
        engine, bucket, clock = a_bucket()
        prepare(bucket, rng)
        told: list[int] = []
        for vb in bucket:
            vb.on_append(lambda number=vb.id, told=told: told.append(number))  # type: ignore[misc]
        for _ in range(3):
            clock.advance(rng.random())
            count = rng.randrange(40)
            numbers = rng.choices(range(VBUCKETS), k=count)
            prefixes = (b"\0k%d", b"\x08k%d") if bucket.collections.collection(8) else (b"\0k%d",)
            keys = [rng.choice(prefixes) % rng.randrange(12) for _ in range(count)]
            values = [rng.randbytes(rng.randrange(400)) for _ in range(count)]
            if way == "set_many":
                bucket.set_many(numbers, keys, values, datatype)
                continue
            for number, key, value in zip(numbers, keys, values, strict=True):
                vb = bucket.vbuckets[number]  # type: ignore[assignment]
                if way == "set" or key[0] or datatype > 1:  # others are not for `put`
                    vb.set(key, value, datatype=datatype)
                else:
                    assert vb.put(key, value, 0, datatype, 0) == (bucket.clock.last, vb.high_seqno)
                    bucket.cache.pop(key, None)
        outcomes.append((state(bucket), told, dict(bucket.cache)))
        engine.close()
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize(
    ("vbucket", "key", "size", "status"),
    [
        (VBUCKETS, b"\0k", 1, Status.NOT_MY_VBUCKET),
        (2, b"\0k", 1, Status.NOT_MY_VBUCKET),
        (0, b"\0k", 501, Status.E2BIG),
        (0, b"\0locked", 1, Status.LOCKED),
    ],
)
def test_one_that_is_refused(vbucket: int, key: bytes, size: int, status: Status) -> None:
    engine, bucket, _ = a_bucket()
    bucket.delete_vbucket(2)
    vb = bucket.vbuckets[0]
    vb.set(b"\0locked", b"")
    vb.get_locked(b"\0locked", 10)
    with pytest.raises(DocumentRefused) as refused:
        bucket.set_many([0, vbucket, 1], [b"\0first", key, b"\0last"], [b"1", bytes(size), b"3"])
    assert refused.value.status == status
    assert vb.get(b"\0first") is not None
    assert bucket.vbuckets[1].get(b"\0last") is None
    assert bucket.memory_bytes == sum(map(len, bucket.queue.frames))
    before = bucket.clock.last
    assert vb.set(b"\0next", b"").cas > before
    engine.close()


def test_beyond_the_quota() -> None:
    engine, bucket, _ = a_bucket()
    bucket.queue.memory_limit = 5_000
    with pytest.raises(DocumentRefused) as refused:
        bucket.set_many([1] * 100, [b"\0%d" % i for i in range(100)], [bytes(400)] * 100)
    assert refused.value.status == Status.ETMPFAIL
    assert 5_000 < bucket.memory_bytes < 6_000
    assert bucket.vbuckets[1].item_count == len(bucket.queue.frames)
    engine.close()


def test_together_where_nothing_is_unusual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that come twice, new ones, deleted ones, those of a collection, and vbuckets that are watched."""
    outcomes = []
    for many in (False, True):
        rng = random.Random(3)
        engine, bucket, _ = a_bucket()
        bucket.set_manifest(json.dumps(MANIFEST).encode())
        keys = [b"\0k%d" % number for number in range(30)] + [b"\x08k%d" % number for number in range(30)]
        for vb in bucket:
            for key in keys[::2]:
                vb.set(key, b"before")
            for key in keys[::4]:
                vb.delete(key)
            vb.forgotten.rev_floor = 5
        bucket.vbuckets[1].collection_high_seqno([0, 8])
        told: list[int] = []
        bucket.vbuckets[2].on_append(lambda told=told: told.append(2))  # type: ignore[misc]
        numbers, names = rng.choices(range(VBUCKETS), k=200), rng.choices(keys, k=200)
        values = [rng.randbytes(rng.randrange(50)) for _ in names]
        if many:
            with monkeypatch.context() as patch:
                patch.setattr(EngineVBucket, "set", None)
                bucket.set_many(numbers, names, values, 1)
        else:
            for number, key, value in zip(numbers, names, values, strict=True):
                bucket.vbuckets[number].set(key, value, datatype=1)
        outcomes.append((state(bucket), told))
        engine.close()
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("wrong", ["value", "key"])
def test_nothing_is_changed_by_what_cannot_be_stored(wrong: str) -> None:
    engine, bucket, _ = a_bucket()
    for vb in bucket:
        vb.set(b"\0old", b"before")
    before = state(bucket)
    keys: list[bytes] = [b"\0old", b"\0new", b"\0old", b"\0new", b"\0old"]
    values = [b"1", b"2", b"3", b"4", b"5"]
    if wrong == "value":
        values[-1] = "no bytes"  # type: ignore[call-overload]
    else:
        keys[-1] = bytearray(b"\0unhashable")  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        bucket.set_many([0, 0, 1, 0, 0], keys, values)
    after = state(bucket)
    assert {**after, "cas": before["cas"]} == before
    bucket.set_many([0, 0], [b"\0old", b"\0new"], [b"6", b"7"])
    assert [vb.high_seqno for vb in bucket] == [3, 1, 1, 1]
    engine.close()


def test_as_many_of_each() -> None:
    engine, bucket, _ = a_bucket()
    with pytest.raises(ValueError, match="1 vbuckets, 2 keys, 2 values"):
        bucket.set_many([0], [b"\0a", b"\0b"], [b"", b""])
    bucket.set_many([], [], [])
    assert not bucket.queue.frames
    engine.close()
