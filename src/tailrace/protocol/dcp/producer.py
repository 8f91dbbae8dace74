"""A DCP connection, seen by the producer: its requests, its controls, its liveness and its takeovers.

`stream_producer` gives the streams their turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import copy

from ...errors import MalformedMessage
from ...frames import CHUNK_BYTES
from ...wire.codes import (
    DcpOpcode,
    OpenFlag,
    Status,
    StreamEndStatus,
    status_name,
)
from ...wire.dcp import (
    DcpBufferAck,
    DcpCloseStream,
    DcpControl,
    DcpGetFailoverLog,
    DcpNoop,
    DcpOpen,
    DcpStreamRequest,
    DcpStreamRequestResponse,
)
from ...wire.dcp_replication import DcpSeqnoAcknowledged
from ...wire.header import MAX_NAME_BYTES, Frame
from ...wire.message import Message
from ..handler import Host
from ..states import ConnectionInput, ConnectionState
from .controls import BackfillOrder, ConnectionOptions
from .liveness import ProducerLiveness
from .producer_stream import ProducerStream
from .request_checks import check_request, stream_id_of
from .stream_producer import StreamProducer
from .stream_request import StreamRefused, decide, decode_request
from .takeover import DcpTakeover

__all__ = ["DcpProducer"]

# What a receiver may answer to a message of a stream without losing the connection:
# docs/spec/dcp.md#answers-that-keep-the-connection
_TOLERATED = frozenset(
    {Status.SUCCESS, Status.NOT_MY_VBUCKET, Status.DCP_STREAM_NOT_FOUND, Status.OPAQUE_NO_MATCH}
)
_TOLERATED_BEFORE_V7 = frozenset({Status.KEY_EEXISTS})
_NOT_FOUND_IS_FATAL = frozenset({DcpOpcode.COMMIT, DcpOpcode.ABORT})

_log = logging.getLogger(__name__)


class DcpProducer(StreamProducer):
    """The producer's half of a DCP connection; a `protocol.handler.Handler`."""

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        super().__init__(host, wake, now, ConnectionOptions(host.features))
        self._stream_options: ConnectionOptions | None = None
        """Shared by the streams that are opened until the next control: a copy for each would take time."""
        self._liveness = ProducerLiveness(host.settings.idle_timeout, now)

    # The handler's interface.

    def receive_frame(self, frame: Frame, now: float) -> None:
        self._now = now
        self._liveness.received(now)
        if self._machine.state is ConnectionState.CLOSED:
            return
        if not frame.is_request:
            self._receive_answer(frame)
            return
        try:
            self._receive_request(frame)
        except MalformedMessage as error:
            _log.info("%s: refused opcode 0x%02x: %s", self._host.peer, frame.opcode, error)
            self._answer(frame, error.status)

    def next_timer(self) -> float | None:
        timers = [self._liveness.next_timer(), self._next_backfill_timer()]
        timers += [takeover.next_timer(self._now) for takeover in self._open_takeovers()]
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, now: float) -> None:
        self._now = now
        if self._machine.state is not ConnectionState.OPEN:
            return
        if self._liveness.is_dead(now):
            self._disconnect("nothing was received for too long")
            return
        opaque = self._liveness.noop_due(now)
        if opaque is not None:
            self._answers.append(DcpNoop(opaque=opaque).encode())
        self._look_for_stalled_backfills(now)
        for takeover in self._open_takeovers():
            takeover.handle_timer(now)

    def _open_takeovers(self) -> list[DcpTakeover]:
        """The takeovers whose backfill is over."""
        return [
            stream.takeover
            for stream in self._takeovers
            if stream.takeover is not None and stream.is_taking_over
        ]

    def stats(self) -> Mapping[str, int | str]:
        options, window = self._options, self._window
        figures: dict[str, int | str] = {
            "type": "producer",
            "name": options.name.decode(errors="backslashreplace"),
            "state": self._machine.state.value,
            "flags": options.flags,
            "priority": options.priority,
            "noop_enabled": str(options.noop).lower(),
            "max_buffer_bytes": window.size,
            "unacked_bytes": window.outstanding,
            "total_acked_bytes": window.acknowledged_bytes,
            "total_bytes_sent": self._sent_bytes,
            "num_streams": len(self._streams),
            "num_backfills": len(self._slots),
        }
        for (vbucket, stream_id), stream in self._streams.items():
            prefix = f"stream_{vbucket}_{stream_id}_" if stream_id else f"stream_{vbucket}_"
            figures.update((prefix + name, value) for name, value in stream.stats().items())
        return figures

    # Requests.

    def _receive_request(self, frame: Frame) -> None:
        opcode = frame.opcode
        check_request(frame, self._host, is_open=self._machine.state is ConnectionState.OPEN)
        request_row = _REQUESTS.get(opcode)
        if request_row is None:
            self._disconnect(f"opcode 0x{opcode:02x} is for receivers, this is a producer")
            return
        decode, receive = request_row
        receive(self, frame, decode(frame))

    def _receive_open(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpOpen)
        if self._machine.state is not ConnectionState.NEW:
            raise MalformedMessage("the connection is open already")
        flags = OpenFlag(message.flags)
        if not flags & OpenFlag.PRODUCER:
            raise MalformedMessage("this asks for a replica")
        if len(message.key) > MAX_NAME_BYTES:
            raise MalformedMessage(f"a name has up to {MAX_NAME_BYTES} bytes")
        if flags & OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL and not self._options.collections:
            raise MalformedMessage("deletions can only be skipped with collections")
        self._machine.feed(ConnectionInput.OPENED)
        self._options.name = message.key
        self._options.flags = int(flags)
        self._host.claim_name(message.key)
        self._answer(frame)

    def _receive_control(self, frame: Frame, message: Message) -> None:
        options = self._options
        self._stream_options = None
        status = options.control(message.key, message.value)
        if status == Status.SUCCESS:
            self._liveness.enable(on=options.noop, now=self._now)
            self._liveness.interval_s = options.noop_interval_s or self._liveness.interval_s
            if options.backfill_order is BackfillOrder.SEQUENTIAL:
                self._slots.limit = 1
            else:
                self._slots.limit = max(1, self._host.settings.backfill_buffer // CHUNK_BYTES)
        self._answer(frame, status)

    def _receive_stream_request(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpStreamRequest)
        try:
            accepted = decide(message, self._options, self._host, self._has_live_stream)
        except StreamRefused as refused:
            self._refuse_stream(frame, refused)
            return
        log = accepted.vbucket.failover_log.to_bytes()
        self._answer(frame, value=log)
        self._forget((message.vbucket, accepted.stream_id))
        if self._stream_options is None:
            # as they are now: later controls are for later streams; all share the window
            self._stream_options = copy(self._options)
        stream = ProducerStream(accepted, self._stream_options, self._host, self._slots, self._stream_ready)
        self._streams[message.vbucket, accepted.stream_id] = stream
        if stream.takeover is not None:
            self._takeovers.append(stream)
        stream.start()

    def _has_live_stream(self, vbucket: int, stream_id: int) -> bool:
        stream = self._streams.get((vbucket, stream_id))
        return stream is not None and stream.is_live

    def _refuse_stream(self, frame: Frame, refused: StreamRefused) -> None:
        if refused.rollback_to is not None:
            self._log_rollback(frame.vbucket, refused.rollback_to)
            answer = DcpStreamRequestResponse.rollback(refused.rollback_to, opaque=frame.opaque)
            self._answers.append(answer.encode())
        elif refused.status == Status.NOT_MY_VBUCKET:
            self._not_my_vbucket(frame)
        elif refused.status in (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE):
            uid = self._host.bucket.manifest["uid"]
            self._answer(frame, refused.status, f'{{"manifest_uid":"{uid}"}}'.encode(), json=True)
        else:
            self._answer(frame, refused.status)

    def _receive_close_stream(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpCloseStream)
        stream_id = stream_id_of(frame)
        if (stream_id is not None) != self._options.stream_ids:
            raise MalformedMessage("a stream id is missing or not expected", Status.DCP_STREAMID_INVALID)
        stream = self._streams.get((message.vbucket, stream_id or 0))
        if stream is None or not stream.is_live:
            is_known = any(vbucket == message.vbucket for vbucket, _ in self._streams)
            wrong_id = stream is None and stream_id is not None and is_known
            self._answer(frame, Status.DCP_STREAMID_INVALID if wrong_id else Status.KEY_ENOENT)
            return
        self._answer(frame)
        stream.end(StreamEndStatus.CLOSED, tell=self._options.end_on_close)
        if stream.is_finished:
            self._forget((stream.vbucket, stream.stream_id))

    def _receive_get_failover_log(self, frame: Frame, message: Message) -> None:
        vbuckets = self._host.bucket.vbuckets
        vbucket = vbuckets[message.vbucket] if message.vbucket < len(vbuckets) else None
        if vbucket is None:
            self._not_my_vbucket(frame)
        else:
            self._answer(frame, value=vbucket.failover_log.to_bytes())

    def _receive_buffer_ack(self, frame: Frame, message: Message) -> None:
        assert isinstance(message, DcpBufferAck)
        self._window.acknowledge(message.acked_bytes)

    def _receive_seqno_acknowledged(self, frame: Frame, message: Message) -> None:
        """A replica has every prepare up to a seqno: durable writes wait for that.

        It counts only while the stream is live. Later, the replica may mean another branch, for example after
        a rewind of the vbucket.
        """
        assert isinstance(message, DcpSeqnoAcknowledged)
        if not self._options.sync_replication:
            raise MalformedMessage("sync replication was not agreed on")
        vbuckets = self._host.bucket.vbuckets
        vbucket = vbuckets[message.vbucket] if message.vbucket < len(vbuckets) else None
        if vbucket is None:
            self._not_my_vbucket(frame)
            return
        if not self._has_live_stream(vbucket.id, 0):
            return
        seqno = min(message.prepared_seqno, vbucket.high_seqno)
        self._host.replica_reached(vbucket.id, self._options.consumer_name, seqno)

    def close(self, reason: str) -> None:
        if self._options.sync_replication:
            self._host.replica_gone(self._options.consumer_name)
        super().close(reason)

    # Answers from the receiver.

    def _receive_answer(self, frame: Frame) -> None:
        opcode, status = frame.opcode, frame.status
        if opcode == DcpOpcode.NOOP:
            if status != Status.SUCCESS or not self._liveness.answered(frame.opaque):
                self._disconnect("a no-op was not answered as it must be")
            return
        if status == Status.SUCCESS:
            if opcode in (DcpOpcode.SNAPSHOT_MARKER, DcpOpcode.SET_VBUCKET_STATE):
                self._takeover_answer(frame)
            return
        tolerated = (
            status in _TOLERATED
            or (status in _TOLERATED_BEFORE_V7 and not self._options.v7_status_codes)
            or (status == Status.KEY_ENOENT and opcode not in _NOT_FOUND_IS_FATAL)
        )
        text = f"opcode 0x{opcode:02x} was answered with {status_name(status)} (0x{status:02x})"
        if tolerated:
            _log.info("%s: %s", self._host.peer, text)
        else:
            self._disconnect(text)

    def _takeover_answer(self, frame: Frame) -> None:
        for stream in self._takeovers:
            if stream.opaque == frame.opaque:
                if frame.opcode == DcpOpcode.SNAPSHOT_MARKER:
                    stream.marker_acknowledged()
                else:
                    stream.state_answered()
                return


_REQUESTS: Mapping[int, tuple[Callable[[Frame], Message], Callable[[DcpProducer, Frame, Message], None]]] = {
    DcpOpcode.OPEN: (DcpOpen.decode, DcpProducer._receive_open),
    DcpOpcode.CONTROL: (DcpControl.decode, DcpProducer._receive_control),
    DcpOpcode.STREAM_REQUEST: (decode_request, DcpProducer._receive_stream_request),
    DcpOpcode.CLOSE_STREAM: (DcpCloseStream.decode, DcpProducer._receive_close_stream),
    DcpOpcode.GET_FAILOVER_LOG: (DcpGetFailoverLog.decode, DcpProducer._receive_get_failover_log),
    DcpOpcode.BUFFER_ACK: (DcpBufferAck.decode, DcpProducer._receive_buffer_ack),
    DcpOpcode.SEQNO_ACKNOWLEDGED: (DcpSeqnoAcknowledged.decode, DcpProducer._receive_seqno_acknowledged),
}
