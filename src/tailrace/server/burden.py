"""What peers make a node hold, all of them together.

Each peer has its limits, but there may be thousands of peers. When what they have to be held for is too much
for the node, one goes that has been a burden for long: among those with the larger part of the bytes, so that
one that is a little slow does not pay for somebody who asks for large documents and never reads one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Burden"]

P = TypeVar("P")


class Burden(Generic[P]):
    """Bytes by peer; those that have some now, the first one first."""

    __slots__ = ("bytes_of", "total")

    def __init__(self) -> None:
        self.bytes_of: dict[P, int] = {}
        self.total = 0

    def count(self, peer: P, size: int) -> None:
        """So many bytes are held for a peer now; 0: none."""
        self.total += size - self.bytes_of.get(peer, 0)
        if size:
            self.bytes_of[peer] = size
        else:
            self.bytes_of.pop(peer, None)

    def heaviest(self) -> P:
        """Who should go first; from then on it is not counted."""
        average = self.total / len(self.bytes_of)
        found = next(one for one, size in self.bytes_of.items() if size >= average)
        self.count(found, 0)
        return found
