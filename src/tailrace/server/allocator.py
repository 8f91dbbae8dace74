"""What the C library does with large buffers that come and go.

A backfill reads block after block into memory that is free again as soon as it is sent. By default glibc
gives buffers of that size back to the system each time, and the next read then touches every page of new
memory for the first time: that took as long as the reads themselves. If it is kept, it is used again.

What is kept has a limit, but each arena has its own: with an arena for every thread that runs jobs, a node
held three times the limit. The threads hold the interpreter's lock whenever they allocate, so sharing one
arena costs them nothing.

Memory that is free between things in use is never given back by itself: after a thousand large answers had
been queued and dropped, a node still held what they took. `FreeMemory` gives it back. But that holds
everybody up (28 ms for a hundred MiB), and writers need the room again a moment later. So it waits until
nothing is going on, or until the room has been free for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque

__all__ = ["LOOKS", "FreeMemory", "keep_buffers"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_LARGEST_KEPT_BYTES = 4 << 20  # larger ones go back at once
_KEPT_BYTES = 16 << 20  # of memory that is free, altogether
_LEFT_BYTES = 1 << 20  # free, and not worth looking for
_WORTH_IT_BYTES = 32 << 20  # free between things in use, before it is worth a walk through all of it

LOOKS = 6
"""What was free at this many looks in a row is given back even while the node is busy."""


class _Figures(ctypes.Structure):
    """What ``mallinfo2`` returns; the last two are the free bytes, and those of them at the end."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "used", "free", "top")
    ]


def keep_buffers() -> None:
    """Set this for the process, which should be a node's own; does nothing with other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class FreeMemory:
    """What is free in this process; look at it now and then."""

    def __init__(self) -> None:
        self._between: deque[int] = deque(maxlen=LOOKS)  # bytes that were free between things in use

    def give_back(self, *, everything: bool = False) -> None:
        """Give memory back to the system: what has been free for a while and is more than is kept, or, when
        nothing is going on, ``everything`` that is free. Takes milliseconds if there is much of it, and next
        to nothing otherwise.
        """
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallinfo2.restype = _Figures
            figures = library.mallinfo2()
            self._between.append(figures.free - figures.top)
            if everything and figures.free > _LEFT_BYTES:
                library.malloc_trim(0)
                self._between.clear()
            elif len(self._between) == LOOKS and min(self._between) > _WORTH_IT_BYTES:
                library.malloc_trim(_KEPT_BYTES)
                self._between.clear()
