"""The runs of a received chunk: control frames and stretches of changes, checked against their streams.

Nothing counts before all of a chunk is good: every stream is a draft until `ChunkRuns.commit`. What finds the
runs, for whole arrays, is `delivery`.
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
from ..receive_buffer import Block
from ..states import READER_STREAM_TRANSITIONS, Machine, ReaderStreamInput, ReaderStreamState
from .received_stream import (
    Carried,
    MarkerReceived,
    OsoReceived,
    RequestRefused,
    SnapshotRun,
    Stream,
    StreamEnded,
    StreamEvent,
    StreamOpened,
    VBucketFlushed,
)

__all__ = ["ChunkRuns", "ReceivedChunk"]

_PLAIN_MAGICS = (Magic.REQUEST, Magic.RESPONSE)


@dataclass(slots=True, eq=False)
class ReceivedChunk:
    """Received frames that nobody has looked at yet, but for those that can't wait."""

    frames: ScannedFrames
    block: Block
    headers: NDArray[np.void]
    """Of the control frames."""
    ordered: NDArray[np.bool_]
    """Which control frames belong to streams, and so into the order of the changes."""
    size_bytes: int
    """What flow control counts."""


@dataclass(slots=True)
class StreamDraft:
    """A stream while a chunk is checked; nothing counts before all of the chunk is good."""

    stream: Stream
    position: Position
    marker: SnapshotRange | None
    log: FailoverLog | None
    purge_seqno: int
    undo_to: int | None
    answer_at: int | None
    oso_high: int | None
    machine: Machine[ReaderStreamState, ReaderStreamInput]

    @property
    def is_open(self) -> bool:
        return self.machine.state is ReaderStreamState.OPEN


class ChunkRuns:
    """The runs of a chunk, made in the order of their streams."""

    def __init__(self, chunk: ReceivedChunk, streams: Mapping[int, Stream], retired: set[int]) -> None:
        self._chunk = chunk
        self._streams = streams
        self._retired = retired
        self._data = chunk.frames.data.data
        headers = chunk.headers
        self._magics, self._opcodes, self._extras, self._vbuckets, self._sizes = (
            headers[name].tolist() for name in ("magic", "opcode", "extras_length", "vbucket", "body_length")
        )
        # without a key, a CAS, framing extras or a datatype, as nearly all are: those need no message made
        unmarked = (headers["key_length"] == 0) & (headers["datatype"] == 0) & (headers["cas"] == 0)
        self._is_plain = (unmarked & np.isin(headers["magic"], _PLAIN_MAGICS)).tolist()
        self._work: dict[int, StreamDraft | None] = {}
        self.runs: list[SnapshotRun] = []
        self.happened: list[tuple[int, StreamEvent]] = []
        self.finished: list[int] = []
        self.acknowledged: list[int] = []
        self._falls: dict[int, str] = {}
        self._extremes: list[tuple[int, int]] = []
        self._number = -1

    def fall(
        self,
        falls: Mapping[int, int],
        seqno: NDArray[np.uint64],
        at_least: NDArray[np.uint64],
        starts: NDArray[np.intp],
    ) -> None:
        """Some runs don't rise: for each of them, by its number, the item before one that falls.

        What is no item has seqno 0, and the highest one in ``at_least``.
        """
        self._falls = {run: f"item {seqno[at + 1]} follows item {seqno[at]}" for run, at in falls.items()}
        lowest, highest = np.minimum.reduceat(at_least, starts), np.maximum.reduceat(seqno, starts)
        self._extremes = list(zip(lowest.tolist(), highest.tolist(), strict=True))

    def add(  # noqa: PLR0917
        self, ordered: NDArray[np.intp], opaque: int, control: int, items: int, first: int, last: int, at: int
    ) -> int:
        """One run; its number, or -1 if its changes are to be passed over."""
        self._number += 1
        if control >= 0 and not items and self._answers_closing(int(ordered[control])):
            return -1  # it may come after the end of the stream, when nobody knows the opaque any more
        work = self._work[opaque] if opaque in self._work else self._find(opaque)
        if control >= 0:
            self._control(int(ordered[control]), opaque, work, at)
        if not items or work is None:
            return -1
        if work.oso_high is not None and work.log is not None and work.is_open:
            lowest, highest = self._extremes[self._number] if self._extremes else (first, last)
            everything = SnapshotRange(0, MAX_SEQNO)
            for seqno in (lowest, highest):
                work.position.received(everything, seqno)  # says what is wrong
            work.oso_high = max(work.oso_high, highest)
            snapshot = SnapshotRange(work.position.seqno, MAX_SEQNO)
            self.runs.append(SnapshotRun(work.stream, work.position, snapshot, work.log, is_oso=True))
            return len(self.runs) - 1
        if self._number in self._falls:
            raise MalformedMessage(self._falls[self._number], Status.ERANGE)
        if work.marker is None or work.log is None or not work.is_open:
            raise MalformedMessage(
                f"item {first} of vbucket {work.stream.vbucket} comes before a snapshot marker"
            )
        if first <= work.position.seqno or first < work.marker.start:
            work.position.received(work.marker, first)  # says what is wrong
        snapshot = work.position.snapshot_of(work.marker)
        self.runs.append(SnapshotRun(work.stream, work.position, snapshot, work.log))
        work.position = work.position.received(work.marker, last)
        if work.answer_at is not None and last >= work.answer_at:
            self.acknowledged.append(opaque)
            work.answer_at = None
        return len(self.runs) - 1

    def carried(
        self, controls: NDArray[np.intp], numbers: NDArray[np.int32], wire_index: NDArray[np.intp]
    ) -> None:
        """Messages that have a seqno of their own."""
        for control, number, at in zip(controls.tolist(), numbers.tolist(), wire_index.tolist(), strict=True):
            if number < 0:
                continue
            run = self.runs[number]
            message: Any = DCP.decode(self._frame(control), Direction.TO_RECEIVER)
            if message.vbucket != run.stream.vbucket:
                raise RemoteProtocolError(f"{message.name()} of another vbucket than its stream's")
            if run.is_oso and isinstance(message, DcpSeqnoAdvanced):
                continue  # it counts when the snapshot is whole
            self.happened.append((at, Carried(run.stream, message, run)))

    def commit(self) -> None:
        """Everything was good: the streams stand where the chunk ends."""
        for work in self._work.values():
            if work is not None:
                stream = work.stream
                stream.position, stream.marker = work.position, work.marker
                stream.log, stream.purge_seqno, stream.undo_to = work.log, work.purge_seqno, work.undo_to
                stream.answer_at, stream.machine = work.answer_at, work.machine
                stream.oso_high = work.oso_high

    def _find(self, opaque: int) -> StreamDraft | None:
        stream = self._streams.get(opaque)
        if stream is None and opaque not in self._retired:
            raise RemoteProtocolError(f"a message with opaque 0x{opaque:x}, which no stream of ours has")
        draft = None
        if stream is not None:
            draft = StreamDraft(
                stream,
                stream.position,
                stream.marker,
                stream.log,
                stream.purge_seqno,
                stream.undo_to,
                stream.answer_at,
                stream.oso_high,
                Machine(READER_STREAM_TRANSITIONS, stream.machine.state),
            )
        self._work[opaque] = draft
        return draft

    def _is_answer(self, control: int) -> bool:
        return self._magics[control] in (Magic.RESPONSE, Magic.FLEX_RESPONSE)

    def _answers_closing(self, control: int) -> bool:
        """Whether it is the answer to the closing of a stream, which tells nothing."""
        return self._is_answer(control) and self._opcodes[control] == DcpOpcode.CLOSE_STREAM

    def _frame(self, control: int) -> Frame:
        return Frame.parse(self._data, int(self._chunk.frames.control_start[control]))

    def _control(self, control: int, opaque: int, work: StreamDraft | None, at: int) -> None:
        """A control frame of a stream; ``work`` is None if we closed the stream and don't care any more."""
        opcode = self._opcodes[control]
        if self._is_answer(control):
            if opcode == DcpOpcode.STREAM_REQUEST:
                if work is not None:
                    self._answered(control, opaque, work, at)
                elif self._vbuckets[control] != Status.SUCCESS:  # in an answer the status stands there
                    self.finished.append(opaque)
            return
        if work is not None and not work.is_open:
            raise RemoteProtocolError(
                f"a message of vbucket {work.stream.vbucket}, whose stream is closed (opcode 0x{opcode:02x})"
            )
        if opcode == DcpOpcode.STREAM_END:
            ended = DcpStreamEnd.decode(self._frame(control))
            self.finished.append(opaque)
            if work is not None:
                self._check_vbucket(ended.vbucket, work)
                if work.oso_high is not None and ended.status == StreamEndStatus.OK:
                    raise RemoteProtocolError("a stream comes to its end inside an out of order snapshot")
                self.happened.append((at, StreamEnded(work.stream, ended.status)))
                work.machine.feed(ReaderStreamInput.ENDED)
        elif work is not None and opcode == DcpOpcode.FLUSH:
            self.happened.append((at, VBucketFlushed(work.stream)))
            work.position, work.marker, work.answer_at = Position.BEGINNING, None, None
            work.machine.feed(ReaderStreamInput.FLUSHED)
        elif work is not None and opcode == DcpOpcode.OSO_SNAPSHOT:
            self._oso(DcpOsoSnapshot.decode(self._frame(control)), work, at)
        elif work is not None:
            self._marker(control, work, at)

    def _oso(self, message: DcpOsoSnapshot, work: StreamDraft, at: int) -> None:
        """An out of order snapshot begins or is whole: docs/spec/dcp.md#oso-snapshot."""
        self._check_vbucket(message.vbucket, work)
        begins, before = message.flags == OsoFlag.START, work.position.seqno
        if begins == (work.oso_high is not None):
            raise RemoteProtocolError("an out of order snapshot begins or ends in the wrong place")
        work.marker = None
        if begins:
            work.oso_high = 0
            self.happened.append((at, MarkerReceived(work.stream, before, MAX_SEQNO, int(MarkerFlag.DISK))))
            return
        work.position = Position.at(work.position.vb_uuid, max(work.oso_high or 0, before))
        work.oso_high = None
        self.happened.append((at, OsoReceived(work.stream, work.position)))

    def _marker(self, control: int, work: StreamDraft, at: int) -> None:
        if work.oso_high is not None:
            raise RemoteProtocolError("a snapshot marker inside an out of order snapshot")
        fields = None
        if self._is_plain[control]:
            fields = DcpSnapshotMarker.read_range(self._body(control), self._extras[control])
        if fields is None:
            marker = DcpSnapshotMarker.decode(self._frame(control))
            fields = marker.start, marker.end, marker.flags, marker.purge_seqno
        start, end, flags, purge_seqno = fields
        self._check_vbucket(self._vbuckets[control], work)
        work.marker = work.position.received_marker(start, end)
        if purge_seqno is not None:
            if purge_seqno > MAX_SEQNO:
                raise RemoteProtocolError(f"a purge up to {purge_seqno} is beyond all seqnos")
            work.purge_seqno = purge_seqno
        if flags & MarkerFlag.ACK:
            work.answer_at = end
        self.happened.append((at, MarkerReceived(work.stream, start, end, flags)))

    def _body(self, control: int) -> memoryview:
        start = int(self._chunk.frames.control_start[control]) + HEADER_SIZE
        return self._data[start : start + self._sizes[control]]

    def _answered(self, control: int, opaque: int, work: StreamDraft, at: int) -> None:
        if work.machine.state is not ReaderStreamState.REQUESTED:
            raise RemoteProtocolError(
                f"the stream request of vbucket {work.stream.vbucket} is answered twice"
            )
        is_accepted = self._vbuckets[control] == Status.SUCCESS  # in an answer the status stands there
        if is_accepted and self._is_plain[control] and not self._extras[control]:
            log = bytes(self._body(control))
        else:
            answer = DcpStreamRequestResponse.decode(self._frame(control))
            log = answer.value
            if not is_accepted:
                self.finished.append(opaque)
                self.happened.append((at, RequestRefused(work.stream, answer.status, answer.value)))
                work.machine.feed(ReaderStreamInput.REFUSED)
                return
        try:
            work.log = FailoverLog.from_bytes(log)
        except UsageError as error:
            raise MalformedMessage(str(error)) from None
        work.position = work.position.on_branch(work.log.newest.vb_uuid)
        work.marker = work.answer_at = None
        work.machine.feed(ReaderStreamInput.ACCEPTED)
        self.happened.append((at, StreamOpened(work.stream, work.position, work.undo_to)))
        work.undo_to = None

    @staticmethod
    def _check_vbucket(vbucket: int, work: StreamDraft) -> None:
        if vbucket != work.stream.vbucket:
            raise RemoteProtocolError(
                f"a message of vbucket {vbucket} in the stream of vbucket {work.stream.vbucket}"
            )
