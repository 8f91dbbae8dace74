"""The callbacks that learn what happens to a vbucket."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Listeners"]

_MANY = 100


class Listeners:
    """Callbacks of one vbucket: after each change, when its history or state changed, and when a seqno is on
    disk.
    """

    __slots__ = ("_look_at", "_waiters", "on_append", "on_change")

    def __init__(self) -> None:
        self.on_append: Callable[[], None] | None = None
        self.on_change: Callable[[], None] | None = None
        # the seqno to be on disk, the callback, and whether its owner has given up
        self._waiters: list[tuple[int, Callable[[bool], None], Callable[[], bool] | None]] = []
        self._look_at = _MANY  # with so many, drop those whose owners have given up

    def await_persisted(
        self, seqno: int, callback: Callable[[bool], None], is_over: Callable[[], bool] | None = None
    ) -> None:
        if len(self._waiters) >= self._look_at:  # if the seqno never comes, they would stay for ever
            self._waiters = [waiter for waiter in self._waiters if waiter[2] is None or not waiter[2]()]
            self._look_at = max(_MANY, 2 * len(self._waiters))
        self._waiters.append((seqno, callback, is_over))

    def persisted(self, seqno: int) -> bool:
        """Call those who wait for a seqno up to this one; return whether anyone still waits."""
        due = [callback for wanted, callback, _ in self._waiters if wanted <= seqno]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > seqno]
        for callback in due:
            callback(True)
        return bool(self._waiters)

    def give_up(self, after: int) -> None:
        """Call those who wait for a seqno after this one: it will never come."""
        lost = [callback for wanted, callback, _ in self._waiters if wanted > after]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] <= after]
        for callback in lost:
            callback(False)
