"""Flow control, the sender's half: how many bytes may be on their way (docs/spec/dcp.md#flow-control).

The rule looks at each message by itself: it may go if *less* than the window is outstanding, whatever its own
size. So one message may overshoot, and of many messages back to back exactly those may go that *begin* below
the window. That is one comparison per message, or one binary search for a whole chunk of them.
"""

from __future__ import annotations

import sys

__all__ = ["SendWindow"]


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
        """The newest limit wins; 0 turns flow control off and forgets what was counted."""
        self.size = size
        if not size:
            self.outstanding = 0

    def sent(self, counted_bytes: int) -> None:
        """Messages went out."""
        if self.size:
            self.outstanding += counted_bytes

    def acknowledge(self, acked_bytes: int) -> None:
        """The consumer has processed this much; more than there is counts as all of it."""
        self.acknowledged_bytes += acked_bytes
        self.outstanding = max(0, self.outstanding - acked_bytes)
