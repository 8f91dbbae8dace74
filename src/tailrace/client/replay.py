"""A recording served as a producer: every stream request gets what was recorded for it, byte for byte.

The handshake is made up; the streams are not. A request for a vbucket is answered with a recorded exchange of
that vbucket (`ReplayedVBucket` says which): its answer (a rollback too), then all that followed, with no byte
changed but the opaque. Flow control is obeyed, to spare a reader that falls behind, and no-ops are sent, so
one that waits for more does not think that the connection is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Iterator

from ..errors import MalformedMessage, ProtocolError
from ..protocol.dcp.controls import ConnectionOptions
from ..protocol.dcp.liveness import DEFAULT_INTERVAL_S
from ..protocol.handshake import KV_FEATURES, READER_FEATURES, grant_features
from ..wire.admin import VB_SEQNO, Hello
from ..wire.codes import Datatype, DcpOpcode, Feature, Magic, Op, Status
from ..wire.dcp import DcpBufferAck, DcpNoop, DcpStreamEnd, DcpStreamRequest
from ..wire.framing import Framer
from ..wire.header import Frame
from .recording import Recording
from .replayed_vbucket import ReplayedVBucket

__all__ = ["ReplayServer"]

_WRITE_BYTES = 256 << 10
_EMPTY_MANIFEST = (
    b'{"uid":"0","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}]}'
)


class ReplayServer:
    """Serves a recording on a port."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.port = 0
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for task in self._sessions:
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sessions.add(task)
        try:
            await _Session(self, writer).run(reader)
        except (OSError, ProtocolError, asyncio.CancelledError):
            pass  # it is gone, or has broken the protocol: the connection is closed
        finally:
            self._sessions.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class _Session:
    """One reader."""

    def __init__(self, server: ReplayServer, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._recording = server.recording
        self._writer = writer
        self._replayed: dict[int, ReplayedVBucket] = {}
        self._streams: deque[Iterator[bytes]] = deque()
        self._options = ConnectionOptions(frozenset())
        """What the reader has set; every control is answered with a success."""
        self._window = self._options.window

    async def run(self, reader: asyncio.StreamReader) -> None:
        framer = Framer()
        while True:
            try:
                async with asyncio.timeout(self._noop_s()):
                    data = await reader.read(_WRITE_BYTES)
            except TimeoutError:
                self._writer.write(DcpNoop().encode())
                continue
            if not data:
                return
            framer.feed(data)
            for frame in framer.frames():
                self._handle(frame)
            await self._send_streams()

    def _handle(self, frame: Frame) -> None:
        if not frame.is_request:
            return
        if frame.opcode == DcpOpcode.STREAM_REQUEST:
            self._request(frame)
        elif frame.opcode == DcpOpcode.BUFFER_ACK:
            self._window.acknowledge(DcpBufferAck.decode(frame).acked_bytes)
        else:
            self._answer(frame, *self._made_up(frame))

    def _answer(self, frame: Frame, status: int, value: bytes = b"", datatype: int = 0) -> None:
        answer = Frame(Magic.RESPONSE, frame.opcode, 0, 0, datatype, status, frame.opaque, body=value)
        self._writer.write(answer.encode())

    def _made_up(self, frame: Frame) -> tuple[int, bytes] | tuple[int, bytes, int]:
        """Status, value and perhaps datatype of an answer that the recording does not have."""
        recording = self._recording
        match frame.opcode:
            case Op.HELLO:
                offered = {*READER_FEATURES, *KV_FEATURES}
                if not recording.about.get("collections"):
                    offered.discard(Feature.COLLECTIONS)
                try:
                    granted = grant_features(Hello(value=frame.value).features, offered)
                except MalformedMessage:
                    return Status.EINVAL, b""
                return Status.SUCCESS, b"".join(code.to_bytes(2, "big") for code in granted)
            case Op.SASL_LIST_MECHS:
                return Status.SUCCESS, b"PLAIN"
            case Op.GET_CLUSTER_CONFIG:
                return Status.SUCCESS, self._config(), int(Datatype.JSON)
            case Op.GET_COLLECTIONS_MANIFEST:
                return Status.SUCCESS, _EMPTY_MANIFEST, int(Datatype.JSON)
            case Op.GET_ALL_VB_SEQNOS:
                seqnos = ((vb, recording.high_seqno(vb)) for vb in range(recording.vbucket_count))
                return Status.SUCCESS, b"".join(VB_SEQNO.pack(vb, seqno) for vb, seqno in seqnos)
            case Op.GET_FAILOVER_LOG | DcpOpcode.GET_FAILOVER_LOG:
                log = recording.failover_log(frame.vbucket)
                return (Status.NOT_MY_VBUCKET, b"") if log is None else (Status.SUCCESS, log)
            case DcpOpcode.CONTROL:
                self._options.control(frame.key, frame.value)
                return Status.SUCCESS, b""
            case Op.NOOP | Op.SELECT_BUCKET | DcpOpcode.OPEN | DcpOpcode.CLOSE_STREAM:
                return Status.SUCCESS, b""
            case _:
                return Status.UNKNOWN_COMMAND, b""

    def _config(self) -> bytes:
        return json.dumps(
            {
                "rev": 1,
                "revEpoch": 1,
                "name": self._recording.about.get("bucket", "default"),
                "nodeLocator": "vbucket",
                "bucketCapabilities": ["collections", "dcp", "cccp", "xattr", "nodesExt"],
                "nodes": [{"hostname": "$HOST:8091", "ports": {"direct": self._server.port}}],
                "nodesExt": [{"services": {"kv": self._server.port, "mgmt": 8091}, "thisNode": True}],
                "vBucketServerMap": {
                    "hashAlgorithm": "CRC",
                    "numReplicas": 0,
                    "serverList": [f"$HOST:{self._server.port}"],
                    "vBucketMap": [[0]] * self._recording.vbucket_count,
                },
            }
        ).encode()

    def _noop_s(self) -> float | None:
        """After how long a reader that says nothing gets a no-op; None if it does not want any."""
        asked_s = self._options.noop_interval_s or DEFAULT_INTERVAL_S
        return min(asked_s, DEFAULT_INTERVAL_S) if self._options.noop else None

    def _request(self, frame: Frame) -> None:
        """Answer a stream request with what was recorded for it. When nothing is left, the stream stays open
        and silent, or ends if nothing more was asked for.
        """
        replayed = self._replayed.setdefault(
            frame.vbucket, ReplayedVBucket(self._recording.replayable(frame.vbucket))
        )
        try:
            stream = replayed.play(frame)
        except ProtocolError:
            self._answer(frame, Status.EINVAL)
            return
        if stream is not None:
            self._streams.append(stream)
            return
        log = self._recording.failover_log(frame.vbucket)
        if log is None:
            self._answer(frame, Status.NOT_MY_VBUCKET)
            return
        self._answer(frame, Status.SUCCESS, log)
        asked = DcpStreamRequest.decode(frame)
        if asked.end_seqno <= asked.start_seqno:
            self._writer.write(DcpStreamEnd(opaque=frame.opaque, vbucket=frame.vbucket).encode())

    async def _send_streams(self) -> None:
        """Send what the window allows, one stream after the other."""
        while self._streams and self._window.room > 0:
            part = bytearray()
            for data in self._streams[0]:
                part += data
                if data[0] not in (Magic.RESPONSE, Magic.FLEX_RESPONSE):
                    self._window.sent(len(data))
                if len(part) >= _WRITE_BYTES or self._window.room <= 0:
                    break
            else:
                self._streams.popleft()
            self._writer.write(bytes(part))
            await self._writer.drain()
