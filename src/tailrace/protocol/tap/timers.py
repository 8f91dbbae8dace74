"""What a TAP producer does because time passes: no-ops, dropping a backfill, saving a reader's place.

Rules: docs/spec/tap.md#noop, docs/spec/tap.md#registered-client.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TapTimers"]

SAVE_INTERVAL_S = 10.0
"""How often the place of a registered reader is saved; after a crash it gets again what came after that."""


class TapTimers:
    """When one producer last sent, made progress and saved."""

    __slots__ = ("_progress_at", "_saved_at", "_sent_at", "_settings")

    def __init__(self, settings: Any, now: float) -> None:
        self._settings = settings
        self._sent_at = self._progress_at = self._saved_at = now

    def sent(self, now: float) -> None:
        """Something of the stream was sent."""
        self._sent_at = self._progress_at = now

    def noop_due(self, now: float) -> bool:
        """Whether it is time for a no-op, which then counts as sent."""
        if now < self._sent_at + self._settings.tap_noop_interval:
            return False
        self._sent_at = now
        return True

    def backfill_stalled(self, now: float) -> bool:
        """Whether nothing was read for so long that an open snapshot should be dropped."""
        timeout_s = self._settings.slow_backfill_timeout
        if not timeout_s or now < self._progress_at + timeout_s:
            return False
        self._progress_at = now
        return True

    def save_due(self, now: float) -> bool:
        """Whether it is time to save a registered reader's place, which then counts as saved."""
        if now < self._saved_at + SAVE_INTERVAL_S:
            return False
        self._saved_at = now
        return True

    def next(self, *, in_backfill: bool, registered: bool) -> list[float]:
        """When the next of them may be due."""
        timers = [self._sent_at + self._settings.tap_noop_interval]
        if in_backfill and self._settings.slow_backfill_timeout:
            timers.append(self._progress_at + self._settings.slow_backfill_timeout)
        if registered:
            timers.append(self._saved_at + SAVE_INTERVAL_S)
        return timers
