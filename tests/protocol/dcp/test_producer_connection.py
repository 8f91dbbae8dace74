"""A DCP connection apart from its streams: opening, wrong roles, malformed requests, answers, fairness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from protocol.producer_fakes import (
    COLLECTIONS,
    FULL,
    PRODUCER,
    UUID,
    FakeBucket,
    FakeReader,
)
from tailrace.frames import CHUNK_BYTES
from tailrace.model import SnapshotRange
from tailrace.wire.codes import DcpOpcode, Feature, OpenFlag, Status, StreamEndStatus, VBucketState
from tailrace.wire.dcp import (
    DcpBufferAck,
    DcpGetFailoverLog,
    DcpOpen,
    DcpStreamRequest,
)
from tailrace.wire.dcp_replication import DcpSeqnoAcknowledged
from tailrace.wire.fields import decode_failover_log
from tailrace.wire.header import MAX_NAME_BYTES, Frame

PART = CHUNK_BYTES // 50
"""The size of documents of which about fifty fill a chunk."""
BACKFILL_BUFFER = 8 << 20


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


def opening(
    reader: FakeReader, *, flags: int, name: bytes = b"test", value: bytes = b"", datatype: int = 0
) -> int:
    """Open with any bytes at all."""
    body = bytes(4) + flags.to_bytes(4, "big") + name + value
    frame = Frame(0x80, 0x50, len(name), 8, datatype=datatype, opaque=9, body=body)
    reader.producer.receive_frame(frame, reader.now)
    return reader.status_of_last()


# Open


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (PRODUCER, Status.SUCCESS),
        (FULL, Status.SUCCESS),
        (PRODUCER | OpenFlag.NO_VALUE, Status.SUCCESS),
        (PRODUCER | OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL, Status.SUCCESS),
        (PRODUCER | 0x02, Status.EINVAL),
        (PRODUCER | 0x10, Status.EINVAL),
        (PRODUCER | 0x80, Status.EINVAL),
        (PRODUCER | 0x400, Status.EINVAL),
        (PRODUCER | OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE, Status.EINVAL),
        (PRODUCER | OpenFlag.INCLUDE_DELETED_USER_XATTRS, Status.EINVAL),
        (FULL | OpenFlag.INCLUDE_DELETED_USER_XATTRS, Status.SUCCESS),
        (0, Status.EINVAL),
    ],
)
def test_open_flags(bucket: FakeBucket, flags: int, status: Status) -> None:
    reader = FakeReader(bucket)
    assert opening(reader, flags=int(flags)) == status
    assert reader.producer.is_open == (status == Status.SUCCESS)
    assert reader.host.names == ([b"test"] if status == Status.SUCCESS else [])


def test_skipping_deletes_needs_collections(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket, features=frozenset())
    assert opening(reader, flags=PRODUCER | 0x200) == Status.EINVAL


@pytest.mark.parametrize(
    ("name", "status"),
    [
        (b"x", Status.SUCCESS),
        (b"x" * MAX_NAME_BYTES, Status.SUCCESS),
        (b"x" * (MAX_NAME_BYTES + 1), Status.EINVAL),
    ],
)
def test_open_name(bucket: FakeBucket, name: bytes, status: Status) -> None:
    assert opening(FakeReader(bucket), flags=PRODUCER, name=name) == status


@pytest.mark.parametrize(
    ("value", "datatype"), [(b"{}", 1), (b'{"consumer_name":"x"}', 1), (b'{"x":1}', 1), (b"{", 1), (b"{}", 0)]
)
def test_open_value(bucket: FakeBucket, value: bytes, datatype: int) -> None:
    """The only member there is belongs to a reader."""
    assert opening(FakeReader(bucket), flags=PRODUCER, value=value, datatype=datatype) == Status.EINVAL


def test_open_twice(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    assert opening(reader, flags=PRODUCER) == Status.EINVAL
    assert reader.producer.is_open


def test_open_after_a_refused_one(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    assert opening(reader, flags=PRODUCER | 2) == Status.EINVAL
    assert opening(reader, flags=PRODUCER) == Status.SUCCESS


@pytest.mark.parametrize("opcode", [op for op in DcpOpcode if op != DcpOpcode.OPEN])
def test_nothing_before_open(bucket: FakeBucket, opcode: int) -> None:
    reader = FakeReader(bucket)
    reader.producer.receive_frame(Frame(0x80, opcode, opaque=3), reader.now)
    assert reader.status_of_last() == Status.EINVAL
    assert reader.producer.close_requested is None


def test_unordered_execution(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket, features=COLLECTIONS | {int(Feature.UNORDERED_EXECUTION)})
    assert opening(reader, flags=PRODUCER) == Status.NOT_SUPPORTED


# Requests


TO_A_CONSUMER = [
    DcpOpcode.ADD_STREAM,
    DcpOpcode.STREAM_END,
    DcpOpcode.SNAPSHOT_MARKER,
    DcpOpcode.MUTATION,
    DcpOpcode.DELETION,
    DcpOpcode.EXPIRATION,
    DcpOpcode.SET_VBUCKET_STATE,
    DcpOpcode.NOOP,
    DcpOpcode.SYSTEM_EVENT,
    DcpOpcode.PREPARE,
    DcpOpcode.COMMIT,
    DcpOpcode.ABORT,
    DcpOpcode.SEQNO_ADVANCED,
    DcpOpcode.OSO_SNAPSHOT,
    DcpOpcode.CACHE_TRANSFER,
    DcpOpcode.CACHE_TRANSFER_END,
]


@pytest.mark.parametrize("opcode", TO_A_CONSUMER)
def test_message_for_a_consumer(bucket: FakeBucket, opcode: int) -> None:
    reader = FakeReader(bucket)
    reader.open()
    stream = reader.stream()
    reader.producer.receive_frame(Frame(0x80, opcode), reader.now)
    reason = reader.producer.close_requested
    assert reason is not None
    assert reader.host.events == [{"event": "disconnecting", "reason": reason}]
    bucket.vbuckets[0].set(b"k")
    reader.pull_all()
    assert stream.items == [], "nothing is streamed any more"


def test_flush_is_not_supported(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    reader.producer.receive_frame(Frame(0x80, DcpOpcode.FLUSH), reader.now)
    assert reader.status_of_last() == Status.NOT_SUPPORTED


@pytest.mark.parametrize(
    "frame",
    [
        Frame(0x80, DcpOpcode.STREAM_REQUEST, extras_length=47, body=bytes(47)),
        Frame(0x80, DcpOpcode.STREAM_REQUEST, key_length=1, extras_length=48, body=bytes(49)),
        Frame(0x80, DcpOpcode.STREAM_REQUEST, extras_length=48, datatype=1, body=bytes(48) + b"{}"),
        Frame(0x80, DcpOpcode.GET_FAILOVER_LOG, body=b"x"),
        Frame(0x80, DcpOpcode.CLOSE_STREAM, extras_length=4, body=bytes(4)),
        Frame(0x80, DcpOpcode.CONTROL, key_length=1, body=b"k"),
        Frame(0x80, DcpOpcode.CONTROL, body=b"v"),
        Frame(0x80, DcpOpcode.CONTROL, extras_length=1, key_length=1, body=b"xkv"),
        Frame(0x80, DcpOpcode.BUFFER_ACK),
        Frame(0x80, DcpOpcode.BUFFER_ACK, extras_length=8, body=bytes(8)),
    ],
)
def test_malformed(bucket: FakeBucket, frame: Frame) -> None:
    reader = FakeReader(bucket)
    reader.open()
    frame.opaque = 0xABCDEF
    reader.producer.receive_frame(frame, reader.now)
    assert reader.status_of_last() == Status.EINVAL
    assert (reader.answers[-1].opaque, reader.answers[-1].opcode) == (0xABCDEF, frame.opcode)
    assert reader.producer.close_requested is None


def test_failover_log(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    reader.send(DcpGetFailoverLog(vbucket=1, opaque=5))
    assert reader.status_of_last() == Status.SUCCESS
    assert decode_failover_log(reader.answers[-1].value) == [(UUID, 0)]
    for number in (4, 1024):
        reader.send(DcpGetFailoverLog(vbucket=number))
        assert reader.status_of_last() == Status.NOT_MY_VBUCKET


def test_buffer_ack_is_never_answered(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    before = len(reader.answers)
    reader.send(DcpBufferAck(acked_bytes=5, opaque=77))
    reader.pull()
    assert len(reader.answers) == before


def test_seqno_acknowledged(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    ack = DcpSeqnoAcknowledged(prepared_seqno=3)
    reader.send(ack)
    assert reader.status_of_last() == Status.EINVAL
    reader.control("enable_sync_writes", "true")
    reader.control("consumer_name", "r")
    reader.stream()
    before = len(reader.answers)
    reader.send(ack)
    reader.pull()
    assert len(reader.answers) == before
    high = bucket.vbuckets[0].high_seqno
    assert reader.host.reached == [(0, "r", min(3, high))]
    ack.vbucket = 99
    reader.send(ack)
    assert reader.status_of_last() == Status.NOT_MY_VBUCKET
    reader.producer.close("gone")
    assert reader.host.replicas_gone == ["r"]


def test_a_seqno_that_was_acknowledged_before_a_rewind(bucket: FakeBucket) -> None:
    """What a replica acknowledged of the other branch comes late: of the new branch it has nothing."""
    vbucket = bucket.vbuckets[0]
    for number in range(5):
        vbucket.set(b"k%d" % number, b"v")
    reader = FakeReader(bucket)
    reader.open(enable_sync_writes="true", consumer_name="r")
    reader.stream()
    vbucket.rollback(3, 0x77)
    vbucket.set(b"new", b"v")
    reader.send(DcpSeqnoAcknowledged(prepared_seqno=5))
    assert reader.host.reached == []


def test_close_stream_that_is_not_there(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    assert reader.close_stream(2) == Status.KEY_ENOENT
    assert reader.close_stream(2, framing=b"\x22\x00\x01") == Status.DCP_STREAMID_INVALID
    assert reader.close_stream(2, framing=b"\x30") == Status.UNKNOWN_FRAME_INFO
    assert reader.close_stream(2, framing=b"\x21\x00") == Status.EINVAL
    assert reader.close_stream(2, framing=b"\x25") == Status.EINVAL


def test_answers_come_in_the_order_of_requests_and_before_the_stream(bucket: FakeBucket) -> None:
    for number in range(3):
        bucket.vbuckets[number].set(b"k")
    reader = FakeReader(bucket)
    reader.open()
    for number in range(3):
        reader.send(DcpStreamRequest(vbucket=number, opaque=number))
        reader.send(DcpGetFailoverLog(vbucket=number, opaque=100 + number))
    reader.answers.clear()
    pieces = reader.producer.data_to_send(1 << 20)
    reader.framer.feed(b"".join(pieces))
    frames = list(reader.framer.frames())
    assert [frame.opaque for frame in frames[:6]] == [0, 100, 1, 101, 2, 102]
    assert all(not frame.is_request for frame in frames[:6])
    assert all(frame.is_request for frame in frames[6:])


# Answers of the reader


def fails_with(bucket: FakeBucket, status: int, opcode: int = DcpOpcode.MUTATION, **controls: Any) -> bool:
    reader = FakeReader(bucket)
    reader.open(**controls)
    reader.respond(opcode, 0x1001, status)
    return reader.producer.close_requested is not None


@pytest.mark.parametrize(
    ("status", "fatal"),
    [
        (Status.SUCCESS, False),
        (Status.NOT_MY_VBUCKET, False),
        (Status.DCP_STREAM_NOT_FOUND, False),
        (Status.OPAQUE_NO_MATCH, False),
        (Status.KEY_EEXISTS, False),
        (Status.KEY_ENOENT, False),
        (Status.EINVAL, True),
        (Status.ERANGE, True),
        (Status.ENOMEM, True),
        (Status.ETMPFAIL, True),
        (Status.XATTR_EINVAL, True),
        (0x7777, True),
    ],
)
def test_error_answers(bucket: FakeBucket, status: int, fatal: bool) -> None:
    assert fails_with(bucket, status) == fatal


def test_error_answers_with_new_codes(bucket: FakeBucket) -> None:
    assert fails_with(bucket, Status.KEY_EEXISTS, v7_dcp_status_codes="true")
    assert not fails_with(bucket, Status.OPAQUE_NO_MATCH, v7_dcp_status_codes="true")


def test_commit_without_prepare_is_fatal(bucket: FakeBucket) -> None:
    assert fails_with(bucket, Status.KEY_ENOENT, DcpOpcode.COMMIT)
    assert fails_with(bucket, Status.KEY_ENOENT, DcpOpcode.ABORT)
    assert not fails_with(bucket, Status.KEY_ENOENT, DcpOpcode.STREAM_END)


def test_answers_to_nothing_are_ignored(bucket: FakeBucket) -> None:
    reader = FakeReader(bucket)
    reader.open()
    reader.stream()
    for opcode in (DcpOpcode.SNAPSHOT_MARKER, DcpOpcode.SET_VBUCKET_STATE, DcpOpcode.MUTATION):
        reader.respond(opcode, 0x1001)
        reader.respond(opcode, 0xFFFF)
    assert reader.producer.close_requested is None


# Fairness, and what a reader costs


def test_streams_move_at_the_same_pace() -> None:
    bucket = FakeBucket(1024)
    for vbucket in bucket.vbuckets:
        for number in range(20):
            vbucket.set(b"%d" % number, bytes(1000))
        vbucket.close_checkpoint()
        for number in range(20):
            vbucket.set(b"%d" % number, bytes(1000))
    reader = FakeReader(bucket)
    reader.open()
    for number in range(1024):
        reader.request(number)
    total = 1024 * 40
    while len(reader.received) < total:
        assert reader.pull(64 << 10)
        ends = sorted(stream.last_seqno for stream in reader.streams.values())
        # no stream has begun the second round before all have had the first
        assert not (ends[0] == 0 and ends[-1] > 40)
    reader.pull_all()
    assert all(stream.last_seqno == 40 for stream in reader.streams.values())


def backfilling(count: int, size: int, **controls: Any) -> FakeReader:
    bucket = FakeBucket(count)
    for vbucket in bucket.vbuckets:
        for number in range(size):
            vbucket.set(b"%d" % number, bytes(PART))
        vbucket.to_disk()
    reader = FakeReader(bucket)
    reader.open(**controls)
    for number in range(count):
        reader.request(number, end_seqno=size)
    return reader


def open_backfills(reader: FakeReader) -> int:
    return sum(
        not snapshot.is_closed for vbucket in reader.host.bucket.vbuckets for snapshot in vbucket.snapshots
    )


def test_round_robin_backfills() -> None:
    count = BACKFILL_BUFFER // CHUNK_BYTES
    reader = backfilling(count, 100)
    order: list[int] = []
    while reader.pull(CHUNK_BYTES):
        order += [frame.vbucket for frame, _ in reader.received[len(order) :]]
    first_end = order.index(next(f.vbucket for f, _ in reader.received if f.opcode == DcpOpcode.STREAM_END))
    assert first_end < len(order)
    seen_before_any_end = {
        frame.vbucket
        for frame, _ in reader.received[
            : next(at for at, (f, _) in enumerate(reader.received) if f.opcode == DcpOpcode.STREAM_END)
        ]
    }
    assert seen_before_any_end == set(range(count))
    assert Counter(s.ended for s in reader.streams.values()) == {StreamEndStatus.OK: count}


def test_sequential_backfills() -> None:
    reader = backfilling(8, 100, backfill_order="sequential")
    reader.pull_all(CHUNK_BYTES)
    order = [frame.vbucket for frame, _ in reader.received]
    assert order == sorted(order), "one after the other"
    assert all(stream.ended == StreamEndStatus.OK for stream in reader.streams.values())


def test_backfills_have_a_limit() -> None:
    reader = backfilling(50, 60)
    most = 0
    while reader.pull(CHUNK_BYTES):
        most = max(most, open_backfills(reader))
    assert 1 < most <= BACKFILL_BUFFER // CHUNK_BYTES
    assert all(stream.ended == StreamEndStatus.OK for stream in reader.streams.values())


def test_backfill_waits_only_for_a_slot() -> None:
    """A stream that ends while it waits, or while it holds a slot, blocks no other."""
    reader = backfilling(3, 400, backfill_order="sequential")
    reader.pull(CHUNK_BYTES)
    reader.pull(CHUNK_BYTES)
    assert reader.close_stream(1) == Status.SUCCESS
    assert reader.close_stream(0) == Status.SUCCESS
    reader.pull_all()
    assert [stream.ended for stream in reader.streams.values()] == [None, None, StreamEndStatus.OK]


def test_changes_do_not_wake_a_backfill_that_waits_for_a_slot() -> None:
    reader = backfilling(3, 800, backfill_order="sequential")
    reader.pull(CHUNK_BYTES)
    reader.pull(CHUNK_BYTES)
    reader.woken = 0
    for _ in range(5):
        reader.host.bucket.vbuckets[2].set(b"more")
        reader.pull(1)
    assert reader.woken == 0
    assert len(reader.producer._slots._waiting) == 2
    reader.pull_all()
    assert all(stream.ended == StreamEndStatus.OK for stream in reader.streams.values())


def test_stalled_reader_costs_one_chunk() -> None:
    reader = backfilling(50, 60, connection_buffer_size="100000")
    reader.pull_all(CHUNK_BYTES)
    assert reader.outstanding >= 100_000
    assert open_backfills(reader) <= 2
    reads = [len(snapshot._changes) for v in reader.host.bucket.vbuckets for snapshot in v.snapshots]
    assert sum(60 - left for left in reads) * PART <= 2 * CHUNK_BYTES


def test_snapshot_from_memory_is_finished_before_another_is_begun() -> None:
    bucket = FakeBucket(3)
    for vbucket in bucket.vbuckets:
        for number in range(100):
            vbucket.set(b"%d" % number, bytes(PART))
    reader = FakeReader(bucket)
    reader.open()
    for number in range(3):
        reader.request(number)
    while reader.pull(100_000):
        assert open_backfills(reader) <= 1
    assert all(stream.last_seqno == 100 for stream in reader.streams.values())


def test_a_vbucket_that_is_written_faster_than_it_is_sent_lets_others_work() -> None:
    """There was always another snapshot in memory, so it stayed in front forever."""
    bucket = FakeBucket(2)
    reader = FakeReader(bucket)
    reader.open()
    hot, other = (reader.stream(number) for number in range(2))
    for number in range(10):
        for part in range(120):
            bucket.vbuckets[0].set(b"%d %d" % (number, part), bytes(PART))
        reader.pull(10 * PART)
        if not number:
            bucket.vbuckets[1].set(b"k")
    assert 0 < hot.last_seqno < bucket.vbuckets[0].high_seqno
    assert other.last_seqno == 1


def test_a_replica_that_waits_for_the_rest_of_a_snapshot_holds_no_slot() -> None:
    bucket = FakeBucket(2)
    bucket.use_collections()
    for vbucket in bucket.vbuckets:
        for number in range(6):
            vbucket.set(b"%d" % number)
        vbucket.to_disk()
    replica = bucket.vbuckets[0]
    replica.state = VBucketState.REPLICA
    replica.received = SnapshotRange(3, 8)
    reader = FakeReader(bucket, features=frozenset())
    reader.open(backfill_order="sequential")
    waiting, other = (reader.stream(number) for number in range(2))
    assert (waiting.last_seqno, other.last_seqno) == (0, 6)
    replica.set(b"7")
    replica.set(b"8")
    replica.to_disk()
    reader.pull_all()
    assert waiting.last_seqno == 8


def test_looking_through_what_is_not_wanted_lets_others_work() -> None:
    """A filter that drops everything must not keep the node busy in one call."""
    bucket = FakeBucket(1)
    bucket.use_collections()
    for number in range(200):
        bucket.vbuckets[0].set(b"%d" % number, bytes(PART), collection=9)
    bucket.vbuckets[0].to_disk()
    reader = FakeReader(bucket)
    reader.open()
    answer = reader.request(value={"collections": ["8"]})
    calls = 0
    while not reader.streams[answer.opaque].last_seqno:
        reader.woken = 0
        if not reader.pull(CHUNK_BYTES):
            assert reader.woken == 1, "it must be asked again"
        calls += 1
    assert calls >= 200 * PART // (2 * CHUNK_BYTES)


def test_stats_tell_of_every_stream(bucket: FakeBucket) -> None:
    bucket.vbuckets[2].set(b"k")
    reader = FakeReader(bucket)
    reader.open(name=b"caf\xc3\xa9\xff")
    reader.stream(2)
    stats = reader.producer.stats()
    assert stats["name"] == "caf\u00e9\\xff"
    assert (stats["num_streams"], stats["stream_2_last_sent_seqno"]) == (1, 1)


def test_open_message_survives(bucket: FakeBucket) -> None:
    """The first frame that a session hands over is the Open itself."""
    reader = FakeReader(bucket)
    reader.send(DcpOpen(key=b"x", flags=PRODUCER, opaque=42))
    reader.pull(0)
    assert [(answer.opaque, answer.status) for answer in reader.answers] == [(42, 0)]
