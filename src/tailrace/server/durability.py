"""When a durable write takes effect: it is prepared, then decided by how far the copies of its vbucket are.

A write with a durability is prepared in the active. It is committed, and answered, when its prepare is on the
active's own disk and a majority of the copies that the cluster map names, the active among them, have it as
safe as its level requires: in memory, or (persist to majority) on disk. Replicas report up to which prepare
that is so; a report is forgotten when its connection ends or the vbucket changes. A prepare is aborted when
its time is up, or when the map leaves too few copies.

A node that becomes the active, or restarts as one, commits what is prepared and never aborts it: the previous
active may have committed it.

Without a map the node is alone, and its own disk is the majority.

Rules: docs/spec/servers.md#durable-writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..store.base import Bucket, VBucket, Written
from ..wire.codes import VBucketState
from .background import BackgroundWork
from .served_map import ServedMap

__all__ = ["CopyTracker", "DurableWrites"]

WhenDecided = Callable[[Written | None], None]


class CopyTracker:
    """How far the copies of one bucket's vbuckets are."""

    def __init__(self) -> None:
        self.own_name = ""
        """What the map calls this node."""
        self._chains: list[list[str | None]] = []
        self._persisted: dict[int, int] = {}
        """How far prepares are known to be on our own disk, by vbucket."""
        self._reached: dict[int, dict[str, int]] = {}

    def set_map(self, new: ServedMap) -> None:
        """Take over a map: other copies count."""
        self._chains, self.own_name = _chains(new)

    def _chain(self, vbucket: int) -> list[str | None]:
        return self._chains[vbucket] if vbucket < len(self._chains) else [self.own_name]

    def is_possible(self, vbucket: int) -> bool:
        """Whether the map names enough copies."""
        chain = self._chain(vbucket)
        return sum(name is not None for name in chain) >= _majority(chain)

    def persisted(self, vbucket: int, seqno: int) -> None:
        """Note that our own disk has everything up to a seqno."""
        self._persisted[vbucket] = max(self._persisted.get(vbucket, 0), seqno)

    def reached(self, vbucket: int, name: str, seqno: int) -> None:
        """Note that a copy has every prepare up to a seqno as safe as its level requires."""
        copies = self._reached.setdefault(vbucket, {})
        copies[name] = max(copies.get(name, 0), seqno)

    def gone(self, name: str) -> None:
        """A replica's connection ended: it may come back with less."""
        for copies in self._reached.values():
            copies.pop(name, None)

    def forget(self, vbucket: int) -> None:
        """Forget all reports about a vbucket."""
        self._persisted.pop(vbucket, None)
        self._reached.pop(vbucket, None)

    def has_majority(self, vbucket: int, seqno: int) -> bool:
        """Whether a prepare is on our own disk, and a majority of the copies have it as safe as required."""
        if self._persisted.get(vbucket, 0) < seqno:
            return False
        chain = self._chain(vbucket)
        copies = self._reached.get(vbucket, {})
        others = chain[1:]
        count = 1  # our own
        if self.own_name and self.own_name not in chain:
            others, count = chain, 0  # the vbucket is moving to others, and is still active here
        count += sum(name is not None and copies.get(name, 0) >= seqno for name in others)
        return count >= _majority(chain)


@dataclass(slots=True)
class _Undecided:
    """A prepare of an active vbucket."""

    vbucket: VBucket
    deadline: float | None
    """When it is aborted; None: never, because it may have been committed before."""
    done: WhenDecided
    """Gets what the commit made, or None if it was not committed, or nobody knows."""


class DurableWrites:
    """The undecided prepares of one bucket's active vbuckets, and their decisions."""

    def __init__(self, store: Bucket, work: BackgroundWork) -> None:
        self.copies = CopyTracker()
        self._store = store
        self._work = work
        self._undecided: dict[int, dict[int, _Undecided]] = {}  # by vbucket and seqno, ascending
        self._is_fenced = False

    def begin(self, *, fenced: bool) -> None:
        """Take over the prepares that are left from the node's last run. A fenced node decides nothing before
        it has a map: others may have decided.
        """
        self._is_fenced = fenced
        for vbucket in self._store:
            self._adopt(vbucket.id)

    def prepared(self, vbucket: VBucket, seqno: int, deadline: float, done: WhenDecided) -> None:
        """Track a prepare for which a client waits until a deadline."""
        self._track(vbucket, seqno, _Undecided(vbucket, deadline, done))

    def _adopt(self, number: int) -> None:
        """Finish what is prepared in a vbucket that is active now."""
        vbucket = self._store.vbuckets[number] if number < len(self._store.vbuckets) else None
        if vbucket is not None and vbucket.state == VBucketState.ACTIVE:
            for prepare in vbucket.undecided:
                self._track(vbucket, prepare.seqno, _Undecided(vbucket, None, lambda _: None))

    def _track(self, vbucket: VBucket, seqno: int, undecided: _Undecided) -> None:
        self._undecided.setdefault(vbucket.id, {})[seqno] = undecided
        persisted = partial(self._persisted, vbucket, seqno)
        vbucket.when_persisted(seqno, persisted, lambda: self._find(vbucket.id, seqno) is not undecided)
        self._work.flush_wanted = True

    def _find(self, vbucket: int, seqno: int) -> _Undecided | None:
        return self._undecided.get(vbucket, {}).get(seqno)

    # what happens

    def _persisted(self, vbucket: VBucket, seqno: int, ok: bool) -> None:
        if ok:
            self.copies.persisted(vbucket.id, seqno)
            self._look(vbucket.id)
        elif (undecided := self._take(vbucket.id, seqno)) is not None:
            undecided.done(None)

    def reached(self, vbucket: int, name: str, seqno: int) -> None:
        """Note that a copy has every prepare up to a seqno as safe as its level requires."""
        self.copies.reached(vbucket, name, seqno)
        self._look(vbucket)

    def set_map(self, new: ServedMap) -> None:
        """Take over a map: other copies may count, or too few are left to commit what is under way."""
        self._is_fenced = False
        self.copies.set_map(new)
        for vbucket in list(self._undecided):
            self._look(vbucket)
            if not self.copies.is_possible(vbucket):
                self._abort(vbucket, lambda undecided: undecided.deadline is not None)

    def vbucket_changed(self, vbucket: int) -> None:
        """A vbucket's state or history changed: earlier reports no longer count, and nobody knows what
        becomes of its prepares.
        """
        self.copies.forget(vbucket)
        for undecided in self._undecided.pop(vbucket, {}).values():
            undecided.done(None)
        self._adopt(vbucket)

    def next_timer(self) -> float | None:
        """When `handle_timer` has something to do."""
        deadlines = (
            undecided.deadline for of_vbucket in self._undecided.values() for undecided in of_vbucket.values()
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Give up what has waited too long."""
        for vbucket in list(self._undecided):
            self._abort(vbucket, lambda each: each.deadline is not None and each.deadline <= now)

    # decisions

    def _take(self, vbucket: int, seqno: int) -> _Undecided | None:
        of_vbucket = self._undecided.get(vbucket, {})
        taken = of_vbucket.pop(seqno, None)
        if not of_vbucket:
            self._undecided.pop(vbucket, None)
        return taken

    def _look(self, vbucket: int) -> None:
        """Commit what has its majority now, in order."""
        for seqno in list(self._undecided.get(vbucket, ())):
            if self._is_fenced or not self.copies.has_majority(vbucket, seqno):
                return
            undecided = self._take(vbucket, seqno)
            if undecided is not None:
                undecided.done(undecided.vbucket.commit(seqno))

    def _abort(self, vbucket: int, due: Callable[[_Undecided], bool]) -> None:
        for seqno, undecided in list(self._undecided.get(vbucket, {}).items()):
            if due(undecided):
                self._take(vbucket, seqno)
                undecided.vbucket.abort(seqno)
                undecided.done(None)


def _majority(chain: list[str | None]) -> int:
    return len(chain) // 2 + 1


def _chains(new: ServedMap) -> tuple[list[list[str | None]], str]:
    """The names of each vbucket's copies, None for a missing one; and our own name."""
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
