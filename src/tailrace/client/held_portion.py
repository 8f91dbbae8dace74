"""Rollback mitigation: a portion waits until every copy of its vbuckets has the changes on disk.

The copies are the active and all replicas that the cluster map names: whichever of them takes over, it has
the changes, and no failover can take them back any more. A copy that the map leaves out does not count. While
a portion waits, nothing else is delivered.

Rules: docs/spec/servers.md#persistence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from ..connstr import Address
from ..errors import NotPersistedYet
from ..logs import log_event
from ..protocol.dcp.reader import DcpReader
from ..protocol.states import ReadingState
from .copies import counted, in_words
from .nodes import KnownNode, Nodes
from .portion import Portion
from .progress import Progress
from .questions import persisted_seqno

__all__ = ["HeldPortion"]

_log = logging.getLogger(__name__)

_OBSERVE_S = 0.2
_SAY_AFTER_S = 5.0
"""Disks take a moment; what takes longer has a reason that somebody wants to know."""
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
        self._nodes = nodes
        self._progress = progress
        self._portion: Portion | None = None
        self._observe_at: float | None = None
        self._now = now
        self._patience_s = patience_s
        """How long a replica is waited for that can't be reached; None: until it or another map is there."""
        self._timeout_s = timeout_s
        """How long the portion waits before that is an error; None: for ever."""
        self._since = 0.0
        self._say_at = 0.0
        self._has_said = False
        self._persisted: dict[tuple[int, int, Address], int] = {}
        """By vbucket, branch and node."""
        self._map_version: tuple[int, int] | None = None

    @property
    def vbuckets(self) -> Collection[int]:
        """Those of the portion."""
        return () if self._portion is None else self._portion.ends

    @property
    def is_empty(self) -> bool:
        """Nothing is held."""
        return self._portion is None

    def is_of(self, links: Collection[DcpReader]) -> bool:
        """Whether the held portion came over one of these connections."""
        return self._portion is not None and any(self._portion.link is link for link in links)

    def hold(self, portion: Portion) -> None:
        """Keep a portion back."""
        self._portion = portion
        self._since = self._now()
        self._say_at = self._since + _SAY_AFTER_S

    def take(self) -> Portion | None:
        """The held portion, if all of it is on disk; otherwise the server is asked."""
        portion = self._portion
        assert portion is not None
        if not any(self._late_copies(vbucket) for vbucket in portion.ends):
            self._portion = self._observe_at = None
            if self._has_said:
                self._has_said = False
                log_event(
                    _log, logging.WARNING, "on_disk_everywhere", waited_s=round(self._now() - self._since)
                )
            return portion
        if self._observe_at is None:
            self._observe_at = self._now()
            self.turn()
        return None

    def drop(self) -> Portion:
        """The connection of the held portion is gone: nobody can say any more what becomes of it."""
        portion = self._portion
        assert portion is not None
        self._portion = self._observe_at = None
        for vbucket in {*portion.ends, *(told.event.vbucket for told in portion.told)}:
            self._undo(self._progress[vbucket], portion)
        portion.link.discard()
        return portion

    def give_up(self) -> Portion | None:
        """The reading is over: nobody will get what is held."""
        portion, self._portion, self._observe_at = self._portion, None, None
        return portion

    def next_timer(self) -> float | None:
        """When the server is asked again."""
        return self._observe_at

    def waits_for(self) -> str:
        """What is missing, in words."""
        reasons: dict[int, str] = {}
        for vbucket in self.vbuckets:
            active = self._nodes.node_of(vbucket)
            late = [
                in_words(node, self._now(), is_active=node is active) for node in self._late_copies(vbucket)
            ]
            if active is None:
                late.append("no node has it")
            if late:
                reasons[vbucket] = ", ".join(late)
        return f"waits until the changes are on disk everywhere; {counted(reasons)}"

    def check(self) -> None:
        """Raise `NotPersistedYet` if the portion has waited for too long."""
        if self._portion is None or self._timeout_s is None:
            return
        if self._now() - self._since >= self._timeout_s:
            raise NotPersistedYet(self.waits_for())

    def turn(self) -> None:
        """Ask how far the vbuckets of the held portion are persisted, a few times a second."""
        if self._portion is None or self._observe_at is None or self._now() < self._observe_at:
            return
        if self._now() >= self._say_at:
            self._say_at, self._has_said = self._now() + _SAY_EVERY_S, True
            log_event(_log, logging.WARNING, "held_back", why=self.waits_for())
        self._observe_at = self._now() + _OBSERVE_S
        for vbucket in list(self._portion.ends):
            progress, active = self._progress[vbucket], self._nodes.node_of(vbucket)
            if active is None:
                self._nodes.ask_for_map(self._now())
                continue
            for node in self._late_copies(vbucket):
                if node.is_ready and progress.stream.log:
                    assert node.link is not None
                    vb_uuid = progress.stream.log.newest.vb_uuid
                    observer = self._observer(progress, vb_uuid, node.address, is_active=node is active)
                    node.link.ask(persisted_seqno(vbucket, vb_uuid), observer, self._now())

    def _late_copies(self, vbucket: int) -> list[KnownNode]:
        """The nodes that have not persisted what is held of a vbucket, as far as we know."""
        assert self._portion is not None and self._nodes.map is not None
        if self._nodes.map.version != self._map_version:
            # a copy may be another one now, behind the same address
            self._map_version = self._nodes.map.version
            self._persisted.clear()
        progress = self._progress[vbucket]
        vb_uuid = progress.stream.log.newest.vb_uuid if progress.stream.log else 0
        wanted = self._portion.ends[vbucket].seqno
        return [
            node
            for node in self._nodes.copies_of(vbucket)
            if self._persisted.get((vbucket, vb_uuid, node.address), -1) < wanted
            and not (
                node is not self._nodes.node_of(vbucket) and node.is_given_up(self._patience_s, self._now())
            )
        ]

    def _observer(
        self, progress: Progress, vb_uuid: int, address: Address, *, is_active: bool
    ) -> Callable[[int | None], None]:
        def observed(persisted: int | None) -> None:
            if progress.stream.log is None or progress.stream.log.newest.vb_uuid != vb_uuid:
                return
            if persisted is not None:
                self._persisted[progress.vbucket, vb_uuid, address] = persisted
            elif is_active:
                self._take_back(progress)
            # a replica that does not know the branch has not heard of it yet, or the active will tell
            self._nodes.on_change()

        return observed

    def _take_back(self, progress: Progress) -> None:
        """The branch of a held portion is history: forget what came on it, and ask again."""
        self._persisted.clear()
        if self._portion is not None and progress.vbucket in self._portion.ends:
            self._undo(progress, self._portion)

    def _undo(self, progress: Progress, portion: Portion) -> None:
        """Stand where the application stands, as if the held portion had never come."""
        base, undo_to = portion.drop(progress.vbucket)
        if base is not None:
            progress.stream.position = base
        if undo_to is not None:
            progress.stream.undo_to = undo_to
        if progress.state in (ReadingState.OPEN, ReadingState.REQUESTED, ReadingState.DONE):
            progress.leave(self._now())
            progress.make_ready()
        # it may go on elsewhere by now, behind what is forgotten here
        progress.abandon([link for _, link in self._nodes.links()], self._now())
