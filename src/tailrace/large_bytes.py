"""Large byte strings, assembled without holding up other threads.

A new string of 20 MiB is 5,000 pages of untouched memory. The system provides them one by one as they are
written to, which takes several times as long as the copy: 14 ms against 3. Where huge pages are available on
request, it provides ten of those instead.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import sys
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["LARGE_BYTES", "LargeBytes", "gather_large", "join_large", "put_before"]

LARGE_BYTES = 1 << 20
"""From this size on, a copy of a value is worth avoiding, or some care."""

_AT_ONCE = 256 << 10
_RESERVED = 8
"""Room is made for at most this many times what has come, however much a peer announces."""
_HUGE_PAGES: int = getattr(mmap, "MADV_HUGEPAGE", 0)
_CONTENT_AT = bytes.__basicsize__ - 1
"""The offset of a byte string's content in the object."""


def _advice() -> Callable[[int, int, int], int] | None:
    if not _HUGE_PAGES or sys.implementation.name != "cpython":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def _maker() -> Callable[[None, int], bytes]:
    """The function that makes a string with room for a number of bytes, none of them written yet."""
    make = ctypes.PyDLL(None).PyBytes_FromStringAndSize  # not `pythonapi`, whose types all modules share
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
    return make


_advise = _advice()
_new_bytes = _maker() if _advise is not None else None


def _copy(part: bytes | memoryview, to: int) -> int:
    """Copy bytes to an address; returns the address after them."""
    if len(part):
        ctypes.memmove(to, np.frombuffer(part, np.uint8).ctypes.data, len(part))
    return to + len(part)


def join_large(*parts: bytes | memoryview) -> bytes:
    """The parts as one string."""
    size = sum(map(len, parts))
    if size < LARGE_BYTES or _advise is None or _new_bytes is None:
        return b"".join(parts)
    made = _new_bytes(None, size)  # nobody else refers to it yet, so it may be written to
    at = id(made) + _CONTENT_AT
    first, last = -(-at // mmap.PAGESIZE), (at + size) // mmap.PAGESIZE
    # If the system does not follow the advice, it only takes longer.
    _advise(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE, _HUGE_PAGES)
    for part in parts:
        at = _copy(part, at)
    return made


def put_before(front: bytes, value: bytes | memoryview) -> bytes:
    """A value with ``front`` before it; the value is not copied if `LargeBytes` left exactly that much room.

    ``front`` must not begin with a 0 byte, so that used room is not mistaken for free room.
    """
    made = value.obj if isinstance(value, memoryview) else None
    if isinstance(made, bytes) and len(made) == len(front) + len(value) and not made[0]:
        _copy(front, id(made) + _CONTENT_AT)  # only views of the value refer to it, and none shows the room
        return made
    return join_large(front, value)


def gather_large(parts: Iterable[bytes], size: int) -> npt.NDArray[np.uint8]:
    """Join parts of ``size`` bytes in all. Small ones are copied in groups, large ones while other threads
    run: a plain join would hold those up until it is done.
    """
    made = np.empty(size, np.uint8)
    at, waiting, waiting_bytes = 0, list[bytes](), 0

    def put(part: bytes) -> None:
        nonlocal at
        made[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)

    for part in parts:
        if len(part) < LARGE_BYTES:
            waiting.append(part)
            waiting_bytes += len(part)
        if waiting and (waiting_bytes >= _AT_ONCE or len(part) >= LARGE_BYTES):
            put(b"".join(waiting))
            waiting, waiting_bytes = [], 0
        if len(part) >= LARGE_BYTES:
            put(part)
    if waiting:
        put(b"".join(waiting))
    return made


class LargeBytes:
    """A string of known size that comes in pieces; each piece is copied once, the whole never.

    With ``room`` for what `put_before` will add, the value is a view.
    """

    __slots__ = ("_first", "_made", "_room", "_size", "_to")

    def __init__(self, size: int, *, room: int = 0) -> None:
        self._size = size
        self._room = room
        self._first = io.BytesIO()
        """What came before enough was there to make room for the rest."""
        self._made: bytes | None = None
        self._to = 0

    def add(self, piece: bytes | memoryview) -> None:
        """Add the next piece; together they must not be longer than the whole."""
        if self._made is not None:
            self._to = _copy(piece, self._to)
            return
        first = self._first
        first.write(piece)
        if _new_bytes is not None and _RESERVED * first.tell() >= self._size:
            self._made = _new_bytes(None, self._room + self._size)
            self._to = _copy(bytes(self._room), id(self._made) + _CONTENT_AT)
            self._to = _copy(first.getvalue(), self._to)
            first.truncate(0)

    def value(self) -> bytes | memoryview:
        """All that has come."""
        made = self._made
        if made is None:
            return self._first.getvalue()
        end = self._to - id(made) - _CONTENT_AT
        if self._room:
            return memoryview(made)[self._room : end]
        return made if end == self._size else made[:end]
