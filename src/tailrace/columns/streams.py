"""What the rows of a scan don't say themselves: their branch, their snapshot, and whether they are in order.

A consumer has many streams on one connection and their rows come mixed. `Streams` keeps what it has to know
of each as arrays, an entry a stream, so that all rows between two control frames are checked and placed at
once.
The rules are those of dcp.md, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError, MalformedMessage
from ..frames import Mask
from ..history import FailoverLog
from ..wire.codes import Status
from .scanner import Frames

__all__ = ["MAX_OPAQUE", "RowContext", "Streams"]

MAX_OPAQUE = 0xFFFF
"""Opaques of streams are looked up in a table, so they have to be small; the consumer chooses them."""

_NONE = -1

_STREAM = np.dtype(
    [
        ("vbucket", np.uint16),
        ("open", bool),
        ("ordered", bool),
        ("seqno", np.uint64),
        ("snapshot_start", np.uint64),
        ("snapshot_end", np.uint64),
        ("branch", np.uint64),  # the newest one, and where it begins: most changes are above that
        ("branch_start", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True)
class RowContext:
    """What `Streams.place` says about each row of a scan: ready for `to_batch`."""

    vb_uuid: NDArray[np.uint64]
    snapshot_start: NDArray[np.uint64]
    snapshot_end: NDArray[np.uint64]
    wanted: Mask
    """False for rows of a stream that we have closed and that were still on their way."""

    @classmethod
    def for_rows(cls, count: int) -> Self:
        """Room for the rows of one scan."""
        vb_uuid, start, end = np.zeros((3, count), dtype=np.uint64)
        return cls(vb_uuid, start, end, wanted=np.ones(count, dtype=bool))


class Streams:
    """The streams of one connection, by opaque."""

    def __init__(self) -> None:
        self._slot_of = np.full(MAX_OPAQUE + 1, _NONE, dtype=np.int32)
        self._streams = np.zeros(0, dtype=_STREAM)
        self._boundaries: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []

    def open(
        self, opaque: int, *, vbucket: int, log: FailoverLog, seqno: int, snapshot: tuple[int, int]
    ) -> None:
        """A stream was accepted: it goes on after ``seqno``, inside ``snapshot``, with the producer's log."""
        if not 0 <= opaque <= MAX_OPAQUE:
            raise LocalProtocolError(f"the opaque of a stream must be at most {MAX_OPAQUE}, not {opaque}")
        starts, vb_uuids = log.boundaries()
        # What is older than the oldest entry has no history: vb_uuid 0.
        boundaries = np.array((0, *starts), np.uint64), np.array((0, *vb_uuids), np.uint64)
        slot = int(self._slot_of[opaque])
        if slot == _NONE:
            slot = len(self._streams)
            self._slot_of[opaque] = slot
            self._streams = np.append(self._streams, np.zeros(1, _STREAM))
            self._boundaries.append(boundaries)
        self._boundaries[slot] = boundaries
        self._streams[slot] = (vbucket, True, True, seqno, *snapshot, vb_uuids[-1], starts[-1])

    def close(self, opaque: int) -> None:
        """The stream is over for us; rows that still come are not wanted."""
        self._streams["open"][self._slot(opaque)] = False

    def marker(self, opaque: int, start: int, end: int) -> None:
        """A snapshot begins: rows that follow belong to it."""
        slot = self._slot(opaque)
        self._streams["snapshot_start"][slot] = start
        self._streams["snapshot_end"][slot] = end

    def advance(self, opaque: int, seqno: int) -> None:
        """The stream has reached ``seqno`` with a message that is no row."""
        self._streams["seqno"][self._slot(opaque)] = seqno

    def unordered(self, opaque: int, *, on: bool) -> None:
        """Between the start and the end of an OSO snapshot rows come in any order and have no range."""
        self._streams["ordered"][self._slot(opaque)] = not on

    def seqno(self, opaque: int) -> int:
        """The highest seqno that the stream has reached."""
        return int(self._streams["seqno"][self._slot(opaque)])

    def place(self, frames: Frames, rows: slice, context: RowContext) -> None:
        """Check the rows between two control frames, move their streams on, and fill in their context.

        `MalformedMessage` names the first row that has no stream, is not above the one before it in its
        stream, or lies outside its stream's snapshot; nothing has changed then.
        """
        opaque, seqno = frames.opaque[rows], frames.seqno[rows]
        if not len(opaque):
            return
        slot = self._slot_of[np.minimum(opaque, MAX_OPAQUE)]
        slot[opaque > MAX_OPAQUE] = _NONE
        order = slice(None) if (slot == slot[0]).all() else np.argsort(slot, kind="stable")
        streams = self._streams[slot] if len(self._streams) else np.zeros(len(slot), _STREAM)

        wrong = slot == _NONE
        wrong |= streams["vbucket"] != frames.vbucket[rows]
        ordered = streams["ordered"] & streams["open"]
        outside = (seqno < streams["snapshot_start"]) | (seqno > streams["snapshot_end"])
        disorder = np.empty_like(wrong)
        disorder[order] = seqno[order] <= self._before(slot[order], seqno[order], streams["seqno"][order])
        for mask, what, status in (
            (wrong, "belongs to no stream", Status.DCP_STREAM_NOT_FOUND),
            (ordered & disorder, "is not above the one before it", Status.ERANGE),
            (ordered & outside, "lies outside its snapshot", Status.ERANGE),
        ):
            if mask.any():
                at = int(mask.argmax())
                where = f"vbucket {frames.vbucket[rows][at]}: the change with seqno {seqno[at]}"
                raise MalformedMessage(f"{where} {what}", status)

        context.vb_uuid[rows] = self._branches(slot, seqno, streams)
        context.snapshot_start[rows] = streams["snapshot_start"]
        context.snapshot_end[rows] = streams["snapshot_end"]
        context.wanted[rows] = streams["open"]
        reached = self._streams["seqno"].copy()
        np.maximum.at(reached, slot, seqno)
        self._streams["seqno"] = reached

    @staticmethod
    def _before(
        slot: NDArray[np.int32], seqno: NDArray[np.uint64], reached: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """For rows in the order of their streams: the seqno before each in its stream."""
        first = np.append(True, slot[1:] != slot[:-1])
        before: NDArray[np.uint64] = np.where(first, reached, np.roll(seqno, 1))
        return before

    def _branches(
        self, slot: NDArray[np.int32], seqno: NDArray[np.uint64], streams: NDArray[np.void]
    ) -> NDArray[np.uint64]:
        """The branch that each change was made on: the newest that begins below it."""
        vb_uuid: NDArray[np.uint64] = streams["branch"].copy()
        older = np.flatnonzero(seqno <= streams["branch_start"])
        for one in np.unique(slot[older]):
            mine = older[slot[older] == one]
            starts, vb_uuids = self._boundaries[one]
            vb_uuid[mine] = vb_uuids[np.searchsorted(starts, seqno[mine], side="left") - 1]
        return vb_uuid

    def _slot(self, opaque: int) -> int:
        slot = int(self._slot_of[opaque]) if 0 <= opaque <= MAX_OPAQUE else _NONE
        if slot == _NONE:
            raise MalformedMessage(
                f"there is no stream with the opaque {opaque}", Status.DCP_STREAM_NOT_FOUND
            )
        return slot
