"""What to do next: the bucket's seqnos against the positions of the tables, and the plan of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..source.options import Options
from .assignment import Assignment
from .bucket_watch import BucketState, BucketWatch
from .freshness import Freshness, Stands
from .planning import RoundPlan, plan_round
from .same_bucket import check_same_bucket
from .troubled_vbuckets import HeldBack, TroubledVBuckets

__all__ = ["RoundPlanner"]

_LOOK_S = 1.0
"""How often it asks for failover logs although nothing is new."""
_BACKLOG = 1 << 20
"""About the most changes that a round reads of a backlog: a kill throws away the whole round."""


class RoundPlanner:
    """Asks the bucket before each round, and plans the round."""

    def __init__(
        self,
        asked: Assignment,
        options: Options,
        troubled: TroubledVBuckets,
        stands: Stands,
        freshness: Freshness,
        *,
        wait: Callable[[float], bool],
        on_trouble: Callable[[str], None],
    ) -> None:
        """``wait`` waits for some seconds and returns whether to give up."""
        self._asked = asked
        self._tables = asked.all_tables
        self._clock = asked.clock
        self._options = options
        self._troubled = troubled
        self._stands = stands
        self._freshness = freshness
        self._bucket = BucketWatch(
            options, clock=asked.clock, wait=wait, on_trouble=on_trouble, on_open=self._check_bucket
        )
        self._held = HeldBack(on_trouble)
        self._state: BucketState | None = None
        self._ends: dict[int, int] | None = None
        self._next_vbucket = 0

    @property
    def is_holding(self) -> bool:
        """Whether there is something that not every copy has on disk yet."""
        return bool(self._held)

    @property
    def state(self) -> BucketState:
        """The bucket when it was last asked."""
        assert self._state is not None
        return self._state

    def look(self) -> BucketState | None:
        """Ask the bucket; None if nothing has changed since it was last asked."""
        before = self._state
        if (
            before is None
            or self._troubled.refused  # because the bucket's logs are newer than ours, or after a purge
            or self._clock.monotonic() - before.logs_at >= _LOOK_S
        ):
            state = self._bucket.look()
        else:
            state = self._bucket.look_again(before)
            if (
                not self._asked.settings.once
                and state.high_seqnos == before.high_seqnos
                and not self._is_behind(before)
            ):
                return None
        self._state = state
        if self._asked.settings.once:  # a vbucket that can't be asked at the start gets its end later
            self._ends = {**state.high_seqnos, **(self._ends or {})}
        return state

    def plan(self, state: BucketState) -> tuple[BucketState, RoundPlan]:
        """What to do, and the state of the bucket that this was planned for."""
        plan = self._plan(state)
        if state.has_old_logs and (any(plan.decisions) or (self._asked.settings.once and plan.is_empty)):
            # old logs can make changes look taken back, and can't prove that all has been read
            state = self._state = self._bucket.look()
            plan = self._plan(state)
        return state, plan

    def high_seqno(self, vbucket: int) -> int:
        """The high seqno of a vbucket when the bucket was last asked."""
        return self.state.high_seqnos.get(vbucket, 0)

    def advance(self, plan: RoundPlan) -> None:
        """A round was done: the next begins where it left something."""
        self._next_vbucket = list(plan.ranges)[-1] if plan.left_over and plan.ranges else 0

    def close(self) -> None:
        """Close the connections to the bucket."""
        self._bucket.close()

    def _check_bucket(self, bucket_uuid: str) -> None:
        """Check a new connection: the bucket of that name must still be that of the tables."""
        for table in self._tables:
            check_same_bucket(table, bucket_uuid)

    def _is_behind(self, state: BucketState) -> bool:
        return self._freshness.lag(state) > 0 or bool(self._troubled)

    def _plan(self, state: BucketState) -> RoundPlan:
        """The plan; with ``persistedOnly``, without changes that some copy does not have on disk."""
        plan = self._planned(state, self._ends)
        if not self._options.persisted_only or not plan.ranges:
            self._held.release()
            return plan
        held = self._bucket.held_back(state, plan.ranges)
        if not held:
            self._held.release()
            return plan
        self._held.hold({vbucket: why for vbucket, (_, why) in held.items()}, self._clock.monotonic())
        ends = {vbucket: seqno for vbucket, (seqno, _) in held.items()}
        for vbucket, end in (self._ends or {}).items():
            ends[vbucket] = min(end, ends.get(vbucket, end))
        return self._planned(state, ends)

    def _planned(self, state: BucketState, ends: Mapping[int, int] | None) -> RoundPlan:
        now = self._clock.monotonic()
        limit = self._asked.settings.max_changes or _BACKLOG
        return plan_round(
            self._tables,
            state,
            refused=self._troubled.refused,
            start_over=self._troubled.anew,
            ends=ends,
            skipped=self._troubled.waiting(now),
            max_changes=limit,
            first=self._next_vbucket,
            held=[self._stands.of(table) for table in self._tables],
        )
