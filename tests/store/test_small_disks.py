"""A disk that was full: when there is room again, writes are accepted again."""

from __future__ import annotations

import random

import pytest

from tailrace.clock import ManualClock
from tailrace.errors import DocumentRefused, StoreError
from tailrace.store.base import STATE_DISK_BYTES, StoreSettings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.testing.faulty_files import BLOCK, SmallDisk

QUOTA = 1 << 20
SETTINGS = StoreSettings(memory_quota=QUOTA, history_changes=0)
LEAST = SETTINGS.least_disk_bytes - STATE_DISK_BYTES
"""For the few vbuckets that are here."""


def maintain(bucket: EngineBucket) -> bool:
    """Do what a node's timer does; return whether all of it worked.

    Jobs run together where they may: each has its file on the disk until the last one is done, and the one
    that began last writes first.
    """
    worked = True
    try:
        bucket.flush()
    except StoreError:
        worked = False
    while jobs := list(iter(bucket.begin_maintenance, None)):
        for job in reversed(jobs):
            job.run()
        for job in jobs:
            try:
                job.finish()
            except StoreError:
                worked = False
        if not worked:
            break
    return worked


def fill(bucket: EngineBucket, rng: random.Random, *, keys: int, size: int, burst: int) -> None:
    """Write until it is refused and the disk is full, a burst between two commits."""
    for _ in range(2_000):
        try:
            for _ in range(burst):
                vbucket = bucket.vbuckets[rng.randrange(bucket.vbucket_count)]
                vbucket.set(b"\0k%d" % rng.randrange(keys), rng.randbytes(size))
        except DocumentRefused:
            if not maintain(bucket):
                return
        maintain(bucket)
    raise AssertionError("the disk never got full")


def write_again(bucket: EngineBucket, *, attempts: int = 12) -> None:
    for _ in range(attempts):
        maintain(bucket)  # a merge may still have no room; it can wait
        if bucket.memory_bytes <= bucket.queue.memory_limit:
            bucket.vbuckets[0].set(b"\0after", b"there was room")
            bucket.flush()
            return
    raise AssertionError("writes stay refused for ever")


def full_bucket(
    rng: random.Random, capacity: int, *, keys: int = 100_000, size: int = 2_000, burst: int = 1_000_000
) -> tuple[SmallDisk, Engine, EngineBucket]:
    """A bucket on a full disk, half of it used by others."""
    disk = SmallDisk(capacity)
    disk.foreign_bytes = capacity // 2
    engine = Engine(files=disk, settings=SETTINGS, clock=ManualClock())
    bucket = engine.create_bucket("default", 4)
    fill(bucket, rng, keys=keys, size=size, burst=burst)
    for _ in range(rng.randrange(20)):
        maintain(bucket)
    return disk, engine, bucket


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keys", [2_000, 100_000])
@pytest.mark.parametrize("size", [1_000, QUOTA // 10])
def test_a_disk_of_the_least_size_recovers(seed: int, keys: int, size: int) -> None:
    rng = random.Random(seed)
    burst = rng.choice((20, 1_000, 1_000_000))
    disk, engine, bucket = full_bucket(rng, LEAST, keys=keys, size=size, burst=burst)
    disk.foreign_bytes = 0
    write_again(bucket)
    written = bucket.vbuckets[0].get(b"\0after")
    engine.crash()
    reopened = Engine(files=disk, settings=SETTINGS, clock=ManualClock()).buckets["default"]
    assert reopened.vbuckets[0].get(b"\0after") == written


@pytest.mark.parametrize("size", [0, 1_000, QUOTA // 10])
def test_half_of_the_least_size_is_enough_for_all_that_is_in_memory(size: int) -> None:
    """The worst case: others have filled the disk, and nothing of what is in memory is in a log. Keys that
    are written again and again make the largest segments.
    """
    disk = SmallDisk(LEAST)
    engine = Engine(files=disk, settings=SETTINGS, clock=ManualClock())
    bucket = engine.create_bucket("default", 4)
    disk.foreign_bytes = disk.free_bytes
    fill(bucket, random.Random(1), keys=10, size=size, burst=1_000_000)
    disk.foreign_bytes -= LEAST // 2
    write_again(bucket)


@pytest.mark.parametrize("seed", range(4))
def test_room_that_comes_bit_by_bit_is_not_used_up_by_what_fails(seed: int) -> None:
    rng = random.Random(seed)
    disk, _, bucket = full_bucket(rng, LEAST, burst=rng.choice((20, 100, 1_000)))
    while disk.foreign_bytes:
        disk.foreign_bytes = max(disk.foreign_bytes - QUOTA // 8, 0)
        maintain(bucket)
    write_again(bucket)


def test_a_thousand_vbuckets_with_many_branches() -> None:
    rng = random.Random(1)
    disk = SmallDisk(SETTINGS.least_disk_bytes)
    engine = Engine(files=disk, settings=SETTINGS, clock=ManualClock())
    bucket = engine.create_bucket("default", 1024)
    for _ in range(SETTINGS.failover_entries):
        for vbucket in bucket:
            vbucket.set(b"\0k", b"")
            log = vbucket.failover_log
            vbucket.failover_log = bucket.branched(log, vbucket.high_seqno, bucket.new_uuid(log))
        maintain(bucket)
    disk.foreign_bytes = disk.capacity // 2
    fill(bucket, rng, keys=100_000, size=1_000, burst=1_000_000)
    disk.foreign_bytes = 0
    write_again(bucket)


def test_a_log_in_which_nothing_was_committed_does_not_stay() -> None:
    disk = SmallDisk(4 * QUOTA)
    engine = Engine(files=disk, settings=SETTINGS, clock=ManualClock())
    bucket = engine.create_bucket("default", 4)
    bucket.journal.rotate()
    bucket.vbuckets[0].set(b"\0k", bytes(100_000))
    disk.foreign_bytes = disk.free_bytes - 10 * BLOCK
    for _ in range(3):
        with pytest.raises(StoreError):
            bucket.flush()
        disk.foreign_bytes -= 5 * BLOCK
    disk.foreign_bytes -= 5 * BLOCK
    bucket.flush()  # 30 blocks are enough if nothing else is in them
    engine.crash()
    reopened = Engine(files=disk, settings=SETTINGS, clock=ManualClock()).buckets["default"]
    assert reopened.vbuckets[0].get(b"\0k") == bucket.vbuckets[0].get(b"\0k")


def test_after_a_failed_seal_no_merge_takes_its_room() -> None:
    """Side by side each may take the room that the other needs."""
    disk = SmallDisk(64 * QUOTA)
    engine = Engine(files=disk, settings=SETTINGS, clock=ManualClock())
    bucket = engine.create_bucket("default", 4)
    rng = random.Random(1)
    for _ in range(4):
        bucket.vbuckets[0].set(b"\0k", rng.randbytes(QUOTA // 2))
        bucket.seal()
    bucket.vbuckets[0].set(b"\0k", rng.randbytes(QUOTA // 2))
    bucket.flush()
    disk.foreign_bytes = disk.free_bytes - BLOCK
    begun = []
    for _ in range(6):
        jobs = list(iter(bucket.begin_maintenance, None))
        begun.append([type(job).__name__ for job in jobs])
        for job in jobs:
            with pytest.raises(StoreError):
                job.finish()
    assert ["SealJob"] in begun[1:]  # alone: nothing else takes the room that it needs
    assert any("MergeJob" in kinds for kinds in begun[1:])  # it may make room, so it gets its turn
