"""The reader in the older dialects, against a real node: the same tests for both pumps."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tailrace.testing
from client.application import Application, server_state, writing
from tailrace import Deletion, Expiration, Flush, Mutation, Position, Rollback, Snapshot, TapSettings
from tailrace.cli.main import main
from tailrace.client.kv import KvClient
from tailrace.client.resume import _REQUESTED_AT_ONCE
from tailrace.client.state_store import MemoryState
from tailrace.errors import UsageError
from tailrace.testing.running import RunningNode

VBUCKETS = 4
KEYS = [f"key-{number}".encode() for number in range(60)]
UPR = ["upr-a", "upr-b"]
OLD = [*UPR, "tap"]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running


def write(node: RunningNode, count: int = 60, *, value: int = 0) -> None:
    for key in KEYS[:count]:
        node.set(key, {"value": value})


def documents(events: Any) -> dict[bytes, Any]:
    """What is left of a stream of events: key to value, cas, rev, flags, expiry and datatype."""
    held = {}
    for event in events:
        if isinstance(event, Mutation):
            held[event.key] = (
                event.value,
                event.cas,
                event.rev,
                event.flags,
                event.expiry,
                event.datatype,
                event.vbucket,
            )
        elif isinstance(event, Deletion | Expiration):
            held.pop(event.key, None)
        elif isinstance(event, Flush):
            held = {key: document for key, document in held.items() if document[-1] != event.vbucket}
    return held


def until(changes: Iterator[Any], done: Callable[..., Any]) -> Iterator[Any]:
    """Events until one fits."""
    for event in changes:
        yield event
        if done(event):
            return


def is_mutation_of(key: bytes) -> Callable[..., Any]:
    return lambda event: isinstance(event, Mutation) and event.key == key


@pytest.mark.parametrize("dialect", OLD)
def test_every_dialect_tells_the_same(node: RunningNode, connect: Callable[..., Any], dialect: str) -> None:
    write(node)
    node.set(b"raw", b"\xff\0not json", expiry=2_000_000_000)
    node.delete(KEYS[7])
    expected = documents(connect(node.url).changes(end="now"))
    source = connect(node.url, dialect=dialect)
    events = list(source.changes(end="now"))
    assert documents(events) == expected and len(expected) == 60
    rows = pa.Table.from_batches(source.batches(end="now")).to_pylist()
    assert {row["key"]: row["cas"] for row in rows if row["op"] == "mutation"} == {
        key: document[1] for key, document in expected.items()
    }
    some = list(source.changes(end="now", vbuckets=[1, 3]))
    assert {event.vbucket for event in some} == {1, 3}
    assert documents(some) == {key: document for key, document in expected.items() if document[-1] in (1, 3)}


@pytest.mark.parametrize("dialect", OLD)
@pytest.mark.parametrize("end", ["now", "forever"])
def test_more_vbuckets_than_are_asked_for_in_a_turn(
    connect: Callable[..., Any], dialect: str, end: str
) -> None:
    """One request of TAP has to name them all: asking for more later means connecting again, for ever."""
    with tailrace.testing.node(vbuckets=2 * _REQUESTED_AT_ONCE) as node:
        write(node)
        source = connect(node.url, dialect=dialect)
        mutations = (event for event in source.changes(end=end) if isinstance(event, Mutation))
        assert {event.key for event in itertools.islice(mutations, len(KEYS))} == set(KEYS)
        assert source.stats()["lost_connections"] == 0


@pytest.mark.parametrize("dialect", UPR)
def test_upr_has_seqnos_branches_and_snapshots(
    node: RunningNode, connect: Callable[..., Any], dialect: str
) -> None:
    write(node)
    node.delete(KEYS[7])
    application = Application()
    source = connect(node.url, dialect=dialect)
    events = list(source.changes(end="now"))
    application.take(events)
    assert application.state() == server_state(node, KEYS)
    assert application.ended == dict.fromkeys(range(VBUCKETS), "ok")
    for vbucket, position in source.positions().items():
        assert position.seqno == node.high_seqno(vbucket) and position.at_snapshot_end
        assert position.vb_uuid == node.failover_log(vbucket)[0][0]
    # and from there on, in another dialect
    write(node, value=1)
    rest = list(connect(node.url).changes(start=source.positions(), end="now"))
    assert application.take(rest).state() == server_state(node, KEYS)
    assert not application.rollbacks


@pytest.mark.parametrize("dialect", UPR)
def test_upr_rolls_back(node: RunningNode, connect: Callable[..., Any], dialect: str, tmp_path: Path) -> None:
    write(node)
    state = tmp_path / "state.json"
    application = Application()
    source = connect(node.url, dialect=dialect, state=state)
    application.take(source.changes(end="now"))
    write(node, value=1)
    application.take(source.changes(end="now"))
    source.close()
    vbucket = node.vbucket_of(KEYS[0])
    node.rewind(vbucket, node.high_seqno(vbucket) - 3)
    node.set(KEYS[0], {"value": 2})
    source = connect(node.url, dialect=dialect, state=state)
    application.take(source.changes(end="now"))
    assert [rollback.vbucket for rollback in application.rollbacks] == [vbucket]
    assert application.state() == server_state(node, KEYS)


@pytest.mark.parametrize("dialect", UPR)
def test_a_snapshot_that_breaks_off_is_taken_back(
    node: RunningNode, connect: Callable[..., Any], dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.protocol.upr.translation.HELD_BYTES", 100)
    write(node)
    application = Application()
    source = connect(node.url, dialect=dialect)
    changes = source.changes()
    for event in changes:
        application.handle(event)
        if isinstance(event, Mutation) and event.seqno < event.snapshot[1]:
            break
    positions = source.positions()
    assert any(position.is_partial for position in positions.values())
    changes.close()
    # the history goes another way inside what was received
    vbucket = next(number for number, position in positions.items() if position.is_partial)
    node.rewind(vbucket, 1)
    node.set(KEYS[0], {"value": "other"}, vbucket=vbucket)
    application.take(source.changes(start=positions, end="now"))
    assert [(rollback.vbucket, rollback.seqno) for rollback in application.rollbacks] == [(vbucket, 0)]
    left = application.state()
    assert left.pop(vbucket).keys() >= {KEYS[0]}
    assert application.last[vbucket] == node.high_seqno(vbucket) == 2
    assert left == {key: documents for key, documents in server_state(node, KEYS).items() if key != vbucket}


@pytest.mark.parametrize("dialect", OLD)
def test_now_and_lost_connections(node: RunningNode, connect: Callable[..., Any], dialect: str) -> None:
    write(node, 20)
    source = connect(node.url, dialect=dialect)
    changes = source.changes(start="now")
    with writing(node, b"again"):
        events = list(until(changes, is_mutation_of(b"again")))
    assert set(documents(events)) == {b"again"}
    for turn in range(3):
        key = b"new-%d" % turn
        node.set(key, turn)
        events += until(changes, is_mutation_of(key))
        if turn == 1:
            node.drop_connections()
        else:
            node.restart()
    node.set(b"last", 1)
    events += until(changes, is_mutation_of(b"last"))
    held = set(documents(events))
    if dialect == "tap":
        # which has begun again: what was there before comes now, and nothing is missing in the end
        while set(documents(events)) < {*KEYS[:20], b"again", b"new-0", b"new-1", b"new-2", b"last"}:
            events.append(next(changes))
    else:
        assert held == {b"again", b"new-0", b"new-1", b"new-2", b"last"}


@pytest.mark.parametrize("dialect", OLD)
def test_a_flush_is_told(node: RunningNode, connect: Callable[..., Any], dialect: str) -> None:
    write(node)
    source = connect(node.url, dialect=dialect)
    changes = source.changes()
    events = list(itertools.islice((event for event in changes if isinstance(event, Mutation)), 60))
    node.flush()
    node.set(b"after", 1)
    more = list(until(changes, is_mutation_of(b"after")))
    assert {event.vbucket for event in more if isinstance(event, Flush)} >= {node.vbucket_of(b"after")}
    assert set(documents([*events, *more])) >= {b"after"}
    after = more[-1]
    if dialect != "tap":
        assert (after.seqno, after.vb_uuid) == (1, node.failover_log(after.vbucket)[0][0])
    # nothing of it is left for a reader with an older position
    assert set(documents(source.changes(end="now"))) == {b"after"}


@pytest.mark.parametrize("dialect", UPR)
def test_a_flush_while_nobody_reads_is_a_rollback(
    node: RunningNode, connect: Callable[..., Any], dialect: str, tmp_path: Path
) -> None:
    write(node)
    source = connect(node.url, dialect=dialect, state=tmp_path / "state.json")
    application = Application().take(source.changes(end="now"))
    node.flush()
    application.take(source.changes(end="now"))
    assert {(rollback.vbucket, rollback.seqno) for rollback in application.rollbacks} == {
        (n, 0) for n in range(VBUCKETS)
    }
    assert application.state() == {}


@pytest.mark.parametrize("dialect", UPR)
def test_changes_after_a_flush_are_not_taken_for_those_of_a_later_branch(
    node: RunningNode, connect: Callable[..., Any], dialect: str
) -> None:
    """A flush does not say which branch it began: by the time the reader asks, there may be another."""
    state = MemoryState()
    for number in range(3):
        node.set(b"before-%d" % number, number, vbucket=0)
    source = connect(node.url, dialect=dialect, state=state)
    changes = source.changes()
    application = Application().take(until(changes, is_mutation_of(b"before-2")))
    node.flush()
    for number in range(8):
        node.set(b"flushed-%d" % number, number, vbucket=0)
    node.rewind(0, 0)
    for number in range(4):
        node.set(b"now-%d" % number, number, vbucket=0)
    application.take(until(changes, lambda event: getattr(event, "key", b"") in (b"flushed-7", b"now-3")))
    changes.close()
    source.save()
    application.documents[0] = dict(application.whole[0].get(state.load()[0].position.seqno, {}))
    application.last[0] = state.load()[0].position.seqno
    application.take(connect(node.url, dialect=dialect, state=state).changes(end="now"))
    assert set(application.state()[0]) == {b"now-%d" % number for number in range(4)}


def test_an_open_batch_reading_hears_of_a_flush(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node, 1)
    source = connect(node.url, dialect="upr-b")
    batches = source.batches()
    assert next(batches)["op"].to_pylist() == ["mutation"]
    node.flush()
    assert next(batches)["op"].to_pylist() == ["flush"]


# TAP remembers by name


def test_tap_goes_on_where_the_application_was(node: RunningNode, connect: Callable[..., Any]) -> None:
    write(node, 30)
    settings = TapSettings(name="reader", registered=True)
    source = connect(node.url, dialect="tap", tap_settings=settings)
    changes = source.changes()
    seen = {event.key for event in itertools.islice((c for c in changes if isinstance(c, Mutation)), 30)}
    assert seen == set(KEYS[:30])
    node.set(b"one more", 1)
    assert next(event for event in changes if isinstance(event, Mutation)).key == b"one more"
    node.set(b"seen", 1)
    next(event for event in changes if isinstance(event, Mutation))
    with KvClient(node.url) as client:  # everything but the last is done with, and the node knows
        deadline = time.monotonic() + 60
        while client.stats("tap")["eq_tapq:reader:unacked"] != "1":
            assert time.monotonic() < deadline
            source.idle(0.01)
    changes.close()
    source.close()
    node.restart()
    for key in KEYS[30:]:
        node.set(key, 2)
    source = connect(node.url, dialect="tap", tap_settings=settings)
    changes = source.changes()
    more = {event.key for event in until(changes, is_mutation_of(KEYS[-1])) if isinstance(event, Mutation)}
    assert set(KEYS[30:]) & more and not more & {*KEYS[:30], b"one more"}
    changes.close()
    source.deregister()
    source.close()
    source = connect(node.url, dialect="tap", tap_settings=settings)
    assert set(documents(source.changes(end="now"))) == {*KEYS, b"one more", b"seen"}


def test_tap_begins_again_where_the_node_has_forgotten(
    node: RunningNode, connect: Callable[..., Any]
) -> None:
    write(node, 30)
    source = connect(node.url, dialect="tap")
    changes = source.changes()
    events: list[object] = list(
        itertools.islice((event for event in changes if isinstance(event, Mutation)), 30)
    )
    node.delete(KEYS[3])
    node.restart()
    node.set(KEYS[40], 1)
    events += until(changes, is_mutation_of(KEYS[40]))
    flushed = {event.vbucket for event in events if isinstance(event, Flush)}
    assert node.vbucket_of(KEYS[40]) in flushed
    # the rest of what comes again
    node.set(b"end", 1)
    while set(documents(events)) != {*KEYS[:3], *KEYS[4:30], KEYS[40], b"end"}:
        events.append(next(changes))


def test_a_tap_dump_that_breaks_off_is_made_again(connect: Callable[..., Any]) -> None:
    with tailrace.testing.node(vbuckets=VBUCKETS) as node:
        write(node)
        source = connect(node.url, dialect="tap")
        changes = source.changes(end="now")
        events = list(itertools.islice(changes, 5))
        node.drop_connections()
        events += changes
        assert set(documents(events)) == set(KEYS)
        assert not any(isinstance(event, Rollback) for event in events)


def test_tap_without_acks_without_values_and_since_a_date(
    node: RunningNode, connect: Callable[..., Any]
) -> None:
    write(node)
    source = connect(node.url, dialect="tap", tap_settings=TapSettings(acks=False), no_value=True)
    events = list(source.changes(end="now"))
    assert {event.key for event in events if isinstance(event, Mutation)} == set(KEYS)
    assert {event.value for event in events if isinstance(event, Mutation)} == {b""}
    assert {event.source for event in events if isinstance(event, Snapshot)} == {"disk"}
    future = connect(node.url, dialect="tap", tap_settings=TapSettings(backfill_date=1 << 62))
    assert documents(future.changes(end="now")) == {}


def test_a_name_that_is_too_long_is_refused(node: RunningNode, connect: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="200 bytes"):
        TapSettings(name="x" * 201)


# what a dialect can't do


@pytest.mark.parametrize("dialect", OLD)
def test_a_silent_server_is_asked_for_a_sign_of_life(
    node: RunningNode, connect: Callable[..., Any], dialect: str
) -> None:
    write(node, 1)
    source = connect(node.url, dialect=dialect, noop_interval_s=1)
    changes = source.changes()
    next(event for event in changes if isinstance(event, Mutation))
    before = source.stats()["received_bytes"]
    deadline = time.monotonic() + 60
    while source.stats()["received_bytes"] < before + 48:  # until it was asked twice, and has answered
        assert time.monotonic() < deadline
        source.idle(0.05)
    assert source.stats()["lost_connections"] == 0


def test_what_a_dialect_has_not(node: RunningNode, connect: Callable[..., Any]) -> None:
    for options in (
        {"dialect": "upr-a", "no_value": True},
        {"dialect": "upr-a", "include_xattrs": True},
        {"dialect": "upr-b", "scope": "shop"},
        {"dialect": "upr-b", "persisted_only": True},
        {"dialect": "tap", "state": "file.json"},
        {"dialect": "tap", "priority": "high"},
        {"dialect": "dcp", "tap_settings": TapSettings(name="x")},
    ):
        with pytest.raises(UsageError, match=f"{options['dialect']} has no "):
            connect(node.url, **options)
    source = connect(node.url, dialect="tap")
    for start, end in (({0: Position.BEGINNING}, "now"), ("now", {0: 5})):
        with pytest.raises(UsageError, match="tap has no seqnos"):
            next(source.changes(start, end))
    changes = source.changes()
    node.set(b"k", 1)
    next(changes)
    with pytest.raises(UsageError, match="paused"):
        source.pause([0])
    with pytest.raises(UsageError, match="remember"):
        connect(node.url, dialect="upr-a").deregister()


def tail(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> list[dict[str, Any]]:
    code = main(["tail", *map(str, arguments)])
    out, err = capfdbinary.readouterr()
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("dialect", OLD)
def test_the_command_in_each_dialect(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], dialect: str
) -> None:
    write(node, 9)
    lines = tail(capfdbinary, node.url, "--dialect", dialect, "--to", "now", "--json")
    assert {line["key"]: line["value"] for line in lines if line["op"] == "mutation"} == {
        key.decode(): {"value": 0} for key in KEYS[:9]
    }
    assert sum(line["op"] == "end" for line in lines) == VBUCKETS
    nothing = tail(capfdbinary, node.url, "--dialect", dialect, "--from", "now", "--to", "now", "--json")
    assert {line["op"] for line in nothing} == {"end"}


@pytest.mark.parametrize("dialect", ["dcp", *OLD])
def test_the_command_looks_on(node: RunningNode, dialect: str) -> None:
    """`tail --from now` as a program of its own, until it is ended: what is there already is not shown."""
    write(node, 9)
    command = [sys.executable, "-m", "tailrace", "tail", node.url, "--from", "now", "--dialect", dialect]
    with (
        subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as tailing,
        writing(node, b"live"),
    ):
        told = [json.loads(tailing.stdout.readline()) for _ in range(3)]
        tailing.terminate()
        tailing.stdout.read()
    assert {line["key"] for line in told if line["op"] == "mutation"} == {"live"}


def test_the_command_with_a_tap_name(node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write(node, 9)
    arguments = (node.url, "--dialect", "tap", "--tap-name", "me", "--to", "now", "--json")
    assert sum(line["op"] == "mutation" for line in tail(capfdbinary, *arguments, "--tap-forget")) == 9


@pytest.mark.parametrize("dialect", OLD)
def test_a_server_that_is_not_read_is_not_called_silent(
    node: RunningNode, connect: Callable[..., Any], dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no window: while the application has enough, the server's answers to us lie unread."""
    monkeypatch.setattr("tailrace.protocol.dcp.reader.SLACK_BYTES", 0)
    node.set_many({f"key-{number}": bytes(64 << 10) for number in range(200)})
    source = connect(node.url, dialect=dialect, flow_control_buffer=1 << 20, noop_interval_s=0.1)
    limit = {"s": 600.0}
    for module in ("reader", "translating_reader"):
        monkeypatch.setattr(f"tailrace.protocol.dcp.{module}.silence_limit_s", lambda *_: limit["s"])
    seen = 0
    for event in source.changes(end="now"):
        if isinstance(event, Mutation):
            seen += 1
            if seen == 1:
                limit["s"] = 0.2
                time.sleep(1.0)  # it computes
                limit["s"] = 600.0
    assert seen == 200, "nothing came twice"
    assert dialect == "tap" or source.stats()["lost_connections"] == 0  # that of TAP ends with the dump
