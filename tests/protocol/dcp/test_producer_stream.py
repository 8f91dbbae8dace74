"""What a stream sends: markers, changes, ends; from memory, from disk, and when it switches."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.producer_fakes import (
    COLLECTIONS,
    FULL,
    PRODUCER,
    UUID,
    FakeBucket,
    FakeHost,
    FakeReader,
)
from tailrace.errors import StoreCorrupt
from tailrace.frames import CHUNK_BYTES
from tailrace.model import SnapshotRange
from tailrace.protocol.dcp.producer_stream import SKIPPED_BEFORE_ADVANCE
from tailrace.wire.codes import (
    AddStreamFlag,
    DcpOpcode,
    MarkerFlag,
    OpenFlag,
    OsoFlag,
    Status,
    StreamEndStatus,
    SystemEventId,
    VBucketState,
)
from tailrace.wire.dcp import (
    DcpDeletion,
    DcpExpiration,
    DcpMutation,
    DcpOsoSnapshot,
    DcpSeqnoAdvanced,
    DcpSnapshotMarker,
    DcpSystemEvent,
)

MEMORY = MarkerFlag.MEMORY
CHECKPOINT = MarkerFlag.CHECKPOINT
DISK = MarkerFlag.DISK | MarkerFlag.CHECKPOINT
OLD_CLIENT = frozenset[int]()


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


def filled(bucket: FakeBucket, count: int = 5, vbucket: int = 0) -> None:
    for number in range(count):
        bucket.vbuckets[vbucket].set(b"key%d" % number, b"value%d" % number)


def opened(bucket: FakeBucket, flags: int = FULL, **controls: Any) -> FakeReader:
    reader = FakeReader(bucket)
    reader.open(flags, **controls)
    return reader


def ranges(markers: list[DcpSnapshotMarker]) -> list[tuple[int, int, int]]:
    return [(marker.start, marker.end, marker.flags) for marker in markers]


# Markers.


def test_memory_then_live(bucket: FakeBucket) -> None:
    filled(bucket)
    reader = opened(bucket)
    stream = reader.stream()
    assert ranges(stream.markers) == [(0, 5, MEMORY | CHECKPOINT)]
    assert [item.by_seqno for item in stream.items] == [1, 2, 3, 4, 5]

    reader.woken = 0
    bucket.vbuckets[0].set(b"more")
    assert reader.woken == 1
    bucket.vbuckets[0].set(b"more2")
    assert reader.woken == 1, "it is known already"
    reader.pull_all()
    assert ranges(stream.markers)[1:] == [(6, 7, MEMORY)]
    assert stream.ended is None


def test_first_marker_starts_at_the_requested_snapshot(bucket: FakeBucket) -> None:
    filled(bucket)
    for memory in (True, False):
        if not memory:
            bucket.vbuckets[0].to_disk()
        stream = opened(bucket).stream(start_seqno=3, vb_uuid=UUID, snapshot_start=2, snapshot_end=4)
        assert [(marker.start, marker.end) for marker in stream.markers] == [(2, 5)]
        assert [item.by_seqno for item in stream.items] == [4, 5]


def test_marker_of_a_folded_memory_snapshot_starts_at_its_first_item(bucket: FakeBucket) -> None:
    filled(bucket, 2)
    reader = opened(bucket)
    stream = reader.stream()
    for key in (b"a", b"b", b"a"):
        bucket.vbuckets[0].set(key)
    reader.pull_all()
    assert ranges(stream.markers)[1:] == [(4, 5, MEMORY)], "change 3 was folded away"


def test_marker_at_a_checkpoint(bucket: FakeBucket) -> None:
    filled(bucket, 2)
    bucket.vbuckets[0].close_checkpoint()
    filled(bucket, 3)
    stream = opened(bucket).stream()
    assert ranges(stream.markers) == [(0, 2, MEMORY | CHECKPOINT), (3, 5, MEMORY | CHECKPOINT)]


def test_disk_then_memory(bucket: FakeBucket) -> None:
    filled(bucket, 3)
    bucket.vbuckets[0].to_disk()
    bucket.vbuckets[0].set(b"key0")
    stream = opened(bucket).stream()
    assert ranges(stream.markers) == [(0, 3, DISK), (4, 4, MEMORY)]


def test_cursor_dropped_back_to_disk(bucket: FakeBucket) -> None:
    filled(bucket, 2)
    reader = opened(bucket)
    stream = reader.stream()
    filled(bucket, 4)
    bucket.vbuckets[0].to_disk()
    bucket.vbuckets[0].set(b"last")
    reader.pull_all()
    assert ranges(stream.markers) == [(0, 2, MEMORY | CHECKPOINT), (3, 6, DISK), (7, 7, MEMORY)]
    assert reader.host.events == [{"event": "slow_reader_reads_from_disk", "vbucket": 0, "lag_changes": 5}]


def test_marker_v2_2_for_disk_only(bucket: FakeBucket) -> None:
    filled(bucket, 3)
    bucket.vbuckets[0].to_disk()
    bucket.vbuckets[0].set(b"live")
    bucket.vbuckets[0].purge_seqno = 2
    stream = opened(bucket, max_marker_version="2.2").stream()
    disk, memory = stream.markers
    assert (disk.version, disk.purge_seqno, disk.max_visible_seqno) == (2, 2, 3)
    assert memory.version is None


@pytest.mark.parametrize("start", [0, 2])
def test_where_purged_deletions_are_missing_memory_is_told_as_disk(bucket: FakeBucket, start: int) -> None:
    """What a replica received from a disk may all be in its memory, and it is promoted."""
    filled(bucket, 3)
    bucket.vbuckets[0].purge_seqno = 2
    log = bucket.vbuckets[0].failover_log
    reader = opened(bucket, max_marker_version="2.2")
    stream = reader.stream(
        start_seqno=start, vb_uuid=log.newest.vb_uuid, snapshot_start=start, snapshot_end=start
    )
    (marker,) = stream.markers
    assert marker.end == 3
    assert (bool(marker.flags & MarkerFlag.DISK), marker.purge_seqno) == (
        (False, None) if start else (True, 2)
    )


def test_marker_v2_0_for_sync_replication(bucket: FakeBucket) -> None:
    filled(bucket, 3)
    stream = opened(bucket, enable_sync_writes="true", consumer_name="replica").stream()
    assert [(marker.version, marker.max_visible_seqno) for marker in stream.markers] == [(0, 3)]


# Ends.


def test_runs_to_the_end_of_the_snapshot_that_holds_the_end(bucket: FakeBucket) -> None:
    filled(bucket)
    stream = opened(bucket).stream(end_seqno=3)
    assert stream.last_seqno == 5
    assert stream.ended == StreamEndStatus.OK


@pytest.mark.parametrize("end", [0, 5])
def test_start_is_end(bucket: FakeBucket, end: int) -> None:
    filled(bucket, end)
    reader = opened(bucket)
    stream = reader.stream(start_seqno=end, end_seqno=end, snapshot_start=end, snapshot_end=end, vb_uuid=UUID)
    assert stream.ended == StreamEndStatus.OK
    assert stream.markers == []
    assert reader.request().status == Status.SUCCESS, "the vbucket can be asked for again"


def test_to_latest_and_disk_only(bucket: FakeBucket) -> None:
    filled(bucket, 3)
    bucket.vbuckets[0].to_disk(keep_memory=True)
    bucket.vbuckets[0].set(b"not yet on disk")
    reader = opened(bucket)
    latest = reader.stream(flags=AddStreamFlag.TO_LATEST)
    assert (latest.last_seqno, latest.ended) == (4, StreamEndStatus.OK)
    disk = reader.stream(flags=AddStreamFlag.DISK_ONLY)
    assert ranges(disk.markers) == [(0, 3, DISK)]
    assert disk.ended == StreamEndStatus.OK


def test_from_latest(bucket: FakeBucket) -> None:
    filled(bucket)
    reader = opened(bucket)
    answer = reader.request(flags=AddStreamFlag.FROM_LATEST)
    stream = reader.streams[answer.opaque]
    bucket.vbuckets[0].set(b"new")
    reader.pull_all()
    assert [item.by_seqno for item in stream.items] == [6]
    assert ranges(stream.markers) == [(5, 6, MEMORY)]


@pytest.mark.parametrize("change", ["state", "rollback", "delete"])
def test_vbucket_is_not_what_it_was(bucket: FakeBucket, change: str) -> None:
    filled(bucket)
    reader = opened(bucket, connection_buffer_size="100")
    answer = reader.request()
    reader.pull()
    stream = reader.streams[answer.opaque]
    assert stream.items and not stream.is_complete, "in the middle of a snapshot"
    if change == "state":
        bucket.set_state(0, VBucketState.DEAD)
    elif change == "rollback":
        bucket.vbuckets[0].rollback(1, 0x77)
    else:
        bucket.delete(0)
    reader.ack(1000)
    reader.pull_all()
    assert stream.ended == StreamEndStatus.STATE_CHANGED
    assert stream.last_seqno < 5, "what was not sent before is not sent any more"


def test_rollback_of_a_replica_that_keeps_its_log(bucket: FakeBucket) -> None:
    filled(bucket)
    reader = opened(bucket)
    stream = reader.stream()
    vbucket = bucket.vbuckets[0]
    del vbucket.changes[3:]
    vbucket.high_seqno = 3
    vbucket.notify()
    reader.pull_all()
    assert stream.ended == StreamEndStatus.STATE_CHANGED


def test_backfill_fails(bucket: FakeBucket) -> None:
    filled(bucket)
    bucket.vbuckets[0].fails_with = StoreCorrupt("a segment is broken")
    stream = opened(bucket).stream()
    assert stream.ended == StreamEndStatus.BACKFILL_FAIL


@pytest.mark.parametrize("told", [True, False])
def test_close_stream(bucket: FakeBucket, told: bool) -> None:
    filled(bucket)
    reader = opened(bucket)
    if told:
        assert reader.control("send_stream_end_on_client_close_stream", "true") == Status.SUCCESS
    stream = reader.stream()
    assert reader.close_stream() == Status.SUCCESS
    reader.pull_all()
    assert stream.ended == (StreamEndStatus.CLOSED if told else None)
    assert reader.close_stream() == Status.KEY_ENOENT
    filled(bucket)
    reader.pull_all()
    assert stream.last_seqno == 5
    assert bucket.vbuckets[0].watchers == []
    assert not bucket.vbuckets[0].waiting


def test_lost_connection_says_nothing(bucket: FakeBucket) -> None:
    filled(bucket)
    reader = opened(bucket)
    stream = reader.stream()
    reader.producer.close("gone")
    reader.pull_all()
    assert stream.ended is None
    assert bucket.vbuckets[0].watchers == []
    assert not bucket.vbuckets[0].waiting
    assert all(snapshot.is_closed for snapshot in bucket.vbuckets[0].snapshots)


def test_only_who_has_everything_is_called_by_a_write(bucket: FakeBucket) -> None:
    """A write costs the same however many readers lag, and however far."""
    filled(bucket)
    vbucket = bucket.vbuckets[0]
    reader = opened(bucket)
    stream = reader.stream()
    assert (stream.last_seqno, len(vbucket.waiting)) == (5, 1)
    vbucket.set(b"next")
    assert not vbucket.waiting
    vbucket.set(b"last")
    reader.pull_all()
    assert (stream.last_seqno, len(vbucket.waiting)) == (7, 1)


def test_slow_backfill(bucket: FakeBucket) -> None:
    filled(bucket)
    bucket.vbuckets[0].to_disk()
    host = FakeHost(bucket, COLLECTIONS)
    host.settings.idle_timeout = 0
    reader = FakeReader(bucket, host=host)
    reader.open(connection_buffer_size="50")
    answer = reader.request()
    reader.pull()
    stream = reader.streams[answer.opaque]

    def wait(seconds: float) -> None:
        timer = reader.producer.next_timer()
        assert timer is not None
        reader.now += seconds
        reader.producer.handle_timer(reader.now)

    wait(0)
    wait(721)
    reader.ack(1000)
    reader.pull()
    assert stream.ended is None, "the disk has room"
    reader.host.disk_share = 0.95
    wait(0)
    wait(721)
    assert bucket.vbuckets[0].snapshots[-1].is_closed
    reader.ack(1000)
    reader.pull_all()
    assert stream.ended == StreamEndStatus.SLOW


# Purge.


def test_purge_between_request_and_backfill(bucket: FakeBucket) -> None:
    filled(bucket)
    reader = opened(bucket)
    stream = reader.stream()
    filled(bucket)
    bucket.vbuckets[0].to_disk()
    bucket.vbuckets[0].purge_seqno = 7
    reader.pull_all()
    assert stream.ended == StreamEndStatus.STATE_CHANGED
    again = reader.request(start_seqno=5, vb_uuid=UUID, snapshot_start=5, snapshot_end=5)
    assert (again.status, again.value) == (Status.ROLLBACK, bytes(8))


@pytest.mark.parametrize("how", ["flag", "seen", "below"])
def test_purge_that_does_not_matter(bucket: FakeBucket, how: str) -> None:
    filled(bucket)
    reader = opened(bucket)
    fields = {"start_seqno": 5, "vb_uuid": UUID, "snapshot_start": 5, "snapshot_end": 5}
    if how == "flag":
        fields["flags"] = AddStreamFlag.IGNORE_PURGED_TOMBSTONES
    stream = reader.stream(value={"purge_seqno": "7"} if how == "seen" else None, **fields)
    filled(bucket)
    bucket.vbuckets[0].to_disk()
    bucket.vbuckets[0].purge_seqno = 5 if how == "below" else 7
    reader.pull_all()
    assert stream.ended is None
    assert stream.last_seqno == 10


# Kinds of changes, as each reader wants them. Values are in test_shaping.


def test_tombstones(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"plain")
    vbucket.delete(b"deleted", delete_time=11)
    vbucket.delete(b"expired", delete_time=12, expired=True)

    plain, deleted, expired = opened(bucket, enable_expiry_opcode="true").stream().items
    assert isinstance(plain, DcpMutation)
    assert isinstance(deleted, DcpDeletion)
    assert (deleted.delete_time, deleted.nmeta) == (11, None)
    assert isinstance(expired, DcpExpiration)
    assert expired.delete_time == 12

    _, _, expired = opened(bucket).stream().items
    assert isinstance(expired, DcpDeletion), "the opcode was not asked for"
    assert expired.delete_time == 12

    _, deleted, expired = opened(bucket, PRODUCER, enable_expiry_opcode="true").stream().items
    assert isinstance(expired, DcpDeletion), "without delete times the opcode has no effect"
    assert deleted.nmeta == expired.nmeta == 0


def test_old_client_sees_the_default_collection_without_prefix(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.event(SystemEventId.COLLECTION_BEGIN, collection=8, name=b"one")
    vbucket.set(b"a")
    vbucket.set(b"x", collection=8)
    vbucket.delete(b"b")
    vbucket.set(b"y", collection=0x80)
    reader = FakeReader(bucket, features=OLD_CLIENT)
    reader.open(PRODUCER, noop=False)
    stream = reader.stream()
    assert [(item.by_seqno, item.key) for item in stream.items] == [(2, b"a"), (4, b"b")]
    assert [(marker.start, marker.end) for marker in stream.markers] == [(0, 4)], "cut to what is visible"
    vbucket.set(b"z", collection=8)
    reader.pull_all()
    assert len(stream.markers) == 1, "nothing to announce"
    vbucket.set(b"c")
    vbucket.set(b"z", collection=8)
    reader.pull_all()
    assert [(marker.start, marker.end) for marker in stream.markers][1:] == [(7, 7)]
    vbucket.event(SystemEventId.COLLECTION_END, collection=0)
    reader.pull_all()
    assert stream.ended == StreamEndStatus.OK


def test_old_client_reads_ahead_on_disk_only_as_far_as_is_persisted(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a")
    vbucket.set(b"x", collection=8)
    vbucket.to_disk()
    vbucket.set(b"later")
    reader = FakeReader(bucket, features=OLD_CLIENT)
    reader.open(PRODUCER, noop=False)
    stream = reader.stream()
    assert [(marker.start, marker.end) for marker in stream.markers] == [(0, 1), (3, 3)]


def test_system_events(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.event(SystemEventId.COLLECTION_BEGIN, collection=8, name=b"one", max_ttl=60)
    vbucket.event(SystemEventId.SCOPE_CREATED, scope=10, name=b"s")
    created, scope = opened(bucket).stream().items
    assert isinstance(created, DcpSystemEvent)
    assert (created.key, created.version, created.max_ttl) == (b"one", 1, 60)
    assert (scope.key, scope.version) == (b"s", 0)
    created, scope = opened(bucket, flatbuffers_system_events="true").stream().items
    assert (created.version, scope.version) == (2, 2)


# Filters.


def test_collection_filter(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.event(SystemEventId.COLLECTION_BEGIN, collection=8, name=b"one")
    vbucket.event(SystemEventId.COLLECTION_BEGIN, collection=9, name=b"two")
    vbucket.set(b"a", collection=8)
    vbucket.set(b"b", collection=9)
    reader = opened(bucket)
    stream = reader.stream(value={"collections": ["8"]})
    assert [item.by_seqno for item in stream.items] == [1, 3]
    assert stream.is_complete, "seqno advanced closes the snapshot"
    assert isinstance(reader.received[-1][1], DcpSeqnoAdvanced)
    vbucket.set(b"c", collection=9)
    reader.pull_all()
    assert (stream.last_seqno, stream.is_complete) == (5, True), "it may be the only message of a snapshot"
    vbucket.event(SystemEventId.COLLECTION_END, collection=9)
    vbucket.event(SystemEventId.COLLECTION_END, collection=8)
    vbucket.set(b"d", collection=9)
    reader.pull_all()
    assert stream.items[-1].by_seqno == 7
    assert stream.ended == StreamEndStatus.FILTER_EMPTY


def test_scope_filter_sees_later_collections(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a", collection=0x80)
    vbucket.set(b"b", collection=8)
    reader = opened(bucket)
    stream = reader.stream(value={"scope": "a"})
    vbucket.event(SystemEventId.COLLECTION_BEGIN, scope=10, collection=0x99, name=b"new")
    vbucket.set(b"c", collection=0x99)
    vbucket.event(SystemEventId.COLLECTION_BEGIN, scope=0, collection=0x9A, name=b"other")
    vbucket.event(SystemEventId.COLLECTION_END, scope=10, collection=0x80)
    vbucket.event(SystemEventId.COLLECTION_END, scope=10, collection=0x81)
    reader.pull_all()
    vbucket.event(SystemEventId.COLLECTION_END, scope=10, collection=0x99)
    reader.pull_all()
    assert [item.by_seqno for item in stream.items] == [1, 3, 4, 6, 7, 8]
    assert stream.ended is None, "the scope is still there"
    vbucket.event(SystemEventId.SCOPE_DROPPED, scope=10)
    reader.pull_all()
    assert stream.ended == StreamEndStatus.FILTER_EMPTY


def test_to_latest_of_a_filter(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a", collection=8)
    vbucket.close_checkpoint()
    vbucket.set(b"b", collection=9)
    stream = opened(bucket).stream(value={"collections": ["8"]}, flags=AddStreamFlag.TO_LATEST)
    assert (stream.last_seqno, stream.ended) == (1, StreamEndStatus.OK)


def test_long_filtered_backfill_tells_how_far_it_is(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    for number in range(2 * SKIPPED_BEFORE_ADVANCE + 5):
        vbucket.set(b"%d" % number, bytes(CHUNK_BYTES // SKIPPED_BEFORE_ADVANCE), collection=9)
    vbucket.set(b"mine", collection=8)
    vbucket.to_disk()
    reader = opened(bucket)
    stream = reader.stream(value={"collections": ["8"]})
    advanced = [m.by_seqno for _, m in reader.received if isinstance(m, DcpSeqnoAdvanced)]
    assert advanced and advanced[0] >= SKIPPED_BEFORE_ADVANCE
    assert len(stream.markers) == 1
    assert stream.items[-1].key == b"\x08mine"


def test_skip_deletes_in_initial_backfill(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a")
    vbucket.delete(b"b")
    vbucket.delete(b"c", expired=True)
    vbucket.to_disk()
    vbucket.delete(b"live")
    flags = FULL | OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL
    stream = opened(bucket, flags).stream()
    assert [item.key for item in stream.items] == [b"\x00a", b"\x00live"]
    assert [(marker.start, marker.end) for marker in stream.markers] == [(0, 3), (4, 4)]


# Out of sequence order.


@pytest.mark.parametrize("mode", ["true", "true_with_seqno_advanced"])
def test_oso(bucket: FakeBucket, mode: str) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a", collection=8)
    vbucket.set(b"b", collection=9)
    vbucket.to_disk()
    vbucket.set(b"c", collection=8)
    reader = opened(bucket, enable_out_of_order_snapshots=mode)
    stream = reader.stream(value={"collections": ["8"]})
    kinds = [type(message) for _, message in reader.received]
    advanced = [DcpSeqnoAdvanced] if mode != "true" else []
    assert kinds == [
        DcpOsoSnapshot,
        DcpMutation,
        *advanced,
        DcpOsoSnapshot,
        DcpSnapshotMarker,
        DcpMutation,
    ]
    flags = [m.flags for _, m in reader.received if isinstance(m, DcpOsoSnapshot)]
    assert flags == [OsoFlag.START, OsoFlag.END]
    assert [item.by_seqno for item in stream.items] == [1, 3]


def test_oso_comes_in_the_order_of_keys(bucket: FakeBucket) -> None:
    """The reader is then at the highest seqno, which was not sent last; nothing else has to be sent."""
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    for key in (b"c", b"a", b"d", b"b"):
        vbucket.set(key, collection=8)
    vbucket.to_disk()
    reader = opened(bucket, enable_out_of_order_snapshots="true_with_seqno_advanced")
    stream = reader.stream(value={"collections": ["8"]})
    assert [item.by_seqno for item in stream.items] == [2, 4, 1, 3]
    assert not any(isinstance(m, DcpSeqnoAdvanced) for _, m in reader.received)


@pytest.mark.parametrize("value", [None, {"collections": ["8", "9"]}, {"scope": "0"}])
def test_oso_only_for_one_collection(bucket: FakeBucket, value: object) -> None:
    bucket.use_collections()
    bucket.vbuckets[0].set(b"a", collection=8)
    bucket.vbuckets[0].to_disk()
    reader = opened(bucket, enable_out_of_order_snapshots="true")
    reader.stream(value=value)
    assert not any(isinstance(m, DcpOsoSnapshot) for _, m in reader.received)


# Replicas.


def test_replica_in_the_middle_of_a_snapshot(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    filled(bucket, 3)
    vbucket.close_checkpoint()
    vbucket.state = VBucketState.REPLICA
    vbucket.received = SnapshotRange(3, 8)
    vbucket.set(b"a")
    vbucket.set(b"b")
    reader = opened(bucket)
    stream = reader.stream(end_seqno=4)
    assert ranges(stream.markers) == [(0, 3, MEMORY | CHECKPOINT), (4, 8, MEMORY | CHECKPOINT)]
    assert (stream.is_complete, stream.ended) == (False, None)
    vbucket.set(b"c")
    reader.pull_all()
    assert len(stream.markers) == 2, "the rest follows without a marker"
    vbucket.set(b"d")
    vbucket.set(b"e")
    reader.pull_all()
    assert stream.is_complete
    assert stream.ended == StreamEndStatus.OK, "the end was raised to that of the snapshot"


def test_replica_that_has_nothing_of_its_next_snapshot_yet(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    filled(bucket, 3)
    vbucket.state = VBucketState.REPLICA
    vbucket.received = SnapshotRange(3, 8)
    reader = opened(bucket)
    stream = reader.stream()
    assert [(marker.start, marker.end) for marker in stream.markers] == [(0, 3)]
    assert stream.is_complete, "the rest may never come"
    vbucket.set(b"a")
    reader.pull_all()
    assert [(marker.start, marker.end) for marker in stream.markers][1:] == [(4, 8)]


def test_replica_whose_open_snapshot_may_repeat_its_last_key(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    filled(bucket, 3)
    reader = opened(bucket)
    vbucket.state = VBucketState.REPLICA
    vbucket.received = SnapshotRange(3, 6)
    vbucket.set(b"a")
    vbucket.to_disk()
    stream = reader.stream(start_seqno=2, snapshot_start=2, snapshot_end=2, vb_uuid=vbucket.uuid)
    assert stream.markers[0].flags & MarkerFlag.MAY_CONTAIN_DUPLICATES, "key2 may come again up to 6"


def test_replica_with_disk_across_its_open_snapshot(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    filled(bucket, 3)
    vbucket.state = VBucketState.REPLICA
    vbucket.received = SnapshotRange(3, 6)
    vbucket.set(b"a")
    vbucket.to_disk()
    reader = opened(bucket)
    stream = reader.stream()
    assert ranges(stream.markers) == [(0, 6, DISK | MarkerFlag.MAY_CONTAIN_DUPLICATES)]
    vbucket.set(b"key0")
    vbucket.set(b"b")
    vbucket.received = SnapshotRange(6, 9)
    vbucket.set(b"c")
    reader.pull_all()
    assert [(marker.start, marker.end) for marker in stream.markers][1:] == [(5, 9)]


def test_replica_of_whose_open_snapshot_nothing_is_for_the_stream(bucket: FakeBucket) -> None:
    """Its end is sent after a marker, even if it came in parts."""
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a", collection=9)
    vbucket.state = VBucketState.REPLICA
    vbucket.received = SnapshotRange(1, 3)
    reader = opened(bucket)
    stream = reader.stream(value={"collections": ["9"]})
    for key in (b"b", b"c"):
        vbucket.set(key, collection=8)
        reader.pull_all()
    assert [marker.end for marker in stream.markers] == [1, 3]
    assert stream.is_complete


# Stream ids.


def test_stream_ids(bucket: FakeBucket) -> None:
    bucket.use_collections()
    vbucket = bucket.vbuckets[0]
    vbucket.set(b"a", collection=8)
    vbucket.delete(b"b", collection=9)
    vbucket.delete(b"c", collection=8, expired=True)
    reader = opened(
        bucket,
        enable_stream_id="true",
        enable_expiry_opcode="true",
        send_stream_end_on_client_close_stream="true",
    )
    first = reader.stream(value={"collections": ["8"], "sid": 71})
    two = reader.stream(value={"collections": ["9"], "sid": 72})
    assert [item.key for item in first.items] == [b"\x08a", b"\x08c"]
    assert [item.key for item in two.items] == [b"\x09b"]
    assert {frame.framing for frame, _ in reader.received} == {b"\x22\x00\x47", b"\x22\x00\x48"}
    assert {frame.magic for frame, _ in reader.received} == {0x08}
    assert reader.close_stream() == Status.DCP_STREAMID_INVALID
    assert reader.close_stream(framing=b"\x22\x00\x49") == Status.DCP_STREAMID_INVALID
    assert reader.close_stream(vbucket=1, framing=b"\x22\x00\x49") == Status.KEY_ENOENT
    assert reader.close_stream(framing=b"\x22\x00\x48") == Status.SUCCESS
    reader.pull_all()
    assert (first.ended, two.ended) == (None, StreamEndStatus.CLOSED)
    assert reader.received[-1][0].framing == b"\x22\x00\x48"


# Takeover.


class Takeover:
    """A reader that takes a vbucket over."""

    def __init__(self, bucket: FakeBucket) -> None:
        self.reader = opened(bucket)
        self.answer = self.reader.request(flags=AddStreamFlag.TAKE_OVER)
        self.stream = self.reader.streams[self.answer.opaque]
        self.reader.pull_all()

    def respond(self, opcode: int) -> None:
        self.reader.respond(opcode, self.answer.opaque)
        self.reader.pull_all()

    @property
    def told(self) -> list[int]:
        return [
            message.state  # type: ignore[attr-defined]
            for frame, message in self.reader.received
            if frame.opcode == DcpOpcode.SET_VBUCKET_STATE
        ]


def test_takeover(bucket: FakeBucket) -> None:
    vbucket = bucket.vbuckets[0]
    filled(bucket, 3)
    vbucket.to_disk()
    vbucket.set(b"memory")
    takeover = Takeover(bucket)
    stream = takeover.stream
    assert ranges(stream.markers) == [
        (0, 3, DISK),
        (4, 4, MEMORY | CHECKPOINT | MarkerFlag.ACK),
    ]
    assert takeover.told == []
    takeover.respond(DcpOpcode.SNAPSHOT_MARKER)
    assert takeover.told == [VBucketState.PENDING]
    vbucket.set(b"meanwhile")
    takeover.reader.pull_all()
    assert stream.last_seqno == 4, "it waits"
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    assert vbucket.state == VBucketState.DEAD
    assert ranges(stream.markers)[2:] == [(5, 5, MEMORY | MarkerFlag.ACK)]
    assert takeover.told == [VBucketState.PENDING]
    takeover.respond(DcpOpcode.SNAPSHOT_MARKER)
    assert takeover.told == [VBucketState.PENDING, VBucketState.ACTIVE]
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    assert stream.ended == StreamEndStatus.OK
    assert vbucket.state == VBucketState.DEAD
    assert takeover.reader.host.events == [
        {"event": "takeover", "vbucket": 0, "step": step}
        for step in ("pending there", "dead here", "active there")
    ]


@pytest.mark.parametrize("failed", [None, "no space"])
def test_takeover_waits_until_its_vbucket_is_dead_on_disk(bucket: FakeBucket, failed: str | None) -> None:
    """A crash must not bring an active one back beside the new one."""
    vbucket = bucket.vbuckets[0]
    takeover = Takeover(bucket)
    host = takeover.reader.host
    host.rewrites = []
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    ((act, done),) = host.rewrites
    vbucket.set(b"before the disk had time for us")
    takeover.reader.pull_all()
    takeover.respond(DcpOpcode.SNAPSHOT_MARKER)
    assert vbucket.state == VBucketState.ACTIVE and takeover.stream.ended is None
    assert act(bucket) == [0]
    takeover.reader.pull_all()
    assert (vbucket.state, takeover.stream.ended) == (VBucketState.DEAD, None)
    assert takeover.told == [VBucketState.PENDING]
    done(failed)
    takeover.reader.pull_all()
    if failed:
        assert takeover.told == [VBucketState.PENDING]
        assert takeover.stream.ended == StreamEndStatus.STATE_CHANGED
    else:
        assert takeover.told == [VBucketState.PENDING, VBucketState.ACTIVE]
        takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
        assert takeover.stream.ended == StreamEndStatus.OK


def test_takeover_that_breaks_before_the_disk_had_time_changes_nothing(bucket: FakeBucket) -> None:
    takeover = Takeover(bucket)
    takeover.reader.host.rewrites = rewrites = []
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    takeover.reader.producer.close("gone")
    ((act, done),) = rewrites
    assert act(bucket) == []
    done(None)
    assert bucket.vbuckets[0].state == VBucketState.ACTIVE


def test_takeover_of_nothing(bucket: FakeBucket) -> None:
    takeover = Takeover(bucket)
    assert takeover.told == [VBucketState.PENDING]
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    assert takeover.told == [VBucketState.PENDING, VBucketState.ACTIVE]
    assert takeover.stream.ended == StreamEndStatus.OK


def test_takeover_that_takes_too_long_holds_writes(bucket: FakeBucket) -> None:
    takeover = Takeover(bucket)
    reader = takeover.reader
    assert reader.producer.next_timer() == reader.now, "the time is taken first"
    reader.producer.handle_timer(reader.now)
    assert reader.control("enable_noop", "false") == Status.SUCCESS
    assert reader.producer.next_timer() == reader.now + 60
    reader.now += 60
    reader.producer.handle_timer(reader.now)
    assert reader.host.held == {0}
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    assert reader.host.held == {0}
    takeover.respond(DcpOpcode.SET_VBUCKET_STATE)
    assert reader.host.held == set()


def test_takeover_that_breaks_lets_writes_go_on(bucket: FakeBucket) -> None:
    takeover = Takeover(bucket)
    reader = takeover.reader
    reader.producer.handle_timer(reader.now)
    reader.now += 61
    reader.producer.handle_timer(reader.now)
    assert reader.host.held == {0}
    reader.producer.close("gone")
    assert reader.host.held == set()
    assert bucket.vbuckets[0].state == VBucketState.ACTIVE


def test_takeover_ends_with_somebody_elses_state_change(bucket: FakeBucket) -> None:
    takeover = Takeover(bucket)
    bucket.set_state(0, VBucketState.REPLICA)
    takeover.reader.pull_all()
    assert takeover.stream.ended == StreamEndStatus.STATE_CHANGED
