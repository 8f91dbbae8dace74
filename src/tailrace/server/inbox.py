"""What has come of a peer's requests and is not taken up yet: bytes in parts, and frames that wait.

Bytes wait because the rest of a request is missing, or for the connection's next turn. Frames wait beside a
change stream, behind a command that is not finished.
"""

from __future__ import annotations

from collections import deque

from ..wire.header import HEADER_SIZE, Frame

__all__ = ["Inbox"]

_PIECE_BYTES = 64
"""About what a piece of a request takes beside its bytes: a peer may send them one by one."""

_LARGE_BYTES = 1 << 20
_FRONT_BYTES = HEADER_SIZE + 0xFF
"""Header and framing extras of any request."""


class Inbox:
    """Of one connection."""

    __slots__ = ("_have", "_need", "_parts", "held", "held_bytes")

    def __init__(self) -> None:
        self.held: deque[Frame] = deque()
        """Frames behind an unfinished command."""
        self.held_bytes = 0
        self._parts: list[bytes] = []
        self._have = 0
        self._need = HEADER_SIZE

    @property
    def has_parts(self) -> bool:
        """Whether bytes wait."""
        return bool(self._parts)

    @property
    def has_request(self) -> bool:
        """Whether as many bytes wait as the next request is known to need."""
        return bool(self._parts) and self._need <= self._have

    @property
    def size(self) -> int:
        """Bytes that wait, with what keeping them in parts takes."""
        parts = self._have + _PIECE_BYTES * len(self._parts) if self._parts else 0
        return parts + self.held_bytes

    # bytes

    def add(self, data: bytes) -> None:
        """More has come."""
        self._parts.append(data)
        self._have += len(data)

    def keep(self, data: bytes, need: int) -> None:
        """What is left after all that could be taken up; its first request needs so many bytes."""
        if data:
            self._parts.append(data)
        self._have, self._need = len(data), need

    def take(self) -> bytes:
        """All bytes."""
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    @property
    def is_large(self) -> bool:
        """Whether `take_large` is for the next request."""
        return self._need >= _LARGE_BYTES and len(self._parts[0]) >= _FRONT_BYTES

    def take_large(self) -> tuple[Frame, bytes]:
        """A large request whose parts are all there, and what came behind it.

        Only its body is joined. Joined with the header first it would be copied twice, and a copy of 20 MiB
        holds everybody up for some milliseconds.
        """
        first, last = self._parts[0], self._parts[-1]
        frame = Frame.parse(first[:_FRONT_BYTES])  # its body is cut short
        end = len(last) - (self._have - self._need)
        body: list[bytes | memoryview]
        body = [memoryview(first)[HEADER_SIZE + len(frame.framing) :], *self._parts[1:-1], last[:end]]
        self._parts.clear()
        frame.body = b"".join(body)
        return frame, last[end:]

    # frames

    def hold(self, frame: Frame) -> None:
        """A request that waits for the one before it."""
        self.held.append(frame)
        self.held_bytes += frame.size + _PIECE_BYTES

    def release(self) -> Frame:
        """The first of those."""
        frame = self.held.popleft()
        self.held_bytes -= frame.size + _PIECE_BYTES
        return frame

    def clear(self) -> None:
        """Nothing of it will be taken up."""
        self._parts.clear()
        self.held.clear()
        self.held_bytes = 0
