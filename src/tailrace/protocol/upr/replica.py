"""A UPR connection, draft A or B, seen by the replica: the node has dialled the producer itself.

Messages are translated into DCP (`translation`), and the rest is `DcpReplica`: the same streams, the same way
back after a rollback, the same checks. A snapshot becomes part of the vbucket when its end has come; if it is
too large to be held back, its beginning is stored as part of an incomplete snapshot.

The drafts lack some things. There is no window, so nothing is read while the disk does not keep up; the
producer sends no no-ops, so a silent one is asked for a sign of life; what is pushed is not answered, so what
can't be taken ends the connection; and a stream can only be closed with its connection.

Rules: docs/spec/upr.md#consistency.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ...model import Position
from ...wire.admin import Noop
from ...wire.codes import AddStreamFlag, DcpOpcode, Op, Status
from ...wire.framing import Framer
from ...wire.header import MAX_FRAME, Frame
from ..dcp.replica import DcpReplica, roll_back
from ..dcp.replica_stream import ReplicaStream
from ..states import ConnectionInput, ReplicaStreamInput
from .translation import UprATranslation, UprBTranslation, UprTranslation

if TYPE_CHECKING:
    from ..handler import Host

__all__ = ["UprAReplica", "UprBReplica", "UprReplica"]

LOOK_AGAIN_S = 0.05
"""How soon to look again whether the disk has kept up."""
_NOOP_OPAQUE = 0
_GROWTH = 64
"""A change is a little longer in DCP."""


class UprReplica(DcpReplica):
    """What the drafts have in common."""

    TRANSLATION: ClassVar[type[UprTranslation]]

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        self._made = bytearray()
        self._framer = Framer(MAX_FRAME + _GROWTH)
        self._held_up_at: float | None = None
        group = f"tailrace-replication:{host.own_name}"
        self._upr = self.TRANSLATION(
            self._made, self._append, self._new_opaque, group=group, for_replica=True
        )
        super().__init__(host, wake, now, dialled=True)

    def _append(self, data: bytes) -> None:
        self._out.append(data)

    def _new_opaque(self) -> int:
        return self._streams.new_opaque()

    def _begin(self) -> None:
        """The connection is open; there is nothing to agree on."""
        self._machine.feed(ConnectionInput.OPENED)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or self._held_up_at is not None

    # what comes

    def receive_frame(self, frame: Frame, now: float) -> None:
        if self.close_requested is not None:
            return
        self._silence.heard(now)
        self._silence.answered()
        if frame.opcode != Op.NOOP:
            self._upr.receive(frame)
            self._take(now)

    def _take(self, now: float) -> None:
        """Take what was translated into DCP, as far as nothing has to wait for the disk."""
        self._framer.feed(self._made)
        self._made.clear()
        while not self.is_busy and (frame := self._framer.maybe_frame()) is not None:
            super().receive_frame(frame, now)

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        self._take(self._now)
        return super().data_to_send(max_bytes)

    def _receive_request(self, frame: Frame) -> None:
        if frame.opcode == DcpOpcode.FLUSH:
            self._flush(frame)
        elif frame.opcode != DcpOpcode.SET_VBUCKET_STATE or self._is_taken_over(frame.vbucket):
            super()._receive_request(frame)

    def _is_taken_over(self, vbucket: int) -> bool:
        stream = self._streams.get(vbucket)
        return stream is not None and bool(stream.flags & AddStreamFlag.TAKE_OVER)

    def _flush(self, frame: Frame) -> None:
        """Everything is gone; the stream goes on with a new branch, whose log comes like an answer."""
        stream = self._receiving(frame)
        assert stream is not None  # none is closed while its connection lives
        stream.machine.feed(ReplicaStreamInput.ROLLBACK_BEGAN)
        stream.marker_end = 0
        stream.sent = Position.BEGINNING
        self._rewriting.begin(partial(roll_back, stream.vbucket.id, 0), partial(self._flushed, stream))

    def _flushed(self, stream: ReplicaStream, failed: str | None) -> None:
        if failed is not None:
            self._disconnect(f"vbucket {stream.vbucket.id}: {failed}")
        elif self._streams.has(stream):
            stream.machine.feed(ReplicaStreamInput.ASKED)

    # what is asked for

    def _request(self, stream: ReplicaStream, position: Position | None = None) -> None:
        stream.ask_from(position)
        self._upr.request(stream.opaque, stream.vbucket.id, stream.sent, stream.vbucket.failover_log)
        self._wake()

    def close_stream(self, vbucket: int) -> bool:
        stream = self._streams.get(vbucket)
        if stream is None:
            return False
        self._forget(vbucket, "closed")
        self._disconnect("a stream of the drafts can be closed with its connection only")
        return True

    def _answer(self, frame: Frame, status: int = Status.SUCCESS) -> None:
        if status != Status.SUCCESS:
            self._disconnect(f"opcode 0x{frame.opcode:02x} was refused with status 0x{status:02x}")

    # time and room

    def _acknowledge(self) -> None:
        """Send nothing; but if the disk can't keep up with what came, take nothing more."""
        if self._host.memory_is_short():
            self._held_up_at = self._now
            self._window.postpone(self._now)
        else:
            self._held_up_at = None
            self._window.take(self._now)

    def next_timer(self) -> float | None:
        interval_s = self._host.settings.replication_noop_interval
        timers = [super().next_timer(), self._silence.next_timer(None, interval_s)]
        if self._held_up_at is not None:
            timers.append(self._held_up_at + LOOK_AGAIN_S)
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, now: float) -> None:
        if self._held_up_at is not None and now >= self._held_up_at + LOOK_AGAIN_S:
            self._now = now
            self._silence.heard(now)  # the producer is not being read
            self._acknowledge()
            self._wake()
        super().handle_timer(now)
        if self._silence.must_ask(now, self._host.settings.replication_noop_interval):
            self._send(Noop(opaque=_NOOP_OPAQUE))
            self._wake()


class UprAReplica(UprReplica):
    """Draft A."""

    TRANSLATION = UprATranslation


class UprBReplica(UprReplica):
    """Draft B."""

    TRANSLATION = UprBTranslation
