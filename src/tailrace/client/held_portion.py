"""Rollback mitigation: a portion waits until every copy of its vbuckets has the changes on disk.

The copies are the active and all replicas that the cluster map names: whichever of them takes over, it has
the changes, and no failover can take them back any more. A copy that the map leaves out does not count. While
a portion waits, nothing else is delivered; after a moment, the vbuckets that it waits for are set aside, and
the others go on.

Rules: docs/spec/servers.md#persistence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from ..errors import NotPersistedYet
from ..logs import log_event
from ..model import Position
from ..protocol.dcp.reader import DcpReader
from ..protocol.states import ReadingState
from .copy_survey import counted
from .disk_watch import DiskWatch
from .nodes import Nodes
from .portion import Portion
from .progress import Progress
from .set_aside import SetAside

__all__ = ["HeldPortion"]

_log = logging.getLogger(__name__)

_OBSERVE_S = 0.2
_SAY_AFTER_S = 5.0
"""Disks take a moment; a longer wait is worth a line in the log."""
_SAY_EVERY_S = 60.0


class HeldPortion:
    """At most one portion that was received and can't be delivered yet; ``now`` is the policy's time."""

    def __init__(
        self,
        nodes: Nodes,
        progress: Mapping[int, Progress],
        now: Callable[[], float],
        *,
        patience_s: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """``patience_s``: how long to wait for a replica that can't be reached; None: until it is back or the
        map changes.
        """
        self._nodes = nodes
        self._progress = progress
        self._portion: Portion | None = None
        self._observe_at: float | None = None
        self._now = now
        self._timeout_s = timeout_s
        """How long changes wait before that is an error; None: for ever."""
        self._since = 0.0
        self._said_at: float | None = None
        self._said_since = 0.0
        self._disks = DiskWatch(nodes, progress, now, patience_s=patience_s, on_left=self._left)
        self.aside = SetAside(self._disks, nodes, progress, now)

    @property
    def vbuckets(self) -> Collection[int]:
        """The held portion's vbuckets."""
        return () if self._portion is None else self._portion.ends

    @property
    def is_empty(self) -> bool:
        """Whether no portion is held; vbuckets may be set aside."""
        return self._portion is None

    def is_of(self, links: Collection[DcpReader]) -> bool:
        """Whether the held portion came over one of these connections."""
        return self._portion is not None and any(self._portion.link is link for link in links)

    def hold(self, portion: Portion) -> None:
        """Keep a portion back."""
        self._portion = portion
        self._since = self._observe_at = self._now()

    def take(self) -> Portion | None:
        """The held portion, if all that is left of it is on disk; otherwise ask the copies."""
        portion = self._portion
        assert portion is not None
        is_late = False
        for vbucket, end in list(portion.ends.items()):
            if not self._disks.is_late(vbucket, end.seqno):
                continue
            if self.aside.is_due(vbucket, end.seqno, self._since):
                self._set_aside(portion, vbucket, end)
            else:
                is_late = True
        if not is_late:
            self._portion = self._observe_at = None
            return portion
        self._ask()
        return None

    def _set_aside(self, portion: Portion, vbucket: int, end: Position) -> None:
        """Take what is not on all disks of a vbucket out of the portion, and set the vbucket aside."""
        progress = self._progress[vbucket]
        self._undo(progress, portion, keep_to=self._disks.seqno_everywhere(vbucket))
        if progress.state is not ReadingState.PAUSED:  # a paused one goes on when the application says so
            self.aside.add(vbucket, end.seqno, self._since)
            progress.make_ready()
            progress.troubled_since = progress.unproven_since = None

    def drop(self) -> Portion:
        """Give up the held portion: its connection is gone, and with it the answers about it."""
        portion = self._portion
        assert portion is not None
        self._portion = self._observe_at = None
        for vbucket in {*portion.ends, *(placed.event.vbucket for placed in portion.between)}:
            self._undo(self._progress[vbucket], portion)
        portion.link.discard()
        return portion

    def give_up(self) -> Portion | None:
        """The reading is over: hand back what is held, which is no longer delivered."""
        portion, self._portion, self._observe_at = self._portion, None, None
        self.aside.clear()
        return portion

    def next_timer(self) -> float | None:
        """When the copies are asked again."""
        times = [self._observe_at, self.aside.next_timer()]
        return min((time for time in times if time is not None), default=None)

    @property
    def is_waiting(self) -> bool:
        """Whether anything is held back."""
        return not self.is_empty or bool(self.aside)

    def waits_for(self) -> str:
        """What is missing, in words."""
        reasons = counted(self._reasons())
        return f"waits until the changes are on disk everywhere{reasons and f'; {reasons}'}"

    def _reasons(self) -> dict[int, str]:
        """By vbucket: what it waits for."""
        portion = self._portion
        ends = {} if portion is None else portion.ends
        held = {vbucket: self._disks.why_late(vbucket, end.seqno) for vbucket, end in ends.items()}
        return {**self.aside.reasons(), **{vbucket: why for vbucket, why in held.items() if why}}

    @property
    def _waits_since(self) -> float | None:
        """Since when something waits; None if nothing does."""
        times = [self.aside.since, None if self._portion is None else self._since]
        return min((since for since in times if since is not None), default=None)

    def check(self) -> None:
        """Raise `NotPersistedYet` if changes have waited for too long."""
        since = self._waits_since
        if since is None or self._timeout_s is None or self._now() - since < self._timeout_s:
            return
        if self._reasons():  # otherwise it only waits for the application
            raise NotPersistedYet(self.waits_for())

    def turn(self) -> None:
        """Ask, a few times a second, how far the waiting vbuckets are persisted."""
        self.aside.turn()
        self._ask()
        self._say()

    def _ask(self) -> None:
        if self._portion is None or self._observe_at is None or self._now() < self._observe_at:
            return
        self._observe_at = self._now() + _OBSERVE_S
        for vbucket, end in list(self._portion.ends.items()):
            self._disks.ask(vbucket, end.seqno)

    def _say(self) -> None:
        """Log that something waits, and for whom, once that has lasted; and that it is over."""
        since, now = self._waits_since, self._now()
        if self._said_at is not None and (since is None or since > self._said_at):
            log_event(_log, logging.WARNING, "on_disk_everywhere", waited_s=round(now - self._said_since))
            self._said_at = None
        if since is None:
            return
        due = since + _SAY_AFTER_S if self._said_at is None else self._said_at + _SAY_EVERY_S
        if now >= due and self._reasons():  # otherwise it only waits for the application
            if self._said_at is None:
                self._said_since = since
            self._said_at = now
            log_event(_log, logging.WARNING, "held_back", why=self.waits_for())

    def _left(self, progress: Progress) -> None:
        """A vbucket has left the branch of what is held of it: forget what came on that, and ask again."""
        self.aside.release(progress.vbucket)
        if self._portion is not None and progress.vbucket in self._portion.ends:
            self._undo(progress, self._portion)

    def _undo(self, progress: Progress, portion: Portion, *, keep_to: int = -1) -> None:
        """Return to where the application is, as if the held portion, or what it has above a seqno, had never
        come.
        """
        base, undo_to = portion.drop(progress.vbucket, keep_to=keep_to)
        if base is not None:
            progress.stream.position = base
        if undo_to is not None:
            progress.stream.undo_to = undo_to
        if progress.state in (ReadingState.OPEN, ReadingState.REQUESTED, ReadingState.DONE):
            progress.leave(self._now())
            progress.make_ready()
        # its stream may be open elsewhere by now, past what is forgotten here
        progress.abandon([link for _, link in self._nodes.links()], self._now())
