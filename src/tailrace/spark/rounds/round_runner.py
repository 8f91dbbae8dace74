"""A round: vbuckets go back, tasks read and write what is new, one commit a table; and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...crashpoints import crash_point
from ...table.contract import Table
from ...tracing import add_span, span
from .assignment import Assignment
from .bucket import BucketState
from .committing import RoundCommitter
from .freshness import Freshness, Stands
from .handle import MirrorHandle
from .housekeeping import Housekeeping
from .planning import Range, RoundPlan, divided
from .progress import RoundProgress, TableFigures
from .targets import log_target, planned_branches, table_target, with_branches
from .task import RoundTask, TaskAnswer
from .verdicts import Verdicts

__all__ = ["RoundRunner"]


class RoundRunner:
    """Does the rounds of a mirror, one after another."""

    def __init__(
        self,
        asked: Assignment,
        handle: MirrorHandle,
        verdicts: Verdicts,
        stands: Stands,
        freshness: Freshness,
        committer: RoundCommitter,
        housekeeping: Housekeeping,
        *,
        on_committed: Callable[[RoundPlan], None],
        task_retry_s: float,
    ) -> None:
        """``task_retry_s``: how long a task takes up a lost connection again."""
        self._asked = asked
        self._clock = asked.clock
        self._handle = handle
        self._verdicts = verdicts
        self._stands = stands
        self._freshness = freshness
        self._committer = committer
        self._housekeeping = housekeeping
        self._on_committed = on_committed
        self._task_options = {**asked.given, "retryFor": f"{task_retry_s:g}"}
        self._batch = 0
        self.committed_at = -1e9
        """When the last round was committed, by the monotonic clock."""

    def run(self, state: BucketState, plan: RoundPlan, planned_s: float) -> bool:
        """Whether anything was committed."""
        with span("tailrace.mirror.round", bucket=self._asked.bucket_name, batch=self._batch) as told:
            now_ns = self._clock.time_ns()
            add_span("tailrace.mirror.plan", now_ns - int(planned_s * 1e9), now_ns)
            return self._traced_round(state, plan, planned_s, told)

    def _traced_round(
        self, state: BucketState, plan: RoundPlan, planned_s: float, told: dict[str, Any]
    ) -> bool:
        began = self._clock.monotonic()
        number = self._batch
        self._handle.say(
            f"round {number}: {sum(span.changes for span in plan.ranges.values())} changes to read"
        )
        with span("tailrace.mirror.go_back"):
            went_back, rows_rolled_back = self._committer.go_back(plan)
        rolled_back = set(went_back)
        self._verdicts.went_back(rolled_back)
        stood = self._asked.tables[0].current.positions
        back_s = self._clock.monotonic() - began
        decisions = plan.decisions
        ranges: Mapping[int, Range] = plan.ranges
        log = None
        if self._asked.log is not None:
            waiting = self._verdicts.waiting(self._clock.monotonic())
            ranges = with_branches(plan, state, self._asked.tables, self._asked.log, waiting)
            log = log_target(self._asked.log, self._stands.of(self._asked.log), state, decisions[-1], ranges)
        crash_point("mirror.after-plan")
        fresh = {vbucket for vbucket, span in ranges.items() if not span.start.seqno}
        pieces = divided(ranges, state.homes, self._asked.jobs.parallelism, fresh)
        changes = sum(span.changes for span in ranges.values())
        description = f"tailrace mirror of {self._asked.bucket_name}: round {number}, {changes} changes"
        asking = self._clock.monotonic()
        while True:
            targets = [
                table_target(table, self._stands.of(table), decisions[index], ranges)
                for index, table in enumerate(self._asked.tables)
            ]
            branches = planned_branches(state, targets, log)
            task = RoundTask(self._task_options, tuple(targets), log, branches)
            with span("tailrace.mirror.read_and_write", tasks=len(pieces), planned_changes=changes):
                answers: list[TaskAnswer] = self._asked.jobs.run(task, pieces, description)
            if not self._committer.settle_columns(answers):
                break
        answered_s = self._clock.monotonic() - asking
        self._verdicts.note(answers, self._clock.monotonic())
        committing = self._clock.monotonic()
        with span("tailrace.mirror.commit"):
            counted = self._committer.commit(plan, answers, log)
        self._verdicts.committed(answers)
        self.committed_at = self._clock.monotonic()
        for vbucket in counted.started_over - rolled_back:
            went_back[vbucket] = (stood[vbucket].seqno if vbucket in stood else 0, 0)
        rolled_back.update(counted.started_over)
        self._on_committed(plan)
        maintaining = self._clock.monotonic()
        with span("tailrace.mirror.maintain"):
            compacted, failure = self._keep_house()
        if rolled_back:
            self._freshness.went_back(state)
        self._freshness.reached(state)
        done = self._clock.monotonic()
        has_moved = counted.committed or bool(rolled_back)
        told.update(
            changes=counted.changes,
            rolled_back_vbuckets=len(rolled_back),
            rows_written=counted.rows_written,
            rows_masked=counted.rows_masked,
            bytes_written=counted.bytes_written,
            version=self._asked.tables[0].version,
        )
        if has_moved:
            self._report(
                RoundProgress(
                    batch=number,
                    changes=counted.changes,
                    rolled_back=tuple(sorted(rolled_back)),
                    versions=tuple(table.version for table in self._asked.tables),
                    rows_written=counted.rows_written,
                    rows_masked=counted.rows_masked,
                    bytes_written=counted.bytes_written,
                    rows_rolled_back=rows_rolled_back + counted.rows_rolled_back,
                    rescued=counted.rescued,
                    lag_changes=self._freshness.lag(state),
                    lag_s=done - self._freshness.as_of,
                    seconds={
                        "plan": planned_s + asking - began - back_s,
                        "read": max((answer.read_s for answer in answers), default=0.0),
                        "write": max((answer.write_s for answer in answers), default=0.0),
                        "schedule": _waited_s(answers, answered_s),
                        "commit": back_s + maintaining - committing,
                        "maintain": done - maintaining,
                        "compaction": self._housekeeping.step_s if compacted else 0.0,
                    },
                    went_back=went_back,
                    behind=self._freshness.behind(state),
                    positions=self._asked.tables[0].current.positions,
                    compacted=compacted,
                    tables=tuple(self._figures_of(table) for table in self._asked.tables),
                )
            )
        if failure is not None:
            raise failure
        return has_moved

    def _keep_house(self) -> tuple[str, Exception | None]:
        """Compaction and cleaning; what was compacted, or went wrong: the round is done all the same."""
        if not self._asked.settings.maintenance:
            return "", None
        try:
            compacted = self._housekeeping.turn()
            self._housekeeping.clean()
        except Exception as error:  # noqa: BLE001 - raised when the round has been reported
            return "", error
        return compacted, None

    def _report(self, progress: RoundProgress) -> None:
        self._batch += 1
        self._handle.report(progress)
        if self._asked.on_progress is not None:
            self._asked.on_progress(progress)

    def _figures_of(self, table: Table) -> TableFigures:
        files, versions = table.files(), list(table.versions())
        now_ms = self._clock.time_ns() // 1_000_000
        return TableFigures(
            table.uri,
            len(files),
            sum(file.rows - file.live_rows for file in files),
            len(versions),
            max(0, now_ms - versions[-1].timestamp_ms) / 1000 if versions else 0.0,
        )


def _waited_s(answers: Sequence[TaskAnswer], answered_s: float) -> float:
    """Of the time until all tasks had answered, that in which the longest was not at work: what it takes to
    start a job and its tasks, and to wait for a place.
    """
    return max(0.0, answered_s - max((answer.read_s + answer.write_s for answer in answers), default=0.0))
