"""What leaves memory leaves it at once; a node has the garbage collector come by next to never."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from store.crash_script import open_store
from tailrace.files import DiskFile, MemoryFiles
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
