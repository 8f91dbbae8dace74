"""Servers that break the rules: a typed error, nothing delivered, nothing hung. And servers that move."""

from __future__ import annotations

import asyncio
import base64
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tailrace
from client.fake_server import UUID, FakeServer, accepted, marker, mutation, noop
from client.fake_server import Connection as FakeConnection
from tailrace import Mutation, Snapshot, StreamEnd
from tailrace.client.connection import Connection
from tailrace.client.kv import KvClient
from tailrace.client.state_store import MemoryState
from tailrace.errors import (
    ConnectError,
    FramingError,
    LoginError,
    RemoteProtocolError,
    StatusError,
    TailraceError,
)
from tailrace.model import MAX_SEQNO
from tailrace.protocol.dcp.reader import DcpReader
from tailrace.wire.admin import ClustermapChangeNotification, HelloResponse, SaslResponse
from tailrace.wire.codes import DcpOpcode, Feature, Magic, Op, Status
from tailrace.wire.dcp import (
    DcpNoop,
    DcpSeqnoAdvanced,
    DcpStreamEnd,
    DcpStreamRequest,
    DcpStreamRequestResponse,
)
from tailrace.wire.header import Frame
from tailrace.wire.message import Response


def raw(
    request: DcpStreamRequest,
    opcode: int,
    *,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    **fields: Any,
) -> bytes:
    fields = {"opaque": request.opaque, "vbucket": request.vbucket} | fields
    return Frame(Magic.REQUEST, opcode, len(key), len(extras), body=extras + key + value, **fields).encode()


def answer(request: DcpStreamRequest, status: int, value: bytes = b"") -> bytes:
    return Frame(
        Magic.RESPONSE, DcpOpcode.STREAM_REQUEST, vbucket=status, opaque=request.opaque, body=value
    ).encode()


HOSTILE = {
    "falling seqno": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 5), mutation(r, 4)],
    "repeated seqno": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 5), mutation(r, 5)],
    "seqno 0": lambda r: [accepted(r), marker(r, 0, 9), raw(r, 0x57, extras=bytes(31), key=b"\0k")],
    "below its snapshot": lambda r: [accepted(r), marker(r, 4, 9), mutation(r, 3)],
    "above its snapshot": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 10)],
    "no marker": lambda r: [accepted(r), mutation(r, 1)],
    "marker backwards": lambda r: [
        accepted(r),
        raw(r, 0x56, extras=struct.pack(">QQI", 9, 1, 1)),
        mutation(r, 5),
    ],
    "marker in the past": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 9), marker(r, 2, 8)],
    "data before the answer": lambda r: [marker(r, 1, 9), mutation(r, 5)],
    "two answers": lambda r: [accepted(r), accepted(r)],
    "data after the end": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        DcpStreamEnd(opaque=r.opaque, vbucket=r.vbucket).encode(),
        mutation(r, 5),
    ],
    "unknown opaque": lambda r: [accepted(r), marker(r, 1, 9, opaque=r.opaque + 1)],
    "change with unknown opaque": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        mutation(r, 5, opaque=r.opaque ^ 0xFF),
    ],
    "another vbucket": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 5, vbucket=r.vbucket + 1)],
    "marker of another vbucket": lambda r: [accepted(r), marker(r, 1, 9, vbucket=r.vbucket + 1)],
    "mutation extras": lambda r: [accepted(r), marker(r, 1, 9), raw(r, 0x57, extras=bytes(30), key=b"\0k")],
    "deletion extras": lambda r: [accepted(r), marker(r, 1, 9), raw(r, 0x58, extras=bytes(19), key=b"\0k")],
    "no key": lambda r: [accepted(r), marker(r, 1, 9), raw(r, 0x57, extras=struct.pack(">Q", 1) + bytes(23))],
    "only a collection id": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 1, key=b"\0")],
    "endless collection id": lambda r: [accepted(r), marker(r, 1, 9), mutation(r, 1, key=b"\xff" * 8)],
    "marker extras": lambda r: [accepted(r), raw(r, 0x56, extras=bytes(19))],
    "marker version": lambda r: [accepted(r), raw(r, 0x56, extras=b"\1", value=bytes(36))],
    "end extras": lambda r: [accepted(r), raw(r, 0x55)],
    "advance backwards": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        mutation(r, 5),
        DcpSeqnoAdvanced(by_seqno=4, opaque=r.opaque, vbucket=r.vbucket).encode(),
    ],
    "advance beyond": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        DcpSeqnoAdvanced(by_seqno=10, opaque=r.opaque, vbucket=r.vbucket).encode(),
    ],
    "event whose FlatBuffer is none": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        raw(r, 0x5F, extras=struct.pack(">QIB", 1, 0, 2), key=b"c", value=b"\xff" * 8),
    ],
    "oso that nobody asked for": lambda r: [accepted(r), raw(r, 0x65, extras=struct.pack(">I", 1))],
    "prepare that nobody asked for": lambda r: [accepted(r), raw(r, 0x60, extras=bytes(31), key=b"\0k")],
    "empty failover log": lambda r: [answer(r, 0)],
    "short failover log": lambda r: [answer(r, 0, bytes(15))],
    "endless failover log": lambda r: [answer(r, 0, bytes(16) * 2000)],
    "rollback of 7 bytes": lambda r: [answer(r, Status.ROLLBACK, bytes(7))],
    "rollback of 9 bytes": lambda r: [answer(r, Status.ROLLBACK, bytes(9))],
    "rollback without a seqno": lambda r: [answer(r, Status.ROLLBACK)],
    "rollback forwards": lambda r: [answer(r, Status.ROLLBACK, (5).to_bytes(8, "big"))],
    "rollback of the beginning": lambda r: [answer(r, Status.ROLLBACK, bytes(8))],
    "refusal for good": lambda r: [answer(r, Status.EINVAL)],
    "snappy that is none": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        mutation(r, 5, datatype=2, value=b"\xff\xff\xff\xff\x0fx"),
    ],
    "xattrs that are none": lambda r: [
        accepted(r),
        marker(r, 1, 9),
        mutation(r, 5, datatype=4, value=b"\xff\xff\xff\xff"),
    ],
    "a purge beyond all seqnos": lambda r: [
        accepted(r),
        raw(r, 0x56, extras=b"\2", value=struct.pack(">QQIQQQQ", 1, 9, 1, 9, 0, MAX_SEQNO + 1, 0)),
        mutation(r, 5),
    ],
    "a snapshot beyond all seqnos": lambda r: [accepted(r), marker(r, 1, MAX_SEQNO + 1), mutation(r, 5)],
    "no magic": lambda r: [accepted(r), b"\x42" * 24],
    "frame of 2 GiB": lambda r: [
        accepted(r),
        struct.pack(">BBHBBHIIQ", 0x80, 0x57, 1, 31, 0, 0, 1 << 31, 0, 0),
    ],
    "extras beyond the body": lambda r: [struct.pack(">BBHBBHIIQ", 0x80, 0x57, 9, 31, 0, 0, 12, r.opaque, 0)],
}


SOUND = {"falling seqno": 5, "repeated seqno": 5, "marker in the past": 9, "advance backwards": 5}
"""Changes that precede what breaks the rules: they are delivered unless they come in one go with it."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_that_breaks_the_rules(name: str, connect: Callable[..., Any]) -> None:
    with FakeServer(lambda connection, request: connection.send(*HOSTILE[name](request))) as server:
        server.high_seqnos = {0: 100}
        source = connect(server.url, retry_for_s=2)
        for method in ("changes", "batches"):
            delivered = []
            with pytest.raises((RemoteProtocolError, StatusError, FramingError)):
                for event in getattr(source, method)():
                    if method == "batches":
                        delivered += event["seqno"].to_pylist()
                    elif not isinstance(event, Snapshot | StreamEnd):
                        delivered.append(event.seqno)
            assert delivered in ([], [SOUND.get(name)])
            source.close()
            source = connect(server.url, retry_for_s=2)


@pytest.mark.parametrize("seqno", [MAX_SEQNO + 1, (1 << 64) - 1])
def test_a_server_that_is_further_than_anybody_can_be(seqno: int, connect: Callable[..., Any]) -> None:
    with FakeServer(lambda connection, request: None) as server:
        server.high_seqnos = {0: seqno}
        with pytest.raises(RemoteProtocolError, match="beyond all seqnos"):
            connect(server.url, retry_for_s=2).high_seqnos()
        with pytest.raises(RemoteProtocolError, match="beyond all seqnos"):
            list(connect(server.url, retry_for_s=2).changes(end="now"))
        with KvClient(server.url) as client, pytest.raises(RemoteProtocolError):
            client.high_seqnos()


CHEATS = {
    "its nonce does not extend ours": lambda n: b"r=" + n + b",s=c2FsdA==,i=4096",
    "one iteration": lambda n: b"r=" + n + b"x,s=c2FsdA==,i=1",
    "2^31 iterations": lambda n: b"r=" + n + b"x,s=c2FsdA==,i=2147483648",
    "bad signature": lambda n: b"r=" + n + b"x,s=c2FsdA==,i=4096",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_server_that_does_not_know_the_password(name: str, connect: Callable[..., Any]) -> None:
    def first(_server: FakeServer, frame: Frame) -> bytes:
        nonce = frame.value.split(b",r=")[1]
        return SaslResponse(
            opcode=Op.SASL_AUTH, status=Status.AUTH_CONTINUE, value=CHEATS[name](nonce), opaque=frame.opaque
        ).encode()

    def last(_server: Any, frame: Any) -> Any:
        value = b"v=" + base64.b64encode(bytes(64))
        return SaslResponse(opcode=Op.SASL_STEP, value=value, opaque=frame.opaque).encode()

    with FakeServer(lambda *_: None) as server:
        server.answers = {Op.SASL_AUTH: first, Op.SASL_STEP: last}
        with pytest.raises(LoginError):
            connect(server.url, username="ada", password="secret")
        assert not any(frame.opcode == Op.SELECT_BUCKET for frame in server.requests)


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"{",
        b"[]",
        b'{"vBucketServerMap":[]}',
        b'{"vBucketServerMap":{"vBucketMap":[[0]],"serverList":[]}}',
        b'{"vBucketServerMap":{"vBucketMap":[[1]],"serverList":["$HOST:1"]}}',
        b'{"vBucketServerMap":{"vBucketMap":[["0"]],"serverList":["$HOST:1"]}}',
        b'{"vBucketServerMap":{"vBucketMap":[[0]],"serverList":["$HOST"]}}',
        b'{"vBucketServerMap":{"vBucketMap":[[0]],"serverList":["$HOST:99999"]}}',
        b'{"rev":"1","vBucketServerMap":{"vBucketMap":[[0]],"serverList":["$HOST:1"]}}',
    ],
)
def test_a_map_that_is_none(config: bytes, connect: Callable[..., Any]) -> None:
    def answered(_server: FakeServer, frame: Frame) -> bytes:
        return Frame(Magic.RESPONSE, Op.GET_CLUSTER_CONFIG, opaque=frame.opaque, body=config).encode()

    with FakeServer(lambda *_: None) as server:
        server.answers[Op.GET_CLUSTER_CONFIG] = answered
        if not config:  # an old server without maps, which has one vbucket by its own word
            assert connect(server.url).high_seqnos() == {0: 0}
            return
        with pytest.raises(RemoteProtocolError):
            connect(server.url)


@pytest.mark.parametrize("opcode", [Op.HELLO, Op.SELECT_BUCKET, DcpOpcode.OPEN, DcpOpcode.CONTROL])
def test_answers_to_questions_that_nobody_asked(opcode: int, connect: Callable[..., Any]) -> None:
    with FakeServer(lambda *_: None) as server:
        for wrong in (
            lambda s, f: Response(opcode=f.opcode, opaque=f.opaque + 100).encode(),
            lambda s, f: Response(opcode=Op.NOOP, opaque=f.opaque).encode(),
            lambda s, f: s.answer(f) * 2,
        ):
            server.answers = {opcode: wrong}
            with pytest.raises(TailraceError) as error:
                source = connect(server.url)
                list(source.changes(end="now"))
            assert isinstance(error.value, RemoteProtocolError)


@pytest.mark.parametrize(
    ("opcode", "status", "error"),
    [
        (DcpOpcode.OPEN, Status.EACCESS, LoginError),
        (DcpOpcode.OPEN, Status.EINVAL, StatusError),
        (DcpOpcode.CONTROL, Status.EINVAL, StatusError),
        (Op.SELECT_BUCKET, Status.KEY_ENOENT, LoginError),
    ],
)
def test_refusals_of_what_is_needed(
    opcode: int, status: int, error: type[TailraceError], connect: Callable[..., Any]
) -> None:
    with FakeServer(lambda *_: None) as server:
        server.answers[opcode] = lambda s, f: Response(
            opcode=f.opcode, status=status, opaque=f.opaque
        ).encode()
        with pytest.raises(error):
            connect(server.url)


def unknown(_server: FakeServer, frame: Frame) -> bytes:
    return Response(opcode=frame.opcode, status=Status.UNKNOWN_COMMAND, opaque=frame.opaque).encode()


def test_a_server_that_knows_no_login(connect: Callable[..., Any]) -> None:
    with FakeServer(lambda *_: None) as server:
        server.answers[Op.SASL_LIST_MECHS] = unknown
        with pytest.raises(LoginError, match="the server supports no login"):
            connect(server.url, username="ada", password="secret")


def test_a_server_with_one_bucket_and_no_features(connect: Callable[..., Any]) -> None:
    """It knows neither HELLO nor SELECT_BUCKET; a bucket of another name can't be the one that it has."""
    with FakeServer(lambda *_: None) as server:
        server.answers = {Op.HELLO: unknown, Op.SELECT_BUCKET: unknown}
        source = connect(server.url)
        assert source.high_seqnos() == {0: 0} and not source.has_collections
        with pytest.raises(LoginError, match=r"refuses bucket 'other' \(UNKNOWN_COMMAND"):
            connect(server.url.replace("default", "other"))


def test_a_server_that_turns_on_what_nobody_asked_for(connect: Callable[..., Any]) -> None:
    def hello(_server: FakeServer, frame: Frame) -> bytes:
        value = int(Feature.UNORDERED_EXECUTION).to_bytes(2, "big")
        return HelloResponse(opcode=Op.HELLO, value=value, opaque=frame.opaque).encode()

    with FakeServer(lambda *_: None) as server:
        server.answers[Op.HELLO] = hello
        with pytest.raises(RemoteProtocolError, match=r"turns on features that nobody asked for: \[14\]"):
            connect(server.url)


def test_refusals_of_what_is_not_needed(connect: Callable[..., Any]) -> None:
    """A server that knows none of the optional settings will do."""
    needed = (b"enable_noop", b"connection_buffer_size")

    def control(_server: FakeServer, frame: Frame) -> bytes:
        status = Status.SUCCESS if frame.key in needed else Status.EINVAL
        return Response(opcode=frame.opcode, status=status, opaque=frame.opaque).encode()

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    with FakeServer(stream) as server:
        server.answers[DcpOpcode.CONTROL] = control
        assert isinstance(next(connect(server.url).changes()), Snapshot)


def test_a_silent_server_is_given_up_after_two_intervals(connect: Callable[..., Any]) -> None:
    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request))
        connection.server.answers = dict.fromkeys(range(256))  # silence from now on, on all connections

    with FakeServer(stream) as server:
        source = connect(server.url, noop_interval_s=1, retry_for_s=3)
        with pytest.raises(ConnectError, match="silent"):
            next(source.changes())
        assert len(server.connections) >= 2


def test_a_server_that_says_nothing_after_the_handshake(connect: Callable[..., Any]) -> None:
    """Connecting succeeds again and again, and still it is an error in the end."""
    with FakeServer(lambda connection, request: None) as server:
        source = connect(server.url, noop_interval_s=1, retry_for_s=3)
        with pytest.raises(ConnectError, match="silent"):
            next(source.changes())
        assert any(frame.opcode == DcpOpcode.STREAM_REQUEST for frame in server.requests)


def test_a_server_that_is_alive_but_never_answers(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.client.progress.ANSWER_S", 0.3)
    with FakeServer(lambda connection, request: None) as server:
        source = connect(server.url, retry_for_s=0.1)
        with pytest.raises(ConnectError, match="the stream request of vbucket 0 is not answered"):
            next(source.changes())
        assert len(server.connections) == 1


def test_an_answer_that_the_application_has_not_taken_is_an_answer(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes over what came before."""
    waiting: list[Callable[[], None]] = []

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        parts = accepted(request), marker(request, 1, 1), mutation(request, 1)
        if request.vbucket == 0:
            connection.send(*parts)
        else:
            waiting.append(lambda: connection.send(*parts))

    with FakeServer(stream, vbuckets=2) as server:
        source = connect(server.url, retry_for_s=0.1)
        changes = source.changes()
        assert next(event for event in changes if isinstance(event, Mutation)).vbucket == 0
        deadline = time.monotonic() + 60
        while not waiting:  # the server may not have seen the second request yet
            source.idle(0.01)
            assert time.monotonic() < deadline
        for send in waiting:
            send()
        while not source.stats()["queued_bytes"]:
            source.idle(0.01)
            assert time.monotonic() < deadline
        monkeypatch.setattr("tailrace.client.progress.ANSWER_S", 0.0)
        source.idle(0.5)
        assert next(event for event in changes if isinstance(event, Mutation)).vbucket == 1


def test_what_comes_while_the_application_is_busy_is_one_piece(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many packets it comes in; once the application asks, it does not wait for more."""
    monkeypatch.setattr("tailrace.client.connection._GATHER_S", 3600)
    sends = []

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        sends.extend((connection.send, mutation(request, seqno)) for seqno in range(2, 22))
        connection.send(accepted(request), marker(request, 1, 21), mutation(request, 1))

    with FakeServer(stream) as server:
        source = connect(server.url)
        portions = source.portions()
        while not (first := next(portions)).row_count:
            pass
        assert first.row_count == 1
        deadline = time.monotonic() + 60
        for send, packet in sends:
            before = source.stats()["received_bytes"]
            send(packet)
            while source.stats()["received_bytes"] < before + len(packet):
                source.idle(0.001)
                assert time.monotonic() < deadline
        assert source.stats()["queued_bytes"] == 0
        assert next(portions).row_count == 20


@pytest.mark.parametrize("what", ["gathering", "still coming"])
def test_nothing_is_overlooked_on_any_connection(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """On the first one only a sign of life is gathered; on the second a change is."""
    monkeypatch.setattr("tailrace.client.connection._GATHER_S", 3600)
    streams = {}

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        streams[request.vbucket] = connection, request
        connection.send(accepted(request), marker(request, 1, 2), mutation(request, 1))

    with FakeServer(stream, vbuckets=2) as first, FakeServer(stream, vbuckets=2) as second:
        for server in (first, second):
            server.nodes, server.owners = [first, second], [[0], [1]]
        source = connect(first.url)
        changes = source.changes()
        assert {
            next(event for event in changes if isinstance(event, Mutation)).vbucket for _ in range(2)
        } == {0, 1}
        if what == "still coming":
            monkeypatch.setattr(Connection, "_watch", lambda _: None)
        for vbucket, packet in ((0, DcpNoop(opaque=7).encode()), (1, mutation(streams[1][1], 2))):
            before, deadline = source.stats()["received_bytes"], time.monotonic() + 60
            streams[vbucket][0].send(packet)
            while source.stats()["received_bytes"] < before + len(packet):
                source.idle(0.001)
                assert time.monotonic() < deadline
        assert not source.is_idle


async def until(condition: Callable[..., Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the server is another thread
            await asyncio.sleep(0.01)


def test_what_has_come_counts_before_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that was held up handles data and timers in one round: the server was not silent."""
    asked = []

    async def read(server: FakeServer) -> None:
        async with tailrace.connect(server.url, retry_for_s=0) as source:
            reading = await source.begin()
            portion = asyncio.ensure_future(source.next_portion(reading))
            (link,) = (connection.link for connection in source._connections)
            await until(lambda: asked and not source._catalog.awaits_names_of(link))
            connection, request = asked[0]
            # it is received but not processed when the time for both a sign of life and the answer is over
            monkeypatch.setattr(Connection, "_watch", lambda _: None)
            monkeypatch.setattr(DcpReader, "is_awaited", False)
            packet = accepted(request) + marker(request, 1, 1) + mutation(request, 1)
            before = link.received_bytes
            connection.send(packet)
            await until(lambda: link.received_bytes == before + len(packet))
            link._silence.last_heard -= 3600
            reading.progress[0].requested_at -= 3600
            source._ring()
            assert (await portion).row_count == 1
            assert source.stats()["lost_connections"] == 0

    with FakeServer(lambda connection, request: asked.append((connection, request))) as server:
        asyncio.run(read(server))


class Full:
    """A socket that takes nothing now."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def send(self, *_: bytearray | bytes) -> None:
        raise BlockingIOError

    sendmsg = send


def test_a_source_ends_after_a_server_that_left_before_it_had_heard_all() -> None:
    """asyncio's transport breaks if it was closed with data to send, has sent it, and is closed again."""

    async def read(server: FakeServer) -> None:
        async with tailrace.connect(server.url) as source:
            await source.begin()
            (connection,) = source._connections
            transport = connection._transport
            real, transport._sock = transport._sock, Full(transport._sock)
            transport.write(noop(7))
            server.connections[0]._client.shutdown(socket.SHUT_WR)
            await until(transport.is_closing)
            assert transport.get_write_buffer_size() == 24 and not connection.closed.done()
            transport._sock = real
            await until(connection.closed.done)

    with FakeServer(lambda connection, request: None) as server:
        asyncio.run(read(server))


def two_snapshots_and_a_half(connection: FakeConnection, request: DcpStreamRequest) -> None:
    """Of two vbuckets, interleaved, in one go."""
    connection.server.asked.append(request)
    if len(connection.server.asked) == 2:
        a, b = connection.server.asked
        connection.send(
            *(accepted(a), accepted(b)),
            *(marker(a, 1, 2), mutation(a, 1), marker(b, 1, 3), mutation(b, 1), mutation(a, 2)),
            *(mutation(b, 2), marker(a, 3, 3), mutation(a, 3), mutation(b, 3)),
            *(marker(a, 4, 9), mutation(a, 4), marker(b, 4, 9), mutation(b, 4), mutation(a, 5)),
        )


def test_a_batch_ends_where_a_snapshot_does(connect: Callable[..., Any]) -> None:
    with FakeServer(two_snapshots_and_a_half, vbuckets=2) as server:
        source = connect(server.url)
        batches = source.batches()
        shown: list[tuple[list[Any], list[bool]]] = []
        while sum(len(rows) for rows, _ in shown) < 9:
            batch = next(batches)
            rows = list(zip(batch["vbucket"].to_pylist(), batch["seqno"].to_pylist(), strict=True))
            positions = source.positions()
            assert all(
                positions[vbucket].seqno == max(s for v, s in rows if v == vbucket) for vbucket, _ in rows
            )
            shown.append((rows, [positions[vbucket].is_partial for vbucket in (0, 1)]))
        a, b = (request.vbucket for request in server.asked)
        expected = [
            [(a, 1), (b, 1), (a, 2), (b, 2)],
            [(a, 3), (b, 3)],
            [(a, 4), (b, 4), (a, 5)],
        ]
        assert [row for rows, _ in shown for row in rows] == [row for rows in expected for row in rows]
        # it ends there whether or not it came in one go; if it did not, there are more ends
        counts = itertools.accumulate(len(rows) for rows, _ in shown)
        partial = {count: is_partial for count, (_, is_partial) in zip(counts, shown, strict=True)}
        ends = list(itertools.accumulate(map(len, expected)))
        assert partial.keys() >= set(ends)
        assert [partial[end][a] for end in ends] == [False, False, True]
        assert [partial[end][b] for end in ends] == [True, False, True]


@pytest.mark.parametrize("columnar", [False, True])
def test_a_snapshot_that_is_whole_is_saved_although_the_next_one_has_begun(
    connect: Callable[..., Any], columnar: bool
) -> None:
    store = MemoryState()
    with FakeServer(two_snapshots_and_a_half, vbuckets=2) as server:
        source = connect(server.url, state=store)
        delivered = source.batches() if columnar else source.changes()
        taken = 0
        while taken < 9:
            item = next(delivered)
            taken += item.num_rows if columnar else isinstance(item, Mutation)
        source.save()
        saved = {vbucket: saved_position.position.seqno for vbucket, saved_position in store.load().items()}
        assert saved == dict.fromkeys((0, 1), 3)


@pytest.mark.parametrize("columnar", [False, True])
def test_a_snapshot_that_is_cut_shorter_when_it_is_taken_up_again_is_whole_at_its_first_end(
    connect: Callable[..., Any], columnar: bool
) -> None:
    """The part that came was deduplicated up to the end that was announced first."""

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request))
        if request.start_seqno == 0:
            connection.send(marker(request, 1, 6), mutation(request, 1), mutation(request, 3))
            connection.close()
        else:
            connection.send(marker(request, 4, 4), mutation(request, 4))
            connection.send(marker(request, 5, 7), mutation(request, 6), mutation(request, 7))

    with FakeServer(stream) as server:
        source = connect(server.url)
        ends = {}
        if columnar:
            for batch in source.batches():
                ends |= dict(zip(batch["seqno"].to_pylist(), batch["snapshot_end"].to_pylist(), strict=True))
                if 7 in ends:
                    break
        else:
            for event in source.changes():
                if isinstance(event, Mutation):
                    ends[event.seqno] = event.snapshot[1]
                if 7 in ends:
                    break
        assert ends == {1: 6, 3: 6, 4: 6, 6: 7, 7: 7}


def test_a_noop_is_answered_with_its_opaque(connect: Callable[..., Any]) -> None:
    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 2), mutation(request, 1), noop(10_000_001))

    with FakeServer(stream) as server:
        source = connect(server.url)
        changes = source.changes()
        next(changes)
        deadline = time.monotonic() + 60
        while not any(f.magic == Magic.RESPONSE and f.opaque == 10_000_001 for f in server.requests):
            source.idle(0.01)
            assert time.monotonic() < deadline


def test_acks_follow_the_application(connect: Callable[..., Any]) -> None:
    """Nothing is acknowledged before the application has it, and everything after that."""
    size = 3_000

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        items = b"".join(mutation(request, seqno, value=b"x" * size) for seqno in range(1, 101))
        connection.send(accepted(request), marker(request, 1, 100), items)
        connection.send(DcpStreamEnd(opaque=request.opaque, vbucket=0).encode())

    def acked(server: FakeServer) -> int:
        return sum(int.from_bytes(f.extras, "big") for f in server.requests if f.opcode == 0x5D)

    with FakeServer(stream) as server:
        server.high_seqnos = {0: 100}
        source = connect(server.url)
        changes = source.changes(end="now")
        next(changes)
        source.idle(0.2)
        assert acked(server) == 0
        rest = list(changes)
        assert sum(isinstance(event, Mutation) for event in rest) == 100
        counted = 44 + 100 * (24 + 31 + 4 + size) + 28
        deadline = time.monotonic() + 60
        while acked(server) < counted - 50 * 1024:
            source.idle(0.01)
            assert time.monotonic() < deadline
        assert acked(server) <= counted


@pytest.mark.parametrize("how", ["pause", "end of the reading"])
@pytest.mark.parametrize("answer_first", [True, False])
def test_a_stream_is_closed_while_its_end_is_on_its_way(
    connect: Callable[..., Any], how: str, answer_first: bool
) -> None:
    """The server answers that there is no such stream, before or after all else that belongs to it."""
    requests = {}
    closing = threading.Event()

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        requests[request.vbucket] = connection, request
        connection.send(accepted(request), marker(request, 1, 9), mutation(request, 1), mutation(request, 2))

    def close(server: FakeServer, frame: Frame) -> bytes:
        closing.set()
        refusal = Response(opcode=frame.opcode, status=Status.KEY_ENOENT, opaque=frame.opaque).encode()
        end = DcpStreamEnd(opaque=frame.opaque, vbucket=frame.vbucket, status=2).encode()
        return refusal + end if answer_first else refusal

    with FakeServer(stream, vbuckets=2) as server:
        server.answers[DcpOpcode.CLOSE_STREAM] = close
        source = connect(server.url)
        changes = source.changes()
        take(changes, 1)
        deadline = time.monotonic() + 60
        while len(requests) < 2:
            source.idle(0.01)
            assert time.monotonic() < deadline
        connection, request = requests[0]
        if not answer_first:
            source.idle(0.1)  # what has come is gathered
            before = source.stats()["queued_bytes"]
            connection.send(DcpStreamEnd(opaque=request.opaque, vbucket=0, status=2).encode())
            while source.stats()["queued_bytes"] == before:
                source.idle(0.01)
                assert time.monotonic() < deadline
        if how == "pause":
            source.pause([0])
        else:
            changes.close()
            changes = source.changes()
        while not closing.is_set():
            source.idle(0.01)
            assert time.monotonic() < deadline
        connection, request = requests[1]
        if how == "pause":
            connection.send(mutation(request, 3))
        wanted = (1, 3) if how == "pause" else (1, 2)
        assert any(take(changes, 1) == [wanted] for _ in range(10))
        assert source.stats()["lost_connections"] == 0


def test_unknown_requests_are_refused_and_forgotten(connect: Callable[..., Any]) -> None:
    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        connection.send(
            accepted(request), raw(request, 0xF0, opaque=0x7007), raw(request, 0x5A, opaque=0x7008)
        )
        connection.send(marker(request, 1, 1), mutation(request, 1))

    with FakeServer(stream) as server:
        source = connect(server.url)
        changes = source.changes()
        assert isinstance(next(changes), Snapshot)
        assert isinstance(next(changes), Mutation)
        deadline = time.monotonic() + 60
        while len(refusals := [f for f in server.requests if f.opaque in (0x7007, 0x7008)]) < 2:
            source.idle(0.01)
            assert time.monotonic() < deadline
        assert [f.status for f in refusals] == [Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED]


def test_a_marker_that_wants_an_answer_gets_it_at_its_end(connect: Callable[..., Any]) -> None:
    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        connection.send(accepted(request), marker(request, 1, 2, flags=9), mutation(request, 1))
        time.sleep(0.2)
        assert not any(f.opcode == DcpOpcode.SNAPSHOT_MARKER for f in connection.server.requests)
        connection.send(mutation(request, 2))

    with FakeServer(stream) as server:
        source = connect(server.url)
        changes = source.changes()
        assert [type(next(changes)) for _ in range(3)] == [Snapshot, Mutation, Mutation]
        deadline = time.monotonic() + 60
        while not any(f.opcode == DcpOpcode.SNAPSHOT_MARKER for f in server.requests):
            source.idle(0.01)
            assert time.monotonic() < deadline


def test_temporary_refusals_are_tried_again(connect: Callable[..., Any]) -> None:
    states = [Status.ETMPFAIL, Status.ENOMEM, Status.KEY_EEXISTS, Status.NOT_MY_VBUCKET]

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        if states:
            connection.send(answer(request, states.pop(0)))
        else:
            connection.send(accepted(request), marker(request, 1, 1), mutation(request, 1))

    with FakeServer(stream) as server:
        assert isinstance(next(connect(server.url).changes()), Snapshot)
        assert states == []


def test_a_vbucket_that_never_comes_is_an_error_with_its_reason(connect: Callable[..., Any]) -> None:
    with FakeServer(lambda c, r: c.send(answer(r, Status.ETMPFAIL))) as server:
        source = connect(server.url, retry_for_s=0.4)
        with pytest.raises(ConnectError, match="ETMPFAIL"):
            next(source.changes())


def test_a_long_series_of_rollbacks_ends(connect: Callable[..., Any]) -> None:
    """A server that always wants less: one rollback, to the beginning, is reported, and then it goes on."""
    asked = []

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        asked.append(request.start_seqno)
        if request.start_seqno:
            connection.send(answer(request, Status.ROLLBACK, (request.start_seqno - 1).to_bytes(8, "big")))
        else:
            connection.send(accepted(request, [(UUID + 1, 0)]), marker(request, 1, 1), mutation(request, 1))

    with FakeServer(stream) as server:
        source = connect(server.url, rollback_points=lambda vbucket: range(1, 50))
        changes = source.changes(start={0: tailrace.Position.at(UUID, 50)})
        assert next(changes) == tailrace.Rollback(0, UUID + 1, 0)
        assert asked == list(range(50, -1, -1))
        assert isinstance(next(changes), Snapshot)


def test_resume_asks_with_the_snapshot_that_was_left(connect: Callable[..., Any]) -> None:
    """The collapsed form (s, s, s) would be a bug: what deduplication left out would be lost."""
    asked = []

    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        asked.append((request.start_seqno, request.snapshot_start, request.snapshot_end, request.vb_uuid))
        if len(asked) == 1:
            connection.send(
                accepted(request), marker(request, 0, 10), mutation(request, 3), mutation(request, 7)
            )
            time.sleep(0.1)
            connection.close()
        else:
            connection.send(accepted(request), marker(request, 7, 10), mutation(request, 10))

    with FakeServer(stream) as server:
        changes = connect(server.url).changes()
        seqnos = []
        while len(seqnos) < 3:
            event = next(changes)
            if isinstance(event, Mutation):
                seqnos.append(event.seqno)
        assert seqnos == [3, 7, 10]
        assert asked == [(0, 0, 0, 0), (7, 0, 10, UUID)]


# clusters


def serve(connection: FakeConnection, request: DcpStreamRequest) -> None:
    server = connection.server
    seqno = server.high_seqnos[request.vbucket]
    if server.nodes.index(server) != server.owners[request.vbucket][0]:
        connection.send(answer(request, Status.NOT_MY_VBUCKET, server.config()))
        return
    connection.send(accepted(request, [(UUID, 0)]))
    if seqno > request.start_seqno:
        items = b"".join(mutation(request, at) for at in range(request.start_seqno + 1, seqno + 1))
        connection.send(marker(request, request.start_seqno, seqno), items)


def make_cluster(count: int, vbuckets: int) -> list[FakeServer]:
    servers = [FakeServer(serve, vbuckets=vbuckets) for _ in range(count)]
    for server in servers:
        server.nodes = servers
        server.owners = [[vbucket % count] for vbucket in range(vbuckets)]
        server.high_seqnos = dict.fromkeys(range(vbuckets), 5)
        server.__enter__()
    return servers


def move(servers: list[FakeServer], owners: list[list[int]], *, push: bool = False) -> None:
    for server in servers:
        server.owners = owners
        server.revision += 1
    if push:
        for server in servers:
            for connection in server.connections:
                text = server.config()
                notification = ClustermapChangeNotification(
                    epoch=1, revision=server.revision, key=b"default", value=text
                )
                connection.send(notification.encode())


def take(changes: Iterator[Any], count: int) -> list[tuple[int, int]]:
    taken = []
    while len(taken) < count:
        event = next(changes)
        if isinstance(event, Mutation):
            taken.append((event.vbucket, event.seqno))
    return taken


@pytest.fixture
def cluster() -> Iterator[list[FakeServer]]:
    servers = make_cluster(3, 12)
    yield servers
    for server in servers:
        server.stop()


def opens(server: FakeServer) -> list[Frame]:
    return [frame for frame in server.requests if frame.opcode == DcpOpcode.OPEN]


def test_one_connection_per_node(cluster: list[FakeServer], connect: Callable[..., Any]) -> None:
    source = connect(cluster[0].url)
    taken = take(source.changes(), 60)
    assert sorted(taken) == [(vbucket, seqno) for vbucket in range(12) for seqno in range(1, 6)]
    assert [len(opens(server)) for server in cluster] == [1, 1, 1]
    name = opens(cluster[0])[0].key.decode()
    assert name.startswith("tailrace:") and ":reader:" in name and len(name) <= 200
    assert len(source.stats()["nodes"]) == 3
    assert source.high_seqnos() == dict.fromkeys(range(12), 5)


def test_a_dead_seed_is_passed_over(cluster: list[FakeServer], connect: Callable[..., Any]) -> None:
    port = cluster[0].port
    where = f"couchbase://127.0.0.1:1,127.0.0.1:{port}/default"
    assert len(take(connect(where).changes(), 60)) == 60
    with pytest.raises(ConnectError):
        connect("couchbase://127.0.0.1:1,127.0.0.1:2/default")


def missing_bucket(_: Any, frame: Frame) -> bytes:
    return Response(opcode=Op.SELECT_BUCKET, opaque=frame.opaque, status=Status.EACCESS).encode()


def test_a_seed_that_does_not_have_the_bucket_yet(
    cluster: list[FakeServer], connect: Callable[..., Any]
) -> None:
    with FakeServer(lambda *_: None) as added:
        added.answers[Op.SELECT_BUCKET] = missing_bucket
        where = f"couchbase://127.0.0.1:{added.port},127.0.0.1:{cluster[0].port}/default"
        assert len(take(connect(where).changes(), 60)) == 60
        with pytest.raises(LoginError, match="has no bucket 'default'"):
            connect(added.url)


def test_a_node_that_has_started_and_gets_the_bucket_a_moment_later(
    cluster: list[FakeServer], connect: Callable[..., Any]
) -> None:
    """Once there is a map, it is a node in trouble like any other."""
    source = connect(cluster[0].url)
    changes = source.changes()
    take(changes, 60)
    left = [missing_bucket] * 2

    def select(server: FakeServer, frame: Frame) -> bytes:
        return left.pop()(server, frame) if left else server.answer(frame)

    cluster[1].answers[Op.SELECT_BUCKET] = select
    for server in cluster:
        server.high_seqnos = dict.fromkeys(range(12), 9)
    for connection in list(cluster[1].connections):
        connection.close()
    held = {vbucket for vbucket in range(12) if cluster[0].owners[vbucket] == [1]}
    assert {vbucket for vbucket, _ in take(changes, 4 * len(held))} == held
    assert not left


@pytest.mark.parametrize("push", [True, False])
def test_a_vbucket_moves(cluster: list[FakeServer], connect: Callable[..., Any], push: bool) -> None:
    """By a pushed map, or because the old node no longer has it."""
    source = connect(cluster[0].url)
    changes = source.changes()
    take(changes, 60)
    for server in cluster:
        server.high_seqnos[0] = 9
    move(cluster, [[1], *cluster[0].owners[1:]], push=push)
    for connection in cluster[0].connections:
        opaque = next(f.opaque for f in cluster[0].requests if f.opcode == 0x53 and f.vbucket == 0)
        connection.send(DcpStreamEnd(status=2, opaque=opaque, vbucket=0).encode())
    assert take(changes, 4) == [(0, seqno) for seqno in range(6, 10)]
    assert any(f.opcode == 0x53 and f.vbucket == 0 for f in cluster[1].requests)


def test_a_node_goes_and_the_others_know(cluster: list[FakeServer], connect: Callable[..., Any]) -> None:
    source = connect(cluster[0].url)
    changes = source.changes()
    take(changes, 60)
    gone = cluster[2]
    owners = [[owner[0] if owner[0] != 2 else vb % 2] for vb, owner in enumerate(gone.owners)]
    for server in cluster:
        server.high_seqnos = dict.fromkeys(range(12), 7)
    gone.stop()
    move(cluster[:2], owners)
    moved = [vb for vb in range(12) if vb % 3 == 2]
    assert sorted(take(changes, 8)) == [(vb, seqno) for vb in moved for seqno in (6, 7)]


@pytest.mark.parametrize("knows_it", [True, False])
def test_a_map_is_asked_for_with_the_one_that_is_known(
    cluster: list[FakeServer], connect: Callable[..., Any], knows_it: bool
) -> None:
    """Where the server takes that; an answer without a map says that there is no newer one."""
    for server in cluster:
        server.features = (
            *server.features,
            *((Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,) if knows_it else ()),
        )
    changes = connect(cluster[0].url).changes()
    take(changes, 60)
    for server in cluster:
        server.high_seqnos[1] = 9

    def asked() -> list[bytes]:
        frames = [frame for server in cluster for frame in server.requests]
        return [frame.extras for frame in frames if frame.opcode == Op.GET_CLUSTER_CONFIG]

    known = struct.pack(">qq", 1, cluster[0].revision)
    assert known not in asked()
    for connection in list(cluster[1].connections):
        connection.close()
    assert take(changes, 4) == [(1, seqno) for seqno in range(6, 10)]
    while knows_it and known not in asked():
        time.sleep(0.01)
    assert (known in asked()) == knows_it


def test_a_node_is_added(connect: Callable[..., Any]) -> None:
    servers = make_cluster(2, 8)
    try:
        for server in servers:
            server.owners = [[0]] * 8
        source = connect(servers[0].url)
        changes = source.changes()
        take(changes, 40)
        assert opens(servers[1]) == []
        for server in servers:
            server.high_seqnos = dict.fromkeys(range(8), 6)
        move(servers, [[0], [1]] * 4, push=True)
        for connection in servers[0].connections:
            for frame in [f for f in servers[0].requests if f.opcode == 0x53 and f.vbucket % 2]:
                connection.send(DcpStreamEnd(status=2, opaque=frame.opaque, vbucket=frame.vbucket).encode())
        assert sorted(take(changes, 4)) == [(vb, 6) for vb in (1, 3, 5, 7)]
        assert len(opens(servers[1])) == 1
    finally:
        for server in servers:
            server.stop()


def test_rollback_answer_may_stand_in_the_extras(connect: Callable[..., Any]) -> None:
    def stream(connection: FakeConnection, request: DcpStreamRequest) -> None:
        if request.start_seqno:
            connection.send(
                Frame(
                    Magic.RESPONSE,
                    DcpOpcode.STREAM_REQUEST,
                    extras_length=8,
                    vbucket=Status.ROLLBACK,
                    opaque=request.opaque,
                    body=bytes(8),
                ).encode()
            )
        else:
            connection.send(DcpStreamRequestResponse.ok([(5, 0)], opaque=request.opaque).encode())

    with FakeServer(stream) as server:
        changes = connect(server.url).changes(start={0: tailrace.Position.at(UUID, 5)})
        assert next(changes) == tailrace.Rollback(0, 5, 0)
