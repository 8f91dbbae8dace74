"""What has arrived of a peer's requests and is not processed yet: bytes in parts, and frames that wait.

Bytes wait because the rest of a request is missing, or for the connection's next turn. Frames wait beside a
change stream, behind a command that is not finished.

A large value is put together while it arrives, a piece at a time, and never copied as a whole. Each copy of
20 MiB holds everybody up for ten milliseconds, mostly for memory that is touched for the first time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from ..large_bytes import LARGE_BYTES, LargeBytes
from ..store.format import MUTATION_EXTRAS
from ..wire.codes import Datatype, Magic, Op
from ..wire.header import HEADER_SIZE, Frame, front_size

__all__ = ["Inbox", "room_before"]

_PIECE_BYTES = 64
"""About what a piece of a request takes beside its bytes, which a peer may send one by one."""


RoomFor = Callable[[Frame, int], int]
"""How much room to leave before a large value, given the frame without it, and its size."""
_STORING = frozenset({Op.SET, Op.SETQ, Op.ADD, Op.ADDQ, Op.REPLACE, Op.REPLACEQ})


def room_before(front: Frame, *, prefixed_keys: bool) -> int:
    """How many bytes the store will put before a large value that it gets as received; 0 for requests whose
    value may be read before that. ``front`` is the request without it.
    """
    is_plain = front.magic == Magic.REQUEST and not front.datatype & ~Datatype.JSON
    if front.opcode not in _STORING or not is_plain:
        return 0
    return HEADER_SIZE + MUTATION_EXTRAS + front.key_length + (not prefixed_keys)


class LargeFrame(Frame):
    """A frame whose value is kept apart; its body is joined only for those who ask for all of it."""

    __slots__ = ("_front", "_value")

    def __init__(self, front: Frame, value: bytes) -> None:
        """``front`` is the frame without its value."""
        self._value = value
        super().__init__(
            front.magic,
            front.opcode,
            front.key_length,
            front.extras_length,
            front.datatype,
            front.vbucket,
            front.opaque,
            front.cas,
            front.framing,
            front.body,
        )

    @property
    def body(self) -> bytes:
        """Everything after the framing extras."""
        return self._front + self._value

    @body.setter
    def body(self, front: bytes) -> None:
        self._front = front

    @property
    def extras(self) -> bytes:
        return self._front[: self.extras_length]

    @property
    def key(self) -> bytes:
        return self._front[self.extras_length :]

    @property
    def value(self) -> bytes:
        return self._value

    @property
    def size(self) -> int:
        return HEADER_SIZE + len(self.framing) + len(self._front) + len(self._value)


class _LargeRequest:
    """A request whose large value is still arriving."""

    __slots__ = ("_front", "_missing", "_value", "behind")

    def __init__(self, front: bytes, value_bytes: int, room: int) -> None:
        self.behind: list[bytes] = []
        """What came after it."""
        self._front = front
        self._value = LargeBytes(value_bytes, room=room)
        self._missing = value_bytes

    def add(self, data: bytes) -> None:
        """Take more data."""
        if self._missing >= len(data):
            self._value.add(data)
            self._missing -= len(data)
            return
        if self._missing:
            self._value.add(memoryview(data)[: self._missing])
            data, self._missing = data[self._missing :], 0
        if data:
            self.behind.append(data)

    def frame(self, room_for: RoomFor) -> Frame:
        """The whole request, which is there now."""
        front, value = Frame.parse(self._front), self._value.value()
        if isinstance(value, memoryview) and not room_for(front, len(value)):
            value = bytes(value)  # it may be used for more than storing it
        return LargeFrame(front, cast("bytes", value))


class Inbox:
    """The inbox of one connection."""

    __slots__ = ("_have", "_large", "_need", "_parts", "held", "held_bytes")

    def __init__(self) -> None:
        self.held: deque[Frame] = deque()
        """Frames behind an unfinished command."""
        self.held_bytes = 0
        self._parts: list[bytes] = []
        self._large: _LargeRequest | None = None
        self._have = 0
        self._need = HEADER_SIZE

    @property
    def has_parts(self) -> bool:
        """Whether bytes wait."""
        return bool(self._parts) or self._large is not None

    @property
    def has_request(self) -> bool:
        """Whether as many bytes wait as the next request is known to need."""
        return self.has_parts and self._need <= self._have

    @property
    def size(self) -> int:
        """Bytes that wait, with the overhead of keeping them in parts."""
        parts = self._have + _PIECE_BYTES * len(self._parts) if self.has_parts else 0
        return parts + self.held_bytes

    # bytes

    def add(self, data: bytes) -> None:
        """Take more data."""
        if self._large is None:
            self._parts.append(data)
        else:
            self._large.add(data)
        self._have += len(data)

    def keep(self, data: bytes, need: int, room_for: RoomFor) -> None:
        """Keep what is left after all that could be processed; its first request needs this many bytes. If
        that is large, room is left before its value.
        """
        self._have, self._need = len(data), need
        if need >= LARGE_BYTES and len(data) >= (front := front_size(data)):
            room = room_for(Frame.parse(data[:front]), need - front)
            self._large = _LargeRequest(data[:front], need - front, room)
            self._large.add(data[front:])
        elif data:
            self._parts.append(data)

    def take(self) -> bytes:
        """All bytes, if they are not of a large request."""
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    @property
    def has_large(self) -> bool:
        """Whether `take_large` is for the request that waits."""
        return self._large is not None

    def take_large(self, room_for: RoomFor) -> tuple[Frame, bytes]:
        """A large request that is complete, and what came after it. Its value is a view if there is room
        before it and ``room_for`` still wants some.
        """
        assert self._large is not None
        large, self._large = self._large, None
        return large.frame(room_for), b"".join(large.behind)

    # frames

    def hold(self, frame: Frame) -> None:
        """Keep a request that waits for the one before it."""
        self.held.append(frame)
        self.held_bytes += frame.size + _PIECE_BYTES

    def release(self) -> Frame:
        """The first request that was held."""
        frame = self.held.popleft()
        self.held_bytes -= frame.size + _PIECE_BYTES
        return frame

    def clear(self) -> None:
        """Drop everything unprocessed."""
        self._parts.clear()
        self._large = None
        self.held.clear()
        self.held_bytes = 0
