"""What happens on a node that its operator wants to know about: in the log, the metrics and the page."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Any

from ..clock import Clock
from ..logs import event_text, log_event

__all__ = ["EventLog"]

_KEPT = 200


class EventLog:
    """Counts events by kind, keeps the newest, and writes each to the log."""

    def __init__(self, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        self.recent: deque[dict[str, Any]] = deque()
        self._clock = clock
        self._log = logging.getLogger("tailrace.server")

    def record(self, event: str, *, level: int = logging.WARNING, **facts: Any) -> None:
        """Record an event; facts are names and figures, never the contents of documents."""
        self.counts[event] += 1
        if len(self.recent) >= _KEPT:
            self._forget_one()
        self.recent.append(
            {
                "time": self._clock.time_ns() / 1e9,
                "event": event,
                "level": logging.getLevelName(level).lower(),
                "text": event_text(event, facts),
                **{
                    name: value if isinstance(value, int | float) else str(value)
                    for name, value in facts.items()
                },
            }
        )
        log_event(self._log, level, event, **facts)

    def _forget_one(self) -> None:
        """Drop the oldest of the most frequent kind: refused logins, of which anyone can cause any number,
        push out nothing but each other.
        """
        ((most, _),) = Counter(kept["event"] for kept in self.recent).most_common(1)
        del self.recent[next(at for at, kept in enumerate(self.recent) if kept["event"] == most)]
