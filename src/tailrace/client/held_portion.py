"""Rollback mitigation: a portion waits until the server has its changes on disk.

No failover can take those back any more. While a portion waits, nothing else is delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..protocol.dcp.reader import DcpReader
from ..protocol.states import ReadingState
from .nodes import Nodes
from .portion import Portion
from .progress import Progress
from .questions import persisted_seqno

__all__ = ["HeldPortion"]

_OBSERVE_S = 0.2


class HeldPortion:
    """At most one portion that was received and can't be delivered yet; ``now`` is the policy's time."""

    def __init__(self, nodes: Nodes, progress: Mapping[int, Progress], now: Callable[[], float]) -> None:
        self._nodes = nodes
        self._progress = progress
        self._portion: Portion | None = None
        self._observe_at: float | None = None
        self._now = now

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

    def take(self) -> Portion | None:
        """The held portion, if all of it is on disk; otherwise the server is asked."""
        portion = self._portion
        assert portion is not None
        if all(self._progress[vb].observed_seqno >= position.seqno for vb, position in portion.ends.items()):
            self._portion = self._observe_at = None
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

    def next_timer(self) -> float | None:
        """When the server is asked again."""
        return self._observe_at

    def turn(self) -> None:
        """Ask how far the vbuckets of the held portion are persisted, a few times a second."""
        if self._portion is None or self._observe_at is None or self._now() < self._observe_at:
            return
        self._observe_at = self._now() + _OBSERVE_S
        for vbucket, position in list(self._portion.ends.items()):
            progress, node = self._progress[vbucket], self._nodes.node_of(vbucket)
            if (
                progress.observed_seqno < position.seqno
                and node is not None
                and node.is_ready
                and progress.stream.log
            ):
                assert node.link is not None
                vb_uuid = progress.stream.log.newest.vb_uuid
                node.link.ask(
                    persisted_seqno(vbucket, vb_uuid), self._observer(progress, vb_uuid), self._now()
                )

    def _observer(self, progress: Progress, vb_uuid: int) -> Callable[[int | None], None]:
        def observed(persisted: int | None) -> None:
            if progress.stream.log is None or progress.stream.log.newest.vb_uuid != vb_uuid:
                return
            if persisted is None:
                self._take_back(progress)
            else:
                progress.observed_seqno = max(progress.observed_seqno, persisted)
            self._nodes.on_change()

        return observed

    def _take_back(self, progress: Progress) -> None:
        """The branch of a held portion is history: forget what came on it, and ask again."""
        if self._portion is not None and progress.vbucket in self._portion.ends:
            self._undo(progress, self._portion)
            progress.abandon([link for _, link in self._nodes.links()], self._now())

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
