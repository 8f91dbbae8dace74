"""A piece of a DCP connection's bytes: from frames to changes that fit their streams.

Received bytes become a `ReceivedChunk`: the changes as arrays, and the frames between them (markers, answers,
ends). When the application wants it, `deliver` checks the chunk against the streams that it belongs to and
moves their positions on. Nothing here handles one change after the other. All frames of one stream that stand
between two of its control frames are a *run*: one snapshot, one history, rising seqnos. Rules are checked
for whole arrays, positions move once for each run.

Rules: docs/spec/dcp.md#snapshots, docs/spec/dcp.md#checks-of-a-receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...columns.scanner import ScannedFrames, all_true, gather
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
    DcpSystemEvent,
)
from ...wire.dialect import DCP
from ...wire.header import HEADER_LAYOUT, HEADER_SIZE, Frame
from ...wire.layout import record
from ...wire.message import Direction
from ..receive_buffer import Block
from ..states import READER_STREAM_TRANSITIONS, Machine, ReaderStreamInput, ReaderStreamState
from .received_stream import (
    Carried,
    MarkerReceived,
    OsoReceived,
    PlacedEvent,
    RequestRefused,
    SnapshotRun,
    Stream,
    StreamEnded,
    StreamEvent,
    StreamOpened,
    VBucketFlushed,
)

__all__ = [
    "ChangeDelivery",
    "ReceivedChunk",
    "control_headers",
    "deliver",
]

_HEADER = record(HEADER_LAYOUT)
_WITH_SEQNO = record(HEADER_LAYOUT + DcpSeqnoAdvanced.LAYOUTS[0])
assert all(
    shape.at("by_seqno") == DcpSeqnoAdvanced.LAYOUTS[0].at("by_seqno") for shape in DcpSystemEvent.LAYOUTS
)

_PLAIN_MAGICS = (Magic.REQUEST, Magic.RESPONSE)
_CARRIES_SEQNO = (DcpOpcode.SYSTEM_EVENT, DcpOpcode.SEQNO_ADVANCED)


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


@dataclass(slots=True, eq=False)
class ChangeDelivery:
    """Changes that fit their streams, and what happened between them."""

    chunk: ReceivedChunk
    rows: slice | NDArray[np.intp]
    """Which rows of the frames; not those of streams that were closed meanwhile."""
    run_of: NDArray[np.int32]
    """By row of the delivery, its place in ``runs``."""
    runs: list[SnapshotRun]
    controls: list[PlacedEvent] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    """Opaques that mean nothing any more."""
    acknowledged: list[int] = field(default_factory=list)
    """Opaques of streams whose marker asked for an answer, which is due now."""

    @property
    def row_count(self) -> int:
        return len(self.run_of)

    def history(self) -> tuple[int, int, int] | None:
        """As `histories`, if it is the same for all rows."""
        if len(self.runs) != 1 or not self.row_count:
            return None
        run = self.runs[0]
        branch = run.log.newest
        if run.is_oso or int(self.chunk.frames.seqno[self.rows][0]) <= branch.seqno:
            return None
        return branch.vb_uuid, run.snapshot.start, run.snapshot.end

    def histories(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """For each row the vb_uuid that it was made on, and start and end of its snapshot."""
        starts = np.array([run.snapshot.start for run in self.runs], dtype=np.uint64)
        ends = np.array([run.snapshot.end for run in self.runs], dtype=np.uint64)
        newest = np.array([run.log.newest.vb_uuid for run in self.runs], dtype=np.uint64)
        newest_from = np.array([run.log.newest.seqno for run in self.runs], dtype=np.uint64)
        of = self.run_of
        seqnos = self.chunk.frames.seqno[self.rows]
        vb_uuids = newest[of]
        # changes that were made on an older branch: found by the log, one branch of history after the other
        older = seqnos <= newest_from[of]
        if older.any():
            for index in np.unique(of[older]).tolist():
                mine = np.flatnonzero(older & (of == index))
                first, uuids = self.runs[index].log.boundaries()
                branch = np.searchsorted(np.array(first, dtype=np.uint64), seqnos[mine], side="left") - 1
                known = np.array((*uuids, 0), dtype=np.uint64)  # -1: older than the log
                vb_uuids[mine] = known[branch]
        return vb_uuids, starts[of], ends[of]


def control_headers(frames: ScannedFrames) -> NDArray[np.void]:
    """The headers of all control frames of a scan."""
    return gather(frames.data, frames.control_start, _HEADER)


@dataclass(slots=True)
class _StreamDraft:
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


def deliver(chunk: ReceivedChunk, streams: Mapping[int, Stream], retired: set[int]) -> ChangeDelivery:
    """Check a chunk against its streams (by opaque) and move them on; all of it, or an error and nothing.

    ``retired`` are the opaques of streams that we closed: what still comes for them is passed over.
    """
    frames = chunk.frames
    if len(frames) and not chunk.ordered.any() and all_true(frames.opaque == frames.opaque[0]):
        return _deliver_one_run(chunk, streams, retired)
    ordered = np.flatnonzero(chunk.ordered)
    headers = chunk.headers[ordered]
    rows, total = len(frames), len(frames) + len(ordered)
    control_at = frames.control_row[ordered] + np.arange(len(ordered))
    is_row = np.ones(total, dtype=bool)
    is_row[control_at] = False

    opaque = np.empty(total, dtype=np.uint32)
    opaque[is_row], opaque[control_at] = frames.opaque, headers["opaque"]
    seqno = np.zeros(total, dtype=np.uint64)
    seqno[is_row] = frames.seqno
    carrying = np.flatnonzero(
        np.isin(headers["opcode"], _CARRIES_SEQNO) & (headers["magic"] == Magic.REQUEST)
    )
    if len(carrying):
        at = frames.control_start[ordered[carrying]]
        seqno[control_at[carrying]] = gather(frames.data, at, _WITH_SEQNO)["by_seqno"]
    is_boundary = ~is_row
    is_boundary[control_at[carrying]] = False

    one_stream = total == 0 or bool((opaque == opaque[0]).all())
    order = np.arange(total) if one_stream else np.argsort(opaque, kind="stable")
    opaque, seqno, is_boundary = opaque[order], seqno[order], is_boundary[order]
    begins = is_boundary.copy()
    begins[:1] = True
    begins[1:] |= opaque[1:] != opaque[:-1]

    falling = np.flatnonzero((seqno[1:] <= seqno[:-1]) & ~begins[1:] & ~is_boundary[:-1])
    made = _Runs(chunk, streams, retired)
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], total)
    if len(falling):
        # who makes a run knows whether its seqnos may fall
        runs_that_fall = np.searchsorted(starts, falling, "right") - 1
        made.fall(
            dict(zip(runs_that_fall[::-1].tolist(), falling[::-1].tolist(), strict=True)),
            seqno,
            np.where(is_boundary, MAX_SEQNO, seqno),
            starts,
        )
    wire_index = order[starts]
    # for each run: its opaque, the control frame that begins it if one does, its first and last seqno
    control_number = np.cumsum(~is_row) - 1
    first_item = np.minimum(starts + is_boundary[starts], total - 1)
    columns = (
        opaque[starts],
        np.where(is_boundary[starts], control_number[wire_index], -1),
        stops - starts - is_boundary[starts],
        seqno[first_item],
        seqno[stops - 1],
        wire_index,
    )
    numbers = np.array(
        [made.add(ordered, *run) for run in zip(*(column.tolist() for column in columns), strict=True)],
        dtype=np.int32,
    )
    run_of = np.empty(total, dtype=np.int32)
    run_of[order] = np.repeat(numbers, stops - starts)

    made.carried(ordered[carrying], run_of[control_at[carrying]], control_at[carrying])
    of_row = run_of[is_row]
    _check_vbuckets(frames, of_row, made.runs)
    kept: slice | NDArray[np.intp] = slice(None)
    if rows and of_row.min() < 0:
        kept = np.flatnonzero(of_row >= 0)
        of_row = of_row[kept]
    delivery = ChangeDelivery(chunk, kept, of_row, made.runs, [], made.finished, made.acknowledged)
    before = np.append(0, np.cumsum(is_row))
    if not isinstance(kept, slice):
        before = np.searchsorted(kept, before)
    delivery.controls = [
        PlacedEvent(int(before[at]), what) for at, what in sorted(made.happened, key=lambda run: run[0])
    ]
    made.commit()
    return delivery


def _deliver_one_run(
    chunk: ReceivedChunk, streams: Mapping[int, Stream], retired: set[int]
) -> ChangeDelivery:
    """`deliver` for what a backfill is made of: nothing but changes of one stream."""
    frames = chunk.frames
    seqno = frames.seqno
    rising = seqno[1:] > seqno[:-1]
    made = _Runs(chunk, streams, retired)
    nothing = np.empty(0, dtype=np.intp)
    if not all_true(rising):
        made.fall({0: int(rising.argmin())}, seqno, seqno, np.zeros(1, dtype=np.intp))
    number = made.add(nothing, int(frames.opaque[0]), -1, len(frames), int(seqno[0]), int(seqno[-1]), 0)
    rows = slice(None) if number >= 0 else slice(0, 0)
    run_of = np.zeros(len(frames) if number >= 0 else 0, dtype=np.int32)
    if number >= 0 and not all_true(frames.vbucket == made.runs[0].stream.vbucket):
        _check_vbuckets(frames, run_of, made.runs)
    made.commit()
    return ChangeDelivery(chunk, rows, run_of, made.runs, [], [], made.acknowledged)


def _check_vbuckets(frames: ScannedFrames, run_of: NDArray[np.int32], runs: list[SnapshotRun]) -> None:
    """Every change must be of the vbucket that its stream was asked for."""
    if not runs or not len(run_of):
        return
    expected = np.array([run.stream.vbucket for run in runs], dtype=np.uint16)[run_of]
    wrong = np.flatnonzero((frames.vbucket != expected) & (run_of >= 0))
    if len(wrong):
        first = int(wrong[0])
        raise RemoteProtocolError(
            f"a change of vbucket {frames.vbucket[first]} in the stream of vbucket {expected[first]}"
        )


class _Runs:
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
        self._work: dict[int, _StreamDraft | None] = {}
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

    def _find(self, opaque: int) -> _StreamDraft | None:
        stream = self._streams.get(opaque)
        if stream is None and opaque not in self._retired:
            raise RemoteProtocolError(f"a message with opaque 0x{opaque:x}, which no stream of ours has")
        draft = None
        if stream is not None:
            draft = _StreamDraft(
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

    def _control(self, control: int, opaque: int, work: _StreamDraft | None, at: int) -> None:
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

    def _oso(self, message: DcpOsoSnapshot, work: _StreamDraft, at: int) -> None:
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

    def _marker(self, control: int, work: _StreamDraft, at: int) -> None:
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

    def _answered(self, control: int, opaque: int, work: _StreamDraft, at: int) -> None:
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
    def _check_vbucket(vbucket: int, work: _StreamDraft) -> None:
        if vbucket != work.stream.vbucket:
            raise RemoteProtocolError(
                f"a message of vbucket {vbucket} in the stream of vbucket {work.stream.vbucket}"
            )
