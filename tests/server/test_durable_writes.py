"""Durable writes are answered when they are durable, and not before: three nodes on real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

import tailrace.testing
from server.serverkit import Bench, Wire, ask, take
from tailrace.server import durability as server_durability
from tailrace.server.served_map import NodeAddress, bucket_map
from tailrace.server.session import Session
from tailrace.testing.running import RunningNode
from tailrace.wire import admin
from tailrace.wire.codes import DurabilityLevel, Feature, Magic, RequestFrameId, Status, VBucketState
from tailrace.wire.dcp import DcpOpen
from tailrace.wire.fields import Durability, FrameInfo, encode_frame_infos
from tailrace.wire.kv import Get, Set

LEVELS = list(DurabilityLevel)


@pytest.fixture
def nodes() -> Iterator[list[RunningNode]]:
    """An active and two replicas that receive nothing yet."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(tailrace.testing.node(vbuckets=1)) for _ in range(3)]
        for node in nodes[1:]:
            node.set_vbucket_state(0, VBucketState.REPLICA)
        set_map(nodes, [0, 1, 2])
        yield nodes


_revs = iter(range(1, 1000))


def set_map(nodes: Sequence[RunningNode], chain: list[int]) -> None:
    rev = next(_revs)
    addresses = [NodeAddress(port=node.port, host="127.0.0.1") for node in nodes]
    for at, node in enumerate(nodes):
        made = bucket_map("default", addresses, [chain], epoch=2, rev=rev, this_node=at)
        with Wire(node.port) as wire:
            wire.ok(
                admin.SetClusterConfig(key=b"default", value=made.text, epoch=2, revision=rev, datatype=1)
            )


def write(node: RunningNode, key: bytes, level: DurabilityLevel, timeout_ms: int) -> int:
    """The status of a durable write."""
    with Wire(node.port) as wire:
        wire.hello(Feature.ALT_REQUEST_SUPPORT, Feature.SYNC_REPLICATION, Feature.XERROR)
        framing = encode_frame_infos([Durability(level, timeout_ms).encode()])
        wire.send(Set(key=key, value=b"1", flags=0, expiry=0, vbucket=0, framing=framing, opaque=5))
        frame = wire.frame()
        assert frame.magic in (Magic.RESPONSE, Magic.FLEX_RESPONSE)
        assert frame.opaque == 5
        return frame.status


@pytest.mark.parametrize("level", LEVELS)
def test_a_majority_has_it_when_it_is_answered(nodes: list[RunningNode], level: DurabilityLevel) -> None:
    active, replica, _ = nodes
    replica.replicate([0], active)
    for number in range(5):
        key = b"key-%d" % number
        assert write(active, key, level, 60_000) == Status.SUCCESS
        assert active.get(key) is not None
        prepared = active.high_seqno(0) - 1  # and then the commit
        row = replica.replication_status()["0"]
        assert row["complete_seqno"] >= prepared
        assert active.replication_status()["0"]["persisted_seqno"] >= prepared
        if level == DurabilityLevel.PERSIST_TO_MAJORITY:
            assert row["persisted_seqno"] >= prepared


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_majority_it_is_not_answered_as_done(
    nodes: list[RunningNode], level: DurabilityLevel
) -> None:
    assert write(nodes[0], b"alone", level, 300) == Status.SYNC_WRITE_AMBIGUOUS


def test_what_a_replica_said_does_not_outlive_its_connection(nodes: list[RunningNode]) -> None:
    active, replica, _ = nodes
    replica.replicate([0], active)
    assert write(active, b"a", DurabilityLevel.MAJORITY, 60_000) == Status.SUCCESS
    replica.replicate([0], None)
    assert write(active, b"b", DurabilityLevel.MAJORITY, 300) == Status.SYNC_WRITE_AMBIGUOUS
    replica.replicate([0], active)
    assert write(active, b"c", DurabilityLevel.MAJORITY, 60_000) == Status.SUCCESS


def test_a_copy_that_the_map_does_not_name_does_not_count(nodes: list[RunningNode]) -> None:
    active, replica, other = nodes
    set_map(nodes, [0, 1])
    other.replicate([0], active)
    assert write(active, b"a", DurabilityLevel.MAJORITY, 300) == Status.SYNC_WRITE_AMBIGUOUS
    replica.replicate([0], active)
    assert write(active, b"b", DurabilityLevel.MAJORITY, 60_000) == Status.SUCCESS


@pytest.mark.parametrize("level", LEVELS)
def test_too_few_copies_are_said_at_once_and_nothing_is_written(
    nodes: list[RunningNode], level: DurabilityLevel
) -> None:
    set_map(nodes, [0, -1, -1])
    assert write(nodes[0], b"a", level, 60_000) == Status.DURABILITY_IMPOSSIBLE
    assert nodes[0].high_seqno(0) == 0


def test_memory_is_not_disk(nodes: list[RunningNode]) -> None:
    active, replica, _ = nodes
    replica.replicate([0], active)
    assert write(active, b"a", DurabilityLevel.MAJORITY, 60_000) == Status.SUCCESS
    with Wire(replica.port) as wire:
        wire.ok(admin.StopPersistence())
    assert write(active, b"b", DurabilityLevel.MAJORITY, 60_000) == Status.SUCCESS
    assert write(active, b"c", DurabilityLevel.PERSIST_TO_MAJORITY, 700) == Status.SYNC_WRITE_AMBIGUOUS
    with Wire(replica.port) as wire:
        wire.ok(admin.StartPersistence())
    assert write(active, b"d", DurabilityLevel.PERSIST_TO_MAJORITY, 60_000) == Status.SUCCESS


def test_a_move_of_the_vbucket_ends_the_waiting(nodes: list[RunningNode]) -> None:
    active = nodes[0]
    with Wire(active.port) as wire:
        wire.hello(Feature.ALT_REQUEST_SUPPORT, Feature.SYNC_REPLICATION, Feature.XERROR)
        framing = encode_frame_infos([Durability(DurabilityLevel.MAJORITY, 60_000).encode()])
        wire.send(Set(key=b"k", value=b"1", flags=0, expiry=0, vbucket=0, framing=framing, opaque=5))
        while not active.high_seqno(0):
            pass
        active.set_vbucket_state(0, VBucketState.DEAD)
        assert wire.frame().status == Status.SYNC_WRITE_AMBIGUOUS


def test_it_is_answered_when_all_is_true_at_once() -> None:
    """A replica that had it but left before the active's own disk had it no longer counts."""
    copies = server_durability.CopyTracker()
    addresses = [NodeAddress(port=port, host="127.0.0.1") for port in (1, 2, 3)]
    copies.set_map(bucket_map("default", addresses, [[0, 1, 2]], epoch=2, rev=1, this_node=0))
    copies.reached(0, "127.0.0.1:2", 5)
    copies.gone("127.0.0.1:2")
    copies.persisted(0, 5)
    assert not copies.has_majority(0, 5)
    copies.reached(0, "127.0.0.1:3", 5)
    assert copies.has_majority(0, 5)
    assert not copies.has_majority(0, 6)


class TestOutOfOrder:
    """A peer that takes answers in any order does not wait for a durable write to read something else."""

    def open(self, *features: Feature) -> tuple[Bench, Session]:
        bench = Bench(vbuckets=1)
        self.set_chain(bench, [0, 1])
        session = bench.session()
        codes = (Feature.ALT_REQUEST_SUPPORT, Feature.SYNC_REPLICATION, Feature.XERROR, *features)
        ask(bench, session, admin.Hello(value=b"".join(int(code).to_bytes(2, "big") for code in codes)))
        return bench, session

    def set_chain(self, bench: Bench, chain: list[int]) -> None:
        addresses = [NodeAddress(port=1, host="a"), NodeAddress(port=2, host="b")]
        made = bucket_map("default", addresses, [chain], epoch=2, rev=next(_revs), this_node=0)
        bench.node.set_map("default", made)

    def durable(self, opaque: int, timeout_ms: int = 60_000) -> Set:
        framing = encode_frame_infos([Durability(DurabilityLevel.MAJORITY, timeout_ms).encode()])
        return Set(key=b"k%d" % opaque, value=b"1", framing=framing, opaque=opaque)

    def test_others_overtake_it(self) -> None:
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        requests = (self.durable(1), admin.Noop(opaque=2), self.durable(3), Get(opaque=4, key=b"x"))
        answers = ask(bench, session, *requests)
        assert [frame.opaque for frame in answers] == [2, 4]
        assert session.unfinished == 2
        (refused,) = ask(bench, session, admin.Hello(opaque=5))
        assert refused.status == Status.NOT_SUPPORTED, "what it would change is in use"
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", 2)
        assert [(frame.opaque, frame.status) for frame in take(session)] == [(1, 0), (3, 0)]
        assert session.unfinished == 0

    def test_without_the_feature_the_order_is_kept(self) -> None:
        bench, session = self.open()
        assert ask(bench, session, self.durable(1), admin.Noop(opaque=2)) == []
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", 1)
        assert [frame.opaque for frame in take(session)] == [1, 2]

    def test_nor_does_a_stream_begin_before_it_is_answered(self) -> None:
        """A stream's answers are not in the queue, so its first request waits instead, and all after it."""
        bench, session = self.open()
        requests = (self.durable(1), DcpOpen(key=b"reader", flags=1, opaque=2), Get(key=b"k", opaque=3))
        assert ask(bench, session, *requests) == []
        assert ask(bench, session, Get(key=b"k", opaque=4), admin.Noop(opaque=5)) == []
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", 1)
        answers: list[int] = []
        for _ in range(5):  # each in a turn of its own, at the most
            answers += [frame.opaque for frame in take(session)]
        assert answers == [1, 2, 3, 4, 5]

    def test_a_failover_decides_it(self) -> None:
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        ask(bench, session, self.durable(1))
        bench.run_jobs()
        self.set_chain(bench, [0, -1])
        assert [(frame.opaque, frame.status) for frame in take(session)] == [(1, Status.SYNC_WRITE_AMBIGUOUS)]
        (impossible,) = ask(bench, session, self.durable(2))
        assert impossible.status == Status.DURABILITY_IMPOSSIBLE
        self.set_chain(bench, [0])
        assert ask(bench, session, self.durable(3)) == []
        bench.run_jobs()
        assert [(frame.opaque, frame.status) for frame in take(session)] == [(3, 0)]

    def test_what_was_given_up_is_waited_for_no_more(self) -> None:
        """The disk takes nothing: what waits for it does not grow, and who still waits is not forgotten."""
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        ask(bench, session, self.durable(1))
        for first in range(100, 1000, 30):
            ask(bench, session, *(self.durable(first + each, timeout_ms=100) for each in range(30)))
            bench.advance(1)
            answers = take(session)
            assert [frame.status for frame in answers] == [Status.SYNC_WRITE_AMBIGUOUS] * 30
        vbucket = bench.node.buckets["default"].store.vbuckets[0]
        assert len(vbucket._listeners._waiters) <= 300
        bench.run_jobs()
        bench.advance(1)
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", vbucket.high_seqno)
        assert [(frame.opaque, frame.status) for frame in take(session)] == [(1, 0)]

    def test_it_is_answered_before_the_connection_ends(self) -> None:
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        ask(bench, session, self.durable(1), admin.Quit(opaque=2))
        assert not session.closed
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", 1)
        assert [frame.opaque for frame in take(session)] == [1]
        assert session.closed

    def test_nothing_overtakes_across_a_barrier(self) -> None:
        """A command with a barrier is answered after all before it, and before all after it."""
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        barrier = encode_frame_infos([FrameInfo(RequestFrameId.BARRIER, b"")])
        requests = (
            self.durable(1),
            admin.Noop(opaque=2),
            Get(opaque=3, key=b"k", framing=barrier),
            self.durable(4),
            admin.Noop(opaque=5),
        )
        assert [frame.opaque for frame in ask(bench, session, *requests)] == [2]
        bench.run_jobs()
        copies = bench.node.buckets["default"].durability
        copies.reached(0, "b:2", 1)
        assert [frame.opaque for frame in take(session)] == [1, 3, 5]
        copies.reached(0, "b:2", 2)
        assert [frame.opaque for frame in take(session)] == [4]

    def test_a_durable_write_is_a_barrier_itself(self) -> None:
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        barrier = self.durable(2)
        barrier.framing += encode_frame_infos([FrameInfo(RequestFrameId.BARRIER, b"")])
        assert ask(bench, session, self.durable(1), barrier, admin.Noop(opaque=3)) == []
        assert session.unfinished == 2
        bench.run_jobs()
        bench.node.buckets["default"].durability.reached(0, "b:2", 2)
        assert [frame.opaque for frame in take(session)] == [1, 2, 3]
        assert session.unfinished == 0

    def test_no_other_bucket_is_selected_meanwhile(self) -> None:
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        (refused,) = ask(bench, session, self.durable(1), admin.SelectBucket(opaque=2, key=b"default"))
        assert (refused.opaque, refused.status) == (2, Status.NOT_SUPPORTED)

    def test_nothing_more_is_taken_up_while_the_node_stops(self) -> None:
        bench, session = self.open(Feature.UNORDERED_EXECUTION)
        ask(bench, session, self.durable(1))
        assert bench.node.stop_sessions("the node stops") == [session]
        assert session.exchange(Set(key=b"late", value=b"2", opaque=2).encode(), bench.now) == b""
        vbucket = bench.node.buckets["default"].store.vbuckets[0]
        assert vbucket is not None
        assert vbucket.high_seqno == 1


def test_a_node_that_the_map_leaves_out_is_no_copy() -> None:
    """Its vbucket goes to others, and it does not know that yet: its own copy no longer counts."""
    copies = server_durability.CopyTracker()
    addresses = [NodeAddress(port=port, host="127.0.0.1") for port in (1, 2, 3, 4)]
    copies.set_map(bucket_map("default", addresses, [[0, 1, 2]], epoch=2, rev=1, this_node=0))
    copies.persisted(0, 5)
    copies.set_map(bucket_map("default", addresses, [[1, 2, 3]], epoch=2, rev=2, this_node=0))
    copies.reached(0, "127.0.0.1:4", 5)
    assert not copies.has_majority(0, 5), "one of three copies has it"
