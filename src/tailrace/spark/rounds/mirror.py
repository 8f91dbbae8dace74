"""The mirror: a loop of rounds that keeps tables equal to a bucket, also when the bucket takes changes back.

Each table has the position of every vbucket in the same commit as the rows, and that is the truth: every
round is planned from it, so that whatever is killed can neither lose nor double anything. A round:

1. plan: ask the bucket how far it is and on which branches, and compare with the positions of the tables;
2. vbuckets whose changes were taken back return to an earlier version of the table: a commit of its own;
3. read and write: tasks stream what is new straight into files;
4. commit: what the tasks answered, one commit a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...clock import SYSTEM, Clock
from ...crashpoints import crash_point
from ...errors import BucketReplaced, ConnectError, LoginError, StorageError, TailraceError, UsageError
from ...table.compaction import CompactionPolicy
from ...table.contract import Fenced, Table, TableChanged
from ...table.document_columns import DocumentColumns
from ...tracing import add_span, span
from ..java_process import lost_java
from ..source.options import parse_options
from .bucket import BucketState, BucketWatch
from .committing import RoundCommitter
from .freshness import Freshness, Stands
from .handle import MirrorHandle
from .housekeeping import Housekeeping
from .jobs import Jobs
from .planning import Range, RoundPlan, divided, plan_round
from .progress import RoundProgress, TableFigures
from .same_bucket import check_same_bucket, note_bucket
from .targets import log_target, planned_branches, table_target, with_branches
from .task import RoundTask, TaskAnswer
from .verdicts import HeldBack, Verdicts

__all__ = ["Mirror", "MirrorSettings"]

_ATTEMPTS = 5
_POLL_S = 0.1
"""How often an idle mirror asks the bucket how far it is."""
_LOOK_S = 1.0
"""How often it asks for failover logs although nothing is new."""
_GATHER_S = 0.7
"""How long changes are gathered if there are few: a commit costs about the same whatever is in it."""
_GATHER_SHARE = 5_000
"""Few is less than one for so many rows of the table."""
_BACKLOG = 1 << 20
"""Changes of a round at most, about, while there is a backlog: what a kill throws away."""
_HELD_S = 0.5
"""How often the copies are asked again whether they have written what is held back."""
_TASK_RETRY_S = 10.0
"""How long a task takes up a lost connection again before it leaves its vbuckets to the next round."""


@dataclass(frozen=True)
class MirrorSettings:
    """How a mirror goes about it."""

    trigger_s: float | None = None
    """Time between two rounds; None is as fast as it goes."""
    once: bool = False
    """It ends when it has caught up with the moment of its start."""
    max_changes: int | None = None
    """The most changes of a round, as far as snapshots allow."""
    maintenance: bool = True
    changes_keep_s: float | None = None
    """How long the change log keeps a change; None is for ever."""


@dataclass
class Mirror:
    """A mirror that is set up, or runs."""

    jobs: Jobs
    given: Mapping[str, str] = field(repr=False)
    """Options of the source."""
    tables: Sequence[Table]
    bucket_name: str
    settings: MirrorSettings = field(default_factory=MirrorSettings)
    log: Table | None = None
    """The change log, if there is one."""
    missing: tuple[str, ...] = ()
    """Collections that were dropped: their tables are emptied at the start."""
    start_over: frozenset[int] = frozenset()
    """VBuckets that are read again from the beginning, whatever the tables hold of them."""
    columns: Sequence[DocumentColumns | None] = ()
    """By table: the columns of documents that it is to have; those that it has not are added at the start."""
    on_progress: Callable[[RoundProgress], None] | None = None
    on_trouble: Callable[[str], None] = lambda _: None
    clock: Clock = SYSTEM
    policy: CompactionPolicy | None = None
    """When compaction is due."""
    in_background: bool = True
    """Whether compaction runs beside the rounds."""
    bucket_uuid: str = ""
    """Of the bucket that the tables are of, or are to be of from now on; empty if it is not known."""

    def __post_init__(self) -> None:
        self.handle = MirrorHandle(f"tailrace mirror of {self.bucket_name}")
        self._options = parse_options(self.given)
        self._bucket = BucketWatch(
            self._options,
            clock=self.clock,
            wait=self.handle.stopping.wait,
            on_trouble=self._trouble,
            on_open=self._check_bucket,
        )
        self.housekeeping = Housekeeping(
            self.tables,
            self.jobs,
            log=self.log,
            log_keep_s=self.settings.changes_keep_s,
            policy=self.policy,
            clock=self.clock,
            in_background=self.in_background,
        )
        self._all = [*self.tables, *([] if self.log is None else [self.log])]
        self._task_options = {
            **self.given,
            "retryFor": f"{min(_TASK_RETRY_S, self._options.retry_for_s):g}",
        }
        self._batch = 0
        self._verdicts = Verdicts(
            self.start_over, retry_for_s=self._options.retry_for_s, on_trouble=self._trouble
        )
        self._stands = Stands()
        self._committer = RoundCommitter(
            self.tables, self.log, self._verdicts, self._stands, self._high_seqno
        )
        self._freshness = Freshness(self._all, self._stands, self.clock.monotonic())
        self._next_vbucket = 0
        self._ends: dict[int, int] | None = None
        self._state: BucketState | None = None
        self._committed_at = -1e9
        self._held = HeldBack(self._trouble)

    # the loop

    def start(self) -> MirrorHandle:
        """Claim the tables and begin, in a thread of its own."""
        self.prepare()
        self.handle.run(self.run, self._cancel)
        return self.handle

    def prepare(self) -> None:
        """Claim the tables: whoever wrote them before is fenced."""
        if not self.tables:
            raise UsageError("a mirror needs at least one table")
        for table in self._all:
            table.claim(accept_foreign=bool(self.start_over))
            note_bucket(table, self.bucket_uuid)
        crash_point("mirror.in-recovery")
        self._committer.add_columns(self.columns)
        self._committer.empty_dropped(self.missing)

    def _check_bucket(self, bucket_uuid: str) -> None:
        """There is a new connection, to a bucket of that name."""
        for table in self._all:
            check_same_bucket(table, bucket_uuid)

    def run(self) -> None:
        """Rounds until it is stopped, or has caught up."""
        try:
            attempts = 0
            while not self.handle.stopping.is_set():
                try:
                    is_done = self.turn()
                    attempts = 0
                except (BucketReplaced, Fenced, UsageError, LoginError):
                    raise
                except Exception as error:
                    attempts += 1
                    if attempts >= _ATTEMPTS or not _is_passing(error):
                        raise
                    self._trouble(f"a round failed and is repeated: {_first_line(error)}")
                    self._wait(min(5.0, 0.2 * 2**attempts))
                    continue
                if is_done:
                    break
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the bucket, and of a compaction that runs."""
        self.housekeeping.close()
        self._bucket.close()

    def turn(self) -> bool:
        """One round, or a look that finds nothing to do; whether the mirror has come to its end."""
        began = self.clock.monotonic()
        state = self._look()
        if state is None:
            self._idle()
            return False
        for table in self._all:  # of an object store that is a request each, so not at every look
            table.refresh()
        plan = self._plan(state)
        if state.has_old_logs and (any(plan.decisions) or (self.settings.once and plan.is_empty)):
            # what looks taken back may only be newer than the logs, and the end is the bucket's as it is
            state = self._state = self._bucket.look()
            plan = self._plan(state)
        if self._is_little(plan):
            self._wait(max(0.0, self._committed_at + _GATHER_S - self.clock.monotonic()))
            return False
        planned_s = self.clock.monotonic() - began
        if plan.is_empty and self._held:
            self._wait(_HELD_S)
        elif not plan.is_empty:
            if not self._round(state, plan, planned_s):
                self._wait(_POLL_S)
            self._pause_until(began)
        elif self.settings.once and not self._verdicts:
            if self.settings.maintenance:
                self.handle.say("compacting and cleaning")
                self.housekeeping.drain()
            return True
        else:
            self._freshness.reached(state)
            self._idle()
        return False

    def _look(self) -> BucketState | None:
        """How far the bucket is; None if nothing has changed since it was last asked."""
        known = self._state
        if (
            known is None
            or self._verdicts.refused  # by a log that we have not seen, or nothing but a purge explains it
            or self.clock.monotonic() - known.logs_at >= _LOOK_S
        ):
            state = self._bucket.look()
        else:
            state = self._bucket.look_again(known)
            if (
                not self.settings.once
                and state.high_seqnos == known.high_seqnos
                and not self._is_behind(known)
            ):
                return None
        self._state = state
        if self.settings.once and self._ends is None:
            self._ends = dict(state.high_seqnos)
        return state

    def _is_behind(self, state: BucketState) -> bool:
        return self._freshness.lag(state) > 0 or bool(self._verdicts)

    def _plan(self, state: BucketState) -> RoundPlan:
        """What to do; of what not every copy has on disk, nothing, if that is asked for."""
        plan = self._planned(state, self._ends)
        if not self._options.persisted_only or not plan.ranges:
            self._held.release()
            return plan
        held = self._bucket.held_back(state, plan.ranges)
        if not held:
            self._held.release()
            return plan
        self._held.hold({vbucket: why for vbucket, (_, why) in held.items()}, self.clock.monotonic())
        ends = {vbucket: seqno for vbucket, (seqno, _) in held.items()}
        for vbucket, end in (self._ends or {}).items():
            ends[vbucket] = min(end, ends.get(vbucket, end))
        return self._planned(state, ends)

    def _planned(self, state: BucketState, ends: Mapping[int, int] | None) -> RoundPlan:
        now = self.clock.monotonic()
        limit = self.settings.max_changes or _BACKLOG
        return plan_round(
            self._all,
            state,
            refused=self._verdicts.refused,
            start_over=self._verdicts.anew,
            ends=ends,
            skipped=self._verdicts.waiting(now),
            max_changes=limit,
            first=self._next_vbucket,
            held=[self._stands.of(table) for table in self._all],
        )

    def _is_little(self, plan: RoundPlan) -> bool:
        """Whether it is better to wait for more; what goes back never waits."""
        if self.settings.once or self.settings.trigger_s is not None or any(plan.decisions):
            return False
        rows = sum(file.rows for table in self.tables for file in table.files())
        changes = sum(span.changes for span in plan.ranges.values())
        late = self._committed_at + _GATHER_S - self.clock.monotonic()
        return 0 < changes < rows // _GATHER_SHARE and late > 0

    def _idle(self) -> None:
        """Nothing is new."""
        self.handle.say("waiting for changes")
        if self.settings.maintenance:
            self.housekeeping.turn()
            self.housekeeping.clean()
        self._wait(self.settings.trigger_s or _POLL_S)

    def _pause_until(self, began: float) -> None:
        if self.settings.trigger_s is not None and not self.settings.once:
            self._wait(max(0.0, began + self.settings.trigger_s - self.clock.monotonic()))

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            self.handle.stopping.wait(seconds)

    def _cancel(self) -> None:
        self.jobs.cancel()

    def _trouble(self, what: str) -> None:
        self.handle.say(what)
        self.on_trouble(what)

    # a round

    def _round(self, state: BucketState, plan: RoundPlan, planned_s: float) -> bool:
        """Whether anything was committed."""
        with span("tailrace.mirror.round", bucket=self.bucket_name, batch=self._batch) as told:
            now_ns = self.clock.time_ns()
            add_span("tailrace.mirror.plan", now_ns - int(planned_s * 1e9), now_ns)
            return self._traced_round(state, plan, planned_s, told)

    def _traced_round(
        self, state: BucketState, plan: RoundPlan, planned_s: float, told: dict[str, Any]
    ) -> bool:
        began = self.clock.monotonic()
        number = self._batch
        self.handle.say(
            f"round {number}: {sum(span.changes for span in plan.ranges.values())} changes to read"
        )
        with span("tailrace.mirror.go_back"):
            went_back, rows_rolled_back = self._committer.go_back(plan)
        rolled_back = set(went_back)
        self._verdicts.went_back(rolled_back)
        stood = self.tables[0].current.positions
        back_s = self.clock.monotonic() - began
        decisions = plan.decisions
        ranges: Mapping[int, Range] = plan.ranges
        log = None
        if self.log is not None:
            waiting = self._verdicts.waiting(self.clock.monotonic())
            ranges = with_branches(plan, state, self.tables, self.log, waiting)
            log = log_target(self.log, self._stands.of(self.log), state, decisions[-1], ranges)
        crash_point("mirror.after-plan")
        fresh = {vbucket for vbucket, span in ranges.items() if not span.start.seqno}
        pieces = divided(ranges, state.homes, self.jobs.parallelism, fresh)
        changes = sum(span.changes for span in ranges.values())
        description = f"tailrace mirror of {self.bucket_name}: round {number}, {changes} changes"
        asking = self.clock.monotonic()
        while True:
            targets = [
                table_target(table, self._stands.of(table), decisions[index], ranges)
                for index, table in enumerate(self.tables)
            ]
            branches = planned_branches(state, targets, log)
            task = RoundTask(self._task_options, tuple(targets), log, branches)
            with span("tailrace.mirror.read_and_write", tasks=len(pieces), planned_changes=changes):
                answers: list[TaskAnswer] = self.jobs.run(task, pieces, description)
            if not self._committer.settle_columns(answers):
                break
        answered_s = self.clock.monotonic() - asking
        self._verdicts.note(answers, self.clock.monotonic())
        committing = self.clock.monotonic()
        with span("tailrace.mirror.commit"):
            counted = self._committer.commit(plan, answers, log)
        self._verdicts.committed(answers)
        self._committed_at = self.clock.monotonic()
        for vbucket in counted.started_over - rolled_back:
            went_back[vbucket] = (stood[vbucket].seqno if vbucket in stood else 0, 0)
        rolled_back.update(counted.started_over)
        self._advance(plan)
        maintaining = self.clock.monotonic()
        with span("tailrace.mirror.maintain"):
            compacted, failure = self._keep_house()
        if rolled_back:
            self._freshness.went_back(state)
        self._freshness.reached(state)
        done = self.clock.monotonic()
        has_moved = counted.committed or bool(rolled_back)
        told.update(
            changes=counted.changes,
            rolled_back_vbuckets=len(rolled_back),
            rows_written=counted.rows_written,
            rows_masked=counted.rows_masked,
            bytes_written=counted.bytes_written,
            version=self.tables[0].version,
        )
        if has_moved:
            self._report(
                RoundProgress(
                    batch=number,
                    changes=counted.changes,
                    rolled_back=tuple(sorted(rolled_back)),
                    versions=tuple(table.version for table in self.tables),
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
                        "compaction": self.housekeeping.step_s if compacted else 0.0,
                    },
                    went_back=went_back,
                    behind=self._freshness.behind(state),
                    positions=self.tables[0].current.positions,
                    compacted=compacted,
                    tables=tuple(self._figures_of(table) for table in self.tables),
                )
            )
        if failure is not None:
            raise failure
        return has_moved

    def _keep_house(self) -> tuple[str, Exception | None]:
        """Compaction and cleaning; what was compacted, or went wrong: the round is done all the same."""
        if not self.settings.maintenance:
            return "", None
        try:
            compacted = self.housekeeping.turn()
            self.housekeeping.clean()
        except Exception as error:  # noqa: BLE001 - raised when the round has been reported
            return "", error
        return compacted, None

    def _report(self, progress: RoundProgress) -> None:
        self._batch += 1
        self.handle.report(progress)
        if self.on_progress is not None:
            self.on_progress(progress)

    def _figures_of(self, table: Table) -> TableFigures:
        files, versions = table.files(), list(table.versions())
        now_ms = self.clock.time_ns() // 1_000_000
        return TableFigures(
            table.uri,
            len(files),
            sum(file.rows - file.live_rows for file in files),
            len(versions),
            max(0, now_ms - versions[-1].timestamp_ms) / 1000 if versions else 0.0,
        )

    def _high_seqno(self, vbucket: int) -> int:
        """Of a vbucket, when the bucket was last asked."""
        assert self._state is not None
        return self._state.high_seqnos.get(vbucket, 0)

    def _advance(self, plan: RoundPlan) -> None:
        """Where the next round begins, if this one left something."""
        self._next_vbucket = list(plan.ranges)[-1] if plan.left_over and plan.ranges else 0


def _waited_s(answers: Sequence[TaskAnswer], answered_s: float) -> float:
    """Of the time until all tasks had answered, that in which the longest was not at work: what it takes to
    start a job and its tasks, and to wait for a place.
    """
    return max(0.0, answered_s - max((answer.read_s + answer.write_s for answer in answers), default=0.0))


def _is_passing(error: Exception) -> bool:
    """Whether the round may have more luck if it is done again: executors get lost, others tidy the table."""
    if isinstance(error, TailraceError):
        return isinstance(error, TableChanged | ConnectError | StorageError)
    return lost_java(error) is None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]
