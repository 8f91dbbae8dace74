"""What a bucket does by itself: commits before memory is full, maintenance when nobody writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from server.serverkit import Bench, ask
from tailrace.server.bucket import run_inline
from tailrace.server.session import Session
from tailrace.store.log import LogBatch
from tailrace.wire import kv
from tailrace.wire.codes import OpenFlag, Status
from tailrace.wire.dcp import DcpOpen, DcpStreamRequest


def write(
    bench: Bench, session: Session, count: int, *, value: bytes = b"x" * 1000, expiry: int = 0
) -> list[int]:
    """Set documents, some in a batch; how each was answered."""
    statuses = []
    for start in range(0, count, 50):
        batch = [
            kv.Set(key=b"k%d" % n, vbucket=n % 4, value=value, expiry=expiry)
            for n in range(start, min(start + 50, count))
        ]
        statuses += [answer.status for answer in ask(bench, session, *batch)]
        bench.run_jobs()
    return statuses


def test_a_fast_writer_does_not_fill_the_memory_before_the_interval_is_over() -> None:
    """The quota is for a disk that is behind. This one is not: nothing was written yet."""
    bench = Bench(flush_interval="1h", memory_quota="1m")
    session = bench.session()
    assert set(write(bench, session, 5_000)) == {0}
    store = bench.engine.buckets["default"]
    assert int(store.stats()["commits"]) > 4
    assert all(vbucket.persisted_seqno > 1_000 for vbucket in store)


def test_also_on_the_long_way() -> None:
    bench = Bench(flush_interval="1h", memory_quota="1m")
    assert set(write(bench, bench.session(), 3_000, expiry=3600)) == {0}


def test_nothing_is_committed_early_for_a_little() -> None:
    bench = Bench(flush_interval="1h", memory_quota="1m")
    commits = bench.engine.buckets["default"].stats()["commits"]
    write(bench, bench.session(), 50)
    assert bench.engine.buckets["default"].stats()["commits"] == commits


def test_a_disk_that_refuses_is_left_alone_until_its_time_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(flush_interval="1h", memory_quota="1m", idle_timeout=0)
    session = bench.session()
    store = bench.engine.buckets["default"]

    refused = []

    def refuse(batch: LogBatch) -> None:
        refused.append(batch)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store.journal, "commit", refuse)
        write(bench, session, 900)
        assert len(refused) == 1
        bench.advance(3600.0)
        bench.run_jobs()
        assert len(refused) == 2
    bench.advance(3600.0)
    bench.run_jobs()
    assert all(vbucket.persisted_seqno == vbucket.high_seqno for vbucket in store)
    assert set(write(bench, session, 2_000)) == {0}


def test_a_disk_that_refuses_for_long_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each try, every second, would fill the log of a disk that is full already."""
    bench = Bench(flush_interval="1", idle_timeout=0)
    session = bench.session()
    store, events = bench.engine.buckets["default"], bench.node.events
    reason = OSError(28, "No space left on device")

    def refuse(batch: LogBatch) -> None:
        raise reason

    def tries(count: int) -> None:
        for _ in range(count):
            bench.advance(1.5)
            bench.run_jobs()

    with monkeypatch.context() as patched:
        patched.setattr(store.journal, "commit", refuse)
        write(bench, session, 10)
        tries(20)
        assert (events.counts["flush_failed"], events.counts["flush_recovered"]) == (1, 0)
        reason = OSError(5, "Input/output error")
        tries(20)
        assert events.counts["flush_failed"] == 2, "another reason is told of"
    assert bench.node.buckets["default"].work.flush_failures == 40
    tries(2)
    assert (events.counts["flush_failed"], events.counts["flush_recovered"]) == (2, 1)
    assert events.recent[-1]["failed_tries"] == 40
    with monkeypatch.context() as patched:
        patched.setattr(store.journal, "commit", refuse)
        write(bench, session, 10)
        tries(20)
    assert events.counts["flush_failed"] == 3, "and when it begins again"


def test_trouble_is_not_over_because_nothing_is_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(flush_interval="1", idle_timeout=0)
    session = bench.session()
    store, events = bench.engine.buckets["default"], bench.node.events

    def refuse(batch: LogBatch) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store.journal, "commit", refuse)
        write(bench, session, 10)
        bench.advance(1.5)
        bench.run_jobs()
    store.persistence = False
    bench.advance(5.0)
    bench.run_jobs()
    assert (events.counts["flush_failed"], events.counts["flush_recovered"]) == (1, 0)
    store.persistence = True
    store.flush_all()
    bench.advance(5.0)
    bench.run_jobs()
    assert events.counts["flush_recovered"] == 1
    assert not bench.node.buckets["default"].work.disk_refuses


def test_a_node_that_goes_quiet_merges_its_segments() -> None:
    bench = Bench(memory_quota="1m", quiet_time="5", garbage_share="100%", history_changes="0")
    session = bench.session()
    store = bench.engine.buckets["default"]
    while len(store.segments) < 5:
        write(bench, session, 200)
        bench.advance(0.25)
        bench.run_jobs()
    bench.advance(4.0)
    bench.run_jobs()
    before = [segment.size for segment in store.segments]
    assert len(before) >= 5
    for _ in range(10):
        bench.advance(2.0)
        bench.run_jobs()
    after = [segment.size for segment in store.segments]
    assert len(after) < len(before)
    assert all(older > 2 * newer for older, newer in pairwise(after))


def test_maintenance_that_failed_is_tried_again_without_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(memory_quota="1m", quiet_time="5")
    session = bench.session()
    store = bench.engine.buckets["default"]

    def refuse(path: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store.sealed.files, "create", refuse)
        write(bench, session, 150)
        for _ in range(3):
            bench.advance(0.25)
            bench.run_jobs()
    events = bench.node.events
    assert (events.counts["maintenance_failed"], events.counts["maintenance_recovered"]) == (1, 0)
    bench.advance(0.25)
    for _ in range(10):
        bench.advance(2.0)
        bench.run_jobs()
    assert all(generation.sealed for generation in store.generations)
    assert all(vbucket.persisted_seqno == vbucket.high_seqno for vbucket in store)
    assert (events.counts["maintenance_failed"], events.counts["maintenance_recovered"]) == (1, 1)


def ask_for_a_stream(bench: Bench) -> int:
    """How the node answers a new reader."""
    request = DcpStreamRequest(vbucket=0, end_seqno=(1 << 64) - 1)
    opened = DcpOpen(key=b"reader", flags=int(OpenFlag.PRODUCER))
    return ask(bench, bench.session(), opened, request)[1].status


def test_readers_wait_while_the_disk_is_behind() -> None:
    bench = Bench(memory_quota="1m")
    ask(bench, bench.session(), *(kv.Set(key=b"k%d" % n, value=bytes(1000)) for n in range(1_100)))
    assert ask_for_a_stream(bench) == Status.ENOMEM
    bench.run_jobs()
    bench.advance(1.0)
    bench.run_jobs()
    assert ask_for_a_stream(bench) == Status.SUCCESS


@pytest.mark.parametrize("what", ["logs", "segments", "persistence"])
def test_readers_do_not_wait_for_a_disk_that_takes_nothing(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be for ever."""
    bench = Bench(memory_quota="1m", quiet_time="1")
    store = bench.engine.buckets["default"]

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if what == "persistence":
        store.persistence = False
    else:
        place = store.journal if what == "logs" else store.sealed.manifest_file
        monkeypatch.setattr(place, "commit" if what == "logs" else "change", refuse)
    assert Status.ETMPFAIL in write(bench, bench.session(), 1_500)
    bench.advance(3.0)
    bench.run_jobs()
    assert store.memory_bytes >= store.settings.memory_quota
    assert ask_for_a_stream(bench) == Status.SUCCESS


def test_a_segment_that_cannot_be_written_is_not_tried_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(flush_interval="1h", memory_quota="1m", quiet_time="1")
    session = bench.session()
    store = bench.engine.buckets["default"]
    bench.node.buckets["default"].work._run_job = run_inline  # as a simulation does
    tries = []

    def refuse(edit: Callable[..., Any], then: None = None) -> None:
        tries.append(edit)
        assert len(tries) < 100
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(store.sealed.manifest_file, "change", refuse)
        assert set(write(bench, session, 300)) == {0}
        bench.advance(2.0)
        bench.run_jobs()
        assert 0 < len(tries) < 10
        assert not store.segments
    bench.advance(2.0)
    bench.run_jobs()
    assert store.segments
    assert all(generation.sealed for generation in store.generations)


def test_files_are_removed_and_memory_is_freed_by_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the loop waits: a log of 64 MiB takes 20 ms to remove."""
    bench = Bench(flush_interval="1h", memory_quota="1m")
    session = bench.session()
    store = bench.engine.buckets["default"]
    removed: list[str] = []
    unlink = store.sealed.files.unlink
    in_job: list[bool] = [False]

    def note(path: str) -> None:
        assert in_job[0]
        removed.append(path)
        unlink(path)

    monkeypatch.setattr(store.sealed.files, "unlink", note)
    for _ in range(8):
        for start in range(0, 500, 50):
            numbers = range(start, start + 50)
            ask(bench, session, *[kv.Set(key=b"k%d" % n, value=b"x" * 1000) for n in numbers])
        while bench.jobs:
            job, done = bench.jobs.pop(0)
            in_job[0] = True
            job.run()
            in_job[0] = False
            done()
    assert removed
    assert not bench.node.busy


def test_a_node_is_busy_while_files_are_removed() -> None:
    bench = Bench(flush_interval="1h", memory_quota="1m")
    bucket = bench.node.buckets["default"]
    bucket.store.sealed.manifest_file.retire(["default/none"])  # type: ignore[attr-defined]
    bucket.work._remove_files()
    assert bench.node.busy
    assert not bucket.work.busy  # nothing that a rollback would have to wait for
    bench.run_jobs()
    assert not bench.node.busy


def test_changes_leave_memory_when_nobody_writes_any_more() -> None:
    bench = Bench(flush_interval=1, memory_quota="64m", idle_timeout=0)
    session = bench.session()
    store = bench.engine.buckets["default"]
    write(bench, session, 6_000)
    assert store.memory_bytes > 5 << 20
    for _ in range(60):
        bench.advance(1.0)
        bench.run_jobs()
    assert store.memory_bytes == 0
    get = ask(bench, session, kv.Get(key=b"k7", vbucket=3))
    assert [frame.value for frame in get] == [b"x" * 1000]


def test_a_little_that_is_not_sealed_stays_in_memory() -> None:
    """A segment for every pause of a slow writer would cost more than it frees."""
    bench = Bench(flush_interval=1, memory_quota="64m", idle_timeout=0)
    write(bench, bench.session(), 100)
    store = bench.engine.buckets["default"]
    for _ in range(60):
        bench.advance(1.0)
        bench.run_jobs()
    assert store.memory_bytes > 100_000
    assert not store.segments
