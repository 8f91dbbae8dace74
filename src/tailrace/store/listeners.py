"""Who is told what happens to a vbucket."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Listeners"]


class Listeners:
    """Callbacks of one vbucket: after each change, when its history or state changed, and for what is on
    disk.
    """

    __slots__ = ("_waiters", "on_append", "on_change")

    def __init__(self) -> None:
        self.on_append: Callable[[], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self._waiters: list[tuple[int, Callable[[bool], None]]] = []  # for seqnos to be on disk

    def await_persisted(self, seqno: int, callback: Callable[[bool], None]) -> None:
        self._waiters.append((seqno, callback))

    def persisted(self, seqno: int) -> bool:
        """Everything up to a seqno is on disk; whether somebody still waits."""
        due = [callback for wanted, callback in self._waiters if wanted <= seqno]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > seqno]
        for callback in due:
            callback(True)
        return bool(self._waiters)

    def give_up(self, after: int) -> None:
        """What they wait for after a seqno will never come."""
        lost = [callback for wanted, callback in self._waiters if wanted > after]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] <= after]
        for callback in lost:
            callback(False)
