"""How long to wait before another attempt."""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    """Waits that double, each cut by up to a half at random so that many clients don't come back together."""

    def __init__(self, rng: random.Random, *, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self.attempts = 0

    def next_s(self) -> float:
        """The next wait; the first attempt after a success waits for next to nothing."""
        delay_s = min(self._first_s * 2.0 ** min(self.attempts, 30), self._most_s)
        self.attempts += 1
        return delay_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked."""
        self.attempts = 0
