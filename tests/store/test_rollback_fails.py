"""A rollback that the disk refuses leaves everything as it was, in memory and on disk."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tailrace import rng
from tailrace.clock import ManualClock
from tailrace.errors import StoreError
from tailrace.files import MemoryFiles
from tailrace.store.base import StoreSettings
from tailrace.store.engine import Engine
from tailrace.testing.faulty_files import Fault, FaultyFiles, SimulatedDisk, io_error, no_space


def opened(files: Any) -> Engine:
    return Engine(files=files, settings=StoreSettings(), clock=ManualClock(), rng=rng.source(5))


def content(bucket: Any) -> list[Any]:
    """Seqnos, branches and documents of both vbuckets, and the first snapshot that a reader gets."""
    rows: list[Any] = []
    for vbucket in bucket.vbuckets:
        keys = [b"\0k%d" % number for number in range(20)]
        snapshot, frames = vbucket.snapshot_after(0), []
        while snapshot is not None and (chunk := snapshot.read()) is not None:
            frames.append(chunk.data.tobytes())
        rows.append(
            (
                vbucket.high_seqno,
                vbucket.persisted_seqno,
                vbucket.failover_log.to_json(),
                [vbucket.get(key) for key in keys],
                b"".join(frames),
            )
        )
    return rows


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("targets", [{0: 12}, {0: 0, 1: 12}])
def test_a_disk_without_room(sealed: bool, targets: dict[int, int]) -> None:
    inner = MemoryFiles()
    files = FaultyFiles(inner)
    engine = opened(files)
    bucket = engine.create_bucket("default", 2)
    for version in range(3):
        for vbucket in bucket.vbuckets:
            for number in range(6):
                vbucket.set(b"\0k%d" % number, b"version %d" % version)
            vbucket.close_checkpoint()
        bucket.flush()
    if sealed:
        bucket.seal()
        bucket.forget_memory()  # all is read from the segment
    before = content(bucket)
    files.plan = lambda _call, name, _path, _size: Fault(no_space()) if name == "append" else None
    with pytest.raises(StoreError, match="No space left"):
        bucket.rollback(targets, branch=True)
    files.plan = None
    assert content(bucket) == before
    bucket.rollback(targets, branch=True)
    after = content(bucket)
    assert [of[0] for of in after] == [targets.get(number, 18) for number in (0, 1)]
    assert len(after[0][2]) == 2 > len(before[0][2])
    bucket.vbuckets[0].set(b"\0new", b"1")
    bucket.flush()
    rolled_back = content(bucket)
    engine.close()
    again = opened(inner)
    reopened = content(again.buckets["default"])
    assert [of[:-1] for of in reopened] == [of[:-1] for of in rolled_back], "but for how snapshots are cut"
    again.close()


@pytest.mark.parametrize("next_fails", [False, True])
@pytest.mark.parametrize("operation", ["rollback", "delete"])
def test_what_was_refused_is_not_there_after_a_power_cut(operation: str, next_fails: bool) -> None:
    """Its sync failed, so it is an error; but all of it may have reached the disk. The log that makes it void
    has nothing else that counts if the next commit fails, too.
    """
    disk = SimulatedDisk()
    files = FaultyFiles(disk)
    bucket = opened(files).create_bucket("default", 2)
    for vbucket in bucket.vbuckets:
        vbucket.set(b"\0k1", b"1")
    bucket.flush()
    before = [vbucket.get(b"\0k1") for vbucket in bucket.vbuckets]
    failed = []

    def plan(_call: int, name: str, _path: str, _size: int) -> Fault | None:
        if name != "sync" or failed:
            return None
        failed.append(name)
        return Fault(io_error())

    files.plan = plan
    with pytest.raises(StoreError):
        if operation == "rollback":
            bucket.rollback({0: 0}, branch=True)
        else:
            bucket.delete_vbucket(0)
    if next_fails:
        files.plan = lambda _call, name, _path, _size: Fault(no_space()) if name == "append" else None
        bucket.set_cursor("reader", {"0": 1})
        with pytest.raises(StoreError):
            bucket.flush()
    for seed in range(20):
        recovered = opened(disk.power_cut(random.Random(seed))).buckets["default"]
        assert [vbucket and vbucket.get(b"\0k1") for vbucket in recovered.vbuckets] == before
