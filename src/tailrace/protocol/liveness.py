"""No-ops and dead peers, the producer's half (docs/spec/dcp.md#silence).

A no-op goes out every interval from the opening on, whatever else is sent, as the servers do it: a consumer
that only reads would otherwise never say anything, and could not be told from a dead one. Only one is
unanswered at a time. The peer is given up when nothing at all came from it for the idle timeout, and never
before two intervals.
"""

from __future__ import annotations

__all__ = ["DEFAULT_INTERVAL_S", "FIRST_NOOP_OPAQUE", "MAX_INTERVAL_S", "MIN_INTERVAL_S", "ProducerLiveness"]

DEFAULT_INTERVAL_S = 20.0
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 10_800.0
FIRST_NOOP_OPAQUE = 10_000_001
"""Servers number their no-ops from here, so that they can't be taken for a stream's."""


class ProducerLiveness:
    """When to send a no-op, and when the peer is dead; nothing of both before `enable`."""

    __slots__ = (
        "_idle_timeout_s",
        "_last_noop",
        "_last_received",
        "_next_opaque",
        "enabled",
        "interval_s",
        "unanswered",
    )

    def __init__(self, idle_timeout_s: float, now: float) -> None:
        self.enabled = False
        self.interval_s = DEFAULT_INTERVAL_S
        self.unanswered: int | None = None
        self._idle_timeout_s = idle_timeout_s
        self._last_noop = now
        self._last_received = now
        self._next_opaque = FIRST_NOOP_OPAQUE

    def enable(self, *, on: bool, now: float) -> None:
        """Start or stop; the first no-op comes an interval after the start."""
        if on and not self.enabled:
            self._last_noop = now
        self.enabled = on

    def received(self, now: float) -> None:
        """Something came from the peer."""
        self._last_received = now

    def answered(self, opaque: int) -> bool:
        """A no-op was answered; False if it is not the one that waits."""
        if opaque != self.unanswered:
            return False
        self.unanswered = None
        return True

    def noop_due(self, now: float) -> int | None:
        """The opaque of the no-op to send now, if one is due; it counts as sent."""
        if not self.enabled or self.unanswered is not None or now < self._last_noop + self.interval_s:
            return None
        self.unanswered = self._next_opaque
        self._next_opaque += 1
        self._last_noop = now
        return self.unanswered

    def is_dead(self, now: float) -> bool:
        """Nothing came for too long."""
        deadline = self._deadline()
        return deadline is not None and now >= deadline

    def next_timer(self) -> float | None:
        """When to ask again."""
        if not self.enabled:
            return None
        deadline = self._deadline()
        noop = None if self.unanswered is not None else self._last_noop + self.interval_s
        return min((one for one in (deadline, noop) if one is not None), default=None)

    def _deadline(self) -> float | None:
        if not self.enabled or not self._idle_timeout_s:
            return None
        return self._last_received + max(self._idle_timeout_s, 2 * self.interval_s)
