"""Flow control: how many bytes may be on their way (docs/spec/dcp.md#flow-control), both halves.

The sender's rule looks at each message by itself: it may go if *less* than the window is outstanding,
whatever its own size. So one message may overshoot, and of many messages back to back exactly those that
*begin* below the window may go. That is one comparison per message, or one binary search for a whole chunk.

The receiver acknowledges what it has processed when that is a good share of the window, and from time to time
if it is less (docs/spec/dcp.md#flow-control-5).
"""

from __future__ import annotations

import sys

__all__ = ["ReceiveWindow", "SendWindow"]

ACK_SHARE = 0.2
"""The share of the window that the receiver processes before it acknowledges."""
ACK_INTERVAL_S = 5.0
"""How long it waits to acknowledge a smaller amount."""
_MOST_IN_ONE = 0xFFFF_FFFF


class SendWindow:
    """Bytes that were sent and not acknowledged, against a limit; without one (0) nothing is counted."""

    __slots__ = ("acknowledged_bytes", "outstanding", "size")

    def __init__(self) -> None:
        self.size = 0
        self.outstanding = 0
        self.acknowledged_bytes = 0

    @property
    def room(self) -> int:
        """Messages that begin before this many further bytes may be sent."""
        return self.size - self.outstanding if self.size else sys.maxsize

    def resize(self, size: int) -> None:
        """Set a new limit; 0 turns flow control off and forgets what was counted."""
        self.size = size
        if not size:
            self.outstanding = 0

    def sent(self, counted_bytes: int) -> None:
        """Messages went out."""
        if self.size:
            self.outstanding += counted_bytes

    def acknowledge(self, acked_bytes: int) -> None:
        """The receiver has processed this much; more than is outstanding counts as all of it."""
        self.acknowledged_bytes += acked_bytes
        self.outstanding = max(0, self.outstanding - acked_bytes)


class ReceiveWindow:
    """Bytes that were processed and not acknowledged, and when to acknowledge them."""

    __slots__ = ("_ack_at_bytes", "_looked_at", "acknowledged_bytes", "unacknowledged_bytes")

    def __init__(self, size_bytes: int, now: float, *, ack_at_bytes: int | None = None) -> None:
        """``ack_at_bytes``: an acknowledgement is due after this many, however large the window is."""
        share = size_bytes * ACK_SHARE
        self._ack_at_bytes = share if ack_at_bytes is None else min(share, ack_at_bytes)
        self._looked_at = now
        self.unacknowledged_bytes = 0
        self.acknowledged_bytes = 0

    def processed(self, counted_bytes: int) -> bool:
        """This many more bytes were processed; return whether to acknowledge now."""
        self.unacknowledged_bytes += counted_bytes
        return self.unacknowledged_bytes >= self._ack_at_bytes

    def is_late(self, now: float) -> bool:
        """Whether the interval is over and there is something to acknowledge."""
        return bool(self.unacknowledged_bytes) and now >= self._looked_at + ACK_INTERVAL_S

    def next_timer(self) -> float | None:
        """When to ask `is_late`."""
        return self._looked_at + ACK_INTERVAL_S if self.unacknowledged_bytes else None

    def postpone(self, now: float) -> None:
        """Wait another interval: nothing may be acknowledged now, as there is no room for more."""
        self._looked_at = now

    def take(self, now: float) -> int:
        """How much to acknowledge with one message, which counts as sent; call again until it is 0."""
        taken = min(self.unacknowledged_bytes, _MOST_IN_ONE)
        self.unacknowledged_bytes -= taken
        self.acknowledged_bytes += taken
        self._looked_at = now
        return taken
