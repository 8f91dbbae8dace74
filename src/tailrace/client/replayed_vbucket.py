"""Which part of a recording a stream request gets.

A recording has a list of exchanges for each vbucket: a request, its answer and what followed. A reader that
asks what the recorded reader asked gets them in turn, byte for byte. One that comes back, after a lost
connection or in another run, asks what no recorded request asked: it gets the rest of the exchange that it is
in. Where a recorded stream has no end, or only because its reader closed it, one is made up if this reader
waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..errors import FramingError, UsageError
from ..history import FailoverLog, rollback_seqno
from ..model import Position
from ..wire.codes import DcpOpcode, StreamEndStatus
from ..wire.dcp import DcpSnapshotMarker, DcpStreamEnd, DcpStreamRequest
from ..wire.fields import decode_failover_log
from ..wire.header import Frame
from .recording import Exchange, seqno_of

__all__ = ["ReplayedVBucket"]


class ReplayedVBucket:
    """The exchanges of a vbucket, as one connection gets them."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges
        self._next = 0

    def play(self, frame: Frame) -> Iterator[bytes] | None:
        """The frames for a stream request; None if nothing recorded fits."""
        asked = DcpStreamRequest.decode(frame)
        count = len(self._exchanges)
        later, earlier = range(self._next, count), range(min(self._next, count))
        number = next((n for n in later if _place(self._exchanges[n].request) == _place(frame)), None)
        comes_back = number is None and asked.start_seqno > 0
        if comes_back:
            again = (n for n in earlier if not self._is_given_up(n))
            number = next((n for n in (*later, *again) if _has(self._exchanges[n], asked)), None)
        if number is None and self._next < count:
            number, comes_back = self._next, False
        if number is None:
            return None
        has_more = self._next <= number < count - 1
        self._next = max(self._next, number + 1)
        exchange = self._exchanges[number]
        start_seqno = asked.start_seqno if comes_back else 0
        return _play(exchange, frame, start_seqno, asked.end_seqno, has_more=has_more)

    def _is_given_up(self, number: int) -> bool:
        """Whether the reader has been told since that a part of this exchange was taken back."""
        last_seqno = self._exchanges[number].last_seqno or 0
        since = (exchange.rollback_seqno for exchange in self._exchanges[number + 1 : self._next])
        return any(seqno is not None and seqno < last_seqno for seqno in since)


def _place(request: Frame) -> tuple[int, ...]:
    """Start and branch of a request, and the snapshot that it is in: all but flags and end."""
    asked = DcpStreamRequest.decode(request)
    return asked.start_seqno, asked.vb_uuid, asked.snapshot_start, asked.snapshot_end


def _has(exchange: Exchange, asked: DcpStreamRequest) -> bool:
    """Whether a reader could have reached this place in that exchange."""
    if not exchange.is_accepted:
        return False
    begin = DcpStreamRequest.decode(exchange.request).start_seqno
    high = exchange.last_seqno or begin
    try:
        log = FailoverLog.of(decode_failover_log(exchange.frames[0].value))
        place = Position.at(asked.vb_uuid, asked.start_seqno)
    except (FramingError, UsageError):
        return False
    return begin <= asked.start_seqno <= high and rollback_seqno(place, log, high_seqno=high) is None


def _play(
    exchange: Exchange, request: Frame, start_seqno: int, end_seqno: int, *, has_more: bool
) -> Iterator[bytes]:
    """The frames of an exchange above a seqno, and the end that the recording lacks."""
    reached, is_ended = start_seqno, not exchange.is_accepted
    had_all = start_seqno > 0 and (exchange.last_seqno or 0) <= start_seqno
    for frame in exchange.frames:
        if _is_own_close(frame) or (start_seqno and _is_known(frame, start_seqno)):
            continue
        if had_all and frame.opcode == DcpOpcode.STREAM_END:
            continue  # that is why this reader comes back
        reached = seqno_of(frame) or reached
        is_ended = is_ended or frame.opcode == DcpOpcode.STREAM_END
        yield replace(frame, opaque=request.opaque).encode()
    if is_ended:
        return
    if has_more:  # the connection was lost there: the reader asked again, and so must this one
        status = StreamEndStatus.STATE_CHANGED
    elif reached >= end_seqno:  # it was recorded without an end, or further than this reader wants
        status = StreamEndStatus.OK
    else:
        return
    yield DcpStreamEnd(status=int(status), opaque=request.opaque, vbucket=request.vbucket).encode()


def _is_own_close(frame: Frame) -> bool:
    """Whether the frame ends a stream that the recorded reader closed itself, as this one has not."""
    is_end = frame.is_request and frame.opcode == DcpOpcode.STREAM_END
    return is_end and DcpStreamEnd.decode(frame).status == StreamEndStatus.CLOSED


def _is_known(frame: Frame, seqno: int) -> bool:
    """Whether a reader at this seqno has a frame already, or has no use for it."""
    if not frame.is_request:
        return False
    if frame.opcode == DcpOpcode.SNAPSHOT_MARKER:
        return DcpSnapshotMarker.decode(frame).end <= seqno
    if frame.opcode == DcpOpcode.STREAM_END:  # where the recorded reader wanted to end
        return DcpStreamEnd.decode(frame).status == StreamEndStatus.OK
    own = seqno_of(frame)
    return own is not None and own <= seqno
