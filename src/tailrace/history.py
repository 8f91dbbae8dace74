"""A vbucket's history: its branches, where two copies of it part, and the rollback rule. Pure functions.

Every failover that may have lost changes begins a new *branch*, named by a vb_uuid. The failover log lists
the branches of one copy, newest first, each with the seqno after which its changes begin:

    [(C, 8), (B, 3), (A, 0)]        changes 1-3 were made on A, 4-8 on B, from 9 on C
     newest          oldest

A vb_uuid is made once. So when two logs hold the same one, both copies hold the same changes up to the end
that each log gives that branch: they agree up to the smaller of the two ends. Everything here follows from
that: the producer's rollback decision (`rollback_seqno`, `upr_rollback_seqno`), what a reader does about the
answer (`retreat`), and the outcome of both for a caller that knows both sides (`plan`).

Store, producer, client, Spark source and mirror all use this module; the rule is written nowhere else.

Rules: docs/spec/dcp.md#failover-log, docs/spec/dcp.md#rollback-decision,
docs/spec/dcp.md#rollback-at-the-receiver, docs/spec/upr.md#rollback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

from .errors import LocalProtocolError, MalformedMessage, UsageError
from .model import MAX_U64, Position, check_u64
from .wire.fields import decode_failover_log, encode_failover_log

__all__ = [
    "MAX_ENTRIES",
    "MAX_RECEIVED_ENTRIES",
    "Branch",
    "FailoverEntry",
    "FailoverLog",
    "RestartAction",
    "RestartPlan",
    "Retreat",
    "claims",
    "plan",
    "retreat",
    "rollback_seqno",
    "upr_rollback_seqno",
]

MAX_ENTRIES = 25
"""How many entries our own logs hold by default; one more drops the oldest."""

MAX_RECEIVED_ENTRIES = 1024
"""How many we accept from a peer: the largest number that any of the four documents allows."""


@dataclass(frozen=True, slots=True)
class FailoverEntry:
    """A branch and the seqno at which it left its predecessor: its own changes come after ``seqno``."""

    vb_uuid: int
    seqno: int

    def __post_init__(self) -> None:
        vb_uuid, seqno = self.vb_uuid, self.seqno
        if type(vb_uuid) is type(seqno) is int and 0 <= vb_uuid <= MAX_U64 and 0 <= seqno <= MAX_U64:
            return
        # something is wrong: find out what
        check_u64(self.vb_uuid, "vb_uuid of a failover entry")
        check_u64(self.seqno, "seqno of a failover entry")


class Branch(NamedTuple):
    """What a log says of one branch: it owns the changes above ``start``; this copy has those to ``upper``.

    ``upper`` is where the next branch begins, or the high seqno: beyond it this copy's history differs.
    """

    start: int
    upper: int


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """The branches of one copy of a vbucket, newest first; at least one. Immutable: changes give a new log.

    A peer's log is kept as it came, in any order and with any vb_uuid: the documents' own examples are out of
    order. Logs that we make ourselves have descending seqnos and few entries (`MAX_ENTRIES`).
    """

    entries: tuple[FailoverEntry, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.entries) <= MAX_RECEIVED_ENTRIES:
            raise UsageError(
                f"a failover log has {len(self.entries)} entries, but must have 1 to {MAX_RECEIVED_ENTRIES}"
            )

    @classmethod
    def new(cls, vb_uuid: int) -> FailoverLog:
        """The log of a vbucket without a past."""
        return cls((_own_entry(vb_uuid, 0),))

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> FailoverLog:
        """A log from pairs of vb_uuid and seqno, as messages carry them; newest first."""
        return cls(tuple([FailoverEntry(vb_uuid, seqno) for vb_uuid, seqno in pairs]))

    @property
    def newest(self) -> FailoverEntry:
        return self.entries[0]

    def __contains__(self, vb_uuid: object) -> bool:
        return any(entry.vb_uuid == vb_uuid for entry in self.entries)

    # How a log grows and shrinks.

    def branched_at(self, seqno: int, vb_uuid: int, *, max_entries: int = MAX_ENTRIES) -> FailoverLog:
        """Begin a new branch after ``seqno``: the vbucket became active, or what followed may be lost.

        For a promotion ``seqno`` is the end of the last complete snapshot. Branches that began above it
        belong to a history that this copy no longer has.
        """
        if vb_uuid in self:
            raise LocalProtocolError(
                f"vb_uuid {vb_uuid} is in the failover log already; each names one branch"
            )
        older = (entry for entry in self.entries if entry.seqno <= seqno)
        return FailoverLog((_own_entry(vb_uuid, seqno), *older)[:max_entries])

    def rolled_back_to(self, seqno: int, new_vb_uuid: int) -> FailoverLog:
        """The log of a reader that went back to ``seqno``; ``new_vb_uuid`` is for when nothing is left."""
        left = self.up_to(seqno)
        if left is not None and seqno > 0:
            return left
        return FailoverLog((_own_entry(new_vb_uuid, seqno),))

    def cleaned(self) -> FailoverLog | None:
        """What can be trusted of a stored log: no vb_uuid 0, no entry above the newer one before it.

        None if nothing is left; the vbucket then needs a new branch.
        """
        kept: list[FailoverEntry] = []
        for entry in self.entries:
            if entry.vb_uuid != 0 and (not kept or entry.seqno <= kept[-1].seqno):
                kept.append(entry)
        return FailoverLog(tuple(kept)) if kept else None

    def up_to(self, seqno: int) -> FailoverLog | None:
        """The branches that began at or below ``seqno``; None if there is none."""
        kept = tuple(entry for entry in self.entries if entry.seqno <= seqno)
        return FailoverLog(kept) if kept else None

    # What a log knows.

    def branch_of(self, seqno: int) -> int:
        """The vb_uuid of the branch on which change ``seqno`` was made: that of the newest entry below it.

        0 ("no history") for a change older than the oldest entry that is left.
        """
        return next((entry.vb_uuid for entry in self.entries if entry.seqno < seqno), 0)

    def boundaries(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`branch_of` for whole columns: rising start seqnos, and the vb_uuid of the changes after each.

        ``vb_uuids[searchsorted(starts, seqno, side="left") - 1]`` is the branch of a change above
        ``starts[0]``.
        """
        effective: list[FailoverEntry] = []
        for entry in self.entries:
            if not effective or entry.seqno < effective[-1].seqno:
                effective.append(entry)
        effective.reverse()
        return tuple(e.seqno for e in effective), tuple(e.vb_uuid for e in effective)

    def branches(self, high_seqno: int) -> dict[int, Branch]:
        """Every branch by its vb_uuid, newest first; if a peer sends one twice, the older entry counts.

        vb_uuid 0 names no branch, even if a peer sends it.
        """
        by_uuid: dict[int, Branch] = {}
        upper = high_seqno
        for entry in self.entries:
            by_uuid[entry.vb_uuid] = Branch(entry.seqno, upper)
            upper = entry.seqno
        by_uuid.pop(0, None)
        return by_uuid

    def range_of(self, vb_uuid: int, high_seqno: int) -> Branch | None:
        """Where a branch begins and how far this copy follows it; None if it is not in the log."""
        return self.branches(high_seqno).get(vb_uuid)

    # Forms.

    def to_bytes(self) -> bytes:
        """The value of a failover log response: 16 bytes per entry, newest first."""
        return encode_failover_log([(entry.vb_uuid, entry.seqno) for entry in self.entries])

    @classmethod
    def from_bytes(cls, value: bytes) -> FailoverLog:
        """Read a failover log response; order and vb_uuids are kept as they come."""
        pairs = decode_failover_log(value)
        if len(pairs) > MAX_RECEIVED_ENTRIES:
            raise MalformedMessage(f"a failover log has {len(pairs)} entries, above {MAX_RECEIVED_ENTRIES}")
        return cls.of(pairs)

    def to_json(self) -> list[dict[str, int]]:
        """The form in which servers keep it: ``[{"id": vb_uuid, "seq": seqno}, …]``, newest first."""
        return [{"id": entry.vb_uuid, "seq": entry.seqno} for entry in self.entries]

    @classmethod
    def from_json(cls, value: object) -> FailoverLog:
        """Read the form of `to_json`; use `cleaned` for what can be trusted of it."""
        if not isinstance(value, list):
            raise UsageError("a failover log must be an array")
        return cls.of(_pair_from_json(member) for member in value)


def _own_entry(vb_uuid: int, seqno: int) -> FailoverEntry:
    if vb_uuid == 0:
        raise LocalProtocolError("vb_uuid 0 means no history and can't name a branch")
    return FailoverEntry(vb_uuid, seqno)


def _pair_from_json(value: Any) -> tuple[int, int]:
    if not isinstance(value, dict) or value.keys() != {"id", "seq"}:
        raise UsageError("a failover entry must be an object with the members id and seq")
    return check_u64(value["id"], "id"), check_u64(value["seq"], "seq")


# The producer: may a stream start here?


def rollback_seqno(
    request: Position,
    log: FailoverLog,
    *,
    high_seqno: int,
    purge_seqno: int = 0,
    client_purge_seqno: int = 0,
    strict_vb_uuid: bool = False,
    filtered_high_seqno: int | None = None,
) -> int | None:
    """The producer's decision on a DCP stream request: None to go on, or the seqno to roll back to.

    ``log``, ``high_seqno`` and ``purge_seqno`` are the producer's (purge seqno 0 if the request ignores
    purged tombstones). ``client_purge_seqno`` is the one that the reader saw; a reader must forget it
    when it goes back. ``filtered_high_seqno`` is the last seqno of the collections that a filtered stream
    asks for.

    The rule is only as sound as the request: ``seqno == snapshot_start`` means that nothing of the snapshot
    was received. A `Position` that was kept by `Position.received` says so only when it is true.
    """
    if request.seqno == 0 and not (strict_vb_uuid and request.vb_uuid):
        return None
    # Deletions up to the purge seqno are gone: a reader below it would keep what they deleted, unless it saw
    # the vbucket after that same purge, or nothing that it asks for lies above its position.
    if (
        0 < request.seqno < purge_seqno
        and client_purge_seqno != purge_seqno
        and (filtered_high_seqno is None or request.seqno < filtered_high_seqno)
    ):
        return 0
    branch = log.range_of(request.vb_uuid, high_seqno)
    if branch is None:
        return 0
    if request.reach <= branch.upper:
        return None
    return min(branch.upper, request.exact_at)


def upr_rollback_seqno(
    start_seqno: int, vb_uuid: int, log: FailoverLog, *, high_seqno: int, purge_seqno: int = 0
) -> int | None:
    """The same decision for both UPR drafts, whose requests have no snapshot range.

    A draft's reader resumes only from the end of a snapshot, so its position is exact. The drafts have no
    purge; a producer that purges passes its seqno all the same, since both allow a rollback to 0.
    """
    request = Position.at(vb_uuid, start_seqno)
    return rollback_seqno(request, log, high_seqno=high_seqno, purge_seqno=purge_seqno)


# The reader or replica: what to do about a rollback.


def claims(position: Position, log: FailoverLog) -> Iterator[Position]:
    """``position`` under each vb_uuid that is true of it: its own, then the others of its log, newest first.

    A branch that begins at or above all that the reader depends on has given it nothing yet; then the branch
    before is just as true, and a producer that missed a failover or two may know only that one.
    """
    yield position
    branches = log.branches(position.reach)
    true_names = [vb_uuid for vb_uuid, branch in branches.items() if position.reach <= branch.upper]
    # A position under any other name is not on this log's lineage, which then says nothing about it.
    if position.vb_uuid in true_names:
        yield from (position.on_branch(vb_uuid) for vb_uuid in true_names if vb_uuid != position.vb_uuid)


@dataclass(frozen=True, slots=True)
class Retreat:
    """What a reader does after a rollback answer: undo all above ``undo_to``, then ask for ``position``.

    ``undo_to`` is None if only another vb_uuid is tried and nothing has to be undone. ``log`` is what is left
    of the reader's log; the next accepted request replaces it.
    """

    position: Position
    log: FailoverLog | None
    undo_to: int | None


def retreat(
    sent: Position,
    rollback_to: int,
    *,
    log: FailoverLog | None = None,
    exact_points: Iterable[int] = (),
    only_points: bool = False,
) -> Retreat:
    """The reader's answer to a producer that asks to roll ``sent`` back to ``rollback_to``.

    ``exact_points`` are earlier seqnos at which the reader was exact and to which it can return (table
    versions, snapshot ends). The seqno that the producer names is only an upper bound: a reader that dropped
    just what lies above it would still lack what was folded away below. So it goes to an exact point at or
    below, at worst to the beginning, and resumes from there. The start of a snapshot that it has only a part
    of is such a point too, unless those given are the only ones (``only_points``).

    Each answer leads strictly down (a lower seqno, or the same with an older branch), so any series of
    rollbacks ends, even if a producer names the same seqno that it was asked for.
    """
    if rollback_to > sent.seqno or sent == Position.BEGINNING:
        raise MalformedMessage(f"a rollback from seqno {sent.seqno} to {rollback_to} leads nowhere")
    if rollback_to == 0 and log is not None and (older := _older_claim(sent, log)) is not None:
        return older
    points = {*exact_points} if only_points else {sent.exact_at, *exact_points}
    target = max((point for point in points if point <= rollback_to and point < sent.seqno), default=0)
    if target == 0:
        return Retreat(Position.BEGINNING, None, 0)
    left = log and log.up_to(rollback_to)
    # A producer that names a seqno above 0 knows the branch that was sent: use it if nothing else is left.
    return Retreat(Position.at(left.newest.vb_uuid if left else sent.vb_uuid, target), left, target)


def _older_claim(sent: Position, log: FailoverLog) -> Retreat | None:
    """The same place under the next older vb_uuid: rollback to 0 may just mean that this one is unknown."""
    index = next((i for i, entry in enumerate(log.entries) if entry.vb_uuid == sent.vb_uuid), None)
    if index is None or index + 1 == len(log.entries) or sent.reach > log.entries[index].seqno:
        return None
    older = FailoverLog(log.entries[index + 1 :])
    return Retreat(sent.on_branch(older.newest.vb_uuid), older, None)


# Both sides known: for the mirror before it asks, and for `tailrace plan`.


class RestartAction(StrEnum):
    """What a restart does with a vbucket."""

    RESUME = "resume"
    """Go on from where it is."""
    BACKFILL = "backfill"
    """Nothing is held yet: read it from the beginning."""
    ROLL_BACK = "roll back"
    """Return to an earlier exact point, and go on from there."""
    START_OVER = "start over"
    """Nothing of what is held can be kept: replace it from the beginning."""


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """What to do, from which of the given positions, and what to ask for.

    ``request`` is ``base`` under a vb_uuid that the producer knows; it is accepted while the producer stays
    as it is.
    """

    action: RestartAction
    base: Position
    request: Position

    def __str__(self) -> str:
        return (
            f"{self.action} to {self.base.seqno}"
            if self.action is RestartAction.ROLL_BACK
            else str(self.action)
        )


def plan(
    held: Position,
    log: FailoverLog | None,
    *,
    producer_log: FailoverLog,
    high_seqno: int,
    purge_seqno: int = 0,
    earlier: Iterable[Position] = (),
) -> RestartPlan:
    """What a restart from ``held`` will do: the producer's own decision, applied to each possibility.

    ``earlier`` are exact positions that can be restored, newest first, each with the vb_uuid that it was
    committed with. They may be on branches that were abandoned since: a producer that has such a branch
    accepts it. ``log`` is the failover log kept with ``held``.
    """
    for position in chain((held,), earlier):
        if position.seqno == 0:
            continue
        for claim in claims(position, log) if log else (position,):
            if rollback_seqno(claim, producer_log, high_seqno=high_seqno, purge_seqno=purge_seqno) is None:
                return RestartPlan(
                    RestartAction.RESUME if position is held else RestartAction.ROLL_BACK, position, claim
                )
    if held.seqno > 0:
        action = RestartAction.START_OVER
    else:
        action = RestartAction.BACKFILL if high_seqno > 0 else RestartAction.RESUME
    return RestartPlan(action, Position.BEGINNING, Position.BEGINNING)
