"""A piece of a DCP connection's bytes: from frames to changes that fit their streams.

Received bytes become a `ReceivedChunk`: the changes as arrays, and the frames between them (markers, answers,
ends). When the application wants it, `deliver` checks the chunk against the streams that it belongs to and
advances their positions. Nothing here handles changes one by one. All frames of one stream between two of its
control frames are a *run*: one snapshot, one history, rising seqnos. Rules are checked for whole arrays, and
positions move once per run.

Rules: docs/spec/dcp.md#snapshots, docs/spec/dcp.md#checks-of-a-receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...columns.scanner import ScannedFrames, all_true, gather
from ...errors import RemoteProtocolError
from ...model import MAX_SEQNO
from ...wire.codes import DcpOpcode, Magic
from ...wire.dcp import (
    DcpSeqnoAdvanced,
    DcpSystemEvent,
)
from ...wire.dcp_replication import DcpCommit
from ...wire.header import HEADER_LAYOUT
from ...wire.layout import record
from .chunk_runs import ChunkRuns, ReceivedChunk
from .reader_stream import (
    PlacedEvent,
    ReaderStream,
    SnapshotRun,
)

__all__ = [
    "ChangeDelivery",
    "Place",
    "ReceivedChunk",
    "control_headers",
    "deliver",
]

_HEADER = record(HEADER_LAYOUT)
_WITH_SEQNO = record(HEADER_LAYOUT + DcpSeqnoAdvanced.LAYOUTS[0])
assert all(
    shape.at("by_seqno") == DcpSeqnoAdvanced.LAYOUTS[0].at("by_seqno") for shape in DcpSystemEvent.LAYOUTS
)

_CARRIES_SEQNO = np.zeros(256, dtype=bool)
_CARRIES_SEQNO[[DcpOpcode.SYSTEM_EVENT, DcpOpcode.SEQNO_ADVANCED]] = True
_CARRIES_SEQNO[[DcpOpcode.PREPARE, DcpOpcode.COMMIT, DcpOpcode.ABORT]] = True
_DECIDES = record(HEADER_LAYOUT + DcpCommit.LAYOUTS[0])
"""A commit or an abort, whose own seqno follows that of its prepare."""
_REQUEST = int(Magic.REQUEST)
_ROWS_IN_A_STRETCH = 8
"""With fewer of them on average, it is better not to go stretch by stretch."""


Column: TypeAlias = "int | NDArray[np.uint64]"
Place: TypeAlias = tuple[int, int, tuple[int, int]]
"""What adjacent changes have in common: vbucket, the vb_uuid that they were made on (0 if that is older than
the log), start and end of their snapshot. A plain tuple: any other takes far longer to unpack.
"""


@dataclass(slots=True, eq=False)
class ChangeDelivery:
    """Changes that fit their streams, and what happened between them."""

    chunk: ReceivedChunk
    rows: slice | NDArray[np.intp]
    """Which rows of the frames; not those of streams that have been closed."""
    run_of: NDArray[np.int32]
    """For each row of the delivery, its index in ``runs``."""
    runs: list[SnapshotRun]
    controls: list[PlacedEvent] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    """Opaques that are no longer in use."""
    acknowledged: list[int] = field(default_factory=list)
    """Opaques of streams whose marker asked for an answer, which is due now."""

    @property
    def row_count(self) -> int:
        return len(self.run_of)

    def places(self) -> tuple[NDArray[np.int32], list[Place]]:
        """The places of the changes, and for each row the index of its place."""
        places: list[Place] = [
            (run.stream.vbucket, run.log.newest.vb_uuid, (run.snapshot.start, run.snapshot.end))
            for run in self.runs
        ]
        place_of = self.run_of
        # changes that were made on an older branch are found by the log, branch by branch
        older = [index for index, run in enumerate(self.runs) if run.base.seqno < run.log.newest.seqno]
        if older:
            seqnos, place_of = self.chunk.frames.seqno[self.rows], place_of.copy()
        for index in older:
            mine = np.flatnonzero(self.run_of == index)
            vbucket, _, snapshot = places[index]
            first, uuids = self.runs[index].log.boundaries()
            branch = np.searchsorted(np.array(first, dtype=np.uint64), seqnos[mine], side="left") - 1
            for number in np.unique(branch).tolist():
                place_of[mine[branch == number]] = len(places)
                places.append((vbucket, uuids[number] if number >= 0 else 0, snapshot))
        return place_of, places

    def histories(self) -> tuple[Column, Column, Column]:
        """For each row the vb_uuid that it was made on, and start and end of its snapshot.

        One number instead of an array if it is the same for all.
        """
        place_of, places = self.places()
        columns = zip(*((vb_uuid, *snapshot) for _, vb_uuid, snapshot in places), strict=True)
        if len(places) == 1:
            ((vb_uuid,), (start,), (end,)) = columns
            return vb_uuid, start, end
        vb_uuids, starts, ends = (np.array(column, dtype=np.uint64)[place_of] for column in columns)
        return vb_uuids, starts, ends


def control_headers(frames: ScannedFrames) -> NDArray[np.void]:
    """The headers of all control frames of a scan."""
    return gather(frames.data, frames.control_start, _HEADER)


def deliver(chunk: ReceivedChunk, streams: Mapping[int, ReaderStream], retired: set[int]) -> ChangeDelivery:
    """Check a chunk against its streams (by opaque) and advance them: all of it, or an error and nothing.

    ``retired`` are the opaques of streams that we closed: what still comes for them is skipped.
    """
    frames = chunk.frames
    if len(frames) and not chunk.ordered.any() and all_true(frames.opaque == frames.opaque[0]):
        return _deliver_one_run(chunk, streams, retired)
    ordered = np.flatnonzero(chunk.ordered)
    headers = chunk.headers[ordered]
    opcodes = headers["opcode"]
    carrying = np.flatnonzero(_CARRIES_SEQNO[opcodes] & (headers["magic"] == _REQUEST))
    if not len(carrying):
        in_stretches = _deliver_in_stretches(chunk, ordered, streams, retired)
        if in_stretches is not None:
            return in_stretches
    rows, total = len(frames), len(frames) + len(ordered)
    control_at = frames.control_row[ordered] + np.arange(len(ordered))
    is_row = np.ones(total, dtype=bool)
    is_row[control_at] = False

    opaque = np.empty(total, dtype=np.uint32)
    opaque[is_row], opaque[control_at] = frames.opaque, headers["opaque"]
    seqno = np.zeros(total, dtype=np.uint64)
    seqno[is_row] = frames.seqno
    if len(carrying):
        at = frames.control_start[ordered[carrying]]
        seqno[control_at[carrying]] = gather(frames.data, at, _WITH_SEQNO)["by_seqno"]
        decides = np.isin(opcodes[carrying], (DcpOpcode.COMMIT, DcpOpcode.ABORT))
        if decides.any():
            own = gather(frames.data, at[decides], _DECIDES)["commit_seqno"]
            seqno[control_at[carrying[decides]]] = own
    is_boundary = ~is_row
    is_boundary[control_at[carrying]] = False

    one_stream = total == 0 or bool((opaque == opaque[0]).all())
    order = np.arange(total) if one_stream else np.argsort(opaque, kind="stable")
    opaque, seqno, is_boundary = opaque[order], seqno[order], is_boundary[order]
    begins = is_boundary.copy()
    begins[:1] = True
    begins[1:] |= opaque[1:] != opaque[:-1]

    falling = np.flatnonzero((seqno[1:] <= seqno[:-1]) & ~begins[1:] & ~is_boundary[:-1])
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], total)
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
    controls = ordered.tolist()
    with ChunkRuns(chunk, streams, retired) as made:
        if len(falling):
            # `made.add` knows whether the seqnos of a run may fall
            runs_that_fall = np.searchsorted(starts, falling, "right") - 1
            made.fall(
                dict(zip(runs_that_fall[::-1].tolist(), falling[::-1].tolist(), strict=True)),
                seqno,
                np.where(is_boundary, MAX_SEQNO, seqno),
                starts,
            )
        numbers = np.array(
            [made.add(controls, *run) for run in zip(*(column.tolist() for column in columns), strict=True)],
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
            PlacedEvent(int(before[at]), event) for at, event in sorted(made.happened, key=lambda run: run[0])
        ]
        made.commit()
        return delivery


def _deliver_one_run(
    chunk: ReceivedChunk, streams: Mapping[int, ReaderStream], retired: set[int]
) -> ChangeDelivery:
    """`deliver` for a chunk with only changes of one stream, as in a backfill."""
    frames = chunk.frames
    seqno = frames.seqno
    rising = seqno[1:] > seqno[:-1]
    with ChunkRuns(chunk, streams, retired) as made:
        if not all_true(rising):
            made.fall({0: int(rising.argmin())}, seqno, seqno, np.zeros(1, dtype=np.intp))
        number = made.add([], int(frames.opaque[0]), -1, len(frames), int(seqno[0]), int(seqno[-1]), 0)
        rows = slice(None) if number >= 0 else slice(0, 0)
        run_of = np.zeros(len(frames) if number >= 0 else 0, dtype=np.int32)
        if number >= 0 and not all_true(frames.vbucket == made.runs[0].stream.vbucket):
            _check_vbuckets(frames, run_of, made.runs)
        made.commit()
        return ChangeDelivery(chunk, rows, run_of, made.runs, [], [], made.acknowledged)


@dataclass(slots=True)
class _FoundRun:
    """A control frame or none, and the changes of its stream that follow."""

    opaque: int
    control: int
    items: int
    first: int
    last: int
    row: int


def _deliver_in_stretches(
    chunk: ReceivedChunk, ordered: NDArray[np.intp], streams: Mapping[int, ReaderStream], retired: set[int]
) -> ChangeDelivery | None:
    """`deliver` for backfills of many small vbuckets, where the changes of a stream are mostly adjacent.

    None if they are not, or if anything is unusual; nothing has happened then.
    """
    frames = chunk.frames
    opaque, seqno, rows = frames.opaque, frames.seqno, len(frames)
    stands = frames.control_row[ordered]
    turns = np.flatnonzero(opaque[1:] != opaque[:-1]) + 1
    begins = np.union1d(turns, np.append(stands[stands < rows], 0)) if rows else turns
    if len(begins) * _ROWS_IN_A_STRETCH > rows:
        return None
    falls = seqno[1:] <= seqno[:-1]
    falls[begins[1:] - 1] = False
    if falls.any():
        return None
    stops = np.append(begins[1:], rows) if rows else begins
    counts = stops - begins
    # in the order of the wire; a control frame comes before the changes that begin at its row
    columns = (begins, opaque[begins], counts, seqno[begins], seqno[stops - 1])
    stretches = zip(*(column.tolist() for column in columns), strict=True)
    controls = zip(stands.tolist(), chunk.headers["opaque"][ordered].tolist(), strict=True)
    pieces: list[_FoundRun] = []
    newest: dict[int, int] = {}
    run_of_stretch: list[int] = []
    control, (stand, of) = 0, next(controls, (rows + 1, 0))
    for begin, mine, count, first, last in (*stretches, (rows, -1, 0, 0, 0)):
        while stand <= begin:
            newest[of] = len(pieces)
            pieces.append(_FoundRun(of, control, 0, 0, 0, stand))
            control, (stand, of) = control + 1, next(controls, (rows + 1, 0))
        if not count:
            break
        number = newest.setdefault(mine, len(pieces))
        if number == len(pieces):
            pieces.append(_FoundRun(mine, -1, 0, first, last, begin))
        run = pieces[number]
        if run.items and first <= run.last:
            return None
        run.first = run.first if run.items else first
        run.items, run.last = run.items + count, last
        run_of_stretch.append(number)
    places = ordered.tolist()
    with ChunkRuns(chunk, streams, retired) as made:
        numbers = np.array(
            [
                made.add(places, run.opaque, run.control, run.items, run.first, run.last, run.row)
                for run in pieces
            ],
            dtype=np.int32,
        )
        run_of = np.repeat(numbers[run_of_stretch], counts)
        if len(run_of) and run_of.min() < 0:
            return None
        _check_vbuckets(frames, run_of, made.runs)
        events = [PlacedEvent(row, event) for row, event in made.happened]
        made.commit()
        return ChangeDelivery(chunk, slice(None), run_of, made.runs, events, made.finished, made.acknowledged)


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
