"""Framer: feed bytes, get frames.

Rules: docs/spec/header.md#magic.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import FramingError
from .header import HEADER_SIZE, MAX_FRAME, Frame, frame_size

__all__ = ["Framer"]


class Framer:
    """Cuts a byte stream into frames.

    The limit is checked as soon as a header has arrived, without waiting for its body, so what is buffered
    after all frames have been taken is always less than one frame. After a `FramingError` nothing comes out.
    """

    __slots__ = ("_buffer", "_failed", "_read", "limit")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._read = 0
        self._failed: FramingError | None = None

    @property
    def buffered(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer) - self._read

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes from the peer."""
        if self._failed is None:
            self._buffer += data

    def maybe_frame(self) -> Frame | None:
        """The next whole frame, or None when more bytes are needed."""
        if self._failed is not None:
            raise self._failed
        buffer, at = self._buffer, self._read
        available = len(buffer) - at
        if available < HEADER_SIZE:
            self._release()
            return None
        try:
            size = frame_size(buffer, at, self.limit)
        except FramingError as error:
            self._failed = error
            self._buffer.clear()
            self._read = 0
            raise
        if available < size:
            self._release()
            return None
        self._read = at + size
        return Frame.parse(buffer, at)

    def frames(self) -> Iterator[Frame]:
        """All whole frames in the buffer; the caller may change `limit` between two of them."""
        while (frame := self.maybe_frame()) is not None:
            yield frame

    def peek(self) -> memoryview:
        """A view of what is buffered; release it before the framer is used again."""
        return memoryview(self._buffer)[self._read :]

    def skip(self, size: int) -> None:
        """Skip whole frames that `peek` has shown."""
        self._read += size

    def take_rest(self) -> bytes:
        """Remove and return what is buffered, for a connection that continues with another reader."""
        rest = bytes(self._buffer[self._read :])
        self._buffer.clear()
        self._read = 0
        return rest

    def _release(self) -> None:
        """Forget what has been read; called once per drained buffer, not once per frame."""
        if self._read:
            del self._buffer[: self._read]
            self._read = 0
