"""The node as TAP replica over real sockets: a peer pushes, in the document's own packets and in others."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

import tailrace.testing
from dialects.raw_peer import (
    BACKFILL,
    FROM_NOW,
    Packet,
    Peer,
    TapReader,
    delete,
    mutation,
    packet,
    tap_connect,
    tap_push,
)
from dialects.stored import all_documents, documents_of
from tailrace.model import MAX_CAS, MAX_REV
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState
from vectors.corpus import vectors

SEED = {vector.id: vector.data for vector in vectors("seed_tap")}
BUILT = {vector.id: vector.data for vector in vectors("built") if vector.dialect == "tap"}


@pytest.fixture
def peer(node: RunningNode) -> Iterator[Peer]:
    with Peer(node) as peer:
        yield peer


def is_ok(answer: Packet, opaque: int = 1) -> bool:
    return (answer.magic, answer.half, answer.opaque, answer.body) == (0x81, 0, opaque, b"")


def state_of(node: RunningNode, number: int) -> int | None:
    return node.call(lambda inner: getattr(inner.buckets["default"].store.vbuckets[number], "state", None))


# Documents.


def test_a_mutation_is_stored_with_its_metadata(node: RunningNode, peer: Peer) -> None:
    later = int(time.time()) + 5000
    sent = mutation(b"k", b'{"a":1}', 7, 0x1234, vbucket=5, item=(0xAABB, later))
    assert is_ok(peer.ask(sent))
    assert documents_of(node, 5) == {b"k": (b'{"a":1}', 0x1234, 7, 0xAABB, later)}
    assert node.get("k", vbucket=5) == {"a": 1}  # its datatype was found out


def test_no_answer_without_the_flag(node: RunningNode, peer: Peer) -> None:
    peer.send(mutation(b"k", b"v", 1, 5, flags=0))
    peer.send(tap_push(0x44, 0, private=(2).to_bytes(4, "big"), flags=0))
    assert peer.is_silent()
    assert node.get("k", vbucket=0) == b"v"


def test_versions_are_resolved_and_losing_is_no_failure(node: RunningNode, peer: Peer) -> None:
    for rev, cas, value in ((5, 50, b"new"), (4, 99, b"old"), (5, 49, b"older"), (5, 50, b"same")):
        assert is_ok(peer.ask(mutation(b"k", value, rev, cas)))
    assert documents_of(node, 0)[b"k"][:3] == (b"new", 50, 5)
    assert is_ok(peer.ask(delete(b"k", 5, 50)))  # the same version does not delete
    assert node.get("k", vbucket=0) == b"new"
    assert is_ok(peer.ask(delete(b"k", 6, 60)))
    assert documents_of(node, 0, deletions=True) == {b"k": (60, 6)}
    assert is_ok(peer.ask(mutation(b"k", b"late", 5, 70)))
    assert node.get("k", vbucket=0) is None
    with Peer(node) as other:
        stats = other.stats("tap")
    (name,) = [name for name in stats if name.endswith(":num_outdated")]
    assert stats[name] == "5"


def test_messages_from_before_there_were_revs(node: RunningNode, peer: Peer) -> None:
    node.set("mykey", b"here", vbucket=0x66 % 16)
    vbucket = 0x66 % 16
    assert is_ok(peer.ask(tap_push(0x41, vbucket, b"mykey", b"value", item=(1, 0), cas=3)))
    assert documents_of(node, vbucket)[b"mykey"] == (b"value", 3, 2, 1, 0)
    assert is_ok(peer.ask(tap_push(0x42, vbucket, b"mykey")))
    assert node.get("mykey", vbucket=vbucket) is None
    assert documents_of(node, vbucket, deletions=True)[b"mykey"][1] == 3
    assert is_ok(peer.ask(tap_push(0x42, vbucket, b"never")))  # what is not there counts as deleted
    assert b"never" not in documents_of(node, vbucket, deletions=True)


def test_a_delete_without_a_cas_gets_one(node: RunningNode, peer: Peer) -> None:
    node.set("k", b"v", vbucket=0)
    assert is_ok(peer.ask(delete(b"k", 9, 0)))
    ((cas, rev),) = documents_of(node, 0, deletions=True).values()
    assert cas > 0 and rev == 9


@pytest.mark.parametrize("length", [8, 9, 12])
def test_metadata_of_any_length(node: RunningNode, peer: Peer, length: int) -> None:
    private = struct.pack(">Q", 33) + bytes(range(2, 2 + length - 8))
    assert is_ok(peer.ask(tap_push(0x41, 0, b"k", b"v", private, (0, 0), cas=4)))
    assert documents_of(node, 0)[b"k"][:3] == (b"v", 4, 33)


@pytest.mark.covers("tap.ttl")
def test_ttl_0_is_refused_and_not_applied(node: RunningNode, peer: Peer) -> None:
    node.set("there", b"v", vbucket=0)
    for sent in (
        mutation(b"k", b"v", 1, 5, ttl=0, flags=0),
        delete(b"there", 9, 9, ttl=0),
        tap_push(0x43, 0, ttl=0),
        tap_push(0x45, 0, private=(4).to_bytes(4, "big"), ttl=0),
    ):
        assert peer.ask(sent).half == 0x04
    assert documents_of(node, 0).keys() == {b"there"}
    assert state_of(node, 0) == VBucketState.ACTIVE


def test_a_vbucket_that_is_not_here(node: RunningNode, peer: Peer) -> None:
    node.set_vbucket_state(3, VBucketState.DEAD)
    for number in (3, 16, 9999):
        assert peer.ask(mutation(b"k", b"v", 1, 5, vbucket=number, flags=0)).half == 0x07
        assert peer.ask(delete(b"k", 1, 5, vbucket=number)).half == 0x07
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5)))


@pytest.mark.parametrize("state", [VBucketState.REPLICA, VBucketState.PENDING, VBucketState.ACTIVE])
def test_changes_are_taken_in_every_state_but_dead(
    node: RunningNode, peer: Peer, state: VBucketState
) -> None:
    node.set_vbucket_state(2, state)
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5, vbucket=2)))
    assert documents_of(node, 2).keys() == {b"k"}


def test_what_can_not_be_stored(node: RunningNode, peer: Peer) -> None:
    assert peer.ask(tap_push(0x41, 0, b"k", b"", bytes(9), (0, 0), flags=3)).half == 0x04  # keys only
    assert peer.ask(mutation(b"k" * 251, b"v", 1, 5)).half == 0x04
    assert peer.ask(mutation(b"k", b"v", 1, 5, datatype=1)).half == 0x04  # never negotiated
    assert peer.ask(tap_push(0x41, 0, b"", b"v", bytes(9), (0, 0))).half == 0x04
    assert peer.ask(tap_push(0x42, 0, b"k", b"value")).half == 0x04
    assert documents_of(node, 0, deletions=True) == {}
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5)))  # the connection lives on


@pytest.mark.parametrize("make", [lambda rev, cas: mutation(b"k", b"v", rev, cas), partial(delete, b"k")])
def test_numbers_that_are_too_high_are_refused_when_they_come(
    node: RunningNode, peer: Peer, make: Callable[[int, int], bytes]
) -> None:
    for rev, cas in ((MAX_REV + 1, 5), (5, MAX_CAS + 1), ((1 << 64) - 1, (1 << 64) - 1)):
        assert peer.ask(make(rev, cas)).half == 0x04
    assert documents_of(node, 0, deletions=True) == {}
    everything = 0xFFFF_FFFF  # of flags and expiry
    assert is_ok(peer.ask(mutation(b"k", b"v", MAX_REV, MAX_CAS, item=(everything, everything))))
    node.set("k", b"new", vbucket=0)
    node.persist()


def test_a_locked_document_asks_for_time(node: RunningNode, peer: Peer) -> None:
    node.set("k", b"v", vbucket=0)
    assert peer.ask(packet(0x80, 0x94, struct.pack(">I", 15), b"k")).half == 0
    assert peer.ask(mutation(b"k", b"w", 9, 9)).half == 0x86


def test_back_pressure_when_the_disk_is_behind() -> None:
    with tailrace.testing.node(vbuckets=2, settings={"memory_quota": "1m"}) as node, Peer(node) as peer:
        node.stop_persistence()
        statuses = [
            peer.ask(mutation(b"k%d" % number, b"v" * 200_000, 1, 5 + number)).half for number in range(12)
        ]
        assert statuses[0] == 0 and statuses[-1] == 0x86
        node.start_persistence()


# Control messages.


@pytest.mark.covers("tap.opaque.0", "tap.opaque.1", "tap.opaque.2", "tap.opaque.3", "tap.opaque.4")
@pytest.mark.covers("tap.opaque.5", "tap.opaque.6", "tap.opaque.7", "tap.opaque.8")
@pytest.mark.parametrize("code", [*range(9), 0xFFFF_FFFF])
def test_every_control_code_is_taken(node: RunningNode, peer: Peer, code: int) -> None:
    node.set("k", b"v", vbucket=1)
    sent = tap_push(0x44, 1, private=code.to_bytes(4, "big"), opaque=57)
    assert is_ok(peer.ask(sent), 57)
    assert node.get("k", vbucket=1) == b"v"  # an active vbucket is not emptied by a peer


@pytest.mark.parametrize("state", [VBucketState.REPLICA, VBucketState.PENDING])
def test_a_new_beginning_empties_a_vbucket_that_is_not_active(
    node: RunningNode, peer: Peer, state: VBucketState
) -> None:
    node.set("k", b"v", vbucket=1)
    node.set("other", b"v", vbucket=2)
    node.set_vbucket_state(1, state)
    before = node.failover_log(1)[0]
    peer.send(tap_push(0x44, 1, private=(1).to_bytes(4, "big"), opaque=1))
    peer.send(mutation(b"new", b"v", 1, 5, vbucket=1, opaque=2))  # waits for it
    assert [peer.next().opaque for _ in range(2)] == [1, 2]
    assert documents_of(node, 1).keys() == {b"new"}
    assert documents_of(node, 2).keys() == {b"other"}
    assert node.failover_log(1)[0] != before


@pytest.mark.parametrize("private", [b"", b"\0", b"\0" * 5])
def test_control_messages_of_other_shapes_are_ignored(node: RunningNode, peer: Peer, private: bytes) -> None:
    assert is_ok(peer.ask(tap_push(0x44, 1, private=private)))
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5)))


@pytest.mark.covers("tap.vbucket-set")
@pytest.mark.parametrize("state", [1, 2, 3, 4])
def test_the_state_of_a_vbucket_is_set(node: RunningNode, peer: Peer, state: VBucketState) -> None:
    with Peer(node) as other:
        assert other.ask(packet(0x80, 0x3D, b"\4", half=5)).half == 0  # dead first
        assert other.ask(packet(0x80, 0x3F, half=5)).half == 0  # and gone
    assert state_of(node, 5) is None
    log_before = None if state != 1 else node.failover_log(6)
    for number in (5, 6):
        assert is_ok(peer.ask(tap_push(0x45, number, private=state.to_bytes(4, "big"))))
        assert state_of(node, number) == state
    if log_before is not None:
        assert node.failover_log(6) == log_before  # it was active already
    # the drawing has the state, its breakdown says that there is none (T4): both are understood
    assert is_ok(peer.ask(tap_push(0x45, 5, value=(2).to_bytes(4, "big"))))
    assert state_of(node, 5) == VBucketState.REPLICA


def test_a_state_is_on_disk_when_it_is_answered(node: RunningNode, peer: Peer) -> None:
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5, vbucket=3)))
    assert is_ok(peer.ask(tap_push(0x45, 3, private=(3).to_bytes(4, "big"))))
    node.kill()
    node.start()
    assert state_of(node, 3) == VBucketState.PENDING
    assert documents_of(node, 3).keys() == {b"k"}


@pytest.mark.parametrize(
    "sent",
    [
        tap_push(0x45, 1, private=(5).to_bytes(4, "big")),
        tap_push(0x45, 1, private=(0).to_bytes(4, "big")),
        tap_push(0x45, 1, private=b"\0\0\1"),
        tap_push(0x45, 1),
        tap_push(0x46, 1, private=b"\0" * 7),
        tap_push(0x47, 1),
        tap_push(0x47, 1, b"checkpoint_end", b"1234567", item=(0, 0)),
    ],
)
def test_states_and_checkpoints_that_make_no_sense_end_the_connection(
    node: RunningNode, peer: Peer, sent: bytes
) -> None:
    assert peer.ask(sent).half == 0x04
    assert peer.is_closed()
    assert state_of(node, 1) == VBucketState.ACTIVE


@pytest.mark.covers("tap.checkpoint-start", "tap.checkpoint-end")
def test_checkpoints_in_both_layouts(node: RunningNode, peer: Peer) -> None:
    node.set_vbucket_state(8, VBucketState.REPLICA)
    number = (255).to_bytes(8, "big")
    forms = [
        tap_push(0x46, 8, private=number),
        tap_push(0x47, 8, private=number),
        tap_push(0x46, 8, b"checkpoint_start", number, bytes(8), (0, 0)),
        tap_push(0x47, 8, b"checkpoint_end", number, item=(0, 0)),
    ]
    # the document's private length of 4 and of 0 before an id of 8 bytes
    for length in (4, 0):
        made = bytearray(forms[0])
        made[24:26] = length.to_bytes(2, "big")
        forms.append(bytes(made))
    for sent in forms:
        assert is_ok(peer.ask(sent))

    def checkpoint_id() -> int:
        return node.call(lambda inner: inner.buckets["default"].store.vbuckets[8].checkpoint_id)

    before = checkpoint_id()
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5, vbucket=8)))
    assert is_ok(peer.ask(forms[3]))
    assert checkpoint_id() == before + 1
    node.set_vbucket_state(8, VBucketState.ACTIVE)
    before = checkpoint_id()
    assert is_ok(peer.ask(mutation(b"l", b"v", 1, 5, vbucket=8)))
    assert is_ok(peer.ask(forms[3]))
    assert checkpoint_id() == before  # an active one has its own


@pytest.mark.covers("tap.flush")
def test_flush_drops_everything(node: RunningNode, peer: Peer) -> None:
    for number in range(50):
        node.set(f"k{number}", b"v")
    node.set_vbucket_state(1, VBucketState.REPLICA)
    peer.send(tap_push(0x43, 0, opaque=1))
    peer.send(mutation(b"after", b"v", 1, 5, vbucket=2, opaque=2))
    assert is_ok(peer.next(), 1) and is_ok(peer.next(), 2)
    assert all_documents(node) == {2: documents_of(node, 2)}
    assert documents_of(node, 2).keys() == {b"after"}


# The document's packets, as drawn there.


def test_the_packets_of_the_document() -> None:
    with tailrace.testing.node(vbuckets=1024) as node, Peer(node) as peer:
        peer.send(SEED["tap.mutation"])  # no ack flag, so no answer
        assert peer.is_silent()
        assert documents_of(node, 0x66) == {b"mykey": (b"value", 3, 1, 0, 0)}
        peer.send(SEED["tap.delete"])
        assert peer.is_silent()
        assert documents_of(node, 0x66) == {}
        node.set("k", b"v", vbucket=9)
        peer.send(SEED["tap.flush"])
        assert is_ok(peer.ask(SEED["tap.vbucket-set"]), 0x39)
        assert all_documents(node) == {}
        assert state_of(node, 0x38) == VBucketState.PENDING
        peer.send(SEED["tap.opaque"])
        assert is_ok(peer.ask(SEED["tap.checkpoint-start.corrected"]), 0x39)
        assert is_ok(peer.ask(SEED["tap.checkpoint-end.corrected"]), 0x39)
        assert is_ok(peer.ask(BUILT["tap.checkpoint-start.real"]), 57)
        assert is_ok(peer.ask(BUILT["tap.checkpoint-end.real"]), 58)
        assert is_ok(peer.ask(BUILT["tap.mutation.meta-9"]), 1000)
        assert documents_of(node, 5) == {b"k": (b"v", 3, 7, 0, 0)}
        peer.send(BUILT["tap.delete.meta-8"])
        assert peer.is_silent()
        assert documents_of(node, 5, deletions=True) == {b"k": (4, 8)}


# What does not belong here.


def test_a_consumer_connection_stays_one(node: RunningNode, peer: Peer) -> None:
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5)))
    answer = peer.ask(tap_connect(b"n", BACKFILL, FROM_NOW))
    assert answer.half == 0x04
    assert peer.is_closed()


def test_a_consumer_is_never_answered(node: RunningNode, peer: Peer) -> None:
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5)))
    peer.send(packet(0x81, 0x41, opaque=1))
    assert peer.is_closed()


def test_extras_that_no_message_has_bind_nothing(node: RunningNode, peer: Peer) -> None:
    for opcode in range(0x40, 0x48):
        assert peer.ask(packet(0x80, opcode, bytes(5), b"k")).half == 0x04
    assert is_ok(peer.ask(mutation(b"k", b"v", 1, 5)))


@pytest.mark.parametrize("opcode", range(0x41, 0x48))
def test_lengths_that_lie(node: RunningNode, peer: Peer, opcode: int) -> None:
    """An engine-private length beyond the body is answered or ends the connection; the node lives on."""
    extras = struct.pack(">HHB3x", 0xFFFF, 1, 255) + (bytes(8) if opcode in (0x41,) else b"")
    peer.send(packet(0x80, opcode, extras, b"k" if opcode in (0x41, 0x42) else b""))
    answer = peer.receive()
    assert answer is None or answer.half in (0, 0x04)
    with Peer(node) as other:
        assert is_ok(other.ask(mutation(b"k", b"v", 1, 5)))


# The TTL goes down from hop to hop.


@pytest.mark.covers("tap.ttl")
def test_what_came_by_tap_goes_on_with_a_lower_ttl(node: RunningNode, peer: Peer) -> None:
    with Peer(node) as other:
        reader = TapReader(other, check_ttl=False).connect(b"next", BACKFILL, FROM_NOW)
        assert other.is_silent()
        assert is_ok(peer.ask(mutation(b"far", b"v", 1, 5, ttl=255, vbucket=2)))
        assert is_ok(peer.ask(mutation(b"near", b"v", 1, 5, ttl=2, vbucket=2)))
        assert is_ok(peer.ask(mutation(b"here", b"v", 1, 5, ttl=1, vbucket=2)))  # goes no further
        node.set("own", b"v", vbucket=2)
        assert is_ok(peer.ask(delete(b"far", 2, 6, ttl=9, vbucket=2)))
        reader.read_until(lambda: reader.words()[-1:] == ["delete"])
        ttls = [(packet.tap_key, packet.ttl) for packet in reader.log if packet.opcode in (0x41, 0x42)]
        # one that was overwritten before it was sent may be left out
        assert ttls[-3:] == [(b"near", 1), (b"own", 255), (b"far", 8)]
        assert set(ttls[:-3]) <= {(b"far", 254)}
        assert documents_of(node, 2).keys() == {b"near", b"here", b"own"}


def test_a_flush_goes_on_with_a_lower_ttl_until_nothing_is_left(node: RunningNode, peer: Peer) -> None:
    node.set("k", b"v", vbucket=2)
    with Peer(node) as other:
        reader = TapReader(other, check_ttl=False).connect(b"next", BACKFILL, FROM_NOW)
        assert other.is_silent()
        assert is_ok(peer.ask(tap_push(0x43, 0, ttl=7)))
        assert reader.read("flush").ttl == 6
        assert is_ok(peer.ask(tap_push(0x43, 0, ttl=7)))  # already empty: nothing to do or to pass on
        node.set("k", b"v", vbucket=2)
        assert TapReader.next(reader).opcode == 0x41
        assert is_ok(peer.ask(tap_push(0x43, 0, ttl=1)))  # goes no further than here
        node.set("l", b"v", vbucket=2)
        assert reader.read("mutation").tap_key == b"l"
        assert reader.words().count("flush") == 1
