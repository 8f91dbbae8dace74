"""VBuckets whose changes some copy does not get to disk soon: they are read again when the disks catch up.

What came of such a vbucket is forgotten and its stream closed, so the others go on and nothing piles up: a
copy that is down may stay down for days. The copies are asked what they have on disk; once they have what was
seen of the vbucket, its stream is requested again from where the application is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..connstr import Address
from ..protocol.states import ReadingState
from .disk_watch import DiskWatch
from .nodes import Nodes
from .progress import Progress

__all__ = ["GRACE_S", "SetAside"]

GRACE_S = 1.0
"""How long everything waits for a disk, which takes a moment; after that, only what depends on it waits."""
_ASK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Spell:
    """One vbucket that is set aside."""

    since: float
    wanted: int
    """The seqno that the disks must have."""
    late: frozenset[Address]
    """The copies that did not have it when it was set aside."""


class SetAside:
    """The vbuckets of a reading that wait for disks, without a stream, and the nodes that keep them so."""

    def __init__(
        self, disks: DiskWatch, nodes: Nodes, progress: Mapping[int, Progress], now: Callable[[], float]
    ) -> None:
        self._disks = disks
        self._nodes = nodes
        self._progress = progress
        self._now = now
        self._spells: dict[int, _Spell] = {}
        self._slow: set[Address] = set()
        """Nodes whose disks took longer than `GRACE_S`; their next changes get no grace."""
        self._ask_at = 0.0

    def __contains__(self, vbucket: int) -> bool:
        return vbucket in self._spells

    def __bool__(self) -> bool:
        return bool(self._spells)

    @property
    def since(self) -> float | None:
        """Since when the first one waits."""
        return min((spell.since for spell in self._spells.values()), default=None)

    def is_due(self, vbucket: int, wanted: int, held_since: float) -> bool:
        """Whether a vbucket that is late should make room for the others."""
        return self._now() - held_since >= GRACE_S or any(
            node.address in self._slow or node.troubled_since is not None
            for node in self._disks.late_copies(vbucket, wanted)
        )

    def add(self, vbucket: int, wanted: int, held_since: float) -> None:
        """Stop reading a vbucket until the disks have this seqno; the others no longer wait for that."""
        late = self._disks.late_copies(vbucket, wanted)
        if self._now() - held_since >= GRACE_S:
            self._slow.update(node.address for node in late if node.troubled_since is None)
        self._spells[vbucket] = _Spell(self._now(), wanted, frozenset(node.address for node in late))

    def next_timer(self) -> float | None:
        """When `turn` is due."""
        return self._ask_at if self._spells else None

    def turn(self) -> None:
        """Ask about the disks, a few times a second; a vbucket that is on all of them is read again."""
        if self._now() < self._ask_at:
            return
        self._ask_at = self._now() + _ASK_S
        for vbucket, spell in list(self._spells.items()):
            if self._progress[vbucket].state is ReadingState.PAUSED:
                del self._spells[vbucket]
            elif self._disks.is_late(vbucket, spell.wanted):
                self._disks.ask(vbucket, spell.wanted)
            else:
                if self._now() - spell.since < GRACE_S:
                    self._slow -= spell.late
                self.release(vbucket)

    def release(self, vbucket: int) -> None:
        """Read a vbucket again."""
        if self._spells.pop(vbucket, None) is not None:
            self._nodes.on_change()

    def clear(self) -> None:
        """The reading is over."""
        self._spells.clear()

    def reasons(self) -> dict[int, str]:
        """By vbucket: what it waits for."""
        why = {
            vbucket: self._disks.why_late(vbucket, spell.wanted) for vbucket, spell in self._spells.items()
        }
        return {vbucket: reason for vbucket, reason in why.items() if reason}
