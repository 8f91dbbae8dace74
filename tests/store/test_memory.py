"""What leaves memory leaves it at once; a node has the garbage collector come by next to never."""

from __future__ import annotations

import gc

from store.crash_script import open_store
from tailrace.files import MemoryFiles
from tailrace.store.checkpoint import Tail


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
