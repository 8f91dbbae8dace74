"""What the tasks of a round must know of the tables and of the change log that they write to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...history import RestartAction
from ...model import Position
from ...table.contract import Table
from ...table.rows import DELETED
from ...table.sink import TableWriter
from .bucket_watch import BucketState
from .change_log import ChangeLogTarget, LogBranch, branch_point
from .planning import ReadRange, RoundPlan, VBucketDecision
from .task import TableTarget

__all__ = ["log_target", "planned_branches", "table_target", "with_branches"]


def table_target(
    table: Table,
    held: Mapping[int, Position],
    decisions: Mapping[int, VBucketDecision],
    ranges: Mapping[int, ReadRange],
) -> TableTarget:
    """The target for a table that stands at ``held``, for these ranges."""
    floors = _floors(held, decisions, ranges)
    return TableTarget(
        TableWriter(
            table.store,
            table.schema,
            table.secret,
            tuple(table.files()),
            keep_deletes=DELETED.name in table.schema.names,
            documents=table.documents,
        ),
        str(table.source["scope"]),
        str(table.source["collection"]),
        frozenset(v for v in ranges if held.get(v, Position.BEGINNING).seqno == 0),
        floors,
        frozenset(v for v in floors if not ranges[v].start.seqno),
    )


def log_target(
    log: Table,
    held: Mapping[int, Position],
    state: BucketState,
    decisions: Mapping[int, VBucketDecision],
    ranges: Mapping[int, ReadRange],
) -> ChangeLogTarget:
    """The target for a change log that stands at ``held``, for these ranges."""
    branches = {}
    for vbucket, decision in decisions.items():
        if vbucket in ranges:
            producer = state.failover_logs[vbucket]
            seqno = branch_point(log, vbucket, producer)
            branches[vbucket] = LogBranch(seqno, producer.newest.vb_uuid, seqno < decision.held.seqno)
    files = tuple(log.files())
    return ChangeLogTarget(
        log.store,
        log.secret,
        files,
        log.version + 1,
        _floors(held, decisions, ranges),
        branches,
        {file.path: log.mask(file).serialize() for file in files if file.vector is not None},
    )


def planned_branches(
    state: BucketState, targets: Iterable[TableTarget], log: ChangeLogTarget | None
) -> dict[int, frozenset[int]]:
    """The branches that the plan knew, for vbuckets where a table is further than the start of the stream or
    the change log branches: the bucket itself checks only the start of a stream.
    """
    vbuckets = {vbucket for target in targets for vbucket in target.floors}
    if log is not None:
        vbuckets |= log.floors.keys() | log.branches.keys()
    return {
        vbucket: frozenset(entry.vb_uuid for entry in state.failover_logs[vbucket].entries)
        for vbucket in vbuckets
    }


def with_branches(
    plan: RoundPlan, state: BucketState, tables: Sequence[Table], log: Table, waiting: Iterable[int]
) -> dict[int, ReadRange]:
    """The ranges of a plan, extended where the change log branches: they include all that comes again of what
    it holds, since only the round of the branch tells that apart from what is new.

    ``waiting`` are vbuckets that are not to be read yet.
    """
    ranges = dict(plan.ranges)
    every = [*tables, log]
    for vbucket in plan.decisions[-1].keys() - set(waiting):
        starts = [
            decisions[vbucket].request if vbucket in decisions else table.current.position(vbucket)
            for decisions, table in zip(plan.decisions, every, strict=True)
        ]
        start = min(starts, key=lambda position: position.seqno)
        planned = ranges.get(vbucket, ReadRange(start, start.seqno))
        stands = branch_point(log, vbucket, state.failover_logs[vbucket])
        ranges[vbucket] = ReadRange(planned.start, max(planned.end, stands))
    return ranges


def _floors(
    held: Mapping[int, Position], decisions: Mapping[int, VBucketDecision], ranges: Mapping[int, ReadRange]
) -> dict[int, int]:
    """The table's seqno in vbuckets where it is further than the start of the stream."""
    floors = {}
    for vbucket, span in ranges.items():
        decision = decisions.get(vbucket)
        if decision is not None and decision.action is RestartAction.START_OVER:
            continue
        stand = held.get(vbucket, Position.BEGINNING) if decision is None else decision.request
        if stand.seqno > span.start.seqno:
            floors[vbucket] = stand.seqno
    return floors
