"""The plan of a round, made before anything is done: which vbuckets go back, which are read, by which task.

Every table has its own position in every vbucket, and they need not be the same: a table that is new, or that
missed its commit in a crash, is behind the others. A vbucket is streamed from the position of the table that
is furthest behind; the others leave out what they have. So tables never wait for each other, and a crash
between two commits needs no repair.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from ...history import FailoverLog, RestartAction, plan
from ...model import Position
from ...table.contract import TableVersion
from .bucket_watch import BucketState

__all__ = [
    "ReadRange",
    "ReadRanges",
    "RoundPlan",
    "VBucketDecision",
    "changes_of",
    "decide",
    "divided",
    "plan_round",
]

_TASK_CHANGES = 4_000
"""A task with less to read costs more than what it reads."""
_LONG_TASK_CHANGES = 240_000
"""About as many as a file of the base holds. A task with more to read is divided even if its parts can't run
at the same time: a failed task is repeated whole, and only tasks that have ended count as progress."""
_MOST_TURNS = 32
"""The most tasks that work is divided into, for each task that can run at once."""
_STREAM_COST = 20
"""The fixed cost of a stream, in changes."""


class PlannedTable(Protocol):
    """What planning needs of a table."""

    @property
    def current(self) -> TableVersion: ...

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]: ...


@dataclass(frozen=True, slots=True)
class VBucketDecision:
    """What happens to one vbucket of one table."""

    action: RestartAction
    held: Position
    request: Position
    """Where it goes on, with a vb_uuid that the bucket knows."""
    version: int | None = None
    """The version of the table whose rows come back, if it goes back."""


@dataclass(frozen=True, slots=True)
class ReadRange:
    """What is to be streamed of a vbucket."""

    start: Position
    end: int

    @property
    def changes(self) -> int:
        """How many changes these are, at most."""
        return self.end - self.start.seqno


def changes_of(pieces: Iterable[Mapping[int, ReadRange]]) -> int:
    """How many changes several tasks read, at most."""
    return sum(span.changes for piece in pieces for span in piece.values())


_PACKED = struct.Struct("<HQQQQQ")


class ReadRanges(dict[int, ReadRange]):
    """What a task is to stream, pickled as packed numbers: a thousand objects every round would be slow."""

    def __reduce__(self) -> tuple[Any, ...]:
        packed = (
            _PACKED.pack(vbucket, at.vb_uuid, at.seqno, at.snapshot_start, at.snapshot_end, span.end)
            for vbucket, span in self.items()
            for at in (span.start,)
        )
        return _unpacked_ranges, (b"".join(packed),)


def _unpacked_ranges(packed: bytes) -> ReadRanges:
    return ReadRanges(
        (vbucket, ReadRange(Position(*start), end)) for vbucket, *start, end in _PACKED.iter_unpack(packed)
    )


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round."""

    decisions: tuple[Mapping[int, VBucketDecision], ...]
    """For each table, the vbuckets that go back or start over."""
    ranges: Mapping[int, ReadRange]
    lag: int
    """How many changes the table furthest behind lacks."""
    left_over: int = 0
    """How many of them this round leaves to the next."""

    def going_back(self, table: int) -> dict[int, VBucketDecision]:
        """VBuckets of a table that return to an earlier version."""
        return {
            v: decision
            for v, decision in self.decisions[table].items()
            if decision.action is RestartAction.ROLL_BACK
        }

    def starting_over(self, table: int) -> frozenset[int]:
        """VBuckets of a table that begin again with nothing."""
        decisions = self.decisions[table].items()
        return frozenset(
            vbucket for vbucket, decision in decisions if decision.action is RestartAction.START_OVER
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.ranges and not any(self.decisions)


def decide(
    table: PlannedTable,
    vbucket: int,
    log: FailoverLog,
    high_seqno: int,
    *,
    purge_seqno: int = 0,
    refused: Position | None = None,
    held: Position | None = None,
) -> VBucketDecision:
    """What to do with a vbucket of a table; ``held`` is where it stands, if that is known already.

    ``refused`` is the position that the bucket did not accept. If its failover log allows that position, it
    has purged changes after it, and nothing older will be accepted either.
    """
    held = table.current.position(vbucket) if held is None else held
    if not held.seqno:  # nothing is held that could be taken back; many vbuckets stay empty forever
        action = RestartAction.BACKFILL if high_seqno else RestartAction.RESUME
        return VBucketDecision(action, held, Position.BEGINNING)
    is_on_newest = 0 < held.seqno <= high_seqno and held.vb_uuid == log.newest.vb_uuid
    if is_on_newest and refused is None and held.seqno >= purge_seqno:
        # the usual case: no need to look at the past
        return VBucketDecision(RestartAction.RESUME, held, held)
    ways_back: list[tuple[int, Position]] = []

    def earlier() -> Iterator[Position]:
        for version, position in table.lineage(vbucket):
            ways_back.append((version, position))
            yield position

    decided = plan(
        held, None, producer_log=log, high_seqno=high_seqno, purge_seqno=purge_seqno, earlier=earlier()
    )
    if refused is not None and decided.request == refused and refused.seqno:
        return VBucketDecision(RestartAction.START_OVER, held, Position.BEGINNING)
    version = None
    if decided.action is RestartAction.ROLL_BACK:
        version = next(number for number, position in ways_back if position == decided.base)
    return VBucketDecision(decided.action, held, decided.request, version)


def plan_round(
    tables: Sequence[PlannedTable],
    state: BucketState,
    *,
    refused: Mapping[int, Position],
    start_over: Iterable[int] = (),
    ends: Mapping[int, int] | None = None,
    skipped: Iterable[int] = (),
    max_changes: int | None = None,
    first: int = 0,
    held: Sequence[Mapping[int, Position]] | None = None,
) -> RoundPlan:
    """What to do in this state of the bucket.

    ``start_over`` are vbuckets that begin again whatever the tables hold, ``ends`` seqnos beyond which
    nothing is read, ``skipped`` vbuckets that wait for their next attempt. At most ``max_changes`` are read,
    beginning with vbucket ``first``. ``held`` is where each table stands, if the caller knows it already.
    """
    decisions: list[dict[int, VBucketDecision]] = [{} for _ in tables]
    anew, waiting = set(start_over), set(skipped)
    stands = [dict(table.current.positions) for table in tables] if held is None else held
    ranges: dict[int, ReadRange] = {}
    lag = 0
    for vbucket, log in state.failover_logs.items():
        high = state.high_seqnos.get(vbucket)
        if high is None:
            continue  # no node has it at this moment
        starts = []
        for index, table in enumerate(tables):
            stand = stands[index].get(vbucket, Position.BEGINNING)
            if vbucket in anew:
                decision = VBucketDecision(RestartAction.START_OVER, stand, Position.BEGINNING)
            else:
                decision = decide(table, vbucket, log, high, refused=refused.get(vbucket), held=stand)
            if decision.action in (RestartAction.ROLL_BACK, RestartAction.START_OVER):
                decisions[index][vbucket] = decision
            starts.append(decision.request)
        start = min(starts, key=lambda position: position.seqno)
        end = high if ends is None else min(high, ends.get(vbucket, high))
        lag += max(0, high - start.seqno)
        if end > start.seqno and vbucket not in waiting:
            ranges[vbucket] = ReadRange(start, end)
    chosen = ranges if max_changes is None else _limited(ranges, max_changes, first)
    read = sum(span.changes for span in chosen.values())
    return RoundPlan(tuple(decisions), chosen, lag, sum(span.changes for span in ranges.values()) - read)


def _limited(ranges: Mapping[int, ReadRange], max_changes: int, first: int) -> dict[int, ReadRange]:
    """Whole vbuckets as far as the limit goes, in order and beginning with ``first``; the last one in part.
    The bucket may go on to the end of a snapshot.
    """
    order = sorted(ranges)
    begin = bisect_left(order, first)
    chosen: dict[int, ReadRange] = {}
    room = max_changes
    for vbucket in order[begin:] + order[:begin]:
        if room <= 0:
            break
        span = ranges[vbucket]
        chosen[vbucket] = ReadRange(span.start, min(span.end, span.start.seqno + room))
        room -= span.changes
    return chosen


def divided(
    ranges: Mapping[int, ReadRange],
    homes: Mapping[int, str],
    parallelism: int,
    fresh: AbstractSet[int] = frozenset(),
) -> list[ReadRanges]:
    """Ranges as tasks of about equal work: neighbours of one node each, so that a task needs few connections
    and writes files whose rows lie close together.

    ``fresh`` are vbuckets that a table does not have yet: they become files of the base, which don't overlap.
    Neighbours among them stay together whatever their node: a node often has, say, every third vbucket.
    """
    if not ranges:
        return []
    costs = {vbucket: span.changes + _STREAM_COST for vbucket, span in ranges.items()}
    total = sum(costs.values())
    useful = max(1, total // _TASK_CHANGES)
    turns = min(_MOST_TURNS, -(-total // (_LONG_TASK_CHANGES * parallelism)))
    wanted = min(parallelism, useful) if turns == 1 else parallelism * turns
    by_home: dict[str | None, list[int]] = {}
    for vbucket in sorted(ranges):
        home = None if vbucket in fresh else homes.get(vbucket, "")
        by_home.setdefault(home, []).append(vbucket)
    tasks: list[ReadRanges] = []
    for vbuckets in by_home.values():
        cost = sum(costs[vbucket] for vbucket in vbuckets)
        parts = max(1, min(len(vbuckets), round(wanted * cost / total)))
        edges = list(accumulate((costs[vbucket] for vbucket in vbuckets), initial=0))
        begin = 0
        for part in range(1, parts + 1):
            end = len(vbuckets) if part == parts else bisect_left(edges, cost * part / parts)
            if end > begin:
                tasks.append(ReadRanges((vbucket, ranges[vbucket]) for vbucket in vbuckets[begin:end]))
                begin = end
    return tasks
