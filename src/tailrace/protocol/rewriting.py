"""What a replica does to vbuckets as a whole: rolls back, empties, takes over, sets a state.

That takes time: background work may be in the way, and the result has to be on disk before the replica goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .handler import Host

if TYPE_CHECKING:
    from ..store.base import Bucket

__all__ = ["Rewriting"]


class Rewriting:
    """Changes that one connection makes to vbuckets. While one is under way, it takes nothing else."""

    def __init__(self, host: Host, wake: Callable[[], None]) -> None:
        self.is_running = False
        self._host = host
        self._wake = wake
        self._is_cancelled = False

    def begin(self, act: Callable[[Bucket], list[int]], done: Callable[[str | None], None]) -> None:
        """Let ``act`` change vbuckets, which it returns; ``done`` gets what went wrong, or None."""
        self.is_running = True

        def unless_cancelled(bucket: Bucket) -> list[int]:
            return [] if self._is_cancelled else act(bucket)

        def rewritten(failed: str | None) -> None:
            self.is_running = False
            if not self._is_cancelled:
                done(failed)
                self._wake()

        self._host.rewrite(unless_cancelled, rewritten)

    def cancel(self) -> None:
        """The connection is gone. A change that has to wait is dropped: somebody else may have decided by
        then.
        """
        self._is_cancelled = True
