"""TAP's bookkeeping without sockets.

Numbers that wrap, acknowledgements, TTLs, and a whole producer with a reader that answers as it likes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from tailrace.clock import ManualClock
from tailrace.errors import FramingError
from tailrace.files import MemoryFiles
from tailrace.protocol.tap.acks import AckLog, wire_number, wire_numbers
from tailrace.protocol.tap.clients import TapClient, TapClients, TapControl, TapCursor, TapHops
from tailrace.protocol.tap.producer import TapProducer
from tailrace.protocol.tap.window import TapWindow
from tailrace.server.node import Node
from tailrace.server.settings import Settings
from tailrace.store.bucket import EngineBucket
from tailrace.store.engine import Engine
from tailrace.wire.codes import TapConnectFlag, VBucketState

LAST = 0xFFFF_FFFF


def seqnos(*numbers: int) -> ndarray:
    return np.array(numbers, np.uint64)


# Numbers.


def test_numbers_wrap_from_the_last_to_one() -> None:
    assert [wire_number(number) for number in (1, LAST, LAST + 1, 2 * LAST, 2 * LAST + 1)] == [
        1,
        LAST,
        1,
        LAST,
        1,
    ]
    assert wire_numbers(LAST - 1, 4).tolist() == [LAST - 1, LAST, 1, 2]


@given(st.integers(0, 3 * LAST), st.integers(1, 20_000), st.integers(0, 20_000))
def test_an_answer_finds_its_message(sent_before: int, count: int, which: int) -> None:
    client = TapClient("n", sent=sent_before)
    log = AckLog(client, enabled=True)
    cursor = TapCursor(0, 1)
    log.add_items(cursor, np.arange(1, count + 1, dtype=np.uint64))
    number = sent_before + 1 + which
    expected = number if which < count else None
    assert log.find(wire_number(number)) == expected
    assert log.find(0) is None


# Acknowledgements.


def test_an_ack_counts_for_everything_before_it() -> None:
    client = TapClient("n")
    log = AckLog(client, enabled=True)
    first, two = TapCursor(1, 1), TapCursor(2, 1)
    log.add_control(TapControl("opaque", 0), None)
    log.add_items(first, seqnos(3, 5, 9))
    first.position = 9
    log.add_items(two, seqnos(1, 2))
    two.position = 2
    log.acknowledge(3)
    assert (first.acked, first.outstanding, two.outstanding, log.unacked) == (5, 1, 2, 3)
    assert (first.resume_at, two.resume_at) == (5, 0)
    log.acknowledge(5)
    assert (first.acked, first.outstanding, two.acked, two.outstanding) == (9, 0, 1, 1)
    log.acknowledge(6)
    assert (two.resume_at, log.unacked, len(log)) == (2, 0, 0)


def test_a_window_says_what_holds_it_up() -> None:
    log = AckLog(TapClient("n"), enabled=True)
    settings = Settings(tap_ack_interval=1, tap_ack_window=2, tap_backoff=5.0)
    window = TapWindow(log, settings)
    assert window.held_up == ""
    log.add_items(TapCursor(1, 1), seqnos(1, 2))
    assert window.held_up == "too many messages are unanswered"
    window.suspend(10.0)
    assert window.held_up == "it asked for a pause"
    log.acknowledge(2)
    assert not window.has_resumed(14.9)
    assert window.has_resumed(15.0)
    assert window.held_up == ""


def test_going_back_returns_what_was_not_acknowledged() -> None:
    client = TapClient("n")
    log = AckLog(client, enabled=True)
    cursor = TapCursor(1, 1)
    log.add_control(TapControl("opaque", 0), None)
    log.add_items(cursor, seqnos(1, 2, 3))
    cursor.position = 3
    log.add_control(TapControl("opaque", 8, 1), cursor)
    log.add_control(TapControl("flush"), None)
    log.acknowledge(2)
    assert log.go_back() == [TapControl("flush")]
    assert list(cursor.controls) == [TapControl("opaque", 8, 1)]
    assert (cursor.position, cursor.acked, cursor.outstanding, log.unacked) == (1, 1, 0, 0)
    assert log.find(wire_number(3)) is None  # an answer that comes now answers nothing


def test_what_was_sent_before_a_new_beginning_counts_no_more() -> None:
    client = TapClient("n")
    log = AckLog(client, enabled=True)
    cursor = TapCursor(1, 1)
    log.add_items(cursor, seqnos(100, 200))
    cursor.restart(2, backfill_end=10)
    log.add_items(cursor, seqnos(1))
    log.acknowledge(2)
    assert (cursor.acked, cursor.outstanding) == (0, 1)
    log.go_back()
    assert cursor.position == 0


def test_without_acks_nothing_is_kept() -> None:
    client = TapClient("n")
    log = AckLog(client, enabled=False)
    cursor = TapCursor(1, 1)
    log.add_items(cursor, seqnos(1, 2, 3))
    assert (len(log), log.unacked, cursor.outstanding, client.sent) == (0, 0, 0, 3)


# TTLs.


@pytest.fixture
def bucket() -> Iterator[EngineBucket]:
    engine = Engine(files=MemoryFiles())
    yield engine.create_bucket("default", 4)
    engine.close()


def test_ttls_are_remembered_by_runs_and_forgotten_with_the_branch(bucket: EngineBucket) -> None:
    hops = TapHops(bucket)
    assert hops.ttls(1, seqnos(1, 2)) is None
    for seqno in (2, 3, 4):
        hops.received(1, seqno, 255)
    hops.received(1, 7, 1)
    assert hops.ttls(1, seqnos(1, 2, 4, 5, 7, 8)).tolist() == [255, 254, 254, 255, 0, 255]
    assert hops.ttls(1, seqnos(8, 9)) is None
    assert hops.ttls(2, seqnos(2, 3)) is None
    vbucket = bucket.vbuckets[1]
    vbucket.set(b"\0k", b"v")
    bucket.rollback({1: 0}, branch=True)
    assert hops.ttls(1, seqnos(2, 3)) is None


def test_runs_have_a_limit(bucket: EngineBucket) -> None:
    hops = TapHops(bucket)
    for seqno in range(0, 20_000, 2):
        hops.received(0, seqno, 200)
    assert len(hops._runs[0][1]) <= 1_000
    assert hops.ttls(0, seqnos(19_998)).tolist() == [199]
    assert hops.ttls(0, seqnos(0)) is None  # the oldest are sent like our own


# Readers that are kept.


def test_states_are_kept_as_long_as_they_should(bucket: EngineBucket) -> None:
    clients = TapClients(bucket, 3)
    plain = clients.find_or_make("plain", 0.0)
    clients.disconnected(plain, 10.0, 0.0)  # type: ignore[arg-type]
    assert clients.get("plain") is None
    kept = clients.find_or_make("kept", 0.0)
    clients.disconnected(kept, 10.0, 5.0)  # type: ignore[arg-type]
    assert clients.find_or_make("kept", 14.0) is kept
    clients.disconnected(kept, 20.0, 1e9)  # type: ignore[arg-type]
    assert clients.find_or_make("kept", 20.0 + 3_600.5) is not kept  # never longer than an hour
    registered = clients.find_or_make("registered", 0.0)
    registered.flags = TapConnectFlag.REGISTERED_CLIENT
    registered.cursors[2] = TapCursor(2, 77, 5, 5)
    clients.disconnected(registered, 10.0, 0.0)  # type: ignore[arg-type]
    assert clients.find_or_make("registered", 1e9) is registered
    again = TapClients(bucket, 3).find_or_make("registered", 0.0)  # as after a restart
    assert again is not None and again.is_registered
    assert (again.cursors[2].vb_uuid, again.cursors[2].resume_at) == (77, 5)
    clients.find_or_make("third", 0.0)
    assert clients.find_or_make("fourth", 0.0) is None
    clients.disconnected(registered, 10.0, 0.0)  # type: ignore[arg-type]
    clients.deregister("registered")
    assert "registered" not in bucket.cursors
    assert clients.find_or_make("fourth", 0.0) is not None


# A whole producer, on a session without a socket, with a reader that answers as it likes.


class Talk:
    """A session of a node without sockets, and what a reader made of it."""

    def __init__(self, **own_settings: Any) -> None:
        self.clock = ManualClock()
        made = Settings()
        for name, value in own_settings.items():
            setattr(made, name, value)
        self.engine = Engine(files=MemoryFiles(), clock=self.clock)
        self.bucket = self.engine.create_bucket("default", 4)
        self.node = Node(self.engine, settings=made, clock=self.clock)
        self.session: Any = None
        self.documents: dict[Any, Any] = {}
        self.unanswered: list[Any] = []
        self.states: list[int] = []
        self.data = b""
        self.last = 0

    def connect(self, flags: int, value: bytes = b"", name: bytes = b"r") -> None:
        self.session = self.node.accept("test", self.clock.monotonic())
        extras = flags.to_bytes(4, "big")
        head = struct.pack(">BBHBBHIIQ", 0x80, 0x40, len(name), 4, 0, 0, 4 + len(name) + len(value), 0, 0)
        self.unanswered.clear()
        self.data = b""
        self.session.receive_data(head + extras + name + value, self.clock.monotonic())

    @property
    def handler(self) -> TapProducer:
        handler = self.session.handler
        assert isinstance(handler, TapProducer)
        return handler

    def pull(self, max_bytes: int = 1 << 16) -> bool:
        """Take what the node has; returns whether there was something."""
        data = b"".join(self.session.data_to_send(max_bytes, self.clock.monotonic()))
        self.data += data
        while len(self.data) >= 24:
            size = 24 + int.from_bytes(self.data[8:12], "big")
            if len(self.data) < size:
                break
            self._take(self.data[:size])
            self.data = self.data[size:]
        return bool(data)

    def _take(self, raw: bytes) -> None:
        _, opcode, key_length, extras, _, vbucket, _, opaque, cas = struct.unpack(">BBHBBHIIQ", raw[:24])
        assert opaque == self.last % LAST + 1
        self.last = opaque
        private = int.from_bytes(raw[24:26], "big")
        at = 24 + extras + private
        key, value = raw[at : at + key_length], raw[at + key_length :]
        held = self.documents.setdefault(vbucket, {})
        if opcode == 0x41:
            held[key] = (value, cas)
        elif opcode == 0x42:
            held.pop(key, None)
        elif opcode == 0x43:
            self.documents.clear()
        elif opcode == 0x44 and raw[-1] == 1:
            held.clear()
        elif opcode == 0x45:
            self.states.append(raw[-1])
        if raw[27] & 1:
            self.unanswered.append((opcode, opaque))

    def answer(self, which: int = 0, status: int = 0) -> None:
        opcode, opaque = self.unanswered[which]
        if status == 0:
            del self.unanswered[: which + 1]
        else:
            self.unanswered.clear()
        self.session.receive_data(
            struct.pack(">BBHBBHIIQ", 0x81, opcode, 0, 0, 0, status, 0, opaque, 0), self.clock.monotonic()
        )

    def disconnect(self) -> None:
        self.session.connection_lost()
        self.session = None

    def settle(self) -> None:
        """Answer everything until nothing comes any more, a back-off included."""
        silent = 0
        for _ in range(10_000):
            self.clock.advance(1.0)
            self.session.handle_timer(self.clock.monotonic())
            silent = 0 if self.pull() or self.unanswered else silent + 1
            if self.unanswered:
                self.answer(len(self.unanswered) - 1)
            if silent > 5 or self.session.closed:
                return
        raise AssertionError("it never settles")

    def stored(self) -> dict[int, Any]:
        state = {}
        for vbucket in self.bucket:
            for at in range(30):
                frame = vbucket.get(b"\0k%d" % at)
                if frame is not None:
                    value = frame[24 + frame[4] + int.from_bytes(frame[2:4], "big") :]
                    held = state.setdefault(vbucket.id, {})
                    held[b"k%d" % at] = (value, int.from_bytes(frame[16:24], "big"))
        return state


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 2), st.integers(0, 29)),
        st.tuples(st.just("delete"), st.integers(0, 2), st.integers(0, 29)),
        st.tuples(st.just("pull"), st.integers(1, 400), st.just(0)),
        st.tuples(st.just("ack"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("nack"), st.integers(0, 9), st.sampled_from([0x85, 0x86])),
        st.tuples(st.just("reconnect"), st.just(0), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("checkpoint"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("time"), st.integers(1, 20), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(
    STEPS,
    st.sampled_from([0x10, 0x50, 0x90, 0xD0]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0, LAST - 20]),
)
def test_whatever_a_reader_answers_it_ends_with_the_same_documents(
    steps: list[tuple[str, int, int]], flags: int, interval: int, window: int, sent: int
) -> None:
    talk = Talk(tap_ack_interval=interval, tap_ack_window=window, tap_keepalive=3600.0, tap_backoff=2.0)
    talk.bucket.vbuckets[0].set(b"\0k1", b"there before")
    talk.connect(flags)
    talk.handler._client.sent = talk.handler._acks.acked = talk.last = sent
    for number, (what, first, other) in enumerate(steps):
        vbucket = talk.bucket.vbuckets[first % 3]
        if what == "set":
            vbucket.set(b"\0k%d" % other, b"%d" % number)
        elif what == "delete":
            if vbucket.get(b"\0k%d" % other) is not None:
                vbucket.delete(b"\0k%d" % other)
        elif what == "pull":
            talk.pull(first)
        elif what in ("ack", "nack") and talk.unanswered:
            talk.answer(first % len(talk.unanswered), other)
        elif what == "reconnect":
            talk.disconnect()
            talk.connect(flags)
        elif what == "rewind":
            talk.bucket.rollback({first: max(0, vbucket.high_seqno - other)}, branch=True)
        elif what == "flush":
            talk.bucket.flush_all()
        elif what == "checkpoint":
            vbucket.close_checkpoint()
        elif what == "time":
            talk.clock.advance(first)
            talk.session.handle_timer(talk.clock.monotonic())
    talk.settle()
    assert {number: held for number, held in talk.documents.items() if held} == talk.stored()
    assert talk.handler._acks.unacked == 0
    talk.node.close()


def test_a_takeover_called_off_after_giving_up_makes_nobody_active() -> None:
    talk = Talk()
    talk.bucket.vbuckets[1].set(b"\0k1", b"v")
    talk.connect(0x1C, struct.pack(">HH", 1, 1))
    for _ in range(50):
        if talk.bucket.vbuckets[1].state == VBucketState.DEAD:
            break
        talk.pull()
        while talk.unanswered and talk.bucket.vbuckets[1].state != VBucketState.DEAD:
            talk.answer()
            talk.pull()
    assert talk.handler._takeover.is_final
    talk.bucket.set_state(1, VBucketState.ACTIVE)
    talk.settle()
    assert talk.session.closed
    assert talk.states == [VBucketState.PENDING]
    talk.node.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=4), st.sampled_from([0x40, 0x41, 0x42, 0x44, 0x45, 0x46]))
def test_any_bytes_end_in_answers_or_a_closed_connection(parts: list[bytes], opcode: int) -> None:
    talk = Talk()
    talk.session = talk.node.accept("test", talk.clock.monotonic())
    try:
        for part in parts:
            extras = min(len(part), 16 if opcode in (0x41, 0x46) else 8)
            if opcode == 0x40:
                extras = 4 if len(part) >= 4 else 0
            head = struct.pack(">BBHBBHIIQ", 0x80, opcode, 0, extras, 0, 0, len(part), 1, 0)
            talk.session.receive_data(head + part, talk.clock.monotonic())
            talk.session.data_to_send(1 << 16, talk.clock.monotonic())
    except FramingError:
        pytest.fail("a session keeps framing errors to itself")
    talk.node.close()
