"""What a producer's stream has made and not sent yet: single messages, then the frames of a batch."""

from __future__ import annotations

from collections import deque

import numpy as np

from .flow_control import SendWindow
from .shaping import ShapedFrames

__all__ = ["SendQueue"]


class SendQueue:
    """Sends through the window of the connection, and counts what was sent."""

    __slots__ = ("_at", "_batch", "_messages", "_window", "last_seqno", "sent_bytes", "sent_messages")

    def __init__(self, window: SendWindow, last_seqno: int) -> None:
        self.sent_bytes = 0
        self.sent_messages = 0
        self.last_seqno = last_seqno
        """The seqno that the reader reaches with what was sent or is queued."""
        self._window = window
        self._messages: deque[bytes] = deque()
        self._batch: ShapedFrames | None = None
        self._at = 0

    @property
    def has_messages(self) -> bool:
        return bool(self._messages)

    @property
    def is_empty(self) -> bool:
        return not self._messages and self._batch is None

    @property
    def has_batch(self) -> bool:
        return self._batch is not None

    def say(self, message: bytes) -> None:
        """Queue a message after the others, and before what is left of the batch."""
        self._messages.append(message)

    def say_first(self, message: bytes) -> None:
        """Queue a message before the others."""
        self._messages.appendleft(message)

    def put(self, batch: ShapedFrames) -> None:
        """Queue the next batch; the one before has been sent."""
        self._batch, self._at = batch, 0

    def drop_batch(self) -> None:
        """Drop what is left of the batch."""
        self._batch = None

    def clear(self) -> None:
        """Drop everything."""
        self._batch = None
        self._messages.clear()

    def send_into(self, out: list[bytes | memoryview]) -> int:
        """Send messages, then frames of the batch, that begin where the window has room; their size."""
        messages, room = self._messages, self._window.room
        size = count = 0
        while messages and size < room:
            message = messages.popleft()
            out.append(message)
            size += len(message)
            count += 1
        if self._batch is not None and size < room:
            frames_size, frames = self._send_batch(self._batch, out, room - size)
            size += frames_size
            count += frames
        self._window.sent(size)
        self.sent_messages += count
        self.sent_bytes += size
        return size

    def _send_batch(self, batch: ShapedFrames, out: list[bytes | memoryview], room: int) -> tuple[int, int]:
        data, offsets, at = batch.data, batch.offsets, self._at
        start, end = offsets.item(at), len(data)
        stop = count = len(offsets)
        if end - start > room:
            stop = int(np.searchsorted(offsets, start + room))
            if stop < count:
                end = offsets.item(stop)
        out.append(data.data[start:end])
        if stop == count:
            self._batch = None
            self.last_seqno = batch.last_seqno
            self._window.sent(batch.surcharge)
        self._at = stop
        return end - start, stop - at
