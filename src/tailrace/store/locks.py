"""What stands in the way of a write to a document: a lock, or a durable write that is not decided.

Locks are in memory only, as on any server; durable writes are changes of the vbucket (see `prepares`).
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import DocumentRefused
from ..wire.codes import Status
from .format import StoredPrepare
from .journal import HybridClock

__all__ = ["Locks"]

_MAX_LOCKS = 10_000
_BEING_PREPARED = b""
"""No document has this key: it lacks a collection."""


class Lock(NamedTuple):
    """A locked document."""

    cas: int
    """The CAS that unlocks it."""
    until: float
    """Monotonic."""


class Locks(dict[bytes, Lock | StoredPrepare]):
    """What is in the way, by key. A plain write only asks whether it is empty, which is fastest of a dict."""

    __slots__ = ("_clock", "_prepared", "doubtful", "level")

    def __init__(self, clock: HybridClock) -> None:
        super().__init__()
        self._clock = clock
        self._prepared: dict[int, StoredPrepare] = {}  # by seqno, those that are not decided
        self.level = 0
        """Of the durable write that is being made; 0 for a plain one."""
        self.doubtful: set[bytes] = set()
        """Keys whose prepares another active may have committed: nobody knows what a read should see."""

    # Durable writes.

    def begin_durable(self, level: int) -> None:
        """What is written until `end_durable` is only prepared."""
        self.level = level
        self[_BEING_PREPARED] = Lock(0, 0.0)

    def end_durable(self) -> None:
        self.level = 0
        self.pop(_BEING_PREPARED, None)

    def add_prepare(self, prepare: StoredPrepare) -> None:
        """Add a durable write that is not decided. Its key must not have one yet."""
        self[prepare.key] = self._prepared[prepare.seqno] = prepare

    def prepare(self, key: bytes) -> StoredPrepare | None:
        """The durable write of this key that is not decided."""
        obstacle = self.get(key)
        return obstacle if isinstance(obstacle, StoredPrepare) else None

    def prepare_at(self, seqno: int) -> StoredPrepare | None:
        """The undecided durable write with this seqno."""
        return self._prepared.get(seqno)

    @property
    def prepares(self) -> list[StoredPrepare]:
        """The undecided durable writes, oldest first, as they were added."""
        return list(self._prepared.values())

    def decided(self, prepare: StoredPrepare) -> None:
        """A durable write is committed or given up."""
        del self[prepare.key], self._prepared[prepare.seqno]
        self.doubtful.discard(prepare.key)

    def check_readable(self, key: bytes) -> None:
        """Refuse a key whose value nobody can know before its prepare is committed again."""
        if key in self.doubtful:
            raise DocumentRefused(Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS)

    def _check_prepare(self, key: bytes) -> None:
        self.check_readable(key)
        if isinstance(self.get(key), StoredPrepare):
            raise DocumentRefused(Status.SYNC_WRITE_IN_PROGRESS)

    # Locks.

    def _lock(self, key: bytes) -> Lock | None:
        obstacle = self.get(key)
        return obstacle if isinstance(obstacle, Lock) else None

    def is_locked(self, key: bytes) -> bool:
        lock = self._lock(key)
        return lock is not None and self._clock.monotonic() < lock.until

    def lock(self, key: bytes, seconds: float) -> int:
        """Lock a document; the CAS that unlocks it."""
        self._check_prepare(key)
        if self.is_locked(key):
            raise DocumentRefused(Status.LOCKED)
        now = self._clock.monotonic()
        if len(self) >= _MAX_LOCKS:
            locks = ((key, lock) for key, lock in self.items() if isinstance(lock, Lock))
            for old in [key for key, lock in locks if lock.until <= now]:
                del self[old]
            if len(self) >= _MAX_LOCKS:
                raise DocumentRefused(Status.ETMPFAIL, "too many locks")
        cas = self._clock.next()
        self[key] = Lock(cas, now + seconds)
        return cas

    def unlock(self, key: bytes, cas: int) -> None:
        lock = self._lock(key)
        if lock is None or not self.is_locked(key):
            raise DocumentRefused(Status.NOT_LOCKED)
        if lock.cas != cas:
            raise DocumentRefused(Status.LOCKED)
        # The lock's CAS stays good for the next change, as if the document had taken it over.
        self[key] = Lock(cas, 0.0)

    def open(self, key: bytes, cas: int) -> bool:
        """Whether this is the CAS of a lock, which is then used up; refuse if another lock or a durable
        write is in the way.
        """
        self._check_prepare(key)
        lock = self._lock(key)
        if lock is None:
            return False
        if cas != lock.cas and self._clock.monotonic() < lock.until:
            raise DocumentRefused(Status.KEY_EEXISTS if cas else Status.LOCKED)
        del self[key]
        return cas == lock.cas
