"""The bytes that a node holds for its peers, all of them together.

Each peer has its limits, but there may be thousands of peers. When their bytes are too many for the node, one
peer is disconnected: of those that hold at least the average, the one that has held bytes longest. So a peer
that is a little slow does not pay for one that asks for large documents and never reads them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["HeldBytes"]

P = TypeVar("P")


class HeldBytes(Generic[P]):
    """Bytes by peer, in the order in which the peers began to hold some."""

    __slots__ = ("bytes_of", "total")

    def __init__(self) -> None:
        self.bytes_of: dict[P, int] = {}
        self.total = 0

    def count(self, peer: P, size: int) -> None:
        """Set how many bytes are held for a peer now."""
        self.total += size - self.bytes_of.get(peer, 0)
        if size:
            self.bytes_of[peer] = size
        else:
            self.bytes_of.pop(peer, None)

    def heaviest(self) -> P:
        """The peer to disconnect; its bytes no longer count."""
        average = self.total / len(self.bytes_of)
        heaviest = next(peer for peer, size in self.bytes_of.items() if size >= average)
        self.count(heaviest, 0)
        return heaviest
