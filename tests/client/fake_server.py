"""A server that sends what a test tells it, above all what no server should send."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from tailrace.wire.admin import AllVbSeqnosResponse, HelloResponse, SaslResponse, ValueResponse
from tailrace.wire.codes import Datatype, DcpOpcode, Feature, Magic, Op, Status
from tailrace.wire.dcp import DcpFailoverLogResponse, DcpMutation, DcpSnapshotMarker, DcpStreamRequestResponse
from tailrace.wire.dialect import DCP
from tailrace.wire.fields import encode_failover_log
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction, Response

UUID = 0xABCDEF
FEATURES: tuple[Feature, ...] = (
    *(Feature.XERROR, Feature.SELECT_BUCKET, Feature.JSON, Feature.DUPLEX),
    *(Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.COLLECTIONS),
)


class FakeServer:
    """Listens on a free port; every connection is served by a thread of its own.

    ``on_stream(server, connection, request)`` answers stream requests, ``answers`` replaces the answer to any
    other opcode: bytes, a function of (server, frame) that gives bytes, or None for silence.
    """

    def __init__(self, on_stream: Callable[..., None], *, vbuckets: int = 1) -> None:
        self.on_stream = on_stream
        self.vbuckets = vbuckets
        self.answers: dict[int, Any] = {}
        self.on_ack: Callable[[Frame], None] = lambda _: None
        self.high_seqnos = dict.fromkeys(range(vbuckets), 0)
        self.owners = [[0]] * vbuckets
        self.nodes: list[FakeServer] = [self]
        self.revision = 1
        self.requests: list[Frame] = []
        self.connections: list[Connection] = []
        self.asked: list[Any] = []  # for tests that want to remember requests
        self.features = FEATURES
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def url(self) -> str:
        return f"couchbase://127.0.0.1:{self.port}/default"

    def __enter__(self) -> FakeServer:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for connection in self.connections:
            connection.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            connection = Connection(self, client)
            self.connections.append(connection)
            thread = threading.Thread(target=connection.run, daemon=True)
            self._threads.append(thread)
            thread.start()

    def config(self) -> bytes:
        return json.dumps(
            {
                "rev": self.revision,
                "revEpoch": 1,
                "vBucketServerMap": {
                    "serverList": [f"$HOST:{node.port}" for node in self.nodes],
                    "vBucketMap": self.owners,
                },
            }
        ).encode()

    def answer(self, frame: Frame) -> bytes:
        """What a well-behaved server answers."""
        made: Response
        match frame.opcode:
            case Op.HELLO:
                asked = [
                    int.from_bytes(frame.value[at : at + 2], "big") for at in range(0, len(frame.value), 2)
                ]
                granted = [code for code in asked if code in self.features]
                made = HelloResponse(
                    opcode=Op.HELLO, value=b"".join(code.to_bytes(2, "big") for code in granted)
                )
            case Op.SASL_LIST_MECHS:
                made = ValueResponse(opcode=Op.SASL_LIST_MECHS, value=b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1")
            case Op.SASL_AUTH | Op.SASL_STEP:
                made = SaslResponse(opcode=frame.opcode, status=Status.AUTH_ERROR)
            case Op.GET_CLUSTER_CONFIG:
                made = ValueResponse(opcode=frame.opcode, value=self.config(), datatype=int(Datatype.JSON))
            case Op.GET_COLLECTIONS_MANIFEST:
                made = ValueResponse(opcode=frame.opcode, value=b'{"uid":"0","scopes":[]}')
            case Op.GET_ALL_VB_SEQNOS:
                seqnos = sorted(self.high_seqnos.items())
                value = b"".join(vb.to_bytes(2, "big") + seqno.to_bytes(8, "big") for vb, seqno in seqnos)
                made = AllVbSeqnosResponse(opcode=frame.opcode, value=value)
            case Op.GET_FAILOVER_LOG:
                made = DcpFailoverLogResponse(opcode=frame.opcode, value=encode_failover_log([(UUID, 0)]))
            case _:
                made = Response(opcode=frame.opcode)
        made.opaque = frame.opaque
        return made.encode()


class Connection:
    """One client."""

    def __init__(self, server: FakeServer, client: socket.socket) -> None:
        self.server = server
        self._client = client
        self._sending = threading.Lock()

    def run(self) -> None:
        framer = Framer()
        try:
            while data := self._client.recv(65536):
                framer.feed(data)
                for frame in framer.frames():
                    self._handle(frame)
        except OSError:
            pass
        finally:
            self.close()

    def _handle(self, frame: Frame) -> None:
        server = self.server
        server.requests.append(frame)
        if frame.opcode == DcpOpcode.BUFFER_ACK:
            server.on_ack(frame)
            return
        if not frame.is_request:
            return
        if frame.opcode in server.answers:
            special = server.answers[frame.opcode]
            made = special(server, frame) if callable(special) else special
            if made is not None:
                self.send(made)
        elif frame.opcode == DcpOpcode.STREAM_REQUEST:
            server.on_stream(self, DCP.decode(frame, Direction.TO_PRODUCER))
        else:
            self.send(server.answer(frame))

    def send(self, *parts: bytes) -> None:
        """Send all of it in one piece: a test's thread may send while a question is answered in ours."""
        with self._sending:
            self._client.sendall(b"".join(parts))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)
        self._client.close()


# what streams are made of


def accepted(request: Any, log: list[tuple[int, int]] | None = None) -> bytes:
    return DcpStreamRequestResponse.ok(log or [(UUID, 0)], opaque=request.opaque).encode()


def marker(request: Any, start: int, end: int, **fields: Any) -> bytes:
    fields = {"flags": 1, "opaque": request.opaque, "vbucket": request.vbucket} | fields
    return DcpSnapshotMarker(start=start, end=end, **fields).encode()


def mutation(request: Any, seqno: int, **fields: Any) -> bytes:
    fields = {
        "key": b"\0key",
        "value": b"{}",
        "rev_seqno": 1,
        "cas": 1,
        "opaque": request.opaque,
        "vbucket": request.vbucket,
    } | fields
    return DcpMutation(by_seqno=seqno, **fields).encode()


def noop(opaque: int) -> bytes:
    return Frame(Magic.REQUEST, DcpOpcode.NOOP, opaque=opaque).encode()
