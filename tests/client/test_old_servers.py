"""Our reader against servers that speak the older dialects with every message and form in the documents, even
those that our own node never sends: what the errata say to accept is accepted.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tailrace
import tailrace.testing
from client.conftest import AsyncAsSync, Blocking
from client.fake_server import UUID, FakeServer
from tailrace import Deletion, Expiration, Flush, Mutation, Rollback, StreamEnd, TapSettings
from tailrace.client.connection import Connection
from tailrace.client.replicate import Replicator
from tailrace.errors import TailraceError
from tailrace.wire.codes import Feature, Status
from tailrace.wire.dcp import DcpFailoverLogResponse
from tailrace.wire.fields import encode_failover_log
from tailrace.wire.header import Frame
from tailrace.wire.tap import (
    TapCheckpointEnd,
    TapCheckpointStart,
    TapConnect,
    TapDelete,
    TapFlush,
    TapMutation,
    TapNoop,
    TapOpaqueMessage,
    TapVBucketSet,
)
from tailrace.wire.upr import (
    UprADeletion,
    UprAExpiration,
    UprAFailoverLog,
    UprAFlush,
    UprAMutation,
    UprANotMyVBucket,
    UprAOk,
    UprARollback,
    UprASnapshotEnd,
    UprASnapshotStart,
    UprAStreamBegin,
    UprAStreamEndOk,
    UprAStreamEndStateChanged,
    UprBDeletion,
    UprBExpiration,
    UprBFlush,
    UprBMutation,
    UprBSetVBucketState,
    UprBSnapshotEnd,
    UprBSnapshotStart,
    UprBStreamEndMessage,
    UprBStreamRequestResponse,
    UprBStreamStart,
)

ACK = 1
REV = struct.pack(">Q", 7)


def old_server(answers: dict[int, Any]) -> FakeServer:
    """A server from before collections; it does not know what a DCP stream is."""
    server = FakeServer(lambda *_: None)
    server.features = (Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON)
    server.answers.update(answers)
    return server


def taken(source: Any, count: int, **options: Any) -> list[Any]:
    """What comes from a source, or comes next, up to so many changes, flushes or ends."""
    told = (Mutation, Deletion, Expiration, Flush, Rollback, StreamEnd)
    changes = source.changes(**options) if hasattr(source, "changes") else source
    return list(itertools.islice((event for event in changes if isinstance(event, told)), count))


# TAP


def numbered(messages: list[Any]) -> bytes:
    """TAP messages one after the other, with their numbers."""
    return b"".join(
        (message if isinstance(message, bytes) else _with_opaque(message, number).encode())
        for number, message in enumerate(messages, 1)
    )


def _with_opaque(message: Any, number: int) -> Any:
    if not isinstance(message, TapNoop):
        message.opaque = number
    return message


def acked(server: FakeServer) -> dict[int, int]:
    """The numbers that were acknowledged, with the status."""
    return {frame.opaque: frame.status for frame in server.requests if frame.magic == 0x81}


def until_acked(server: FakeServer, source: AsyncAsSync | Blocking, wanted: dict[int, int]) -> None:
    deadline = time.monotonic() + 60
    while acked(server) != wanted:
        assert time.monotonic() < deadline, acked(server)
        source.idle(0.05)


CONVERSATION = [
    TapOpaqueMessage(code=0, tap_flags=ACK),
    TapOpaqueMessage(code=2, tap_flags=ACK),
    TapOpaqueMessage(code=1, tap_flags=ACK),
    TapMutation(key=b"no meta", value=b"1", cas=5, tap_flags=4),
    TapMutation(key=b"rev", value=b"2", cas=6, private=REV, item_flags=9, item_expiry=2_000_000_000),
    TapMutation(key=b"rev and nru", value=b"3", cas=7, private=REV + b"\x02"),
    TapMutation(key=b"longer", value=b"4", cas=8, private=REV + bytes(5)),
    TapDelete(key=b"gone", cas=9, private=REV),
    TapDelete(key=b"gone too"),
    TapCheckpointStart.server_form(3, private=bytes(8), tap_flags=ACK),
    TapCheckpointEnd.server_form(3, tap_flags=ACK),
    TapCheckpointStart(checkpoint_id=4, tap_flags=ACK),
    TapCheckpointEnd(checkpoint_id=4, tap_flags=ACK),
    TapVBucketSet(state=3, tap_flags=ACK),
    *(TapOpaqueMessage(code=code, tap_flags=ACK) for code in (3, 4, 5, 6, 7, 0xFFFF_FFFF)),
    # a control code of another length is ignored
    bytes.fromhex("8044000008000000000000090000001500000000000000000001000100ff00000000"[:66]),
    TapNoop(),
    TapOpaqueMessage(code=8, tap_flags=ACK),
    TapFlush(tap_flags=ACK),
    TapMutation(key=b"after", value=b"5", cas=10, private=REV, tap_flags=ACK),
]


@pytest.mark.covers("tap.connect", "tap.mutation", "tap.delete", "tap.flush", "tap.noop", "tap.vbucket-set")
@pytest.mark.covers("tap.opaque.0", "tap.opaque.1", "tap.opaque.2", "tap.opaque.3", "tap.opaque.4")
@pytest.mark.covers("tap.opaque.5", "tap.opaque.6", "tap.opaque.7", "tap.opaque.8", "tap.flag.0x01")
@pytest.mark.covers("tap.checkpoint-start", "tap.checkpoint-end", "tap.ack", "tap.connect.flag.0x10")
@pytest.mark.covers("tap.connect.flag.0x04", "tap.connect.flag.0x100", "tap.flag.0x04")
def test_tap_with_everything_that_it_knows(connect: Callable[..., Any]) -> None:
    with old_server({0x40: numbered(CONVERSATION)}) as server:
        source = connect(server.url, dialect="tap")
        changes = source.changes()
        events = taken(changes, 8)
        by_key = {event.key: event for event in events if isinstance(event, Mutation | Deletion)}
        assert [event.key for event in events if isinstance(event, Deletion)] == [b"gone", b"gone too"]
        assert [by_key[key].rev for key in (b"no meta", b"rev", b"rev and nru", b"longer")] == [0, 7, 7, 7]
        assert (by_key[b"rev"].flags, by_key[b"rev"].expiry, by_key[b"rev"].cas) == (9, 2_000_000_000, 6)
        assert isinstance(events[6], Flush) and events[7].key == b"after"
        # what came in one go with the last one is acknowledged when the application comes back for more
        assert len(CONVERSATION) not in acked(server)
        server.connections[-1].send(TapMutation(key=b"end", value=b"6", cas=11, opaque=99).encode())
        assert [event.key for event in taken(changes, 1)] == [b"end"]
        wanted = {
            number for number, message in enumerate(CONVERSATION, 1) if getattr(message, "tap_flags", 0) & ACK
        }
        until_acked(server, source, dict.fromkeys(wanted, 0))
        connects = [frame for frame in server.requests if frame.opcode == 0x40]
        assert len(connects) == 1
        request = TapConnect.decode(connects[0])
        assert request.flags == 0x114 and request.options().vbuckets == [0]


@pytest.mark.covers(
    "tap.connect.flag.0x01", "tap.connect.flag.0x20", "tap.connect.flag.0x80", "tap.flag.0x02"
)
@pytest.mark.covers("tap.deregister")
def test_tap_with_every_wish_of_the_reader(connect: Callable[..., Any]) -> None:
    pushed = numbered(
        [
            TapOpaqueMessage(code=1),
            TapMutation(key=b"k", cas=1, private=REV, tap_flags=2, datatype=1),
            TapMutation(key=b"l", value=b"sent all the same", cas=1, private=REV),
        ]
    )
    with old_server({0x40: pushed}) as server:
        settings = TapSettings(name="me", registered=True, acks=False, backfill_date=5)
        source = connect(server.url, dialect="tap", tap_settings=settings, no_value=True)
        first, second = taken(source, 2)
        assert (first.value, first.datatype, second.value) == (b"", 0, b"sent all the same")
        source.deregister()
        source.close()
        request = TapConnect.decode(next(frame for frame in server.requests if frame.opcode == 0x40))
        assert (request.key, request.flags, request.options().backfill_date) == (b"me", 0x1A5, 5)
        assert [frame.key for frame in server.requests if frame.opcode == 0x9E] == [b"me"]


@pytest.mark.covers("tap.connect.flag.0x02")
def test_a_tap_dump_ends_when_the_server_closes(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not announce the backfill's end, and closes before what it sent is processed."""
    pushed = numbered([TapMutation(key=b"k", value=b"1", cas=1)])
    is_pushed: list[Frame] = []

    def dump(server: FakeServer, frame: Frame) -> None:
        is_pushed.append(frame)
        connection = server.connections[-1]
        connection.send(pushed)
        connection.close()

    watch = Connection._watch
    monkeypatch.setattr(Connection, "_watch", lambda self: watch(self) if not is_pushed else None)
    with old_server({0x40: dump}) as server:
        events = taken(connect(server.url, dialect="tap"), 9, end="now")
        assert [type(event).__name__ for event in events] == ["Mutation", "StreamEnd"]
        request = TapConnect.decode(next(frame for frame in server.requests if frame.opcode == 0x40))
        assert request.flags is not None and request.flags & 0x02


@pytest.mark.covers("tap.ttl")
def test_a_tap_message_whose_ttl_is_used_up_is_refused(connect: Callable[..., Any]) -> None:
    pushed = numbered(
        [
            TapMutation(key=b"old", value=b"1", cas=1, private=REV, ttl=0),
            TapMutation(key=b"new", value=b"1", cas=1, private=REV, ttl=1),
            TapMutation(key=b"more", value=b"1", cas=1, private=REV),
        ]
    )
    with old_server({0x40: pushed}) as server:
        source = connect(server.url, dialect="tap")
        assert [event.key for event in taken(source, 2)] == [b"new", b"more"]
        until_acked(server, source, {1: Status.EINVAL})


@pytest.mark.parametrize("answer", [0x81, 0x83])
def test_a_server_without_tap(connect: Callable[..., Any], answer: int) -> None:
    refusal = Frame(0x81, 0x40, vbucket=answer).encode()
    with old_server({0x40: refusal}) as server, pytest.raises(TailraceError):
        taken(connect(server.url, dialect="tap", retry_for_s=0), 1)


def test_replication_from_a_server_without_revisions() -> None:
    """The newest is what comes last; a delete may not even have a CAS."""
    pushed = numbered(
        [
            TapOpaqueMessage(code=1),
            TapMutation(key=b"k", value=b"1", cas=9),
            TapMutation(key=b"k", value=b"2", cas=3),
            TapMutation(key=b"gone", value=b"1", cas=4),
            TapDelete(key=b"gone"),
            TapOpaqueMessage(code=8),
        ]
    )
    with old_server({0x40: pushed}) as server, tailrace.testing.node(vbuckets=1) as target:
        for _ in range(2):
            with Replicator(server.url, target.url, dialect="tap") as replicator:
                assert sum(replicator.run(end="now")) == 4
            assert (target.get("k"), target.get("gone")) == (2, None)


# UPR


CLOSES = object()


def said(server: FakeServer, messages: list[Any]) -> bytes | None:
    """Messages as bytes; if the last one is `CLOSES`, the connection is closed."""
    data = b"".join(
        message if isinstance(message, bytes) else message.encode()
        for message in messages
        if message is not CLOSES
    )
    if messages[-1] is not CLOSES:
        return data
    server.connections[-1].send(data)
    server.connections[-1].close()
    return None


def draft_a(stream: Callable[..., Any], *, log_type: int = 2, branches: Any = ((UUID, 0),)) -> FakeServer:
    """A server of draft A: requests for logs are answered, those for streams as ``stream`` says."""
    log = encode_failover_log(branches)

    def answer(server: FakeServer, frame: Frame) -> bytes | None:
        if frame.datatype == 2:
            return replace(frame, magic=0x81, opcode=2, datatype=log_type, body=log).encode()
        common: dict[str, Any] = {"opaque": frame.opaque, "vbucket": frame.vbucket}
        return said(server, stream(frame, common))

    return old_server({0x01: answer})


def draft_b(stream: Callable[..., Any]) -> FakeServer:
    """The same for draft B."""
    log = encode_failover_log([(UUID, 0)])

    def answer(server: FakeServer, frame: Frame) -> bytes | None:
        common: dict[str, Any] = {"opaque": frame.opaque, "vbucket": frame.vbucket}
        return said(server, stream(frame, common))

    def logs(server: FakeServer, frame: Frame) -> bytes:
        return DcpFailoverLogResponse(opcode=0x51, opaque=frame.opaque, value=log).encode()

    return old_server({0x50: answer, 0x51: logs})


def start_of(frame: Frame, *, draft: str) -> int:
    """The start seqno of a stream request; it has a group id."""
    assert frame.key.startswith(b"tailrace:")
    return int.from_bytes(frame.extras[:8] if draft == "a" else frame.extras[8:16], "big")


def skipped(message: Any) -> bytes:
    """The same with 8 bytes more of extras, as the document's own examples announce."""
    frame = Frame.parse(message.encode())
    extras, rest = frame.body[: frame.extras_length], frame.body[frame.extras_length :]
    return Frame(
        frame.magic,
        frame.opcode,
        frame.key_length,
        frame.extras_length + 8,
        frame.datatype,
        frame.vbucket,
        opaque=frame.opaque,
        cas=frame.cas,
        body=extras + bytes(8) + rest,
    ).encode()


@pytest.mark.covers("upr-a.stream-request", "upr-a.failover-log-request", "upr-a.response.ok", "upr-a.flush")
@pytest.mark.covers("upr-a.response.failover-log", "upr-a.response.rollback", "upr-a.stream-begin")
@pytest.mark.covers("upr-a.snapshot-start", "upr-a.snapshot-end", "upr-a.mutation", "upr-a.deletion")
@pytest.mark.covers("upr-a.expiration", "upr-a.stream-end.ok", "upr-a.stream-end.state-changed")
@pytest.mark.covers("upr-a.response.not-my-vbucket")
def test_draft_a_with_everything_that_it_knows(connect: Callable[..., Any]) -> None:
    asked = []

    def stream(frame: Frame, common: dict[str, Any]) -> list[Any]:
        asked.append(start_of(frame, draft="a"))
        if len(asked) == 1:
            return [UprARollback(value=bytes(8), **common)]
        if len(asked) == 2:
            return [UprANotMyVBucket(**common)]
        if len(asked) == 3:
            return [UprAOk(**common), UprAStreamBegin(**common), UprAStreamEndStateChanged(**common)]
        if len(asked) == 5:  # the stream that ended is asked for again: there is no end to this reading
            more = UprAMutation(by_seqno=2, rev_seqno=1, key=b"n", value=b"1", cas=8, **common)
            return [UprAOk(**common), UprASnapshotStart(**common), more, UprASnapshotEnd(**common)]
        return [
            UprAOk(**common),
            UprAStreamBegin(**common),
            UprASnapshotStart(**common),
            UprAMutation(by_seqno=1, rev_seqno=4, key=b"k", value=b'{"a":1}', cas=8, flags=3, **common),
            skipped(UprAMutation(by_seqno=2, rev_seqno=4, key=b"l", value=b"\xff", cas=8, **common)),
            UprADeletion(by_seqno=3, rev_seqno=5, key=b"k", cas=9, **common),
            skipped(UprAExpiration(by_seqno=4, rev_seqno=5, key=b"l", cas=9, **common)),
            UprASnapshotEnd(**common),
            UprAFlush(**common),
            UprASnapshotStart(**common),
            UprAMutation(by_seqno=1, rev_seqno=1, key=b"m", value=b"1", cas=8, **common),
            UprASnapshotEnd(**common),
            UprAStreamEndOk(**common),
        ]

    with draft_a(stream) as server:
        start = {0: tailrace.Position.at(UUID + 1, 5)}
        events = taken(connect(server.url, dialect="upr-a", retry_for_s=60), 8, start=start)
        kinds = "Rollback Mutation Mutation Deletion Expiration Flush Mutation Mutation"
        assert [type(event).__name__ for event in events] == kinds.split()
        assert asked == [5, 0, 0, 0, 1]
        json, raw = events[1:3]
        assert (json.rev, json.cas, json.flags, json.is_json, json.value) == (4, 8, 3, True, b'{"a":1}')
        assert (raw.key, raw.value, raw.is_json) == (b"l", b"\xff", False)
        assert [event.seqno for event in events[1:5]] == [1, 2, 3, 4] and events[6].seqno == 1


@pytest.mark.covers("upr-b.stream-request", "upr-b.failover-log-request", "upr-b.failover-log-response")
@pytest.mark.covers("upr-b.stream-request-response.ok", "upr-b.stream-request-response.rollback")
@pytest.mark.covers("upr-b.stream-start", "upr-b.snapshot-start", "upr-b.snapshot-end", "upr-b.mutation")
@pytest.mark.covers("upr-b.deletion", "upr-b.expiration", "upr-b.flush", "upr-b.set-vbucket-state")
@pytest.mark.covers("upr-b.stream-request-response.unknown-uuid")
@pytest.mark.covers("upr-b.stream-end.ok", "upr-b.stream-end.state-changed", "upr-b.not-my-vbucket")
@pytest.mark.parametrize("rollback", ["value", "extras", "unknown uuid"])
def test_draft_b_with_everything_that_it_knows(connect: Callable[..., Any], rollback: str) -> None:
    asked = []

    def refused(frame: Frame, status: int, **more: Any) -> bytes:
        return Frame(0x81, 0x50, vbucket=status, opaque=frame.opaque, **more).encode()

    def stream(frame: Frame, common: dict[str, Any]) -> list[Any]:
        asked.append(start_of(frame, draft="b"))
        if len(asked) == 1:
            if rollback == "unknown uuid":
                return [refused(frame, Status.KEY_ENOENT)]
            return [refused(frame, Status.ROLLBACK, body=bytes(8), extras_length=8 * (rollback == "extras"))]
        if len(asked) == 2:
            return [refused(frame, Status.NOT_MY_VBUCKET)]
        accepted = UprBStreamRequestResponse(opcode=0x50, opaque=frame.opaque)
        if len(asked) == 3:
            return [accepted, UprBStreamStart(**common), UprBStreamEndMessage(flag=1, **common)]
        if len(asked) == 5:
            more = UprBMutation(by_seqno=2, rev_seqno=1, key=b"n", value=b"1", cas=8, **common)
            return [accepted, UprBSnapshotStart(**common), more, UprBSnapshotEnd(**common)]
        return [
            accepted,
            UprBStreamStart(**common),
            UprBSnapshotStart(**common),
            UprBMutation(by_seqno=1, rev_seqno=4, key=b"k", value=b"1", cas=8, flags=3, datatype=1, **common),
            UprBDeletion(by_seqno=2, rev_seqno=5, key=b"k", cas=9, **common),
            UprBExpiration(by_seqno=3, rev_seqno=5, key=b"l", cas=9, **common),
            UprBSnapshotEnd(**common),
            *(UprBSetVBucketState(state=state, **common) for state in (2, 1, 3, 4)),
            UprBFlush(**common),
            UprBSnapshotStart(**common),
            UprBMutation(by_seqno=1, rev_seqno=1, key=b"m", value=b"1", cas=8, **common),
            UprBSnapshotEnd(**common),
            UprBStreamEndMessage(flag=0, **common),
        ]

    with draft_b(stream) as server:
        start = {0: tailrace.Position.at(UUID + 1, 5)}
        events = taken(connect(server.url, dialect="upr-b", retry_for_s=60), 7, start=start)
        kinds = "Rollback Mutation Deletion Expiration Flush Mutation Mutation"
        assert [type(event).__name__ for event in events] == kinds.split()
        assert asked == [5, 0, 0, 0, 1]
        assert (events[1].rev, events[1].cas, events[1].flags, events[1].is_json) == (4, 8, 3, True)


@pytest.mark.parametrize("branch", [UUID, 0], ids=["a branch", "no branch"])
def test_draft_a_in_the_forms_that_are_only_accepted(connect: Callable[..., Any], branch: int) -> None:
    """A rollback with its seqno in the extras (A4), a log in an answer of type 1 (A7), also without a branch
    (A8).
    """
    asked = []

    def stream(frame: Frame, common: dict[str, Any]) -> list[Any]:
        asked.append(start_of(frame, draft="a"))
        if len(asked) == 1:
            rollback = bytearray(UprARollback(value=bytes(8), **common).encode())
            rollback[4] = 8
            return [bytes(rollback)]
        mutation = UprAMutation(by_seqno=1, rev_seqno=1, key=b"k", value=b"1", cas=8, **common)
        return [UprAOk(**common), UprASnapshotStart(**common), mutation, UprASnapshotEnd(**common)]

    with draft_a(stream, log_type=1, branches=[(branch, 0)] if branch else []) as server:
        start = {0: tailrace.Position.at(UUID + 1, 5)}
        events = taken(connect(server.url, dialect="upr-a", retry_for_s=2), 2, start=start)
        assert [type(event).__name__ for event in events] == ["Rollback", "Mutation"]
        assert asked == [5, 0] and events[1].vb_uuid == branch


@pytest.mark.parametrize("draft", ["a", "b"])
def test_a_snapshot_without_its_end_is_not_consistent(connect: Callable[..., Any], draft: str) -> None:
    """The line breaks inside a snapshot: the reader asks from the last whole one."""
    asked = []

    def stream(frame: Frame, common: dict[str, Any]) -> list[Any]:
        asked.append(start_of(frame, draft=draft))
        first = asked[-1] + 1
        is_a = draft == "a"
        mutation, start, end = (
            (UprAMutation, UprASnapshotStart, UprASnapshotEnd)
            if is_a
            else (UprBMutation, UprBSnapshotStart, UprBSnapshotEnd)
        )
        ok = UprAOk(**common) if is_a else UprBStreamRequestResponse(opcode=0x50, opaque=frame.opaque)
        whole = [
            ok,
            start(**common),
            mutation(by_seqno=first, rev_seqno=1, key=b"k%d" % first, value=b"1", cas=1, **common),
            end(**common),
            start(**common),
            mutation(by_seqno=first + 1, rev_seqno=1, key=b"part", value=b"1", cas=1, **common),
        ]
        return [*whole, CLOSES if len(asked) < 3 else end(**common)]

    with (draft_a if draft == "a" else draft_b)(stream) as server:
        events = taken(connect(server.url, dialect=f"upr-{draft}", retry_for_s=60), 4)
        assert [event.key for event in events] == [b"k1", b"k2", b"k3", b"part"]
        assert asked == [0, 1, 2]


# nonsense


def whole_streams() -> dict[str, Any]:
    """A sound conversation of each dialect, in one piece for one stream request."""

    def upr_a(opaque: int) -> list[Any]:
        common: dict[str, Any] = {"opaque": opaque, "vbucket": 0}
        return [
            UprAOk(**common),
            UprAStreamBegin(**common),
            UprASnapshotStart(**common),
            UprAMutation(by_seqno=1, rev_seqno=4, key=b"k", value=b'{"a":1}', cas=8, flags=3, **common),
            UprADeletion(by_seqno=2, rev_seqno=5, key=b"k", cas=9, **common),
            UprASnapshotEnd(**common),
            UprAFlush(**common),
            UprAStreamEndOk(**common),
        ]

    def upr_b(opaque: int) -> list[Any]:
        common: dict[str, Any] = {"opaque": opaque, "vbucket": 0}
        return [
            UprBStreamRequestResponse(opcode=0x50, opaque=opaque),
            UprBStreamStart(**common),
            UprBSnapshotStart(**common),
            UprBMutation(by_seqno=1, rev_seqno=4, key=b"k", value=b"1", cas=8, datatype=1, **common),
            UprBExpiration(by_seqno=2, rev_seqno=5, key=b"k", cas=9, **common),
            UprBSnapshotEnd(**common),
            UprBSetVBucketState(state=2, **common),
            UprBStreamEndMessage(flag=1, **common),
        ]

    return {"upr-a": upr_a, "upr-b": upr_b, "tap": lambda opaque: CONVERSATION}


@pytest.mark.parametrize("dialect", ["upr-a", "upr-b", "tap"])
@settings(max_examples=25)
@given(data=st.data())
def test_whatever_an_old_server_says_is_an_event_or_a_typed_error(dialect: str, data: st.DataObject) -> None:
    damage = data.draw(
        st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=4), "damage"
    )
    cut = data.draw(st.integers(0, 600) | st.none(), "cut")
    asked = []

    def answer(server: FakeServer, frame: Frame) -> bytes | None:
        if frame.opcode != 0x40 and frame.datatype == 2:
            log = encode_failover_log([(UUID, 0)])
            return UprAFailoverLog(value=log, opaque=frame.opaque, vbucket=0).encode()
        asked.append(frame)
        messages = whole_streams()[dialect](frame.opaque)
        text = bytearray(numbered(messages) if dialect == "tap" else said(server, messages) or b"")
        for at, byte in damage:
            text[at % len(text)] = byte
        return said(server, [bytes(text[:cut]), CLOSES])

    def log(server: FakeServer, frame: Frame) -> bytes:
        value = encode_failover_log([(UUID, 0)])
        return DcpFailoverLogResponse(opcode=0x51, opaque=frame.opaque, value=value).encode()

    with (
        old_server({0x40: answer, 0x01: answer, 0x50: answer, 0x51: log}) as server,
        tailrace.connect_sync(server.url, dialect=dialect, retry_for_s=0) as source,
    ):
        with pytest.raises(TailraceError) as caught:
            for _ in itertools.islice(source.changes(), 1_000):
                pass
        assert str(caught.value)
    assert asked
