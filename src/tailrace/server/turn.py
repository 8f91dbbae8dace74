"""How long one connection has the loop before the others have their turn.

One thread serves everybody. Whatever a peer sends, refused requests too, is processed for about `TURN_S`; the
rest waits, unread, until the loop comes round again. A single request that takes longer is not cut short; if
its value's size is the reason, the value is copied as rarely as possible.
"""

from __future__ import annotations

__all__ = ["TURN_S"]

TURN_S = 0.001
