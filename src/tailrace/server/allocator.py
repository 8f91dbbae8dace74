"""What the C library does with large buffers that come and go.

A backfill reads block after block into memory that is free again as soon as it is sent. By default glibc
gives buffers of that size back to the system each time, and the next read then touches every page of new
memory for the first time: that took as long as the reads themselves. Kept, the memory is used again.

What is kept has a limit, but each arena has its own: with an arena for every thread that runs jobs, a node
held three times the limit. The threads hold the interpreter's lock whenever they allocate, so sharing one
arena costs them nothing.

Memory that is free between things in use is never given back by itself: after a thousand large answers had
been queued and dropped, a node still held what they took. `give_back` looks for that.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["give_back", "keep_buffers"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_LARGEST_KEPT_BYTES = 4 << 20  # larger ones go back at once
_KEPT_BYTES = 16 << 20  # of memory that is free, altogether
_LEFT_BYTES = 1 << 20  # free, and not worth looking for
_WORTH_IT_BYTES = 32 << 20  # free between things in use, before it is worth a walk through all of it


class _Figures(ctypes.Structure):
    """What ``mallinfo2`` tells; the last two are the bytes that are free, and those of them at the end."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "used", "free", "top")
    ]


def keep_buffers() -> None:
    """For this process, which should be a node's own; where the C library is another one, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back(*, everything: bool = False) -> None:
    """Give memory that is free back to the system: what is more than is kept, or ``everything`` where nothing
    is going on. Takes some milliseconds if there is much of it, and next to nothing otherwise.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Figures
        figures = library.mallinfo2()
        if everything and figures.free > _LEFT_BYTES:
            library.malloc_trim(0)
        elif figures.free - figures.top > _WORTH_IT_BYTES:
            library.malloc_trim(_KEPT_BYTES)
