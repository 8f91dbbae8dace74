"""The only source of time.

Sans-IO cores take ``now`` as an argument; everything else that needs the time takes a `Clock`, so that tests
and simulations can set it.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["SYSTEM", "Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Where a component asks for the time."""

    def time_ns(self) -> int:
        """Wall clock, nanoseconds since the epoch; may jump either way."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever increase, for intervals and timeouts."""
        ...


class SystemClock:
    """The machine's clock."""

    time_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)


class ManualClock:
    """A clock that stands still until it is moved; wall and monotonic time move apart only by `jump`."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._wall_ns = int(start_s * 1e9)
        self._monotonic = 1_000.0

    def time_ns(self) -> int:
        return self._wall_ns

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError("time only moves forward; use jump() to set the wall clock back")
        self._wall_ns += int(seconds * 1e9)
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forwards or back; intervals are not affected."""
        self._wall_ns += int(seconds * 1e9)


SYSTEM: Clock = SystemClock()
