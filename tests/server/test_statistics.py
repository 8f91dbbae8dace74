"""Statistics that others' tools ask for, by their names."""

from __future__ import annotations

from server.serverkit import Bench, ask
from tailrace.server.session import Session
from tailrace.wire import admin, dcp, kv


def stats(bench: Bench, session: Session, group: bytes = b"") -> dict[str, str]:
    frames = ask(bench, session, admin.Stat(key=group))
    return {frame.key.decode(): frame.value.decode() for frame in frames if frame.key}


def test_tools_see_when_everything_is_on_disk() -> None:
    bench = Bench(flush_interval=1)
    session = bench.session()
    ask(bench, session, *[kv.Set(key=b"k%d" % n, value=b"v", vbucket=n % 4) for n in range(10)])
    busy = stats(bench, session)
    assert (busy["ep_queue_size"], busy["ep_flusher_todo"], busy["ep_flusher_state"]) == (
        "10",
        "0",
        "running",
    )
    bench.advance(2)
    bench.run_jobs()
    assert stats(bench, session)["ep_queue_size"] == "0"


def test_tools_see_that_persistence_is_paused() -> None:
    bench = Bench()
    session = bench.session()
    ask(bench, session, admin.StopPersistence())
    assert stats(bench, session)["ep_flusher_state"] == "paused"
    ask(bench, session, admin.StartPersistence())
    assert stats(bench, session)["ep_flusher_state"] == "running"


def test_memory_and_items_by_state() -> None:
    bench = Bench(memory_quota="64m")
    session = bench.session()
    ask(bench, session, kv.Set(key=b"a", value=b"v" * 100), kv.Set(key=b"b", value=b"v", vbucket=1))
    figures = stats(bench, session)
    assert figures["mem_used"] == figures["bytes"] == figures["ep_memory_bytes"]
    assert int(figures["mem_used"]) > 100
    assert figures["ep_max_size"] == str(64 << 20)
    assert (figures["curr_items"], figures["curr_items_tot"], figures["vb_active_curr_items"]) == ("2",) * 3
    assert figures["vb_replica_curr_items"] == "0"


def test_a_change_stream_says_when_it_was_made() -> None:
    bench = Bench(idle_timeout=0)
    session = bench.session()
    bench.advance(30)
    reader = bench.session()
    ask(bench, reader, dcp.DcpOpen(key=b"reader", flags=1))
    assert stats(bench, session, b"dcp")["eq_dcpq:reader:created"] == "30"


def test_expired_documents_are_counted() -> None:
    bench = Bench()
    session = bench.session()
    for number in range(3):
        ask(bench, session, kv.Set(key=b"k%d" % number, value=b"v", expiry=10))
    assert stats(bench, session)["vb_active_expired"] == "0"
    bench.clock.advance(20)
    ask(bench, session, kv.Get(key=b"k0"), kv.Get(key=b"k1"))
    figures = stats(bench, session)
    assert (figures["vb_active_expired"], figures["vb_replica_expired"]) == ("2", "0")
    assert figures["curr_tombstones"] == "2"


def test_timings_have_a_mean() -> None:
    bench = Bench(flush_interval=1)
    session = bench.session()
    ask(bench, session, kv.Set(key=b"k", value=b"v"))
    bench.advance(2)
    bench.run_jobs()
    figures = stats(bench, session, b"timings")
    assert figures["disk_commit_count"] == "1"
    assert figures["disk_commit_mean"] == figures["disk_commit_total_us"]
