"""The rollback rule against a world that knows nothing of it.

Here the rule is stated a second time. Copies of a vbucket hold *changes* (branch, seqno, key), fail over,
lose suffixes, purge tombstones. A reader streams snapshots from them with deduplication, breaks off anywhere,
and goes on with any other copy. The world replays changes; it never compares failover logs. It checks at each
step:

* A stream is accepted only if what the reader holds plus what it will be sent is what the copy holds.
* A rollback never leads up, is never further than the point where the two histories really part, and the
  series of rollbacks ends.
* Whenever the reader takes itself for exact, it holds precisely what the copy held at that seqno.
* What `plan` says is accepted, right, and the newest that is right.

``PLANTED`` shows that the world notices: each planted error must fail some case.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tailrace import history
from tailrace.history import FailoverLog, RestartAction, plan, retreat, rollback_seqno
from tailrace.model import Position, SnapshotRange

CASES = 2_000
LONG_CASES = 100_000
MAX_STEPS = 200  # of rollbacks in a row: far above what 25 entries and a few points allow


class Change(NamedTuple):
    branch: int
    seqno: int
    key: str
    deleted: bool


State = dict[str, Change]


@dataclass
class Copy:
    """One copy of the vbucket, as a node holds it. Never cut: losing a suffix makes another copy."""

    log: list[tuple[int, int]]
    past: list[Change] = field(default_factory=list)  # all that ever happened to it
    changes: list[Change] = field(default_factory=list)  # what is left of that after purges
    high: int = 0
    purge: int = 0
    tidy: bool = True  # its log is whole and no branch began below what was kept

    def state(self, seqno: int) -> State:
        held: State = {}
        for change in self.changes:
            if change.seqno <= seqno:
                apply(held, change)
        return held

    def folded(self, after: int, end: int) -> list[Change]:
        """What a snapshot of (after, end] carries: the newest version of each key."""
        newest = {change.key: change for change in self.changes if after < change.seqno <= end}
        return sorted(newest.values(), key=lambda change: change.seqno)

    def agrees_up_to(self, other: Copy) -> int:
        """The last seqno up to which both had the same changes happen to them."""
        agreed = 0
        for ours, theirs in zip(self.past, other.past, strict=False):
            if ours != theirs:
                return agreed
            agreed = ours.seqno
        return min(self.high, other.high) if self.past == other.past else agreed


def apply(state: State, change: Change) -> None:
    if change.deleted:
        state.pop(change.key, None)
    else:
        state[change.key] = change


@dataclass
class Version:
    """A moment at which the reader was exact, with all that it needs to return there."""

    position: Position
    state: State
    source: Copy | None
    points: dict[int, Version]  # this version and the exact moments before it on the same line, by seqno


NOTHING = Version(Position.BEGINNING, {}, None, {})


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.branches = 0
        self.copies = [Copy([(self.new_branch(), 0)])]
        self.write(self.copies[0])

    def new_branch(self) -> int:
        self.branches += 1
        return 1000 + self.branches

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def turn(self, near: Copy) -> None:
        copy = near if self.chance(0.6) else self.random.choice(self.copies)
        happenings = [self.write, self.fail_over, self.purge, self.forget]
        self.random.choices(happenings, [6, 3, 2, 0.2])[0](copy)

    def write(self, copy: Copy) -> None:
        for _ in range(self.random.randint(1, 8)):
            copy.high += 1
            key = self.random.choice("abcd")
            change = Change(copy.log[0][0], copy.high, key, self.chance(0.25))
            copy.past.append(change)
            copy.changes.append(change)

    def fail_over(self, copy: Copy) -> None:
        """A replica that had only a part is promoted; at times it keeps half a snapshot above that part."""
        branch_point = self.random.randint(max(0, copy.high - 8), copy.high)
        kept = [change for change in copy.past if change.seqno <= branch_point]
        log = [entry for entry in copy.log if entry[1] <= branch_point]
        log.insert(0, (self.new_branch(), branch_point))
        promoted = Copy(log, kept, list(kept), branch_point, tidy=copy.tidy)
        if branch_point + 1 < copy.high and self.chance(0.3):
            end = self.random.randint(branch_point + 2, copy.high)
            last = self.random.randint(branch_point + 1, end - 1)
            whole = Copy([], [], copy.past)
            half = [change for change in whole.folded(branch_point, end) if change.seqno <= last]
            promoted.past += half
            promoted.changes += half
            promoted.high = half[-1].seqno if half else branch_point
            promoted.tidy = False
        self.copies.append(promoted)

    def purge(self, copy: Copy) -> None:
        """Compaction forgets some deletions, and what they deleted."""
        upto = self.random.randint(0, copy.high)
        newest = {change.key: change for change in copy.changes}
        gone = {change.key: change for change in newest.values() if change.deleted and change.seqno <= upto}
        copy.changes = [change for change in copy.changes if change.key not in gone]
        copy.purge = max([copy.purge, *(change.seqno for change in gone.values())])

    def forget(self, copy: Copy) -> None:
        """The oldest entries fall off the end of the log."""
        if len(copy.log) > 1:
            copy.log = copy.log[: self.random.randint(1, len(copy.log) - 1)]
            copy.tidy = False


class Reader:
    """Follows `Position`, `retreat` and `plan` to the letter, and can undo like a table with versions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.marker: SnapshotRange | None = None
        self.log: FailoverLog | None = None
        self.versions: list[Version] = []
        self.restore(NOTHING)

    def restore(self, version: Version) -> None:
        self.position = version.position
        self.state = dict(version.state)
        self.source = version.source
        self.points = dict(version.points)
        self.since: list[Change] = []  # received since that moment
        self.marker = None

    def undo_to(self, seqno: int) -> None:
        """Keep what was received up to ``seqno``, as a reader can that kept everything."""
        since = self.since
        known = [point for point in self.points if point <= seqno]
        self.restore(self.points[max(known)] if known else NOTHING)
        for change in since:
            if self.position.seqno < change.seqno <= seqno:
                apply(self.state, change)

    def request(self) -> Position:
        known = self.marker if self.world.chance(0.5) else None
        asked = self.position.request_range(known)
        return Position(self.position.vb_uuid, self.position.seqno, asked.start, asked.end)

    def connect(self, copy: Copy) -> None:
        """The conversation of stream requests and rollbacks, until the copy accepts."""
        if self.world.chance(0.4):
            self.restart_by_plan(copy)
        log = FailoverLog.of(copy.log)
        for _ in range(MAX_STEPS):
            request = self.request()
            strict = self.world.chance(0.2)
            answer = rollback_seqno(
                request, log, high_seqno=copy.high, purge_seqno=copy.purge, strict_vb_uuid=strict
            )
            self.judge(request, answer, copy)
            if answer is None:
                break
            self.go_back(answer)
        else:
            raise AssertionError("rollbacks without end")
        self.log = log
        self.position = self.position.on_branch(log.newest.vb_uuid)
        self.source = copy

    def go_back(self, answer: int) -> None:
        known = self.points if self.world.chance(0.7) else ()
        step = retreat(
            self.position, answer, log=self.log if self.world.chance(0.8) else None, exact_points=known
        )
        before = self.position
        if step.undo_to is None:
            assert step.log is not None
            assert (step.position.seqno, step.position.reach) == (before.seqno, before.reach)
        else:
            assert step.undo_to <= answer
            assert step.undo_to == step.position.seqno
            self.undo_to(step.undo_to)
        self.position, self.log = step.position, step.log

    def restart_by_plan(self, copy: Copy) -> None:
        held = self.position
        decision = plan(
            held,
            self.log,
            producer_log=FailoverLog.of(copy.log),
            high_seqno=copy.high,
            purge_seqno=copy.purge,
            earlier=[version.position for version in reversed(self.versions)],
        )
        candidates = [*reversed(self.versions)]
        if decision.action is RestartAction.RESUME:
            candidates = []
        elif decision.action is RestartAction.ROLL_BACK:
            index = next(i for i, version in enumerate(candidates) if version.position is decision.base)
            chosen, candidates = candidates[index], candidates[:index]
            self.restore(chosen)
        else:
            assert decision.request == Position.BEGINNING
            assert (decision.action is RestartAction.BACKFILL) == (held.seqno == 0)
            self.restore(NOTHING)
        if decision.action is not RestartAction.RESUME:
            for version in candidates:
                self.judge_skipped(version, copy)
        self.position = decision.request
        answer = rollback_seqno(
            self.request(), FailoverLog.of(copy.log), high_seqno=copy.high, purge_seqno=copy.purge
        )
        assert answer is None, f"{decision} is refused"

    def judge_skipped(self, version: Version, copy: Copy) -> None:
        """`plan` skips a version only if it can't be continued, or if that can't be known."""
        source = version.source
        seqno = version.position.seqno
        if source is None or not source.tidy or not copy.tidy or seqno < copy.purge:
            return
        if any(version.position.vb_uuid == branch for branch, _ in copy.log):
            assert seqno > source.agrees_up_to(copy), f"plan passes over {version.position}"

    def judge(self, request: Position, answer: int | None, copy: Copy) -> None:
        """Was that answer right? Judged from the changes alone."""
        if answer is None:
            assert continues(self.state, self.position, copy), f"{request} accepted, but the reader is lost"
            return
        assert 0 <= answer <= request.seqno
        if self.source is None or not (self.source.tidy and copy.tidy) or 0 < request.seqno < copy.purge:
            return
        if any(request.vb_uuid == branch for branch, _ in copy.log):
            agreed = self.source.agrees_up_to(copy)
            whole = request.snapshot_end if request.is_partial else request.seqno
            assert agreed < whole, f"{request} refused, though both agree up to {agreed}"
            assert answer == (min(agreed, request.snapshot_start) if request.is_partial else agreed)

    def stream(self, copy: Copy) -> None:
        first = True
        for _ in range(self.world.random.randint(1, 3)):
            after = self.position.seqno
            if after >= copy.high:
                return
            lowest_end = max(after + 1, copy.purge)  # below the purge seqno there is no true state to send
            end = self.world.random.randint(lowest_end, copy.high)
            items: list[Change | None] = list(copy.folded(after, end))
            starts = [after, after + 1, items[0].seqno if items and items[0] else end]
            start = self.world.random.choice(starts)
            if first:
                start = min(start, self.position.snapshot_start)
            first = False
            self.marker = self.position.received_marker(start, end)
            if not items or items[-1] is None or items[-1].seqno < end:
                items.append(None)  # Seqno Advanced
            for item in items:
                if self.world.chance(0.2):
                    return  # the connection is lost
                self.position = self.position.received(self.marker, item.seqno if item else end)
                if item:
                    apply(self.state, item)
                    self.since.append(item)
            if self.position.at_snapshot_end:
                self.exact(copy)

    def exact(self, copy: Copy) -> None:
        assert self.state == copy.state(self.position.seqno), f"{self.position} is not what the copy held"
        version = Version(self.position, dict(self.state), self.source, self.points)
        version.points = {**self.points, self.position.seqno: version}
        self.points = version.points
        self.since = []
        self.versions.append(version)


def continues(state: State, position: Position, copy: Copy) -> bool:
    """Does a stream from here bring the reader to what the copy holds, at each end from its own end on?"""
    if position.seqno > copy.high:
        return False
    past = set(copy.past)
    if not all(change in past for change in state.values()):
        return False
    first = max(position.seqno, min(position.snapshot_end if position.is_partial else 0, copy.high))
    for end in range(max(first, copy.purge), copy.high + 1):
        held = dict(state)
        for change in copy.folded(position.seqno, end):
            apply(held, change)
        if held != copy.state(end):
            return False
    return True


def run_case(seed: int) -> None:
    world = World(seed)
    reader = Reader(world)
    for _ in range(world.random.randint(2, 9)):
        copy = world.random.choice(world.copies[-2:])
        reader.connect(copy)
        reader.stream(copy)
        check_logs(world)
        for _ in range(world.random.randint(1, 4)):
            world.turn(copy)


def check_logs(world: World) -> None:
    """The arithmetic of logs against what really happened."""
    copy = world.random.choice(world.copies)
    log = FailoverLog.of(copy.log)
    starts, vb_uuids = log.boundaries()
    if copy.tidy:
        for change in copy.past:
            assert log.branch_of(change.seqno) == change.branch
            assert vb_uuids[bisect_left(starts, change.seqno) - 1] == change.branch


def run_cases(first: int, count: int) -> None:
    for seed in range(first, first + count):
        try:
            run_case(seed)
        except Exception as error:
            error.add_note(f"replay with run_case({seed})")
            raise


def test_rule_in_a_random_world() -> None:
    run_cases(0, CASES)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_rule_in_many_random_worlds(part: int) -> None:
    run_cases(1_000_000 + part * LONG_CASES // 10, LONG_CASES // 10)


# Planted errors: the world must notice each of them.


def _marker_start_kept(self: Position, marker: SnapshotRange, seqno: int) -> Position:
    end = max(marker.end, self.snapshot_end) if self.is_partial else marker.end
    return Position(self.vb_uuid, seqno, marker.start, end)


def _newest_end_only(self: Position, marker: SnapshotRange, seqno: int) -> Position:
    return Position(self.vb_uuid, seqno, self.exact_at, marker.end)


def _range_collapsed(self: Position, marker: SnapshotRange | None = None) -> SnapshotRange:
    return SnapshotRange(self.seqno, self.seqno)


def _older_claim_by_start(sent: Position, log: FailoverLog) -> history.Retreat | None:
    """docs/spec/dcp.md#rollback-at-the-receiver-1 as in the documents, with the start alone."""
    if len(log.entries) == 1 or sent.seqno > log.newest.seqno or sent.vb_uuid != log.newest.vb_uuid:
        return None
    older = FailoverLog(log.entries[1:])
    return history.Retreat(sent.on_branch(older.newest.vb_uuid), older, None)


def _claims_without_lineage(position: Position, log: FailoverLog) -> list[Position]:
    return [position.on_branch(entry.vb_uuid) for entry in log.entries]


def _any_branch_will_do(self: FailoverLog, vb_uuid: int, high_seqno: int) -> history.Branch:
    return history.Branch(0, high_seqno)


def _upper_one_too_high(self: FailoverLog, vb_uuid: int, high_seqno: int) -> history.Branch | None:
    branch = self.branches(high_seqno).get(vb_uuid)
    return branch and history.Branch(branch.start, branch.upper + 1)


def _upper_one_too_low(self: FailoverLog, vb_uuid: int, high_seqno: int) -> history.Branch | None:
    branch = self.branches(high_seqno).get(vb_uuid)
    return branch and history.Branch(branch.start, max(branch.start, branch.upper - 1))


def _rolls_back_to_the_named_seqno(
    sent: Position, rollback_to: int, *, log: FailoverLog | None = None, exact_points: object = ()
) -> history.Retreat:
    position = Position.at(sent.vb_uuid, rollback_to) if rollback_to else Position.BEGINNING
    return history.Retreat(position, log, rollback_to)


def _no_purge(request: Position, log: FailoverLog, *, purge_seqno: int = 0, **rest: int) -> int | None:
    return history.rollback_seqno(request, log, purge_seqno=0, **rest)  # type: ignore[arg-type]


LOST = "accepted, but the reader is lost"
WRONG_STATE = "is not what the copy held"

PLANTED = {
    "the marker's own start is kept": (Position, "received", _marker_start_kept, LOST),
    "a resumed snapshot ends where it is cut anew": (Position, "received", _newest_end_only, WRONG_STATE),
    "the range is collapsed to (s, s, s)": (Position, "request_range", _range_collapsed, LOST),
    "an older branch is tried for the start seqno alone": (
        history,
        "_older_claim",
        _older_claim_by_start,
        LOST,
    ),
    "any name of the log is claimed": (history, "claims", _claims_without_lineage, LOST),
    "identity without vb_uuid": (FailoverLog, "range_of", _any_branch_will_do, LOST),
    "a branch is followed one too far": (FailoverLog, "range_of", _upper_one_too_high, LOST),
    "a branch is left one too early": (FailoverLog, "range_of", _upper_one_too_low, "refused, though"),
    "a rollback stops at the seqno that was named": (None, "retreat", _rolls_back_to_the_named_seqno, LOST),
    "purged deletions are forgotten": (None, "rollback_seqno", _no_purge, LOST),
}


@pytest.mark.parametrize("name", PLANTED)
def test_world_notices_a_planted_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong, noticed = PLANTED[name]
    if owner is None:
        monkeypatch.setitem(globals(), attribute, wrong)
    else:
        monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError, match=noticed):
        run_cases_until(noticed)


def run_cases_until(noticed: str) -> None:
    """Other assertions may fail first in other cases; the one that shows the planted error must come."""
    for seed in range(CASES):
        try:
            run_case(seed)
        except AssertionError as error:
            if noticed in str(error):
                raise
