"""A DCP connection, seen by the replica: what is streamed goes into the node's replica vbuckets.

There are two ways to begin. A controller opens a connection to the node as replica and steers it with Add
Stream, with the producer behind the same connection; or the node has dialled the producer itself
(`server.upstream`) and calls `add_stream`. From then on both are the same:

    stream request from where the vbucket stands      answered with a rollback: go back exactly, ask again
    the active's failover log                         taken over before the first change
    marker, changes, marker, changes ...              checked, stored as they are, acknowledged
    set vbucket state                                 a takeover: pending, then active

A change that does not fit is refused: one of no stream or another stream (opaque), or with a seqno that is
not above the last one or is outside its snapshot. What the vbucket holds can be trusted up to the end of its
last complete snapshot; the store knows where that is, and its readers and a promotion rely on it.

Rules: docs/spec/dcp.md#add-stream, docs/spec/dcp.md#checks-of-a-receiver, docs/spec/dcp.md#takeover.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...errors import DocumentRefused, MalformedMessage, TailraceError
from ...history import FailoverLog
from ...model import Position
from ...wire.codes import (
    AddStreamFlag,
    DcpOpcode,
    Feature,
    MarkerFlag,
    OpenFlag,
    Status,
    StreamEndStatus,
    VBucketState,
    status_name,
)
from ...wire.dcp import (
    DcpAddStream,
    DcpAddStreamResponse,
    DcpBufferAck,
    DcpCloseStream,
    DcpDeletion,
    DcpExpiration,
    DcpMutation,
    DcpOpen,
    DcpSeqnoAdvanced,
    DcpSetVBucketState,
    DcpSnapshotMarker,
    DcpStreamEnd,
    DcpStreamRequestResponse,
    DcpSystemEvent,
)
from ...wire.header import MAX_NAME_BYTES, Frame
from ...wire.message import Message, Response
from ..handler import HandlerBase
from ..rewriting import Rewriting
from ..states import (
    CONNECTION_TRANSITIONS,
    ConnectionInput,
    ConnectionState,
    Machine,
    ReplicaStreamInput,
    ReplicaStreamState,
)
from .flow_control import ReceiveWindow
from .liveness import Silence, silence_limit_s
from .replica_controls import ReplicaControls
from .replica_stream import ReplicaStream
from .replica_streams import ReplicaStreams
from .request_checks import SYNC_WRITES, UNASKED, check_change, check_request, seqno_of
from .sync_writes import PREPARE_SURCHARGE

if TYPE_CHECKING:
    from ...store.base import Bucket
    from ..handler import HandlerSummary, Host

__all__ = ["OPEN_FLAGS", "DcpReplica", "roll_back"]

OPEN_FLAGS = (
    OpenFlag.PRODUCER
    | OpenFlag.INCLUDE_XATTRS
    | OpenFlag.INCLUDE_DELETE_TIMES
    | OpenFlag.INCLUDE_DELETED_USER_XATTRS
)
"""The flags that a replica opens its producer with: documents exactly as they are stored."""

_BEFORE_V7: Mapping[int, int] = {
    Status.DCP_STREAM_NOT_FOUND: Status.KEY_ENOENT,
    Status.OPAQUE_NO_MATCH: Status.KEY_EEXISTS,
}
_HISTORY_IN_MEMORY = MarkerFlag.HISTORY | MarkerFlag.MEMORY
_RECEIVING = (VBucketState.REPLICA, VBucketState.PENDING)

_log = logging.getLogger(__name__)


class DcpReplica(HandlerBase):
    """The replica's half of a DCP connection; a `protocol.handler.Handler`."""

    def __init__(self, host: Host, wake: Callable[[], None], now: float, *, dialled: bool = False) -> None:
        """``dialled``: the producer has been opened already, and no Open will come."""
        super().__init__(host)
        self.on_end: Callable[[int, str], None] = lambda vbucket, why: None
        """Called with a vbucket whose stream was open and is over, and why."""
        self._wake = wake
        self._now = now
        self._features = host.features
        self._name = ""
        self._machine = Machine(CONNECTION_TRANSITIONS, ConnectionState.NEW)
        self._out: deque[bytes] = deque()
        self._controls = ReplicaControls()
        self._streams = ReplicaStreams()
        self._window = ReceiveWindow(host.settings.replication_buffer, now)
        self._silence = Silence(now)
        self._rewriting = Rewriting(host, wake)
        self._figures = {"received_bytes": 0, "received_changes": 0, "rollbacks": 0}
        if dialled:
            self._begin()

    # The handler's interface.

    @property
    def is_open(self) -> bool:
        return self._machine.state is not ConnectionState.NEW

    @property
    def is_busy(self) -> bool:
        return self._rewriting.is_running

    @property
    def _is_closed(self) -> bool:
        return self._machine.state is ConnectionState.CLOSED

    def receive_frame(self, frame: Frame, now: float) -> None:
        if self.close_requested is not None:
            return
        self._now = now
        self._silence.heard(now)
        if not frame.is_request:
            self._receive_answer(frame)
            return
        if self.is_open and frame.opcode not in (DcpOpcode.NOOP, DcpOpcode.ADD_STREAM):
            self._count(frame.size + PREPARE_SURCHARGE * (frame.opcode == DcpOpcode.PREPARE))
        try:
            self._receive_request(frame)
        except (MalformedMessage, DocumentRefused) as error:
            _log.info("%s: refused opcode 0x%02x: %s", self._host.peer, frame.opcode, error)
            self._answer(frame, error.status)

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = [b"".join(self._out)] if self._out else []
        self._out.clear()
        return out

    def next_timer(self) -> float | None:
        timers = (self._window.next_timer(), self._silence.next_timer(self._silence_s()))
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, now: float) -> None:
        self._now = now
        if self._silence.is_too_long(now, self._silence_s()):
            self._disconnect("nothing was received for too long")
        elif self._window.is_late(now):
            self._acknowledge()

    def stats(self) -> Mapping[str, int | str]:
        figures: dict[str, int | str] = {
            "type": "consumer",
            "name": self._name,
            "num_streams": len(self._streams),
            "unacked_bytes": self._window.unacknowledged_bytes,
            "acked_bytes": self._window.acknowledged_bytes,
            **self._figures,
        }
        for number, stream in self._streams.by_vbucket.items():
            figures[f"stream_{number}_state"] = stream.state.value
            figures[f"stream_{number}_opaque"] = stream.opaque
            figures[f"stream_{number}_cur_snapshot_end"] = stream.marker_end
        return figures

    def summary(self) -> HandlerSummary:
        return self._streams.summary(self._window)

    def close(self, reason: str) -> None:
        self._machine.feed(ConnectionInput.CLOSED)
        self._rewriting.cancel()
        for number in list(self._streams.by_vbucket):
            self._forget(number, reason)
        self._out.clear()

    def _silence_s(self) -> float | None:
        """How long the producer, which sends no-ops, may be silent; None: forever."""
        settings = self._host.settings
        if not self.is_open or not settings.idle_timeout:
            return None
        return silence_limit_s(settings.replication_noop_interval, settings.idle_timeout)

    # Opening.

    def _receive_open(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpOpen)
        if self.is_open:
            raise MalformedMessage("the connection is open already")
        if len(message.key) > MAX_NAME_BYTES:
            raise MalformedMessage(f"a name has up to {MAX_NAME_BYTES} bytes")
        self._host.claim_name(message.key)
        self._name = message.consumer_name or message.key.decode("utf-8", "backslashreplace")
        self._answer(frame)
        self._begin()

    def _begin(self) -> None:
        """The connection is open: negotiate the controls with the producer, one at a time."""
        self._machine.feed(ConnectionInput.OPENED)
        self._controls.begin(self._host)
        self._negotiate()

    def _negotiate(self) -> None:
        if not self._controls.is_done:
            self._send(self._controls.request())
            return
        for stream in self._streams.by_vbucket.values():
            if stream.state is ReplicaStreamState.WAITING:
                self._request(stream)

    def _control_answered(self, frame: Frame) -> None:
        why = self._controls.answered(frame.status, self._host.peer)
        if why is not None:
            self._disconnect(why)
        else:
            self._negotiate()

    # Streams begin and end.

    def add_stream(self, vbucket: int, flags: int, done: Callable[[int, int], None]) -> None:
        """Ask the producer for a vbucket.

        ``done`` gets the resulting status and the stream's opaque, 0 if the producer was not asked.
        """
        vbuckets = self._host.bucket.vbuckets
        served = vbuckets[vbucket] if vbucket < len(vbuckets) else None
        if served is None or served.state not in _RECEIVING:
            done(Status.NOT_MY_VBUCKET, 0)
            return
        if not self._host.claim_vbucket(vbucket, self):
            done(Status.KEY_EEXISTS, 0)
            return
        stream = self._streams.add(served, flags, done)
        if self._controls.is_done:
            self._request(stream)

    def close_stream(self, vbucket: int) -> bool:
        """End a stream; False if there is none. What the producer still sends for it is ignored."""
        stream = self._streams.get(vbucket)
        if stream is None:
            return False
        if stream.state is not ReplicaStreamState.WAITING:
            self._streams.closed_here(stream)
            self._send(DcpCloseStream(opaque=stream.opaque, vbucket=vbucket))
        self._forget(vbucket, "closed")
        return True

    @property
    def vbuckets(self) -> Mapping[int, ReplicaStreamState]:
        """The vbuckets that are being received, and the state of each."""
        return {number: stream.state for number, stream in self._streams.by_vbucket.items()}

    def _receive_add_stream(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpAddStream)

        def done(status: int, opaque: int) -> None:
            if not opaque:
                self._answer(frame, status)
                return
            answer = DcpAddStreamResponse(
                opcode=frame.opcode, opaque=frame.opaque, status=status, stream_opaque=opaque
            )
            self._out.append(answer.encode())

        self.add_stream(message.vbucket, message.flags, done)

    def _receive_close_stream(self, frame: Frame, message: Message) -> None:
        if self.close_stream(message.vbucket):
            self._answer(frame)
        else:
            self._answer(frame, Status.DCP_STREAM_NOT_FOUND)

    def _request(self, stream: ReplicaStream, position: Position | None = None) -> None:
        """Ask for a vbucket's changes from where it stands, or under an older name of the same place."""
        stream.ask_from(position)
        self._send(stream.request())
        self._wake()

    def _request_answered(self, frame: Frame) -> None:
        stream = self._streams.with_opaque(frame.opaque)
        if stream is None:
            self._streams.forget_closed(frame.opaque)  # closed before it was answered
            return
        if stream.state is not ReplicaStreamState.REQUESTED:
            self._disconnect("a stream request was answered twice")
            return
        try:
            answer = DcpStreamRequestResponse.decode(frame)
            if answer.status == Status.SUCCESS:
                stream.accepted(FailoverLog.from_bytes(answer.value))
            elif answer.status == Status.ROLLBACK:
                self._roll_back(stream, answer.rollback_seqno)
                return
        except TailraceError as error:
            self._disconnect(f"a stream request was answered with nonsense: {error}")
            return
        if answer.status == Status.SUCCESS:
            self._tell_prepared(stream)
            stream.done(Status.SUCCESS, stream.opaque)
        else:
            self._forget(stream.vbucket.id, status_name(answer.status), tell=False)
            stream.done(answer.status, stream.opaque)

    def _roll_back(self, stream: ReplicaStream, seqno: int) -> None:
        """The active has another history above a seqno: go back, and ask again from there.

        The vbucket goes back to a state that it really had, at the seqno or below.
        """
        vbucket, step = stream.vbucket, stream.way_back(seqno)
        if step.undo_to is None:
            self._request(stream, step.position)
            return
        stream.machine.feed(ReplicaStreamInput.ROLLBACK_BEGAN)
        self._figures["rollbacks"] += 1
        self._rewriting.begin(
            partial(roll_back, vbucket.id, step.undo_to), partial(self._rolled_back, stream)
        )

    def _rolled_back(self, stream: ReplicaStream, failed: str | None) -> None:
        if not self._streams.has(stream):
            return
        if failed is None:
            self._request(stream)
        else:
            _log.error("%s: vbucket %d: %s", self._host.peer, stream.vbucket.id, failed)
            self._forget(stream.vbucket.id, failed, tell=False)
            stream.done(Status.EINTERNAL, stream.opaque)

    def _forget(self, vbucket: int, why: str, *, tell: bool = True) -> None:
        stream = self._streams.remove(vbucket)
        self._host.release_vbucket(vbucket, self)
        was_open = stream.state is ReplicaStreamState.OPEN
        stream.machine.feed(ReplicaStreamInput.CLOSED)
        if tell and was_open:
            self.on_end(vbucket, why)

    # What is streamed.

    def _receive_request(self, frame: Frame) -> None:
        opcode = frame.opcode
        if check_request(frame, self._host, is_open=self.is_open) is not None:
            raise MalformedMessage("a stream id came to a replica")
        if opcode == DcpOpcode.NOOP:
            self._answer(frame)
            return
        request_row = _REQUESTS.get(opcode)
        if request_row is None:
            self._disconnect(f"opcode 0x{opcode:02x} is for producers, this is a replica")
            return
        shape, receive = request_row
        receive(self, frame, shape.decode(frame))

    def _stream_of(self, frame: Frame) -> ReplicaStream | None:
        """The open stream that a message belongs to; None if it was closed here."""
        if self._streams.was_closed_here(frame.opaque, frame.vbucket):
            return None
        stream = self._streams.get(frame.vbucket)
        if stream is None or stream.state is not ReplicaStreamState.OPEN:
            raise DocumentRefused(Status.DCP_STREAM_NOT_FOUND, f"no stream of vbucket {frame.vbucket}")
        if stream.opaque != frame.opaque:
            raise DocumentRefused(Status.OPAQUE_NO_MATCH, f"the stream has opaque {stream.opaque}")
        return stream

    def _receiving(self, frame: Frame) -> ReplicaStream | None:
        """Like `_stream_of`, if a stream may still write to its vbucket."""
        stream = self._stream_of(frame)
        if stream is not None:
            vbucket = stream.vbucket
            if vbucket.state not in _RECEIVING or self._host.bucket.vbuckets[vbucket.id] is not vbucket:
                self.close_stream(vbucket.id)
                raise DocumentRefused(Status.NOT_MY_VBUCKET, "the vbucket is no longer a replica")
        return stream

    def _receive_marker(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpSnapshotMarker)
        stream = self._receiving(frame)
        if stream is None:
            return
        if message.flags & MarkerFlag.CHECKPOINT:
            stream.vbucket.close_checkpoint()
        purge_seqno = message.purge_seqno
        if purge_seqno is None:
            # A backfill from the beginning lacks the deletions that the producer has purged, and does not say
            # up to where.
            is_first = message.flags & MarkerFlag.DISK and not stream.vbucket.complete_seqno
            purge_seqno = message.end if is_first else 0
        # A snapshot from a disk may begin after versions that are gone, and does not say so.
        history = message.flags & _HISTORY_IN_MEMORY == _HISTORY_IN_MEMORY
        stream.vbucket.begin_snapshot(message.start, message.end, purge_seqno, history=history)
        stream.marker_start, stream.marker_end = message.start, message.end
        stream.ack_at = message.end if message.flags & MarkerFlag.ACK else 0

    def _receive_change(self, frame: Frame, message: Message) -> None:
        check_change(message)
        stream = self._receiving(frame)
        if stream is None:
            return
        seqno = seqno_of(message)
        stream.check_seqno(seqno, stream.marker_start)
        self._host.receive_change(stream.vbucket, frame, collections=Feature.COLLECTIONS in self._features)
        self._figures["received_changes"] += 1
        self._reached(stream, seqno)

    def _receive_sync_write(self, frame: Frame, message: Message) -> None:
        """A prepare, commit or abort; if the producer refused to send them, none is expected."""
        (self._receive_change if self._controls.sync_writes else self._receive_unasked)(frame, message)

    def _receive_unasked(self, frame: Frame, message: Message) -> None:
        """What a producer sends only on request; it must still belong to a stream."""
        status = UNASKED[type(message)]
        if self._stream_of(frame) is not None and status is not None:
            raise DocumentRefused(status, "this was not asked for")

    def _receive_advanced(self, frame: Frame, message: Message) -> None:
        """The change with this seqno is not for us; if it is the last of its snapshot, that is complete."""
        assert isinstance(message, DcpSeqnoAdvanced)
        stream = self._receiving(frame)
        if stream is None:
            return
        seqno = message.by_seqno
        stream.check_seqno(seqno, stream.vbucket.high_seqno + 1)
        if seqno == stream.marker_end:
            stream.vbucket.end_snapshot()
        self._reached(stream, seqno)

    def _reached(self, stream: ReplicaStream, seqno: int) -> None:
        """The stream has reached a seqno: the end of a snapshot may want an answer."""
        if seqno == stream.ack_at:
            stream.ack_at = 0
            self._send(Response(opcode=DcpOpcode.SNAPSHOT_MARKER, opaque=stream.opaque))
        if seqno == stream.marker_end:
            self._tell_prepared(stream)

    def _tell_prepared(self, stream: ReplicaStream) -> None:
        """Tell the active which durable writes are here."""

        def tell(message: Message) -> None:
            if not self._is_closed and self._streams.has(stream):
                self._send(message)
                self._wake()

        if self._controls.sync_writes:
            stream.tell_prepared(tell)

    def _receive_state(self, frame: Frame, message: Message) -> None:
        """A takeover: the vbucket gets the state that the producer says, keeping its branch."""
        assert isinstance(message, DcpSetVBucketState)
        stream = self._receiving(frame)
        if stream is None:
            return
        if not stream.flags & AddStreamFlag.TAKE_OVER:
            raise DocumentRefused(Status.EINVAL, "the stream is not a takeover")

        def done(failed: str | None) -> None:
            self._answer(frame, Status.SUCCESS if failed is None else Status.ETMPFAIL)

        self._rewriting.begin(partial(_take_over, frame.vbucket, message.state), done)

    def _receive_end(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpStreamEnd)
        if self._streams.was_closed_here(frame.opaque, frame.vbucket):
            self._streams.forget_closed(frame.opaque)
            return
        stream = self._streams.get(frame.vbucket)
        if stream is None:
            raise DocumentRefused(Status.DCP_STREAM_NOT_FOUND, f"no stream of vbucket {frame.vbucket}")
        if stream.opaque == frame.opaque:
            known = message.status in StreamEndStatus.__members__.values()
            why = StreamEndStatus(message.status).name.lower() if known else str(message.status)
            self._forget(frame.vbucket, why)

    # Answers that come.

    def _receive_answer(self, frame: Frame) -> None:
        if frame.opcode == DcpOpcode.CONTROL:
            self._control_answered(frame)
        elif frame.opcode == DcpOpcode.STREAM_REQUEST:
            self._request_answered(frame)
        elif frame.opcode == DcpOpcode.CLOSE_STREAM:
            if frame.status != Status.SUCCESS:
                self._streams.forget_closed(frame.opaque)  # no stream end will come
        elif frame.opcode != DcpOpcode.BUFFER_ACK:
            self._disconnect(f"an answer to opcode 0x{frame.opcode:02x}, which was not sent")

    # Flow control.

    def _count(self, size: int) -> None:
        self._figures["received_bytes"] += size
        if self._window.processed(size):
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Make room for more, unless the disk can't keep up with what came."""
        if self._host.memory_is_short():
            self._window.postpone(self._now)
            return
        while count := self._window.take(self._now):
            self._send(DcpBufferAck(acked_bytes=count))

    # Sending.

    def _send(self, message: Message) -> None:
        self._out.append(message.encode())

    def _answer(self, frame: Frame, status: int = Status.SUCCESS) -> None:
        if not self._controls.v7_status_codes:
            status = _BEFORE_V7.get(status, status)
        self._send(Response(opcode=frame.opcode, opaque=frame.opaque, status=status))


def roll_back(number: int, seqno: int, bucket: Bucket) -> list[int]:
    """A replica follows its active back to a seqno."""
    bucket.rollback({number: seqno}, branch=False)
    return [number]


def _take_over(number: int, state: int, bucket: Bucket) -> list[int]:
    bucket.set_state(number, state, takeover=True)
    return [number]


_REQUESTS: Mapping[int, tuple[type[Message], Callable[[DcpReplica, Frame, Message], None]]] = {
    DcpOpcode.OPEN: (DcpOpen, DcpReplica._receive_open),
    DcpOpcode.ADD_STREAM: (DcpAddStream, DcpReplica._receive_add_stream),
    DcpOpcode.CLOSE_STREAM: (DcpCloseStream, DcpReplica._receive_close_stream),
    DcpOpcode.SNAPSHOT_MARKER: (DcpSnapshotMarker, DcpReplica._receive_marker),
    DcpOpcode.MUTATION: (DcpMutation, DcpReplica._receive_change),
    DcpOpcode.DELETION: (DcpDeletion, DcpReplica._receive_change),
    DcpOpcode.EXPIRATION: (DcpExpiration, DcpReplica._receive_change),
    DcpOpcode.SYSTEM_EVENT: (DcpSystemEvent, DcpReplica._receive_change),
    **{shape.OPCODE: (shape, DcpReplica._receive_sync_write) for shape in SYNC_WRITES},
    DcpOpcode.SEQNO_ADVANCED: (DcpSeqnoAdvanced, DcpReplica._receive_advanced),
    DcpOpcode.SET_VBUCKET_STATE: (DcpSetVBucketState, DcpReplica._receive_state),
    DcpOpcode.STREAM_END: (DcpStreamEnd, DcpReplica._receive_end),
    **{shape.OPCODE: (shape, DcpReplica._receive_unasked) for shape in UNASKED if shape not in SYNC_WRITES},
}
