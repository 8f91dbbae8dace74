"""A replica by UPR without sockets.

Two nodes and the bytes between them, in any pieces, with everything that may happen to either; and a producer
that says anything.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailrace.clock import ManualClock
from tailrace.files import MemoryFiles
from tailrace.protocol.upr import translation
from tailrace.server.node import Node
from tailrace.server.session import Session
from tailrace.server.upstream import ReplicationSource, Upstream
from tailrace.store.engine import Engine
from tailrace.store.vbucket import EngineVBucket
from tailrace.wire.codes import VBucketState

DRAFTS = ("upr-a", "upr-b")
VBUCKETS = 2


@pytest.fixture(autouse=True)
def _little_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "HELD_BYTES", 200)


def documents(vbucket: EngineVBucket) -> dict[int, Any]:
    """Key to value, CAS and rev of what exists."""
    frames = {}
    for at in range(10):
        frame = vbucket.get(b"\0k%d" % at)
        if frame is not None:
            start = 24 + frame[4] + int.from_bytes(frame[2:4], "big")
            frames[at] = frame[start:], frame[16:24], frame[32:40]
    return frames


def branch_at_its_end(vbucket: EngineVBucket) -> int:
    """A replica that lags knows of branches that begin above its own seqno."""
    log, end = vbucket.failover_log.entries, vbucket.high_seqno
    return next(entry.vb_uuid for entry in log if entry.seqno <= end)


class Machine:
    """A node without sockets."""

    def __init__(self, clock: ManualClock) -> None:
        self.engine = Engine(files=MemoryFiles(), clock=clock)
        self.bucket = self.engine.create_bucket("default", VBUCKETS)
        self.node = Node(self.engine, clock=clock)


class Pair:
    """An active and its replica; bytes go from one to the other when they are told to."""

    def __init__(self, draft: str) -> None:
        self.clock = ManualClock()
        self.active, self.replica = Machine(self.clock), Machine(self.clock)
        self.replica.node.dial = self._dial
        for number in range(VBUCKETS):
            self.replica.bucket.set_state(number, VBucketState.REPLICA)
        self.link: Upstream | None = None
        self.session: Session | None = None
        self.to_active, self.to_replica = bytearray(), bytearray()
        self.orders = dict.fromkeys(range(VBUCKETS), (ReplicationSource("active", 1, dialect=draft), 0))
        self.seen: dict[tuple[int, int, int], Any] = {}
        """The documents of each state that the active had, by vbucket, branch and seqno."""
        self.order()
        self.connect()

    def order(self) -> None:
        self.replica.node.replication["default"].order(self.orders, self.clock.monotonic())

    def _dial(self, link: Upstream) -> None:
        self.cut()
        self.link = link
        self.session = self.active.node.accept("replica", self.clock.monotonic())

    def connect(self) -> None:
        """Reconnect, and wait until the handshake is over."""
        for _ in range(10):
            if self.link is not None and self.link.handler is not None:
                return
            self.clock.advance(1.0)
            self.replica.node.handle_timer(self.clock.monotonic())
            self.carry(4096)
        raise AssertionError("there is no connection")

    def cut(self) -> None:
        if self.link is not None:
            link, session, self.link, self.session = self.link, self.session, None, None
            session.connection_lost()
            link.connection_lost()
        self.to_active.clear()
        self.to_replica.clear()

    def note(self) -> None:
        """Remember which states the active has."""
        for vbucket in self.active.bucket:
            self.seen[vbucket.id, vbucket.uuid, vbucket.high_seqno] = documents(vbucket)

    def carry(self, size: int) -> bool:
        """Let up to this many bytes go each way; returns whether there were any."""
        moved = False
        for _ in range(2):
            if self.link is None or self.link.closed or self.session.closed:
                self.cut()
                return moved
            now = self.clock.monotonic()
            for part in self.link.data_to_send():
                self.to_active += part
            for part in self.session.data_to_send(size, now):
                self.to_replica += part
            if self.to_active and self.session.wants_data:
                self.session.receive_data(bytes(self.to_active[:size]), now)
                del self.to_active[:size]
                moved = True
            if self.to_replica and self.link is not None and self.link.wants_data:
                self.link.exchange(bytes(self.to_replica[:size]), now)
                del self.to_replica[:size]
                moved = True
            self.check()
        return moved

    def check(self) -> None:
        """What the replica has completely is a state that the active had."""
        for vbucket in self.replica.bucket:
            if vbucket.complete_seqno == vbucket.high_seqno and vbucket.high_seqno:
                assert (
                    documents(vbucket)
                    == self.seen[vbucket.id, branch_at_its_end(vbucket), vbucket.high_seqno]
                )

    def settle(self) -> None:
        silent = 0
        for _ in range(10_000):
            silent = 0 if self.carry(1 << 16) else silent + 1
            if silent > 4:
                return
            if silent:
                self.clock.advance(1.0)
                for machine in (self.active, self.replica):
                    machine.node.handle_timer(self.clock.monotonic())
                if self.link is not None:
                    self.link.handle_timer(self.clock.monotonic())
        raise AssertionError("it never settles")

    def close(self) -> None:
        self.cut()
        self.replica.node.close()
        self.active.node.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.lists(st.integers(0, 5), min_size=1, max_size=12)),
        st.tuples(st.just("delete"), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("carry"), st.integers(50, 900), st.integers(1, 3)),
        st.tuples(st.just("carry"), st.just(20_000), st.just(1)),
        st.tuples(st.just("cut"), st.just(0), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 1), st.integers(0, 6)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("checkpoint"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("away"), st.just(0), st.just(0)),
        st.tuples(st.just("time"), st.integers(1, 3), st.just(0)),
    ),
    max_size=50,
)


@pytest.mark.parametrize("draft", DRAFTS)
@settings(max_examples=40, deadline=None)
@example(  # its next branch begins after what the replica has
    steps=[
        ("write", 0, [0]),
        ("carry", 20_000, 1),
        ("write", 0, [0]),
        ("cut", 0, 0),
        ("rewind", 0, 0),
        ("carry", 50, 2),
    ]
)
@given(steps=STEPS)
def test_a_replica_has_only_states_that_the_active_had_and_ends_equal(
    draft: str, steps: list[tuple[str, int, Any]]
) -> None:
    pair = Pair(draft)
    for number, (what, first, other) in enumerate(steps):
        vbucket = pair.active.bucket.vbuckets[first % VBUCKETS]
        if what == "write":
            for at in other:
                vbucket.set(b"\0k%d" % at, b"%d" % number * 20)
                pair.note()
        elif what == "delete" and vbucket.get(b"\0k%d" % other) is not None:
            vbucket.delete(b"\0k%d" % other)
        elif what == "carry":
            for _ in range(other):
                pair.carry(first)
        elif what == "cut":
            pair.cut()
            pair.connect()
        elif what == "rewind":
            pair.active.bucket.rollback({first: max(0, vbucket.high_seqno - other)}, branch=True)
            pair.active.node.buckets["default"].vbucket_changed(first)
        elif what == "flush":
            pair.active.bucket.flush_all()
            for number_of in range(VBUCKETS):
                pair.active.node.buckets["default"].vbucket_changed(number_of)
        elif what == "checkpoint":
            vbucket.close_checkpoint()
        elif what == "away":
            pair.replica.node.replication["default"].order({}, pair.clock.monotonic())
            pair.cut()
            pair.order()
            pair.connect()
        elif what == "time":
            pair.clock.advance(first)
            pair.replica.node.handle_timer(pair.clock.monotonic())
        pair.note()
    pair.settle()
    for active, replica in zip(pair.active.bucket, pair.replica.bucket, strict=True):
        assert documents(active) == documents(replica)
        assert active.failover_log == replica.failover_log
        assert active.high_seqno == replica.high_seqno == replica.complete_seqno
    pair.close()


# a producer that says anything


def packet(magic: int, opcode: int, half: int, opaque: int, byte_5: int, extras: bytes, rest: bytes) -> bytes:  # noqa: PLR0917
    key = rest[: len(rest) // 2]
    size = len(extras) + len(rest)
    return struct.pack(">BBHBBHIIQ", magic, opcode, len(key), len(extras), byte_5, half, size, opaque, 7) + (
        extras + rest
    )


SEQNOS = st.sampled_from([0, 1, 2, 3, 5, 2**63, 2**64 - 2, 2**64 - 1])
EXTRAS = st.one_of(
    st.just(b""),
    st.just(bytes(4)),
    st.integers(0, 5).map(lambda state: bytes([state])),
    st.builds(lambda seqno: struct.pack(">QQIII", seqno, 1, 0, 0, 0), SEQNOS),
    st.builds(lambda seqno: struct.pack(">QQ", seqno, 1), SEQNOS),
    st.binary(max_size=48),
)
PACKETS = {
    "upr-a": st.builds(
        packet,
        st.sampled_from([0x81, 0x81, 0x80, 0x82]),
        st.sampled_from([2, 3, 4, 4, 4, 5, 0x0A]),
        st.sampled_from([0, 0, 1, 7]),
        st.integers(0, 9),
        st.integers(0, 6),
        EXTRAS,
        st.one_of(st.just(b""), st.just(b"keyval"), st.binary(max_size=40)),
    ),
    "upr-b": st.builds(
        packet,
        st.sampled_from([0x80, 0x80, 0x81, 0x82]),
        st.integers(0x50, 0x5C),
        st.sampled_from([0, 0, 1, 7, 0x23]),
        st.integers(0, 9),
        st.sampled_from([0, 1, 2, 4, 7]),
        EXTRAS,
        st.one_of(st.just(b""), st.just(b"keyval"), st.binary(max_size=40)),
    ),
}


def answers_to(draft: str, asked: bytes, log: int) -> bytes:
    """What a producer says to a log request or a stream request, in its own bytes."""
    head = struct.Struct(">BBHBBHIIQ")
    _, opcode, _, _, byte_5, vbucket, _, opaque, _ = head.unpack_from(asked)
    if opcode in (0x1F, 0x89, 0xB5):
        return head.pack(0x81, opcode, 0, 0, 0, 0, 0, opaque, 0)
    is_log = (opcode == 0x01 and byte_5 == 2) or opcode == 0x51
    value = struct.pack(">QQ", log, 0) if is_log else b""
    if draft == "upr-a":
        return head.pack(0x81, 2, 0, 0, 2 if is_log else 1, vbucket, len(value), opaque, 0) + value
    return head.pack(0x81, opcode, 0, 0, 0, 0, len(value), opaque, 0) + value


def frames_in(data: bytes) -> Iterator[bytes]:
    while data:
        size = 24 + int.from_bytes(data[8:12], "big")
        yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("draft", DRAFTS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_a_producer_says_ends_in_a_closed_connection_or_in_changes(
    draft: str, data: st.DataObject
) -> None:
    clock = ManualClock()
    machine = Machine(clock)
    links = []
    machine.node.dial = links.append
    for number in range(VBUCKETS):
        machine.bucket.set_state(number, VBucketState.REPLICA)
    takeover = data.draw(st.sampled_from([0, 1])) if draft == "upr-b" else 0
    orders = dict.fromkeys(range(VBUCKETS), (ReplicationSource("active", 1, dialect=draft), takeover))
    machine.node.replication["default"].order(orders, clock.monotonic())
    (link,) = links
    for _ in range(4):  # the handshake, and perhaps the answers to the first requests
        for asked in frames_in(b"".join(map(bytes, link.data_to_send()))):
            if asked[1] in (0x1F, 0x89, 0xB5) or data.draw(st.booleans()):
                link.exchange(answers_to(draft, asked, 77), clock.monotonic())
    assert link.closed or link.handler is not None
    for said in data.draw(st.lists(PACKETS[draft], max_size=12)):
        if not link.closed:
            link.exchange(said, clock.monotonic())
            link.data_to_send()
            clock.advance(1.0)
            link.handle_timer(clock.monotonic())
    if not link.closed:
        link.close("enough")
    for vbucket in machine.bucket:
        assert vbucket.complete_seqno <= vbucket.high_seqno
        assert not vbucket.complete_seqno or vbucket.state == VBucketState.ACTIVE or vbucket.uuid == 77
        documents(vbucket)
    machine.node.close()
