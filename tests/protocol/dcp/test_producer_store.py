"""The producer on the real store: random writes, flushes, compactions, rollbacks, restarts and streams.

The model is a list of changes per vbucket. Whatever the store does with them, in memory or on disk, folded or
compacted, at the end of every snapshot a reader must hold exactly the documents that the model had at that
seqno, and a reader that reads everything must get everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.producer_fakes import COLLECTIONS, FULL, FakeHost, FakeReader, ReaderModel, steps
from tailrace.clock import ManualClock
from tailrace.errors import DocumentRefused, StoreError
from tailrace.files import MemoryFiles
from tailrace.server.bucket import ServedBucket, run_inline
from tailrace.server.events import EventLog
from tailrace.server.settings import Settings
from tailrace.store.base import Compaction, StoreSettings
from tailrace.store.engine import Engine
from tailrace.wire.codes import Status, StreamEndStatus
from tailrace.wire.dcp import DcpMutation

VBUCKETS = 2
keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g"])
vbuckets = st.integers(0, VBUCKETS - 1)
changes = st.lists(st.tuples(keys, st.none() | st.integers(0, 200)), min_size=1, max_size=12)
"""Key and size of a value, None for a deletion; many together, since rules run one at a time."""


class RealHost(FakeHost):
    """A host whose bucket is a served one of a real store."""

    def __init__(self, served: ServedBucket, features: frozenset[int]) -> None:
        super().__init__(served.store, features)  # type: ignore[arg-type]
        self.served = served
        self.settings = SimpleNamespace(**{**vars(self.settings), "backfill_buffer": 1 << 20})

    def watch(self, vbucket: int, callback: Callable[[], None]) -> Callable[[], None]:
        return self.served.watchers.watch(vbucket, callback)

    def await_append(self, vbucket: int, callback: Callable[[], None]) -> None:
        self.served.watchers.await_append(vbucket, callback)


class Storing(ReaderModel):
    """One node's store and one connection to it."""

    def start(
        self,
        *,
        collections: bool,
        checkpoint_items: int,
        share: float,
        window: str,
        made: list[tuple[bytes, int | None]],
    ) -> None:
        self.collections = collections
        self.window = window
        self.clock = ManualClock()
        self.files = MemoryFiles()
        self.rng = random.Random(7)
        self.settings = StoreSettings(
            checkpoint_items=checkpoint_items, checkpoint_share=share, segment_fanout=2, garbage_share=0.3
        )
        self.model: list[list[tuple[int, bytes, bytes | None]]] = [[] for _ in range(VBUCKETS)]
        self.broken = {}
        self.engine = self.open_engine()
        self.engine.create_bucket("default", VBUCKETS)
        self.connect()
        for number in range(VBUCKETS):
            self.change(number, made)

    def open_engine(self) -> Engine:
        return Engine(files=self.files, settings=self.settings, clock=self.clock, rng=self.rng)

    def connect(self) -> None:
        self.bucket = self.engine.buckets["default"]
        served = ServedBucket(self.bucket, Settings(), self.clock, run_inline, EventLog(self.clock))
        host = RealHost(served, COLLECTIONS if self.collections else frozenset())
        self.reader = FakeReader(None, host=host)
        self.reader.open(FULL, connection_buffer_size=self.window)
        self.live = {}

    def disconnect(self) -> None:
        self.reader.producer.close("gone")
        self.broken |= self.live

    # Changes

    def change(self, number: int, made: list[tuple[bytes, int | None]]) -> None:
        for key, size in made:
            if size is None:
                self.delete(number, key)
            else:
                value = b"%d" % len(self.model[number]) + bytes(size)
                written = self.bucket.vbuckets[number].set(b"\0" + key, value)
                self.model[number].append((written.seqno, key, value))

    def delete(self, number: int, key: bytes) -> None:
        try:
            written = self.bucket.vbuckets[number].delete(b"\0" + key)
        except DocumentRefused as refused:
            assert refused.status == Status.KEY_ENOENT
        else:
            self.model[number].append((written.seqno, key, None))

    def flush(self, seal: bool) -> None:
        self.bucket.flush()
        if seal:
            self.bucket.seal()
        while (job := self.bucket.begin_maintenance()) is not None:
            job.run()
            job.finish()

    def compact(self, drop: bool) -> None:
        self.bucket.compact(Compaction(drop_tombstones=drop))

    def close_checkpoint(self, number: int) -> None:
        self.bucket.vbuckets[number].close_checkpoint()

    def rollback(self, number: int, share: float) -> None:
        vbucket = self.bucket.vbuckets[number]
        target = int(vbucket.high_seqno * share)
        if 0 < target < vbucket.rollback_floor:
            target = vbucket.rollback_floor
        try:
            self.bucket.rollback({number: target}, branch=True)
        except StoreError:
            return
        assert vbucket.high_seqno == target
        self.model[number] = [change for change in self.model[number] if change[0] <= target]
        self.must_end(number)

    def restart(self, clean: bool) -> None:
        self.bucket.flush()
        self.disconnect()
        if clean:
            self.engine.close()
        else:
            self.engine.crash()
        self.engine = self.open_engine()
        self.connect()

    # Streams

    def high_seqno(self, number: int) -> int:
        return self.bucket.vbuckets[number].high_seqno

    def close_stream(self, number: int) -> None:
        self.reader.close_stream(number)
        if number in self.live:
            self.broken[number] = self.live.pop(number)

    def pull(self, max_bytes: int) -> None:
        self.reader.pull(max_bytes)
        if self.reader.outstanding:
            self.reader.ack(self.reader.outstanding // 2 + 1)
        self.forget_the_ended()

    def forget_the_ended(self) -> None:
        for number, stream in list(self.live.items()):
            if stream.ended == StreamEndStatus.OK:
                assert stream.is_complete
            elif stream.ended is not None:
                # deletions that it has not seen were forgotten meanwhile
                assert stream.ended == StreamEndStatus.STATE_CHANGED
                assert self.bucket.vbuckets[number].purge_seqno > stream.last_seqno
            if stream.ended is not None:
                self.broken[number] = self.live.pop(number)

    def complete_snapshots_are_states_that_the_vbucket_had(self) -> None:
        for number, stream in self.live.items():
            if not (stream.position.at_snapshot_end and stream.is_complete):
                continue
            expected: dict[bytes, bytes] = {}
            for seqno, key, value in self.model[number]:
                if seqno <= stream.last_seqno:
                    expected.pop(key, None)
                    if value is not None:
                        expected[key] = value
            cut = int(self.collections)
            held = {
                key[cut:]: message.value
                for key, message in stream.documents.items()
                if isinstance(message, DcpMutation)
            }
            assert held == expected

    def teardown(self) -> None:
        self.reader.producer.close("test is over")
        self.engine.close()


STEPS = steps(
    change={"number": vbuckets, "made": changes},
    more_change={"number": vbuckets, "made": changes},
    request={
        "number": vbuckets,
        "share": st.floats(0, 1),
        "bounded": st.booleans(),
        "max_bytes": st.integers(1, 1000),
    },
    more_request={
        "number": vbuckets,
        "share": st.just(1.0),
        "bounded": st.just(False),
        "max_bytes": st.integers(1, 500),
    },
    pull={"max_bytes": st.integers(1, 3000)},
    close_stream={"number": vbuckets},
    flush={"seal": st.booleans()},
    more_flush={"seal": st.just(True)},
    compact={"drop": st.booleans()},
    close_checkpoint={"number": vbuckets},
    rollback={"number": vbuckets, "share": st.floats(0, 1)},
    restart={"clean": st.booleans()},
    catch_up={},
)


@settings(max_examples=80, deadline=None)
@given(
    collections=st.booleans(),
    checkpoint_items=st.sampled_from([2, 5, 10_000]),
    share=st.sampled_from([0.0, 0.2]),
    window=st.sampled_from(["0", "1", "300"]),
    made=changes,
    script=STEPS,
)
def test_any_history_in_a_store(script: list[tuple[str, dict[str, Any]]], **fields: Any) -> None:
    world = Storing()
    world.start(**fields)
    for name, arguments in script:
        getattr(world, name)(**arguments)
        world.complete_snapshots_are_states_that_the_vbucket_had()
    world.catch_up()
    world.complete_snapshots_are_states_that_the_vbucket_had()
    world.teardown()


def test_key_begins_anew_after_its_tombstone_was_forgotten() -> None:
    """The deletion was still in memory but no longer in the index: the key came twice in a snapshot."""
    world = Storing()
    world.start(collections=True, checkpoint_items=10_000, share=0.2, window="0", made=[(b"f", 1)])
    world.request(number=0, share=1.0, bounded=False, max_bytes=1000)
    world.change(0, [(b"f", None), (b"a", 1)])
    world.compact(drop=True)
    world.change(0, [(b"f", 2)])
    world.drain()
    assert world.broken[0].ended == StreamEndStatus.STATE_CHANGED
    world.request(number=0, share=1.0, bounded=False, max_bytes=1000)  # is told to start over
    world.request(number=0, share=1.0, bounded=False, max_bytes=1000)
    world.catch_up()
    assert set(world.live[0].documents) == {b"\0a", b"\0f"}
    world.teardown()
