"""The executors' half of a round: streams of some vbuckets, straight into files of the tables.

A task streams each of its vbuckets from a position to the end of the snapshot that holds the last seqno
wanted, passes the rows to a sink for each table, and answers with what to commit. Nothing is visible before
the driver commits it, so a task may fail, be repeated, or run twice: only the answers that the driver gets
count, and in each of them rows and positions agree.

A vbucket that can't be read to such an end (the bucket took changes back, no node has it, a connection was
lost for too long) is left out with all its rows, and the answer says why.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ...clock import SYSTEM, Clock
from ...columns.row_kinds import SYSTEM as SYSTEM_ROW
from ...columns.row_kinds import empties_collection, kind_of
from ...crashpoints import crash_point
from ...errors import ConnectError, LoginError
from ...model import MAX_SEQNO, Position
from ...table.contract import TaskResult
from ...table.sink import RowSink, TableWriter
from .change_log import ChangeLogTarget, ChangeSink
from .idle_sources import borrowed_source
from .planning import ReadRange
from .reading import read_ranges

__all__ = ["RoundTask", "TableTarget", "TaskAnswer"]


@dataclass(frozen=True)
class TableTarget:
    """A table that a round writes to."""

    writer: TableWriter
    scope: str
    collection: str
    fresh: frozenset[int]
    """VBuckets without a row in it."""
    floors: Mapping[int, int]
    """By vbucket, the seqno that the table has already, if the stream begins below it."""
    waiting: frozenset[int] = frozenset()
    """VBuckets of ``floors`` that are read from the beginning, for another table and not for this one: a
    server always allows that, even if it has purged deletions. The next round asks from where this table
    stands, which the server refuses if the table has missed any.
    """

    @property
    def unwanted(self) -> dict[int, int]:
        """By vbucket, the last seqno that is not for the table."""
        return {**self.floors, **dict.fromkeys(self.waiting, MAX_SEQNO)}


_PACKED = struct.Struct("<HQQ")


class ReachedPositions(dict[int, Position]):
    """Ends of snapshots, pickled as packed numbers: a thousand objects every round would be slow."""

    def __reduce__(self) -> tuple[Any, ...]:
        packed = (_PACKED.pack(vbucket, at.vb_uuid, at.seqno) for vbucket, at in self.items())
        return _unpacked_positions, (b"".join(packed),)


def _unpacked_positions(packed: bytes) -> ReachedPositions:
    return ReachedPositions(
        (vbucket, Position.at(vb_uuid, seqno)) for vbucket, vb_uuid, seqno in _PACKED.iter_unpack(packed)
    )


@dataclass
class TaskAnswer:
    """What a task did."""

    results: list[TaskResult] = field(default_factory=list)
    """Of each table; several of one if a collection was created or dropped while the stream was read."""
    tables: list[int] = field(default_factory=list)
    """The table of each result."""
    logged: TaskResult | None = None
    """For the change log, if there is one."""
    positions: ReachedPositions = field(default_factory=ReachedPositions)
    """VBuckets that were read to the end of a snapshot, and where they stand."""
    emptied: set[tuple[int, int]] = field(default_factory=set)
    """Table and vbucket of rows that are gone with their collection."""
    refused: dict[int, Position] = field(default_factory=dict)
    """VBuckets that the bucket refused to go on with, and from where."""
    held: dict[int, str] = field(default_factory=dict)
    """VBuckets with changes that some copy does not have on disk, and which one."""
    failed: dict[int, str] = field(default_factory=dict)
    """VBuckets that could not be read, and why."""
    read_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class RoundTask:
    """What a job runs for each piece of a round; picklable."""

    given: Mapping[str, str] = field(repr=False)
    """Options of the source."""
    targets: tuple[TableTarget, ...]
    log: ChangeLogTarget | None = None
    planned_branches: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By vbucket, the vb_uuids that the plan knew, if it relies on more than the start of the stream."""

    def __call__(self, ranges: Mapping[int, ReadRange]) -> TaskAnswer:
        crash_point("mirror.in-task")
        began = SYSTEM.monotonic()
        reader = _TaskReader(self)
        try:
            with borrowed_source(self.given) as source:
                read_ranges(source, ranges, reader)
        except LoginError:
            raise
        except ConnectError as error:  # no node answers; the next round may succeed
            for vbucket in ranges:
                reader.fail(vbucket, str(error))
        answer = reader.finish(ranges)
        answer.read_s = SYSTEM.monotonic() - began - answer.write_s
        crash_point("mirror.after-task")
        return answer


class _Collection:
    """The sinks of one table."""

    def __init__(self, target: TableTarget) -> None:
        self.target = target
        self.emptied: set[int] = set()
        self._sinks: list[RowSink] = []
        self._generation: dict[int, int] = {}
        """By vbucket: which sink takes its rows; when the collection is created or dropped, the next one."""
        self._seen: set[int] = set()
        self._floors = target.unwanted

    def add(self, batch: pa.RecordBatch) -> None:
        rows = self._own(batch)
        if not rows.num_rows:
            return
        vbuckets: NDArray[np.int32] = rows["vbucket"].to_numpy(zero_copy_only=False)
        present = np.unique(vbuckets).tolist()
        self._seen.update(present)
        generations = {self._generation.get(vbucket, 0) for vbucket in present}
        if len(generations) == 1:
            self._sink(generations.pop()).add(rows)
            return
        row_generation = np.array([self._generation.get(vbucket, 0) for vbucket in vbuckets.tolist()])
        for generation in sorted(generations):
            self._sink(generation).add(rows.filter(pa.array(row_generation == generation)))

    def _own(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of this collection that the table has not got."""
        is_own = pc.and_(
            pc.equal(batch["scope"], self.target.scope), pc.equal(batch["collection"], self.target.collection)
        )
        is_own = pc.fill_null(is_own, False)
        if self._floors:
            # a change up to its floor is in the table, or superseded by one that is
            floor = np.zeros(max(*self._floors, int(pc.max(batch["vbucket"]).as_py() or 0)) + 1, np.int64)
            for vbucket, seqno in self._floors.items():
                floor[vbucket] = seqno
            vbuckets = batch["vbucket"].to_numpy(zero_copy_only=False)
            is_own = pc.and_(
                is_own, pa.array(batch["seqno"].to_numpy(zero_copy_only=False) > floor[vbuckets])
            )
        return batch if pc.all(is_own).as_py() else batch.filter(is_own)

    def empty(self, vbucket: int) -> None:
        """Forget a vbucket's rows so far: the collection was created or dropped."""
        if vbucket in self._seen:
            generation = self._generation.get(vbucket, 0)
            self._sink(generation).discard([vbucket])
            self._generation[vbucket] = generation + 1
            self._seen.discard(vbucket)
        self.emptied.add(vbucket)

    def is_own(self, event: pa.RecordBatch) -> bool:
        """Whether a system event is about this collection, and newer than what the table has."""
        vbucket, seqno = event["vbucket"][0].as_py(), event["seqno"][0].as_py()
        own = (event["scope"][0].as_py(), event["collection"][0].as_py())
        return own == (self.target.scope, self.target.collection) and seqno > self._floors.get(vbucket, 0)

    def _sink(self, generation: int) -> RowSink:
        while len(self._sinks) <= generation:
            fresh = self.target.fresh if not self._sinks else frozenset[int]()
            self._sinks.append(self.target.writer.sink(fresh))
        return self._sinks[generation]

    def complete(self, vbucket: int) -> None:
        for sink in self._sinks:
            sink.complete(vbucket)

    def discard(self, vbuckets: Iterable[int]) -> None:
        for sink in self._sinks:
            sink.discard(vbuckets)
        self.emptied.difference_update(vbuckets)

    def finish(self) -> Iterator[TaskResult]:
        for sink in self._sinks:
            yield sink.finish()


class _TaskReader:
    """Takes what the streams of a task bring."""

    def __init__(self, task: RoundTask, clock: Clock = SYSTEM) -> None:
        self.answer = TaskAnswer()
        self._collections = [_Collection(target) for target in task.targets]
        self._log = None if task.log is None else ChangeSink(task.log)
        self._planned_branches = task.planned_branches
        branches = {} if task.log is None else task.log.branches
        self._kept_in_log = {vbucket: branch.seqno for vbucket, branch in branches.items()}
        """Up to where the log stays as it is, in vbuckets where it branches: they are read that far."""
        self._clock = clock
        self._dropped: set[int] = set()

    def add(self, batch: pa.RecordBatch) -> None:
        """Rows as they come."""
        crash_point("mirror.in-read")
        began = self._clock.monotonic()
        kind = kind_of(batch)
        if kind is None:
            for collection in self._collections:
                collection.add(batch)
        elif kind == SYSTEM_ROW and empties_collection(batch):
            for collection in self._collections:
                if collection.is_own(batch):
                    collection.empty(batch["vbucket"][0].as_py())
        if self._log is not None and kind in (None, SYSTEM_ROW):
            self._log.add(batch)
        self.answer.write_s += self._clock.monotonic() - began

    def refuse(self, vbucket: int, requested: Position) -> None:
        """Note that the bucket took back the position at which a vbucket's stream began."""
        self.answer.refused[vbucket] = requested
        self._dropped.add(vbucket)

    def hold(self, vbucket: int, why: str) -> None:
        """Not every copy of a vbucket has its changes on disk."""
        self.answer.held[vbucket] = why
        self._dropped.add(vbucket)

    def fail(self, vbucket: int, why: str) -> None:
        """A vbucket can't be read to the end of a snapshot."""
        self.answer.failed[vbucket] = why
        self._dropped.add(vbucket)

    def stand(self, vbucket: int, position: Position) -> None:
        """A vbucket has come to the end of a snapshot."""
        planned = self._planned_branches.get(vbucket)
        has_branched = planned is not None and position.seqno and position.vb_uuid not in planned
        if has_branched or position.seqno < self._kept_in_log.get(vbucket, 0):
            # The bucket has branched since the plan, though not before the start of the stream. A table that
            # is further, or the change log, may stand on changes that were taken back: the next plan sees it.
            self.refuse(vbucket, Position.BEGINNING)
            return
        self.answer.positions[vbucket] = Position.at(position.vb_uuid, position.seqno)
        for collection in self._collections:
            collection.complete(vbucket)

    def finish(self, ranges: Mapping[int, ReadRange]) -> TaskAnswer:
        """Write the rest."""
        began = self._clock.monotonic()
        answer = self.answer
        for index, collection in enumerate(self._collections):
            collection.discard(self._dropped)
            for result in collection.finish():
                answer.results.append(result)
                answer.tables.append(index)
            # a table has rows of an earlier collection only in vbuckets that it has read
            answer.emptied.update(
                (index, vbucket) for vbucket in collection.emptied if vbucket not in collection.target.fresh
            )
        if self._log is not None:
            self._log.discard(self._dropped)
            answer.logged = self._log.finish(v for v in ranges if v not in self._dropped)
        answer.write_s += self._clock.monotonic() - began
        return answer
