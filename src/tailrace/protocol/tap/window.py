"""Whether the reader of a TAP stream takes more now.

Three things hold a producer up: too many unanswered messages, a reader that asks for a pause, and a control
message that nothing may overtake before it has arrived.

Rules: docs/spec/tap.md#acknowledgements, docs/spec/tap.md#order-of-messages.
"""

from __future__ import annotations

from typing import Any

from .acks import AckLog

__all__ = ["TapWindow"]


class TapWindow:
    """The ack window of one connection, in messages."""

    __slots__ = ("_acks", "_gate", "_settings", "full_since", "suspended_until")

    def __init__(self, acks: AckLog, settings: Any) -> None:
        self.full_since: float | None = None
        self.suspended_until: float | None = None
        self._acks = acks
        self._settings = settings
        self._gate = 0  # the number of the message that must arrive before the next one goes

    @property
    def room(self) -> int:
        """How many more messages may be sent, if they are acknowledged."""
        return int(self._settings.tap_ack_interval * self._settings.tap_ack_window) - self._acks.unacked

    @property
    def is_open(self) -> bool:
        """Whether the reader takes more."""
        return self.suspended_until is None and (not self._acks.enabled or self.room > 0)

    @property
    def held_up(self) -> str:
        """Why it is closed; empty if it is open."""
        if self.is_open:
            return ""
        return "too many messages are unanswered" if self.suspended_until is None else "it asked for a pause"

    @property
    def is_gated(self) -> bool:
        """Whether a control message has to arrive first."""
        return self._acks.enabled and self._acks.acked < self._gate

    def gate(self, number: int) -> None:
        """Let nothing overtake this message; 0: there is no such message."""
        self._gate = number

    def found_closed(self, now: float) -> None:
        """There was something to send and no room: the reader's time to answer runs from now on."""
        if self._acks.enabled and self.full_since is None and self.room <= 0:
            self.full_since = now

    def suspend(self, now: float) -> None:
        """The reader asks for a pause."""
        self.suspended_until = now + self._settings.tap_backoff

    def has_resumed(self, now: float) -> bool:
        """Whether a pause is over now."""
        if self.suspended_until is None or now < self.suspended_until:
            return False
        self.suspended_until = None
        return True

    def is_stalled(self, now: float) -> bool:
        """Whether it is full and nothing was acknowledged for too long."""
        return self.full_since is not None and now >= self.full_since + self._settings.tap_ack_grace

    def timers(self) -> list[float]:
        """When to check again."""
        timers = [] if self.suspended_until is None else [self.suspended_until]
        if self.full_since is not None:
            timers.append(self.full_since + self._settings.tap_ack_grace)
        return timers
