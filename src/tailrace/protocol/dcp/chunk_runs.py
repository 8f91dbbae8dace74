"""The runs of a received chunk: control frames and stretches of changes, checked against their streams.

Nothing counts before all of a chunk is good: without `ChunkRuns.commit` the streams go back to where they
were. `delivery` finds the runs, on whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...columns.scanner import ScannedFrames
from ...errors import MalformedMessage, RemoteProtocolError, UsageError
from ...history import FailoverLog
from ...model import MAX_SEQNO, Position, SnapshotRange
from ...wire.codes import DcpOpcode, Magic, MarkerFlag, OsoFlag, Status, StreamEndStatus
from ...wire.dcp import (
    DcpOsoSnapshot,
    DcpSeqnoAdvanced,
    DcpSnapshotMarker,
    DcpStreamEnd,
    DcpStreamRequestResponse,
)
from ...wire.dialect import DCP
from ...wire.header import HEADER_SIZE, Frame
from ...wire.message import Direction
from ..states import ReaderStreamInput, ReaderStreamState
from .reader_stream import (
    Carried,
    MarkerReceived,
    OsoReceived,
    ReaderStream,
    RequestRefused,
    SnapshotRun,
    StreamEnded,
    StreamEvent,
    StreamOpened,
    VBucketFlushed,
)
from .receive_buffer import ReceiveBlock

__all__ = ["ChunkRuns", "ReceivedChunk"]

_PLAIN_MAGICS = (Magic.REQUEST, Magic.RESPONSE)
# plain numbers: with members of enums it takes twice as long, which counts with a thousand vbuckets
_ANSWERS = int(Magic.RESPONSE), int(Magic.FLEX_RESPONSE)
_STREAM_REQUEST, _CLOSE_STREAM = int(DcpOpcode.STREAM_REQUEST), int(DcpOpcode.CLOSE_STREAM)
_STREAM_END, _FLUSH, _OSO = int(DcpOpcode.STREAM_END), int(DcpOpcode.FLUSH), int(DcpOpcode.OSO_SNAPSHOT)
_END = DcpStreamEnd.LAYOUTS[0].struct
_SUCCESS, _ACK = int(Status.SUCCESS), int(MarkerFlag.ACK)


@dataclass(slots=True, eq=False)
class ReceivedChunk:
    """Received frames that have not been looked at yet, except those that can't wait."""

    frames: ScannedFrames
    block: ReceiveBlock
    headers: NDArray[np.void]
    """Of the control frames."""
    ordered: NDArray[np.bool_]
    """Which control frames belong to streams, and so have a place among the changes."""
    size_bytes: int
    """What flow control counts."""


class ChunkRuns:
    """The runs of a chunk, made in the order of their streams, in a ``with`` that ends with `commit`."""

    def __init__(self, chunk: ReceivedChunk, streams: Mapping[int, ReaderStream], retired: set[int]) -> None:
        self._streams = streams
        self._retired = retired
        self._data = chunk.frames.data.data
        headers = chunk.headers
        self._magics, self._opcodes, self._extras, self._vbuckets, self._sizes = (
            headers[name].tolist() for name in ("magic", "opcode", "extras_length", "vbucket", "body_length")
        )
        # without a key, a CAS, framing extras or a datatype, as nearly all are: no message is made of those
        unmarked = (headers["key_length"] == 0) & (headers["datatype"] == 0) & (headers["cas"] == 0)
        self._is_plain = (unmarked & np.isin(headers["magic"], _PLAIN_MAGICS)).tolist()
        self._starts = chunk.frames.control_start.tolist()
        self._known: dict[int, ReaderStream | None] = {}
        self._before: list[tuple[Any, ...]] = []
        """The streams as they were."""
        self.runs: list[SnapshotRun] = []
        self.happened: list[tuple[int, StreamEvent]] = []
        self.finished: list[int] = []
        self.acknowledged: list[int] = []
        self._falls: dict[int, str] = {}
        self._extremes: list[tuple[int, int]] = []
        self._number = -1

    def __enter__(self) -> ChunkRuns:
        return self

    def __exit__(self, *_: object) -> None:
        for stream, *fields, state in self._before:
            stream.position, stream.marker, stream.log, stream.purge_seqno = fields[:4]
            stream.undo_to, stream.answer_at, stream.oso_high = fields[4:]
            stream.machine.undo(state)

    def commit(self) -> None:
        """Everything was good: the streams stay where the chunk ends."""
        self._before.clear()

    def fall(
        self,
        falls: Mapping[int, int],
        seqno: NDArray[np.uint64],
        at_least: NDArray[np.uint64],
        starts: NDArray[np.intp],
    ) -> None:
        """The seqnos of some runs don't rise: by a run's number, the item before one that falls.

        Messages that are not items have seqno 0, and the highest one in ``at_least``.
        """
        self._falls = {run: f"item {seqno[at + 1]} follows item {seqno[at]}" for run, at in falls.items()}
        lowest, highest = np.minimum.reduceat(at_least, starts), np.maximum.reduceat(seqno, starts)
        self._extremes = list(zip(lowest.tolist(), highest.tolist(), strict=True))

    def add(  # noqa: PLR0917
        self, ordered: list[int], opaque: int, control: int, items: int, first: int, last: int, at: int
    ) -> int:
        """Add a run; returns its number, or -1 if its changes are to be skipped."""
        self._number += 1
        if control >= 0 and not items and self._answers_closing(ordered[control]):
            return -1  # it may come after the end of the stream, when the opaque is no longer known
        stream = self._known[opaque] if opaque in self._known else self._find(opaque)
        if control >= 0:
            self._control(ordered[control], opaque, stream, at)
        if not items or stream is None:
            return -1
        if stream.oso_high is not None and stream.log is not None and stream.is_open:
            lowest, highest = self._extremes[self._number] if self._extremes else (first, last)
            everything = SnapshotRange(0, MAX_SEQNO)
            for seqno in (lowest, highest):
                stream.position.received(everything, seqno)  # says what is wrong
            stream.oso_high = max(stream.oso_high, highest)
            snapshot = SnapshotRange(stream.position.seqno, MAX_SEQNO)
            self.runs.append(SnapshotRun(stream, stream.position, snapshot, stream.log, is_oso=True))
            return len(self.runs) - 1
        if self._number in self._falls:
            raise MalformedMessage(self._falls[self._number], Status.ERANGE)
        if stream.marker is None or stream.log is None or not stream.is_open:
            raise MalformedMessage(f"item {first} of vbucket {stream.vbucket} comes before a snapshot marker")
        if first <= stream.position.seqno or first < stream.marker.start:
            stream.position.received(stream.marker, first)  # says what is wrong
        snapshot = stream.position.snapshot_of(stream.marker)
        self.runs.append(SnapshotRun(stream, stream.position, snapshot, stream.log))
        stream.position = stream.position.received(stream.marker, last)
        if stream.answer_at is not None and last >= stream.answer_at:
            self.acknowledged.append(opaque)
            stream.answer_at = None
        return len(self.runs) - 1

    def carried(
        self, controls: NDArray[np.intp], numbers: NDArray[np.int32], wire_index: NDArray[np.intp]
    ) -> None:
        """Add messages that have a seqno of their own."""
        for control, number, at in zip(controls.tolist(), numbers.tolist(), wire_index.tolist(), strict=True):
            if number < 0:
                continue
            run = self.runs[number]
            message: Any = DCP.decode(self._frame(control), Direction.TO_RECEIVER)
            if message.vbucket != run.stream.vbucket:
                raise RemoteProtocolError(f"{message.name()} of another vbucket than its stream's")
            if run.is_oso and isinstance(message, DcpSeqnoAdvanced):
                continue  # it counts when the snapshot is complete
            self.happened.append((at, Carried(run.stream, message, run)))

    def _find(self, opaque: int) -> ReaderStream | None:
        stream = self._known[opaque] = self._streams.get(opaque)
        if stream is not None:
            self._before.append(
                (
                    stream,
                    stream.position,
                    stream.marker,
                    stream.log,
                    stream.purge_seqno,
                    stream.undo_to,
                    stream.answer_at,
                    stream.oso_high,
                    stream.machine.state,
                )
            )
        elif opaque not in self._retired:
            raise RemoteProtocolError(f"a message with opaque 0x{opaque:x}, which no stream of ours has")
        return stream

    def _is_answer(self, control: int) -> bool:
        return self._magics[control] in _ANSWERS

    def _answers_closing(self, control: int) -> bool:
        """Whether it is the answer to closing a stream, which says nothing."""
        return self._is_answer(control) and self._opcodes[control] == _CLOSE_STREAM

    def _frame(self, control: int) -> Frame:
        return Frame.parse(self._data, self._starts[control])

    def _control(self, control: int, opaque: int, stream: ReaderStream | None, at: int) -> None:
        """A control frame of a stream; ``stream`` is None if we closed the stream and don't care any more."""
        opcode = self._opcodes[control]
        if self._is_answer(control):
            if opcode == _STREAM_REQUEST:
                if stream is not None:
                    self._answered(control, opaque, stream, at)
                elif self._vbuckets[control] != _SUCCESS:  # an answer has its status there
                    self.finished.append(opaque)
            return
        if stream is not None and not stream.is_open:
            raise RemoteProtocolError(
                f"a message of vbucket {stream.vbucket}, whose stream is closed (opcode 0x{opcode:02x})"
            )
        if opcode == _STREAM_END:
            status = self._end_status(control)
            self.finished.append(opaque)
            if stream is not None:
                self._check_vbucket(self._vbuckets[control], stream)
                if stream.oso_high is not None and status == StreamEndStatus.OK:
                    raise RemoteProtocolError("a stream comes to its end inside an out of order snapshot")
                self.happened.append((at, StreamEnded(stream, status)))
                stream.machine.feed(ReaderStreamInput.ENDED)
        elif stream is not None and opcode == _FLUSH:
            self.happened.append((at, VBucketFlushed(stream)))
            stream.position, stream.marker, stream.answer_at = Position.BEGINNING, None, None
            stream.machine.feed(ReaderStreamInput.FLUSHED)
        elif stream is not None and opcode == _OSO:
            self._oso(DcpOsoSnapshot.decode(self._frame(control)), stream, at)
        elif stream is not None:
            self._marker(control, stream, at)

    def _oso(self, message: DcpOsoSnapshot, stream: ReaderStream, at: int) -> None:
        """An out of order snapshot begins or is complete: docs/spec/dcp.md#oso-snapshot."""
        self._check_vbucket(message.vbucket, stream)
        begins, before = message.flags == OsoFlag.START, stream.position.seqno
        if begins == (stream.oso_high is not None):
            raise RemoteProtocolError("an out of order snapshot begins or ends in the wrong place")
        stream.marker = None
        if begins:
            stream.oso_high = 0
            self.happened.append((at, MarkerReceived(stream, before, MAX_SEQNO, int(MarkerFlag.DISK))))
            return
        stream.position = Position.at(stream.position.vb_uuid, max(stream.oso_high or 0, before))
        stream.oso_high = None
        self.happened.append((at, OsoReceived(stream, stream.position)))

    def _marker(self, control: int, stream: ReaderStream, at: int) -> None:
        if stream.oso_high is not None:
            raise RemoteProtocolError("a snapshot marker inside an out of order snapshot")
        fields = None
        if self._is_plain[control]:
            fields = DcpSnapshotMarker.read_range(self._body(control), self._extras[control])
        if fields is None:
            marker = DcpSnapshotMarker.decode(self._frame(control))
            fields = marker.start, marker.end, marker.flags, marker.purge_seqno
        start, end, flags, purge_seqno = fields
        self._check_vbucket(self._vbuckets[control], stream)
        stream.marker = stream.position.received_marker(start, end)
        if purge_seqno is not None:
            if purge_seqno > MAX_SEQNO:
                raise RemoteProtocolError(f"a purge up to {purge_seqno} is beyond all seqnos")
            stream.purge_seqno = purge_seqno
        if flags & _ACK:
            stream.answer_at = end
        self.happened.append((at, MarkerReceived(stream, start, end, flags)))

    def _end_status(self, control: int) -> int:
        """Why a stream ended."""
        body = self._body(control)
        if self._is_plain[control] and self._extras[control] == len(body) == _END.size:
            return int(_END.unpack(body)[0])
        return DcpStreamEnd.decode(self._frame(control)).status

    def _body(self, control: int) -> memoryview:
        start = self._starts[control] + HEADER_SIZE
        return self._data[start : start + self._sizes[control]]

    def _answered(self, control: int, opaque: int, stream: ReaderStream, at: int) -> None:
        if stream.machine.state is not ReaderStreamState.REQUESTED:
            raise RemoteProtocolError(f"the stream request of vbucket {stream.vbucket} is answered twice")
        is_accepted = self._vbuckets[control] == _SUCCESS  # an answer has its status there
        if is_accepted and self._is_plain[control] and not self._extras[control]:
            log = bytes(self._body(control))
        else:
            answer = DcpStreamRequestResponse.decode(self._frame(control))
            log = answer.value
            if not is_accepted:
                self.finished.append(opaque)
                self.happened.append((at, RequestRefused(stream, answer.status, answer.value)))
                stream.machine.feed(ReaderStreamInput.REFUSED)
                return
        try:
            stream.log = FailoverLog.from_bytes(log)
        except UsageError as error:
            raise MalformedMessage(str(error)) from None
        stream.position = stream.position.on_branch(stream.log.newest.vb_uuid)
        stream.marker = stream.answer_at = None
        stream.machine.feed(ReaderStreamInput.ACCEPTED)
        self.happened.append((at, StreamOpened(stream, stream.position, stream.undo_to)))
        stream.undo_to = None

    @staticmethod
    def _check_vbucket(vbucket: int, stream: ReaderStream) -> None:
        if vbucket != stream.vbucket:
            raise RemoteProtocolError(
                f"a message of vbucket {vbucket} in the stream of vbucket {stream.vbucket}"
            )
