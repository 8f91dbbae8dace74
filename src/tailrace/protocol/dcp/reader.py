"""The reader's side of one DCP connection, without I/O.

    get_buffer, buffer_updated     bytes in, as in asyncio's BufferedProtocol
    process(now)                   handle what came: signs of life, noops, answers to questions
    next_delivery()                the next piece of the streams, when the application wants it
    acknowledge(bytes)             the application has used them: room for more
    data_to_send()                 bytes out
    next_timer(), handle_timer(now)

There are two speeds. What keeps the connection alive is handled as it comes, however busy the application is;
what belongs to streams waits in order until the application takes it, and the server's window bounds how much
that can be.

Rules: docs/spec/dcp.md#flow-control, docs/spec/dcp.md#silence.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np

from ...columns.scanner import ScannedFrames, scan
from ...errors import ConnectError, LoginError, RemoteProtocolError, StatusError
from ...model import MAX_U64
from ...wire.admin import ClustermapChangeNotification
from ...wire.codes import ControlKey, DcpOpcode, Feature, Magic, OpenFlag, Status, status_name
from ...wire.dcp import DcpBufferAck, DcpControl, DcpOpen, DcpStreamRequest
from ...wire.header import HEADER, MAX_FRAME, Frame
from ..handshake import HandshakeResult, Introduction, handshake
from ..questions import NO_SCRIPT_OPAQUE, Patience, Questions
from ..script import Script
from .delivery import ChangeDelivery, ReceivedChunk, control_headers, deliver
from .flow_control import ReceiveWindow
from .liveness import Silence, silence_limit_s
from .reader_stream import ReaderStream
from .reader_streams import FIRST_STREAM_OPAQUE, ReaderStreams
from .receive_buffer import BLOCK_BYTES, ReceiveBuffer
from .sync_writes import PREPARE_SURCHARGE

__all__ = [
    "MAX_FRAME_BEFORE_OPEN",
    "DcpReader",
    "Granted",
    "ReaderSettings",
]

T = TypeVar("T")

ACK_BYTES = 50 * 1024
"""An acknowledgement is due after this many bytes."""
SLACK_BYTES = 32 << 20
"""What may wait here beyond the window, which a server may overshoot by one frame."""

FIRST_STREAMS = 16
"""How many streams are asked for first, so the first change need not wait until all have begun."""

MAX_UNREAD_BYTES = 1 << 20
"""Limit for unsent answers to the server's own requests; no server needs more than a few at a time."""

MAX_FRAME_BEFORE_OPEN = 4 << 20
"""The largest answer of a handshake is a cluster map."""

_LEAST_BLOCK = 256 << 10
_REQUEST, _CLOSE_STREAM = int(Magic.REQUEST), int(DcpOpcode.CLOSE_STREAM)
_STREAM_REQUEST, _REQUEST_EXTRAS = int(DcpStreamRequest.OPCODE), DcpStreamRequest.LAYOUTS[0].struct
_STREAM_REQUESTS = frozenset(
    {DcpOpcode.SNAPSHOT_MARKER, DcpOpcode.STREAM_END, DcpOpcode.SYSTEM_EVENT, DcpOpcode.SEQNO_ADVANCED}
)
_SYNC_WRITES = frozenset({DcpOpcode.PREPARE, DcpOpcode.COMMIT, DcpOpcode.ABORT})
_REQUEST_MAGICS = (Magic.REQUEST, Magic.FLEX_REQUEST)


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """How to open the connection."""

    name: str
    """What operators see; an older connection of the same name is closed by the server."""
    buffer_bytes: int = 20 << 20
    """How much the server may send ahead of our acknowledgements."""
    noop_interval_s: float = 20.0
    include_xattrs: bool = False
    no_value: bool = False
    compress: bool = False
    """Ask for values to be compressed that are not compressed in the store."""
    priority: str = ""
    """``low``, ``medium``, ``high`` or the server's choice."""
    backfill_order: str = ""
    """``round-robin``, ``sequential`` or the server's choice."""
    out_of_order: bool = False
    """Accept a first backfill in whichever order suits the server."""
    every_version: bool = False
    """Ask for the change history, if the bucket keeps one."""
    sync_writes: bool = False
    """Ask for durable writes before they are decided, and for the decisions."""

    @property
    def flags(self) -> int:
        """The flags of the open request."""
        asked = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
        if self.include_xattrs:
            asked |= OpenFlag.INCLUDE_XATTRS
        if self.no_value:
            asked |= OpenFlag.NO_VALUE
        return int(asked)

    def controls(self, agreed: HandshakeResult) -> list[tuple[bytes, bytes, bool]]:
        """Key, value, and whether the connection is of no use without it."""
        # docs/spec/dcp.md#stream-request-5: without noops such streams are refused
        needs_noop = agreed.collections or self.include_xattrs
        wanted = [
            (ControlKey.ENABLE_NOOP, b"true", needs_noop),
            (ControlKey.SET_NOOP_INTERVAL, f"{self.noop_interval_s:g}".encode(), False),
            (ControlKey.CONNECTION_BUFFER_SIZE, str(self.buffer_bytes).encode(), True),
            (ControlKey.SEND_STREAM_END_ON_CLOSE, b"true", False),
            (ControlKey.ENABLE_EXPIRY_OPCODE, b"true", False),
            (ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN, b"true", False),
        ]
        if agreed.collections:
            wanted.append((ControlKey.MAX_MARKER_VERSION, b"2.2", False))
            wanted.append((ControlKey.FLATBUFFERS_SYSTEM_EVENTS, b"true", False))
        if self.compress and Feature.SNAPPY in agreed.features:
            wanted.append((ControlKey.FORCE_VALUE_COMPRESSION, b"true", False))
        if self.priority:
            wanted.append((ControlKey.SET_PRIORITY, self.priority.encode(), False))
        if self.out_of_order and agreed.collections:
            wanted.append((ControlKey.ENABLE_OSO, b"true_with_seqno_advanced", False))
        if self.every_version:
            wanted.append((ControlKey.CHANGE_STREAMS, b"true", True))
        if self.sync_writes:
            wanted.append((ControlKey.ENABLE_SYNC_WRITES, b"true", True))
        if self.backfill_order:
            wanted.append((ControlKey.BACKFILL_ORDER, self.backfill_order.encode(), False))
        return wanted


@dataclass(slots=True)
class Granted:
    """The result of opening the connection."""

    handshake: HandshakeResult
    noop: bool = True
    refused: list[str] = field(default_factory=list)


def _open(introduction: Introduction, settings: ReaderSettings, rng: random.Random) -> Script[Granted]:
    """From the first byte to a connection that takes stream requests."""
    agreed = yield from handshake(introduction, rng)
    wanted = settings.controls(agreed)
    answers = yield [
        DcpOpen(key=settings.name.encode(), flags=settings.flags),
        *(DcpControl(key=key, value=value) for key, value, _ in wanted),
    ]
    opened = answers[0].status
    if opened == Status.EACCESS:
        raise LoginError("this user may not read change streams; give it the privilege or use another one")
    if opened != Status.SUCCESS:
        raise StatusError(opened, "dcp open", answers[0].value)
    granted = Granted(agreed)
    for (key, _, is_needed), answer in zip(wanted, answers[1:], strict=True):
        if answer.status == Status.SUCCESS:
            continue
        if is_needed:
            raise StatusError(answer.status, f"dcp control {key.decode()}", answer.value)
        granted.refused.append(f"{key.decode()} ({status_name(answer.status)})")
        if key == ControlKey.ENABLE_NOOP:
            granted.noop = False
    return granted


class DcpReader:
    """One connection to one node. Any error that it raises ends the connection."""

    ORDERED: ClassVar[frozenset[int]] = _STREAM_REQUESTS
    """What the server sends for streams besides changes; it keeps its place among them."""
    HAS_SEQNOS: ClassVar[bool] = True
    """Changes carry the server's own seqnos, so a stream can end at one."""
    ONE_REQUEST: ClassVar[bool] = False
    """One request names all vbuckets: its streams are asked for together."""
    is_spent = False
    """It can't be used for another reading: close it when this one is over."""

    def __init__(
        self,
        introduction: Introduction,
        settings: ReaderSettings,
        *,
        rng: random.Random,
        now: float,
        patience: Patience | None = None,
    ) -> None:
        self.settings = settings
        self.granted: Granted | None = None
        """None until the connection takes stream requests."""
        self.on_config: Callable[[bytes, float], None] = lambda _, __: None
        """Called with each cluster map that is pushed (empty: it changed, ask for it) and the time."""
        self.on_wire: Callable[[bool, bytes | memoryview], None] | None = None
        """Called with whole frames of the streams, both ways: whether we sent them, and the bytes."""
        self.received_bytes = 0
        self._buffer = ReceiveBuffer(max(_LEAST_BLOCK, min(BLOCK_BYTES, settings.buffer_bytes // 5)))
        self._out = bytearray()
        self._chunks: deque[ReceivedChunk] = deque()
        self._streams = ReaderStreams()
        self._questions = Questions(self._send, patience or Patience())
        self._silence = Silence(now)
        self._window = ReceiveWindow(settings.buffer_bytes, now, ack_at_bytes=ACK_BYTES)
        self._grew = False
        self._unread = 0
        self.ask(self._opening(introduction, rng), self._opened, now)

    def _opening(self, introduction: Introduction, rng: random.Random) -> Script[Granted]:
        return _open(introduction, self.settings, rng)

    # bytes in

    def get_buffer(self) -> memoryview:
        """Where to put the next bytes."""
        return self._buffer.get_buffer()

    def buffer_updated(self, count: int) -> None:
        """This many bytes came. Call `process` when it `is_full`, and when there are no more to read."""
        self._grew = True
        self.received_bytes += count
        self._buffer.buffer_updated(count)

    def receive_data(self, data: bytes) -> None:
        """Bytes from elsewhere, for callers that do not use `get_buffer`; `process` is called as needed."""
        left = memoryview(data)
        while left:
            if self.is_full:
                self.process(self._silence.last_heard)
            room = self.get_buffer()
            count = min(len(room), len(left))
            room[:count] = left[:count]
            self.buffer_updated(count)
            left = left[count:]

    @property
    def is_full(self) -> bool:
        """Whether the receive buffer should be processed before it takes more."""
        return self._buffer.is_full

    @property
    def is_awaited(self) -> bool:
        """Whether streams are asked for and none has brought a change: the first should not wait for more."""
        return self._streams.are_awaited

    @property
    def wants_answer(self) -> bool:
        """Whether so many streams are asked for that no more should be before an answer comes."""
        streams = self._streams
        return streams.are_unanswered and len(streams.by_opaque) >= FIRST_STREAMS and not self._chunks

    @property
    def is_swamped(self) -> bool:
        """Whether the server sent more than we allowed it to.

        Don't read on before the application has taken some, and then say so with `reads_again`.
        """
        return self.queued_bytes > self.settings.buffer_bytes + SLACK_BYTES

    def reads_again(self, now: float) -> None:
        """The server is being read again, after a while in which it was not."""
        self._silence.heard(now)

    @property
    def queued_bytes(self) -> int:
        """What waits for the application."""
        return sum(chunk.size_bytes for chunk in self._chunks)

    def process(self, now: float) -> None:
        """Handle everything that came since the last call."""
        if not self._grew:
            return
        self._grew = False
        self._silence.heard(now)
        self._scan()

    def close_received(self) -> None:
        """The server has closed the connection in an orderly way."""

    def _scan(self) -> None:
        agreed = self.granted.handshake if self.granted else None
        limit = MAX_FRAME if agreed else MAX_FRAME_BEFORE_OPEN
        # a block is far smaller than what one scan reads, so this finds everything
        frames = scan(
            self._buffer.pending, collections=agreed is not None and agreed.collections, limit=limit
        )
        if frames.error is not None:
            raise frames.error
        if frames.used:
            self._take(frames)

    def _take(self, frames: ScannedFrames) -> None:
        if self.on_wire is not None and self.granted is not None:
            self.on_wire(False, frames.data.data[: frames.used])
        block = self._buffer.take(frames.used)
        headers = control_headers(frames)
        ordered = np.zeros(len(headers), dtype=bool)
        if len(frames) and self.granted is None:
            raise RemoteProtocolError("changes come before the connection is open")
        sizes = (frames.control_end - frames.control_start).tolist()
        counted = frames.used - sum(sizes)
        fields = zip(
            headers["magic"].tolist(), headers["opcode"].tolist(), headers["opaque"].tolist(), strict=True
        )
        for index, (magic, opcode, opaque) in enumerate(fields):
            if magic in _REQUEST_MAGICS:
                if opcode == DcpOpcode.NOOP:
                    self._reply(opcode, opaque)
                    continue
                counted += sizes[index] + PREPARE_SURCHARGE * (opcode == DcpOpcode.PREPARE)
                if (
                    opcode in self.ORDERED
                    or (self.settings.out_of_order and opcode == DcpOpcode.OSO_SNAPSHOT)
                    or (self.settings.sync_writes and opcode in _SYNC_WRITES)
                ):
                    ordered[index] = True
                else:
                    self._unexpected(opcode, opaque)
            elif magic == Magic.SERVER_REQUEST:
                self._pushed(Frame.parse(frames.data.data, int(frames.control_start[index])))
            elif opaque >= FIRST_STREAM_OPAQUE:
                ordered[index] = True
            elif opcode != DcpOpcode.BUFFER_ACK:  # some servers answer even that
                self._questions.answered(Frame.parse(frames.data.data, int(frames.control_start[index])))
        if len(frames):
            self._streams.are_awaited = False
        if len(frames) or ordered.any():
            self._chunks.append(ReceivedChunk(frames, block, headers, ordered, counted))
        else:
            self._buffer.release(block)
            if counted:
                self.acknowledge(counted)

    def _unexpected(self, opcode: int, opaque: int) -> None:
        """A request that we can't use: an unknown one is refused, one that we didn't ask for is an error."""
        known = DcpOpcode.__members__.values()
        if opcode in known and opcode != DcpOpcode.FLUSH:
            raise RemoteProtocolError(f"the server sends {DcpOpcode(opcode).name}, which was not asked for")
        status = Status.NOT_SUPPORTED if opcode == DcpOpcode.FLUSH else Status.UNKNOWN_COMMAND
        self._reply(opcode, opaque, status)

    def _pushed(self, frame: Frame) -> None:
        if frame.opcode == ClustermapChangeNotification.OPCODE:
            self.on_config(ClustermapChangeNotification.decode(frame).value, self._silence.last_heard)

    # questions alongside the streams

    def ask(self, script: Script[T], then: Callable[[T], None], now: float | None) -> None:
        """Run a script over this connection; ``then`` gets its result.

        A question that is not answered ends the connection, so its caller learns of it; one without a time
        may wait forever.
        """
        self._questions.ask(script, then, now)

    def _opened(self, granted: Granted) -> None:
        self.granted = granted

    # streams

    @property
    def streams(self) -> Mapping[int, ReaderStream]:
        """The streams requested or open here, by opaque."""
        return self._streams.by_opaque

    def open_stream(
        self, stream: ReaderStream, *, end_seqno: int = MAX_U64, flags: int = 0, value: bytes = b""
    ) -> None:
        """Ask for a vbucket's changes from where the stream stands."""
        if not self._streams.by_opaque:
            self._streams.are_awaited = self._streams.are_unanswered = True
        opaque = self._streams.add(stream)
        position = stream.position
        wanted = position.request_range()
        extras = _REQUEST_EXTRAS.pack(
            flags,
            0,
            position.seqno,
            max(end_seqno, position.seqno),
            position.vb_uuid,
            wanted.start,
            wanted.end,
        )
        size = len(extras) + len(value)
        header = HEADER.pack(_REQUEST, _STREAM_REQUEST, 0, len(extras), 0, stream.vbucket, size, opaque, 0)
        request = header + extras + value
        if self.on_wire is not None:
            self.on_wire(True, request)
        self._send(request)

    def close_stream(self, vbucket: int) -> None:
        """Tell the server to stop; what it still sends for this stream is skipped."""
        opaque = self._streams.retire(vbucket)
        if opaque is not None:
            self._out += HEADER.pack(_REQUEST, _CLOSE_STREAM, 0, 0, 0, vbucket, 0, opaque, 0)

    def next_chunk(self) -> ReceivedChunk | None:
        """The piece that `next_delivery` will return, if it passes the checks."""
        return self._chunks[0] if self._chunks else None

    def next_delivery(self) -> ChangeDelivery | None:
        """The next piece of the streams, checked; give it back with `release` when its bytes are used."""
        if not self._chunks:
            return None
        self._streams.are_unanswered = False
        delivery = deliver(self._chunks.popleft(), self._streams.by_opaque, self._streams.retired)
        for opaque in delivery.finished:
            self._streams.finished(opaque)
        for opaque in delivery.acknowledged:
            self._reply(DcpOpcode.SNAPSHOT_MARKER, opaque)
        return delivery

    def discard(self) -> None:
        """Drop everything that was received and not delivered: the connection is no longer of use."""
        while self._chunks:
            self._buffer.release(self._chunks.popleft().block)

    def release(self, delivery: ChangeDelivery) -> None:
        """The delivery's bytes are no longer needed."""
        self._buffer.release(delivery.chunk.block)

    # flow control

    def acknowledge(self, count: int) -> None:
        """The application has used this many bytes."""
        if self._window.processed(count):
            self._acknowledge(self._silence.last_heard)

    def _acknowledge(self, now: float) -> None:
        while count := self._window.take(now):
            self._send(DcpBufferAck(acked_bytes=count, opaque=NO_SCRIPT_OPAQUE).encode())

    @property
    def acked_bytes(self) -> int:
        """What the application has used and the server has been told of."""
        return self._window.acknowledged_bytes

    # bytes out, time

    def _send(self, data: bytes) -> None:
        self._out += data

    def _reply(self, opcode: int, opaque: int, status: int = Status.SUCCESS) -> None:
        """Answer a request of the server."""
        self._out += HEADER.pack(Magic.RESPONSE, opcode, 0, 0, 0, status, 0, opaque, 0)
        self._unread += HEADER.size
        if self._unread > MAX_UNREAD_BYTES:
            raise RemoteProtocolError("the server keeps asking and does not read the answers")

    def all_sent(self) -> None:
        """Everything that `data_to_send` gave has gone out."""
        self._unread = 0

    def data_to_send(self) -> bytes:
        """What is to be sent now."""
        data = bytes(self._out)
        self._out.clear()
        return data

    @property
    def _silence_s(self) -> float | None:
        """How long the server may be silent; None: forever, or it is not being read."""
        if self.is_swamped or (self.granted is not None and not self.granted.noop):
            return None
        return silence_limit_s(self.settings.noop_interval_s)

    def next_timer(self) -> float | None:
        """When `handle_timer` has something to do."""
        timers = (
            *self._questions.due(),
            self._silence.next_timer(self._silence_s),
            self._window.next_timer(),
        )
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Time has passed: acknowledge small amounts too.

        Raises `ConnectError` if the server is dead, or has owed an answer for too long.
        """
        self._questions.check(now)
        self._check_silence(now, self._silence_s)
        if self._window.is_late(now):
            self._acknowledge(now)

    def _check_silence(self, now: float, limit_s: float | None) -> None:
        if self._silence.is_too_long(now, limit_s):
            raise ConnectError(f"the server has been silent for {self._silence.seconds(now):.0f} s")

    @property
    def waits_for(self) -> str:
        """What the connection itself is waiting for, for people; empty if nothing but data."""
        return self._questions.waits_for
