"""Which vbuckets of a TAP connection have something to send, in turn."""

from __future__ import annotations

from collections import deque

from .clients import TapCursor

__all__ = ["CursorTurns"]


class CursorTurns:
    """Cursors in line, and those that wait for acknowledgements before they join it again."""

    __slots__ = ("_in_line", "_line", "waiting")

    def __init__(self) -> None:
        self.waiting: set[TapCursor] = set()
        self._line: deque[TapCursor] = deque()
        self._in_line: set[TapCursor] = set()

    def __bool__(self) -> bool:
        return bool(self._line)

    @property
    def pending(self) -> int:
        """How many are in line or waiting."""
        return len(self._line) + len(self.waiting)

    def add(self, cursor: TapCursor) -> None:
        """Put a cursor at the end of the line, unless it is in it already."""
        if cursor not in self._in_line:
            self._in_line.add(cursor)
            self._line.append(cursor)

    def next(self) -> TapCursor:
        """Take the first cursor in line."""
        cursor = self._line.popleft()
        self._in_line.remove(cursor)
        return cursor

    def forget(self, cursor: TapCursor) -> None:
        """Remove a cursor: it gets no more turns."""
        self.waiting.discard(cursor)
        if cursor in self._in_line:
            self._in_line.remove(cursor)
            self._line.remove(cursor)

    def clear(self) -> None:
        """Empty the line."""
        self._line.clear()
        self._in_line.clear()
