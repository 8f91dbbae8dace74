"""The node as TAP producer over real sockets: every flag of a connect, every message, acks and resuming."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace.testing
from dialects.raw_peer import (
    ACK,
    BACKFILL,
    CHECKPOINT,
    DUMP,
    FIX_BYTEORDER,
    FROM_NOW,
    KEYS_ONLY,
    LIST,
    REGISTERED,
    TAKEOVER,
    Peer,
    TapReader,
    packet,
    tap_connect,
    until,
    vbucket_list,
)
from dialects.stored import all_documents, documents_of, without_empty, write_for_newer_readers
from tailrace.server.node import Node
from tailrace.store.base import Compaction
from tailrace.testing.running import RunningNode
from tailrace.web.node_view import gather_node_view
from tailrace.wire.codes import VBucketState
from vectors.corpus import vectors

SEED = {vector.id: vector.data for vector in vectors("seed_tap")}


@pytest.fixture
def reader(node: RunningNode) -> Iterator[TapReader]:
    with Peer(node) as peer:
        yield TapReader(peer)


def fill(node: RunningNode, count: int = 40, prefix: str = "k") -> None:
    for number in range(count):
        node.set(f"{prefix}{number}", {"n": number})


def caught_up(reader: TapReader, node: RunningNode) -> bool:
    return without_empty(reader.documents) == all_documents(node)


# Flags.


@pytest.mark.covers("tap.connect", "tap.mutation", "tap.delete", "tap.opaque.1", "tap.opaque.8")
@pytest.mark.parametrize("flags", [None, 0], ids=["no-extras", "no-flags"])
def test_everything_and_then_changes(node: RunningNode, reader: TapReader, flags: int | None) -> None:
    fill(node)
    node.delete("k7")
    reader.connect(b"node1", flags)
    reader.read_until(lambda: caught_up(reader, node))
    words = reader.words()
    # all vbuckets are begun before the first item; each one's backfill ends after its items
    assert words[:16] == ["opaque 1"] * 16
    assert sorted(packet.half for packet in reader.log[:16]) == list(range(16))
    while reader.words().count("opaque 8") < 16:
        reader.next()
    for number in range(16):
        own = [word for word, packet in zip(reader.words(), reader.log, strict=True) if packet.half == number]
        assert own[0] == "opaque 1" and own[-1] == "opaque 8"
        assert set(own[1:-1]) <= {"mutation", "delete"}
    assert "delete" in words  # a tombstone, so that a replica has it too
    node.set("later", b"v")
    node.delete("k8")
    reader.read_until(lambda: caught_up(reader, node))
    assert reader.words()[-1] == "delete"


@pytest.mark.covers("tap.connect.flag.0x01")
def test_backfill_date_in_the_future_means_from_now_on(node: RunningNode, reader: TapReader) -> None:
    fill(node)
    reader.connect(b"node1", BACKFILL, FROM_NOW)
    assert reader.peer.is_silent()
    node.set("new", b"v", vbucket=3)
    assert reader.next().tap_key == b"new"
    assert reader.documents == {3: documents_of(node, 3).keys() and {b"new": documents_of(node, 3)[b"new"]}}


@pytest.mark.parametrize("date", ["0", "5", "an hour ago"])
def test_backfill_date_in_the_past_means_everything(node: RunningNode, reader: TapReader, date: str) -> None:
    fill(node)
    seconds = int(date) if date.isdigit() else int(time.time()) - 3600
    reader.connect(b"node1", BACKFILL, struct.pack(">Q", seconds))
    reader.read_until(lambda: caught_up(reader, node))


@pytest.mark.covers("tap.connect.flag.0x02")
@pytest.mark.parametrize("more", [0, ACK])
def test_a_dump_has_what_exists_and_ends(node: RunningNode, reader: TapReader, more: int) -> None:
    fill(node)
    node.delete("k3")
    reader.connect(b"node1", DUMP | more)
    reader.read_all()
    assert without_empty(reader.documents) == all_documents(node)
    assert "delete" not in reader.words()
    assert reader.words().count("opaque 8") == 16


def test_a_dump_of_an_empty_bucket_ends_too(node: RunningNode, reader: TapReader) -> None:
    reader.connect(b"node1", DUMP)
    reader.read_all()
    assert reader.documents.keys() == set(range(16))


def test_a_dump_waits_for_its_last_acknowledgement(node: RunningNode, reader: TapReader) -> None:
    fill(node, 3)
    reader.acks = False
    reader.connect(b"node1", DUMP | ACK | LIST, vbucket_list(0, 1, 2))
    reader.ack(reader.next())  # opaque 0; the opaques of all vbuckets go before anything else
    for _ in range(3):
        reader.ack(reader.next())
    while reader.words().count("opaque 8") < 3:
        packet = reader.next()
        if packet.tap_flags & 1:
            reader.ack(packet)
    assert reader.take() is None


@pytest.mark.covers("tap.connect.flag.0x04")
def test_only_the_listed_vbuckets(node: RunningNode, reader: TapReader) -> None:
    fill(node, 200)
    reader.connect(b"node1", LIST, vbucket_list(1, 5, 700))  # 700 is not here and is skipped
    expected = {1: documents_of(node, 1), 5: documents_of(node, 5)}
    reader.read_until(lambda: reader.documents == expected)
    node.set("elsewhere", b"v", vbucket=2)
    node.set("here", b"v", vbucket=5)
    reader.read_until(lambda: reader.documents[5] == documents_of(node, 5))
    assert reader.documents.keys() == {1, 5}


def test_a_replica_that_was_active_a_moment_ago_is_silent() -> None:
    """Its reader may not have the new map yet, and would stay with this node."""
    with RunningNode(2, settings={"former_active_silence": 60}) as node, Peer(node) as peer:
        reader = TapReader(peer)
        node.set("before", b"v", vbucket=0)
        reader.connect(b"node1", LIST, vbucket_list(0, 1))
        reader.read_until(lambda: documents_of(node, 0) == reader.documents.get(0))
        node.set_vbucket_state(0, VBucketState.REPLICA)
        with Peer(node) as second:
            late = TapReader(second)
            late.connect(b"node2", LIST, vbucket_list(0, 1))
            node.set("after", b"v", vbucket=1)
            late.read_until(lambda: documents_of(node, 1) == late.documents.get(1))
            assert not late.documents.get(0)


def test_an_empty_list_means_all(node: RunningNode, reader: TapReader) -> None:
    fill(node)
    reader.connect(b"node1", LIST, vbucket_list())
    reader.read_until(lambda: caught_up(reader, node))


@pytest.mark.covers("tap.connect.flag.0x20", "tap.flag.0x02")
def test_keys_only(node: RunningNode, reader: TapReader) -> None:
    fill(node, 5)
    reader.connect(b"node1", KEYS_ONLY | DUMP)
    reader.read_all()
    mutations = [packet for packet in reader.log if packet.opcode == 0x41]
    assert len(mutations) == 5
    assert all(packet.tap_flags == 0x02 and packet.tap_value == b"" for packet in mutations)
    keys = {packet.tap_key for packet in mutations}
    assert keys == {f"k{number}".encode() for number in range(5)}


@pytest.mark.covers("tap.connect.flag.0x100", "tap.flag.0x04")
@pytest.mark.parametrize("fix", [False, True])
def test_item_flags_are_in_network_order_and_say_so_when_asked(
    node: RunningNode, reader: TapReader, fix: bool
) -> None:
    node.call(lambda inner: inner.buckets["default"].store.vbuckets[0].set(b"\0k", b"v", 0x01020304, 0))
    reader.connect(b"node1", DUMP | (FIX_BYTEORDER if fix else 0))
    reader.read_all()
    (mutation,) = [packet for packet in reader.log if packet.opcode == 0x41]
    assert mutation.body[8:12] == bytes([1, 2, 3, 4])
    assert mutation.tap_flags == (0x04 if fix else 0)


@pytest.mark.parametrize("ends", [0, DUMP, TAKEOVER, DUMP | TAKEOVER])
@pytest.mark.parametrize("acks", [0, ACK])
def test_every_mix_of_flags(acks: int, ends: int) -> None:
    """All 512, with their values in the body, lowest flag first; an undefined bit is ignored."""
    optional = (BACKFILL, LIST, KEYS_ONLY, CHECKPOINT, REGISTERED, FIX_BYTEORDER)
    with tailrace.testing.node(vbuckets=2) as node:
        fill(node, 6)
        expected = all_documents(node)
        for chosen in range(1 << len(optional)):
            flags = acks | ends | sum(flag for bit, flag in enumerate(optional) if chosen >> bit & 1)
            value = b""
            if flags & BACKFILL:
                value += bytes(8)
            if flags & LIST:
                value += vbucket_list(0, 1)
            if flags & CHECKPOINT:
                value += vbucket_list()
            with Peer(node) as peer:
                reader = TapReader(peer).connect(f"mix{flags}".encode(), flags | 0x8000_0000, value)
                if ends:
                    reader.read_all()
                else:
                    reader.read_until(
                        lambda reader=reader: (
                            len(reader.documents.get(0, ())) + len(reader.documents.get(1, ())) == 6
                        )
                    )
            held = without_empty(reader.documents)
            if flags & KEYS_ONLY:
                assert {n: set(d) for n, d in held.items()} == {n: set(d) for n, d in expected.items()}
            else:
                assert held == expected
            states = [
                vbucket.state for vbucket in node.call(lambda inner: list(inner.buckets["default"].store))
            ]
            taken_over = bool(ends & TAKEOVER) and not ends & DUMP
            assert states == [VBucketState.DEAD if taken_over else VBucketState.ACTIVE] * 2, hex(flags)
            for number in range(2):
                node.set_vbucket_state(number, VBucketState.ACTIVE)


@pytest.mark.parametrize("is_completed", [True, False])
def test_writes_wait_for_a_takeover_that_takes_too_long(is_completed: bool) -> None:
    """Until the vbuckets are given up, or the connection is gone; those of others are written as before."""
    settings = {"takeover_max_time": 0.1}
    with tailrace.testing.node(vbuckets=2, settings=settings) as node, Peer(node) as writer:
        node.set("k", b"v", vbucket=1)

        def written(vbucket: int = 1) -> int:
            return writer.ask(packet(0x80, 0x01, bytes(8), b"k", b"v", half=vbucket)).half

        with Peer(node) as peer:
            reader = TapReader(peer).connect(b"t", ACK | LIST | TAKEOVER, vbucket_list(1))
            reader.acks = False  # so the items wait, and the vbucket is not given up
            reader.read("state 3", 1)
            while not (status := written()):
                pass
            assert status == 0x86
            assert written(vbucket=0) == 0
            if is_completed:
                reader.acks = True
                reader.ack(reader.log[-1])
                reader.read("state 1", 1)
                reader.read_all()
                assert written() == 0x07
                node.set_vbucket_state(1, VBucketState.ACTIVE)
                assert written() == 0
        while (status := written()) == 0x86:
            pass
        assert status == 0


# Acknowledgements.


@pytest.mark.covers("tap.connect.flag.0x10", "tap.opaque.0", "tap.flag.0x01", "tap.ack")
def test_acks_begin_with_a_greeting_and_nothing_overtakes_it(node: RunningNode, reader: TapReader) -> None:
    fill(node)
    reader.acks = False
    reader.connect(b"node1", ACK)
    for _ in range(17):
        reader.next()
    assert reader.words() == ["opaque 0"] + ["opaque 1"] * 16
    assert [packet.opaque for packet in reader.log] == list(range(1, 18))
    assert reader.peer.is_silent()  # items wait for the acknowledgement
    reader.acks = True
    reader.ack(reader.log[-1])
    reader.read_until(lambda: reader.words().count("opaque 8") == 16)
    assert caught_up(reader, node)
    assert not [
        packet for packet in reader.log if packet.opaque > 17 and packet.opcode == 0x44 and packet.code != 8
    ]


def test_an_ack_may_have_a_text_in_its_key(node: RunningNode, reader: TapReader) -> None:
    fill(node, 3)
    reader.acks = False
    reader.connect(b"node1", ACK | DUMP)
    while (received := reader.take()) is not None:
        if received.tap_flags & 1:
            reader.peer.send(packet(0x81, received.opcode, key=b"x" * 36, opaque=received.opaque))
    assert caught_up(reader, node)


def test_the_last_item_asks_for_an_ack(node: RunningNode, reader: TapReader) -> None:
    reader.connect(b"node1", ACK | BACKFILL, FROM_NOW)
    assert reader.next().code == 0
    node.set("k", b"v", vbucket=1)
    assert reader.next().tap_flags == 1


@pytest.fixture
def strict() -> Iterator[RunningNode]:
    """A node whose acknowledgements come often and whose patience is short."""
    settings = {
        "tap_ack_interval": 10,
        "tap_ack_window": 3,
        "tap_backoff": 0.01,
        "tap_keepalive": 60,
        "tap_noop_interval": 60,
    }
    with tailrace.testing.node(vbuckets=4, settings=settings) as node:
        yield node


def on_the_page(node: RunningNode) -> dict[str, Any]:
    """What the node's page says of its only stream."""
    *_, view = node.call(lambda inner: list(gather_node_view(inner, has_faults=False)))
    (stream,) = view["streams"]
    shown: dict[str, Any] = stream
    return shown


def test_the_window(strict: RunningNode) -> None:
    for number in range(100):
        strict.set(f"k{number}", b"v", vbucket=1)
    with Peer(strict) as peer:
        reader = TapReader(peer).connect(b"w", ACK | LIST, vbucket_list(1))
        reader.read("opaque 1")
        reader.acks = False
        items = [reader.next() for _ in range(30)]
        assert [packet.tap_flags for packet in items] == [int(packet.opaque % 10 == 0) for packet in items]
        assert peer.is_silent()
        stream = on_the_page(strict)
        assert stream["why"] == "too many messages are unanswered: the reader is slow"
        assert stream["sent_bytes"] > 30 * 24
        reader.ack(items[7])  # acknowledges it and everything before, asked for or not
        more = [reader.next() for _ in range(8)]
        assert peer.is_silent()
        reader.acks = True
        reader.ack(more[-1])
        reader.read("opaque 8")
        assert on_the_page(strict)["why"] == "in step"
        assert reader.documents[1] == documents_of(strict, 1)
        assert [packet.opaque for packet in reader.log] == list(range(1, len(reader.log) + 1))


@pytest.mark.covers("tap.ack.backoff")
@pytest.mark.parametrize("status", [0x85, 0x86])
def test_a_reader_asks_for_time(strict: RunningNode, status: int) -> None:
    for number in range(25):
        strict.set(f"k{number}", b"v", vbucket=1)
    with Peer(strict) as peer:
        reader = TapReader(peer).connect(b"w", ACK | LIST, vbucket_list(1))
        reader.read("opaque 1")
        reader.acks = False
        items = [reader.next() for _ in range(25)]
        reader.acks = True
        refused = items[21]
        reader.documents[1].clear()  # as if none of the later ones had been accepted either
        taken = {packet.tap_key for packet in items[:21]}
        reader.ack(refused, status)
        again = reader.next()
        assert again.tap_key == refused.tap_key and again.opaque > items[-1].opaque
        reader.read("opaque 8")
        assert taken | set(reader.documents[1]) == {f"k{number}".encode() for number in range(25)}
        with Peer(strict) as other:
            assert other.stats("tap")["eq_tapq:w:nacks"] == "1"


def test_an_error_ends_the_connection_and_strange_answers_do_not(
    node: RunningNode, reader: TapReader
) -> None:
    fill(node, 3)
    reader.connect(b"node1", ACK)
    reader.read_until(lambda: reader.words().count("opaque 8") == 16)
    reader.peer.send(packet(0x81, 0x41, opaque=999_999))  # no message has that number
    reader.peer.send(packet(0x81, 0x41, opaque=0))
    reader.peer.send(packet(0x81, 0x0A))  # an answer to a no-op is allowed
    node.set("k", b"v")
    reader.acks = False
    reader.ack(reader.read("mutation"), 0x04)
    reader.read_all()


@pytest.mark.covers("tap.noop")
def test_silence_is_filled_with_noops() -> None:
    with tailrace.testing.node(vbuckets=2, settings={"tap_noop_interval": 0.1}) as node, Peer(node) as peer:
        reader = TapReader(peer).connect(b"n", BACKFILL, FROM_NOW)
        assert [reader.next().opcode for _ in range(3)] == [0x0A] * 3
        node.set("k", b"v", vbucket=0)
        reader.read("mutation")
        assert reader.number == 1  # no-ops have no place in the sequence


def test_a_reader_that_never_acknowledges_is_given_up() -> None:
    settings = {"tap_ack_interval": 5, "tap_ack_window": 1, "tap_ack_grace": 2}
    with tailrace.testing.node(vbuckets=2, settings=settings) as node, Peer(node) as peer:
        for number in range(20):
            node.set(f"k{number}", b"v", vbucket=0)
        reader = TapReader(peer).connect(b"n", ACK)
        reader.read("opaque 1", 1)
        reader.acks = False
        reader.read_all()
        assert reader.words().count("mutation") == 5


# Checkpoints.


@pytest.mark.covers("tap.connect.flag.0x40", "tap.opaque.2", "tap.checkpoint-start", "tap.checkpoint-end")
@pytest.mark.parametrize("acks", [0, ACK])
def test_checkpoints_are_told_as_real_servers_do(node: RunningNode, reader: TapReader, acks: int) -> None:
    node.set("old", b"v", vbucket=3)
    reader.connect(b"node1", CHECKPOINT | LIST | acks, vbucket_list(3))
    reader.read("opaque 8")
    assert reader.words()[:2] == (["opaque 0", "opaque 2"] if acks else ["opaque 2", "opaque 1"])
    node.set("a", b"v", vbucket=3)
    start = reader.read("checkpoint-start")
    assert start.extras == struct.pack(">HHBxxxII", 8, int(bool(acks)), 255, 0, 0)
    first = int.from_bytes(start.tap_value, "big")
    assert (start.tap_key, start.half, first > 0) == (b"checkpoint_start", 3, True)
    assert reader.read("mutation").tap_key == b"a"
    node.call(lambda inner: inner.buckets["default"].store.vbuckets[3].close_checkpoint())
    node.set("b", b"v", vbucket=3)
    end = reader.read("checkpoint-end")
    assert end.extras == struct.pack(">HHBxxxII", 0, int(bool(acks)), 255, 0, 0)
    assert (end.tap_key, int.from_bytes(end.tap_value, "big")) == (b"checkpoint_end", first)
    start = reader.read("checkpoint-start")
    assert int.from_bytes(start.tap_value, "big") == first + 1
    assert reader.read("mutation").tap_key == b"b"


def test_a_checkpoint_tells_the_highest_rev_of_a_deletion(node: RunningNode, reader: TapReader) -> None:
    """A document that comes back at the reader continues from that rev."""
    for number in range(3):
        node.set("gone", b"%d" % number, vbucket=3)
    node.delete("gone", vbucket=3)  # the fourth change
    reader.connect(b"node1", CHECKPOINT | LIST, vbucket_list(3))
    reader.read("opaque 8")
    node.set("a", b"v", vbucket=3)
    assert reader.read("checkpoint-start").private == (4).to_bytes(8, "big")


def test_a_closed_checkpoint_is_ended_without_a_further_change(node: RunningNode, reader: TapReader) -> None:
    reader.connect(b"node1", CHECKPOINT | LIST, vbucket_list(3))
    reader.read("opaque 8")
    node.set("a", b"v", vbucket=3)
    reader.read("mutation")
    node.call(lambda inner: inner.buckets["default"].store.vbuckets[3].close_checkpoint())
    node.set_vbucket_state(3, VBucketState.ACTIVE)  # no change, but it is looked at again
    reader.read("checkpoint-end")


def test_the_form_of_the_document_is_a_setting() -> None:
    settings = {"tap_seed_checkpoints": "true"}
    with tailrace.testing.node(vbuckets=64, settings=settings) as node, Peer(node) as peer:
        flags, value = CHECKPOINT | ACK | LIST | BACKFILL, FROM_NOW + vbucket_list(56)
        reader = TapReader(peer).connect(b"n", flags, value)
        reader.read("opaque 2")

        def prepare(inner: Node) -> None:
            vbucket = inner.buckets["default"].store.vbuckets[56]
            for _ in range(250):
                vbucket.set(b"\0k", b"v")
                vbucket.close_checkpoint()

        node.call(prepare)
        reader.read_until(lambda: reader.checkpoints.get(56) == 250)
        wanted = SEED["tap.checkpoint-end.corrected"]
        raw = reader.log[-1].raw
        assert (raw[:12], raw[16:]) == (wanted[:12], wanted[16:])  # all but its number in the stream
        starts = [packet for packet in reader.log if packet.opcode == 0x46]
        assert len(starts) == 250
        assert all((packet.extras_length, len(packet.body)) == (8, 16) for packet in starts)


def test_a_reader_resumes_after_its_last_closed_checkpoint(node: RunningNode) -> None:
    def close() -> None:
        node.call(lambda inner: inner.buckets["default"].store.vbuckets[3].close_checkpoint())

    with Peer(node) as peer:
        reader = TapReader(peer).connect(b"node1", CHECKPOINT | ACK | LIST, vbucket_list(3))
        reader.read("opaque 8")
        node.set("a", b"v", vbucket=3)
        reader.read("mutation")
        close()
        node.set("b", b"v", vbucket=3)
        reader.read("checkpoint-end")
        closed = reader.checkpoints[3]
    node.set("c", b"v", vbucket=3)
    with Peer(node) as peer:
        value = vbucket_list(3) + struct.pack(">HHQ", 1, 3, closed)
        reader = TapReader(peer).connect(b"node2", CHECKPOINT | ACK | LIST, value)
        reader.read_until(lambda: b"c" in reader.documents.get(3, {}))
        assert set(reader.documents[3]) == {b"b", b"c"}
        assert "opaque 1" not in reader.words()
    with Peer(node) as peer:  # a checkpoint that nobody has: from the beginning
        value = vbucket_list(3) + struct.pack(">HHQ", 1, 3, 10_000)
        reader = TapReader(peer).connect(b"node3", CHECKPOINT | ACK | LIST, value)
        reader.read("opaque 8")
        assert reader.documents[3] == documents_of(node, 3)
        assert "opaque 1" in reader.words()


# Names and coming back.


def test_a_kept_reader_goes_on_and_gets_again_what_it_did_not_acknowledge(strict: RunningNode) -> None:
    for number in range(20):
        strict.set(f"k{number}", b"v", vbucket=1)
    with Peer(strict) as peer:
        reader = TapReader(peer).connect(b"kept", ACK | LIST, vbucket_list(1))
        reader.read("opaque 1")
        reader.acks = False
        items = [reader.next() for _ in range(20)]
        reader.ack(items[11])
        assert peer.is_silent()
        last = reader.number
    until(lambda: not is_connected(strict, "kept"))
    strict.set("later", b"v", vbucket=1)
    with Peer(strict) as peer:
        again = TapReader(peer).connect(b"kept", ACK | LIST, vbucket_list(1))
        first = again.next()
        assert (first.code, first.opaque) == (0, last + 1)  # type: ignore[operator]
        again.read("opaque 8")
        assert "opaque 1" not in again.words()
        keys = [packet.tap_key for packet in again.log if packet.opcode == 0x41]
        assert keys[:8] == [f"k{number}".encode() for number in range(12, 20)]
        again.read_until(lambda: b"later" in again.documents[1])


def is_connected(node: RunningNode, name: str) -> bool:
    with Peer(node) as other:
        return other.stats("tap").get(f"eq_tapq:{name}:connected") == "true"


def test_without_keep_alive_a_reader_begins_again(node: RunningNode) -> None:
    fill(node, 5)
    for _ in range(2):
        with Peer(node) as peer:
            reader = TapReader(peer).connect(b"again", ACK)
            reader.read_until(lambda reader=reader: reader.words().count("opaque 8") == 16)
            assert reader.log[0].opaque == 1
            assert caught_up(reader, node)
        until(lambda: not is_connected(node, "again"))


def test_a_second_connection_takes_the_name(strict: RunningNode) -> None:
    for number in range(5):
        strict.set(f"k{number}", b"v", vbucket=1)
    with Peer(strict) as first, Peer(strict) as second:
        reader = TapReader(first).connect(b"one", ACK)
        reader.read_until(lambda: reader.words().count("opaque 8") == 4)
        again = TapReader(second).connect(b"one", ACK)
        again.next()
        assert first.is_closed()
        strict.set("new", b"v", vbucket=0)
        assert again.read("mutation").tap_key == b"new"
        assert again.words().count("mutation") == 1


def test_another_date_begins_again(strict: RunningNode) -> None:
    for number in range(5):
        strict.set(f"k{number}", b"v", vbucket=1)
    for date, expected in ((FROM_NOW, 0), (FROM_NOW, 0), (bytes(8), 5)):
        with Peer(strict) as peer:
            reader = TapReader(peer).connect(b"dated", ACK | BACKFILL | LIST, date + vbucket_list(1))
            reader.next()
            if expected:
                reader.read("opaque 8")
            assert reader.words().count("mutation") == expected
        until(lambda: not is_connected(strict, "dated"))


def test_anonymous_readers_do_not_disturb_each_other(node: RunningNode) -> None:
    fill(node, 3)
    with Peer(node) as first, Peer(node) as other:
        for peer in (first, other):
            reader = TapReader(peer).connect(b"", ACK)
            reader.read("opaque 8")
        names = {name.split(":")[1] for name in one_stats(node) if name.startswith("eq_tapq:")}
        assert names == {"anon_1", "anon_2"}


def one_stats(node: RunningNode) -> dict[str, str]:
    with Peer(node) as other:
        return other.stats("tap")


@pytest.mark.covers("tap.connect.flag.0x80")
def test_a_registered_reader_goes_on_even_after_a_restart(node: RunningNode) -> None:
    fill(node, 30)
    with Peer(node) as peer:
        reader = TapReader(peer).connect(b"reg", ACK | REGISTERED)
        reader.read_until(lambda: reader.words().count("opaque 8") == 16)
    until(lambda: not is_connected(node, "reg"))
    assert one_stats(node)["eq_tapq:reg:registered"] == "true"
    node.set("away", b"1")
    node.restart()
    node.set("back", b"2")
    with Peer(node) as peer:
        again = TapReader(peer).connect(b"reg", ACK | REGISTERED)
        again.read_until(lambda: again.words().count("mutation") == 2)
        assert {packet.tap_key for packet in again.log if packet.opcode == 0x41} == {b"away", b"back"}
        assert "opaque 1" not in again.words()


def test_a_registered_reader_is_told_to_empty_a_vbucket_also_after_a_restart(node: RunningNode) -> None:
    fill(node, 30)
    with Peer(node) as peer:
        reader = TapReader(peer).connect(b"reg", ACK | REGISTERED)
        reader.read_until(lambda: reader.words().count("opaque 8") == 16)
    until(lambda: not is_connected(node, "reg"))
    node.rewind(3, 0)
    with Peer(node) as peer:
        again = TapReader(peer)
        again.acks = False
        again.connect(b"reg", ACK | REGISTERED)
        assert again.read("opaque 1").half == 3
    until(lambda: not is_connected(node, "reg"))
    node.restart()
    with Peer(node) as peer:
        last = TapReader(peer).connect(b"reg", ACK | REGISTERED)
        last.documents = {number: dict(held) for number, held in reader.documents.items()}
        assert last.read("opaque 1").half == 3  # the first one may never have arrived
        last.read("opaque 8")
        assert without_empty(last.documents) == all_documents(node)


def test_readers_that_are_away_are_small() -> None:
    """A thousand of them, each with a place in all of 1,024 vbuckets, fit into a few dozen megabytes."""
    with tailrace.testing.node(vbuckets=1024) as node:
        for number in range(0, 1024, 3):
            node.set("k", b"v" * number, vbucket=number)
        for number in range(3):
            with Peer(node) as peer:
                reader = TapReader(peer).connect(b"r%d" % number, ACK | REGISTERED)
                for _ in range(400 * number + 1):
                    reader.next()
        until(lambda: not any(is_connected(node, f"r{number}") for number in range(3)))

        def sizes(inner: Node) -> list[int]:
            bucket = inner.buckets["default"]
            assert all(not client.cursors and client.kept is None for client in bucket.tap)
            return [len(json.dumps(stored)) for stored in bucket.store.cursors.values()]

        assert all(0 < size < 50_000 for size in node.call(sizes))
        assert one_stats(node)["eq_tapq:r0:vb_filters"] == "1024"
        with Peer(node) as peer:
            reader = TapReader(peer).connect(b"r2", ACK | REGISTERED)
            reader.read_until(lambda: reader.words().count("opaque 8") > 1000)


@pytest.mark.covers("tap.deregister")
@pytest.mark.parametrize("connected", [False, True])
def test_a_registered_reader_is_forgotten_when_it_says_so(node: RunningNode, connected: bool) -> None:
    fill(node, 5)
    with Peer(node) as other:
        with Peer(node) as peer:
            reader = TapReader(peer).connect(b"reg", ACK | REGISTERED)
            reader.read_until(lambda: reader.words().count("opaque 8") == 16)
            if connected:
                assert other.ask(packet(0x80, 0x9E, key=b"reg")).half == 0
                node.set("k", b"v")
                reader.read("mutation")
        until(lambda: not is_connected(node, "reg"))
        if not connected:
            answer = other.ask(packet(0x80, 0x9E, key=b"reg"))
            assert (answer.half, answer.body) == (0, b"")
    assert not [name for name in one_stats(node) if ":reg:" in name]
    with Peer(node) as peer:
        again = TapReader(peer).connect(b"reg", ACK)
        again.read_until(lambda: again.words().count("opaque 8") == 16)
        assert "opaque 1" in again.words()
        assert peer.ask(packet(0x80, 0x9E, key=b"nobody")).half == 0


@pytest.mark.covers("tap.opaque.3")
def test_a_reader_of_closed_checkpoints_is_told_when_it_has_them(
    node: RunningNode, reader: TapReader
) -> None:
    value = vbucket_list(3) + b"\x01"
    reader.connect(b"closed", ACK | REGISTERED | LIST | BACKFILL, FROM_NOW + value)
    reader.read("opaque 3")
    node.set("a", b"v", vbucket=3)
    node.set("b", b"v", vbucket=3)
    assert reader.peer.is_silent()
    node.call(lambda inner: inner.buckets["default"].store.vbuckets[3].close_checkpoint())
    node.set("c", b"v", vbucket=3)
    reader.read("opaque 3")
    assert set(reader.documents[3]) == {b"a", b"b"}


def test_a_registered_reader_costs_no_memory_and_begins_again_after_a_purge() -> None:
    settings: dict[str, str | int | float] = {"history_changes": 0, "memory_quota": "8m"}
    with tailrace.testing.node(vbuckets=2, settings=settings) as node:
        for number in range(10):
            node.set(f"k{number}", b"v", vbucket=1)
        with Peer(node) as peer:
            reader = TapReader(peer).connect(b"reg", ACK | REGISTERED)
            reader.read_until(lambda: reader.words().count("opaque 8") == 2)
        until(lambda: not is_connected(node, "reg"))
        for number in range(20):
            node.set(f"k{number % 10}", b"v" * 100_000, vbucket=1)
        node.delete("k1", vbucket=1)
        node.set("last", b"v", vbucket=1)
        node.call(lambda inner: inner.buckets["default"].store.compact(Compaction(drop_tombstones=True)))
        with Peer(node) as peer:
            again = TapReader(peer).connect(b"reg", ACK | REGISTERED)
            again.documents[1] = dict(reader.documents[1])
            again.read("opaque 8", 1)
            assert again.documents[1] == documents_of(node, 1)
            assert one_stats(node)["eq_tapq:reg:dropped_cursors"] == "1"


def test_there_is_a_limit_on_readers() -> None:
    with tailrace.testing.node(vbuckets=2, settings={"max_tap_clients": 2}) as node:
        for name in (b"a", b"b"):
            with Peer(node) as peer:
                TapReader(peer).connect(name, ACK | REGISTERED).next()
            until(lambda name=name: not is_connected(node, name.decode()))
        with Peer(node) as peer:
            assert peer.ask(tap_connect(b"c", ACK)).half == 0x83
            assert peer.is_closed()
        with Peer(node) as peer:  # those that are known come back
            TapReader(peer).connect(b"a", ACK | REGISTERED).next()


# What happens to the data.


@pytest.mark.covers("tap.flush")
def test_flush_is_one_message(node: RunningNode, reader: TapReader) -> None:
    fill(node)
    reader.connect(b"node1", ACK)
    reader.read_until(lambda: reader.words().count("opaque 8") == 16)
    with Peer(node) as other:
        assert other.ask(packet(0x80, 0x08)).half == 0
    node.set("new", b"v", vbucket=1)
    reader.read("mutation")
    assert without_empty(reader.documents) == all_documents(node)
    assert reader.words()[-2:] == ["flush", "mutation"]
    assert reader.words().count("flush") == 1


def test_a_dump_hears_of_no_flush(node: RunningNode, reader: TapReader) -> None:
    for number in range(200):
        node.set(f"k{number}", b"v" * 100_000, vbucket=1)
    with Peer(node, receive_buffer=4096) as peer:
        reader = TapReader(peer).connect(b"d", DUMP | LIST, vbucket_list(1))
        reader.read("mutation")
        node.flush()
        reader.read_all()
        assert "flush" not in reader.words()


def test_a_flush_while_away_is_told_on_return(strict: RunningNode) -> None:
    strict.set("k", b"v", vbucket=1)
    with Peer(strict) as peer:
        reader = TapReader(peer).connect(b"kept", ACK)
        reader.read_until(lambda: reader.words().count("opaque 8") == 4)
    until(lambda: not is_connected(strict, "kept"))
    strict.flush()
    strict.set("l", b"v", vbucket=1)
    with Peer(strict) as peer:
        again = TapReader(peer, documents=reader.documents).connect(b"kept", ACK)
        again.read("mutation")
        assert without_empty(again.documents) == all_documents(strict)
        assert again.words().count("flush") == 1


def test_a_rewound_vbucket_is_sent_again_from_the_beginning(node: RunningNode, reader: TapReader) -> None:
    fill(node, 100)
    reader.connect(b"node1", ACK)
    reader.read_until(lambda: reader.words().count("opaque 8") == 16)
    node.rewind(5, 2)
    node.set("after", b"v", vbucket=5)
    reader.read_until(lambda: caught_up(reader, node))
    after = reader.words()[reader.words().index("opaque 8") :]
    assert after.count("opaque 1") == 1 and "flush" not in after


def test_an_expired_document_is_sent_as_a_delete(node: RunningNode, reader: TapReader) -> None:
    node.set("gone", b"v", expiry=int(time.time()) - 10, vbucket=2)
    node.set("stays", b"v", expiry=int(time.time()) + 1000, vbucket=2)
    reader.connect(b"node1", LIST, vbucket_list(2))
    reader.read("opaque 8")
    (deletion,) = [packet for packet in reader.log if packet.opcode == 0x42]
    assert deletion.tap_key == b"gone" and deletion.private == (2).to_bytes(8, "big")
    assert set(reader.documents[2]) == {b"stays"}
    assert node.get("gone", vbucket=2) is None  # now it really expires
    deletion = reader.read("delete")
    assert (deletion.tap_key, deletion.private) == (b"gone", (2).to_bytes(8, "big"))


def test_a_vbucket_that_becomes_active_joins_in(node: RunningNode, reader: TapReader) -> None:
    node.set_vbucket_state(4, VBucketState.REPLICA)
    fill(node, 100)
    reader.connect(b"node1", ACK)
    reader.read_until(lambda: reader.words().count("opaque 8") == 15)
    node.set_vbucket_state(4, VBucketState.ACTIVE)
    reader.read("opaque 8", 4)
    assert caught_up(reader, node)


def test_a_replica_is_served_when_it_is_listed(node: RunningNode, reader: TapReader) -> None:
    fill(node, 100)
    node.set_vbucket_state(4, VBucketState.REPLICA)
    reader.connect(b"node1", DUMP | LIST, vbucket_list(4))
    reader.read_all()
    assert reader.documents[4] == documents_of(node, 4)


def test_values_and_datatypes(node: RunningNode) -> None:
    from tailrace.snappy import deflate
    from tailrace.wire.fields import join_xattrs

    body = b'{"a": "' + b"x" * 500 + b'"}'
    both = join_xattrs({"_s": b"1"}, body)

    def write(inner: Node) -> None:
        vbucket = inner.buckets["default"].store.vbuckets[0]
        vbucket.set(b"\0json", body, 0, 0, 1)
        vbucket.set(b"\0snappy", deflate(body), 0, 0, 3)
        vbucket.set(b"\0xattr", both, 0, 0, 5)
        vbucket.set(b"\x08other", b"not for old readers")

    node.call(write)

    def dump(*features: int) -> dict[bytes, Any]:
        with Peer(node) as peer:
            if features:
                value = struct.pack(f">{len(features)}H", *features)
                assert peer.ask(packet(0x80, 0x1F, key=b"t", value=value)).half == 0
            reader = TapReader(peer).connect(b"", DUMP)
            reader.read_all()
            items = [packet for packet in reader.log if packet.opcode == 0x41]
            return {packet.tap_key: (packet.tap_value, packet.byte_5) for packet in items}

    assert dump() == dict.fromkeys((b"json", b"snappy", b"xattr"), (body, 0))
    assert dump(0x0B) == dict.fromkeys((b"json", b"snappy", b"xattr"), (body, 1))
    assert dump(0x0B, 0x0A, 0x06) == {b"json": (body, 1), b"snappy": (deflate(body), 3), b"xattr": (both, 5)}


# Another filter.


@pytest.mark.covers("tap.change-vb-filter", "tap.opaque.4")
def test_the_list_of_vbuckets_can_be_changed(node: RunningNode, reader: TapReader) -> None:
    fill(node, 200)
    reader.connect(b"node1", ACK | LIST, vbucket_list(1, 2))
    reader.read_until(lambda: reader.words().count("opaque 8") == 2)
    with Peer(node) as other:

        def change(name: bytes, *pairs: tuple[int, int], count: int | None = None) -> int:
            value = struct.pack(">H", len(pairs) if count is None else count)
            value += b"".join(struct.pack(">HQ", *pair) for pair in pairs)
            return other.ask(packet(0x80, 0xB0, key=name, value=value)).half

        assert change(b"node1", (2, 0), (3, 10_000)) == 0
        reader.read("opaque 4")
        reader.read("opaque 8", 3)
        assert reader.documents[3] == documents_of(node, 3)
        node.set("one", b"v", vbucket=1)
        node.set("two", b"v", vbucket=2)
        assert reader.read("mutation").tap_key == b"two"
        assert reader.words().count("opaque 1") == 3  # vbucket 2 went on where it was
        assert change(b"nobody", (2, 0)) == 0x04
        assert change(b"node1") == 0x04
        assert change(b"node1", (2, 0), count=2) == 0x04


def test_a_vbucket_that_is_no_longer_listed_loses_its_turn(strict: RunningNode) -> None:
    """Two vbuckets wait for the window to open; one of them is no longer wanted when it does."""
    for vbucket in (1, 2):
        strict.set_many({f"k{number}": b"v" for number in range(100)}, vbucket=vbucket)
    with Peer(strict) as peer, Peer(strict) as other:
        reader = TapReader(peer).connect(b"w", ACK | LIST, vbucket_list(1, 2))
        reader.read("opaque 1", 2)
        reader.acks = False
        last = [reader.next() for _ in range(30)][-1]
        assert peer.is_silent()
        gone, kept = (1, 2) if last.half == 1 else (2, 1)
        value = struct.pack(">HHQ", 1, kept, 0)
        assert other.ask(packet(0x80, 0xB0, key=b"w", value=value)).half == 0
        had = dict(reader.documents[gone])
        reader.acks = True
        reader.ack(last)
        reader.read("opaque 8", kept)
        assert reader.documents[kept] == documents_of(strict, kept)
        strict.set("later", b"v", vbucket=gone)
        strict.set("later", b"v", vbucket=kept)
        assert reader.read("mutation").half == kept
        assert reader.documents[gone] == had


# Refused.


def test_connects_that_are_refused(node: RunningNode) -> None:
    for flags, value, status in (
        (BACKFILL, b"1234567", None),
        (LIST, b"\x00", 0x83),
        (LIST, b"\x00\x02\x00\x01", 0x83),
        (CHECKPOINT, b"\x00\x01\x00\x01", 0x83),
        (CHECKPOINT, b"\x00", 0x83),
    ):
        with Peer(node) as peer:
            peer.send(tap_connect(b"n", flags, value, opaque=77))
            if status is not None:
                answer = peer.next()
                assert (answer.magic, answer.opcode, answer.half, answer.opaque) == (0x81, 0x40, status, 77)
            assert peer.is_closed()
    with Peer(node) as peer:
        assert peer.ask(tap_connect(b"n" * 201, 0)).half == 0x04
        assert peer.is_closed()


def test_without_the_default_collection_there_is_no_tap(node: RunningNode) -> None:
    with Peer(node) as peer:
        manifest = b'{"uid":"1","scopes":[{"name":"_default","uid":"0","collections":[]}]}'
        assert peer.ask(packet(0x80, 0xB9, value=manifest)).half == 0
        assert peer.ask(tap_connect(b"n", 0)).half == 0x83
        assert peer.is_closed()


def test_a_producer_connection_takes_no_pushes_and_no_second_connect(node: RunningNode) -> None:
    for second in (SEED["tap.mutation"], SEED["tap.connect"], SEED["tap.flush"]):
        with Peer(node) as peer:
            peer.send(tap_connect(b"n", BACKFILL, FROM_NOW))
            assert peer.is_silent()
            assert peer.ask(second).half == 0x04
            assert peer.is_closed()


def test_key_value_commands_go_on_beside_the_stream(node: RunningNode, reader: TapReader) -> None:
    reader.connect(b"node1", BACKFILL, FROM_NOW)
    answer = reader.peer.ask(packet(0x80, 0x01, bytes(8), b"k", b"v", half=1))
    assert (answer.magic, answer.half) == (0x81, 0)
    assert reader.next().tap_key == b"k"


@pytest.mark.parametrize(
    "name",
    [name for name in SEED if name.startswith("tap.connect")],
    ids=lambda name: name.removeprefix("tap."),
)
def test_the_connects_of_the_document_are_accepted(node: RunningNode, name: str) -> None:
    fill(node, 60)
    with Peer(node) as peer:
        reader = TapReader(peer)
        flags = int.from_bytes(SEED[name][24:28], "big")
        reader.supports_ack = bool(flags & ACK)
        peer.send(SEED[name])
        if name == "tap.connect.backfill":
            assert peer.is_silent()
            node.set("new", b"v")
        if flags & (DUMP | TAKEOVER):
            reader.read_all()
        else:
            reader.read("mutation")
        figures = one_stats(node)
        if not flags & (DUMP | TAKEOVER):
            assert figures["eq_tapq:node1:flags"] == str(flags)
            assert figures["eq_tapq:node1:connected"] == "true"


# A reader that does not read.


def test_a_stalled_reader_costs_only_its_position() -> None:
    with tailrace.testing.node(vbuckets=2, settings={"slow_backfill_timeout": 0.05}) as node:
        for number in range(300):
            node.set(f"k{number}", b"v" * 100_000, vbucket=1)
        with Peer(node, receive_buffer=4096) as peer:
            reader = TapReader(peer).connect(b"slow", 0)

            def work(inner: Node) -> Any:
                (session,) = [session for session in inner.sessions if session.handler is not None]
                return session.handler._work

            until(lambda: int(one_stats(node).get("eq_tapq:slow:items", 0)) > 0)
            until(lambda: node.call(work) is None, "the snapshot was let go of")
            assert int(one_stats(node)["eq_tapq:slow:sent_bytes"]) < 12 << 20
            reader.read("opaque 8", 1)
            assert caught_up(reader, node)


def test_ten_thousand_documents_of_many_sizes(node: RunningNode, reader: TapReader) -> None:
    def write(inner: Node) -> None:
        vbuckets = inner.buckets["default"].store.vbuckets
        for number in range(10_000):
            vbuckets[number % 16].set(b"\0k%d" % number, b"v" * (number % 300), number, 0, 0)

    node.call(write)
    reader.connect(b"many", ACK)
    for _ in range(16):
        reader.read("opaque 8")
    assert without_empty(reader.documents) == all_documents(node)


@pytest.mark.parametrize("flags", [DUMP, DUMP | ACK])
def test_what_is_not_for_old_readers_is_passed_over(node: RunningNode, reader: TapReader, flags: int) -> None:
    write_for_newer_readers(node)
    reader.connect(b"node1", flags | LIST, vbucket_list(1))
    reader.read_all()
    assert set(reader.documents[1]) == {b"mine"}
    assert reader.words().count("mutation") == 1
