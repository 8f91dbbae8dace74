"""A connection of UPR draft A or B, seen by the producer: two requests, and streams.

The drafts have neither Open nor flow control: the first request binds the connection, and the limit is what
the transport takes. A stream can only be closed with the connection, and nothing that the producer sends is
ever answered.

Rules: docs/spec/upr.md#draft-a, docs/spec/upr.md#draft-b.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from ...errors import MalformedMessage
from ...history import upr_rollback_seqno
from ...wire.codes import Magic, Status, StreamEndStatus, VBucketState
from ...wire.dialect import UPR_A, UPR_B, Dialect
from ...wire.header import Frame
from ...wire.message import Direction
from ...wire.upr import (
    UprAFailoverLog,
    UprAFailoverLogRequest,
    UprANotMyVBucket,
    UprAOk,
    UprARollback,
    UprAStreamRequest,
    UprBFailoverLogRequest,
    UprBStreamRequest,
)
from ..dcp.reframing import older_options
from ..dcp.stream_producer import StreamProducer
from ..dcp.stream_request import Accepted, StreamRefused
from ..handler import Host
from ..states import ConnectionInput, ConnectionState
from ..stream_filter import StreamFilter, StreamValue
from .producer_stream import UprAMessages, UprBMessages, UprMessages, UprStream

if TYPE_CHECKING:
    from ...store.base import VBucket

__all__ = ["UprAProducer", "UprBProducer"]

_READABLE = (VBucketState.ACTIVE, VBucketState.REPLICA)

_log = logging.getLogger(__name__)


class _UprProducer(StreamProducer):
    """What the drafts have in common; a `protocol.handler.Handler`."""

    DIALECT: ClassVar[Dialect]
    MESSAGES: ClassVar[type[UprMessages]]
    HAS_DATATYPE: ClassVar[bool]

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        options, self._datatypes = older_options(host.features, has_datatype=self.HAS_DATATYPE)
        super().__init__(host, wake, now, options)
        self._machine.feed(ConnectionInput.OPENED)

    # The handler's interface.

    def receive_frame(self, frame: Frame, now: float) -> None:
        self._now = now
        if self._machine.state is ConnectionState.CLOSED:
            return
        if frame.magic != Magic.REQUEST:
            self._disconnect(f"magic 0x{frame.magic:02x} came, where only requests are sent")
            return
        try:
            request = self.DIALECT.decode(frame, Direction.TO_PRODUCER)
        except MalformedMessage as error:
            _log.info("%s: refused opcode 0x%02x: %s", self._host.peer, frame.opcode, error)
            self._answer(frame, error.status)
            return
        try:
            if isinstance(request, UprAStreamRequest | UprBStreamRequest):
                self._open_stream(request)
                return
            if isinstance(request, UprAFailoverLogRequest | UprBFailoverLogRequest):
                log = _readable(self._host, request.vbucket).failover_log
                self._answer_failover_log(frame, log.to_bytes())
                return
        except StreamRefused as refused:
            self._refuse(frame, refused)
            return
        self._answer(frame, Status.EINVAL)
        self._disconnect(f"opcode 0x{frame.opcode:02x} is not of {self.DIALECT.name}")

    def next_timer(self) -> float | None:
        return self._next_backfill_timer()

    def handle_timer(self, now: float) -> None:
        self._now = now
        if self._machine.state is ConnectionState.OPEN:
            self._look_for_stalled_backfills(now)

    def stats(self) -> Mapping[str, int | str]:
        figures: dict[str, int | str] = {
            "type": "producer",
            "dialect": self.DIALECT.name,
            "state": self._machine.state.value,
            "total_bytes_sent": self._sent_bytes,
            "num_streams": len(self._streams),
            "num_backfills": len(self._slots),
        }
        for (vbucket, _), stream in self._streams.items():
            figures.update((f"stream_{vbucket}_{name}", value) for name, value in stream.stats().items())
        return figures

    # Requests.

    def _open_stream(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        """Start a stream, if it may. The rule of both drafts is docs/spec/upr.md#rollback."""
        host = self._host
        vbucket = _readable(host, request.vbucket)
        self._check(request)
        try:
            filter_ = StreamFilter.make(StreamValue(), host.bucket.manifest, collections=False)
        except MalformedMessage as error:
            raise StreamRefused(Status(error.status)) from None
        rollback_to = upr_rollback_seqno(
            request.start_seqno,
            request.vb_uuid,
            vbucket.failover_log,
            high_seqno=vbucket.high_seqno,
            purge_seqno=vbucket.purge_seqno,
        )
        if rollback_to is not None:
            raise StreamRefused(Status.ROLLBACK, rollback_to)
        if host.backfills_wait():
            raise StreamRefused(Status.ENOMEM)
        if vbucket.state == VBucketState.REPLICA and not vbucket.complete_seqno and vbucket.received.end:
            raise StreamRefused(Status.ETMPFAIL)
        self._answer_ok(request)
        start = request.start_seqno
        accepted = Accepted(vbucket, request.opaque, 0, 0, start, request.end_seqno, start, 0, filter_)
        self._forget((vbucket.id, 0))
        stream = UprStream(
            accepted,
            self._options,
            host,
            self._slots,
            self._stream_ready,
            self.MESSAGES,
            self._datatypes,
            request.key,
        )
        self._streams[vbucket.id, 0] = stream
        stream.start()

    def _live_stream(self, vbucket: int) -> UprStream | None:
        stream = self._streams.get((vbucket, 0))
        assert stream is None or isinstance(stream, UprStream)
        return stream if stream is not None and stream.is_live else None

    # Where the drafts differ.

    def _check(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        """The draft's own rules about a stream request."""
        raise NotImplementedError

    def _answer_ok(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        raise NotImplementedError

    def _answer_failover_log(self, frame: Frame, log: bytes) -> None:
        raise NotImplementedError

    def _refuse(self, frame: Frame, refused: StreamRefused) -> None:
        raise NotImplementedError


class UprAProducer(_UprProducer):
    """Draft A. It has three answers: OK, rollback and, for everything else, not my vbucket."""

    DIALECT = UPR_A
    MESSAGES = UprAMessages
    HAS_DATATYPE = False

    def _check(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        # There is no answer that says "you have that stream", and no way to close one: the new one counts.
        if (stream := self._live_stream(request.vbucket)) is not None:
            stream.end(StreamEndStatus.CLOSED, tell=False)

    def _answer_ok(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        self._answers.append(UprAOk(vbucket=request.vbucket, opaque=request.opaque).encode())

    def _answer_failover_log(self, frame: Frame, log: bytes) -> None:
        self._answers.append(UprAFailoverLog(vbucket=frame.vbucket, opaque=frame.opaque, value=log).encode())

    def _refuse(self, frame: Frame, refused: StreamRefused) -> None:
        answer: UprARollback | UprANotMyVBucket
        if refused.rollback_to is None:
            answer = UprANotMyVBucket(vbucket=frame.vbucket, opaque=frame.opaque)
        else:
            value = refused.rollback_to.to_bytes(8, "big")
            answer = UprARollback(vbucket=frame.vbucket, opaque=frame.opaque, value=value)
        self._answers.append(answer.encode())


class UprBProducer(_UprProducer):
    """Draft B: answers have a status."""

    DIALECT = UPR_B
    MESSAGES = UprBMessages
    HAS_DATATYPE = True

    def _check(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        if isinstance(request, UprBStreamRequest) and request.stream_flags:
            raise StreamRefused(Status.EINVAL)
        if self._live_stream(request.vbucket) is not None:
            raise StreamRefused(Status.KEY_EEXISTS)

    def _answer_ok(self, request: UprAStreamRequest | UprBStreamRequest) -> None:
        self._answer(request.to_frame())

    def _answer_failover_log(self, frame: Frame, log: bytes) -> None:
        self._answer(frame, value=log)

    def _refuse(self, frame: Frame, refused: StreamRefused) -> None:
        if refused.rollback_to is not None:
            self._log_rollback(frame.vbucket, refused.rollback_to)
            self._answer(frame, Status.ROLLBACK, refused.rollback_to.to_bytes(8, "big"))
        elif refused.status == Status.NOT_MY_VBUCKET:
            self._not_my_vbucket(frame)
        else:
            self._answer(frame, refused.status)


def _readable(host: Host, number: int) -> VBucket:
    """A vbucket that can be streamed."""
    vbuckets = host.bucket.vbuckets
    vbucket = vbuckets[number] if number < len(vbuckets) else None
    if vbucket is None or vbucket.state not in _READABLE or host.is_former_active(number):
        raise StreamRefused(Status.NOT_MY_VBUCKET)
    return vbucket
