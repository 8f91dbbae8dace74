"""When a durable write is true: how far the copies of each vbucket are.

A write with a durability is answered at a moment when it is on the active's own disk and a majority of the
copies that the cluster map names, the active among them, have it too: in memory, or (persist to majority) on
disk. Replicas say how far they are; what they say is forgotten when their connection ends or the vbucket
changes.

Without a map the node is alone, and its own disk is the majority.

Rules: docs/spec/servers.md#durable-writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from ..wire.codes import DurabilityLevel
from .topology import ServedMap

__all__ = ["CopyTracker"]

Done = Callable[[bool], None]


@dataclass(slots=True)
class _Reached:
    """How far a copy is."""

    in_memory: int = 0
    on_disk: int = 0


@dataclass(slots=True)
class _Waiter:
    seqno: int
    needs_disk: bool
    done: Done
    is_over: Callable[[], bool]


class CopyTracker:
    """The copies of one bucket's vbuckets, and who waits for them."""

    def __init__(self) -> None:
        self.own_name = ""
        """What the map calls this node."""
        self._chains: list[list[str | None]] = []
        self._persisted: dict[int, int] = {}
        """How far a durable write is known to be on our own disk, by vbucket."""
        self._reached: dict[int, dict[str, _Reached]] = {}
        self._waiters: dict[int, list[_Waiter]] = {}

    def set_map(self, new: ServedMap) -> None:
        """Another map: other copies may count, or too few are left for what is under way ever to be true.
        Whoever waits for that is told, and can decide what to do.
        """
        self._chains, self.own_name = _chains(new)
        for vbucket in list(self._waiters):
            self._look(vbucket)
            if not self.is_possible(vbucket):
                for waiter in self._waiters.pop(vbucket, []):
                    waiter.done(False)

    def _chain(self, vbucket: int) -> list[str | None]:
        return self._chains[vbucket] if vbucket < len(self._chains) else [self.own_name]

    def is_possible(self, vbucket: int) -> bool:
        """Whether the map names enough copies."""
        chain = self._chain(vbucket)
        return sum(name is not None for name in chain) >= _majority(chain)

    # what the copies say

    def persisted(self, vbucket: int, seqno: int) -> None:
        """Our own disk has everything up to a seqno."""
        self._persisted[vbucket] = max(self._persisted.get(vbucket, 0), seqno)
        if vbucket in self._waiters:
            self._look(vbucket)

    def reached(self, vbucket: int, name: str, seqno: int, *, on_disk: bool) -> None:
        """A copy has everything up to a seqno."""
        reached = self._reached.setdefault(vbucket, {}).setdefault(name, _Reached())
        reached.in_memory = max(reached.in_memory, seqno)
        if on_disk:
            reached.on_disk = max(reached.on_disk, seqno)
        if vbucket in self._waiters:
            self._look(vbucket)

    def gone(self, name: str) -> None:
        """A replica's connection ended: it may come back with less."""
        for copies in self._reached.values():
            copies.pop(name, None)

    def vbucket_changed(self, vbucket: int) -> None:
        """Its state or history is another one: nothing that was said before counts."""
        self._persisted.pop(vbucket, None)
        self._reached.pop(vbucket, None)
        for waiter in self._waiters.pop(vbucket, []):
            waiter.done(False)

    # who waits

    def wait(
        self, vbucket: int, seqno: int, level: DurabilityLevel, done: Done, is_over: Callable[[], bool]
    ) -> None:
        """Call back when enough copies, the active among them, have a seqno; with False if that can't be
        any more. ``is_over`` says that nobody waits any longer.
        """
        waiter = _Waiter(seqno, level == DurabilityLevel.PERSIST_TO_MAJORITY, done, is_over)
        if self._is_true(vbucket, waiter):
            done(True)
            return
        waiting = [other for other in self._waiters.get(vbucket, []) if not other.is_over()]
        self._waiters[vbucket] = [*waiting, waiter]

    def _look(self, vbucket: int) -> None:
        waiting = self._waiters.pop(vbucket, [])
        true = [waiter for waiter in waiting if self._is_true(vbucket, waiter)]
        if left := [waiter for waiter in waiting if waiter not in true]:
            self._waiters[vbucket] = left
        for waiter in true:
            waiter.done(True)

    def _is_true(self, vbucket: int, waiter: _Waiter) -> bool:
        if self._persisted.get(vbucket, 0) < waiter.seqno:
            return False
        chain = self._chain(vbucket)
        copies = self._reached.get(vbucket, {})
        others = chain[1:]
        count = 1  # our own
        if self.own_name and self.own_name not in chain:
            others, count = chain, 0  # the vbucket goes to others, and we don't know it yet
        for name in others:
            reached = copies.get(name) if name is not None else None
            if reached is not None:
                count += (reached.on_disk if waiter.needs_disk else reached.in_memory) >= waiter.seqno
        return count >= _majority(chain)


def _majority(chain: list[str | None]) -> int:
    return len(chain) // 2 + 1


def _chains(new: ServedMap) -> tuple[list[list[str | None]], str]:
    """By vbucket the names of its copies, None for one that is missing; and our own name."""
    content = json.loads(new.text)
    servers = content.get("vBucketServerMap")
    if not isinstance(servers, dict):
        return [], ""
    names = [str(name) for name in servers.get("serverList", [])]
    rows = servers.get("vBucketMap", [])
    chains = [
        [names[at] if type(at) is int and 0 <= at < len(names) else None for at in row]
        for row in rows
        if isinstance(row, list)
    ]
    extended = content.get("nodesExt", [])
    own = next(
        (at for at, node in enumerate(extended) if isinstance(node, dict) and node.get("thisNode")),
        len(names),
    )
    return chains, names[own] if own < len(names) else ""
