"""Large byte strings, put together without holding everybody up.

A string of 20 MiB is memory that nobody has touched yet, 5,000 pages of it. The system hands them out one by
one as they are written to, which takes several times as long as the copy: 14 ms against 3. Where it has huge
pages for whoever asks, it hands out ten of those instead.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import sys
from collections.abc import Callable

import numpy as np

__all__ = ["LARGE_BYTES", "LargeBytes", "join_large"]

LARGE_BYTES = 1 << 20
"""From here on a copy of a value is worth avoiding, or some care."""

_RESERVED = 8
"""Room is made for so many times of what has come at most, whatever somebody says will come."""
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_CONTENT_AT = bytes.__basicsize__ - 1
"""Where the content of a byte string begins in it."""


def _advice() -> Callable[[int, int, int], int] | None:
    if _HUGE_PAGES is None or sys.implementation.name != "cpython":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise  # type: ignore[no-any-return]


_advise = _advice()
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize if _advise is not None else None
if _new_bytes is not None:
    _new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object


def _copy(part: bytes | memoryview, to: int) -> int:
    """Copy bytes to an address; the one behind them."""
    if len(part):
        ctypes.memmove(to, np.frombuffer(part, np.uint8).ctypes.data, len(part))
    return to + len(part)


def join_large(*parts: bytes | memoryview) -> bytes:
    """The parts as one string."""
    size = sum(map(len, parts))
    if size < LARGE_BYTES or _advise is None or _new_bytes is None:
        return b"".join(parts)
    made: bytes = _new_bytes(None, size)  # nobody else has it yet, so it may be written to
    at = id(made) + _CONTENT_AT
    first, last = -(-at // mmap.PAGESIZE), (at + size) // mmap.PAGESIZE
    _advise(
        first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE, _HUGE_PAGES
    )  # if not, it only takes longer
    for part in parts:
        at = _copy(part, at)
    return made


class LargeBytes:
    """A string of known size that comes in pieces; each is copied once, and all of it never."""

    __slots__ = ("_first", "_made", "_size", "_to")

    def __init__(self, size: int) -> None:
        self._size = size
        self._first = io.BytesIO()
        """What came before there was enough to make room for the rest."""
        self._made: bytes | None = None
        self._to = 0

    def add(self, piece: bytes | memoryview) -> None:
        """The next piece; all of them together are no longer than the whole."""
        if self._made is not None:
            self._to = _copy(piece, self._to)
            return
        first = self._first
        first.write(piece)
        if _new_bytes is not None and _RESERVED * first.tell() >= self._size:
            self._made = _new_bytes(None, self._size)
            self._to = _copy(first.getvalue(), id(self._made) + _CONTENT_AT)
            first.truncate(0)

    def value(self) -> bytes:
        """All that has come."""
        made = self._made
        if made is None:
            return self._first.getvalue()
        come = self._to - id(made) - _CONTENT_AT
        return made if come == self._size else made[:come]
