"""Durable writes are answered when they are true, and not otherwise: three nodes on real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace.server import durability as server_durability
from tailrace.server.topology import NodeAddress, bucket_map
from tailrace.testing.running import RunningNode
from tailrace.wire import admin
from tailrace.wire.codes import DurabilityLevel, Feature, Magic, Status, VBucketState
from tailrace.wire.fields import Durability, encode_frame_infos
from tailrace.wire.kv import Set

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
        assert replica.get(key, vbucket=0) is not None
        seqno = active.high_seqno(0)
        row = replica.replication_status()["0"]
        assert row["complete_seqno"] >= seqno
        assert active.replication_status()["0"]["persisted_seqno"] >= seqno
        if level == DurabilityLevel.PERSIST_TO_MAJORITY:
            assert row["persisted_seqno"] >= seqno


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
    """A replica that had it, and was gone before the active's own disk had it, counts no more."""
    copies = server_durability.CopyTracker()
    addresses = [NodeAddress(port=port, host="127.0.0.1") for port in (1, 2, 3)]
    copies.set_map(bucket_map("default", addresses, [[0, 1, 2]], epoch=2, rev=1, this_node=0))
    answers: list[bool] = []
    copies.wait(0, 5, DurabilityLevel.MAJORITY, answers.append, lambda: False)
    copies.reached(0, "127.0.0.1:2", 5, on_disk=False)
    copies.gone("127.0.0.1:2")
    copies.persisted(0, 5)
    assert answers == []
    copies.reached(0, "127.0.0.1:3", 5, on_disk=False)
    assert answers == [True]
