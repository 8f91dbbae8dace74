"""Whether another attempt makes sense, and how long to wait before it.

Rules: docs/spec/header.md#status-codes.
"""

from __future__ import annotations

import random

from ..errors import ConnectError, LoginError, StatusError
from ..wire.codes import Status

__all__ = ["FIRST_S", "MOST_S", "RETRIED", "TEMPORARY", "Backoff", "is_temporary"]

TEMPORARY = frozenset(
    {
        Status.ETMPFAIL,
        Status.EBUSY,
        Status.ENOMEM,
        Status.NOT_INITIALIZED,
        Status.NO_BUCKET,
        Status.BUCKET_PAUSED,
        Status.CONFIG_ONLY,
        Status.RATE_LIMITED_MAX_CONNECTIONS,
        Status.WOULD_THROTTLE,
    }
)
"""The server can't do it now, and may be able to later."""

RETRIED = TEMPORARY | {
    Status.NOT_MY_VBUCKET,
    Status.LOCKED,
    Status.RATE_LIMITED_NETWORK_INGRESS,
    Status.RATE_LIMITED_NETWORK_EGRESS,
    Status.RATE_LIMITED_MAX_COMMANDS,
    Status.SYNC_WRITE_IN_PROGRESS,
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS,
}
"""An operation on a document with one of these answers is sent again, perhaps to another node."""


def is_temporary(error: Exception) -> bool:
    """Whether another attempt may succeed: not after a wrong password or a broken protocol."""
    if isinstance(error, StatusError):
        return error.status in TEMPORARY
    return isinstance(error, ConnectError | OSError) and not isinstance(error, LoginError)


FIRST_S, MOST_S = 0.1, 5.0


class Backoff:
    """Waits that double, each cut by up to half at random so that many clients don't come back together."""

    def __init__(self, rng: random.Random, *, first_s: float = FIRST_S, most_s: float = MOST_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self.attempts = 0

    def next_s(self) -> float:
        """How long to wait before the next attempt."""
        delay_s = min(self._first_s * 2.0 ** min(self.attempts, 30), self._most_s)
        self.attempts += 1
        return delay_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """The last attempt succeeded."""
        self.attempts = 0
