"""Durable writes in the store: prepared, committed or aborted, and what stops, crashes, rollbacks and
compactions leave of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from store.conftest import Home
from store.helpers_store import seqno_of, stream
from tailrace.errors import DocumentRefused
from tailrace.frames import OPCODE_AT
from tailrace.protocol.dcp.replica_stream import ReplicaStream
from tailrace.store.base import Compaction, StoreSettings, Written
from tailrace.store.bucket import EngineBucket
from tailrace.store.format import StoredDocument, StoredPrepare, canonical, committed, rev_of
from tailrace.store.vbucket import EngineVBucket
from tailrace.wire.codes import DcpOpcode, DurabilityLevel, Status, VBucketState
from tailrace.wire.dcp_replication import DcpAbort, DcpPrepare

MAJORITY = int(DurabilityLevel.MAJORITY)
PERSIST = int(DurabilityLevel.PERSIST_TO_MAJORITY)
KEY = b"\0key"


def prepared(
    vbucket: EngineVBucket, act: Callable[[], Written], level: DurabilityLevel | int = MAJORITY
) -> Written:
    """What a durable write writes."""
    vbucket.begin_durable(int(level))
    try:
        return act()
    finally:
        vbucket.end_durable()


def prepare(vbucket: EngineVBucket, value: bytes = b"new", key: bytes = KEY, level: int = MAJORITY) -> int:
    return prepared(vbucket, lambda: vbucket.set(key, value), level).seqno


def value_of(vbucket: EngineVBucket, key: bytes = KEY) -> bytes | None:
    frame = vbucket.get(key)
    return None if frame is None else StoredDocument.of(frame).value


def refused(act: Callable[[], object]) -> int:
    with pytest.raises(DocumentRefused) as caught:
        act()
    return caught.value.status


def opcodes(vbucket: EngineVBucket, after: int = 0) -> list[tuple[int, int]]:
    """Opcode and seqno of everything that a stream gets."""
    return [
        (frame[OPCODE_AT], seqno_of(frame)) for snapshot in all_frames(vbucket, after) for frame in snapshot
    ]


def all_frames(vbucket: EngineVBucket, after: int = 0) -> list[list[bytes]]:
    """As `stream`, but a document may be there as prepare and as mutation."""
    snapshots = []
    while (snapshot := vbucket.snapshot_after(after)) is not None:
        frames: list[bytes] = []
        while (chunk := snapshot.read()) is not None:
            ends = [*chunk.offsets.tolist()[1:], len(chunk.data)]
            frames += [chunk.data[a:b].tobytes() for a, b in zip(chunk.offsets.tolist(), ends, strict=True)]
        snapshots.append(frames)
        after = snapshot.end
    return snapshots


class TestPrepared:
    def test_nobody_reads_it_before_it_is_committed(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"old")
        seqno = prepare(vbucket)
        assert seqno == vbucket.high_seqno == 2
        assert vbucket.visible_seqno == 1
        assert value_of(vbucket) == b"old"
        assert vbucket.item_count == 1
        assert vbucket.tombstone_count == 0
        assert [each.seqno for each in vbucket.undecided] == [2]
        written = vbucket.commit(seqno)
        assert written is not None
        assert written.seqno == 3 == vbucket.visible_seqno
        assert value_of(vbucket) == b"new"
        assert vbucket.item_count == 1
        assert vbucket.undecided == []
        assert vbucket.commit(seqno) is None

    def test_the_commit_has_cas_and_rev_of_the_prepare(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"old")
        made = prepared(vbucket, lambda: vbucket.set(KEY, b"new", 7, 2_000_000_000, 1))
        vbucket.commit(made.seqno)
        document = StoredDocument.of(vbucket.get(KEY) or b"")
        assert (document.cas, document.rev, document.seqno) == (made.cas, 2, 3)
        assert (document.flags, document.expiry, document.datatype) == (7, 2_000_000_000, 1)

    def test_an_abort_leaves_all_as_it_was(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"old")
        seqno = prepare(vbucket)
        assert vbucket.abort(seqno)
        assert not vbucket.abort(seqno)
        assert vbucket.commit(seqno) is None
        assert value_of(vbucket) == b"old"
        assert (vbucket.high_seqno, vbucket.visible_seqno) == (3, 1)
        vbucket.set(KEY, b"next")
        assert vbucket.visible_seqno == 4

    def test_a_deletion(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"old")
        seqno = prepared(vbucket, lambda: vbucket.delete(KEY)).seqno
        assert value_of(vbucket) == b"old"
        vbucket.commit(seqno)
        assert value_of(vbucket) is None
        assert (vbucket.item_count, vbucket.tombstone_count) == (0, 1)
        tombstone = StoredDocument.of(vbucket.get_any(KEY) or b"")
        assert tombstone.opcode == DcpOpcode.DELETION
        assert tombstone.expiry == home.clock.time_ns() // 1_000_000_000

    @pytest.mark.parametrize(
        "write",
        [
            lambda vbucket: vbucket.set(KEY, b"other"),
            lambda vbucket: vbucket.set(KEY, b"other", cas=5),
            lambda vbucket: vbucket.replace(KEY, b"other"),
            lambda vbucket: vbucket.counter(KEY, 1, 1),
            lambda vbucket: vbucket.touch(KEY, 5),
            lambda vbucket: vbucket.delete(KEY),
            lambda vbucket: vbucket.get_locked(KEY, 5),
            lambda vbucket: vbucket.set_with_meta(KEY, b"other", 0, 0, 9, 9),
            lambda vbucket: vbucket.delete_with_meta(KEY, 0, 0, 9, 9),
            lambda vbucket: prepare(vbucket, b"other"),
            lambda vbucket: vbucket.put(KEY, b"other", 0, 0, 0),
        ],
    )
    @pytest.mark.parametrize("doubtful", [False, True])
    def test_other_writes_to_the_key_are_refused(
        self, home: Home, write: Callable[[EngineVBucket], object], doubtful: bool
    ) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"1")
        seqno = prepare(vbucket)
        if doubtful:
            vbucket.doubt_prepares()
        status = Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS if doubtful else Status.SYNC_WRITE_IN_PROGRESS
        assert refused(lambda: write(vbucket)) == status
        assert vbucket.high_seqno == seqno
        vbucket.set(b"\0another", b"1")
        vbucket.abort(seqno)
        vbucket.set(KEY, b"after")

    def test_the_document_is_not_made_twice(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        prepare(vbucket)
        assert refused(lambda: vbucket.add(KEY, b"other")) == Status.SYNC_WRITE_IN_PROGRESS

    def test_a_read_of_what_may_have_been_committed_elsewhere_is_refused(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"old")
        seqno = prepare(vbucket)
        vbucket.doubt_prepares()
        assert refused(lambda: vbucket.get(KEY)) == Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS
        vbucket.commit(seqno)
        assert value_of(vbucket) == b"new"

    def test_a_document_does_not_expire_under_it(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        now_s = home.clock.time_ns() // 1_000_000_000
        vbucket.set(KEY, b"old", 0, now_s + 10)
        seqno = prepare(vbucket)
        home.clock.advance(20)
        assert value_of(vbucket) is None
        vbucket.expire_due()
        assert vbucket.high_seqno == 2
        vbucket.commit(seqno)
        assert value_of(vbucket) == b"new"

    def test_a_collection_takes_its_prepares_with_it(self, home: Home) -> None:
        bucket = home.bucket()
        collections = '{{"uid": "{}", "scopes": [{{"name": "_default", "uid": "0", "collections": [{}]}}]}}'
        default, fruit = '{"name": "_default", "uid": "0"}', '{"name": "fruit", "uid": "8"}'
        bucket.set_manifest(collections.format(1, f"{default}, {fruit}").encode())
        vbucket = bucket.find(0)
        seqno = prepare(vbucket, key=b"\x08apple")
        kept = prepare(vbucket)
        bucket.set_manifest(collections.format(2, default).encode())
        assert [each.seqno for each in vbucket.undecided] == [kept]
        assert vbucket.commit(seqno) is None
        bucket = home.crash()
        assert [each.seqno for each in bucket.find(0).undecided] == []  # nothing was flushed

    def test_a_rollback_brings_no_prepare_of_a_dropped_collection_back(self, home: Home) -> None:
        bucket = home.bucket()
        collections = '{{"uid": "{}", "scopes": [{{"name": "_default", "uid": "0", "collections": [{}]}}]}}'
        default, fruit = '{"name": "_default", "uid": "0"}', '{"name": "fruit", "uid": "8"}'
        vbucket, key = bucket.find(0), b"\x08apple"
        bucket.set_manifest(collections.format(1, f"{default}, {fruit}").encode())
        dropped = prepare(vbucket, key=key)
        bucket.set_manifest(collections.format(2, default).encode())
        bucket.set_manifest(collections.format(3, f"{default}, {fruit}").encode())
        kept = prepare(vbucket, key=key)
        vbucket.set(KEY, b"lost")
        bucket.rollback({0: kept}, branch=True)
        assert [each.seqno for each in vbucket.undecided] == [kept]
        vbucket._locks.doubtful.clear()
        assert refused(lambda: vbucket.set(key, b"other")) == Status.SYNC_WRITE_IN_PROGRESS
        assert vbucket.commit(dropped) is None
        assert vbucket.commit(kept) is not None
        assert vbucket.commit(kept) is None
        bucket.set_manifest(collections.format(4, default).encode())

    def test_there_is_a_limit(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tailrace.store.prepares._MAX_UNDECIDED", 3)
        vbucket = home.bucket().find(0)
        for number in range(3):
            prepare(vbucket, key=b"\0%d" % number)
        assert refused(lambda: prepare(vbucket)) == Status.ETMPFAIL


class TestKept:
    """What is prepared outlives stops, crashes, compactions and rollbacks, until it is decided."""

    @pytest.mark.parametrize("stop", ["restart", "crash"])
    @pytest.mark.parametrize("sealed", [False, True])
    def test_over_a_restart(self, home: Home, stop: str, sealed: bool) -> None:
        bucket = home.bucket()
        vbucket = bucket.find(0)
        vbucket.set(KEY, b"old")
        decided, given_up = prepare(vbucket, key=b"\0a"), prepare(vbucket, key=b"\0b")
        pending = prepare(vbucket, level=PERSIST)
        if sealed:
            bucket.seal()
        vbucket.commit(decided)
        vbucket.abort(given_up)
        bucket.flush()
        vbucket = getattr(home, stop)().find(0)
        assert list(vbucket.undecided) == [StoredPrepare(KEY, pending, PERSIST)]
        assert (vbucket.high_seqno, vbucket.visible_seqno) == (6, 5)
        assert refused(lambda: vbucket.get(KEY)) == Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS
        assert vbucket.item_count == 2
        vbucket.commit(pending)
        assert value_of(vbucket) == b"new"
        assert value_of(vbucket, b"\0a") == b"new"
        assert value_of(vbucket, b"\0b") is None
        assert vbucket.item_count == 2

    @pytest.mark.parametrize("compacts", [False, True])
    @pytest.mark.parametrize("sealed", [False, True])
    @pytest.mark.parametrize("target", [1, 2, 3])
    def test_a_rollback_across_it(self, home: Home, target: int, sealed: bool, compacts: bool) -> None:
        """1 the old document, 2 the prepare, 3 the commit."""
        bucket = home.bucket()
        vbucket = bucket.find(0)
        vbucket.set(KEY, b"old")
        vbucket.commit(prepare(vbucket))
        if sealed:
            bucket.seal()
        if compacts:
            bucket.compact()
        vbucket.set(KEY, b"later")
        bucket.rollback({0: target}, branch=True)
        for at in range(3):
            assert [each.seqno for each in vbucket.undecided] == ([2] if target == 2 else [])
            assert vbucket.visible_seqno == (1 if target == 2 else target)
            assert vbucket.high_seqno == target
            vbucket = bucket.find(0)
            if target == 2:
                assert refused(partial(vbucket.get, KEY)) == Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS
            else:
                assert value_of(vbucket) == (b"old" if target == 1 else b"new")
            bucket = home.crash() if at == 0 else home.restart()
            vbucket = bucket.find(0)
        if target == 2:
            vbucket.commit(2)
            assert value_of(vbucket) == b"new"

    @pytest.mark.parametrize("compacts", [False, True])
    def test_what_a_rollback_brings_back_is_read(self, home: Home, compacts: bool) -> None:
        """1 prepare and 2 commit of a document, 3 prepare and 4 commit of another, 5 the first once more."""
        home.settings = StoreSettings(history_changes=10)
        bucket = home.bucket()
        vbucket = bucket.find(0)
        vbucket.commit(prepare(vbucket))
        vbucket.commit(prepare(vbucket, b"other", b"\0other"))
        vbucket.set(KEY, b"taken back")
        bucket.seal()
        bucket.rollback({0: 4}, branch=True)
        vbucket.set(b"\0last", b"last")
        if compacts:
            bucket.compact()
        bucket.forget_memory()
        keys = [frame[-6:] for snapshot in all_frames(vbucket) for frame in snapshot]
        assert b"keynew" in keys, "nothing supersedes it any more"
        assert value_of(home.restart().find(0)) == b"new"

    def test_a_rollback_across_an_abort(self, home: Home) -> None:
        bucket = home.bucket()
        vbucket = bucket.find(0)
        vbucket.abort(prepare(vbucket))
        bucket.seal()
        bucket.rollback({0: 1}, branch=True)
        assert [each.seqno for each in vbucket.undecided] == [1]
        assert vbucket.visible_seqno == 0

    def test_a_failed_rollback_leaves_it(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        from tailrace.errors import StoreError

        bucket = home.bucket()
        vbucket = bucket.find(0)
        vbucket.set(KEY, b"old")
        prepare(vbucket)
        bucket.flush()

        def fails(*_: object, **__: object) -> None:
            raise StoreError("no")

        monkeypatch.setattr(EngineBucket, "_commit_now", fails)
        with pytest.raises(StoreError):
            bucket.rollback({0: 1}, branch=True)
        assert [each.seqno for each in vbucket.undecided] == [2]
        assert (vbucket.high_seqno, vbucket.visible_seqno) == (2, 1)

    def test_compaction_drops_what_is_decided_and_nothing_else(self, home: Home) -> None:
        home.settings = StoreSettings(history_changes=0, tombstone_age=100.0)
        bucket = home.bucket()
        vbucket = bucket.find(0)
        prepare(vbucket, b"pending")  # 1
        vbucket.commit(prepare(vbucket, b"a", b"\0a"))  # 2, 3
        vbucket.abort(prepare(vbucket, b"b", b"\0b"))  # 4, 5
        vbucket.set(b"\0c", b"c")  # 6
        vbucket.commit(prepared(vbucket, lambda: vbucket.delete(b"\0c")).seqno)  # 7, 8
        vbucket.set(b"\0last", b"last")  # 9
        bucket.compact()
        kept = [(0x60, 1), (0x57, 3), (0x63, 5), (0x58, 8), (0x57, 9)]
        bucket.forget_memory()
        assert opcodes(vbucket) == kept
        home.clock.advance(200)
        bucket.compact(Compaction())
        bucket.forget_memory()
        assert opcodes(vbucket) == [(0x60, 1), (0x57, 3), (0x57, 9)]
        assert vbucket.purge_seqno == 8
        vbucket = home.restart().find(0)
        assert [each.seqno for each in vbucket.undecided] == [1]
        vbucket.commit(1)
        assert value_of(vbucket) == b"pending"
        assert opcodes(vbucket) == [(0x60, 1), (0x57, 3), (0x57, 9), (0x57, 10)]

    def test_an_abort_takes_no_rev_from_documents(self, home: Home) -> None:
        home.settings = StoreSettings(history_changes=0)
        bucket = home.bucket()
        vbucket = bucket.find(0)
        for number in range(20):
            vbucket.set(b"\0k%d" % number, b"v")
        vbucket.abort(prepare(vbucket))
        vbucket.set(b"\0last", b"v")
        bucket.compact(Compaction(drop_tombstones=True))
        vbucket.set(b"\0fresh", b"v")
        assert rev_of(vbucket.get(b"\0fresh") or b"") == 1


class TestStreams:
    def test_no_commit_is_folded_away_under_the_next_prepare(self, home: Home) -> None:
        """A copy with the first prepare would not know what became of it."""
        vbucket = home.bucket().find(0)
        for _ in range(2):
            vbucket.commit(prepare(vbucket))
        seen = [[(frame[OPCODE_AT], seqno_of(frame)) for frame in frames] for frames in all_frames(vbucket)]
        assert seen == [[(0x60, 1), (0x57, 2)], [(0x60, 3), (0x57, 4)]]

    def test_memory_tells_all_that_happened(self, home: Home) -> None:
        vbucket = home.bucket().find(0)
        vbucket.set(KEY, b"old")
        vbucket.abort(prepare(vbucket))
        vbucket.commit(prepare(vbucket))
        assert opcodes(vbucket) == [(0x60, 2), (0x63, 3), (0x60, 4), (0x57, 5)]
        assert opcodes(vbucket, 3) == [(0x60, 4), (0x57, 5)]

    def test_a_snapshot_that_ends_with_a_prepare_has_the_old_document(self, home: Home) -> None:
        bucket = home.bucket()
        vbucket = bucket.find(0)
        vbucket.set(KEY, b"old")
        prepare(vbucket)
        bucket.seal()
        bucket.forget_memory()
        assert opcodes(vbucket) == [(0x57, 1), (0x60, 2)]
        vbucket.commit(2)
        assert [[seqno_of(frame) for frame in frames] for frames in all_frames(vbucket)] == [[1, 2], [3]]
        assert [[seqno_of(frame) for frame in frames] for frames in stream(vbucket, 2)] == [[3]]
        bucket.seal()
        bucket.forget_memory()
        assert opcodes(vbucket) == [(0x57, 3)]


class TestReceived:
    """A replica's side."""

    def replica(self, home: Home) -> EngineVBucket:
        bucket = home.bucket(active=False)
        return bucket.set_state(0, VBucketState.REPLICA)

    def prepare(
        self, seqno: int, *, level: int = MAJORITY, deleted: int = 0, cas: int = 99, key: bytes = KEY
    ) -> bytes:
        message = DcpPrepare(
            key=key,
            value=b"" if deleted else b"new",
            by_seqno=seqno,
            rev_seqno=4,
            cas=cas,
            durability=level,
            deleted=deleted,
            nru=3,
            lock_time=8,
            opaque=77,
        )
        return canonical(message.encode(), collections=True)

    def test_a_commit_is_made_of_the_prepare(self, home: Home) -> None:
        vbucket = self.replica(home)
        vbucket.begin_snapshot(0, 2)
        vbucket.receive(self.prepare(1))
        change = vbucket.commit_for(KEY, 1, 2)
        assert change == committed(self.prepare(1), 2)
        vbucket.receive(change)
        assert value_of(vbucket) == b"new"
        assert vbucket.undecided == []
        assert refused(lambda: vbucket.commit_for(KEY, 1, 3)) == Status.KEY_ENOENT

    @pytest.mark.parametrize("level", [MAJORITY, PERSIST])
    def test_how_far_it_is(self, home: Home, level: int) -> None:
        vbucket = self.replica(home)
        vbucket.begin_snapshot(0, 1)
        vbucket.receive(self.prepare(1, level=level))
        assert vbucket.prepared_up_to(1, 0) == (0 if level == PERSIST else 1)
        assert vbucket.prepared_up_to(1, 1) == 1
        assert vbucket.prepared_up_to(0, 0) == 0

    @pytest.mark.parametrize("level", [MAJORITY, PERSIST])
    def test_what_it_tells_the_active(self, home: Home, level: int) -> None:
        """Nothing of a snapshot that a promotion would take back, even just because its end is not synced."""
        vbucket, bucket = self.replica(home), home.bucket()
        told: list[int] = []
        stream = ReplicaStream(vbucket, 1, 0, lambda status, opaque: None)

        def tell() -> None:
            stream.tell_prepared(lambda message: told.append(message.prepared_seqno))

        vbucket.begin_snapshot(0, 2)
        vbucket.receive(self.prepare(1, level=level))
        bucket.flush()
        tell()
        assert told == []
        vbucket.receive(committed(self.prepare(1, key=b"\0other"), 2))
        tell()
        assert told == ([] if level == PERSIST else [1])
        bucket.flush()
        assert told == [1]
        tell()
        assert told == [1]

    def test_any_change_of_the_document_decides_it(self, home: Home) -> None:
        """A stream from disk has the newest version, not the commit."""
        bucket = home.bucket(active=False)
        vbucket = self.replica(home)
        vbucket.begin_snapshot(0, 1)
        vbucket.receive(self.prepare(1))
        vbucket.begin_snapshot(2, 5)
        later = StoredDocument.of(committed(self.prepare(1, cas=101), 5))
        vbucket.receive(committed(self.prepare(1, cas=101), 5))
        assert vbucket.undecided == []
        bucket.seal()
        bucket = home.crash()
        assert bucket.find(0).undecided == []
        assert value_of(bucket.find(0)) == later.value

    def test_an_abort_with_and_without_its_prepare(self, home: Home) -> None:
        vbucket = self.replica(home)
        vbucket.begin_snapshot(0, 3)
        vbucket.receive(self.prepare(1))
        for seqno in (2, 3):
            wire = DcpAbort(key=KEY, prepared_seqno=1, abort_seqno=seqno, opaque=7).encode()
            vbucket.receive(canonical(wire, collections=True, delete_time=5))
        assert vbucket.undecided == []
        assert (vbucket.high_seqno, vbucket.visible_seqno) == (3, 0)

    def test_a_prepare_replaces_one_whose_end_was_not_told(self, home: Home) -> None:
        vbucket = self.replica(home)
        vbucket.begin_snapshot(0, 9)
        vbucket.receive(self.prepare(1))
        vbucket.receive(self.prepare(7))
        assert [each.seqno for each in vbucket.undecided] == [7]
        home.bucket().flush()
        assert [each.seqno for each in home.restart().find(0).undecided] == [7]

    def test_a_promotion_keeps_what_is_complete(self, home: Home) -> None:
        bucket = home.bucket(active=False)
        vbucket = self.replica(home)
        vbucket.begin_snapshot(0, 1)
        vbucket.receive(self.prepare(1))
        vbucket.begin_snapshot(2, 3)
        vbucket.receive(vbucket.commit_for(KEY, 1, 2))
        assert value_of(vbucket) == b"new"
        vbucket = bucket.set_state(0, VBucketState.ACTIVE)
        assert vbucket.high_seqno == 1
        assert refused(lambda: vbucket.get(KEY)) == Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS
        vbucket.commit(1)
        assert value_of(vbucket) == b"new"
