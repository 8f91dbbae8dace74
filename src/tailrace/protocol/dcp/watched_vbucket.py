"""A stream's vbucket as the stream last saw it, to notice when it is no longer the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...history import FailoverLog
    from ...store.base import VBucket
    from ..handler import Host

__all__ = ["WatchedVBucket"]


class WatchedVBucket:
    """State, branches and seqno of a vbucket when the stream last looked."""

    __slots__ = ("_stop", "_vbuckets", "high_seqno", "log", "state", "vbucket")

    def __init__(self, vbucket: VBucket, host: Host, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever it is time to look, until `close` is called."""
        self.vbucket = vbucket
        self.state = vbucket.state
        self.log: FailoverLog = vbucket.failover_log
        self.high_seqno = vbucket.high_seqno
        self._vbuckets = host.bucket.vbuckets
        self._stop: Callable[[], None] | None = host.watch(vbucket.id, changed)

    def close(self) -> None:
        """Stop watching, and release the callback.

        Otherwise the two would keep each other in memory until the garbage collector finds them, a thousand
        at a time.
        """
        if self._stop is not None:
            stop, self._stop = self._stop, None
            stop()

    def is_same(self) -> bool:
        """Whether it has only gained changes since the last look."""
        vbucket, before = self.vbucket, self.high_seqno
        self.high_seqno = high_seqno = vbucket.high_seqno
        return (
            high_seqno >= before
            and vbucket.state == self.state
            and (vbucket.failover_log is self.log or vbucket.failover_log == self.log)
            and self._vbuckets[vbucket.id] is vbucket
        )
