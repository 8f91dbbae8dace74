"""The decision on a stream request: every rule of docs/spec/dcp.md#stream-request, and their order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.producer_fakes import COLLECTIONS, FULL, PRODUCER, UUID, FakeBucket, FakeReader
from tailrace.errors import MalformedMessage
from tailrace.history import FailoverEntry, FailoverLog
from tailrace.model import SnapshotRange
from tailrace.protocol.stream_filter import MAX_COLLECTIONS, StreamValue, parse_stream_value
from tailrace.wire.codes import AddStreamFlag, Feature, Status, StreamEndStatus, VBucketState
from tailrace.wire.fields import decode_failover_log
from tailrace.wire.header import Frame

OLD_CLIENT = frozenset[int]()
HIGH = 10


@pytest.fixture
def bucket() -> FakeBucket:
    made = FakeBucket()
    made.use_collections()
    for number in range(HIGH):
        made.vbuckets[0].set(b"k%d" % number)
    made.vbuckets[0].to_disk(keep_memory=True)
    return made


@pytest.fixture
def reader(bucket: FakeBucket) -> FakeReader:
    made = FakeReader(bucket)
    made.open()
    return made


def at(seqno: int, start: int | None = None, end: int | None = None, uuid: int = UUID) -> dict[str, int]:
    return {
        "start_seqno": seqno,
        "snapshot_start": seqno if start is None else start,
        "snapshot_end": seqno if end is None else end,
        "vb_uuid": uuid,
    }


def test_success_has_the_failover_log(bucket: FakeBucket, reader: FakeReader) -> None:
    bucket.vbuckets[0].failover_log = FailoverLog((FailoverEntry(0x2222, 3), FailoverEntry(UUID, 0)))
    answer = reader.request()
    assert answer.status == Status.SUCCESS
    assert decode_failover_log(answer.value) == [(0x2222, 3), (UUID, 0)]
    assert (answer.extras_length, answer.key_length, answer.datatype) == (0, 0, 0)


# rules 2, 3


@pytest.mark.parametrize("vbucket", [4, 1023, 0xFFFF])
def test_no_such_vbucket(reader: FakeReader, vbucket: int) -> None:
    assert reader.request(vbucket).status == Status.NOT_MY_VBUCKET


def test_deleted_vbucket(bucket: FakeBucket, reader: FakeReader) -> None:
    bucket.delete(0)
    assert reader.request().status == Status.NOT_MY_VBUCKET


@pytest.mark.parametrize("state", VBucketState)
@pytest.mark.parametrize("active_only", [True, False])
def test_states(bucket: FakeBucket, reader: FakeReader, state: VBucketState, active_only: bool) -> None:
    bucket.set_state(0, state)
    answer = reader.request(flags=AddStreamFlag.ACTIVE_VB_ONLY if active_only else 0)
    readable = {VBucketState.ACTIVE} if active_only else {VBucketState.ACTIVE, VBucketState.REPLICA}
    assert answer.status == (Status.SUCCESS if state in readable else Status.NOT_MY_VBUCKET)


# rule 4


@pytest.mark.parametrize("uuid", [0, UUID])
def test_from_latest(reader: FakeReader, uuid: int) -> None:
    answer = reader.request(flags=AddStreamFlag.FROM_LATEST, **at(99, 1, 2, uuid))
    assert answer.status == Status.SUCCESS


def test_from_latest_on_a_branch_that_is_unknown(reader: FakeReader) -> None:
    answer = reader.request(flags=AddStreamFlag.FROM_LATEST, **at(0, uuid=1))
    assert answer.status == Status.ROLLBACK


# rule 5


@pytest.mark.parametrize(
    ("features", "flags", "noop", "status"),
    [
        (OLD_CLIENT, PRODUCER, False, Status.SUCCESS),
        (OLD_CLIENT, FULL, False, Status.NOT_SUPPORTED),
        (COLLECTIONS, PRODUCER, False, Status.NOT_SUPPORTED),
        (OLD_CLIENT, FULL, True, Status.SUCCESS),
        (COLLECTIONS, PRODUCER, True, Status.SUCCESS),
    ],
)
def test_noop_is_mandatory(
    bucket: FakeBucket, features: frozenset[int], flags: int, noop: bool, status: Status
) -> None:
    reader = FakeReader(bucket, features=features)
    reader.open(flags, noop=noop)
    assert reader.request().status == status


# rules 6, 7


@pytest.mark.parametrize(
    "fields",
    [
        {**at(5), "end_seqno": 4},
        {**at(5), "end_seqno": 4, "flags": AddStreamFlag.TO_LATEST},
        at(5, 6, 7),
        at(5, 1, 4),
        at(5, 7, 3),
    ],
)
def test_out_of_range(reader: FakeReader, fields: dict[str, int]) -> None:
    assert reader.request(**fields).status == Status.ERANGE


# rule 8


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b"1",
        b"null",
        b"{}",
        b'{"unknown":1}',
        b'{"uid":1}',
        b'{"uid":""}',
        b'{"uid":"xyz"}',
        b'{"uid":"0x1"}',
        b'{"uid":"11112222333344445"}',
        b'{"collections":"8"}',
        b'{"collections":[]}',
        b'{"collections":[8]}',
        b'{"collections":["8 "]}',
        b'{"collections":["123456789"]}',
        b'{"scope":10}',
        b'{"scope":["a"]}',
        b'{"collections":["8"],"scope":"a"}',
        b'{"purge_seqno":5}',
        b'{"purge_seqno":"0x5"}',
        b'{"purge_seqno":"99999999999999999999"}',
        b'{"uid":"0","sid":1.0}',
        b'{"uid":"0","sid":"1"}',
        b'{"uid":"0","sid":true}',
        b'{"uid":"0","x":NaN}',
        b'{"uid":"0"}trailing',
        b'{"uid":' * 100_000,
        b"[" * 100_000,
        b'{"uid":"0","sid":' + b"9" * 5000 + b"}",
        b'{"collections":[' + b'"8",' * MAX_COLLECTIONS + b'"8"]}',
    ],
    ids=lambda value: value[:40].decode("latin1"),
)
def test_bad_json(reader: FakeReader, value: bytes) -> None:
    assert reader.request(value=value).status == Status.EINVAL
    assert reader.producer.close_requested is None


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ({"uid": "0"}, Status.SUCCESS),
        ({"uid": "FFFFffff00000000", "unknown": [1]}, Status.SUCCESS),
        ({"collections": ["8", "80"]}, Status.SUCCESS),
        ({"collections": ["0"]}, Status.SUCCESS),
        ({"scope": "A"}, Status.SUCCESS),
        ({"purge_seqno": "18446744073709551615"}, Status.SUCCESS),
        ({"cts": {"free_memory": 1}}, Status.SUCCESS),
        ({"collections": ["8", "7"]}, Status.UNKNOWN_COLLECTION),
        ({"scope": "b"}, Status.UNKNOWN_SCOPE),
    ],
)
def test_json(reader: FakeReader, value: Any, status: Status) -> None:
    answer = reader.request(value=value)
    assert answer.status == status
    if status != Status.SUCCESS:
        assert answer.value == b'{"manifest_uid":"a"}'


@given(st.binary(max_size=60))
def test_any_value_is_read_or_refused(value: bytes) -> None:
    try:
        assert isinstance(parse_stream_value(value), StreamValue)
    except MalformedMessage as error:
        assert error.status in (Status.EINVAL, Status.DCP_STREAMID_INVALID)


def test_value_without_collections(bucket: FakeBucket) -> None:
    old = FakeReader(bucket, features=OLD_CLIENT)
    old.open(PRODUCER, noop=False)
    assert old.request(value={"uid": "0"}).status == Status.EINVAL


@pytest.mark.parametrize(
    ("features", "status"),
    [(OLD_CLIENT, Status.EINVAL), (OLD_CLIENT | {int(Feature.XERROR)}, Status.UNKNOWN_COLLECTION)],
)
def test_old_client_without_default_collection(
    bucket: FakeBucket, features: frozenset[int], status: Status
) -> None:
    del bucket.manifest["scopes"][0]["collections"][0]
    old = FakeReader(bucket, features=features)
    old.open(PRODUCER, noop=False)
    assert old.request().status == status


# rules 9, 10, 11


def test_stream_id_missing_or_unexpected(bucket: FakeBucket, reader: FakeReader) -> None:
    assert reader.request(value={"sid": 1}).status == Status.DCP_STREAMID_INVALID
    reader.control("enable_stream_id", "true")
    assert reader.request().status == Status.DCP_STREAMID_INVALID
    assert reader.request(value={"uid": "0"}).status == Status.DCP_STREAMID_INVALID
    for number in (0, -1, 65536):
        assert reader.request(value={"sid": number}).status == Status.DCP_STREAMID_INVALID
    assert reader.request(value={"sid": 1}).status == Status.SUCCESS
    assert reader.request(value={"sid": 65535}).status == Status.SUCCESS
    assert reader.request(value={"sid": 1}).status == Status.KEY_EEXISTS


def test_filter_and_sync_writes(reader: FakeReader) -> None:
    reader.control("enable_sync_writes", "true")
    for value in ({"collections": ["8"]}, {"scope": "a"}):
        assert reader.request(value=value).status == Status.NOT_SUPPORTED
    assert reader.request(value={"uid": "0"}).status == Status.SUCCESS


def test_stream_exists(reader: FakeReader) -> None:
    assert reader.request().status == Status.SUCCESS
    assert reader.request().status == Status.KEY_EEXISTS
    assert reader.request(1).status == Status.SUCCESS
    assert reader.close_stream() == Status.SUCCESS
    assert reader.request().status == Status.SUCCESS


def test_dead_stream_is_replaced(bucket: FakeBucket, reader: FakeReader) -> None:
    """A stream that is over but could not say so, because the window is full."""
    reader.control("connection_buffer_size", "1")
    first = reader.request()
    reader.pull()
    bucket.set_state(0, VBucketState.REPLICA)
    assert reader.request().status == Status.SUCCESS
    reader.ack(1 << 20)
    reader.control("connection_buffer_size", "0")
    reader.pull_all()
    assert reader.streams[first.opaque].ended is None
    assert reader.streams[reader.answers[-2].opaque].last_seqno == HIGH


# rule 12: the worked cases of docs/spec/dcp.md#rollback-decision; that rule itself is tested with `history`.

LOG = FailoverLog((FailoverEntry(0x2222, 3), FailoverEntry(0x1111, 0)))
ONE = FailoverLog((FailoverEntry(0x1111, 0),))


@pytest.mark.parametrize(
    ("log", "fields", "purge", "seen", "rollback"),
    [
        (LOG, at(3, 1, 4, 0x1111), 0, 0, 1),
        (LOG, at(3, 3, 3, 0x1111), 0, 0, None),
        (LOG, at(6, 5, 8, 0x1111), 0, 0, 3),
        (LOG, at(9, 4, 9, 0x2222), 0, 0, None),
        (LOG, at(2, 2, 2, 0x9999), 0, 0, 0),
        (LOG, at(4, 4, 4, 0x2222), 5, 0, 0),
        (LOG, at(4, 4, 4, 0x2222), 5, 5, None),
        (ONE, at(11, 11, 20, 0x1111), 0, 0, 10),
        (ONE, at(8, 8, 20, 0x1111), 0, 0, None),
        (ONE, at(5, uuid=0), 0, 0, 0),
    ],
)
def test_rollback(
    *,
    bucket: FakeBucket,
    reader: FakeReader,
    log: FailoverLog,
    fields: dict[str, int],
    purge: int,
    seen: int,
    rollback: int | None,
) -> None:
    bucket.vbuckets[0].failover_log = log
    bucket.vbuckets[0].purge_seqno = purge
    answer = reader.request(**fields, value={"purge_seqno": str(seen)})
    if rollback is None:
        assert answer.status == Status.SUCCESS
    else:
        assert (answer.status, answer.extras_length) == (Status.ROLLBACK, 0)
        assert int.from_bytes(answer.value, "big") == rollback


@pytest.mark.parametrize("uuid", [0, 1])
@pytest.mark.parametrize("strict", [True, False])
def test_strict_uuid(reader: FakeReader, uuid: int, strict: bool) -> None:
    answer = reader.request(**at(0, uuid=uuid), flags=AddStreamFlag.STRICT_VB_UUID if strict else 0)
    assert answer.status == (Status.ROLLBACK if strict and uuid else Status.SUCCESS)


def test_ignore_purged(bucket: FakeBucket, reader: FakeReader) -> None:
    bucket.vbuckets[0].purge_seqno = 5
    assert reader.request(**at(4)).status == Status.ROLLBACK
    assert reader.request(**at(4), flags=AddStreamFlag.IGNORE_PURGED_TOMBSTONES).status == Status.SUCCESS


def test_purge_above_all_that_a_filter_asks_for(bucket: FakeBucket, reader: FakeReader) -> None:
    bucket.vbuckets[0].purge_seqno = 5
    assert reader.request(**at(4), value={"collections": ["8"]}).status == Status.SUCCESS
    assert reader.request(1, **at(0), value={"collections": ["0"]}).status == Status.SUCCESS


# rules 13, 14


def test_disk_only_beyond_the_disk(bucket: FakeBucket, reader: FakeReader) -> None:
    bucket.vbuckets[0].set(b"in memory")
    assert reader.request(**at(11), flags=AddStreamFlag.DISK_ONLY).status == Status.ERANGE
    stream = reader.stream(**at(10), flags=AddStreamFlag.DISK_ONLY)
    assert stream.ended == StreamEndStatus.OK


@pytest.mark.parametrize("state", [VBucketState.ACTIVE, VBucketState.REPLICA])
def test_a_log_that_is_ahead_of_the_data(bucket: FakeBucket, reader: FakeReader, state: VBucketState) -> None:
    """A replica has its active's log first and the changes later; its reader had more of them elsewhere."""
    bucket.vbuckets[0].state = state
    bucket.vbuckets[0].failover_log = FailoverLog((FailoverEntry(0x2222, 12), FailoverEntry(UUID, 0)))
    expected = Status.ETMPFAIL if state is VBucketState.REPLICA else Status.ERANGE
    assert reader.request(**at(12)).status == expected
    assert reader.request(**at(10)).status == Status.SUCCESS


def test_to_latest_of_a_filter_that_lies_behind(reader: FakeReader) -> None:
    answer = reader.request(**at(4), value={"collections": ["8"]}, flags=AddStreamFlag.TO_LATEST)
    assert answer.status == Status.ERANGE


def test_takeover_never_ends_by_itself(reader: FakeReader) -> None:
    answer = reader.request(end_seqno=3, flags=AddStreamFlag.TAKE_OVER)
    reader.pull_all()
    assert reader.streams[answer.opaque].ended is None
    assert reader.producer.stats()["stream_0_end_seqno"] == 2**64 - 1


# rules 16, 17


def test_backfills_wait(reader: FakeReader) -> None:
    reader.host.memory_short = True
    assert reader.request().status == Status.ENOMEM


def test_replica_in_its_first_snapshot(bucket: FakeBucket, reader: FakeReader) -> None:
    replica = bucket.vbuckets[1]
    replica.state = VBucketState.REPLICA
    assert reader.request(1).status == Status.SUCCESS, "an empty one has nothing to wait for"
    reader.close_stream(1)
    replica.received = SnapshotRange(0, 100)
    replica.set(b"half")
    assert reader.request(1).status == Status.ETMPFAIL


# flags


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (AddStreamFlag.NO_VALUE, Status.EINVAL),
        (0x200, Status.EINVAL),
        (0x8000_0000, Status.EINVAL),
        (AddStreamFlag.CACHE_TRANSFER | AddStreamFlag.TO_LATEST, Status.EINVAL),
        (AddStreamFlag.CACHE_TRANSFER, Status.NOT_SUPPORTED),
    ],
)
def test_flags(reader: FakeReader, flags: int, status: Status) -> None:
    reader._opaque += 1
    frame = bytearray.fromhex("805300003000000000000030" + "00001000" + "00" * 8) + bytearray(48)
    frame[24:28] = int(flags).to_bytes(4, "big")
    frame[40:48] = b"\xff" * 8
    reader.producer.receive_frame(Frame.parse(frame), reader.now)
    assert reader.status_of_last() == status


# Order: each earlier step wins over each later one.


def break_step(step: int, bucket: FakeBucket, reader: FakeReader, fields: dict[str, Any]) -> Status:
    """Make one step of the decision fail; returns its answer."""
    vbucket = bucket.vbuckets[0]
    if step == 3:
        vbucket.state = VBucketState.DEAD
        return Status.NOT_MY_VBUCKET
    if step == 5:
        reader.control("enable_noop", "false")
        return Status.NOT_SUPPORTED
    if step == 7:
        fields |= {"snapshot_start": 6, "snapshot_end": 9}
        return Status.ERANGE
    if step == 8:
        fields["value"] = {"collections": ["77"], "sid": fields["value"].get("sid", 1)}
        return Status.UNKNOWN_COLLECTION
    if step == 9:
        fields["value"] = {**fields["value"], "uid": "0"}
        fields["value"].pop("sid")
        return Status.DCP_STREAMID_INVALID
    if step == 11:
        assert reader.request(value={"sid": 1}).status == Status.SUCCESS
        return Status.KEY_EEXISTS
    if step == 12:
        fields["vb_uuid"] = 5
        return Status.ROLLBACK
    reader.host.memory_short = True
    return Status.ENOMEM


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations([3, 5, 7, 8, 9, 11, 12, 16], 2)))
def test_order(bucket: FakeBucket, reader: FakeReader, first: int, second: int) -> None:
    reader.control("enable_stream_id", "true")
    fields: dict[str, Any] = {**at(5), "value": {"sid": 1}}
    # what changes the state of the world last, or the preparation of another step would fail too
    statuses = {
        step: break_step(step, bucket, reader, fields)
        for step in sorted((first, second), key=lambda step: (step != 11, step == 3, step == 5, step))
    }
    assert reader.request(**fields).status == statuses[first]
