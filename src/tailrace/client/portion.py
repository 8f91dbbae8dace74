"""A portion of the streams: what a node sent in one go, as events or as Arrow batches for the application."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..columns.batch import Names, to_batch
from ..columns.row_kinds import FLUSH, ROLLBACK, SYSTEM, signed, single_row
from ..errors import UsageError
from ..history import FailoverLog
from ..model import Position
from ..protocol.dcp.delivery import ChangeDelivery
from ..protocol.dcp.reader import DcpReader
from ..protocol.dcp.reader_stream import (
    Carried,
    MarkerReceived,
    OsoReceived,
    PlacedEvent,
    SnapshotRun,
    StreamEnded,
    StreamOpened,
    VBucketFlushed,
)
from ..protocol.dcp.request_checks import seqno_of
from ..wire.codes import MarkerFlag, StreamEndStatus, SystemEventId
from ..wire.dcp import DcpSeqnoAdvanced, DcpSystemEvent
from .changes import MadeChanges, make_durable_write
from .events import (
    Event,
    Flush,
    Rollback,
    SeqnoAdvanced,
    Snapshot,
    StreamEnd,
    SystemEvent,
)
from .jsonlines import json_line
from .progress import Progress

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = ["Portion", "end_reason", "release"]

_DISK, _HISTORY = int(MarkerFlag.DISK), int(MarkerFlag.HISTORY)
_SYSTEM_EVENTS = {
    SystemEventId.COLLECTION_BEGIN: "collection_created",
    SystemEventId.COLLECTION_END: "collection_dropped",
    SystemEventId.SCOPE_CREATED: "scope_created",
    SystemEventId.SCOPE_DROPPED: "scope_dropped",
    SystemEventId.COLLECTION_MODIFIED: "collection_modified",
}


def end_reason(status: int) -> str:
    """Why a stream ended, as a word."""
    try:
        return StreamEndStatus(status).name.lower()
    except ValueError:
        return f"status_{status}"


class EventBetween(NamedTuple):
    """An event between two changes."""

    row: int
    event: Event
    position: Position | None = None
    """Where the vbucket goes on after a rollback, or the end of an out of order snapshot that is whole."""


class SnapshotChange(NamedTuple):
    """A snapshot of a vbucket begins after another one."""

    row: int
    vbucket: int
    last: int
    """The last row of the previous snapshot."""
    position: Position
    """The position at the previous snapshot's end."""


class Portion:
    """Checked changes of one connection, in the order in which they came."""

    def __init__(
        self, link: DcpReader, delivery: ChangeDelivery, progress: Mapping[int, Progress], catalog: Catalog
    ) -> None:
        self.link = link
        self.delivery = delivery
        self.between: list[EventBetween] = []
        self.ends = {run.stream.vbucket: run.stream.position for run in delivery.runs}
        """The position of each vbucket once the application has the whole portion."""
        self.left_out = 0
        """Changes that were not asked for; positions move past them."""
        self._progress = progress
        self._catalog = catalog
        self._handed_from = self._handed_to = 0
        """The rows that the application was given since `settle`."""
        self._changes: MadeChanges | None = None
        """Set if it gets them one by one: this knows how many it took."""
        self._undone_from: dict[int, int] = {}
        """The row before which a vbucket was rolled back, if it was."""

    @property
    def row_count(self) -> int:
        """How many changes there are."""
        return self.delivery.row_count

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it for the application, not even a position."""
        return not self.row_count and not self.between and not self.left_out

    def log_of(self, vbucket: int) -> FailoverLog | None:
        """The failover log that came with a vbucket's stream."""
        return self._progress[vbucket].history

    def tell(self, control: PlacedEvent, *, is_done: bool) -> None:
        """Add the event for something that happened between the changes, if the application should see it."""
        happened = control.event
        vbucket, log = happened.stream.vbucket, happened.stream.log
        vb_uuid = log.newest.vb_uuid if log is not None else 0
        event: Event | None = None
        position = None
        match happened:
            case StreamOpened() if happened.rolled_back_to is not None:
                event, position = Rollback(vbucket, vb_uuid, happened.rolled_back_to), happened.position
            case MarkerReceived():
                source = "disk" if happened.flags & _DISK else "memory"
                history = bool(happened.flags & _HISTORY)
                event = Snapshot(vbucket, vb_uuid, happened.start, happened.end, source, history)
            case OsoReceived():
                self.ends[vbucket], position = happened.stream.position, happened.position
                event = SeqnoAdvanced(vbucket, vb_uuid, position.seqno, (position.seqno, position.seqno))
            case VBucketFlushed():
                event = Flush(vbucket)
            case Carried():
                event = self._carried(happened)
            case StreamEnded() if is_done:
                event = StreamEnd(vbucket, end_reason(happened.status))
        if event is not None:
            self.between.append(EventBetween(control.row, event, position))

    def leave_out(self) -> None:
        """Remove the changes that the reading leaves out. Call it after every `tell`: events name
        collections.
        """
        delivery = self.delivery
        hidden = self._catalog.left_out.rows(delivery.chunk.frames)
        if hidden is not None:
            kept = np.flatnonzero(~hidden[delivery.rows])
            self.left_out = self.row_count - len(kept)
            self._keep(kept)

    def _carried(self, carried: Carried) -> Event | None:
        run, message = carried.run, carried.message
        snapshot = (run.snapshot.start, run.snapshot.end)
        vbucket, vb_uuid = carried.stream.vbucket, run.log.branch_of(seqno_of(message))
        if not isinstance(message, DcpSystemEvent | DcpSeqnoAdvanced):
            granted = self.link.granted
            collections = granted is not None and granted.handshake.collections
            write = make_durable_write(message, vb_uuid, snapshot, collections=collections)
            hidden = self._catalog.left_out.hides_document(write.collection_id, write.key)
            return None if hidden else write
        if isinstance(message, DcpSeqnoAdvanced):
            return SeqnoAdvanced(vbucket, vb_uuid, message.by_seqno, snapshot)
        self._learn(message)
        if self._catalog.left_out.hides_scope(self._catalog.scope_name(message.scope_id)):
            return None
        return SystemEvent(
            vbucket,
            vb_uuid,
            message.by_seqno,
            _SYSTEM_EVENTS.get(message.event, f"event_{message.event}"),  # type: ignore[call-overload]
            message.key.decode("utf-8", "replace"),
            message.manifest_uid,
            message.scope_id,
            message.collection_id,
            message.max_ttl,
            snapshot,
            message.history,
        )

    def _learn(self, message: DcpSystemEvent) -> None:
        """Remember names that came with the stream."""
        name = message.key.decode("utf-8", "replace")
        if message.event == SystemEventId.SCOPE_CREATED:
            self._catalog.add_scope(message.scope_id, name)
        elif message.event == SystemEventId.COLLECTION_BEGIN and message.collection_id is not None:
            self._catalog.add(message.collection_id, self._catalog.scope_name(message.scope_id), name)

    def drop(self, vbucket: int, *, keep_to: int = -1) -> tuple[Position | None, int | None]:
        """Remove a vbucket, or what it has above a seqno; return where its stream goes on, and to which seqno
        a removed rollback went, if there was one.
        """
        delivery = self.delivery
        runs = delivery.runs
        own = np.array([run.stream.vbucket == vbucket for run in runs], dtype=bool)[delivery.run_of]
        rows = np.flatnonzero(own)
        seqnos = delivery.chunk.frames.seqno[delivery.rows][rows]
        own_events = [placed for placed in self.between if placed.event.vbucket == vbucket]
        is_one_history = all(
            placed.row <= rows[0]
            for placed in own_events
            if len(rows) and isinstance(placed.event, Rollback | Flush)
        )
        # up to the first that is above: seqnos rise only along one history
        kept = int(np.argmax(seqnos > keep_to)) if (seqnos > keep_to).any() else len(rows)
        if not (kept and is_one_history):
            base = next((run.base for run in runs if run.stream.vbucket == vbucket), None)
            rollbacks = (placed.event for placed in own_events if isinstance(placed.event, Rollback))
            undo_to = next((rollback.seqno for rollback in rollbacks), None)
            self.between = [placed for placed in self.between if placed.event.vbucket != vbucket]
            self._keep(np.flatnonzero(~own))
            self.ends.pop(vbucket, None)
            return base, undo_to
        last = int(rows[kept - 1])
        position = runs[delivery.run_of[last]].position_at(int(seqnos[kept - 1]))
        self.between = [
            placed for placed in self.between if placed.event.vbucket != vbucket or placed.row <= last
        ]
        own[: last + 1] = False
        self._keep(np.flatnonzero(~own))
        self.ends[vbucket] = position
        return position, None

    def _keep(self, kept: NDArray[np.intp]) -> None:
        """Keep some of the rows; the events stay in place between them."""
        delivery = self.delivery
        delivery.rows = np.arange(len(delivery.chunk.frames))[delivery.rows][kept]
        delivery.run_of = delivery.run_of[kept]
        self.between = [
            placed._replace(row=int(np.searchsorted(kept, placed.row))) for placed in self.between
        ]

    # one change after the other

    def events(self) -> Iterator[Event]:
        """All events in order; `settle` records how far the application has come."""
        return chain.from_iterable(self._pieces())  # no generator step for each event

    def _pieces(self) -> Iterator[Iterable[Event]]:
        self._changes = MadeChanges(self.delivery)
        changes = iter(self._changes)
        # an event at a row comes before a snapshot that begins there: the sort is stable
        stops: list[EventBetween | SnapshotChange] = [*self.between, *self._new_snapshots()]
        stops.sort(key=lambda stop: stop.row)
        at = 0
        for stop in stops:
            if stop.row > at:
                yield islice(changes, stop.row - at)
                at = stop.row
                if self._changes.taken < at:
                    return  # one could not be made, and nothing may follow it
            if isinstance(stop, EventBetween):
                yield (self._say(stop),)
            elif stop.last >= self._undone_from.get(stop.vbucket, 0):
                self._progress[stop.vbucket].delivered_up_to(stop.position)
        yield changes

    def _new_snapshots(self) -> Iterator[SnapshotChange]:
        """Where a snapshot is whole and the next one of its vbucket begins: a state to return to."""
        runs = self.delivery.runs
        if len({run.stream.vbucket for run in runs}) == len(runs):
            return
        seqnos = self.delivery.chunk.frames.seqno[self.delivery.rows]
        before: dict[int, tuple[SnapshotRun, int]] = {}
        for index, first, last in self._rows_of_runs():
            run = runs[index]
            vbucket = run.stream.vbucket
            ended, ended_at = before.get(vbucket, (run, last))
            if vbucket in before and not ended.is_oso:
                yield SnapshotChange(first, vbucket, ended_at, ended.position_at(int(seqnos[ended_at])))
            before[vbucket] = run, last

    def _rows_of_runs(self) -> Iterator[tuple[int, int, int]]:
        """Index, first and last row of each run that has rows, in the order of the first rows."""
        delivery = self.delivery
        rows = np.arange(delivery.row_count)
        first, last = (np.full(len(delivery.runs), -1) for _ in range(2))
        first[delivery.run_of[::-1]] = rows[::-1]  # the last assignment counts
        last[delivery.run_of] = rows
        for index in np.argsort(first, kind="stable").tolist():
            if first[index] >= 0:  # a run without rows has only messages that are not changes
                yield index, int(first[index]), int(last[index])

    def _say(self, placed: EventBetween) -> Event:
        event = placed.event
        if isinstance(event, Rollback | Flush):
            self.settle()
            self._undone_from[event.vbucket] = placed.row
            if isinstance(event, Flush):
                self._progress[event.vbucket].rolled_back(0, Position.BEGINNING)
            else:
                assert placed.position is not None
                self._progress[event.vbucket].rolled_back(event.seqno, placed.position)
        elif placed.position is not None:
            self.settle()  # records the position before the snapshot that is whole now
            self._progress[event.vbucket].delivered_up_to(placed.position)
        return event

    def settle(self) -> None:
        """Record how much of the current portion the application has."""
        if self._changes is not None:
            self._handed_to = self._changes.taken
        for vbucket, position in self.positions_at(slice(self._handed_from, self._handed_to)).items():
            self._progress[vbucket].delivered_up_to(position)
        self._handed_from = self._handed_to

    # whole batches

    def batches(self, *, no_value: bool, by_snapshot: bool = True) -> Iterator[pa.RecordBatch]:
        """The changes as Arrow; events between them come in order, each in a batch of its own.

        Unless ``by_snapshot`` is False, a batch ends where a snapshot does: after every batch each vbucket is
        at the end of a snapshot, or inside the one that is still being received.
        """
        if self.link.settings.sync_writes:
            raise UsageError("sync_replication is for changes(): a batch has no prepares and commits")
        ends = self._snapshot_ends() if by_snapshot else []
        first = 0
        for placed in self.between:
            if isinstance(placed.event, Rollback | Flush | SystemEvent):
                if placed.row > first:
                    yield from self._batches(first, placed.row, ends, no_value=no_value)
                    first = placed.row
                self.settle()
                yield _row(self._say(placed), self._catalog.names)
        if first < self.row_count:
            yield from self._batches(first, self.row_count, ends, no_value=no_value)

    def _batches(self, first: int, last: int, ends: list[int], *, no_value: bool) -> Iterator[pa.RecordBatch]:
        """Rows as one batch, handed out in parts without another copy."""
        batch = self._batch(first, last, no_value=no_value)
        begin = first
        for end in (*(snapshot_end for snapshot_end in ends if first < snapshot_end < last), last):
            self.settle()
            self._handed_from, self._handed_to = begin, end
            yield batch.slice(begin - first, end - begin)
            begin = end

    def _snapshot_ends(self) -> list[int]:
        """The rows before which a batch must end so as not to mix two snapshots of a vbucket."""
        delivery = self.delivery
        runs = delivery.runs
        if len({run.stream.vbucket for run in runs}) == len(runs):
            return []
        ends: list[int] = []
        begin = 0
        seen: dict[int, int] = {}
        for index, first, last in self._rows_of_runs():
            vbucket = runs[index].stream.vbucket
            if seen.get(vbucket, -1) >= begin:
                ends.append(first)
                begin = first
            seen[vbucket] = last
        return ends

    def positions_at(self, rows: slice) -> dict[int, Position]:
        """The positions of vbuckets after some consecutive changes."""
        delivery = self.delivery
        run_of = delivery.run_of[rows]
        if not len(run_of):
            return {}
        seqnos = delivery.chunk.frames.seqno[delivery.rows][rows]
        if len(delivery.runs) == 1:
            run = delivery.runs[0]
            return {run.stream.vbucket: run.position_at(int(seqnos[-1]))}
        last = np.full(len(delivery.runs), -1)
        last[run_of] = np.arange(len(run_of))  # the last assignment counts
        positions: dict[int, Position] = {}
        for index in np.argsort(last, kind="stable").tolist():
            if last[index] >= 0:
                run = delivery.runs[index]
                positions[run.stream.vbucket] = run.position_at(int(seqnos[last[index]]))
        return positions

    def _batch(self, first: int, last: int, *, no_value: bool) -> pa.RecordBatch:
        delivery = self.delivery
        frames, rows = delivery.chunk.frames, delivery.rows
        part = slice(first, last) if isinstance(rows, slice) else rows[first:last]
        vb_uuid, start, end = (
            column if isinstance(column, int) else column[first:last] for column in delivery.histories()
        )
        collections = frames.collection[part]
        if collections.any():
            self._catalog.cover(np.unique(collections).tolist())
        return to_batch(
            frames,
            part,
            names=self._catalog.names,
            vb_uuid=vb_uuid,
            snapshot_start=start,
            snapshot_end=end,
            no_value=no_value,
        )


def release(portion: Portion) -> None:
    """Release the bytes of a portion, however much of it the application has taken."""
    portion.link.release(portion.delivery)
    portion.link.acknowledge(portion.delivery.chunk.size_bytes)


def _row(event: Event, names: Names) -> pa.RecordBatch:
    """One event as a batch of one row; the value of a system event is its JSON."""
    columns: dict[str, Any] = {
        "op": {Rollback: ROLLBACK, Flush: FLUSH}.get(type(event), SYSTEM),
        "bucket": names.bucket,
        "vbucket": event.vbucket,
    }
    if isinstance(event, Rollback | SystemEvent):
        columns |= {"vb_uuid": signed(event.vb_uuid), "seqno": signed(event.seqno)}
    if isinstance(event, SystemEvent):
        columns |= {"key": event.name.encode(), "value": json_line(event).strip()}
        columns |= dict(zip(("snapshot_start", "snapshot_end"), map(signed, event.snapshot), strict=True))
        if event.collection_id is not None and event.collection_id in names.collections:
            columns["scope"], columns["collection"] = names.collections[event.collection_id]
    return single_row(columns)
