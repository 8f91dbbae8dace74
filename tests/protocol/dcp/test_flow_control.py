"""Flow control, byte by byte: what each message counts, and that never one too many is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.producer_fakes import COLLECTIONS, FULL, PRODUCER, FakeBucket, FakeReader
from tailrace.protocol.dcp.flow_control import ACK_INTERVAL_S, ReceiveWindow, SendWindow
from tailrace.wire.codes import AddStreamFlag, DcpOpcode, OpenFlag, Status, SystemEventId


def test_window() -> None:
    window = SendWindow()
    window.sent(1000)
    assert (window.outstanding, window.room > 1 << 60) == (0, True), "off: nothing is counted"
    window.resize(100)
    assert window.room == 100
    window.sent(99)
    assert window.room == 1
    window.sent(500)
    assert window.room == -499, "one message may overshoot"
    window.acknowledge(498)
    assert window.room == -1
    window.acknowledge(2)
    assert window.room == 1
    window.acknowledge(10_000)
    assert (window.outstanding, window.room) == (0, 100), "clamped"
    window.sent(70)
    window.resize(50)
    assert window.room == -20, "the newest size wins, what is outstanding stays"
    window.resize(0)
    window.resize(50)
    assert window.room == 50, "turned off, it forgets"


def test_a_receiver_acknowledges_a_share_of_the_window() -> None:
    window = ReceiveWindow(1000, now=0.0)
    assert window.next_timer() is None, "nothing to acknowledge"
    assert not window.processed(199)
    assert window.processed(1)
    assert window.take(now=1.0) == 200
    assert window.take(now=1.0) == 0
    assert (window.acknowledged_bytes, window.unacknowledged_bytes) == (200, 0)


def test_a_receiver_of_a_large_window_acknowledges_sooner() -> None:
    window = ReceiveWindow(1 << 30, now=0.0, ack_at_bytes=500)
    assert not window.processed(499)
    assert window.processed(1)


def test_a_receiver_does_not_keep_a_little_to_itself_for_ever() -> None:
    window = ReceiveWindow(1000, now=0.0)
    window.processed(1)
    assert window.next_timer() == ACK_INTERVAL_S
    assert not window.is_late(ACK_INTERVAL_S - 0.1)
    assert window.is_late(ACK_INTERVAL_S)
    window.postpone(ACK_INTERVAL_S)
    assert (window.is_late(ACK_INTERVAL_S), window.next_timer()) == (False, 2 * ACK_INTERVAL_S)
    assert window.take(2 * ACK_INTERVAL_S) == 1
    assert not window.is_late(100.0)


def test_an_acknowledgement_has_32_bits() -> None:
    window = ReceiveWindow(1000, now=0.0)
    window.processed((1 << 32) + 5)
    assert [window.take(0.0), window.take(0.0), window.take(0.0)] == [(1 << 32) - 1, 6, 0]


# One message of a kind, and what it must count. k is 4 with the prefix, v 5.

KEY, VALUE = b"key", b"value"
XATTR_VALUE = b"\0\0\0\x0d\0\0\0\x09_sys\x00{}\x00\x00"
V1, V2 = PRODUCER, FULL


def one_of_each(kind: str) -> tuple[FakeBucket, dict[str, object], int, dict[str, Any]]:
    """A bucket, the stream request, the open flags and the controls that make the message come."""
    bucket = FakeBucket()
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    request: dict[str, object] = {}
    controls: dict[str, Any] = {}
    flags = FULL
    if kind == "mutation":
        vbucket.set(KEY, VALUE)
    elif kind.startswith("deletion"):
        vbucket.delete(KEY)
        flags = V1 if kind.endswith("v1") else V2
    elif kind == "expiration":
        vbucket.delete(KEY, expired=True)
        controls["enable_expiry_opcode"] = "true"
    elif kind.startswith("marker"):
        vbucket.set(KEY, VALUE)
        vbucket.to_disk()
        if kind.endswith("2.2"):
            controls["max_marker_version"] = "2.2"
        if kind.endswith("2.0"):
            controls |= {"enable_sync_writes": "true", "consumer_name": "r"}
    elif kind == "end":
        request["end_seqno"] = 0
    elif kind == "state":
        request["flags"] = AddStreamFlag.TAKE_OVER
    elif kind == "event":
        vbucket.event(SystemEventId.COLLECTION_BEGIN, collection=8, name=b"one")
    elif kind == "advanced":
        vbucket.set(KEY, VALUE)
        request["value"] = {"collections": ["8"]}
    elif kind == "oso":
        vbucket.set(KEY, VALUE, collection=8)
        vbucket.to_disk()
        request["value"] = {"collections": ["8"]}
        controls["enable_out_of_order_snapshots"] = "true"
    return bucket, request, flags, controls


ROWS = [
    ("mutation", DcpOpcode.MUTATION, 55 + 4 + 5),
    ("deletion v1", DcpOpcode.DELETION, 42 + 4),
    ("deletion v2", DcpOpcode.DELETION, 45 + 4),
    ("expiration", DcpOpcode.EXPIRATION, 44 + 4),
    ("marker v1", DcpOpcode.SNAPSHOT_MARKER, 44),
    ("marker v2.0", DcpOpcode.SNAPSHOT_MARKER, 61),
    ("marker v2.2", DcpOpcode.SNAPSHOT_MARKER, 77),
    ("end", DcpOpcode.STREAM_END, 28),
    ("state", DcpOpcode.SET_VBUCKET_STATE, 25),
    ("event", DcpOpcode.SYSTEM_EVENT, 37 + 3 + 16),
    ("advanced", DcpOpcode.SEQNO_ADVANCED, 32),
    ("oso", DcpOpcode.OSO_SNAPSHOT, 28),
]


NEVER_WITH_STREAM_ID = ("state", "marker v2.0")
CASES = [(*row, 0) for row in ROWS] + [(*row, 7) for row in ROWS if row[0] not in NEVER_WITH_STREAM_ID]


@pytest.mark.parametrize(
    ("kind", "opcode", "size", "stream_id"), CASES, ids=[f"{row[0]} {row[3]}" for row in CASES]
)
def test_what_a_message_counts(kind: str, opcode: int, size: int, stream_id: int) -> None:
    bucket, request, flags, controls = one_of_each(kind)
    if stream_id:
        controls["enable_stream_id"] = "true"
        value = request.get("value") or {}
        assert isinstance(value, dict)
        request["value"] = {**value, "sid": stream_id}
        size += 3
    reader = FakeReader(bucket)
    reader.open(flags, connection_buffer_size="1", **controls)
    window = reader.producer._window
    answer = reader.request(**request)  # type: ignore[arg-type]
    assert answer.status == Status.SUCCESS
    for _ in range(10):
        before = len(reader.received)
        assert reader.pull()
        assert len(reader.received) == before + 1, "a window of 1 byte lets one message through"
        frame, _ = reader.received[-1]
        assert window.outstanding == frame.size
        if frame.opcode == opcode:
            assert window.outstanding == size
            return
        assert not reader.pull()
        reader.ack(frame.size - 1)
        assert not reader.pull(), "one byte is missing"
        reader.ack(1)
    pytest.fail(f"no {kind} came")


def test_deletion_with_xattrs_counts_its_value() -> None:
    bucket = FakeBucket()
    bucket.vbuckets[0].delete(KEY, value=XATTR_VALUE, datatype=4)
    reader = FakeReader(bucket)
    reader.open(FULL | OpenFlag.INCLUDE_DELETED_USER_XATTRS, connection_buffer_size="1000")
    reader.stream()
    assert reader.producer._window.outstanding == 44 + 45 + 4 + len(XATTR_VALUE)


def test_answers_are_neither_counted_nor_blocked() -> None:
    bucket = FakeBucket()
    bucket.vbuckets[0].set(KEY)
    reader = FakeReader(bucket)
    reader.open(connection_buffer_size="1")
    reader.stream()
    assert reader.outstanding == 44
    for vbucket in (1, 2, 3):
        assert reader.request(vbucket).status == Status.SUCCESS
        assert reader.close_stream(vbucket) == Status.SUCCESS
    assert reader.producer._window.outstanding == 44


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_message_that_begins_at_the_window_must_wait(offset: int) -> None:
    """55 + 2 + 2 bytes each, after a marker of 44."""
    bucket = FakeBucket()
    for number in range(9):
        bucket.vbuckets[0].set(b"%d" % number, b"vv")
    reader = FakeReader(bucket)
    reader.open(connection_buffer_size=str(44 + 5 * 59 + offset))
    assert reader.stream().last_seqno == (6 if offset > 0 else 5)


def test_turning_it_off_lets_everything_go() -> None:
    bucket = FakeBucket()
    for number in range(100):
        bucket.vbuckets[0].set(b"%d" % number)
    reader = FakeReader(bucket)
    reader.open(connection_buffer_size="200")
    stream = reader.stream()
    assert 0 < stream.last_seqno < 100
    reader.control("connection_buffer_size", "0")
    reader.pull_all()
    assert stream.last_seqno == 100
    assert reader.producer._window.outstanding == 0


sizes = st.lists(st.integers(0, 300), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(
    values=sizes,
    window=st.integers(1, 3000),
    acks=st.lists(st.integers(0, 4000), max_size=40),
    max_bytes=st.integers(1, 3000),
    features=st.sampled_from([COLLECTIONS, frozenset()]),
    on_disk=st.booleans(),
)
def test_never_more_than_the_window(
    *,
    values: list[int],
    window: int,
    acks: list[int],
    max_bytes: int,
    features: frozenset[int],
    on_disk: bool,
) -> None:
    """Exactly as many messages as the rule allows, wherever chunk, window and write end."""
    bucket = FakeBucket()
    vbucket = bucket.vbuckets[0]
    for number, size in enumerate(values):
        if size % 7 == 3:
            vbucket.delete(b"k%d" % number)
        else:
            vbucket.set(b"k%d" % number, bytes(size))
    if on_disk:
        vbucket.to_disk()
    reader = FakeReader(bucket, features=features)
    reader.open(PRODUCER, connection_buffer_size=str(window))
    reader.request(end_seqno=len(values))
    stream = next(iter(reader.streams.values()))
    for ack in acks:
        reader.pull_all(max_bytes)
        assert reader.outstanding == reader.producer._window.outstanding
        assert reader.outstanding >= window or stream.ended is not None, "it stopped too early"
        if ack:
            reader.ack(ack)
    while stream.ended is None:
        reader.pull_all(max_bytes)
        reader.ack(reader.outstanding)
    assert [item.by_seqno for item in stream.items] == list(range(1, len(values) + 1))
