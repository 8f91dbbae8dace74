"""What a round will do, decided without a bucket and without a table."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tailrace.history import FailoverLog, RestartAction
from tailrace.model import MAX_U64, Position
from tailrace.spark.rounds.bucket_watch import BucketState
from tailrace.spark.rounds.planning import ReadRange, ReadRanges, VBucketDecision, decide, divided, plan_round
from tailrace.spark.rounds.task import ReachedPositions, TaskAnswer
from tailrace.table.contract import TableVersion

LOG = FailoverLog.of([(7, 0)])
BRANCHED = FailoverLog.of([(8, 50), (7, 0)])


@dataclass
class PlannedTable:
    """A table with one vbucket in some versions, newest first."""

    positions: list[Position] = field(default_factory=list)

    @property
    def current(self) -> TableVersion:
        newest = {0: self.positions[0]} if self.positions else {}
        return TableVersion(len(self.positions), 0, "", newest)

    def lineage(self, vbucket: int) -> Iterator[tuple[int, Position]]:
        for age, position in enumerate(self.positions):
            yield len(self.positions) - age, position


def at(seqno: int, vb_uuid: int = 7) -> Position:
    return Position.at(vb_uuid, seqno)


def state(high: int, log: FailoverLog = LOG, **more: Mapping[int, int]) -> BucketState:
    return BucketState(0.0, {0: high, **more.get("highs", {})}, {0: log}, {0: "node"})


def test_a_vbucket_goes_on_where_its_branch_does() -> None:
    assert decide(PlannedTable([at(40)]), 0, LOG, 60) == VBucketDecision(RestartAction.RESUME, at(40), at(40))
    assert decide(PlannedTable([at(40)]), 0, BRANCHED, 60).action is RestartAction.RESUME
    assert decide(PlannedTable(), 0, LOG, 60) == VBucketDecision(
        RestartAction.BACKFILL, Position.BEGINNING, Position.BEGINNING
    )


def test_a_vbucket_goes_back_to_the_newest_version_that_the_bucket_has() -> None:
    table = PlannedTable([at(60), at(55), at(45), at(30)])
    assert decide(table, 0, BRANCHED, 70) == VBucketDecision(RestartAction.ROLL_BACK, at(60), at(45), 2)
    unknown = FailoverLog.of([(9, 0)])
    assert decide(table, 0, unknown, 70) == VBucketDecision(
        RestartAction.START_OVER, at(60), Position.BEGINNING
    )


def test_what_is_refused_though_the_log_allows_it_was_purged() -> None:
    table = PlannedTable([at(60), at(30)])
    assert decide(table, 0, LOG, 70, refused=at(60)).action is RestartAction.START_OVER
    assert decide(table, 0, LOG, 70, refused=at(65)).action is RestartAction.RESUME, "that was another place"
    assert decide(table, 0, LOG, 70, purge_seqno=61).action is RestartAction.START_OVER


def test_a_vbucket_is_read_from_where_the_last_table_stands() -> None:
    plan = plan_round([PlannedTable([at(40)]), PlannedTable([at(20)])], state(60), refused={})
    assert plan.ranges == {0: ReadRange(at(20), 60)}
    assert plan.lag == 40 and not any(plan.decisions)
    assert plan_round([PlannedTable([at(60)])], state(60), refused={}).is_empty
    anew = plan_round([PlannedTable([at(60)])], state(60), refused={}, start_over=[0])
    assert anew.starting_over(0) == {0} and anew.ranges == {0: ReadRange(Position.BEGINNING, 60)}


def test_ranges_and_positions_travel_as_numbers() -> None:
    spans = ReadRanges(
        {7: ReadRange(Position(MAX_U64, 5, 3, 9), MAX_U64), 0: ReadRange(Position.BEGINNING, 0)}
    )
    assert pickle.loads(pickle.dumps(spans)) == spans
    many = ReadRanges((vbucket, ReadRange(at(vbucket), 2**40)) for vbucket in range(1024))
    assert len(pickle.dumps(many)) < 43 * len(many) + 200
    reached = ReachedPositions({65535: at(MAX_U64, MAX_U64), 1: Position.BEGINNING})
    answer = pickle.loads(pickle.dumps(TaskAnswer(positions=reached)))
    assert answer.positions == reached and isinstance(answer.positions, ReachedPositions)


def test_what_waits_and_what_lies_beyond_the_end_is_left_out() -> None:
    tables = [PlannedTable([at(40)])]
    assert not plan_round(tables, state(60), refused={}, skipped=[0]).ranges
    assert plan_round(tables, state(60), refused={}, ends={0: 50}).ranges == {0: ReadRange(at(40), 50)}
    assert not plan_round(tables, state(60), refused={}, ends={0: 40}).ranges
    assert not plan_round(tables, BucketState(0.0, {}, {0: LOG}, {}), refused={}).ranges, "nobody has it"


def test_a_backlog_is_cut_and_the_next_round_goes_on_there() -> None:
    logs = dict.fromkeys(range(4), LOG)
    bucket = BucketState(0.0, dict.fromkeys(range(4), 100), logs, {})
    first = plan_round([PlannedTable()], bucket, refused={}, max_changes=150)
    assert {v: span.end for v, span in first.ranges.items()} == {0: 100, 1: 50}
    assert (first.lag, first.left_over) == (400, 250)
    second = plan_round([PlannedTable()], bucket, refused={}, max_changes=250, first=2)
    assert {v: span.end for v, span in second.ranges.items()} == {2: 100, 3: 100, 0: 50}


def ranges(*changes: int) -> dict[int, ReadRange]:
    return {vbucket: ReadRange(Position.BEGINNING, count) for vbucket, count in enumerate(changes)}


def test_little_work_is_one_task_and_much_is_shared() -> None:
    assert len(divided(ranges(*[3] * 100), {}, 8)) == 1
    tasks = divided(ranges(*[10_000] * 64), {}, 8)
    assert [len(task) for task in tasks] == [8] * 8
    assert [min(task) for task in tasks] == list(range(0, 64, 8)), "neighbours stay together"
    assert divided({}, {}, 8) == []


def test_a_task_reads_from_one_node() -> None:
    homes = {vbucket: f"node {vbucket % 2}" for vbucket in range(64)}
    tasks = divided(ranges(*[10_000] * 64), homes, 4)
    assert len(tasks) == 4
    assert all(len({homes[vbucket] for vbucket in task}) == 1 for task in tasks)
    assert sorted(vbucket for task in tasks for vbucket in task) == list(range(64))


def test_a_first_load_keeps_neighbours_together_whoever_has_them() -> None:
    """Otherwise files of different tasks would overlap, and those of a first load must not."""
    homes = {vbucket: f"node {vbucket % 3}" for vbucket in range(64)}
    tasks = divided(ranges(*[10_000] * 64), homes, 4, fresh=set(range(48)))
    whole = [task for task in tasks if min(task) < 48]
    assert [vbucket for task in whole for vbucket in task] == list(range(48))
    assert len(whole) == 3
    rest = [task for task in tasks if min(task) >= 48]
    assert all(len({homes[vbucket] for vbucket in task}) == 1 for task in rest), "as ever"


def test_work_that_is_not_even_is_divided_by_what_it_costs() -> None:
    tasks = divided(ranges(100_000, *[1_000] * 100), {}, 2)
    assert [len(task) for task in tasks] == [2, 99], "a stream costs something, too"


def test_a_very_long_task_is_divided_although_nobody_is_free() -> None:
    for cores, tasks in ((1, 17), (2, 18), (3, 18), (8, 24), (16, 32)):
        assert len(divided(ranges(*[100_000] * 40), {}, cores)) == tasks, "nobody is idle in the last turn"
    assert len(divided(ranges(*[1_000_000] * 1024), {}, 2)) == 64
