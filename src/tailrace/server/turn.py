"""How long one connection has the loop before the others have their turn.

One thread serves everybody. Whatever a peer sends, refused requests too, is taken up for about `TURN_S`; what
is left waits, unread, until the loop has been round. A single request that takes longer is not cut short;
where that is because of a value's size, the value is copied as seldom as possible.
"""

from __future__ import annotations

__all__ = ["TURN_S"]

TURN_S = 0.001
