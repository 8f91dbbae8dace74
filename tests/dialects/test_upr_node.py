"""Both UPR drafts over real sockets: every message, every answer, and the examples of the seeds."""

from __future__ import annotations

import struct
import time
from typing import Any

import pytest

import tailrace.testing
from dialects.raw_peer import NEVER, Peer, Upr, UprReader, packet, until
from dialects.stored import documents_of, write_for_newer_readers
from tailrace.history import FailoverLog
from tailrace.server.node import Node
from tailrace.store.base import Compaction
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState
from tailrace.wire.dcp import DcpDeletion, DcpExpiration, DcpMutation
from vectors.corpus import vectors

A, B = Upr("upr-a"), Upr("upr-b")
SEED = {vector.id: vector.data for vector in vectors("seed_upr_?")}

both = pytest.mark.parametrize("draft", [A, B], ids=["a", "b"])


def vbucket_of(node: RunningNode, number: int) -> Any:
    return node.call(lambda inner: inner.buckets["default"].store.vbuckets[number])


def uuid_of(node: RunningNode, number: int) -> int:
    return node.failover_log(number)[0][0]


@pytest.mark.covers("upr-a.stream-request", "upr-a.response.ok", "upr-a.stream-begin")
@pytest.mark.covers("upr-a.snapshot-start", "upr-a.snapshot-end", "upr-a.mutation", "upr-a.deletion")
@pytest.mark.covers("upr-b.stream-request", "upr-b.stream-request-response.ok", "upr-b.stream-start")
@pytest.mark.covers("upr-b.snapshot-start", "upr-b.snapshot-end", "upr-b.mutation", "upr-b.deletion")
@both
def test_a_stream_has_everything_and_then_changes(node: RunningNode, draft: Upr) -> None:
    for number in range(20):
        node.set(f"k{number}", {"n": number}, vbucket=3)
    node.delete("k7", vbucket=3)
    with Peer(node) as peer:
        reader = UprReader(draft, 3)
        peer.send(draft.request(3, opaque=0xBEEF))
        answer = peer.next()
        assert (answer.opaque, answer.body) == (0xBEEF, b"")
        assert answer.half == (3 if draft is A else 0)
        assert reader.take(answer) == "ok"
        begin = peer.next()
        assert (begin.opaque, begin.half, reader.take(begin)) == (0xBEEF, 3, "begin")
        reader.read_to(peer, node.high_seqno(3))
        assert reader.documents == documents_of(node, 3)
        assert reader.words[2] == "start" and reader.words[-1] == "end"
        node.set("k7", b"back", vbucket=3)
        node.set("new", b"x" * 70_000, vbucket=3)
        node.set("elsewhere", b"y", vbucket=4)
        reader.read_to(peer, node.high_seqno(3))
        assert reader.documents == documents_of(node, 3)
        assert b"elsewhere" not in reader.documents


@pytest.mark.covers("upr-a.expiration", "upr-b.expiration")
@both
def test_an_expiration_has_its_own_message(node: RunningNode, draft: Upr) -> None:
    node.set("gone", b"v", expiry=int(time.time()) - 10, vbucket=0)
    with Peer(node) as peer:
        peer.send(draft.request(0))
        reader = UprReader(draft, 0)
        reader.read(peer, "end")
        assert node.get("gone", vbucket=0) is None  # reading it makes it expire
        reader.read(peer, "expiration")
        assert reader.documents == {}


@pytest.mark.covers("upr-a.failover-log-request", "upr-a.response.failover-log")
@pytest.mark.covers("upr-b.failover-log-request", "upr-b.failover-log-response")
@both
def test_the_failover_log_is_told_newest_first(node: RunningNode, draft: Upr) -> None:
    node.set("k", b"v", vbucket=5)
    node.set("l", b"v", vbucket=5)
    node.rewind(5, 1)
    with Peer(node) as peer:
        answer = peer.ask(draft.log_request(5))
        assert draft.word(answer) == "log"
        assert answer.opaque == 9
        assert list(struct.iter_unpack(">QQ", answer.body)) == node.failover_log(5)
        assert len(answer.body) == 32


@pytest.mark.covers("upr-a.response.not-my-vbucket", "upr-b.not-my-vbucket")
@both
@pytest.mark.parametrize("vbucket", [6, 16, 0xFFFF])
def test_a_vbucket_that_is_not_here(node: RunningNode, draft: Upr, vbucket: int) -> None:
    node.set_vbucket_state(6, VBucketState.DEAD)
    with Peer(node) as peer:
        assert draft.word(peer.ask(draft.request(vbucket))) == "not-my-vbucket"
        assert draft.word(peer.ask(draft.log_request(vbucket))) == "not-my-vbucket"


@pytest.mark.covers("upr-a.response.rollback", "upr-b.stream-request-response.rollback")
@both
def test_a_reader_of_a_lost_branch_rolls_back_and_retries(node: RunningNode, draft: Upr) -> None:
    for number in range(6):
        node.set(f"k{number}", b"v", vbucket=1)
    old = uuid_of(node, 1)
    node.rewind(1, 4)
    node.set("k9", b"after", vbucket=1)
    with Peer(node) as peer:
        answer = peer.ask(draft.request(1, start=6, uuid=old))
        assert draft.word(answer) == "rollback"
        assert (answer.extras_length, answer.body) == (0, (4).to_bytes(8, "big"))
        # asking for exactly that seqno is granted, so a reader never loops
        peer.send(draft.request(1, start=4, uuid=old))
        reader = UprReader(draft, 1, _seqno=4)
        reader.read_to(peer, 5)
        assert set(reader.documents) == {b"k9"}


@both
@pytest.mark.parametrize(
    ("start", "uuid", "rollback_to"),
    [(0, 0x123, None), (2, 0x123, 0), (2, 0, 0), (2, "own", None), (3, "own", None), (9, "own", 3)],
)
def test_where_a_stream_may_start(
    node: RunningNode, draft: Upr, start: int, uuid: Any, rollback_to: int | None
) -> None:
    for number in range(3):
        node.set(f"k{number}", b"v", vbucket=1)
    with Peer(node) as peer:
        answer = peer.ask(draft.request(1, start, uuid_of(node, 1) if uuid == "own" else uuid))
        if rollback_to is None:
            assert draft.word(answer) == "ok"
        else:
            assert (draft.word(answer), answer.body) == ("rollback", rollback_to.to_bytes(8, "big"))


@both
def test_a_purged_deletion_makes_a_reader_start_over(draft: Upr) -> None:
    with tailrace.testing.node(vbuckets=4, settings={"history_changes": 0}) as node:
        for number in range(5):
            node.set(f"k{number}", b"v", vbucket=1)
        node.delete("k1", vbucket=1)
        node.set("last", b"v", vbucket=1)
        node.call(lambda inner: inner.buckets["default"].store.compact(Compaction(drop_tombstones=True)))
        assert vbucket_of(node, 1).purge_seqno == 6
        with Peer(node) as peer:
            answer = peer.ask(draft.request(1, start=3, uuid=uuid_of(node, 1)))
            assert (draft.word(answer), answer.body) == ("rollback", bytes(8))


@pytest.mark.covers("upr-a.stream-end.ok", "upr-b.stream-end.ok")
@both
def test_a_stream_with_an_end_finishes_the_snapshot_and_ends(node: RunningNode, draft: Upr) -> None:
    for number in range(10):
        node.set(f"k{number}", b"v", vbucket=2)
    with Peer(node) as peer:
        peer.send(draft.request(2, end=4))
        reader = UprReader(draft, 2)
        reader.read(peer, "over-ok")
        assert reader.words[-2] == "end"
        assert reader.committed == 10
        # start and end at the same seqno: granted, and over at once
        peer.send(draft.request(2, start=10, end=10, uuid=uuid_of(node, 2)))
        assert [draft.word(peer.next()) for _ in range(3)] == ["ok", "begin", "over-ok"]


@pytest.mark.covers("upr-a.stream-end.state-changed", "upr-b.stream-end.state-changed")
@both
def test_a_stream_ends_when_its_history_is_rewound(node: RunningNode, draft: Upr) -> None:
    for number in range(4):
        node.set(f"k{number}", b"v", vbucket=2)
    with Peer(node) as peer:
        peer.send(draft.request(2))
        reader = UprReader(draft, 2)
        reader.read_to(peer, 4)
        node.rewind(2, 2)
        reader.read(peer, "over-state")
        assert "state" not in reader.words


@pytest.mark.covers("upr-b.set-vbucket-state")
@pytest.mark.parametrize(
    ("state", "number"), [(VBucketState.DEAD, 4), (VBucketState.REPLICA, 3), (VBucketState.PENDING, 2)]
)
def test_draft_b_hands_over_every_change_and_then_the_state(
    node: RunningNode, state: VBucketState, number: int
) -> None:
    for at in range(50):
        node.set(f"k{at}", b"v" * 10_000, vbucket=2)
    with Peer(node, receive_buffer=4096) as peer:
        peer.send(B.request(2))
        reader = UprReader(B, 2)
        reader.read(peer, "start")
        node.set("last", b"v", vbucket=2)
        expected = documents_of(node, 2)
        node.set_vbucket_state(2, state)
        while reader.take(packet := peer.next()) != "state":
            pass
        assert (packet.extras, packet.half) == (bytes([number]), 2)
        assert reader.documents == expected
        reader.read(peer, "over-state")


def test_draft_a_ends_without_a_word_about_the_state(node: RunningNode) -> None:
    node.set("k", b"v", vbucket=2)
    with Peer(node) as peer:
        peer.send(A.request(2))
        reader = UprReader(A, 2)
        reader.read(peer, "end")
        node.set_vbucket_state(2, VBucketState.DEAD)
        reader.read(peer, "over-state")


@pytest.mark.covers("upr-a.flush", "upr-b.flush")
@both
def test_flush_is_a_message_and_the_stream_goes_on(node: RunningNode, draft: Upr) -> None:
    for number in range(8):
        node.set(f"k{number}", b"v", vbucket=2)
    old = uuid_of(node, 2)
    with Peer(node) as peer, Peer(node) as other:
        peer.send(draft.request(2))
        reader = UprReader(draft, 2)
        reader.read_to(peer, 8)
        assert other.ask(packet(0x80, 0x08)).half == 0
        node.set("new", b"v", vbucket=2)
        reader.read(peer, "flush")
        assert reader.documents == {}
        reader.read_to(peer, 1)
        assert reader.documents == documents_of(node, 2)
        assert "over-state" not in reader.words
    with Peer(node) as peer:  # a reader that was away is rolled back to 0
        answer = peer.ask(draft.request(2, start=8, uuid=old))
        assert (draft.word(answer), answer.body) == ("rollback", bytes(8))


@both
def test_flush_inside_a_snapshot_closes_it(node: RunningNode, draft: Upr) -> None:
    for number in range(400):  # 8 MB: far more than what kernel and transport hold
        node.set(f"k{number}", b"v" * 20_000, vbucket=2)
    with Peer(node, receive_buffer=4096) as peer:
        peer.send(draft.request(2))
        reader = UprReader(draft, 2)
        reader.read(peer, "mutation")
        node.flush()
        reader.read(peer, "flush")
        assert len(reader.words) < 400
        reader.read(peer, "end")
        node.set("k", b"v", vbucket=2)
        reader.read(peer, "end")
        assert set(reader.documents) == {b"k"}


@both
def test_a_rewind_to_the_beginning_is_no_flush(node: RunningNode, draft: Upr) -> None:
    node.set("k", b"v", vbucket=2)
    with Peer(node) as peer:
        peer.send(draft.request(2))
        reader = UprReader(draft, 2)
        reader.read(peer, "end")
        node.rewind(2, 0)
        reader.read(peer, "over-state")
        assert "flush" not in reader.words


@both
def test_values_are_plain_for_a_reader_without_hello(node: RunningNode, draft: Upr) -> None:
    body = b'{"a": "' + b"x" * 500 + b'"}'
    from tailrace.snappy import deflate
    from tailrace.wire.fields import join_xattrs

    def write(inner: Node) -> None:
        vbucket = inner.buckets["default"].store.vbuckets[0]
        vbucket.set(b"\0json", body, 5, 0, 1)
        vbucket.set(b"\0snappy", deflate(body), 0, 0, 3)
        vbucket.set(b"\0xattr", join_xattrs({"_s": b"1"}, body), 0, 0, 5)
        vbucket.set(b"\x08other", b"not for old readers")

    node.call(write)
    with Peer(node) as peer:
        peer.send(draft.request(0))
        reader = UprReader(draft, 0)
        seen = {}
        while reader.take(packet := peer.next()) != "end":
            if draft.word(packet) == "mutation":
                seen[packet.key] = (packet.value, packet.byte_5)
        plain = 3 if draft is A else 0
        assert seen == dict.fromkeys((b"json", b"snappy", b"xattr"), (body, plain))
        assert reader.documents[b"json"][3] == 5


def test_draft_b_keeps_datatypes_that_were_negotiated(node: RunningNode) -> None:
    node.set("json", {"a": 1}, vbucket=0)
    with Peer(node) as peer:
        hello = packet(0x80, 0x1F, key=b"t", value=struct.pack(">H", 0x0B))
        assert peer.ask(hello).half == 0
        peer.send(B.request(0))
        reader = UprReader(B, 0)
        while reader.take(received := peer.next()) != "mutation":
            pass
        assert received.byte_5 == 1


@both
def test_the_group_id_is_in_the_statistics(node: RunningNode, draft: Upr) -> None:
    node.set("k", b"v", vbucket=2)
    with Peer(node) as peer:
        peer.send(draft.request(2, group=b"replication_2"))
        UprReader(draft, 2).read(peer, "end")
        with Peer(node) as other:
            stats = other.stats("dcp")
        assert stats["ep_dcp_count"] == "1"
        (name,) = [name for name in stats if name.endswith(":stream_2_group_id")]
        assert stats[name] == "replication_2"


@both
def test_many_vbuckets_on_one_connection(node: RunningNode, draft: Upr) -> None:
    for number in range(400):
        node.set(f"k{number}", b"v" * 2_000)
    with Peer(node) as peer:
        readers = {100 + vbucket: UprReader(draft, vbucket) for vbucket in range(16)}
        for opaque, reader in readers.items():
            peer.send(draft.request(reader.vbucket, opaque=opaque))
        highs = [node.high_seqno(vbucket) for vbucket in range(16)]
        while any(reader.committed < highs[reader.vbucket] for reader in readers.values()):
            packet = peer.next()
            readers[packet.opaque].take(packet)
        for reader in readers.values():
            assert reader.documents == documents_of(node, reader.vbucket)


def test_draft_b_refuses_what_it_does_not_know(node: RunningNode) -> None:
    with Peer(node) as peer:
        extras = struct.pack(">II", 1, 0) + struct.pack(">QQQQ", 0, NEVER, 0, 0)
        assert peer.ask(packet(0x80, 0x50, extras, b"g", opaque=3)).half == 0x04
        peer.send(B.request(0))
        assert [B.word(peer.next()) for _ in range(2)] == ["ok", "begin"]
        assert peer.ask(B.request(0)).half == 0x02  # one stream of a vbucket at a time
        assert peer.ask(packet(0x80, 0x50, extras[:39] + b"x", b"g" * 252)).half == 0x04


def test_a_second_request_of_draft_a_replaces_the_first(node: RunningNode) -> None:
    node.set("k", b"v", vbucket=0)
    with Peer(node) as peer:
        peer.send(A.request(0, opaque=1))
        UprReader(A, 0).read(peer, "end")
        peer.send(A.request(0, opaque=2))
        packets = [peer.next() for _ in range(5)]
        assert [A.word(packet) for packet in packets] == ["ok", "begin", "start", "mutation", "end"]
        assert {packet.opaque for packet in packets} == {2}


@both
@pytest.mark.parametrize(
    "other",
    [
        packet(0x80, 0x50, struct.pack(">II", 0, 1), b"name"),  # DCP open
        packet(0x80, 0x40, key=b"name"),  # TAP connect
        packet(0x80, 0x53, bytes(48)),  # DCP stream request
    ],
    ids=["dcp", "tap", "dcp-stream"],
)
def test_a_connection_is_never_bound_again(node: RunningNode, draft: Upr, other: bytes) -> None:
    with Peer(node) as peer:
        peer.send(draft.log_request(0))
        assert draft.word(peer.next()) == "log"
        answer = peer.ask(other)
        assert (answer.magic, answer.half) == (0x81, 0x04)
        assert peer.is_closed()


def test_the_other_draft_is_another_dialect(node: RunningNode) -> None:
    for first, second in ((A, B), (B, A)):
        with Peer(node) as peer:
            assert first.word(peer.ask(first.log_request(0))) == "log"
            assert peer.ask(second.request(0)).half == 0x04
            assert peer.is_closed()


def test_document_commands_and_draft_a_exclude_each_other(node: RunningNode) -> None:
    def store(key: bytes) -> bytes:
        return packet(0x80, 0x01, bytes(8), key, b"v", half=0)

    with Peer(node) as peer:
        assert peer.ask(store(b"before")).half == 0
        assert A.word(peer.ask(A.log_request(0))) == "log"
        assert peer.ask(store(b"after")).half == 0x04
        assert peer.is_closed()
    assert node.get("after", vbucket=0) is None


@both
def test_answers_to_pushes_are_not_expected(node: RunningNode, draft: Upr) -> None:
    with Peer(node) as peer:
        peer.send(draft.request(0))
        assert [draft.word(peer.next()) for _ in range(2)] == ["ok", "begin"]
        peer.send(packet(0x81, 0x57))
        assert peer.is_closed()


@both
def test_a_reader_that_does_not_read_costs_no_more_than_the_buffers(node: RunningNode, draft: Upr) -> None:
    for number in range(300):
        node.set(f"k{number}", b"v" * 100_000, vbucket=1)
    with Peer(node, receive_buffer=4096) as peer:
        peer.send(draft.request(1))

        def sent() -> int:
            with Peer(node) as other:
                return sum(int(v) for k, v in other.stats("dcp").items() if k.endswith("total_bytes_sent"))

        until(lambda: sent() > 0)
        assert sent() < 12 << 20  # of 30 MB: what kernel and transport hold
        reader = UprReader(draft, 1)
        reader.read_to(peer, 300)
        assert reader.documents == documents_of(node, 1)


# The seeds' own packets.


def _as_replica(node: RunningNode, number: int, uuid: int, frames: list[bytes], high: int) -> None:
    """A vbucket with a history that was made elsewhere, down to its seqnos."""

    def act(inner: Node) -> None:
        bucket = inner.buckets["default"]
        bucket.store.set_state(number, VBucketState.REPLICA)
        vbucket = bucket.store.vbuckets[number]
        vbucket.set_failover_log(FailoverLog.of([(uuid, 0)]))
        if frames:
            vbucket.begin_snapshot(0, high)
        for frame in frames:
            vbucket.receive(frame)

    node.call(act)


def _removal(kind: str, **fields: Any) -> bytes:
    """A deletion or expiration as the store keeps it."""
    if kind == "deletion":
        return DcpDeletion(delete_time=9, unused=0, **fields).encode()
    return DcpExpiration(delete_time=9, **fields).encode()


def test_the_conversation_of_draft_a_byte_for_byte(node: RunningNode) -> None:
    seqno, rev, cas, key = 0x8CB, 3, 0xA5, b"\0mykey"
    change = DcpMutation(vbucket=12, cas=cas, by_seqno=seqno, rev_seqno=rev, key=key, value=b"myvalue")
    mutation = change.encode()
    _as_replica(node, 12, 0x3C58A, [mutation], seqno)
    request = SEED["upr-a.stream-request.corrected"]
    with Peer(node) as peer:
        # a reader that claims what no node has is told to go back; then the request as it is drawn
        ahead = request[:24] + (0x45A9).to_bytes(8, "big") + request[32:]
        answer = peer.ask(ahead)
        assert answer.raw[:24] == SEED["upr-a.response.rollback.corrected"][:24]
        assert answer.body == seqno.to_bytes(8, "big")
        peer.send(request)
        for name in ("response.ok", "stream-begin", "snapshot-start", "mutation.corrected", "snapshot-end"):
            peer.expect(SEED[f"upr-a.{name}"])
        node.set_vbucket_state(12, VBucketState.PENDING)
        peer.expect(SEED["upr-a.stream-end.state-changed"])
        peer.send(request)
        peer.expect(SEED["upr-a.response.not-my-vbucket"])


@pytest.mark.parametrize("kind", ["deletion", "expiration"])
def test_removals_of_draft_a_byte_for_byte(node: RunningNode, kind: str) -> None:
    seqno = 0x8CB
    frame = _removal(kind, vbucket=12, cas=0xA5, by_seqno=seqno, rev_seqno=3, key=b"\0mykey")
    _as_replica(node, 12, 0x3C58A, [frame], seqno)
    request = SEED["upr-a.stream-request.corrected"]
    bounded = request[:32] + seqno.to_bytes(8, "big") + request[40:]
    with Peer(node) as peer:
        peer.send(bounded)
        wanted = ("response.ok", "stream-begin", "snapshot-start", f"{kind}.corrected", "snapshot-end")
        for name in (*wanted, "stream-end.ok"):
            peer.expect(SEED[f"upr-a.{name}"])


def test_failover_log_and_flush_of_draft_a_byte_for_byte(node: RunningNode) -> None:
    log = SEED["upr-a.response.failover-log.corrected"]
    pairs = list(struct.iter_unpack(">QQ", log[24:]))
    node.call(
        lambda inner: inner.buckets["default"].store.vbuckets[12].set_failover_log(FailoverLog.of(pairs))
    )
    with Peer(node) as peer:
        peer.send(SEED["upr-a.failover-log-request"])
        peer.expect(log)
    node.call(
        lambda inner: inner.buckets["default"].store.vbuckets[12].set_failover_log(FailoverLog.new(0x3C58A))
    )
    with Peer(node) as peer:
        peer.send(SEED["upr-a.stream-request.corrected"])
        peer.expect(SEED["upr-a.response.ok"])
        peer.expect(SEED["upr-a.stream-begin"])
        node.flush()
        peer.expect(SEED["upr-a.flush"])


def test_the_tolerated_request_of_draft_a_has_eight_bytes_to_skip(node: RunningNode) -> None:
    """The drawn packet announces 8 bytes more than it has; on a socket they follow."""
    drawn = SEED["upr-a.stream-request"]
    extras, key = drawn[24:56], drawn[56:]
    node.set("k", b"v", vbucket=12)
    with Peer(node) as peer:
        peer.send(drawn[:24] + extras + bytes(8) + key)
        peer.expect(SEED["upr-a.response.ok"])
        peer.expect(SEED["upr-a.stream-begin"])


def test_the_header_sample_of_draft_a_is_refused(node: RunningNode) -> None:
    with Peer(node) as peer:
        answer = peer.ask(SEED["upr-a.header"])
        assert (answer.magic, answer.half, answer.opaque) == (0x81, 0x04, 10)
        assert draft_still_unbound(peer)


def draft_still_unbound(peer: Peer) -> bool:
    return B.word(peer.ask(B.log_request(0))) == "log"


def test_the_conversation_of_draft_b_byte_for_byte(node: RunningNode) -> None:
    node.call(
        lambda inner: inner.buckets["default"].store.vbuckets[0].set_failover_log(FailoverLog.new(0xFEEDDECA))
    )
    with Peer(node) as peer:
        peer.send(SEED["upr-b.stream-request"])
        peer.expect(SEED["upr-b.stream-request-response.rollback.corrected"])
        peer.send(SEED["upr-b.stream-request.from-start"])
        peer.expect(SEED["upr-b.stream-request-response.ok"])
        peer.expect(SEED["upr-b.stream-start"])

        def write(inner: Node) -> None:
            vbucket = inner.buckets["default"].store.vbuckets[0]
            vbucket.set_with_meta(b"\0hello", b"world", 0, 0, 0, 1, resolve=False)

        node.call(write)
        peer.expect(SEED["upr-b.snapshot-start"])
        # seqnos begin at 1, where the example has 0
        packet = peer.next()
        wanted = SEED["upr-b.mutation.corrected"]
        assert packet.raw == wanted[:24] + (1).to_bytes(8, "big") + wanted[32:]
        peer.expect(SEED["upr-b.snapshot-end"])
        node.flush()
        peer.expect(SEED["upr-b.flush"])
        node.set_vbucket_state(0, VBucketState.DEAD)
        peer.expect(SEED["upr-b.set-vbucket-state"])
        assert B.word(peer.next()) == "over-state"


def test_the_failover_log_of_draft_b_byte_for_byte(node: RunningNode) -> None:
    pairs = list(struct.iter_unpack(">QQ", SEED["upr-b.failover-log-response"][24:]))
    node.call(
        lambda inner: inner.buckets["default"].store.vbuckets[0].set_failover_log(FailoverLog.of(pairs))
    )
    with Peer(node) as peer:
        peer.send(SEED["upr-b.failover-log-request"])
        peer.expect(SEED["upr-b.failover-log-response"])


@pytest.mark.parametrize("kind", ["deletion", "expiration"])
def test_removals_and_end_of_draft_b_byte_for_byte(node: RunningNode, kind: str) -> None:
    frame = _removal(kind, vbucket=0, cas=1, by_seqno=1, rev_seqno=0, key=b"\0hello")
    _as_replica(node, 0, 0xFEEDDECA, [frame], 1)
    request = SEED["upr-b.stream-request.from-start"]
    with Peer(node) as peer:
        peer.send(request[:40] + (1).to_bytes(8, "big") + request[48:])
        for name in ("stream-request-response.ok", "stream-start", "snapshot-start"):
            peer.expect(SEED[f"upr-b.{name}"])
        wanted = SEED[f"upr-b.{kind}"]
        assert peer.next().raw == wanted[:24] + (1).to_bytes(8, "big") + wanted[32:]
        peer.expect(SEED["upr-b.snapshot-end"])
        peer.expect(SEED["upr-b.stream-end"])


@both
def test_what_is_not_for_old_readers_is_passed_over(node: RunningNode, draft: Upr) -> None:
    write_for_newer_readers(node)
    with Peer(node) as peer:
        peer.send(draft.request(1, end=301))
        reader = UprReader(draft, 1)
        reader.read(peer, "over-ok")
        assert set(reader.documents) == {b"mine"}


@both
def test_flush_reaches_a_stream_that_waits_for_its_turn_to_be_read(draft: Upr) -> None:
    """A connection backfills few vbuckets at once; those that wait must hear of the flush, and go on."""
    settings = {"backfill_buffer": "256k"}
    with tailrace.testing.node(vbuckets=4, settings=settings) as node:
        for number in range(200):
            node.set(f"k{number}", b"v" * 200_000, vbucket=number % 4)
        node.call(lambda inner: inner.buckets["default"].store.seal())  # type: ignore[attr-defined]
        node.call(lambda inner: inner.buckets["default"].store.forget_memory())  # type: ignore[attr-defined]
        with Peer(node, receive_buffer=4096) as peer:
            readers = {number: UprReader(draft, number) for number in range(4)}
            # In this order, so that those that wait are flushed before the one that is read.
            peer.send(b"".join(draft.request(number, opaque=number) for number in reversed(readers)))

            def are_under_way() -> bool:  # all of them: a stream requested after the flush is not told of it
                words = [reader.words for reader in readers.values()]
                return any("mutation" in word for word in words) and all("begin" in word for word in words)

            while not are_under_way():
                packet = peer.next()
                readers[packet.opaque].take(packet)
            node.flush()
            for number in readers:
                node.set("new", b"v", vbucket=number)
            while any(set(reader.documents) != {b"new"} for reader in readers.values()):
                packet = peer.next()
                readers[packet.opaque].take(packet)
            assert all("flush" in reader.words for reader in readers.values())
