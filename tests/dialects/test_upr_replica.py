"""Nodes that keep replicas by UPR, draft A and B: of another node, or of a producer played by the test."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tailrace.testing
from dialects.raw_peer import NEVER, Peer, Upr, UprReader, packet, until
from dialects.raw_producer import UUID, Connection, RawProducer, asked_for
from dialects.stored import documents_of
from tailrace.model import MAX_CAS, MAX_REPLICA_REV, MAX_SEQNO
from tailrace.server.node import Node
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState

A, B = Upr("upr-a"), Upr("upr-b")
both = pytest.mark.parametrize("draft", [A, B], ids=["a", "b"])


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks off is retried without much of a pause."""
    monkeypatch.setattr("tailrace.server.replication._RETRY_S", 0.02)


def store_of(node: RunningNode, number: int) -> Any:
    return node.call(lambda inner: inner.buckets["default"].store.vbuckets[number])


def complete(node: RunningNode, number: int = 0) -> int:
    """The seqno up to which the vbucket can be trusted."""
    return int(store_of(node, number).complete_seqno)


def is_equal(active: RunningNode, replica: RunningNode, number: int) -> bool:
    """Documents with all that belongs to them, tombstones, branches and seqnos."""
    return (
        active.high_seqno(number) == replica.high_seqno(number) == complete(replica, number)
        and documents_of(active, number, deletions=True) == documents_of(replica, number, deletions=True)
        and active.failover_log(number) == replica.failover_log(number)
    )


def until_equal(active: RunningNode, replica: RunningNode, number: int = 0) -> None:
    until(lambda: is_equal(active, replica, number), f"vbucket {number} is equal")


def figures(node: RunningNode) -> list[dict[str, Any]]:
    """The figures of the node's own connections to producers."""

    def read(inner: Node) -> list[dict[str, Any]]:
        links = inner.replication["default"]._upstreams.values()
        return [dict(link.handler.stats()) for link in links if link.handler is not None]

    return node.call(read)


# another node


@pytest.fixture
def nodes() -> Iterator[tuple[RunningNode, RunningNode]]:
    """An active and a node whose vbuckets are dead."""
    with tailrace.testing.node(4) as active, tailrace.testing.node(4) as replica:
        for vbucket in range(4):
            replica.set_vbucket_state(vbucket, VBucketState.DEAD)
        yield active, replica


def write(node: RunningNode, count: int, *, first: int = 0, vbucket: int = 0) -> None:
    for number in range(first, first + count):
        node.set(f"key-{number}", {"n": number}, vbucket=vbucket)


@both
def test_a_replica_is_equal_to_its_active(nodes: tuple[RunningNode, RunningNode], draft: Upr) -> None:
    active, replica = nodes
    for vbucket in range(4):
        write(active, 60, vbucket=vbucket)
        write(active, 20, vbucket=vbucket)
        active.delete("key-7", vbucket=vbucket)
        active.set("bytes", b"\x00\xff", vbucket=vbucket)
        active.set("dies", 1, expiry=2_000_000_000, vbucket=vbucket)
        active.set("died", 1, expiry=int(time.time()) - 10, vbucket=vbucket)
        assert active.get("died", vbucket=vbucket) is None
    replica.replicate(range(4), active, dialect=draft.name)
    for vbucket in range(4):
        until_equal(active, replica, vbucket)
    write(active, 10, first=100)
    active.delete("key-8", vbucket=0)
    until_equal(active, replica)
    row = replica.replication_status()["0"]
    assert (row["state"], row["stream"], row["dialect"]) == ("replica", "open", draft.name)
    (link,) = figures(replica)
    assert (link["num_streams"], link["rollbacks"]) == (4, 0)
    with Peer(active) as peer:
        groups = [value for name, value in peer.stats("dcp").items() if name.endswith("group_id")]
    assert groups == [f"tailrace-replication:127.0.0.1:{replica.port}"] * 4


@both
def test_a_large_snapshot_and_large_values_arrive_whole(
    nodes: tuple[RunningNode, RunningNode], draft: Upr
) -> None:
    active, replica = nodes
    for number in range(40):
        active.set(f"large-{number}", bytes([number]) * 200_000, vbucket=0)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)


@both
def test_either_side_restarts_and_the_replica_goes_on_where_it_was(
    nodes: tuple[RunningNode, RunningNode], draft: Upr
) -> None:
    active, replica = nodes
    write(active, 100)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)
    replica.persist()
    replica.kill()
    write(active, 50, first=100)
    replica.start()
    assert replica.high_seqno(0) == 100
    replica.replicate([0], active, dialect=draft.name)  # orders are not kept
    until_equal(active, replica)
    (link,) = figures(replica)
    assert (link["received_changes"], link["rollbacks"]) == (50, 0)

    active.restart()
    write(active, 20, first=200)
    until_equal(active, replica)
    assert sum(stats["rollbacks"] for stats in figures(replica)) == 0


@both
def test_a_replica_follows_its_active_back(nodes: tuple[RunningNode, RunningNode], draft: Upr) -> None:
    active, replica = nodes
    write(active, 50)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)
    write(active, 50, first=50)
    until_equal(active, replica)
    active.rewind(0, 70)
    write(active, 5, first=500)
    until_equal(active, replica)
    assert replica.get("key-80", vbucket=0) is None
    assert replica.get("key-60", vbucket=0) == {"n": 60}


@both
def test_a_replica_that_was_away_while_its_active_lost_changes(
    nodes: tuple[RunningNode, RunningNode], draft: Upr
) -> None:
    active, replica = nodes
    write(active, 40)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)
    replica.replicate([0], None)
    active.rewind(0, 25)
    write(active, 100, first=200)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)
    assert replica.get("key-30", vbucket=0) is None


@both
def test_an_active_that_lost_what_was_not_on_disk(nodes: tuple[RunningNode, RunningNode], draft: Upr) -> None:
    active, replica = nodes
    write(active, 30)
    active.persist()
    active.stop_persistence()
    write(active, 30, first=30)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)
    active.kill()
    active.start()
    assert active.high_seqno(0) == 30
    write(active, 3, first=900)
    until_equal(active, replica)


@both
def test_flush_empties_the_replica_and_the_stream_goes_on(
    nodes: tuple[RunningNode, RunningNode], draft: Upr
) -> None:
    active, replica = nodes
    write(active, 30)
    replica.replicate([0, 1], active, dialect=draft.name)
    until_equal(active, replica)
    active.flush()
    until(lambda: replica.high_seqno(0) == 0, "the replica is empty")
    write(active, 7, first=100)
    until_equal(active, replica)
    active.flush()
    active.flush()
    write(active, 3, first=200, vbucket=1)
    until_equal(active, replica, 1)
    until_equal(active, replica)


@both
def test_one_vbucket_less_does_not_keep_the_others(
    nodes: tuple[RunningNode, RunningNode], draft: Upr
) -> None:
    active, replica = nodes
    replica.replicate([0, 1], active, dialect=draft.name)
    until_equal(active, replica)
    until_equal(active, replica, 1)
    replica.replicate([0], None)
    write(active, 10)
    write(active, 10, vbucket=1)
    until_equal(active, replica, 1)
    assert replica.high_seqno(0) == 0
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)


def test_the_dialect_of_a_replica_may_change(nodes: tuple[RunningNode, RunningNode]) -> None:
    active, replica = nodes
    for turn, dialect in enumerate(["upr-a", "dcp", "upr-b", "upr-a"]):
        write(active, 10, first=100 * turn)
        replica.replicate([0], active, dialect=dialect)
        until_equal(active, replica)
        assert replica.replication_status()["0"]["dialect"] == dialect


@both
def test_a_promoted_replica_serves_readers_of_the_active(
    nodes: tuple[RunningNode, RunningNode], draft: Upr
) -> None:
    active, replica = nodes
    write(active, 20)
    replica.replicate([0], active, dialect=draft.name)
    until_equal(active, replica)
    uuid = active.failover_log(0)[0][0]
    replica.replicate([0], None)
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    write(replica, 5, first=100)
    with Peer(replica) as peer:
        reader = UprReader(draft, 0)
        peer.send(draft.request(0, start=20, uuid=uuid))
        reader.read_to(peer, 25)
        assert "rollback" not in reader.words
        assert sorted(reader.documents) == [b"key-%d" % number for number in range(100, 105)]


@both
def test_nothing_is_read_while_the_disk_does_not_keep_up(draft: Upr) -> None:
    settings = {"memory_quota": 4 << 20, "replication_buffer": 65536}
    with (
        tailrace.testing.node(2) as active,
        tailrace.testing.node(2, settings=settings) as replica,
    ):
        replica.set_vbucket_state(0, VBucketState.REPLICA)
        replica.stop_persistence()
        replica.replicate([0], active, dialect=draft.name)
        for number in range(200):
            active.set(f"k{number}", b"v" * 100_000, vbucket=0)

        def is_held_up() -> bool:
            return replica.call(
                lambda inner: [
                    link.handler.is_busy
                    for link in inner.replication["default"]._upstreams.values()
                    if link.handler is not None
                ]
            ) == [True]

        until(is_held_up, "the replica stops to read")
        assert replica.high_seqno(0) < 200
        replica.start_persistence()
        until_equal(active, replica)


# a producer played by the test


@pytest.fixture
def replica() -> Iterator[RunningNode]:
    settings = {"replication_noop_interval": 60.0}
    with tailrace.testing.node(vbuckets=4, settings=settings) as node:
        node.set_vbucket_state(0, VBucketState.REPLICA)
        yield node


@pytest.fixture
def producer(draft: Upr) -> Iterator[RawProducer]:
    with RawProducer(draft) as producer:
        yield producer


def begin(replica: RunningNode, producer: RawProducer, **options: Any) -> Connection:
    """Give an order; returns the node's connection with its first stream open."""
    replica.replicate([0], producer, dialect=producer.draft.name, **options)
    connection = producer.accept()
    assert connection.open() == (0, NEVER, 0, 0)
    return connection


def stands_at(replica: RunningNode, seqno: int) -> None:
    until(lambda: complete(replica) == seqno, f"the replica is at {seqno}")


@pytest.mark.covers("upr-a.stream-request", "upr-a.failover-log-request", "upr-a.response.ok")
@pytest.mark.covers("upr-a.response.failover-log", "upr-a.stream-begin", "upr-a.snapshot-start")
@pytest.mark.covers("upr-a.snapshot-end", "upr-a.mutation", "upr-b.stream-request", "upr-b.mutation")
@pytest.mark.covers("upr-b.failover-log-request", "upr-b.failover-log-response", "upr-b.stream-start")
@pytest.mark.covers("upr-b.stream-request-response.ok", "upr-b.snapshot-start", "upr-b.snapshot-end")
@both
@pytest.mark.parametrize("features", [True, False])
def test_a_snapshot_is_there_when_its_end_is(
    replica: RunningNode, producer: RawProducer, draft: Upr, features: bool
) -> None:
    replica.replicate([0], producer, dialect=draft.name)
    connection = producer.accept(features=features)
    connection.open([(UUID, 0)])
    connection.say("start")
    connection.send(connection.mutation(b"a", 4) + connection.mutation(b"b", 6, b'{"n": 1}'))
    # a whole snapshot of another vbucket is a sign that the first one was taken up to here
    replica.set_vbucket_state(1, VBucketState.REPLICA)
    replica.replicate([1], producer, dialect=draft.name)
    held = connection.opaque
    connection.open()
    connection.send(connection.snapshot(1, 3))
    until(lambda: complete(replica, 1) == 3, "the other vbucket is there")
    assert (replica.high_seqno(0), documents_of(replica, 0)) == (0, {})
    connection.send(connection.word("end", half=0, opaque=held))
    stands_at(replica, 6)
    assert documents_of(replica, 0) == {b"a": (b"v", 77, 3, 9, 0), b"b": (b'{"n": 1}', 77, 3, 9, 0)}
    assert replica.failover_log(0) == [(UUID, 0)]


@both
@pytest.mark.parametrize("limit", ["HELD_BYTES", "ALL_HELD_BYTES"])
def test_of_a_snapshot_that_breaks_off_nothing_is_kept(
    replica: RunningNode, producer: RawProducer, draft: Upr, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tailrace.protocol.upr.translation.{limit}", 100)
    first = begin(replica, producer)
    first.send(first.snapshot(1, 5))
    stands_at(replica, 5)
    changes = [first.mutation(b"k1", 5 + number, b"newer") for number in range(1, 50)]
    first.send(first.word("start") + b"".join(changes))
    until(lambda: replica.high_seqno(0) > 20, "the beginning of a large snapshot is stored")
    assert complete(replica) == 5
    with Peer(replica) as peer:  # readers of the replica see that it is in the middle of a snapshot
        reader = UprReader(draft, 0)
        peer.send(draft.request(0))
        while reader._seqno < 20:
            reader.take(peer.next())
        assert reader.committed == 0
    first.socket.close()
    second = producer.accept()
    assert second.open() == (5, NEVER, UUID, 0)
    assert replica.high_seqno(0) == 5
    assert documents_of(replica, 0)[b"k1"][0] == b"v"
    second.send(second.snapshot(6, 8))
    stands_at(replica, 8)


@both
def test_a_node_that_is_killed_in_the_middle_of_a_snapshot(
    replica: RunningNode, producer: RawProducer, draft: Upr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.protocol.upr.translation.HELD_BYTES", 100)
    first = begin(replica, producer)
    first.send(first.snapshot(1, 5))
    first.say("start")
    first.send(b"".join(first.mutation(b"k1", number, b"newer") for number in range(6, 40)))
    until(lambda: replica.high_seqno(0) > 20, "the beginning of a large snapshot is stored")
    replica.persist()
    replica.kill()
    replica.start()
    assert (replica.high_seqno(0) > 20, complete(replica)) == (True, 5)
    replica.replicate([0], producer, dialect=draft.name)
    second = producer.accept()
    assert second.open() == (5, NEVER, UUID, 0)
    second.send(second.snapshot(6, 7))
    stands_at(replica, 7)
    assert documents_of(replica, 0)[b"k1"][0] == b"v"


@both
def test_a_promotion_in_the_middle_of_a_snapshot_keeps_the_last_whole_one(
    replica: RunningNode, producer: RawProducer, draft: Upr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.protocol.upr.translation.HELD_BYTES", 100)
    connection = begin(replica, producer)
    connection.send(connection.snapshot(1, 5))
    connection.say("start")
    connection.send(b"".join(connection.mutation(b"x", number) for number in range(6, 40)))
    until(lambda: replica.high_seqno(0) > 20, "the beginning of a large snapshot is stored")
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    assert replica.high_seqno(0) == 5
    assert len(documents_of(replica, 0)) == 5
    with contextlib.suppress(OSError):  # it may be closed already
        connection.send(connection.mutation(b"late", 40) + connection.word("end"))
    assert connection.is_closed()
    assert replica.get("late", vbucket=0) is None


@both
def test_who_promotes_a_replica_does_not_know_which_deletions_it_never_got(
    replica: RunningNode, producer: RawProducer, draft: Upr
) -> None:
    """A producer may have purged them before: what it sent from the beginning is only good as a whole."""
    connection = begin(replica, producer)
    connection.say("start")
    connection.send(connection.mutation(b"a", 2) + connection.mutation(b"b", 7))
    connection.say("end")
    connection.send(connection.snapshot(8, 9))
    stands_at(replica, 9)
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    for start, word in ((2, "rollback"), (6, "rollback"), (7, "ok"), (8, "ok")):
        with Peer(replica) as peer:
            assert draft.word(peer.ask(draft.request(0, start=start, uuid=UUID))) == word


@pytest.mark.covers("upr-a.response.rollback", "upr-b.stream-request-response.rollback")
@both
def test_rolled_back_exactly_and_asked_again(replica: RunningNode, producer: RawProducer, draft: Upr) -> None:
    first = begin(replica, producer)
    for last in (10, 20, 30):
        first.send(first.snapshot(last - 9, last))
    stands_at(replica, 30)
    first.socket.close()
    second = producer.accept()
    before, stream, after = second.requested()
    assert asked_for(stream) == (30, NEVER, UUID, 0)
    second.answer_log(before, [(0xBEEF, 24), (UUID, 0)])
    second.answer_rollback(24)
    second.answer_log(after, [(0xBEEF, 24), (UUID, 0)])
    log = [(0xBEEF, 24), (UUID, 0)]
    assert second.open(log) == (24, NEVER, UUID, 0)
    second.send(second.snapshot(25, 26))
    stands_at(replica, 26)
    assert sorted(documents_of(replica, 0)) == sorted(b"k%d" % number for number in range(1, 27))
    assert replica.failover_log(0) == log
    assert figures(replica)[0]["rollbacks"] == 1


@both
def test_a_rollback_into_a_snapshot_that_was_folded_goes_to_its_beginning(
    replica: RunningNode, producer: RawProducer, draft: Upr
) -> None:
    first = begin(replica, producer)
    first.send(first.snapshot(1, 10))
    first.say("start")
    first.send(first.mutation(b"k1", 15) + first.mutation(b"k2", 20))
    first.say("end")
    stands_at(replica, 20)
    first.socket.close()
    second = producer.accept()
    second.requested()
    second.answer_rollback(17)
    assert second.open() == (10, NEVER, UUID, 0)
    assert documents_of(replica, 0)[b"k1"][0] == b"v"
    assert replica.high_seqno(0) == 10


@pytest.mark.covers("upr-b.stream-request-response.unknown-uuid")
@pytest.mark.parametrize("draft", [B], ids=["b"])
def test_draft_b_does_not_know_the_branch(replica: RunningNode, producer: RawProducer, draft: Upr) -> None:
    first = begin(replica, producer)
    first.send(first.snapshot(1, 10))
    stands_at(replica, 10)
    first.socket.close()
    second = producer.accept()
    second.requested()
    second.send(packet(0x81, 0x50, half=0x01, opaque=second.opaque))
    assert second.open([(0xFACE, 0)]) == (0, NEVER, 0, 0)
    assert replica.high_seqno(0) == 0


@pytest.mark.covers("upr-a.response.not-my-vbucket", "upr-b.not-my-vbucket")
@both
def test_a_vbucket_that_the_producer_does_not_have_is_asked_for_again(
    replica: RunningNode, producer: RawProducer, draft: Upr
) -> None:
    replica.replicate([0], producer, dialect=draft.name)
    connection = producer.accept()
    for _ in range(2):
        connection.requested()
        connection.say("not-mine")
    until(lambda: replica.replication_status()["0"].get("error"), "the order says why")
    connection.open()
    connection.send(connection.snapshot(1, 2))
    stands_at(replica, 2)


@pytest.mark.covers("upr-a.stream-end.ok", "upr-a.stream-end.state-changed")
@pytest.mark.covers("upr-b.stream-end.ok", "upr-b.stream-end.state-changed")
@both
@pytest.mark.parametrize("word", ["over-ok", "over-state"])
def test_a_stream_that_ended_is_asked_for_again(
    replica: RunningNode, producer: RawProducer, draft: Upr, word: str
) -> None:
    connection = begin(replica, producer)
    connection.send(connection.snapshot(1, 4))
    connection.say("start")
    connection.send(connection.mutation(b"unfinished", 9))
    connection.say(word)
    # after OK nothing more comes, so what came is complete; after anything else it is not
    at = 9 if word == "over-ok" else 4
    assert connection.open() == (at, NEVER, UUID, 0)
    assert replica.high_seqno(0) == at


@pytest.mark.covers("upr-a.deletion", "upr-a.expiration", "upr-b.deletion", "upr-b.expiration")
@both
def test_deletions_and_expirations(replica: RunningNode, producer: RawProducer, draft: Upr) -> None:
    connection = begin(replica, producer)
    connection.send(connection.snapshot(1, 4))
    connection.say("start")
    for seqno, key, opcode, kind in ((5, b"k1", 0x57, 4), (6, b"k2", 0x58, 5)):
        extras = struct.pack(">QQ", seqno, 8)
        where: dict[str, Any] = {"half": 0, "opaque": connection.opaque, "cas": 99}
        if draft is A:
            connection.send(packet(0x81, 0x04, extras + bytes(12), key, byte_5=kind, **where))
        else:
            connection.send(packet(0x80, opcode, extras, key, **where))
    connection.say("end")
    stands_at(replica, 6)
    documents = documents_of(replica, 0, deletions=True)
    assert (documents[b"k1"], documents[b"k2"], len(documents)) == ((99, 8), (99, 8), 4)


@pytest.mark.covers("upr-a.flush", "upr-b.flush")
@both
def test_flush_in_the_middle_of_a_snapshot(replica: RunningNode, producer: RawProducer, draft: Upr) -> None:
    connection = begin(replica, producer)
    connection.send(connection.snapshot(1, 4))
    connection.say("start")
    connection.send(connection.mutation(b"unfinished", 9))
    connection.say("flush")
    asked = connection.request()
    connection.send(connection.snapshot(1, 2))  # waits until it is known on which branch it is
    assert replica.high_seqno(0) in (0, 4)
    connection.answer_log(asked, [(0xBEEF, 0), (UUID, 0)])
    stands_at(replica, 2)
    assert sorted(documents_of(replica, 0)) == [b"k1", b"k2"]
    assert replica.failover_log(0) == [(0xBEEF, 0), (UUID, 0)]


STATES = {1: "active", 2: "pending", 3: "replica", 4: "dead"}
"""Draft B's numbers."""


@pytest.mark.covers("upr-b.set-vbucket-state")
@pytest.mark.parametrize("draft", [B], ids=["b"])
@pytest.mark.parametrize("number", STATES)
@pytest.mark.parametrize("takeover", [True, False])
def test_draft_b_hands_a_vbucket_over_to_who_takes_it(
    replica: RunningNode, producer: RawProducer, draft: Upr, number: int, takeover: bool
) -> None:
    connection = begin(replica, producer, takeover=takeover)
    connection.send(connection.snapshot(1, 4))
    connection.send(connection.set_state(number))
    connection.say("over-state")
    if takeover:
        until(lambda: replica.replication_status()["0"].get("stream") == "over", "the takeover is over")
    else:
        connection.requested()  # it is a replica and stays one
    row = replica.replication_status()["0"]
    assert row["state"] == (STATES[number] if takeover else "replica")
    assert (row["high_seqno"], replica.failover_log(0)) == (4, [(UUID, 0)])


@both
def test_a_silent_producer_is_asked_for_a_sign_of_life(producer: RawProducer, draft: Upr) -> None:
    with tailrace.testing.node(vbuckets=4, settings={"replication_noop_interval": 0.1}) as replica:
        replica.set_vbucket_state(0, VBucketState.REPLICA)
        connection = begin(replica, producer)
        for _ in range(3):
            asked = connection.next()
            assert (asked.magic, asked.opcode, asked.body) == (0x80, 0x0A, b"")
            connection.send(packet(0x81, 0x0A, opaque=asked.opaque))
        connection.send(connection.snapshot(1, 3))
        stands_at(replica, 3)


@both
def test_a_producer_that_gives_no_sign_of_life_is_given_up(producer: RawProducer, draft: Upr) -> None:
    settings = {"replication_noop_interval": 0.1, "idle_timeout": 3}
    with tailrace.testing.node(vbuckets=4, settings=settings) as replica:
        replica.set_vbucket_state(0, VBucketState.REPLICA)
        replica.replicate([0], producer, dialect=draft.name)
        connection = producer.accept()
        asked = []
        while (packet := connection.receive()) is not None:
            asked.append(packet.opcode)
        assert asked.count(0x0A) == 1
        producer.accept()


# what a producer must not do


def _bad_log(value: bytes) -> Callable[..., Any]:
    def act(connection: Connection) -> None:
        before, _, _ = connection.requested()
        connection.send(connection.log_answer(before, value) + connection.word("ok"))

    return act


def _two_logs(connection: Any) -> None:
    before, _, after = connection.requested()
    connection.answer_log(before, [(UUID, 0)])
    connection.say("ok", "begin")
    connection.send(connection.snapshot(1, 3))
    connection.answer_log(after, [(0xBEEF, 2), (UUID, 0)])


def _no_log(connection: Any) -> None:
    connection.requested()
    connection.say("ok", "begin")
    flood = connection.mutation(b"k", 1, b"v" * (4 << 20))
    try:
        for _ in range(12):
            connection.send(flood)
    except OSError:
        pass  # it has had enough


def _rollback_up(connection: Any) -> None:
    connection.requested()
    connection.answer_rollback(7)


def _in_stream(make: Callable[..., Any]) -> Callable[..., Any]:
    def act(connection: Any) -> None:
        connection.open()
        connection.send(connection.word("start") + make(connection) + connection.word("end"))

    return act


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "a log of no whole entries": _bad_log(b"x" * 17),
    "a log that changes while the stream is opened": _two_logs,
    "no log and no end": _no_log,
    "a rollback of nothing": _rollback_up,
    "an answer before the question": lambda stream: stream.send(packet(0x81, 0x50, opaque=0xDEAD)),
    "another stream's number": _in_stream(lambda stream: stream.mutation(b"k", 1, opaque=0xDEAD)),
    "another vbucket": _in_stream(lambda stream: stream.mutation(b"k", 1, half=1)),
    "a vbucket that nobody has": _in_stream(lambda stream: stream.mutation(b"k", 1, half=999)),
    "the same seqno twice": _in_stream(lambda stream: stream.mutation(b"k", 1) * 2),
    "the last of all seqnos": _in_stream(lambda stream: stream.mutation(b"k", NEVER)),
    "a seqno beyond all": _in_stream(lambda stream: stream.mutation(b"k", MAX_SEQNO + 1)),
    "a rev beyond all": _in_stream(lambda stream: stream.mutation(b"k", 1, rev=MAX_REPLICA_REV + 1)),
    "a CAS beyond all": _in_stream(lambda stream: stream.mutation(b"k", 1, cas=MAX_CAS + 1)),
    "seqno 0": _in_stream(lambda stream: stream.mutation(b"k", 0)),
    "no key": _in_stream(lambda stream: stream.mutation(b"", 1)),
    "a key that is too long": _in_stream(lambda stream: stream.mutation(b"k" * 252, 1)),
    "accepted again": _in_stream(lambda stream: stream.word("ok")),
    "an unknown message": _in_stream(lambda stream: packet(0x80, 0x5B, opaque=stream.opaque)),
    "a message of another dialect": _in_stream(
        lambda stream: packet(0x80, 0x57, bytes(31), b"key", b"v", opaque=stream.opaque)
    ),
    "bytes": lambda stream: stream.send(b"\xff" * 4096),
    "a frame that never ends": lambda stream: stream.send(
        struct.pack(">BBHBBHIIQ", 0x81, 2, 0, 0, 0, 0, 2**31, 0, 0)
    ),
}


@both
@pytest.mark.parametrize("what", HOSTILE)
def test_a_producer_that_can_not_be_followed_is_left(
    replica: RunningNode, producer: RawProducer, draft: Upr, what: str
) -> None:
    replica.replicate([0], producer, dialect=draft.name)
    first = producer.accept()
    HOSTILE[what](first)
    while first.receive() is not None:
        pass
    second = producer.accept()  # and tried again
    assert second.open() == (0, NEVER, 0, 0)
    assert (complete(replica), documents_of(replica, 0)) == (0, {})
    second.send(second.snapshot(1, 3))
    stands_at(replica, 3)


@both
def test_the_highest_numbers_are_taken_and_others_follow_them(
    replica: RunningNode, producer: RawProducer, draft: Upr
) -> None:
    replica.replicate([0], producer, dialect=draft.name)
    stream = producer.accept()
    stream.open(log=[(NEVER, MAX_SEQNO), (UUID, 0)])
    highest = stream.mutation(b"k", MAX_SEQNO, rev=MAX_REPLICA_REV, cas=MAX_CAS)
    stream.send(stream.word("start") + highest + stream.word("end"))
    stands_at(replica, MAX_SEQNO)
    replica.set_vbucket_state(0, VBucketState.ACTIVE)
    replica.set("k", b"new", vbucket=0)
    replica.persist()
    replica.restart()
    assert replica.get("k", vbucket=0) == b"new"
    assert replica.high_seqno(0) == MAX_SEQNO + 1


@pytest.mark.parametrize("draft", [B], ids=["b"])
@pytest.mark.parametrize(
    ("datatype", "value"),
    [(4, b"\xff\xff\xff\xffno xattrs"), (2, b"\xff\xff\xff\xff\xffnot compressed"), (6, b"zz"), (8, b"?")],
)
def test_a_value_that_is_not_what_its_datatype_says(
    replica: RunningNode, producer: RawProducer, draft: Upr, datatype: int, value: bytes
) -> None:
    """It would end the stream of every reader that wants it in another form."""
    first = begin(replica, producer)
    first.send(first.snapshot(1, 3) + first.word("start"))
    first.send(first.mutation(b"bad", 4, value, byte_5=datatype) + first.word("end"))
    while first.receive() is not None:
        pass
    second = producer.accept()
    assert second.open() == (3, NEVER, UUID, 0)
    assert b"bad" not in documents_of(replica, 0)


@pytest.mark.parametrize("draft", [B], ids=["b"])
@pytest.mark.parametrize("states", [b"\x05", b"\x00"])
def test_a_state_that_does_not_exist(
    replica: RunningNode, producer: RawProducer, draft: Upr, states: bytes
) -> None:
    connection = begin(replica, producer, takeover=True)
    connection.send(connection.snapshot(1, 4) + connection.set_state(states[0]))
    assert connection.is_closed()
    assert replica.replication_status()["0"]["state"] == "replica"


@pytest.mark.parametrize("draft", [B], ids=["b"])
def test_no_takeover_in_the_middle_of_a_snapshot(
    replica: RunningNode, producer: RawProducer, draft: Upr
) -> None:
    connection = begin(replica, producer, takeover=True)
    connection.say("start")
    connection.send(connection.mutation(b"k", 1) + connection.set_state(1))
    assert connection.is_closed()
    row = replica.replication_status()["0"]
    assert (row["state"], row["high_seqno"]) == ("replica", 0)


# the command


@pytest.mark.parametrize(
    "wrong",
    [
        {"dialect": "tap", "vbuckets": [0]},
        {"dialect": 7, "vbuckets": [0]},
        {"dialect": [], "vbuckets": [0]},
        {"dialect": "upr-a", "takeover": [0]},
    ],
)
def test_orders_that_make_no_sense(replica: RunningNode, wrong: dict[str, Any]) -> None:
    order = {"sources": [{"host": "127.0.0.1", "port": 1, **wrong}]}
    with Peer(replica) as peer:
        answer = peer.ask(packet(0x80, 0xE1, value=json.dumps(order).encode(), byte_5=1))
    assert answer.half == 0x04
    assert "source" not in replica.replication_status()["0"]


@both
def test_the_command_orders_a_dialect(replica: RunningNode, producer: RawProducer, draft: Upr) -> None:
    order = {"host": producer.host, "port": producer.port, "dialect": draft.name, "vbuckets": [0]}
    with Peer(replica) as peer:
        answer = peer.ask(packet(0x80, 0xE1, value=json.dumps({"sources": [order]}).encode(), byte_5=1))
        row = json.loads(answer.value)["vbuckets"]["0"]
    assert (answer.half, row["dialect"]) == (0, draft.name)
    producer.accept().open()
