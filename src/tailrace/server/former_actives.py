"""Replicas that were the active a moment ago, and give readers no stream for a while.

When a vbucket has moved, its readers come back for it before they have the new map. A replica would give them
a stream, and they would stay there, lagging behind the active, for ever.
"""

from __future__ import annotations

from ..clock import Clock
from ..store.base import Bucket
from ..wire.codes import VBucketState

__all__ = ["FormerActives"]


class FormerActives:
    """The former actives of a bucket."""

    def __init__(self, store: Bucket, clock: Clock, silence_s: float) -> None:
        self._store = store
        self._clock = clock
        self._silence_s = silence_s
        self._read: set[int] = set()
        """VBuckets that somebody read while they were active, and may come back for."""
        self._stepped_down_at: dict[int, float] = {}

    def stream_opened(self, vbucket: int) -> None:
        """Somebody reads a vbucket."""
        if self._state(vbucket) == VBucketState.ACTIVE:
            self._read.add(vbucket)

    def vbucket_changed(self, vbucket: int) -> None:
        """A vbucket was created, deleted or changed its state."""
        state = self._state(vbucket)
        if state == VBucketState.ACTIVE:
            self._stepped_down_at.pop(vbucket, None)
        elif state == VBucketState.REPLICA and vbucket in self._read:
            # if it is dead in between, as in a takeover, it is silent anyway
            self._read.discard(vbucket)
            self._stepped_down_at[vbucket] = self._clock.monotonic()

    def _state(self, vbucket: int) -> int | None:
        stored = self._store.vbuckets[vbucket]
        return None if stored is None else stored.state

    def is_silent(self, vbucket: int) -> bool:
        """Whether readers have to look for the new active first."""
        since = self._stepped_down_at.get(vbucket)
        if since is None:
            return False
        if self._clock.monotonic() - since < self._silence_s:
            return True
        del self._stepped_down_at[vbucket]
        return False
