"""How far a reader has come in one vbucket, and what it can go back to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..history import FailoverLog, rollback_seqno
from ..model import MAX_U64, Position, check_seqno, check_u64
from ..protocol.dcp.reader import DcpReader
from ..protocol.dcp.reader_stream import ReaderStream
from ..protocol.questions import ANSWER_S, Patience
from ..protocol.states import READING_TRANSITIONS, Machine, ReadingInput, ReadingState
from .retry import Backoff

__all__ = ["MAX_POINTS", "Points", "Progress", "Roster", "SavedPosition"]

MAX_POINTS = 32

STANDS_S = 5.0
"""A stream that stays open this long without announcing a snapshot counts as useful even if it is empty."""


class Points:
    """Seqnos at which the application had a whole state, which a rollback can return to; a bounded number.

    All of the newest are kept, and fewer and fewer of the older ones, so they reach far back.
    """

    __slots__ = ("_seqnos",)

    def __init__(self, seqnos: list[int] | None = None) -> None:
        self._seqnos = sorted(set(seqnos))[-MAX_POINTS:] if seqnos else []

    def add(self, seqno: int) -> None:
        """Add one; between two rollbacks they come in ascending order."""
        known = self._seqnos
        if seqno and (not known or seqno > known[-1]):
            known.append(seqno)
            if len(known) > MAX_POINTS:
                # drop every second one of the older half
                half = MAX_POINTS // 2
                known[:half] = known[:half:2]

    def forget_above(self, seqno: int) -> None:
        """Drop what lies above, after a rollback."""
        self._seqnos = [known for known in self._seqnos if known <= seqno]

    def __iter__(self) -> Any:
        return iter(self._seqnos)


@dataclass(frozen=True, slots=True)
class SavedPosition:
    """What is saved of a vbucket between runs: enough to resume, or to roll back without starting over."""

    position: Position
    log: FailoverLog | None = None
    points: tuple[int, ...] = ()
    purge_seqno: int = 0
    origin: int = 0
    """The application holds nothing at or below this seqno: it started there."""

    def to_json(self) -> dict[str, Any]:
        """As in the state file: a position with more members."""
        document = self.position.to_json()
        if self.log is not None:
            document["failover_log"] = self.log.to_json()
        if self.points:
            document["points"] = list(self.points)
        if self.purge_seqno:
            document["purge_seqno"] = self.purge_seqno
        if self.origin:
            document["origin"] = self.origin
        return document

    @classmethod
    def from_json(cls, value: object) -> SavedPosition:
        """What `to_json` wrote, or a bare position."""
        if not isinstance(value, dict):
            raise UsageError("a saved position is not an object")
        members = dict(value)
        log = members.pop("failover_log", None)
        points = members.pop("points", [])
        purge_seqno = check_seqno(members.pop("purge_seqno", 0), "purge_seqno")
        origin = check_u64(members.pop("origin", 0), "origin")
        if not isinstance(points, list) or len(points) > 16 * MAX_POINTS:
            raise UsageError("points of a saved position is not a list of a few seqnos")
        return cls(
            Position.from_json(members),
            None if log is None else FailoverLog.from_json(log),
            tuple(check_seqno(point, "a point") for point in points),
            purge_seqno,
            origin,
        )


class Roster:
    """The vbuckets of a reading by what is to be done about them. Most of a thousand have open streams: those
    that need something are found here without looking at each.
    """

    __slots__ = ("done", "patience", "requested", "resting_changes", "unsettled")

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.unsettled: dict[int, Progress] = {}
        """Neither open nor at rest: there is something to do about them, or to wait for."""
        self.requested: dict[int, Progress] = {}
        """Those that wait for an answer and never had trouble, kept apart from the others: oldest first."""
        self.done = 0
        """How many have come to their end."""
        self.resting_changes = 0
        """Rises whenever one comes to rest (paused, done) or goes on after that."""

    def moved(self, progress: Progress, before: ReadingState, now: ReadingState) -> None:
        """A vbucket has another state."""
        vbucket = progress.vbucket
        (self.requested if vbucket in self.requested else self.unsettled).pop(vbucket, None)
        if now is ReadingState.REQUESTED and progress.troubled_since is None:
            self.requested[vbucket] = progress
        elif now is not ReadingState.OPEN and now not in _RESTING:
            self.unsettled[vbucket] = progress
        if before is not now and (before in _RESTING or now in _RESTING):
            self.resting_changes += 1
            self.done += (now is ReadingState.DONE) - (before is ReadingState.DONE)

    def watched(self, now: float, retry_for_s: float) -> list[Progress]:
        """Those with which we may lose patience first: of those that wait for an answer only the oldest,
        while that one is in time.
        """
        watched = [
            progress
            for progress in self.unsettled.values()
            if progress.troubled_since is not None or progress.machine.state is ReadingState.REQUESTED
        ]
        requested = self.requested.values()
        oldest = next(iter(requested), None)
        if oldest is not None and now < oldest.error_due(retry_for_s):
            return [*watched, oldest]
        return [*watched, *requested]


_RESTING = (ReadingState.PAUSED, ReadingState.DONE)


@dataclass(slots=True, eq=False)
class Progress:
    """One vbucket."""

    stream: ReaderStream
    backoff: Backoff
    roster: Roster = field(default_factory=Roster)
    machine: Machine[ReadingState, ReadingInput] = field(
        default_factory=lambda: Machine(READING_TRANSITIONS, ReadingState.UNRESOLVED)
    )
    wants_start: bool = False
    """It starts "now", and the server has yet to say where that is."""
    ends_at_most: int | None = None
    """It ends at what the server has, but not above this seqno; the server must first say where that is.

    It is asked again for every stream: a vbucket that was rolled back may never reach the old end.
    """
    end_seqno: int = MAX_U64
    points: Points = field(default_factory=Points)
    origin: int = 0
    history: FailoverLog | None = None
    """The failover log that came with the stream; None before the first stream."""
    delivered: Position = Position.BEGINNING
    """What the application has; the stream itself may be ahead of it."""
    saved: SavedPosition | None = None
    """The last whole state that the application has, ready to be saved."""
    retry_at: float = 0.0
    requested_at: float = 0.0
    """By the clock of the roster's patience, as are ``troubled_since`` and ``unproven_since``."""
    troubled_since: float | None = None
    trouble: str = ""
    opened_at: float = 0.0
    opened_seqno: int = 0
    """The position when the stream was opened."""
    is_owed: bool = False
    """Whether the stream has announced a snapshot."""
    unproven_since: float | None = None
    """Since when there was trouble before the stream was opened: not over until the stream proves useful."""

    @property
    def state(self) -> ReadingState:
        return self.machine.state

    @property
    def vbucket(self) -> int:
        return self.stream.vbucket

    def feed(self, happened: ReadingInput) -> None:
        """Something happened to it."""
        before = self.machine.state
        self.roster.moved(self, before, self.machine.feed(happened))

    def make_ready(self) -> None:
        """Have its stream requested, if need be after the server has said where "now" is."""
        must_ask = self.wants_start or self.ends_at_most is not None
        self.feed(ReadingInput.SEQNOS_WANTED if must_ask else ReadingInput.STREAM_WANTED)

    def requested(self, now: float) -> None:
        """The stream was requested."""
        self.feed(ReadingInput.REQUESTED)
        self.requested_at = self._waited(now)

    def opened(self, position: Position, now: float) -> None:
        """The server has accepted the stream request; that alone is not progress."""
        self.feed(ReadingInput.OPENED)
        self.is_owed = False
        self.opened_seqno, self.opened_at = position.seqno, now
        self.unproven_since, self.troubled_since, self.trouble = self.troubled_since, None, ""

    @property
    def has_moved(self) -> bool:
        """Whether the open stream has brought something."""
        return self.state is ReadingState.OPEN and self.stream.position.seqno != self.opened_seqno

    def leave(self, now: float, *, is_proven: bool = False) -> bool:
        """The stream has ended; return whether it was useful, which also ends the trouble before it."""
        was_of_use = self.state is ReadingState.OPEN and (
            is_proven or self.has_moved or (not self.is_owed and now - self.opened_at >= STANDS_S)
        )
        if was_of_use:
            self.unproven_since = None
            self.backoff.reset()
        return was_of_use

    def wait(self, trouble: str, now: float) -> None:
        """It can't be read now; another attempt is due after a pause."""
        self.feed(ReadingInput.FAILED)
        self.retry_at = now + self.backoff.next_s()
        self.in_trouble(trouble, now)

    def abandon(self, links: Iterable[DcpReader], now: float) -> None:
        """Give up the stream on its connection; what still comes of it is passed over."""
        for link in links:
            if any(stream is self.stream for stream in link.streams.values()):
                link.close_stream(self.vbucket)
        self.leave(now)
        self.stream.given_up()

    def in_trouble(self, why: str, now: float) -> None:
        """It can't be read; the trouble counts from the last useful stream."""
        self.trouble = why
        if self.troubled_since is None:
            self.troubled_since = self._waited(now) if self.unproven_since is None else self.unproven_since

    def error_due(self, retry_for_s: float) -> float:
        """When to give up on it, if nothing changes and the application does not hold us up."""
        held_up_s = self.roster.patience.held_up_s
        if self.troubled_since is not None:
            return self.troubled_since + retry_for_s + held_up_s
        if self.state is ReadingState.REQUESTED:
            return self.requested_at + max(retry_for_s, ANSWER_S) + held_up_s  # as for any question
        return math.inf

    def unanswered_s(self, now: float) -> float:
        """How long we have waited for the answer to its stream request."""
        return self._waited(now) - self.requested_at

    def _waited(self, now: float) -> float:
        return self.roster.patience.waited(now)

    def restore(self, saved: SavedPosition) -> None:
        """Start where an earlier run stopped."""
        self.stream.position = self.delivered = saved.position
        self.stream.log = saved.log
        self.stream.purge_seqno = saved.purge_seqno
        self.points = Points(list(saved.points))
        self.origin = saved.origin
        if not saved.position.is_partial:
            self.points.add(saved.position.seqno)
        self.saved = saved

    def on_history(self, points: Iterable[int | Position]) -> Iterator[int]:
        """The seqnos of the application's points that it can return to.

        An application behind the stream may still be on a branch that was taken back since. It says which
        branch a point is on, and a point on such a branch is left out.
        """
        for point in points:
            if isinstance(point, int):
                yield point
            elif self.history is None or _is_on(self.history, point):
                yield point.seqno

    def delivered_up_to(self, position: Position) -> None:
        """The application has everything up to here."""
        self.delivered = position
        if position.is_partial or position.seqno == 0:
            return
        self.points.add(position.seqno)
        self.saved = SavedPosition(
            position, self.stream.log, tuple(self.points), self.stream.purge_seqno, self.origin
        )

    def rolled_back(self, seqno: int, position: Position) -> None:
        """The application was told to go back to ``seqno``, and goes on from ``position``."""
        self.points.forget_above(seqno)
        self.origin = min(self.origin, seqno)
        self.delivered = position
        self.saved = SavedPosition(position, self.stream.log, tuple(self.points), 0, self.origin)


def _is_on(log: FailoverLog, position: Position) -> bool:
    return rollback_seqno(Position.at(position.vb_uuid, position.seqno), log, high_seqno=MAX_U64) is None
