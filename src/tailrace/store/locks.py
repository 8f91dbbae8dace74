"""Locked documents of a vbucket. Locks are in memory only, as on any server."""

from __future__ import annotations

from ..errors import DocumentRefused
from ..wire.codes import Status
from .journal import HybridClock

__all__ = ["Locks"]

_MAX_LOCKS = 10_000


class Locks(dict[bytes, tuple[int, float]]):
    """By key: the CAS that unlocks the document, and until when (monotonic) it is locked."""

    __slots__ = ("_clock",)

    def __init__(self, clock: HybridClock) -> None:
        super().__init__()
        self._clock = clock

    def is_locked(self, key: bytes) -> bool:
        lock = self.get(key)
        return lock is not None and self._clock.monotonic() < lock[1]

    def lock(self, key: bytes, seconds: float) -> int:
        """Lock a document; the CAS that unlocks it."""
        if self.is_locked(key):
            raise DocumentRefused(Status.LOCKED)
        now = self._clock.monotonic()
        if len(self) >= _MAX_LOCKS:
            for old in [key for key, lock in self.items() if lock[1] <= now]:
                del self[old]
            if len(self) >= _MAX_LOCKS:
                raise DocumentRefused(Status.ETMPFAIL, "too many locks")
        cas = self._clock.next()
        self[key] = cas, now + seconds
        return cas

    def unlock(self, key: bytes, cas: int) -> None:
        if not self.is_locked(key):
            raise DocumentRefused(Status.NOT_LOCKED)
        if self[key][0] != cas:
            raise DocumentRefused(Status.LOCKED)
        # The lock's CAS stays good for the next change, as if the document had taken it over.
        self[key] = cas, 0.0

    def open(self, key: bytes, cas: int) -> bool:
        """Whether this is the CAS of a lock, which is used up by it; refuse if another lock is in the way."""
        lock = self.get(key)
        if lock is None:
            return False
        if cas != lock[0] and self._clock.monotonic() < lock[1]:
            raise DocumentRefused(Status.KEY_EEXISTS if cas else Status.LOCKED)
        del self[key]
        return cas == lock[0]
