"""What leaves memory leaves it at once; a node hardly ever runs the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.crash_script import open_store
from tailrace.files import DiskFile, MemoryFiles
from tailrace.store import compaction, merging
from tailrace.store.checkpoint import Tail
from tailrace.store.engine import Engine
from tailrace.store.format import frame_key


def tails() -> list[Tail]:
    return [tail for tail in gc.get_objects() if isinstance(tail, Tail)]


def test_sealed_changes_are_freed_without_the_collector() -> None:
    others = tails()  # of nodes that run in this process, and may seal theirs at any moment
    known = set(map(id, others))
    engine = open_store(MemoryFiles(), 1)
    bucket = engine.create_bucket("default", 2)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            for number in range(200):
                bucket.vbuckets[number % 2].set(b"\0k%d" % number, b"v" * 100)
            bucket.flush()
            assert sum(len(tail) for tail in tails() if id(tail) not in known) == 200
            bucket.seal()
            bucket.forget_memory()
            assert sum(len(tail) for tail in tails() if id(tail) not in known) == 0
        assert bucket.memory_bytes == 0
    finally:
        gc.enable()
        engine.close()


def test_changes_that_leave_memory_count_until_they_are_freed() -> None:
    """Freeing takes a while. Fast writers filled room that was not free yet, and the node held a
    generation more than its quota.
    """
    with open_store(MemoryFiles(), 1) as engine:
        bucket = engine.create_bucket("default", 2)
        bucket.remove_later()
        for number in range(200):
            bucket.vbuckets[number % 2].set(b"\0k%d" % number, b"v" * 100)
        bucket.seal()
        sealed = bucket.memory_bytes
        bucket.forget_memory()
        bucket.vbuckets[0].set(b"\0new", b"v")
        growing = bucket.generations.growing_bytes
        assert bucket.memory_bytes == sealed + growing
        job = bucket.begin_removal()
        assert job is not None
        job.run()
        bucket.rollback({0: bucket.vbuckets[0].high_seqno - 1}, branch=True)  # it counts everything again
        assert bucket.memory_bytes == sealed
        job.finish()
        assert bucket.memory_bytes == 0
        assert bucket.begin_removal() is None


@pytest.fixture
def sealed() -> Iterator[Any]:
    """A bucket with some segments, where only the test collects garbage."""
    engine = open_store(MemoryFiles(), 1)
    bucket = engine.create_bucket("default", 8)
    for generation in range(3):
        for number in range(64):
            bucket.vbuckets[number % 8].set(b"\0k%d" % number, b"%d" % generation)
        bucket.seal()
    bucket.forget_memory()
    gc.collect()
    gc.disable()
    yield bucket
    gc.enable()
    engine.close()


def test_segments_that_were_merged_are_freed_without_the_collector(sealed: Any) -> None:
    """Their files used to stay open, and take disk space, while the node ran."""
    for vbucket in sealed:
        assert vbucket.get(b"\0k%d" % vbucket.id) is not None
    old = [weakref.ref(segment) for segment in sealed.segments]
    reading = sealed.vbuckets[0].snapshot_after(0)
    sealed.compact()
    assert len(sealed.segments) == 1
    assert all(segment() is not None for segment in old), "a stream goes on with what it has begun"
    assert reading.read() is not None
    reading.close()
    assert not any(segment() is not None for segment in old)


def test_what_was_rolled_back_is_not_looked_for_in_the_files_again(
    sealed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for vbucket in sealed:
        vbucket.set(b"\0once more", b"v")
    sealed.flush_all()
    sealed.sealed.droppable(sealed.vbucket_count, 0)
    asked: list[int] = []
    file = type(sealed.segments[0].file)
    read = file.read

    def counted(*place: Any) -> Any:
        asked.append(1)
        return read(*place)

    monkeypatch.setattr(file, "read", counted)
    for _ in range(3):
        sealed.sealed.epoch += 1  # as each new segment has it
        assert not any(vbucket.pieces for vbucket in sealed)
        assert sealed.sealed.droppable(sealed.vbucket_count, 0)
    assert not asked


def test_a_merge_has_the_pieces_of_a_few_vbuckets_at_a_time(
    sealed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge, held = merging.merge, []

    def watched(plans: Iterator[Any], *rest: Any) -> Any:
        def counted() -> Iterator[Any]:
            for plan in plans:
                held.append(sum(len(segment._pieces) for segment in sealed.segments))
                yield plan

        return merge(counted(), *rest)

    monkeypatch.setattr(compaction, "merge", watched)
    monkeypatch.setattr(merging, "GROUP_BYTES", 1)
    segments = len(sealed.segments)
    sealed.compact()
    assert len(held) == 8
    assert max(held) <= 3 * segments  # of 8; one is merged, one was before it, one is next


def test_versions_that_were_superseded_are_not_read_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large document that was written again and again: a reader waits for the last version only."""
    with Engine(tmp_path / "data") as engine:
        bucket = engine.create_bucket("default", 1)
        vbucket = bucket.vbuckets[0]
        assert vbucket is not None
        vbucket.set(b"\0small", b"first")
        for number in range(6):
            vbucket.set(b"\0large", bytes([number]) * (2 << 20))
        vbucket.set(b"\0small", b"second")
        bucket.seal()
        bucket.forget_memory()
        read: list[int] = []
        read_into = DiskFile.read_into

        def counted(file: DiskFile, buffer: memoryview, offset: int) -> None:
            read.append(len(buffer))
            read_into(file, buffer, offset)

        monkeypatch.setattr(DiskFile, "read_into", counted)
        snapshot = vbucket.snapshot_after(0)
        assert snapshot is not None
        keys = []
        while (chunk := snapshot.read()) is not None:
            keys += [frame_key(bytes(chunk.data[at:])) for at in chunk.offsets.tolist()]
        assert keys == [b"\0large", b"\0small"]
        assert sum(read) < 5 << 20
