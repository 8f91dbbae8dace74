"""One suite for both homes of the store: what `tailrace.store.base` promises."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from store.conftest import Home, stored
from store.helpers_store import maintain, seqno_of, state_of, stream, values
from tailrace.errors import DocumentRefused, RollbackImpossible, StoreLocked, UsageError
from tailrace.frames import Trait
from tailrace.history import FailoverLog
from tailrace.store.base import Compaction
from tailrace.store.engine import Engine
from tailrace.store.format import canonical
from tailrace.wire.codes import Datatype, Status, VBucketState
from tailrace.wire.dcp import DcpDeletion, DcpMutation
from tailrace.wire.header import Frame


@contextmanager
def refused(status: int) -> Iterator[None]:
    with pytest.raises(DocumentRefused) as caught:
        yield
    assert caught.value.status == status


class TestDocuments:
    def test_a_document_is_a_dcp_mutation(self, home: Home) -> None:
        vb = home.bucket().vbuckets[2]
        written = vb.set(b"\0a", b'{"x":1}', flags=0xCAFE, expiry=2_000_000_000, datatype=Datatype.JSON)
        frame = vb.get(b"\0a")
        assert frame is not None
        message = DcpMutation.decode(Frame.parse(frame))
        document = stored(frame)
        assert document == (
            b"\0a",
            b'{"x":1}',
            written.cas,
            written.seqno,
            1,
            0xCAFE,
            2_000_000_000,
            Datatype.JSON,
            0x57,
        )
        assert (frame[0], frame[4], frame[6:8], frame[12:16]) == (0x80, 31, b"\0\2", b"\0\0\0\0")
        assert int.from_bytes(frame[8:12], "big") == len(frame) - 24
        assert (message.by_seqno, message.rev_seqno, message.flags) == (written.seqno, 1, 0xCAFE)

    def test_rev_counts_versions_and_survives_deletion(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        vb.set(b"\0a", b"1")
        vb.set(b"\0a", b"2")
        vb.delete(b"\0a")
        assert stored(vb.get_any(b"\0a")).rev == 3
        vb.set(b"\0a", b"3")
        assert stored(vb.get(b"\0a")).rev == 4
        vb = home.crash().vbuckets[0]
        home.bucket().flush()
        assert vb.get(b"\0a") is None  # it was never flushed

    def test_cas_is_checked(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        first = vb.set(b"\0a", b"1")
        second = vb.set(b"\0a", b"2", cas=first.cas)
        assert second.cas > first.cas
        with refused(Status.KEY_EEXISTS):
            vb.set(b"\0a", b"3", cas=first.cas)
        with refused(Status.KEY_ENOENT):
            vb.set(b"\0b", b"3", cas=first.cas)
        with refused(Status.KEY_EEXISTS):
            vb.delete(b"\0a", cas=first.cas)
        vb.delete(b"\0a", cas=second.cas)
        with refused(Status.KEY_ENOENT):
            vb.delete(b"\0a")

    def test_add_replace(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        with refused(Status.KEY_ENOENT):
            vb.replace(b"\0a", b"1")
        vb.add(b"\0a", b"1", flags=9)
        with refused(Status.KEY_EEXISTS):
            vb.add(b"\0a", b"1")
        vb.replace(b"\0a", b"2", flags=7)
        document = stored(vb.get(b"\0a"))
        assert (document.value, document.flags, document.rev) == (b"2", 7, 2)

    def test_counters(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        with refused(Status.KEY_ENOENT):
            vb.counter(b"\0n", 1, None)
        assert vb.counter(b"\0n", 1, 10)[0] == 10
        assert stored(vb.get(b"\0n")).datatype == Datatype.JSON
        assert vb.counter(b"\0n", 5, None)[0] == 15
        assert vb.counter(b"\0n", -100, None)[0] == 0
        vb.set(b"\0n", b"%d" % ((1 << 64) - 1))
        assert vb.counter(b"\0n", 2, None)[0] == 1
        for text in (b"x", b"", b"-1", b"1 ", b"%d" % (1 << 64), "\u0661".encode(), b"1_0"):
            vb.set(b"\0n", text)
            with refused(Status.DELTA_BADVAL):
                vb.counter(b"\0n", 1, None)

    def test_touch_keeps_the_document(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        vb.set(b"\0a", b"1", flags=3)
        frame, written = vb.touch(b"\0a", 2_000_000_000)
        assert frame == vb.get(b"\0a")
        assert stored(frame)[:2] == (b"\0a", b"1")
        assert (stored(frame).flags, stored(frame).expiry) == (3, 2_000_000_000)
        assert written.seqno == vb.high_seqno == 2
        with refused(Status.KEY_ENOENT):
            vb.touch(b"\0b", 1)

    def test_a_value_that_is_too_large(self, home: Home) -> None:
        home.settings.max_value = 100
        vb = home.bucket().vbuckets[0]
        vb.set(b"\0a", b"x" * 100)
        with refused(Status.E2BIG):
            vb.set(b"\0a", b"x" * 101)
        vb.set(b"\0a", b"x" * 101, datatype=Datatype.XATTR)  # system xattrs have room of their own

    def test_locks(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        vb.set(b"\0a", b"1")
        _, cas = vb.get_locked(b"\0a", 15)
        assert vb.is_locked(b"\0a")
        for attempt in (lambda: vb.set(b"\0a", b"2"), lambda: vb.get_locked(b"\0a", 1)):
            with refused(Status.LOCKED):
                attempt()
        with refused(Status.LOCKED):
            vb.unlock(b"\0a", cas + 1)
        vb.set(b"\0a", b"2", cas=cas)
        assert not vb.is_locked(b"\0a")
        with refused(Status.NOT_LOCKED):
            vb.unlock(b"\0a", cas)
        _, cas = vb.get_locked(b"\0a", 15)
        home.clock.advance(16)
        vb.set(b"\0a", b"3")
        _, cas = vb.get_locked(b"\0a", 15)
        vb.unlock(b"\0a", cas)
        vb.replace(b"\0a", b"4", cas=cas)

    def test_there_is_a_limit_on_locks(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those whose time is over make room; an undecided write takes part of it, and stays."""
        monkeypatch.setattr("tailrace.store.locks._MAX_LOCKS", 3)
        vb = home.bucket().vbuckets[0]
        for key in (b"\0a", b"\0b", b"\0c"):
            vb.set(key, b"1")
        vb.begin_durable(1)
        vb.set(b"\0p", b"1")
        vb.end_durable()
        vb.get_locked(b"\0a", 5)
        vb.get_locked(b"\0b", 15)
        with refused(Status.ETMPFAIL):
            vb.get_locked(b"\0c", 15)
        vb.set(b"\0c", b"2")
        home.clock.advance(6)
        vb.get_locked(b"\0c", 15)
        for key in (b"\0b", b"\0c"):
            with refused(Status.LOCKED):
                vb.set(key, b"2")
        with refused(Status.SYNC_WRITE_IN_PROGRESS):
            vb.set(b"\0p", b"2")
        vb.set(b"\0a", b"2")

    def test_with_meta_resolves_conflicts_by_rev(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        vb.set_with_meta(b"\0a", b"1", 0, 0, rev=5, meta_cas=1000)
        document = stored(vb.get(b"\0a"))
        assert (document.rev, document.cas) == (5, 1000)
        for rev, cas in ((4, 9999), (5, 999), (5, 1000)):
            with refused(Status.KEY_EEXISTS):
                vb.set_with_meta(b"\0a", b"2", 0, 0, rev=rev, meta_cas=cas)
        vb.set_with_meta(b"\0a", b"2", 0, 5_000_000_000 & 0xFFFFFFFF, rev=5, meta_cas=1000)  # later expiry
        vb.delete_with_meta(b"\0a", 0, 77, rev=6, meta_cas=1)
        assert vb.get(b"\0a") is None
        tomb = stored(vb.get_any(b"\0a"))
        assert (tomb.rev, tomb.cas, tomb.expiry, tomb.opcode) == (6, 1, 77, 0x58)
        vb.set_with_meta(b"\0a", b"3", 0, 0, rev=1, meta_cas=2, resolve=False)
        assert stored(vb.get(b"\0a")).rev == 1

    def test_with_meta_resolves_conflicts_by_cas_if_asked(self, home: Home) -> None:
        home.settings.last_write_wins = True
        vb = home.bucket().vbuckets[0]
        vb.set_with_meta(b"\0a", b"1", 0, 0, rev=5, meta_cas=1000)
        with refused(Status.KEY_EEXISTS):
            vb.set_with_meta(b"\0a", b"2", 0, 0, rev=50, meta_cas=999)
        vb.set_with_meta(b"\0a", b"2", 0, 0, rev=1, meta_cas=1001)
        assert stored(vb.get(b"\0a")).value == b"2"

    def test_the_cas_clock_never_goes_back(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        before = vb.set(b"\0a", b"1").cas
        home.clock.jump(-3600)
        after = vb.set(b"\0a", b"2").cas
        assert after > before
        vb = home.crash().vbuckets[0]  # nothing was flushed
        home.clock.jump(-3600)
        assert vb.set(b"\0b", b"3").cas > after
        home.bucket().flush()
        last = vb.set(b"\0b", b"4").cas
        home.restart()
        assert home.bucket().vbuckets[0].set(b"\0c", b"").cas > last

    def test_foreign_cas_moves_the_clock_but_nonsense_does_not(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        ahead = home.clock.time_ns() + 10**15
        vb.set_with_meta(b"\0a", b"1", 0, 0, rev=5, meta_cas=ahead)
        assert vb.set(b"\0b", b"").cas > ahead
        with pytest.raises(DocumentRefused):
            vb.set_with_meta(b"\0a", b"1", 0, 0, rev=6, meta_cas=(1 << 64) - 1)
        assert vb.set(b"\0b", b"").cas < 1 << 63


class TestExpiry:
    def test_reading_makes_an_expiration(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        now = home.clock.time_ns() // 10**9
        vb.set(b"\0a", b"1", expiry=now + 10)
        assert vb.get(b"\0a") is not None
        home.clock.advance(11)
        assert vb.get(b"\0a") is None
        tomb = stored(vb.get_any(b"\0a"))
        assert (tomb.opcode, tomb.rev, tomb.expiry, tomb.seqno) == (0x59, 2, now + 10, 2)
        assert vb.item_count == 0
        assert [frame[1] for frame in stream(vb)[0]] == [0x59]

    def test_a_replica_only_hides_it(self, home: Home) -> None:
        bucket = home.bucket(active=False)
        vb = bucket.set_state(0, VBucketState.ACTIVE)
        vb.set(b"\0a", b"1", expiry=home.clock.time_ns() // 10**9 + 10)
        bucket.set_state(0, VBucketState.REPLICA)
        home.clock.advance(11)
        assert vb.get(b"\0a") is None
        assert vb.expire_due() == 0
        assert vb.high_seqno == 1

    @pytest.mark.parametrize("sealed", [False, True])
    def test_the_pager_finds_them(self, home: Home, sealed: bool) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        now = home.clock.time_ns() // 10**9
        for i in range(20):
            vb.set(b"\0k%d" % i, b"", expiry=now + i + 1)
        vb.set(b"\0k3", b"")  # not any more
        if sealed:
            bucket.seal()
        assert vb.expire_due() == 0
        home.clock.advance(10)
        assert vb.expire_due(limit=4) == 4
        assert vb.expire_due() == 5
        assert vb.expire_due() == 0
        home.clock.advance(10)
        assert vb.expire_due() == 10
        assert vb.item_count == 1

    def test_add_on_an_expired_document(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        vb.set(b"\0a", b"1", expiry=home.clock.time_ns() // 10**9 + 1)
        home.clock.advance(2)
        with refused(Status.KEY_ENOENT):
            vb.replace(b"\0a", b"2")
        vb.add(b"\0a", b"2")
        assert stored(vb.get(b"\0a")).rev == 3


class TestStreams:
    def test_memory_snapshots_fold_repeated_keys(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        for i in range(100):
            vb.set(b"\0k%d" % (i % 10), b"%d" % i)
        (frames,) = stream(vb)
        assert [stored(frame).value for frame in frames] == [b"%d" % i for i in range(90, 100)]
        assert stream(vb, after=100) == []
        assert [seqno_of(f) for f in stream(vb, after=97)[0]] == [98, 99, 100]

    def test_a_snapshot_does_not_cross_a_checkpoint(self, home: Home) -> None:
        home.settings.checkpoint_items = 10
        vb = home.bucket().vbuckets[0]
        for i in range(25):
            vb.set(b"\0a", b"%d" % i)
        assert [[seqno_of(f) for f in frames] for frames in stream(vb)] == [[10], [20], [25]]
        snapshot = vb.snapshot_after(10)
        assert (snapshot.checkpoint, snapshot.checkpoint_id) == (True, 2)
        assert not vb.snapshot_after(12).checkpoint
        assert vb.checkpoint_id == 3
        assert vb.checkpoint_start(2) == 10
        assert home.restart().vbuckets[0].checkpoint_id > 3

    @pytest.mark.parametrize("seals", [False, True])
    def test_the_highest_rev_of_a_deletion(self, home: Home, seals: bool) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        for key, revs in ((b"\0often", 7), (b"\0once", 2)):
            for number in range(revs - 1):
                vb.set(key, b"%d" % number)
            vb.delete(key)
        vb.set(b"\0alive", b"1")
        assert vb.deleted_rev == 7
        if seals:
            bucket.seal()
            bucket.forget_memory()
            home.settings.history_changes = 0
            bucket.compact(Compaction(drop_tombstones=True))
        bucket = home.restart()
        vb = bucket.vbuckets[0]
        assert (vb.deleted_rev, bucket.vbuckets[1].deleted_rev) == (7, 0)
        bucket.rollback({0: 0}, branch=True)
        assert bucket.vbuckets[0].deleted_rev == 0

    @pytest.mark.parametrize("max_bytes", [1, 500, 1 << 20])
    def test_disk_snapshots_are_stable(self, home: Home, max_bytes: int) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[1]
        for i in range(300):
            vb.set(b"\0k%d" % (i % 200), b"%d" % i)
        bucket.seal()
        bucket.forget_memory()
        snapshot = vb.snapshot_after(0)
        assert not snapshot.in_memory
        for i in range(300):
            vb.set(b"\0k%d" % (i % 200), b"new %d" % i)
        home.settings.history_changes = 0
        bucket.compact()
        bucket.rollback({1: 0}, branch=True)
        frames = []
        while (chunk := snapshot.read(max_bytes)) is not None:
            starts = chunk.offsets.tolist()
            for start, stop in zip(starts, [*starts[1:], len(chunk.data)], strict=True):
                frames.append(chunk.data[start:stop].tobytes())
        assert {stored(f).value for f in frames} == {b"%d" % i for i in range(100, 300)}
        assert seqno_of(frames[-1]) == snapshot.end == 300

    def test_what_is_on_disk_only(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        assert vb.snapshot_after(0, memory=False) is None
        for i in range(10):
            vb.set(b"\0k%d" % i, b"sealed")
        bucket.seal()
        for i in range(5, 15):
            vb.set(b"\0k%d" % i, b"flushed")
        bucket.flush()
        vb.set(b"\0k0", b"in memory")
        (frames,) = stream(vb, memory=False)
        documents = {stored(f).key: stored(f).value for f in frames}
        assert documents == {b"\0k%d" % i: b"sealed" if i < 5 else b"flushed" for i in range(15)}
        assert not vb.snapshot_after(0, memory=False).in_memory

    def test_traits_of_chunks(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        vb.set(b"\0a", b"1")
        vb.set(b"\0a", b"2")
        assert vb.snapshot_after(0).read().traits == 0
        vb.set(b"\0a", b"2", expiry=4_000_000_000)
        assert vb.snapshot_after(0).read().traits == Trait.EXPIRES
        vb.set(b"\0b", b"\0\0\0\0", datatype=Datatype.XATTR)
        vb.set(b"\0c", b"\0\0", datatype=Datatype.SNAPPY | Datatype.JSON)
        vb.set(b"\x08c", b"")
        vb.delete(b"\0a")
        want = Trait.XATTR | Trait.SNAPPY | Trait.COLLECTION | Trait.DELETION
        assert vb.snapshot_after(0).read().traits == want
        bucket.seal()
        bucket.forget_memory()
        assert vb.snapshot_after(0).read().traits == want

    def test_the_opaques_are_patched_in_place(self, home: Home) -> None:
        from tailrace.frames import set_opaques

        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        for i in range(10):
            vb.set(b"\0k%d" % i, b"x" * i)
        bucket.seal()
        for memory in (True, False):
            chunk = vb.snapshot_after(0, memory=memory).read()
            set_opaques(chunk.data, chunk.offsets, 0xDEADBEEF)
            again = vb.snapshot_after(0, memory=memory).read()
            assert not np.array_equal(chunk.data, again.data)

    def test_readers_are_called(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        calls = []
        vb.on_append(lambda: calls.append(vb.high_seqno))
        vb.on_change(lambda: calls.append("history"))
        vb.set(b"\0a", b"")
        vb.delete(b"\0a")
        assert calls == [1, 2]
        vb.changed()
        assert calls == [1, 2, "history"]
        vb.on_append(None)
        vb.set(b"\0a", b"")
        assert calls == [1, 2, "history"]


class TestDurability:
    def test_what_is_flushed_survives_a_kill(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[3]
        vb.set(b"\0a", b"1")
        bucket.flush()
        vb.set(b"\0b", b"2")
        assert (vb.persisted_seqno, vb.high_seqno) == (1, 2)
        uuid = vb.uuid
        vb = home.crash().vbuckets[3]
        assert (vb.high_seqno, vb.persisted_seqno, vb.item_count) == (1, 1, 1)
        assert values(vb) == {b"\0a": b"1"}
        assert vb.uuid != uuid
        assert vb.failover_log.newest.seqno == 1
        assert uuid in vb.failover_log

    def test_a_clean_stop_changes_nothing(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[3]
        vb.set(b"\0a", b"1")
        log = vb.failover_log
        frame = vb.get(b"\0a")
        for _ in range(3):
            vb = home.restart().vbuckets[3]
            assert vb.get(b"\0a") == frame
            assert vb.failover_log == log

    def test_a_kill_right_after_a_clean_start_is_unclean(self, home: Home) -> None:
        home.bucket().vbuckets[0].set(b"\0a", b"")
        log = home.restart().vbuckets[0].failover_log
        assert home.crash().vbuckets[0].failover_log != log

    def test_waiting_for_the_disk(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        answers = []
        vb.set(b"\0a", b"")
        vb.when_persisted(1, lambda ok: answers.append((1, ok)))
        vb.when_persisted(5, lambda ok: answers.append((5, ok)))
        bucket.flush()
        assert answers == [(1, True)]
        vb.when_persisted(1, lambda ok: answers.append((2, ok)))
        vb.set(b"\0b", b"")
        vb.when_persisted(2, lambda ok: answers.append((3, ok)))
        bucket.rollback({0: 1}, branch=True)
        home.restart()
        assert answers == [(1, True), (2, True), (3, True), (5, False)]

    def test_jobs_while_writes_go_on(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        vb.set(b"\0a", b"1")
        job = bucket.begin_flush()
        assert bucket.begin_flush() is None
        vb.set(b"\0a", b"2")
        vb.set(b"\0b", b"2")
        job.run()
        job.finish()
        assert (vb.persisted_seqno, vb.high_seqno) == (1, 3)
        assert values(home.crash().vbuckets[0]) == {b"\0a": b"1"}

    def test_stopped_persistence(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        vb.set(b"\0a", b"1")
        bucket.flush()
        bucket.persistence = False
        vb.set(b"\0a", b"2")
        assert bucket.begin_flush() is None
        assert values(home.crash().vbuckets[0]) == {b"\0a": b"1"}
        bucket = home.bucket()
        bucket.persistence = False
        bucket.vbuckets[0].set(b"\0a", b"3")
        bucket.persistence = True
        bucket.flush()
        assert values(home.crash().vbuckets[0]) == {b"\0a": b"3"}

    def test_memory_is_limited_when_nothing_is_written(self, home: Home) -> None:
        home.settings.memory_quota = 100_000
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        bucket.persistence = False
        with refused(Status.ETMPFAIL):
            for i in range(1000):
                vb.set(b"\0k%d" % i, b"x" * 1000)
        assert 90_000 < bucket.memory_bytes < 110_000
        bucket.persistence = True
        bucket.flush()
        maintain(bucket)
        vb.set(b"\0a", b"")

    def test_generations_seal_and_merge(self, home: Home) -> None:
        home.settings.memory_quota = 300_000
        home.settings.segment_fanout = 3
        home.settings.history_changes = 5
        bucket = home.bucket()
        model = {}
        for i in range(3000):
            key, value = b"\0k%d" % (i * 7 % 500), b"%d" % i * 10
            bucket.vbuckets[i % 4].set(key, value)
            model[i % 4, key] = value
            if i % 20 == 0:
                bucket.flush()
                maintain(bucket)
                assert bucket.memory_bytes < 300_000
        assert 1 <= len(bucket.segments) < 10
        for again in (home.bucket, home.restart, home.crash):
            bucket = again()
            documents = {(vb.id, k): v for vb in bucket for k, v in values(vb).items()}
            assert documents == model
            assert sum(vb.item_count for vb in bucket) == len(model)

    def test_a_second_process_is_refused(self, home: Home) -> None:
        home.bucket()
        with pytest.raises(StoreLocked):
            Engine(files=home._files())
        home.restart()


class TestRollback:
    @pytest.mark.parametrize("sealed", [None, 100, 250])
    def test_older_versions_come_back(self, home: Home, sealed: int | None) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[1]
        states = [{}]
        for i in range(300):
            key = b"\0k%d" % (i * 7 % 40)
            if i % 5 == 4 and vb.get(key) is not None:
                vb.delete(key)
            else:
                vb.set(key, b"%d" % i, flags=i)
            state = dict(states[-1])
            document = stored(vb.get_any(key))
            state[key] = document
            states.append(state)
            if i == sealed:
                bucket.seal()
        for target in (299, 251, 250, 120, 101, 30, 1, 0):
            uuid = vb.uuid
            bucket.rollback({1: target}, branch=True)
            assert vb.high_seqno == target
            assert vb.uuid != uuid
            assert vb.failover_log.newest.seqno == target
            live = {k: d for k, d in states[target].items() if not d.deleted}
            assert {k: stored(vb.get_any(k)) for k in states[target]} == states[target]
            assert state_of(stream(vb)) == live
            assert vb.item_count == len(live)
            vb = home.crash().vbuckets[1]
            bucket = home.bucket()
            assert vb.high_seqno == target
            assert state_of(stream(vb)) == live
            assert {k: stored(vb.get_any(k)) for k in states[target]} == states[target]

    def test_a_branch_with_equal_seqnos(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        for i in range(10):
            vb.set(b"\0k%d" % i, b"old")
        bucket.seal()
        bucket.rollback({0: 5}, branch=True)
        for i in range(5, 12):
            vb.set(b"\0k%d" % i, b"new")
        bucket.seal()
        want = {b"\0k%d" % i: b"old" if i < 5 else b"new" for i in range(12)}
        assert values(vb) == values(vb, memory=False) == want
        bucket.compact()
        assert values(home.restart().vbuckets[0]) == want

    def test_a_replica_keeps_the_log_below(self, home: Home) -> None:
        bucket = home.bucket(active=False)
        vb = bucket.set_state(0, VBucketState.REPLICA)
        vb.set_failover_log(FailoverLog.from_json([{"id": 9, "seq": 8}, {"id": 7, "seq": 2}]))
        for i in range(1, 11):
            vb.begin_snapshot(i, i)
            vb.receive(mutation(i))
        bucket.rollback({0: 5}, branch=False)
        assert vb.failover_log.to_json() == [{"id": 7, "seq": 2}]
        assert home.restart().vbuckets[0].failover_log.to_json() == [{"id": 7, "seq": 2}]

    def test_impossible_targets_change_nothing(self, home: Home) -> None:
        home.settings.history_changes = 10
        bucket = home.bucket()
        for vb in bucket:
            for i in range(100):
                vb.set(b"\0k%d" % (i % 7), b"%d" % i)
        bucket.compact()
        floor = bucket.vbuckets[0].rollback_floor
        assert floor == 90
        with pytest.raises(RollbackImpossible) as caught:
            bucket.rollback({1: 95, 0: 89}, branch=True)
        assert (caught.value.vbucket, caught.value.lowest) == (0, 90)
        assert "90" in str(caught.value)
        with pytest.raises(RollbackImpossible):
            bucket.rollback({1: 101}, branch=True)
        assert bucket.vbuckets[1].high_seqno == 100
        bucket.rollback({0: 90}, branch=True)
        want = {b"\0k%d" % (i % 7): b"%d" % i for i in range(90)}
        assert values(bucket.vbuckets[0]) == want
        bucket.rollback({0: 0}, branch=True)
        assert values(bucket.vbuckets[0]) == {}
        assert bucket.vbuckets[0].rollback_floor == 0

    def test_with_stopped_persistence(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        vb.set(b"\0a", b"1")
        bucket.flush()
        bucket.persistence = False
        vb.set(b"\0b", b"2")
        vb.set(b"\0c", b"3")
        bucket.rollback({0: 2}, branch=True)
        assert values(vb) == {b"\0a": b"1", b"\0b": b"2"}
        vb = home.crash().vbuckets[0]
        assert values(vb) == {b"\0a": b"1"}
        assert vb.high_seqno == 1
        assert vb.failover_log.newest.seqno == 1
        vb.set(b"\0d", b"4")
        assert vb.high_seqno == 2

    def test_flush_all_begins_at_zero(self, home: Home) -> None:
        bucket = home.bucket()
        for vb in bucket:
            vb.set(b"\0a", b"")
        bucket.seal()
        uuids = [vb.uuid for vb in bucket]
        bucket.flush_all()
        for vb in bucket:
            assert (vb.high_seqno, vb.item_count, stream(vb)) == (0, 0, [])
            assert vb.uuid not in uuids
            assert vb.failover_log.newest.seqno == 0
        bucket = home.crash()
        assert all(vb.high_seqno == 0 for vb in bucket)


class TestCache:
    def test_it_forgets_what_is_no_longer_true(self, home: Home) -> None:
        """The owner keeps the dictionary itself, so it must stay the same one."""
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        cache = bucket.cache
        for change in (
            lambda: vb.set(b"\0a", b"2"),
            lambda: vb.delete(b"\0a"),
            lambda: bucket.rollback({0: 1}, branch=True),
            lambda: bucket.set_state(0, VBucketState.REPLICA),
            lambda: bucket.set_state(0, VBucketState.ACTIVE),
            lambda: bucket.set_manifest(json.dumps(TestCollections.MANIFEST).encode()),
            bucket.flush_all,
        ):
            if vb.get(b"\0a") is None:
                vb.set(b"\0a", b"1")
            cache[b"\0a"] = b"ready-made"
            change()
            assert bucket.cache is cache
            assert b"\0a" not in cache


class TestCompaction:
    def test_tombstones_are_purged_when_they_are_old(self, home: Home) -> None:
        home.settings.history_changes = 0
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        for i in range(10):
            vb.set(b"\0k%d" % i, b"")
        for i in range(5):
            vb.delete(b"\0k%d" % i)
        vb.set(b"\0last", b"")
        bucket.compact()
        assert (vb.purge_seqno, vb.tombstone_count) == (0, 5)
        home.clock.advance(home.settings.tombstone_age + 1)
        bucket.compact()
        assert (vb.purge_seqno, vb.tombstone_count) == (15, 0)
        vb = home.restart().vbuckets[0]
        assert (vb.purge_seqno, vb.tombstone_count, vb.item_count) == (15, 0, 6)
        vb.set(b"\0k0", b"")
        assert stored(vb.get(b"\0k0")).rev == 3  # as if the tombstone were still known

    def test_the_asked_kinds(self, home: Home) -> None:
        bucket = home.bucket()
        now = home.clock.time_ns() // 10**9
        for vb in bucket:
            for i in range(6):
                vb.set(b"\0k%d" % i, b"")
            for i in range(5):
                vb.delete(b"\0k%d" % i)
                home.clock.advance(1)
        a, b, c, d = bucket
        bucket.compact(Compaction(vbuckets=[0], purge_before_seqno=9))
        assert [vb.purge_seqno for vb in bucket] == [8, 0, 0, 0]
        bucket.compact(Compaction(vbuckets=[1], purge_before_time_s=now + 7))
        assert [vb.purge_seqno for vb in bucket] == [8, 8, 0, 0]
        bucket.compact(Compaction(vbuckets=[2], purge_before_time_s=now + 100, purge_before_seqno=8))
        assert [vb.purge_seqno for vb in bucket] == [8, 8, 7, 0]
        bucket.compact(Compaction(vbuckets=[3], drop_tombstones=True))
        assert [vb.purge_seqno for vb in bucket] == [8, 8, 7, 10]  # 11 is the last change, and stays
        assert [vb.rollback_floor for vb in bucket] == [9, 9, 8, 11]
        for vb in (a, b, c, d):
            assert values(vb) == {b"\0k5": b""}
        bucket.compact(Compaction(drop_tombstones=True))
        assert [vb.purge_seqno for vb in bucket] == [10] * 4
        assert len(bucket.segments) == 1

    def test_the_newest_change_in_the_segments_stays(self, home: Home) -> None:
        """A snapshot from disk ends with it; without it the snapshot would be of a state after its end."""
        bucket = home.bucket()
        vb = bucket.vbuckets[0]
        vb.set(b"\0a", b"1")
        vb.set(b"\0b", b"2")
        vb.delete(b"\0a")
        bucket.compact()
        vb.set(b"\0c", b"3")  # in no segment yet
        job = bucket.begin_compaction(Compaction(drop_tombstones=True))
        if job is not None:
            job.run()
            job.finish()
        assert vb.sealed_seqno == 3
        assert vb.purge_seqno == 0

    def test_one_vbucket_at_a_time_does_not_pile_up_segments(self, home: Home) -> None:
        bucket = home.bucket(vbuckets=64)
        for vb in bucket:
            vb.set(b"\0a", b"")
        for vb in bucket:
            bucket.compact(Compaction(vbuckets=[vb.id]))
            maintain(bucket)
        assert len(bucket.segments) <= home.settings.segment_fanout
        assert all(values(vb) == {b"\0a": b""} for vb in home.restart())


class TestStates:
    def test_new_vbuckets(self, home: Home) -> None:
        bucket = home.bucket(active=False)
        assert list(bucket) == []
        vb = bucket.set_state(2, VBucketState.REPLICA, extra={"topology": [["a"]]})
        assert (vb.state, len(vb.failover_log.entries)) == (VBucketState.REPLICA, 1)
        with refused(Status.ERANGE):
            bucket.set_state(4, VBucketState.ACTIVE)
        with refused(Status.EINVAL):
            bucket.set_state(1, 5)
        bucket = home.restart()
        assert bucket.vbuckets[2].extra == {"topology": [["a"]]}

    def test_becoming_active_begins_a_branch(self, home: Home) -> None:
        bucket = home.bucket(active=False)
        vb = bucket.set_state(0, VBucketState.REPLICA)
        vb.begin_snapshot(1, 3)
        for seqno in (1, 2, 3):
            vb.receive(mutation(seqno))
        uuid = vb.uuid
        bucket.set_state(0, VBucketState.ACTIVE)
        assert vb.uuid != uuid
        assert vb.failover_log.newest.seqno == 3
        log = vb.failover_log
        bucket.set_state(0, VBucketState.ACTIVE)
        assert vb.failover_log == log
        bucket.set_state(0, VBucketState.PENDING)
        bucket.set_state(0, VBucketState.ACTIVE, takeover=True)
        assert vb.failover_log == log

    @pytest.mark.parametrize("restart", [False, True])
    def test_a_partial_snapshot_is_undone_by_promotion(self, home: Home, restart: bool) -> None:
        bucket = home.bucket(active=False)
        vb = bucket.set_state(0, VBucketState.REPLICA)
        vb.begin_snapshot(0, 2)
        vb.receive(mutation(1, b"a", b"1"))
        vb.receive(mutation(2, b"b", b"2"))
        assert vb.complete_seqno == 2
        vb.begin_snapshot(3, 6)
        vb.receive(mutation(4, b"a", b"4"))
        assert (vb.complete_seqno, vb.received) == (2, (2, 6))
        if restart:
            bucket.flush()
            restarted = home.crash().vbuckets[0]
            assert restarted is not None
            vb, bucket = restarted, home.bucket()
            assert (vb.complete_seqno, vb.received, vb.high_seqno) == (2, (2, 6), 4)
        bucket.set_state(0, VBucketState.ACTIVE)
        assert (vb.high_seqno, vb.failover_log.newest.seqno) == (2, 2)
        assert values(vb) == {b"\0a": b"1", b"\0b": b"2"}

    def test_what_a_replica_refuses(self, home: Home) -> None:
        vb = home.bucket(active=False).set_state(0, VBucketState.REPLICA)
        with refused(Status.EINVAL):
            vb.begin_snapshot(5, 4)
        vb.begin_snapshot(1, 4)
        vb.receive(mutation(2))
        for seqno in (1, 2, 5):
            with refused(Status.ERANGE):
                vb.receive(mutation(seqno))
        vb.receive(mutation(4))
        with refused(Status.ERANGE):
            vb.begin_snapshot(1, 4)
        vb.begin_snapshot(4, 9)

    def test_a_replica_is_equal(self, home: Home) -> None:
        bucket = home.bucket()
        active = bucket.vbuckets[0]
        for i in range(100):
            active.set(b"\0k%d" % (i % 30), b"%d" % i, flags=i, expiry=4_000_000_000)
        for i in range(5):
            active.delete(b"\0k%d" % i)
        other = Engine(clock=home.clock).create_bucket("copy", 4, active=False)
        replica = other.set_state(0, VBucketState.REPLICA)
        replica.set_failover_log(active.failover_log)
        for frames in stream(active):
            replica.begin_snapshot(seqno_of(frames[0]), seqno_of(frames[-1]))
            for frame in frames:
                replica.receive(canonical(frame, collections=True))
        assert stream(replica) == stream(active)
        assert (replica.item_count, replica.uuid) == (active.item_count, active.uuid)

    def test_deleting_a_vbucket(self, home: Home) -> None:
        bucket = home.bucket()
        vb = bucket.vbuckets[1]
        vb.set(b"\0a", b"old")
        bucket.seal()
        vb.set(b"\0b", b"old")
        answers = []
        vb.when_persisted(2, answers.append)
        bucket.delete_vbucket(1)
        assert answers == [False]
        assert bucket.vbuckets[1] is None
        with refused(Status.NOT_MY_VBUCKET):
            bucket.delete_vbucket(1)
        bucket = home.restart()
        assert bucket.vbuckets[1] is None
        vb = bucket.set_state(1, VBucketState.ACTIVE)
        assert stream(vb) == []
        vb.set(b"\0c", b"new")
        bucket.seal()
        assert values(home.restart().vbuckets[1]) == {b"\0c": b"new"}


class TestCollections:
    MANIFEST = {
        "uid": "2",
        "scopes": [
            {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
            {
                "name": "s",
                "uid": "8",
                "collections": [{"name": "c", "uid": "9"}, {"name": "d", "uid": "80", "maxTTL": 60}],
            },
        ],
    }

    def test_events_of_a_manifest(self, home: Home) -> None:
        bucket = home.bucket()
        bucket.set_manifest(json.dumps(self.MANIFEST).encode())
        assert bucket.manifest == self.MANIFEST
        (frames,) = stream(bucket.vbuckets[3])
        assert [frame.hex() for frame in frames] == [
            "805f0001" + "0d000003" + "0000001a" + "00000000" + frames[0][16:24].hex()
            + "0000000000000001" + "00000003" + "00" + "73" + "0000000000000000" + "00000008",
            "805f0001" + "0d000003" + "0000001e" + "00000000" + frames[1][16:24].hex()
            + "0000000000000002" + "00000000" + "00" + "63" + "0000000000000000" + "00000008" + "00000009",
            "805f0001" + "0d000003" + "00000022" + "00000000" + frames[2][16:24].hex()
            + "0000000000000003" + "00000000" + "01" + "64"
            + "0000000000000002" + "00000008" + "00000080" + "0000003c",
        ]  # fmt: skip
        assert home.restart().manifest == self.MANIFEST
        assert stream(home.bucket().vbuckets[3]) == [frames]

    @pytest.mark.parametrize("sealed", [False, True])
    def test_a_dropped_collection_takes_its_documents_along(self, home: Home, sealed: bool) -> None:
        bucket = home.bucket()
        bucket.set_manifest(json.dumps(self.MANIFEST).encode())
        vb = bucket.vbuckets[0]
        for i in range(10):
            vb.set(b"\x09k%d" % i, b"")
            vb.set(b"\x80\x01k%d" % i, b"")
            vb.set(b"\0k%d" % i, b"")
        assert vb.collection_high_seqno([9]) == 31
        assert vb.collection_high_seqno([0]) == 33
        if sealed:
            bucket.seal()
            bucket.forget_memory()
        smaller = json.loads(json.dumps(self.MANIFEST))
        smaller["uid"] = "3"
        del smaller["scopes"][1]["collections"][0]
        bucket.set_manifest(json.dumps(smaller).encode())
        want = {b"\x80\x01k%d" % i for i in range(10)} | {b"\0k%d" % i for i in range(10)}
        drop = vb.high_seqno
        assert vb.get(b"\x09k1") is None
        assert vb.item_count == 20
        assert vb.collection_high_seqno([9]) == drop
        vb.set(b"\0z", b"")
        bucket.seal()
        assert values(vb, memory=False).keys() == want | {b"\0z"}
        vb = home.restart().vbuckets[0]
        assert vb.item_count == 21
        assert values(vb).keys() == want | {b"\0z"}
        home.bucket().rollback({0: drop - 1}, branch=True)
        # The bucket's manifest still has no such collection, so the vbucket gets the event again at once.
        assert vb.high_seqno == drop
        assert vb.get(b"\x09k1") is None
        assert values(vb).keys() == want
        home.settings.history_changes = 0
        home.bucket().compact()
        assert values(vb, memory=False).keys() == want
        assert sum(p.count for p in vb.pieces) < 30

    @pytest.mark.parametrize(
        ("change", "status"),
        [
            (lambda m: m.update(uid="1"), Status.ERANGE),
            (lambda m: m.update(uid="2", scopes=m["scopes"][:1]), Status.CANNOT_APPLY_MANIFEST),
            (lambda m: m.update(uid="xyz"), Status.EINVAL),
            (lambda m: m.update(scopes=m["scopes"][1:]), Status.EINVAL),
            (lambda m: m["scopes"][1].update(uid="7"), Status.EINVAL),
            (lambda m: m["scopes"][1].update(name="_s"), Status.EINVAL),
            (lambda m: m["scopes"][1].update(name="a b"), Status.EINVAL),
            (lambda m: m["scopes"][1].update(uid="0"), Status.EINVAL),
            (lambda m: m["scopes"][1]["collections"].append({"name": "c", "uid": "99"}), Status.EINVAL),
            (lambda m: m["scopes"][1]["collections"][0].update(maxTTL=-1), Status.EINVAL),
            (lambda m: m["scopes"][1]["collections"][0].update(name="e"), Status.CANNOT_APPLY_MANIFEST),
            (lambda m: m.update(scopes={}), Status.EINVAL),
        ],
    )
    def test_manifests_that_are_refused(self, home: Home, change: Callable[..., Any], status: int) -> None:
        bucket = home.bucket()
        bucket.set_manifest(json.dumps(self.MANIFEST).encode())
        other = json.loads(json.dumps(self.MANIFEST))
        other["uid"] = "3"
        change(other)
        with refused(status):
            bucket.set_manifest(json.dumps(other).encode())
        with refused(Status.EINVAL):
            bucket.set_manifest(b"[" * 10_000)
        assert bucket.manifest == self.MANIFEST

    def test_random_keys(self, home: Home) -> None:
        vb = home.bucket().vbuckets[0]
        assert vb.random_key() is None
        vb.set(b"\0a", b"")
        vb.set(b"\x09b", b"")
        assert stored(vb.random_key()).key == b"\0a"
        assert stored(vb.random_key(9)).key == b"\x09b"
        assert vb.random_key(10) is None


class TestBuckets:
    def test_several(self, home: Home) -> None:
        home.bucket()
        home.engine.create_bucket("other-%2e", 1)
        home.engine.buckets["other-%2e"].vbuckets[0].set(b"\0a", b"1")
        home.restart()
        assert set(home.engine.buckets) == {"default", "other-%2e"}
        assert values(home.engine.buckets["other-%2e"].vbuckets[0]) == {b"\0a": b"1"}

    @pytest.mark.parametrize(("name", "count"), [("a/b", 1), ("", 1), ("x", 3), ("x", 2048), ("x", 0)])
    def test_bad_ones(self, home: Home, name: str, count: int) -> None:
        home.bucket()
        with pytest.raises(UsageError):
            home.engine.create_bucket(name, count)

    def test_cursors(self, home: Home) -> None:
        bucket = home.bucket()
        bucket.set_cursor("tap", {"0": 5})
        bucket.set_cursor("gone", {"0": 5})
        bucket.set_cursor("gone", None)
        bucket = home.restart()
        assert bucket.cursors == {"tap": {"0": 5}}
        bucket.set_cursor("second", {"0": 1})
        bucket.flush()
        bucket.set_cursor("third", {"0": 2})
        bucket.set_cursor("tap", None)
        bucket.flush()
        bucket.set_cursor("second", {"0": 3})
        assert home.restart().cursors == {"second": {"0": 3}, "third": {"0": 2}}
        assert home.crash().cursors == {"second": {"0": 3}, "third": {"0": 2}}


def mutation(seqno: int, key: bytes = b"k", value: bytes = b"v") -> bytes:
    frame = DcpMutation(by_seqno=seqno, rev_seqno=1, key=key, value=value, cas=7).encode()
    return canonical(frame, collections=False)


def test_canonical_forms() -> None:
    short = DcpDeletion(by_seqno=1, rev_seqno=2, key=b"k", cas=7, opaque=99, vbucket=3).encode()
    frame = canonical(short, collections=False, delete_time=55)
    document = stored(frame)
    assert (document.key, document.rev, document.expiry, document.cas) == (b"\0k", 2, 55, 7)
    assert (frame[4], frame[6:8], frame[12:16]) == (21, b"\0\3", b"\0\0\0\0")
    assert canonical(frame, collections=True) == frame
