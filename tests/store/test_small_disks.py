"""A disk that was full: when there is room again, writes are accepted again."""

from __future__ import annotations

import random

import pytest

from tailrace.clock import ManualClock
from tailrace.errors import DocumentRefused, StoreError
from tailrace.store.base import StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.testing.faulty_files import SmallDisk

QUOTA = 1 << 20


def maintain(bucket: EngineBucket) -> bool:
    """What a node's timer does; whether all of it worked."""
    try:
        bucket.flush()
        while (job := bucket.begin_maintenance()) is not None:
            job.finish()
    except StoreError:
        return False
    return True


def fill(bucket: EngineBucket, rng: random.Random, *, keys: int, burst: int) -> None:
    """Write until it is refused and the disk is full, a burst between two commits."""
    for _ in range(500):
        try:
            for _ in range(burst):
                bucket.vbuckets[rng.randrange(4)].set(b"\0k%d" % rng.randrange(keys), rng.randbytes(2_000))
        except DocumentRefused:
            if not maintain(bucket):
                return
        maintain(bucket)
    raise AssertionError("the disk never got full")


def attempts_until_written(bucket: EngineBucket) -> int:
    for attempt in range(50):
        maintain(bucket)  # a merge may still have no room; it can wait
        if bucket.memory_bytes <= bucket.queue.memory_limit:
            bucket.vbuckets[0].set(b"\0after", b"there was room")
            bucket.flush()
            return attempt
    raise AssertionError("writes stay refused for ever")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keys", [2_000, 100_000])
def test_a_disk_of_the_least_size_recovers(seed: int, keys: int) -> None:
    rng = random.Random(seed)
    settings = StoreSettings(memory_quota=QUOTA)
    disk = SmallDisk(settings.least_disk_bytes)
    disk.foreign_bytes = disk.capacity // 2
    engine = Engine(files=disk, settings=settings, clock=ManualClock())
    bucket = engine.create_bucket("default", 4)
    fill(bucket, rng, keys=keys, burst=rng.choice((20, 100, 1_000)))
    for _ in range(rng.randrange(20)):
        maintain(bucket)
    disk.foreign_bytes = 0
    attempts_until_written(bucket)
    written = bucket.vbuckets[0].get(b"\0after")
    engine.crash()
    reopened = Engine(files=disk, settings=settings, clock=ManualClock()).buckets["default"]
    assert reopened.vbuckets[0].get(b"\0after") == written
