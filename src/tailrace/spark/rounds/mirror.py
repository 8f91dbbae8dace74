"""The mirror: a loop of rounds that keeps tables equal to a bucket, also when the bucket takes changes back.

Each table has the position of every vbucket in the same commit as the rows. Every round is planned from these
positions, so whatever is killed, nothing is lost or applied twice. A round:

1. plan: ask the bucket for its seqnos and branches, and compare them with the positions of the tables;
2. go back: vbuckets whose changes were taken back return to an earlier version of the table, in a commit of
   its own;
3. read and write: tasks stream what is new straight into files;
4. commit: what the tasks answered, one commit per table.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...client.copy_survey import counted
from ...client.retry import Backoff
from ...crashpoints import crash_point
from ...errors import (
    BucketReplaced,
    ConnectError,
    LoginError,
    OutOfReach,
    StorageError,
    TailraceError,
    UsageError,
)
from ...rng import source as dice
from ...table.contract import Fenced, Table, TableChanged, TableDamaged
from ..java_process import lost_java
from ..source.options import parse_options
from .assignment import Assignment
from .bucket_watch import BucketState
from .committing import RoundCommitter
from .freshness import Freshness, Stands
from .handle import MirrorHandle
from .housekeeping import Housekeeping
from .jobs import what_failed
from .planning import RoundPlan
from .round_planner import RoundPlanner
from .round_runner import RoundRunner
from .same_bucket import note_bucket
from .troubled_vbuckets import TroubledVBuckets

__all__ = ["Mirror"]

_ATTEMPTS = 5
_RETRY_FIRST_S = 0.8
_POLL_S = 0.1
"""How often an idle mirror asks the bucket for its seqnos."""
_GATHER_S = 0.7
"""How long changes are gathered if there are few: a commit costs about the same whatever is in it."""
_GATHER_SHARE = 5_000
"""Few means less than one change per this many rows of the tables."""
_HELD_S = 0.5
"""How often the copies are asked again whether changes that are held back are on their disks."""
_TASK_RETRY_S = 10.0
"""How long a task tries to reconnect before it leaves its vbuckets to the next round."""


class Mirror:
    """A mirror: the loop around its rounds."""

    def __init__(self, asked: Assignment) -> None:
        self.asked = asked
        self._clock = asked.clock
        self._settings = asked.settings
        self.handle = MirrorHandle(f"tailrace mirror of {asked.bucket_name}")
        options = parse_options(asked.given)
        self._troubled = TroubledVBuckets(
            asked.start_over, retry_for_s=options.retry_for_s, on_trouble=self._trouble
        )
        stands = Stands()
        self._freshness = Freshness(asked.all_tables, stands, self._clock.monotonic())
        self._planner = RoundPlanner(
            asked,
            options,
            self._troubled,
            stands,
            self._freshness,
            wait=self._is_stopped_after,
            on_trouble=self._trouble,
        )
        self.housekeeping = Housekeeping(
            asked.tables,
            asked.jobs,
            log=asked.log,
            log_keep_s=asked.settings.changes_keep_s,
            policy=asked.policy,
            clock=asked.clock,
            in_background=asked.in_background,
        )
        self._committer = RoundCommitter(
            asked.tables, asked.log, self._troubled, stands, self._planner.high_seqno
        )
        self._rounds = RoundRunner(
            asked,
            self.handle,
            self._troubled,
            stands,
            self._freshness,
            self._committer,
            self.housekeeping,
            on_committed=self._planner.advance,
            task_retry_s=min(_TASK_RETRY_S, options.retry_for_s),
        )

    @property
    def tables(self) -> Sequence[Table]:
        """The tables that it keeps, without the change log."""
        return self.asked.tables

    def start(self) -> MirrorHandle:
        """Claim the tables and begin, in a thread of its own."""
        self.prepare()
        self.handle.run(self.run, self._cancel)
        return self.handle

    def prepare(self) -> None:
        """Claim the tables: whoever wrote them before is fenced.

        All mirrors claim tables in the same order, each table only while they still hold those before it. So
        if two start together, one of them ends up with all the tables.
        """
        if not self.tables:
            raise UsageError("a mirror needs at least one table")
        claimed: list[Table] = []
        for table in sorted(self.asked.all_tables, key=lambda table: table.uri):
            table.claim(accept_foreign=bool(self.asked.start_over), and_still=claimed)
            note_bucket(table, self.asked.bucket_uuid)
            claimed.append(table)
        crash_point("mirror.in-recovery")
        self._committer.add_columns(self.asked.columns)
        self._committer.empty_dropped(self.asked.missing)

    def run(self) -> None:
        """Do rounds until the mirror is stopped or, with ``once``, has caught up."""
        try:
            failures = Backoff(dice(), first_s=_RETRY_FIRST_S)
            while not self.handle.stopping.is_set():
                try:
                    is_done = self.turn()
                    failures.reset()
                except (BucketReplaced, Fenced, UsageError, LoginError, OutOfReach):
                    raise
                except Exception as error:
                    pause_s = failures.next_s()
                    if failures.attempts >= _ATTEMPTS or not _is_passing(error):
                        raise
                    if self.handle.stopping.is_set():
                        break  # its jobs were cancelled; nothing is repeated
                    self._trouble(f"a round failed and is repeated: {what_failed(error)}")
                    self._wait(pause_s)
                    continue
                if is_done:
                    break
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections to the bucket; a running compaction is abandoned."""
        self.housekeeping.close()
        self._planner.close()

    def turn(self) -> bool:
        """Do one round, or find nothing to do; return whether the mirror is finished."""
        try:
            return self._turn()
        except TableDamaged as error:
            self._look_for_others(error)
            raise

    def _look_for_others(self, error: TableDamaged) -> None:
        """Raise `TableChanged` instead if another writer went on with a table: the files that a paused mirror
        misses may have been cleaned up since.
        """
        for table in self.asked.all_tables:
            before = table.version
            table.refresh()
            if table.version != before:
                raise TableChanged(f"the table at {table.uri} was changed by somebody else") from error

    def _turn(self) -> bool:
        began = self._clock.monotonic()
        state = self._planner.look()
        if state is None:
            self._idle(self._planner.state)
            return False
        self._note_standing(state)
        for table in self.asked.all_tables:  # a request each on an object store, so not on every look
            table.refresh()
        state, plan = self._planner.plan(state)
        if self._is_little(plan):
            self._wait(max(0.0, self._rounds.committed_at + _GATHER_S - self._clock.monotonic()))
            return False
        planned_s = self._clock.monotonic() - began
        if plan.is_empty and self._planner.is_holding:
            self._wait(_HELD_S)
        elif not plan.is_empty:
            has_moved = self._rounds.run(state, plan, planned_s)
            self._note_standing(state)
            if not has_moved:
                self._wait(_POLL_S)
            self._pause_until(began)
        else:
            self._troubled.nothing_left(state.high_seqnos, self._clock.monotonic())
            if self._settings.once and not self._troubled and not state.unasked:
                if self._settings.maintenance:
                    self.housekeeping.drain(self.handle.say)
                return True
            self._freshness.reached(state)
            self._note_standing(state)
            self._idle(state)
        return False

    def _note_standing(self, state: BucketState) -> None:
        """Update what the handle says about the lag."""
        self.handle.standing = self._freshness.standing(state, len(self.tables))

    def _is_little(self, plan: RoundPlan) -> bool:
        """Whether to wait for more changes first; a plan in which vbuckets go back never waits."""
        if self._settings.once or self._settings.trigger_s is not None or any(plan.decisions):
            return False
        rows = sum(file.rows for table in self.tables for file in table.files())
        changes = sum(span.changes for span in plan.ranges.values())
        late = self._rounds.committed_at + _GATHER_S - self._clock.monotonic()
        return 0 < changes < rows // _GATHER_SHARE and late > 0

    def _idle(self, state: BucketState) -> None:
        """Compact, clean up and wait, while nothing is known to be new."""
        self.handle.say(
            f"waiting for nodes; {counted(state.unasked)}" if state.unasked else "waiting for changes"
        )
        if self._settings.maintenance:
            self.housekeeping.turn()
            self.housekeeping.clean()
        self._wait(self._settings.trigger_s or _POLL_S)

    def _pause_until(self, began: float) -> None:
        if self._settings.trigger_s is not None and not self._settings.once:
            self._wait(max(0.0, began + self._settings.trigger_s - self._clock.monotonic()))

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            self._is_stopped_after(seconds)

    def _is_stopped_after(self, seconds: float) -> bool:
        return self.handle.stopping.wait(seconds)

    def _cancel(self) -> None:
        self.asked.jobs.cancel()

    def _trouble(self, what: str) -> None:
        self.handle.say(what)
        self.asked.on_trouble(what)


def _is_passing(error: Exception) -> bool:
    """Whether a repetition of the round may succeed: executors get lost, others clean up the table."""
    if isinstance(error, TailraceError):
        return isinstance(error, TableChanged | ConnectError | StorageError)
    return lost_java(error) is None
