"""No-ops and dead peers (docs/spec/dcp.md#silence).

A producer of DCP sends a no-op every interval from the opening on, whatever else it sends, as servers do: a
reader that only reads would otherwise never say anything, and could not be told from a dead one. Only one is
unanswered at a time. In the older dialects the receiver asks for a sign of life instead.

Either side gives up on its peer when nothing at all has come from it for two intervals, or for the idle
timeout if that is longer (docs/spec/dcp.md#silence-rule).
"""

from __future__ import annotations

__all__ = [
    "DEFAULT_INTERVAL_S",
    "FIRST_NOOP_OPAQUE",
    "MAX_INTERVAL_S",
    "MIN_INTERVAL_S",
    "ProducerLiveness",
    "Silence",
    "silence_limit_s",
]

DEFAULT_INTERVAL_S = 20.0
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 10_800.0
FIRST_NOOP_OPAQUE = 10_000_001
"""Servers number their no-ops from here, so they can't be taken for a stream's messages."""


def silence_limit_s(interval_s: float, idle_timeout_s: float = 0.0) -> float:
    """How long a peer that sends or answers a no-op every interval may be silent."""
    return max(2 * interval_s, idle_timeout_s)


class Silence:
    """How long nothing has come from the peer. Each call gives its limit; None means no limit."""

    __slots__ = ("is_asking", "last_heard")

    def __init__(self, now: float) -> None:
        self.last_heard = now
        self.is_asking = False
        """The peer was asked for a sign of life, and has not answered."""

    def heard(self, now: float) -> None:
        """Something came."""
        self.last_heard = now

    def answered(self) -> None:
        """The sign of life that was asked for came."""
        self.is_asking = False

    def seconds(self, now: float) -> float:
        """How long the peer has been silent."""
        return now - self.last_heard

    def is_too_long(self, now: float, limit_s: float | None) -> bool:
        """Whether the peer is dead."""
        return limit_s is not None and now >= self.last_heard + limit_s

    def must_ask(self, now: float, interval_s: float) -> bool:
        """Whether to ask for a sign of life now; it counts as asked."""
        if self.is_asking or now < self.last_heard + interval_s:
            return False
        self.is_asking = True
        return True

    def next_timer(self, limit_s: float | None, interval_s: float | None = None) -> float | None:
        """When to call `is_too_long` again, or with an interval `must_ask`."""
        if interval_s is not None and not self.is_asking:
            return self.last_heard + interval_s
        return None if limit_s is None else self.last_heard + limit_s


class ProducerLiveness:
    """When to send a no-op, and when the peer is dead; neither before `enable`."""

    __slots__ = (
        "_idle_timeout_s",
        "_last_noop",
        "_next_opaque",
        "_silence",
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
        self._silence = Silence(now)
        self._next_opaque = FIRST_NOOP_OPAQUE

    def enable(self, *, on: bool, now: float) -> None:
        """Start or stop; the first no-op comes an interval after the start."""
        if on and not self.enabled:
            self._last_noop = now
        self.enabled = on

    def received(self, now: float) -> None:
        """Something came from the peer."""
        self._silence.heard(now)

    def answered(self, opaque: int) -> bool:
        """A no-op was answered; False if it is not the one that is waited for."""
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
        """Whether nothing has come for too long."""
        return self._silence.is_too_long(now, self._limit_s())

    def next_timer(self) -> float | None:
        """When to check again."""
        if not self.enabled:
            return None
        noop = None if self.unanswered is not None else self._last_noop + self.interval_s
        timers = (self._silence.next_timer(self._limit_s()), noop)
        return min((timer for timer in timers if timer is not None), default=None)

    def _limit_s(self) -> float | None:
        if not self.enabled or not self._idle_timeout_s:
            return None
        return silence_limit_s(self.interval_s, self._idle_timeout_s)
