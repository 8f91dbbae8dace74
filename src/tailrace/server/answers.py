"""A connection's answers, in the order of its requests.

An answer that takes time keeps its place as a `Pending`, and the answers behind it wait there, unless the
peer takes answers in any order (docs/spec/servers.md#unordered-execution): then they overtake it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .call import Pending

__all__ = ["AnswerQueue"]


class AnswerQueue:
    """What is ready to be sent, and what waits behind the first answer that is not there yet."""

    __slots__ = ("_overtaken", "is_ordered", "ready", "size", "unfinished", "waiting")

    def __init__(self) -> None:
        self.is_ordered = True
        """Whether answers that take time are waited for from now on."""
        self._overtaken: list[Pending] = []
        self.ready: list[bytes] = []
        self.waiting: deque[bytes | Pending] = deque()
        self.size = 0
        """Bytes of all answers that are there and not taken yet."""
        self.unfinished = 0
        """Answers that are not there yet."""

    def add(self, answer: bytes) -> None:
        """Add an answer, or several in one."""
        self.size += len(answer)
        (self.waiting if self.waiting else self.ready).append(answer)

    def add_first(self, message: bytes) -> None:
        """Add what was not asked for, or comes from a change stream: it waits for no answer."""
        self.ready.append(message)
        self.size += len(message)

    def add_barrier(self) -> None:
        """Let nothing that is added from now on overtake what is unfinished now."""
        self.waiting += self._overtaken
        self._overtaken.clear()

    def add_pending(self, pending: Pending, *, is_barrier: bool = False) -> None:
        """Add an answer that may not be there yet; a barrier's is not overtaken either."""
        (self.waiting if self.is_ordered or is_barrier else self._overtaken).append(pending)
        self.unfinished += 1
        self.advance()

    def advance(self) -> None:
        """Make ready the answers that no unfinished one holds up any more."""
        for pending in [pending for pending in self._overtaken if pending.answer is not None]:
            self._overtaken.remove(pending)
            assert pending.answer is not None
            self.unfinished -= 1
            self.add(pending.answer)
        waiting = self.waiting
        while waiting:
            first = waiting[0]
            if isinstance(first, Pending):
                if first.answer is None:
                    return
                self.unfinished -= 1
                self.size += len(first.answer)
                first = first.answer
            self.ready.append(first)
            waiting.popleft()

    def take(self) -> tuple[list[bytes], int]:
        """All that is ready, and its size."""
        ready, self.ready = self.ready, []
        size = sum(map(len, ready))
        self.size -= size
        return ready, size

    def pending(self) -> Iterator[Pending]:
        """The answers that are not there yet."""
        unanswered = (*self._overtaken, *self.waiting)
        return (answer for answer in unanswered if isinstance(answer, Pending) and answer.answer is None)

    def cancel(self) -> None:
        """Nobody waits any more; what is ready may still be sent."""
        for answer in (*self._overtaken, *self.waiting):
            if isinstance(answer, Pending):
                answer.cancelled = True
        self.waiting.clear()
        self._overtaken.clear()
