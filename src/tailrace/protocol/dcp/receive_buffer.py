"""Where received bytes wait until they have been used.

Bytes are received straight into a few large blocks (`get_buffer`, `buffer_updated`, as in asyncio's
BufferedProtocol). What has been cut into frames stays in its block, without a copy, until its user releases
it; then the block is filled again. While the users keep up there is only one block.
"""

from __future__ import annotations

import numpy as np

from ...wire.header import HEADER_SIZE, MAX_FRAME, frame_size

__all__ = ["BLOCK_BYTES", "ReceiveBlock", "ReceiveBuffer"]

BLOCK_BYTES = 4 << 20
"""Large enough that the cost of a block does not matter, small enough for a processor's cache."""
_LEAST_ROOM = 64 << 10
_MAX_SPARE = 2


class ReceiveBlock:
    """Memory that is filled from the front."""

    __slots__ = ("filled", "users", "view")

    def __init__(self, size: int) -> None:
        self.view = np.empty(size, np.uint8).data  # the memory is not touched before bytes come
        self.filled = 0
        self.users = 0
        """How many chunks still point into it."""


class ReceiveBuffer:
    """A byte stream in blocks. ``limit`` bounds a frame, and so what one block may have to hold.

    When it `is_full`, the caller must `take` all whole frames before it asks for the next buffer: what is
    still pending then is less than one frame.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES, limit: int = MAX_FRAME) -> None:
        self._block_bytes = block_bytes
        self._limit = limit
        self._block = ReceiveBlock(block_bytes)
        self._begin = 0
        self._spare: list[ReceiveBlock] = []

    def get_buffer(self) -> memoryview:
        """Where to put the next bytes; never empty."""
        block = self._block
        if self.is_full:
            self._move()
        elif self._begin == block.filled and not block.users:
            block.filled = self._begin = 0
        return self._block.view[self._block.filled :]

    def buffer_updated(self, count: int) -> None:
        """This many bytes were put there."""
        self._block.filled += count

    @property
    def is_full(self) -> bool:
        """Whether there is so little room that frames should be taken before more is received."""
        return len(self._block.view) - self._block.filled < _LEAST_ROOM

    @property
    def pending(self) -> memoryview:
        """What has been received and not taken yet."""
        return self._block.view[self._begin : self._block.filled]

    def take(self, count: int) -> ReceiveBlock:
        """Put the first ``count`` pending bytes in use, until `release` gives the block back."""
        self._begin += count
        self._block.users += 1
        return self._block

    def release(self, block: ReceiveBlock) -> None:
        """A user is done with its part of a block."""
        block.users -= 1
        if not block.users and block is not self._block:
            self._keep(block)

    def _move(self) -> None:
        """Continue at the front of a block that has room for all of the frame that is being received."""
        block, begin = self._block, self._begin
        rest = block.filled - begin
        needed = rest if rest < HEADER_SIZE else frame_size(block.view, begin, self._limit)
        size = needed + _LEAST_ROOM
        if block.users or size > len(block.view):
            fitting = self._spare.pop() if self._spare and size <= self._block_bytes else None
            self._block = fitting or ReceiveBlock(max(size, self._block_bytes))
        self._block.view[:rest] = block.view[begin : block.filled]
        self._block.filled, self._begin = rest, 0
        if block is not self._block and not block.users:
            self._keep(block)

    def _keep(self, block: ReceiveBlock) -> None:
        """Keep a few free blocks: memory that was touched once is cheaper than new memory."""
        if len(block.view) == self._block_bytes and len(self._spare) < _MAX_SPARE:
            block.filled = 0
            self._spare.append(block)
