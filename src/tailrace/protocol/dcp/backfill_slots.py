"""Limits how many backfills a connection runs at once, and finds those that nobody reads.

A backfill in progress holds on to files of the store and to a chunk that was read and not yet sent. So a
connection has a number of slots; streams that find none free wait in line. A slot whose stream sends nothing
for too long, because its reader does not read, is taken away when the disk is short of space: files that the
store has replaced can't be removed while a backfill reads them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Protocol

__all__ = ["BackfillSlots", "Backfiller"]


_LOOK_INTERVAL_S = 1.0
"""How often new backfills are checked: small ones begin and end by the thousand."""


class Backfiller(Protocol):
    """What the slots need of a stream."""

    @property
    def sent_bytes(self) -> int:
        """How much has been sent so far."""
        ...

    def set_ready(self) -> None:
        """There is something to do again: it has a slot now."""
        ...


class BackfillSlots:
    """The backfills of one connection."""

    __slots__ = ("_held", "_last_look", "_looked_at", "_waiting", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: dict[Backfiller, tuple[int, float] | None] = {}  # bytes sent, and when they were checked
        self._waiting: OrderedDict[Backfiller, None] = OrderedDict()
        self._looked_at: float | None = None  # when the oldest figure was taken; None: one is missing
        self._last_look = -math.inf

    def __len__(self) -> int:
        return len(self._held)

    def take(self, stream: Backfiller) -> bool:
        """Whether a stream has a slot now; if not, it is made ready when it gets the next free one."""
        if stream in self._held:
            return True
        if len(self._held) < self.limit:
            self._held[stream] = self._looked_at = None
            return True
        self._waiting.setdefault(stream)
        return False

    def release(self, stream: Backfiller) -> None:
        """A stream needs no slot, or no longer needs one."""
        if stream in self._held:
            del self._held[stream]
        else:
            self._waiting.pop(stream, None)
        while self._waiting and len(self._held) < self.limit:
            first, _ = self._waiting.popitem(last=False)
            self._held[first] = self._looked_at = None
            first.set_ready()

    def stalled(self, now: float, timeout_s: float) -> list[Backfiller]:
        """The streams whose backfill has sent nothing for this long; each is named once per timeout."""
        self._last_look = now
        idle = []
        for stream, seen in self._held.items():
            if seen is None or seen[0] != stream.sent_bytes:
                self._held[stream] = stream.sent_bytes, now
            elif now >= seen[1] + timeout_s:
                self._held[stream] = stream.sent_bytes, now
                idle.append(stream)
        self._looked_at = min((seen[1] for seen in self._held.values() if seen), default=now)
        return idle

    def next_timer(self, now: float, timeout_s: float) -> float | None:
        """When to call `stalled` again."""
        if not self._held:
            return None
        if self._looked_at is None:
            return max(now, self._last_look + _LOOK_INTERVAL_S)
        return self._looked_at + timeout_s
