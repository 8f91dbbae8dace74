"""Random histories, requests, windows, acks and disasters, against a model of the vbuckets.

The reader of `producer_fakes` refuses every message that breaks a rule of snapshots or flow control. What
is added here: whatever happens, even if a stream breaks off anywhere and resumes on another branch, at the
end of each snapshot the reader holds exactly the state that the vbucket had at that seqno.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.producer_fakes import COLLECTIONS, FULL, FakeBucket, FakeReader, FakeVBucket, ReaderModel, steps
from tailrace.wire.codes import DcpOpcode, Status, StreamEndStatus, VBucketState
from tailrace.wire.dcp import DcpMutation
from tailrace.wire.header import Frame

VBUCKETS = 3
keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])
vbuckets = st.integers(0, VBUCKETS - 1)
changes = st.lists(st.tuples(keys, st.integers(-2, 400)), min_size=1, max_size=12)
"""Key and size of a value, -2 for a deletion, -1 for an expiration; many together, since rules run one at
a time.
"""


def state_at(vbucket: FakeVBucket, seqno: int, *, collections: bool) -> dict[bytes, bytes]:
    """The documents of a vbucket at a seqno."""
    state: dict[bytes, bytes] = {}
    for change in vbucket.changes:
        if change.seqno <= seqno:
            key = change.key if collections else change.key[1:]
            frame = Frame.parse(change.frame)
            if frame.opcode == DcpOpcode.MUTATION:
                state[key] = frame.value
            else:
                state.pop(key, None)
    return state


class Producing(ReaderModel):
    """One connection, three vbuckets."""

    def start(
        self, *, collections: bool, flow_control: str, order: str, made: list[tuple[bytes, int]]
    ) -> None:
        self.collections = collections
        self.bucket = FakeBucket(VBUCKETS)
        self.reader = FakeReader(self.bucket, features=COLLECTIONS if collections else frozenset())
        self.reader.open(FULL, connection_buffer_size=flow_control, backfill_order=order)
        self.live, self.broken = {}, {}
        self.branches = 0
        for number in range(VBUCKETS):
            self.change(number, made)

    def vbucket(self, number: int) -> FakeVBucket:
        vbucket = self.bucket.vbuckets[number]
        assert vbucket is not None
        return vbucket

    def change(self, number: int, made: list[tuple[bytes, int]]) -> None:
        for key, size in made:
            if size < 0:
                self.vbucket(number).delete(key, expired=size == -1)
            else:
                self.vbucket(number).set(key, bytes(size))

    def close_checkpoint(self, number: int) -> None:
        self.vbucket(number).close_checkpoint()

    def persist(self, number: int, keep_memory: bool) -> None:
        self.vbucket(number).to_disk(keep_memory=keep_memory)

    def high_seqno(self, number: int) -> int:
        return self.vbucket(number).high_seqno

    def close_stream(self, number: int) -> None:
        status = self.reader.close_stream(number)
        assert status == (Status.SUCCESS if number in self.live else Status.KEY_ENOENT)
        if number in self.live:
            self.broken[number] = self.live.pop(number)

    def pull(self, max_bytes: int) -> None:
        self.reader.pull(max_bytes)
        self.forget_the_ended()

    def ack(self, share: float) -> None:
        self.reader.ack(max(1, int(self.reader.outstanding * share)))

    def rollback(self, number: int, share: float) -> None:
        vbucket = self.vbucket(number)
        self.branches += 1
        vbucket.rollback(int(vbucket.high_seqno * share), 0x1_0000 + self.branches)
        self.must_end(number)

    def fail_over(self, number: int) -> None:
        self.bucket.set_state(number, VBucketState.DEAD)
        self.must_end(number)
        self.bucket.set_state(number, VBucketState.ACTIVE)

    def forget_the_ended(self) -> None:
        for number, stream in list(self.live.items()):
            if stream.ended is not None:
                assert stream.ended == StreamEndStatus.OK
                assert stream.is_complete
                self.broken[number] = self.live.pop(number)

    def complete_snapshots_are_states_that_the_vbucket_had(self) -> None:
        for number, stream in self.live.items():
            if stream.position.at_snapshot_end and stream.is_complete:
                held = {
                    key: message.value
                    for key, message in stream.documents.items()
                    if isinstance(message, DcpMutation)
                }
                expected = state_at(self.vbucket(number), stream.last_seqno, collections=self.collections)
                assert held == expected

    def teardown(self) -> None:
        assert self.reader.producer.close_requested is None
        self.reader.producer.close("test is over")
        for vbucket in self.bucket.vbuckets:
            assert vbucket is not None
            assert not vbucket.watchers
            assert all(snapshot.is_closed for snapshot in vbucket.snapshots)


STEPS = steps(
    change={"number": vbuckets, "made": changes},
    more_change={"number": vbuckets, "made": changes},
    request={
        "number": vbuckets,
        "share": st.floats(0, 1),
        "bounded": st.booleans(),
        "max_bytes": st.integers(1, 1000),
    },
    pull={"max_bytes": st.integers(1, 5000)},
    more_pull={"max_bytes": st.integers(1, 500)},
    ack={"share": st.floats(0.01, 1.2)},
    close_stream={"number": vbuckets},
    close_checkpoint={"number": vbuckets},
    persist={"number": vbuckets, "keep_memory": st.booleans()},
    rollback={"number": vbuckets, "share": st.floats(0, 1)},
    fail_over={"number": vbuckets},
    catch_up={},
)


@settings(max_examples=100, deadline=None)
@given(
    collections=st.booleans(),
    flow_control=st.sampled_from(["0", "1", "150", "4000"]),
    order=st.sampled_from(["round-robin", "sequential"]),
    made=changes,
    script=STEPS,
)
def test_any_history_and_any_reader(script: list[tuple[str, dict[str, Any]]], **fields: Any) -> None:
    world = Producing()
    world.start(**fields)
    for name, arguments in script:
        getattr(world, name)(**arguments)
        world.complete_snapshots_are_states_that_the_vbucket_had()
    world.catch_up()
    world.complete_snapshots_are_states_that_the_vbucket_had()
    world.teardown()
