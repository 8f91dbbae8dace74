"""The mirror: a loop of rounds that keeps tables equal to a bucket, also when the bucket takes changes back.

Each table has the position of every vbucket in the same commit as the rows, and that is the truth: every
round is planned from it, so that whatever is killed can neither lose nor double anything. A round:

1. plan: ask the bucket how far it is and on which branches, and compare with the positions of the tables;
2. vbuckets whose changes were taken back return to an earlier version of the table: a commit of its own;
3. read and write: tasks stream what is new straight into files;
4. commit: what the tasks answered, one commit a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap

from ...clock import SYSTEM, Clock
from ...crashpoints import crash_point
from ...errors import ConnectError, LoginError, StorageError, TailraceError, UsageError
from ...history import Action
from ...model import Position
from ...table.compaction import CompactionPolicy
from ...table.contract import Commit, Fenced, NewFile, Table, TableChanged, TaskResult
from ...table.rollback import roll_back
from ...table.rows import DELETED
from ...table.sink import TableWriter
from ..source.options import parse_options
from .bucket import BucketState, BucketWatch
from .changes import ChangeLogTarget, LogBranch, branch_point
from .handle import MirrorHandle
from .housekeeping import Housekeeping
from .jobs import Jobs
from .planning import Decision, Range, RoundPlan, divided, plan_round
from .progress import RoundProgress
from .task import RoundTask, TableTarget, TaskAnswer

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
    given: Mapping[str, str]
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
    on_progress: Callable[[RoundProgress], None] | None = None
    on_trouble: Callable[[str], None] = lambda _: None
    clock: Clock = SYSTEM
    policy: CompactionPolicy | None = None
    """When compaction is due."""
    in_background: bool = True
    """Whether compaction runs beside the rounds."""

    def __post_init__(self) -> None:
        self.handle = MirrorHandle(f"tailrace mirror of {self.bucket_name}")
        self._options = parse_options(self.given)
        self._bucket = BucketWatch(
            self._options, clock=self.clock, wait=self.handle.stopping.wait, on_trouble=self._trouble
        )
        self._housekeeping = Housekeeping(
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
        self._anew = set(self.start_over)
        self._refused: dict[int, Position] = {}
        self._waiting: dict[int, tuple[float, float, str]] = {}
        """VBuckets that could not be read: since when, until when they wait, and why."""
        self._next_vbucket = 0
        self._ends: dict[int, int] | None = None
        self._state: BucketState | None = None
        self._as_of = self.clock.monotonic()
        """The tables have all that the bucket had at this moment."""
        self._unreached: BucketState | None = None
        self._committed_at = -1e9

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
        crash_point("mirror.in-recovery")
        self._empty_dropped()

    def run(self) -> None:
        """Rounds until it is stopped, or has caught up."""
        try:
            attempts = 0
            while not self.handle.stopping.is_set():
                try:
                    is_done = self.turn()
                    attempts = 0
                except (Fenced, UsageError, LoginError):
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
            self._housekeeping.close()
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
        if self._is_little(plan):
            self._wait(max(0.0, self._committed_at + _GATHER_S - self.clock.monotonic()))
            self._state = None
            return False
        planned_s = self.clock.monotonic() - began
        if not plan.is_empty:
            if not self._round(state, plan, planned_s):
                self._wait(_POLL_S)
            self._pause_until(began)
        elif self.settings.once and not self._waiting:
            if self.settings.maintenance:
                self.handle.say("compacting and cleaning")
                self._housekeeping.drain()
            return True
        else:
            self._reached(state)
            self._idle()
        return False

    def _look(self) -> BucketState | None:
        """How far the bucket is; None if nothing has changed since it was last asked."""
        known = self._state
        if (
            known is not None
            and not self.settings.once
            and self.clock.monotonic() - known.at < _LOOK_S
            and not self._is_behind(known)
            and self._bucket.high_seqnos() == known.high_seqnos
        ):
            return None
        state = self._state = self._bucket.look()
        if self.settings.once and self._ends is None:
            self._ends = dict(state.high_seqnos)
        return state

    def _is_behind(self, state: BucketState) -> bool:
        return self._lag(state) > 0 or bool(self._waiting)

    def _plan(self, state: BucketState) -> RoundPlan:
        now = self.clock.monotonic()
        limit = self.settings.max_changes or _BACKLOG
        return plan_round(
            self._all,
            state,
            refused=self._refused,
            start_over=self._anew,
            ends=self._ends,
            skipped=[vbucket for vbucket, (_, until, _) in self._waiting.items() if until > now],
            max_changes=limit,
            first=self._next_vbucket,
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
            self._housekeeping.turn()
            self._housekeeping.clean()
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
        began = self.clock.monotonic()
        number = self._batch
        self.handle.say(
            f"round {number}: {sum(span.changes for span in plan.ranges.values())} changes to read"
        )
        rolled_back = self._go_back(plan)
        back_s = self.clock.monotonic() - began
        ranges = self._with_short_branches(plan)
        targets = [self._target(index, table, plan, ranges) for index, table in enumerate(self.tables)]
        log = self._log_target(state, plan, ranges)
        crash_point("mirror.after-plan")
        pieces = divided(ranges, state.homes, self.jobs.parallelism)
        task = RoundTask(self._task_options, tuple(targets), log)
        changes = sum(span.changes for span in ranges.values())
        description = f"tailrace mirror of {self.bucket_name}: round {number}, {changes} changes"
        answers: list[TaskAnswer] = self.jobs.run(task, pieces, description)
        self._note_verdicts(answers)
        committing = self.clock.monotonic()
        counted = self._commit(plan, answers, log)
        self._committed_at = self.clock.monotonic()
        rolled_back.update(counted.started_over)
        self._advance(plan)
        maintaining = self.clock.monotonic()
        compacted, failure = self._keep_house()
        if rolled_back:
            self._unreached = state
        self._reached(state)
        done = self.clock.monotonic()
        has_moved = counted.committed or bool(rolled_back)
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
                    lag_changes=self._lag(state),
                    lag_s=done - self._as_of,
                    seconds={
                        "plan": planned_s,
                        "read": max((answer.read_s for answer in answers), default=0.0),
                        "write": max((answer.write_s for answer in answers), default=0.0),
                        "commit": back_s + maintaining - committing,
                        "maintain": done - maintaining,
                    },
                    positions=self.tables[0].current.positions,
                    compacted=compacted,
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
            compacted = self._housekeeping.turn()
            self._housekeeping.clean()
        except Exception as error:  # noqa: BLE001 - raised when the round has been reported
            return "", error
        return compacted, None

    def _report(self, progress: RoundProgress) -> None:
        self._batch += 1
        self.handle.report(progress)
        if self.on_progress is not None:
            self.on_progress(progress)

    def _go_back(self, plan: RoundPlan) -> set[int]:
        """VBuckets return to earlier versions of their tables: a state that the bucket had."""
        rolled_back: set[int] = set()
        for index, table in enumerate(self.tables):
            back = plan.going_back(index)
            if not back:
                continue
            crash_point("mirror.before-rollback")
            pieces = roll_back(table, {vbucket: decision.version for vbucket, decision in back.items()})
            commit = pieces.commit()
            table.commit(
                Commit(
                    operation=commit.operation,
                    positions={vbucket: decision.request for vbucket, decision in back.items()},
                    added=commit.added,
                    vectors=commit.vectors,
                    readded=commit.readded,
                    resets={vbucket: decision.request.seqno for vbucket, decision in back.items()},
                    based_on=table.version,
                    counts={**commit.counts, "vbuckets": len(back)},
                )
            )
            crash_point("mirror.after-rollback")
            rolled_back.update(back)
        return rolled_back

    def _with_short_branches(self, plan: RoundPlan) -> dict[int, Range]:
        """The ranges, and empty ones for vbuckets of which only the change log has something to say."""
        ranges = dict(plan.ranges)
        if self.log is not None:
            for vbucket, decision in plan.decisions[len(self.tables)].items():
                stands = decision.request
                if vbucket not in ranges and self._high(vbucket) <= stands.seqno:
                    ranges[vbucket] = Range(stands, stands.seqno)
        return ranges

    def _high(self, vbucket: int) -> int:
        assert self._state is not None
        return self._state.high_seqnos.get(vbucket, 0)

    def _floors(
        self, table: Table, decisions: Mapping[int, Decision], ranges: Mapping[int, Range]
    ) -> dict[int, int]:
        """VBuckets of a table that are further than their streams begin."""
        floors = {}
        current = table.current
        for vbucket, span in ranges.items():
            decision = decisions.get(vbucket)
            if decision is not None and decision.action is Action.START_OVER:
                continue
            held = current.position(vbucket) if decision is None else decision.request
            if held.seqno > span.start.seqno:
                floors[vbucket] = held.seqno
        return floors

    def _target(self, index: int, table: Table, plan: RoundPlan, ranges: Mapping[int, Range]) -> TableTarget:
        current = table.current
        return TableTarget(
            TableWriter(
                table.store,
                table.schema,
                table.secret,
                tuple(table.files()),
                keep_deletes=DELETED.name in table.schema.names,
            ),
            str(table.source["scope"]),
            str(table.source["collection"]),
            frozenset(v for v in ranges if current.position(v).seqno == 0),
            self._floors(table, plan.decisions[index], ranges),
        )

    def _log_target(
        self, state: BucketState, plan: RoundPlan, ranges: Mapping[int, Range]
    ) -> ChangeLogTarget | None:
        log = self.log
        if log is None:
            return None
        decisions = plan.decisions[len(self.tables)]
        branches = {}
        for vbucket, decision in decisions.items():
            if vbucket in ranges:
                producer = state.failover_logs[vbucket]
                seqno = branch_point(log, vbucket, producer)
                branches[vbucket] = LogBranch(
                    seqno, producer.newest.vb_uuid, decision.request.seqno, seqno < decision.held.seqno
                )
        files = tuple(log.files())
        return ChangeLogTarget(
            log.store,
            log.secret,
            files,
            log.version + 1,
            self._floors(log, decisions, ranges),
            branches,
            {file.path: log.mask(file).serialize() for file in files if file.vector is not None},
        )

    # what came of it

    def _note_verdicts(self, answers: Iterable[TaskAnswer]) -> None:
        now = self.clock.monotonic()
        for answer in answers:
            for vbucket in answer.positions:
                self._refused.pop(vbucket, None)
                self._waiting.pop(vbucket, None)
                self._anew.discard(vbucket)
            for vbucket, position in answer.refused.items():
                self._refused[vbucket] = position
            for vbucket, why in answer.failed.items():
                since, _, _ = self._waiting.get(vbucket, (now, 0.0, ""))
                if now - since >= self._options.retry_for_s:
                    raise ConnectError(
                        f"vbucket {vbucket} can't be read for {self._options.retry_for_s:g} s: {why}"
                    )
                self._waiting[vbucket] = (since, now + min(5.0, 0.2 + (now - since) / 2), why)
                self._trouble(why)

    def _advance(self, plan: RoundPlan) -> None:
        """Where the next round begins, if this one left something."""
        self._next_vbucket = list(plan.ranges)[-1] if plan.left_over and plan.ranges else 0

    def _reached(self, state: BucketState) -> None:
        """Take note if the tables have come to what the bucket had at some moment."""
        if self._unreached is None:
            self._unreached = state
        while self._unreached is not None and not self._lag(self._unreached):
            self._as_of = max(self._as_of, self._unreached.at)
            self._unreached = None if self._unreached is state else state

    def _lag(self, state: BucketState) -> int:
        stands = [table.current for table in self._all]
        return sum(
            max(0, high - min(version.position(vbucket).seqno for version in stands))
            for vbucket, high in state.high_seqnos.items()
        )

    # commits

    def _commit(
        self, plan: RoundPlan, answers: Sequence[TaskAnswer], log: ChangeLogTarget | None
    ) -> _Counted:
        crash_point("mirror.before-commit")
        positions = {
            vbucket: Position.at(position.vb_uuid, position.seqno)
            for answer in answers
            for vbucket, position in answer.positions.items()
        }
        counted = _Counted()
        if log is not None:
            self._commit_log(plan, answers, positions, log, counted)
        for index, table in enumerate(self.tables):
            self._commit_table(index, table, plan, answers, positions, counted)
            crash_point("mirror.after-commit")
        return counted

    def _commit_log(
        self,
        plan: RoundPlan,
        answers: Sequence[TaskAnswer],
        positions: Mapping[int, Position],
        target: ChangeLogTarget,
        counted: _Counted,
    ) -> None:
        assert self.log is not None
        log = self.log
        current = log.current
        results = [answer.logged for answer in answers if answer.logged is not None]
        decisions = plan.decisions[len(self.tables)]
        moved = {
            vbucket: position
            for vbucket, position in positions.items()
            if position.seqno > target.floors.get(vbucket, -1) and position != current.position(vbucket)
        }
        added = [new for result in results for new in result.added]
        resets = {
            vbucket: decision.request.seqno for vbucket, decision in decisions.items() if vbucket in moved
        }
        if not added and not moved:
            return
        log.commit(
            Commit(
                operation="TAILRACE ROUND",
                positions=moved,
                added=added,
                resets=resets,
                based_on=log.version,
                counts={"changes": sum(result.changes for result in results)},
            )
        )
        counted.bytes_written += sum(result.bytes_written for result in results)
        counted.committed = True
        crash_point("mirror.after-changes")

    def _commit_table(
        self,
        index: int,
        table: Table,
        plan: RoundPlan,
        answers: Sequence[TaskAnswer],
        positions: Mapping[int, Position],
        counted: _Counted,
    ) -> None:
        current = table.current
        results: list[TaskResult] = []
        emptied: set[int] = set()
        for answer in answers:
            results += [
                result
                for number, result in zip(answer.tables, answer.results, strict=True)
                if number == index
            ]
            emptied.update(vbucket for number, vbucket in answer.emptied if number == index)
        anew = plan.starting_over(index)
        # of a bucket that has nothing any more nothing is streamed
        nothing = {vbucket for vbucket in anew if not self._high(vbucket) and vbucket not in positions}
        moved = {
            vbucket: position
            for vbucket, position in positions.items()
            if position != current.position(vbucket)
            and (vbucket in anew or position.seqno > current.position(vbucket).seqno)
        }
        moved |= dict.fromkeys(nothing, Position.BEGINNING)
        replaced = (anew & moved.keys()) | (emptied & positions.keys())
        resets = dict.fromkeys(anew & moved.keys(), 0)
        masked: dict[str, BitMap] = {}
        for result in results:
            for path, rows in result.masked.items():
                masked.setdefault(path, BitMap()).update(BitMap.deserialize(rows))
        vectors: dict[str, BitMap] = {}
        if replaced:
            vectors = roll_back(table, dict.fromkeys(replaced)).vectors
            for path in vectors.keys() & masked.keys():
                vectors[path] |= masked.pop(path)
        added: list[NewFile] = [new for result in results for new in result.added]
        if not (added or masked or vectors or moved):
            return
        before = {file.path: file for file in table.files()}
        rows_masked = sum(
            len(rows - table.mask(before[path])) for path, rows in (*masked.items(), *vectors.items())
        )
        counts = {
            "changes": sum(result.changes for result in results),
            "rows_written": sum(result.rows_written for result in results),
            "rows_masked": rows_masked,
            "bytes_written": sum(result.bytes_written for result in results),
        }
        table.commit(
            Commit(
                operation="TAILRACE ROUND",
                positions=moved,
                added=added,
                masked=masked,
                vectors=vectors,
                resets=resets,
                based_on=table.version,
                counts=counts,
                repaired=bool(self.start_over) and not self._anew - nothing,
            )
        )
        self._anew -= nothing
        counted.committed = True
        counted.changes += counts["changes"]
        counted.rows_written += counts["rows_written"]
        counted.rows_masked += rows_masked
        counted.bytes_written += counts["bytes_written"]
        counted.started_over.update(resets)

    def _empty_dropped(self) -> None:
        """Empty the tables of collections that are gone: the stream names those by numbers that only they
        who saw them begin can tell.
        """
        for table in self.tables:
            path = f"{table.source['scope']}.{table.source['collection']}"
            if path in self.missing and table.files():
                gone = [file.path for file in table.files()]
                table.commit(Commit("TAILRACE ROUND", removed=gone, based_on=table.version))


@dataclass
class _Counted:
    """What the commits of a round had in them."""

    changes: int = 0
    rows_written: int = 0
    rows_masked: int = 0
    bytes_written: int = 0
    committed: bool = False
    started_over: set[int] = field(default_factory=set)


def _is_passing(error: Exception) -> bool:
    """Whether the round may have more luck if it is done again: executors get lost, others tidy the table."""
    return isinstance(error, TableChanged | ConnectError | StorageError) or not isinstance(
        error, TailraceError
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]
