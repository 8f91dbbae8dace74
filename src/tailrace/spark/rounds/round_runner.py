"""A round: vbuckets go back, tasks read and write what is new, one commit per table; and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ...clock import Clock
from ...crashpoints import crash_point
from ...model import Position
from ...table.contract import Table
from ...tracing import add_span, span
from .assignment import Assignment
from .bucket_watch import BucketState
from .change_log import ChangeLogTarget
from .committing import RoundCommitter, RoundCounts
from .freshness import Freshness, Stands
from .handle import MirrorHandle
from .housekeeping import Housekeeping
from .planning import ReadRange, RoundPlan, divided
from .progress import RoundProgress, RoundUnderway, TableCounts, TableFigures
from .task import RoundTask, TableTarget, TaskAnswer
from .task_targets import log_target, planned_branches, table_target, with_branches
from .troubled_vbuckets import TroubledVBuckets

__all__ = ["RoundRunner"]


class RoundRunner:
    """Does the rounds of a mirror, one after another."""

    def __init__(
        self,
        asked: Assignment,
        handle: MirrorHandle,
        troubled: TroubledVBuckets,
        stands: Stands,
        freshness: Freshness,
        committer: RoundCommitter,
        housekeeping: Housekeeping,
        *,
        on_committed: Callable[[RoundPlan], None],
        task_retry_s: float,
    ) -> None:
        """``task_retry_s``: how long a task tries to reconnect when its connection is lost."""
        self._asked = asked
        self._clock = asked.clock
        self._handle = handle
        self._troubled = troubled
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
        """Do one round; return whether anything was committed."""
        with span("tailrace.mirror.round", bucket=self._asked.bucket_name, batch=self._batch) as told:
            now_ns = self._clock.time_ns()
            add_span("tailrace.mirror.plan", now_ns - int(planned_s * 1e9), now_ns)
            changes = sum(piece.changes for piece in plan.ranges.values())
            underway = RoundUnderway(
                self._batch, changes, plan.left_over, self._clock, self._asked.jobs.is_waiting
            )
            self._handle.say(underway)
            time = _Spent(self._clock, planned_s)
            with time.spent("commit"):
                if any(plan.decisions):
                    underway.step = "go back"
                back = self._go_back(plan)
            written = self._read_and_write(state, plan, time, underway)
            answers = written.answers
            self._troubled.note(answers, self._clock.monotonic())
            underway.step = "commit"
            with time.spent("commit"):
                counted = self._commit(plan, written, back)
            underway.step = "maintain"
            with time.spent("maintain"):
                with span("tailrace.mirror.maintain"):
                    compacted, failure = self._keep_house()
                if back.vbuckets:
                    self._freshness.went_back(state)
                self._freshness.reached(state)
            time.compaction_s = self._housekeeping.step_s if compacted else 0.0
            total = counted.total()
            told.update(
                changes=total.changes,
                rolled_back_vbuckets=len(back.vbuckets),
                rows_written=total.rows_written,
                rows_masked=total.rows_masked,
                bytes_written=total.bytes_written,
                version=self._asked.tables[0].version,
            )
            has_moved = counted.committed or bool(back.vbuckets)
            phases = time.phases(answers, self._asked.jobs.parallelism)
            self._handle.say("looking for changes")
            if has_moved:
                self._report(self._progress(state, counted, back, phases, compacted))
            if failure is not None:
                raise failure
            return has_moved

    def _go_back(self, plan: RoundPlan) -> _WentBack:
        with span("tailrace.mirror.go_back"):
            vbuckets, rows = self._committer.go_back(plan)
        self._troubled.went_back(vbuckets)
        return _WentBack(vbuckets, rows, self._asked.tables[0].current.positions)

    def _read_and_write(
        self, state: BucketState, plan: RoundPlan, time: _Spent, underway: RoundUnderway
    ) -> _WrittenRound:
        """Run the tasks; their answers, and where they wrote."""
        asked = self._asked
        with time.spent("plan"):
            ranges: Mapping[int, ReadRange] = plan.ranges
            log = None
            if asked.log is not None:
                waiting = self._troubled.waiting(self._clock.monotonic())
                ranges = with_branches(plan, state, asked.tables, asked.log, waiting)
                log = log_target(asked.log, self._stands.of(asked.log), state, plan.decisions[-1], ranges)
            crash_point("mirror.after-plan")
            fresh = {vbucket for vbucket, piece in ranges.items() if not piece.start.seqno}
            pieces = divided(ranges, state.homes, asked.jobs.parallelism, fresh)
            changes = sum(piece.changes for piece in ranges.values())
        description = f"tailrace mirror of {asked.bucket_name}: round {self._batch}, {changes} changes"
        with time.spent("tasks"):
            while True:
                targets = [
                    table_target(table, self._stands.of(table), plan.decisions[index], ranges)
                    for index, table in enumerate(asked.tables)
                ]
                branches = planned_branches(state, targets, log)
                task = RoundTask(self._task_options, tuple(targets), log, branches)
                underway.read(pieces)
                with span("tailrace.mirror.read_and_write", tasks=len(pieces), planned_changes=changes):
                    answers: list[TaskAnswer] = asked.jobs.run(task, pieces, description, underway.done)
                if not self._committer.settle_columns(answers):
                    return _WrittenRound(targets, log, answers)

    def _commit(self, plan: RoundPlan, written: _WrittenRound, back: _WentBack) -> RoundCounts:
        with span("tailrace.mirror.commit"):
            counted = self._committer.commit(plan, written.targets, written.log, written.answers)
        self._troubled.committed(written.answers)
        self.committed_at = self._clock.monotonic()
        back.join(counted)
        self._on_committed(plan)
        return counted

    def _keep_house(self) -> tuple[str, Exception | None]:
        """Compact and clean; what was compacted, and an error instead of raising it: the round is done."""
        if not self._asked.settings.maintenance:
            return "", None
        try:
            compacted = self._housekeeping.turn()
            self._housekeeping.clean()
        except Exception as error:  # noqa: BLE001 - raised when the round has been reported
            return "", error
        return compacted, None

    def _progress(
        self,
        state: BucketState,
        counted: RoundCounts,
        back: _WentBack,
        seconds: Mapping[str, float],
        compacted: str,
    ) -> RoundProgress:
        tables, total = self._asked.tables, counted.total()
        return RoundProgress(
            batch=self._batch,
            changes=total.changes,
            rolled_back=tuple(sorted(back.vbuckets)),
            versions=tuple(table.version for table in tables),
            rows_written=total.rows_written,
            rows_masked=total.rows_masked,
            bytes_written=total.bytes_written,
            rows_rolled_back=total.rows_rolled_back,
            rescued=total.rescued,
            lag_changes=self._freshness.lag(state),
            lag_s=self._clock.monotonic() - self._freshness.as_of,
            seconds=seconds,
            went_back=back.vbuckets,
            behind=self._freshness.behind(state),
            positions=tables[0].current.positions,
            compacted=compacted,
            tables=tuple(
                self._figures_of(table, counts) for table, counts in zip(tables, counted.tables, strict=True)
            ),
        )

    def _report(self, progress: RoundProgress) -> None:
        self._batch += 1
        self._handle.report(progress)
        if self._asked.on_progress is not None:
            self._asked.on_progress(progress)

    def _figures_of(self, table: Table, counts: TableCounts) -> TableFigures:
        files, versions = table.files(), list(table.versions())
        now_ms = self._clock.time_ns() // 1_000_000
        return TableFigures(
            table.uri,
            len(files),
            sum(file.rows - file.live_rows for file in files),
            len(versions),
            max(0, now_ms - versions[-1].timestamp_ms) / 1000 if versions else 0.0,
            table.version,
            counts,
        )


@dataclass(frozen=True)
class _WrittenRound:
    """What the tasks of a round did."""

    targets: Sequence[TableTarget]
    log: ChangeLogTarget | None
    """The change log that they wrote to, if there is one."""
    answers: Sequence[TaskAnswer]


@dataclass
class _WentBack:
    """VBuckets that went back in a round."""

    vbuckets: dict[int, tuple[int, int]]
    """By vbucket, from which seqno to which."""
    rows: list[int]
    """For each table, how many rows that removed or restored."""
    stood: Mapping[int, Position]
    """The positions of the first table after going back."""

    def join(self, counted: RoundCounts) -> None:
        """Add the vbuckets that the tasks read again from the beginning, and add our rows to the counts."""
        for vbucket in counted.started_over - self.vbuckets.keys():
            self.vbuckets[vbucket] = (self.stood[vbucket].seqno if vbucket in self.stood else 0, 0)
        for counts, rows in zip(counted.tables, self.rows, strict=True):
            counts.rows_rolled_back += rows


class _Spent:
    """Where the time of a round goes."""

    def __init__(self, clock: Clock, planned_s: float) -> None:
        self._clock = clock
        self._seconds = {"plan": planned_s}
        self.compaction_s = 0.0

    @contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Count the time of the block for this phase."""
        began = self._clock.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + self._clock.monotonic() - began

    def phases(self, answers: Sequence[TaskAnswer], parallelism: int) -> dict[str, float]:
        """The phases for a report. Tasks of which ``parallelism`` run at once take as long as the longest, or
        as their sum divided by ``parallelism``, whichever is more. ``schedule`` is the rest of the time until
        all had answered: starting the job and its tasks, and waiting for executors.
        """

        def took(spent: Sequence[float]) -> float:
            return max(*spent, sum(spent) / parallelism) if spent else 0.0

        at_work = took([answer.read_s + answer.write_s for answer in answers])
        return {
            "plan": self._seconds["plan"],
            "read": took([answer.read_s for answer in answers]),
            "write": took([answer.write_s for answer in answers]),
            "schedule": max(0.0, self._seconds["tasks"] - at_work),
            "commit": self._seconds["commit"],
            "maintain": self._seconds["maintain"],
            "compaction": self.compaction_s,
        }
