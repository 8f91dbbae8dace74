"""The reader against a real node: one body for both pumps."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import tailrace
import tailrace.testing
from client.application import Application, server_state, writing
from client.conftest import AsyncAsSync, Blocking
from tailrace import Deletion, Mutation, Position, Rollback, Snapshot, StreamEnd
from tailrace.client.aio import Source
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.client.nodes import KnownNode
from tailrace.client.progress import Progress
from tailrace.client.read_options import SeenEnd
from tailrace.client.resume import Reading
from tailrace.errors import ConnectError, LoginError, UsageError
from tailrace.testing.running import RunningNode

VBUCKETS = 4
KEYS = [f"key-{number}".encode() for number in range(60)]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running


def write(node: RunningNode, count: int = 60, *, value: int = 0) -> None:
    for key in KEYS[:count]:
        node.set(key, {"value": value})


def test_everything_until_now(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    node.delete(KEYS[7])
    source = connect(node.url)
    events = list(source.changes(end="now"))
    application = Application().take(events)
    assert application.state() == server_state(node, KEYS)
    assert application.ended == dict.fromkeys(range(VBUCKETS), "ok")
    deletion = next(event for event in events if isinstance(event, Deletion))
    assert deletion.key == KEYS[7]
    mutation = next(event for event in events if isinstance(event, Mutation))
    assert mutation.json() == {"value": 0} and mutation.is_json
    assert mutation.vb_uuid == node.failover_log(mutation.vbucket)[0][0]
    highs = {vbucket: node.high_seqno(vbucket) for vbucket in range(VBUCKETS)}
    assert source.high_seqnos() == highs
    assert {vbucket: position.seqno for vbucket, position in source.positions().items()} == highs
    logs = source.failover_logs()
    assert {v: [(e.vb_uuid, e.seqno) for e in log.entries] for v, log in logs.items()} == {
        vbucket: node.failover_log(vbucket) for vbucket in range(VBUCKETS)
    }


def test_batches_say_the_same(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    node.delete(KEYS[7])
    source = connect(node.url)
    events = [event for event in source.changes(end="now") if isinstance(event, Mutation | Deletion)]
    table = pa.Table.from_batches(source.batches(end="now"))
    rows = sorted(table.to_pylist(), key=lambda row: (row["vbucket"], row["seqno"]))
    events.sort(key=lambda event: (event.vbucket, event.seqno))
    assert len(rows) == len(events)
    for row, event in zip(rows, events, strict=True):
        for name in ("vbucket", "vb_uuid", "seqno", "rev", "cas", "key"):
            assert row[name] == getattr(event, name)
        assert (row["snapshot_start"], row["snapshot_end"]) == event.snapshot
        assert row["op"] == ("mutation" if isinstance(event, Mutation) else "deletion")
        assert row["value"] == (event.value if isinstance(event, Mutation) else None)


def test_changes_come_as_they_are_made(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node, 10)
    source = connect(node.url)
    changes = source.changes(start="now")
    with writing(node, b"again and again"):
        assert isinstance(next(changes), Snapshot)
        first = next(changes)
    assert isinstance(first, Mutation) and first.key == b"again and again"
    node.set(b"another", 1)
    keys = (event.key for event in changes if isinstance(event, Mutation))
    assert next(key for key in keys if key != b"again and again") == b"another"


def test_positions_start_and_end(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    source = connect(node.url)
    events = list(source.changes(end="now"))
    positions = source.positions()
    write(node, value=1)
    highs = source.high_seqnos()
    text = json.dumps({str(vbucket): position.to_json() for vbucket, position in positions.items()})
    for start in (positions, text):
        second = [event for event in source.changes(start=start, end=highs) if isinstance(event, Mutation)]
        assert {event.key for event in second} == set(KEYS)
        assert all(event.seqno > positions[event.vbucket].seqno for event in second)
    some = list(source.changes(end="now", vbuckets=[1, 3]))
    assert {event.vbucket for event in some} == {1, 3}
    part = {2: 5}
    assert {event.vbucket for event in source.changes(end=part)} == {2}
    assert len(events) > 60


def test_position_inside_a_snapshot(node: RunningNode, connect: Callable[..., Any]) -> None:
    """Wherever the application stops, it goes on exactly there."""
    write(node)
    source = connect(node.url)
    whole = [event for event in source.changes(end="now", vbuckets=[2]) if isinstance(event, Mutation)]
    assert len(whole) > 5
    for count in range(1, len(whole)):
        changes = source.changes(vbuckets=[2])
        part = list(itertools.islice((event for event in changes if isinstance(event, Mutation)), count))
        positions = source.positions()
        changes.close()
        rest = [
            event
            for event in source.changes(start=positions, end="now", vbuckets=[2])
            if isinstance(event, Mutation)
        ]
        assert [event.seqno for event in part + rest] == [event.seqno for event in whole]


@pytest.mark.parametrize("method", ["changes", "batches"])
def test_connections_that_break_anywhere(node: RunningNode, connect: Callable[..., Any], method: str) -> None:
    """Every change comes exactly once, whichever byte the connection breaks at."""
    write(node)
    source = connect(node.url)
    handshake_bytes = source.stats()["received_bytes"]
    expected = [(e.vbucket, e.seqno) for e in source.changes(end="now") if isinstance(e, Mutation)]
    # each connection gets through with at least one change, and breaks at another place
    for cut in range(handshake_bytes + 900, handshake_bytes + 6000, 397):
        node.cut_after(cut)
        node.drop_connections()
        seen = []
        for item in getattr(source, method)(end="now"):
            if method == "batches":
                seen += zip(item["vbucket"].to_pylist(), item["seqno"].to_pylist(), strict=True)
            elif isinstance(item, Mutation):
                seen.append((item.vbucket, item.seqno))
        assert sorted(seen) == sorted(expected)
    assert source.stats()["lost_connections"] > 20


def test_rollback_is_told_before_the_new_branch(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    application = Application()
    source = connect(node.url)
    changes = source.changes()
    vbucket = node.vbucket_of(KEYS[0])
    while application.last != {vb: node.high_seqno(vb) for vb in range(VBUCKETS)}:
        application.handle(next(changes))
    before = node.high_seqno(vbucket)
    write(node, value=1)
    while application.last[vbucket] < node.high_seqno(vbucket):
        application.handle(next(changes))
    node.rewind(vbucket, before)
    node.set(KEYS[0], {"value": 2})
    while True:
        event = next(changes)
        application.handle(event)
        if isinstance(event, Mutation) and event.value == b'{"value": 2}':
            break
    assert application.rollbacks == [Rollback(vbucket, node.failover_log(vbucket)[0][0], before)]
    assert event.vb_uuid == node.failover_log(vbucket)[0][0]
    assert application.state()[vbucket] == server_state(node, KEYS)[vbucket]
    assert source.stats()["rollbacks"] == 1


def test_rollback_into_a_snapshot_goes_below_it(node: RunningNode, connect: Callable[..., Any]) -> None:
    """The server names a seqno inside what came as one snapshot: the state there was never whole."""
    write(node)
    write(node, value=1)
    application = Application()
    source = connect(node.url)
    application.take(source.changes(end="now"))
    positions = source.positions()
    vbucket = node.vbucket_of(KEYS[0])
    node.rewind(vbucket, node.high_seqno(vbucket) - 3)
    application.take(source.changes(start=positions, end="now"))
    assert [rollback.seqno for rollback in application.rollbacks] == [0]
    assert application.state() == server_state(node, KEYS)


def test_a_batch_tells_of_a_rollback(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    source = connect(node.url)
    list(source.batches(end="now"))
    positions = source.positions()
    write(node, value=1)
    node.rewind(range(VBUCKETS), 1)
    rows = pa.Table.from_batches(source.batches(start=positions, end="now")).to_pylist()
    for vbucket in range(VBUCKETS):
        mine = [row for row in rows if row["vbucket"] == vbucket]
        assert [row["op"] for row in mine] == ["rollback", "mutation"]
        assert [row["seqno"] for row in mine] == [0, 1]
        assert mine[0]["vb_uuid"] == node.failover_log(vbucket)[0][0]


def test_unknown_history_starts_over(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    source = connect(node.url)
    for start in ({1: Position.at(4711, 3)}, {1: Position.at(0, 3)}, {1: Position(4711, 2, 1, 9)}):
        events = list(source.changes(start=start, end="now", vbuckets=[1]))
        assert isinstance(events[0], Rollback) and events[0].seqno == 0
        seqnos = [event.seqno for event in events if isinstance(event, Mutation)]
        assert seqnos and seqnos[0] == 1


def test_recreated_bucket_starts_over(connect: Callable[..., Any]) -> None:
    with tailrace.testing.node(vbuckets=VBUCKETS) as old:
        write(old)
        source = connect(old.url)
        application = Application().take(source.changes(end="now"))
        positions = source.positions()
        port = old.port
    new = tailrace.testing.node(vbuckets=VBUCKETS)
    new.port = port
    with new:
        write(new, 30, value=5)
        application.take(connect(new.url).changes(start=positions, end="now"))
        assert application.state() == server_state(new, KEYS)
        assert len(application.rollbacks) == VBUCKETS


def test_flush_is_a_rollback_to_the_beginning(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    application = Application()
    source = connect(node.url)
    application.take(source.changes(end="now"))
    positions = source.positions()
    node.flush()
    write(node, 5, value=1)
    application.take(source.changes(start=positions, end="now"))
    assert application.state() == server_state(node, KEYS)
    assert {rollback.seqno for rollback in application.rollbacks} == {0}


def test_an_application_that_is_behind_two_rollbacks(node: RunningNode, connect: Callable[..., Any]) -> None:
    """A state on a branch that turns out to be gone is no place to return to, even if its seqno fits."""
    for number in range(30):
        node.set(b"key-%d" % number, 0, vbucket=1)
    branch = node.failover_log(1)[0][0]
    held = [Position.at(branch, seqno) for seqno in (30, 10)]
    source = connect(node.url, rollback_points=lambda vbucket: held)
    changes = source.changes(vbuckets=[1])
    rollbacks = []

    def read_up_to(seqno: int) -> None:
        for event in changes:
            if isinstance(event, Rollback):
                rollbacks.append(event.seqno)
            elif isinstance(event, Mutation) and event.seqno == seqno:
                return

    read_up_to(30)
    node.rewind(1, 20)
    for number in range(30):
        node.set(b"other-%d" % number, 1, vbucket=1)
    read_up_to(50)
    node.rewind(1, 40)
    node.set(b"last", 2, vbucket=1)
    read_up_to(41)
    assert rollbacks == [10, 10]


@pytest.mark.parametrize("end", ["now", "seen"])
def test_the_end_is_taken_back_before_it_is_read(
    node: RunningNode, connect: Callable[..., Any], end: str
) -> None:
    """The bucket never reaches the seqno that it had at the start; the reader is below the branch point."""
    for number in range(40):
        node.set(b"key-%d" % number, "x" * 400, vbucket=0)
        node.set(b"key-%d" % number, "x" * 400, vbucket=1)
    source = connect(node.url, flow_control_buffer=1024, backfill_order="sequential")
    wanted = SeenEnd({0: 40, 1: 40}) if end == "seen" else end
    start = {1: Position.at(node.failover_log(1)[0][0], 20)}
    changes = source.changes(start=start, end=wanted, vbuckets=[0, 1])
    application = Application().take([next(changes)])  # the window is full of vbucket 0
    with KvClient(node.url) as client:  # the other one is requested, too
        until(lambda: any(":stream_1_" in name for name in client.stats("dcp")), source)
    node.rewind(1, 30)
    application.take(changes)
    assert sorted(application.state()[1]) == sorted(b"key-%d" % number for number in range(20, 30))
    assert not application.rollbacks and source.positions()[1].seqno == 30


@pytest.mark.parametrize(
    ("dialect", "end"), [("dcp", "now"), ("dcp", "seen"), ("upr-a", "now"), ("upr-b", "now"), ("tap", "now")]
)
def test_the_end_is_taken_back_before_the_stream_is_asked_for(
    node: RunningNode, connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, dialect: str, end: str
) -> None:
    """The server accepts a stream up to a seqno that it had when it was asked, and no longer has."""
    for number in range(40):
        node.set(b"key-%d" % number, number, vbucket=1)
        node.set(b"key-%d" % number, number, vbucket=2)
    request, ends = Reading._request, []

    def late(self: Reading, progress: Progress, at: KnownNode) -> None:
        if progress.vbucket == 1 and not ends:
            node.rewind(1, 30)
        ends.append((progress.vbucket, progress.end_seqno))
        request(self, progress, at)

    monkeypatch.setattr(Reading, "_request", late)
    source = connect(node.url, dialect=dialect)
    application = Application()
    application.take(source.changes(end=SeenEnd({1: 40, 2: 40}) if end == "seen" else end, vbuckets=[1, 2]))
    assert (1, 40) in ends
    assert {vbucket: len(held) for vbucket, held in application.state().items()} == {1: 30, 2: 40}
    assert not application.rollbacks and application.ended == {1: "ok", 2: "ok"}


def test_close_while_another_thread_waits(node: RunningNode) -> None:
    source = tailrace.connect_sync(node.url).__enter__()
    failed = []

    def wait() -> None:
        try:
            list(source.changes(start="now"))
        except UsageError as error:
            failed.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while source.stats()["vbuckets"].get("open") != VBUCKETS:
        time.sleep(0.01)
    source.close()
    thread.join(60)
    assert not thread.is_alive() and "closed" in str(failed[0])


def test_a_source_is_opened_once(node: RunningNode) -> None:
    """A second `with` would take the first one's connections for its own, and wait for ever."""
    write(node)
    with tailrace.connect_sync(node.url) as source:
        with pytest.raises(UsageError, match="open already"):
            source.__enter__()
        with pytest.raises(UsageError, match="open already"), source:
            pass
        assert len([event for event in source.changes(end="now") if isinstance(event, Mutation)]) == len(KEYS)
    with pytest.raises(UsageError, match="opened once"):
        source.__enter__()
    with pytest.raises(UsageError, match="closed"):
        source.stats()


def test_an_asynchronous_source_is_opened_once(node: RunningNode) -> None:
    async def open_twice() -> None:
        async with tailrace.connect(node.url) as source:
            with pytest.raises(UsageError, match="opened once"):
                await source.__aenter__()
            assert [event async for event in source.changes(end="now")]
        with pytest.raises(UsageError, match="opened once"):
            await source.__aenter__()

    asyncio.run(open_twice())


def test_purge_behind_the_reader(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    application = Application()
    source = connect(node.url)
    application.take(source.changes(end="now"))
    positions = source.positions()
    for key in KEYS[:20]:
        node.delete(key)
    write(node, 30, value=2)
    node.delete(KEYS[29])
    node.persist()
    node.compact(drop_tombstones=True)
    application.take(source.changes(start=positions, end="now"))
    assert application.state() == server_state(node, KEYS)


def test_start_now_and_a_rollback_behind_the_start(node: RunningNode, connect: Callable[..., Any]) -> None:
    """A reader that started "now" has nothing older: it neither starts over nor gets what came before."""
    write(node)
    source = connect(node.url)
    vbucket = node.vbucket_of(KEYS[0])
    started = node.high_seqno(vbucket)
    list(source.changes(start="now", end="now"))
    positions = source.positions()
    assert positions[vbucket].seqno == started
    changes = source.changes(start="now", vbuckets=[vbucket])
    with writing(node, KEYS[0]):
        assert isinstance(next(changes), Snapshot | Mutation)
    node.rewind(vbucket, started - 2)
    node.set(KEYS[0], 2)
    rest = []
    while not (rest and isinstance(rest[-1], Mutation) and rest[-1].value == b"2"):
        rest.append(next(changes))
    rollback = next(event for event in rest if isinstance(event, Rollback))
    assert rollback.seqno == started - 2
    after = rest[rest.index(rollback) :]
    assert [event.seqno for event in after if isinstance(event, Mutation)] == [started - 1]


def test_kill_and_restart(node: RunningNode, connect: Callable[..., Any]) -> None:
    """What was not on disk is lost: the reader, which had it, rolls back."""
    write(node)
    node.persist()
    application = Application()
    source = connect(node.url)
    changes = source.changes()
    highs = {vb: node.high_seqno(vb) for vb in range(VBUCKETS)}
    while application.last != highs:
        application.handle(next(changes))
    node.stop_persistence()
    write(node, value=1)
    highs = {vb: node.high_seqno(vb) for vb in range(VBUCKETS)}
    while application.last != highs:
        application.handle(next(changes))
    node.kill()
    node.start()
    write(node, 3, value=2)
    while application.state() != server_state(node, KEYS):
        application.handle(next(changes))
    assert application.rollbacks
    assert source.stats()["lost_connections"] == 1


def test_pause_and_resume(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    source = connect(node.url)
    application = Application()
    changes = source.changes()
    highs = {vb: node.high_seqno(vb) for vb in range(VBUCKETS)}
    while application.last != highs:
        application.handle(next(changes))
    source.pause([0, 1])
    assert source.stats()["vbuckets"] == {"paused": 2, "open": 2}
    write(node, value=1)
    highs = {vb: node.high_seqno(vb) for vb in range(VBUCKETS)}
    while any(application.last[vb] < highs[vb] for vb in (2, 3)):
        event = next(changes)
        assert event.vbucket in (2, 3)
        application.handle(event)
    source.resume([0, 1])
    while application.last != highs:
        application.handle(next(changes))
    assert application.state() == server_state(node, KEYS)
    with pytest.raises(UsageError):
        source.pause([99])


def test_small_window_and_busy_application(node: RunningNode, connect: Callable[..., Any]) -> None:
    """The window bounds what waits for the application, and everything comes all the same."""
    for key in KEYS:
        node.set(key, b"x" * 2000)
    source = connect(node.url, flow_control_buffer=10_000)
    seen = 0
    for portion in source.portions(end="now"):
        assert source.stats()["queued_bytes"] <= 10_000 + 3_000
        seen += sum(isinstance(event, Mutation) for event in portion.events())
    assert seen == len(KEYS)


def test_noops_are_answered_while_the_application_is_busy(
    node: RunningNode, connect: Callable[..., Any]
) -> None:
    write(node, 5)
    source = connect(node.url, noop_interval_s=1)
    changes = source.changes()
    next(changes)
    source.idle(3.5)  # more than two intervals: the node ends connections that did not answer
    node.set(b"later", 1)
    assert any(isinstance(event, Mutation) and event.key == b"later" for event in changes)
    assert source.stats()["lost_connections"] == 0


def test_rollback_mitigation_holds_back_what_can_be_lost(
    node: RunningNode, connect: Callable[..., Any]
) -> None:
    write(node)
    node.persist()
    source = connect(node.url, persisted_only=True)
    application = Application()
    changes = source.changes()
    highs = {vb: node.high_seqno(vb) for vb in range(VBUCKETS)}
    while application.last != highs:
        application.handle(next(changes))
    node.stop_persistence()
    write(node, value=1)
    source.idle(0.5)
    node.kill()
    node.start()
    write(node, 3, value=2)
    while application.state() != server_state(node, KEYS):
        application.handle(next(changes))
    assert application.rollbacks == []


def test_a_question_when_the_connection_is_lost(node: RunningNode, connect: Callable[..., Any]) -> None:
    """It can't be answered in the middle of what the connection brought: an error in time; later it can."""
    write(node)
    source = connect(node.url, retry_for_s=3)
    changes = source.changes()
    next(changes)
    assert sum(source.high_seqnos().values()) == len(KEYS)
    node.drop_connections()
    until(lambda: source.stats()["lost_connections"] == 1, source)
    with pytest.raises(ConnectError, match="take the changes"):
        source.high_seqnos()
    changes.close()
    assert sum(source.high_seqnos().values()) == len(KEYS)


def test_a_reading_that_is_over_asks_for_nothing(node: RunningNode, connect: Callable[..., Any]) -> None:
    """Not for vbuckets that waited for another attempt, nor when they are resumed."""
    write(node)
    source = connect(node.url)
    changes = source.changes()
    next(changes)
    source.pause([0])
    changes.close()
    for act in (source.pause, source.resume):
        with pytest.raises(UsageError, match="nothing is being read"):
            act([0])
    assert source.stats()["waits_for"] == "a reading to begin"
    node.drop_connections()
    until(lambda: source.stats()["lost_connections"] == 1, source)
    assert len(source.high_seqnos()) == VBUCKETS
    assert all(node["streams"] == 0 for node in source.stats()["nodes"].values())


def until(condition: Callable[..., Any], source: AsyncAsSync | Blocking) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        source.idle(0.01)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("columnar", [False, True])
def test_rollback_mitigation_and_an_end(
    node: RunningNode, connect: Callable[..., Any], columnar: bool
) -> None:
    """All streams are at their ends, but the last portion still waits for the disk: that is not the end."""
    node.stop_persistence()
    write(node)
    source = connect(node.url, persisted_only=True)
    reading = (source.batches if columnar else source.changes)(end="now")
    timer = threading.Timer(1, node.start_persistence)
    timer.start()
    changes = [row for batch in reading for row in batch.to_pylist()] if columnar else list(reading)
    timer.join()
    keys = {
        change["key"] if columnar else change.key
        for change in changes
        if columnar or isinstance(change, Mutation)
    }
    assert keys == set(KEYS)


def test_collections(node: RunningNode, connect: Callable[..., Any]) -> None:
    with KvClient(node.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.orders", "shop.customers"], []))
        client.set("k", {"in": "orders"}, collection="shop.orders")
        client.set("k", {"in": "customers"}, collection="shop.customers")
        client.set("k", {"in": "default"})
    everything = connect(node.url)
    rows = pa.Table.from_batches(everything.batches(end="now")).to_pylist()
    seen = {(row["scope"], row["collection"], row["value"]) for row in rows if row["op"] == "mutation"}
    assert seen == {
        ("shop", "orders", b'{"in":"orders"}'),
        ("shop", "customers", b'{"in":"customers"}'),
        ("_default", "_default", b'{"in":"default"}'),
    }
    created = [event for event in everything.changes(end="now") if isinstance(event, tailrace.SystemEvent)]
    assert {event.name for event in created} == {"shop", "orders", "customers"}
    assert {event.event for event in created} == {"scope_created", "collection_created"}
    assert everything.has_collections and not connect(node.url, dialect="tap").has_collections
    names = set(everything.collection_names.values())
    assert names == {("_default", "_default"), ("shop", "orders"), ("shop", "customers")}
    for options in ({"collections": ["shop.orders"]}, {"scope": "shop"}):
        some = [
            event.value
            for event in connect(node.url, **options).changes(end="now")
            if isinstance(event, Mutation)
        ]
        assert b'{"in":"orders"}' in some and b'{"in":"default"}' not in some
    with pytest.raises(UsageError, match="no collection"):
        next(connect(node.url, collections=["shop.nothing"]).changes())


def test_no_value_and_compression(node: RunningNode, connect: Callable[..., Any]) -> None:
    node.set(b"k", {"text": "a" * 2000})
    (empty,) = [
        event for event in connect(node.url, no_value=True).changes(end="now") if isinstance(event, Mutation)
    ]
    assert empty.value == b""
    table = pa.Table.from_batches(connect(node.url, no_value=True).batches(end="now"))
    assert table["value"].to_pylist() == [None]
    for source in (connect(node.url, compression=True), connect(node.url)):
        (full,) = [event for event in source.changes(end="now") if isinstance(event, Mutation)]
        assert full.json() == {"text": "a" * 2000}


def test_login(connect: Callable[..., Any]) -> None:
    with tailrace.testing.node(users={"ada": "secret"}) as node:
        node.set(b"k", 1)
        source = connect(node.url, username="ada", password="secret")
        assert any(isinstance(event, Mutation) for event in source.changes(end="now"))
        with pytest.raises(LoginError):
            connect(node.url, username="ada", password="wrong")
        with pytest.raises(LoginError):
            connect(node.url)
        with pytest.raises(LoginError):
            connect(node.url + "x", username="ada", password="secret")
        changes = source.changes()
        next(changes)
        node.refuse_logins()
        node.drop_connections()
        with pytest.raises(LoginError):
            list(changes)


def test_a_server_that_stays_away_is_an_error(connect: Callable[..., Any]) -> None:
    with tailrace.testing.node(vbuckets=VBUCKETS) as node:
        write(node, 5)
        source = connect(node.url, retry_for_s=0.5)
        changes = source.changes()
        next(changes)
    with pytest.raises(ConnectError, match=r"can.t connect|was lost"):
        list(changes)
    with pytest.raises(ConnectError):
        connect(node.url)
    assert "connect" in str(source.stats()["nodes"])


def test_usage_errors(node: RunningNode, connect: Callable[..., Any]) -> None:
    for options in (
        {"dialect": "x"},
        {"flow_control_bufer": 1},
        {"flow_control_buffer": 1},
        {"noop_interval_s": 0},
        {"collections": "shop.orders"},
        {"scope": "a", "collections": ["b"]},
        {"priority": "highest"},
    ):
        with pytest.raises(UsageError):
            connect(node.url, **options)
    source = connect(node.url)
    for start, end in (("yesterday", "now"), ("now", "later"), ({0: 5}, "now"), ('{"0":1}', "now")):
        with pytest.raises(UsageError):
            next(source.changes(start=start, end=end))
    with pytest.raises(UsageError):
        next(source.changes(vbuckets=[VBUCKETS]))


def test_an_ended_reading_says_so(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node)
    source = connect(node.url)
    first = source.changes()
    next(first)
    list(source.changes(end="now"))
    with pytest.raises(UsageError, match="another"):
        list(first)


def test_streams_end_with_a_reason(node: RunningNode, connect: Callable[..., Any]) -> None:
    events = list(connect(node.url).changes(end="now"))
    assert events == [StreamEnd(vbucket, "ok") for vbucket in range(VBUCKETS)]


def test_a_lost_node_costs_a_paused_application_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the lost connection had brought waits for the application. That connection's limit on silence runs
    out meanwhile, and must not be checked over and over, which would take a core while the pause lasts.
    """
    rings = 0
    ring = Source._ring

    def counted(source: Source) -> None:
        nonlocal rings
        rings += 1
        ring(source)

    monkeypatch.setattr(Source, "_ring", counted)
    with tailrace.testing.node(vbuckets=1) as node:
        for number in range(20):
            node.set(f"k{number}", b"v" * 1_000)
        options: dict[str, Any] = {"noop_interval_s": 0.1, "flow_control_buffer": 1_024, "retry_for_s": 60}
        with tailrace.connect_sync(node.url, **options) as source:
            changes = source.changes()
            next(changes)
            node.stop()
            while not source._source._connections.unheeded():
                time.sleep(0.01)
            time.sleep(1.0)
            before = rings
            time.sleep(1.0)
            assert rings - before < 20


def test_a_reading_that_is_collected_while_a_loop_runs(node: RunningNode) -> None:
    """As garbage is: at any moment, also in another test. It is no error there, and the source can go on."""
    node.set(b"k", 1)
    with AsyncAsSync(node.url) as source:
        readings = [source.changes()]
        first = next(readings[0])

        async def collect() -> None:
            readings.clear()

        asyncio.run(collect())
        assert next(source.changes()) == first
