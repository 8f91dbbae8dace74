"""What the copies of vbuckets have answered about their disks: up to which seqno their changes are there.

The copies are the active and all replicas that the cluster map names. One that was asked and has not answered
is not asked again over the same connection, or questions to a node that hangs would pile up.

Rules: docs/spec/servers.md#persistence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..connstr import Address
from ..protocol.dcp.reader import DcpReader
from .copy_survey import in_words
from .nodes import KnownNode, Nodes
from .progress import Progress
from .question_scripts import persisted_seqno

__all__ = ["DiskWatch"]


class DiskWatch:
    """What is known of the disks of a reading's vbuckets; ``now`` is the policy's time."""

    def __init__(
        self,
        nodes: Nodes,
        progress: Mapping[int, Progress],
        now: Callable[[], float],
        *,
        patience_s: float | None = None,
        on_left: Callable[[Progress], None],
    ) -> None:
        """``on_left`` is called for a vbucket whose active has left the branch that was asked about."""
        self._nodes = nodes
        self._progress = progress
        self._now = now
        self._patience_s = patience_s
        """How long to wait for a replica that can't be reached; None: until it is back or the map changes."""
        self._on_left = on_left
        self._persisted: dict[tuple[int, int, Address], int] = {}
        """By vbucket, branch and node."""
        self._asked: dict[tuple[int, int, Address], DcpReader] = {}
        """The connection that still owes an answer."""
        self._map_version: tuple[int, int] | None = None

    def late_copies(self, vbucket: int, wanted: int) -> list[KnownNode]:
        """The nodes that have not persisted a vbucket up to a seqno, as far as we know."""
        return [node for node in self._counting(vbucket) if self._seqno(vbucket, node) < wanted]

    def is_late(self, vbucket: int, wanted: int) -> bool:
        """Whether a vbucket is not on all disks up to a seqno; always so if no node has it."""
        return self._nodes.node_of(vbucket) is None or bool(self.late_copies(vbucket, wanted))

    def seqno_everywhere(self, vbucket: int) -> int:
        """The seqno that every copy has on disk, as far as we know; -1 if one has not answered."""
        return min((self._seqno(vbucket, node) for node in self._counting(vbucket)), default=-1)

    def ask(self, vbucket: int, wanted: int) -> None:
        """Ask the late copies of a vbucket that can be asked."""
        progress, active = self._progress[vbucket], self._nodes.node_of(vbucket)
        if active is None:
            self._nodes.ask_for_map(self._now())
            return
        vb_uuid = _branch(progress)
        for node in self.late_copies(vbucket, wanted):
            key = vbucket, vb_uuid, node.address
            if not node.is_ready or not vb_uuid or self._asked.get(key) is node.link:
                continue
            assert node.link is not None
            self._asked[key] = node.link
            observer = self._observer(progress, vb_uuid, node.address, is_active=node is active)
            node.link.ask(persisted_seqno(vbucket, vb_uuid), observer, self._now())

    def why_late(self, vbucket: int, wanted: int) -> str:
        """Which nodes a vbucket waits for, in words; empty if it does not wait."""
        active = self._nodes.node_of(vbucket)
        if active is None:
            return "no node has it"
        late = self.late_copies(vbucket, wanted)
        return ", ".join(in_words(node, self._now(), is_active=node is active) for node in late)

    def forget(self) -> None:
        """Forget all answers: the copies that gave them may have been replaced."""
        self._persisted.clear()
        self._asked.clear()

    def _counting(self, vbucket: int) -> list[KnownNode]:
        """The copies that must have everything."""
        assert self._nodes.map is not None
        if self._nodes.map.version != self._map_version:
            # there may be another copy behind the same address now
            self._map_version = self._nodes.map.version
            self.forget()
        active = self._nodes.node_of(vbucket)
        return [
            node
            for node in self._nodes.copies_of(vbucket)
            if node is active or not node.is_given_up(self._patience_s, self._now())
        ]

    def _seqno(self, vbucket: int, node: KnownNode) -> int:
        return self._persisted.get((vbucket, _branch(self._progress[vbucket]), node.address), -1)

    def _observer(
        self, progress: Progress, vb_uuid: int, address: Address, *, is_active: bool
    ) -> Callable[[int | None], None]:
        key = progress.vbucket, vb_uuid, address
        map_version = self._map_version

        def observed(persisted: int | None) -> None:
            self._asked.pop(key, None)
            if _branch(progress) != vb_uuid or map_version != self._map_version:
                return
            if persisted is not None:
                self._persisted[key] = persisted
            elif is_active:
                self.forget()
                self._on_left(progress)
            # a replica may not know the branch yet; if the branch is gone, the active will say so
            self._nodes.on_change()

        return observed


def _branch(progress: Progress) -> int:
    """The newest branch of a vbucket that we know of; 0 if none."""
    return progress.stream.log.newest.vb_uuid if progress.stream.log else 0
