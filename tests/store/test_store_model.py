"""Random operations, restarts, kills, compactions and rollbacks, against a model that keeps every version
there was.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from store.helpers_store import maintain, seqno_of, stream, subject_of
from tailrace.clock import ManualClock
from tailrace.errors import RollbackImpossible
from tailrace.files import DiskFiles, MemoryFiles
from tailrace.rng import source
from tailrace.store.base import Compaction, StoreSettings
from tailrace.store.engine import Engine

VBUCKETS = 2
KEYS = [b"\0%d" % i for i in range(8)]

vbuckets = st.integers(0, VBUCKETS - 1)
keys = st.sampled_from(KEYS)


class StoreMachine(RuleBasedStateMachine):
    """The model is, for each vbucket, the list of all its changes in order: (seqno, key, frame)."""

    def new_files(self) -> Any:
        memory = MemoryFiles()
        return lambda: memory

    @initialize(
        quota=st.sampled_from([4_000, 20_000, 1 << 20]),
        history=st.sampled_from([0, 3, 50]),
        fanout=st.sampled_from([2, 4]),
        items=st.sampled_from([3, 1_000]),
    )
    def start(self, quota: int, history: int, fanout: int, items: int) -> None:
        self.files = self.new_files()
        self.settings = StoreSettings(
            memory_quota=quota, history_changes=history, segment_fanout=fanout, checkpoint_items=items
        )
        self.settings.memory_quota = quota
        self.clock = ManualClock()
        self.rng = source(5)
        self.engine = self.open()
        self.bucket = self.engine.create_bucket("default", VBUCKETS)
        self.bucket.queue.memory_limit = 1 << 30
        self.history: list[list[tuple[int, bytes, bytes]]] = [[] for _ in range(VBUCKETS)]
        self.snapshots: list[tuple[Any, list[bytes]]] = []

    def open(self) -> Engine:
        return Engine(files=self.files(), settings=self.settings, clock=self.clock, rng=self.rng)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.crash()

    # What the model says.

    def wrote(self, vbucket: int, key: bytes) -> None:
        """The store made a new version: it must have the next seqno and the next rev."""
        vb = self.bucket.vbuckets[vbucket]
        frame = vb.get_any(key)
        history = self.history[vbucket]
        assert frame is not None
        assert seqno_of(frame) == vb.high_seqno == (history[-1][0] if history else 0) + 1
        before = self.newest(vbucket).get(key)
        if before is not None and seqno_of(before) > vb.purge_seqno:
            assert rev_of(frame) == rev_of(before) + 1
        history.append((vb.high_seqno, key, frame))

    def newest(self, vbucket: int, *, after: int = 0, up_to: int = 1 << 64) -> dict[bytes, bytes]:
        return {key: frame for seqno, key, frame in self.history[vbucket] if after < seqno <= up_to}

    def expected(self, vbucket: int, after: int, end: int) -> list[bytes]:
        """What a snapshot of these seqnos holds: each key once, no purged tombstones."""
        purge = self.bucket.vbuckets[vbucket].purge_seqno
        frames = self.newest(vbucket, after=after, up_to=end).values()
        return sorted((f for f in frames if not purged(f, purge)), key=seqno_of)

    # Operations.

    @rule(
        vbucket=vbuckets, key=keys, size=st.sampled_from([0, 10, 500, 2_000]), ttl=st.sampled_from([0, 0, 5])
    )
    def set(self, vbucket: int, key: bytes, size: int, ttl: int) -> None:
        expiry = self.clock.time_ns() // 10**9 + ttl if ttl else 0
        self.bucket.vbuckets[vbucket].set(key, bytes(size), expiry=expiry)
        self.wrote(vbucket, key)

    @rule(vbucket=vbuckets, key=keys)
    def delete(self, vbucket: int, key: bytes) -> None:
        self.get(vbucket, key)
        vb = self.bucket.vbuckets[vbucket]
        if vb.get(key) is not None:
            vb.delete(key)
            self.wrote(vbucket, key)

    @rule(vbucket=vbuckets, key=keys)
    def get(self, vbucket: int, key: bytes) -> None:
        """A document that is found expired becomes an expiration."""
        vb = self.bucket.vbuckets[vbucket]
        high = vb.high_seqno
        frame = vb.get(key)
        wanted = self.newest(vbucket).get(key)
        if vb.high_seqno > high:
            assert frame is None
            assert wanted is not None
            assert 0 < int.from_bytes(wanted[44:48], "big") <= self.clock.time_ns() // 10**9
            self.wrote(vbucket, key)
        else:
            assert frame == (wanted if wanted is not None and wanted[1] == 0x57 else None)

    @rule(seconds=st.sampled_from([1, 6]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule()
    def flush(self) -> None:
        self.bucket.flush()
        assert all(vb.persisted_seqno == vb.high_seqno for vb in self.bucket)

    @rule()
    def maintain(self) -> None:
        maintain(self.bucket)

    @rule()
    def seal(self) -> None:
        self.bucket.seal()
        assert self.bucket.memory_bytes == 0 or self.bucket.generations

    @rule()
    def forget_memory(self) -> None:
        self.bucket.forget_memory()

    @rule(vbucket=st.none() | vbuckets, drop=st.booleans(), before=st.integers(0, 20))
    def compact(self, vbucket: int | None, drop: bool, before: int) -> None:
        only = None if vbucket is None else [vbucket]
        floors = [vb.rollback_floor for vb in self.bucket]
        self.bucket.compact(Compaction(vbuckets=only, drop_tombstones=drop, purge_before_seqno=before))
        for vb, floor in zip(self.bucket, floors, strict=True):
            if only is None or vb.id in only:
                kept = vb.high_seqno - self.settings.history_changes
                assert vb.rollback_floor <= max(kept, floor, vb.purge_seqno + 1)
                if drop:
                    left = [f for f in self.newest(vb.id).values() if f[1] != 0x57]
                    left = [f for f in left if not purged(f, vb.purge_seqno)]
                    assert all(seqno_of(f) == vb.high_seqno for f in left)

    @rule(vbucket=vbuckets, share=st.floats(0, 1), beyond=st.booleans())
    def rollback(self, vbucket: int, share: float, beyond: bool) -> None:
        vb = self.bucket.vbuckets[vbucket]
        uuid = vb.uuid
        seqno = round(share * vb.high_seqno) + beyond
        possible = seqno <= vb.high_seqno and (seqno == 0 or seqno >= vb.rollback_floor)
        if not possible:
            with pytest.raises(RollbackImpossible):
                self.bucket.rollback({vbucket: seqno}, branch=True)
            assert vb.uuid == uuid
            return
        self.bucket.rollback({vbucket: seqno}, branch=True)
        self.history[vbucket] = [change for change in self.history[vbucket] if change[0] <= seqno]
        assert vb.uuid != uuid
        assert vb.failover_log.newest.seqno == vb.high_seqno == vb.persisted_seqno == seqno

    @rule()
    def stop_and_start(self) -> None:
        logs = [vb.failover_log for vb in self.bucket]
        self.engine.close()
        self.reopened()
        assert [vb.failover_log for vb in self.bucket] == logs

    @rule()
    def kill_and_start(self) -> None:
        uuids = [vb.uuid for vb in self.bucket]
        persisted = [vb.persisted_seqno for vb in self.bucket]
        self.engine.crash()
        for number, seqno in enumerate(persisted):
            self.history[number] = [change for change in self.history[number] if change[0] <= seqno]
        self.reopened()
        for vb, uuid, seqno in zip(self.bucket, uuids, persisted, strict=True):
            assert vb.uuid != uuid
            assert vb.high_seqno == seqno == vb.failover_log.newest.seqno

    def reopened(self) -> None:
        self.engine = self.open()
        self.bucket = self.engine.buckets["default"]
        self.bucket.queue.memory_limit = 1 << 30

    # Reading.

    @rule(
        vbucket=vbuckets, share=st.floats(0, 1), memory=st.booleans(), size=st.sampled_from([1, 600, 1 << 20])
    )
    def read_stream(self, vbucket: int, share: float, memory: bool, size: int) -> None:
        vb = self.bucket.vbuckets[vbucket]
        start = after = round(share * vb.high_seqno)
        for frames in stream(vb, after, memory=memory, max_bytes=size):
            end = seqno_of(frames[-1])
            assert frames == self.expected(vbucket, after, end)
            after = end
        reach = vb.high_seqno if memory else vb.persisted_seqno
        assert after == max(start, reach)

    @rule(vbucket=vbuckets, share=st.floats(0, 1), memory=st.booleans())
    def open_snapshot(self, vbucket: int, share: float, memory: bool) -> None:
        """It is read much later, and must not notice."""
        vb = self.bucket.vbuckets[vbucket]
        after = round(share * vb.high_seqno)
        snapshot = vb.snapshot_after(after, memory=memory)
        if snapshot is not None and len(self.snapshots) < 5:
            self.snapshots.append((snapshot, self.expected(vbucket, after, snapshot.end)))

    @precondition(lambda self: self.snapshots)
    @rule(size=st.sampled_from([1, 600, 1 << 20]))
    def read_snapshot(self, size: int) -> None:
        snapshot, wanted = self.snapshots.pop(0)
        frames = []
        while (chunk := snapshot.read(size)) is not None:
            starts = chunk.offsets.tolist()
            for start, stop in zip(starts, [*starts[1:], len(chunk.data)], strict=True):
                frames.append(chunk.data[start:stop].tobytes())
        assert frames == wanted
        assert len({subject_of(frame) for frame in frames}) == len(frames)

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "bucket"):
            return
        for vb in self.bucket:
            newest = self.newest(vb.id)
            for key in KEYS:
                frame, wanted = vb.get_any(key), newest.get(key)
                assert frame == wanted or (frame is None and wanted and purged(wanted, vb.purge_seqno))
            assert vb.item_count == sum(frame[1] == 0x57 for frame in newest.values())


def purged(frame: bytes, purge_seqno: int) -> bool:
    return frame[1] != 0x57 and seqno_of(frame) <= purge_seqno


def rev_of(frame: bytes) -> int:
    return int.from_bytes(frame[32:40], "big")


class DiskMachine(StoreMachine):
    """The same on a real disk."""

    def new_files(self) -> Any:
        self.directory = tempfile.mkdtemp()
        return lambda: DiskFiles(self.directory)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)


short = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestModelInMemory = StoreMachine.TestCase
TestModelInMemory.settings = short
TestModelOnDisk = DiskMachine.TestCase
TestModelOnDisk.settings = settings(short, max_examples=15)


@pytest.mark.long
class TestLongModel(StoreMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(short, max_examples=5_000, stateful_step_count=200)
