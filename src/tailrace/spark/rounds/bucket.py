"""What the driver asks of the bucket before each round, over connections that stay open between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from ...client.blocking import BlockingSource
from ...client.retry import Backoff
from ...clock import SYSTEM, Clock
from ...errors import ConnectError, LoginError
from ...history import FailoverLog
from ...rng import source as dice
from ..source.feed import open_source
from ..source.options import Options

__all__ = ["BucketState", "BucketWatch"]

T = TypeVar("T")


@dataclass(frozen=True)
class BucketState:
    """How far a bucket was at a moment, and on which branches."""

    at: float
    """Of the monotonic clock, before it was asked."""
    high_seqnos: Mapping[int, int]
    failover_logs: Mapping[int, FailoverLog]
    homes: Mapping[int, str]
    """The node of each vbucket; those that nobody has are missing."""
    logs_at: float = 0.0
    """When the failover logs were asked for."""
    has_old_logs: bool = False
    """They are older than the seqnos: good for going on, which the node itself checks once more, and for no
    other decision.
    """


class BucketWatch:
    """The driver's own connections to a bucket."""

    def __init__(
        self,
        options: Options,
        *,
        clock: Clock = SYSTEM,
        wait: Callable[[float], bool],
        on_trouble: Callable[[str], None] = lambda _: None,
        on_open: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``wait`` waits so many seconds, and says whether to give up. ``on_open`` gets the uuid of
        the bucket that a new connection found, and raises if it is the wrong one.
        """
        self._options = options
        self._clock = clock
        self._wait = wait
        self._on_trouble = on_trouble
        self._on_open = on_open
        self._source: BlockingSource | None = None
        self._vbucket_count = 0

    @property
    def vbucket_count(self) -> int:
        """How many vbuckets the bucket has."""
        if not self._vbucket_count:
            self._vbucket_count = self._open().vbucket_count
        return self._vbucket_count

    def high_seqnos(self) -> Mapping[int, int]:
        """The newest seqno of every vbucket."""
        return self._answered(BlockingSource.high_seqnos)

    def look(self) -> BucketState:
        """Ask everything that a plan needs."""
        return self._answered(self._look)

    def held_back(self, state: BucketState, vbuckets: Iterable[int]) -> dict[int, tuple[int, str]]:
        """VBuckets that not all copies have on disk as far as the bucket is: how far all have it, and who is
        last. One with a copy that can't be asked is at 0: nobody knows what it has.
        """
        branches = {vbucket: state.failover_logs[vbucket].newest.vb_uuid for vbucket in vbuckets}
        copies = self._answered(lambda source: source.persisted_seqnos(branches))
        return {
            vbucket: (seqno, copies.slowest[vbucket])
            for vbucket, seqno in copies.seqnos.items()
            if seqno < state.high_seqnos[vbucket]
        }

    def look_again(self, known: BucketState) -> BucketState:
        """Ask how far the bucket is and nothing else: a request to each node instead of one for each
        vbucket. Everything is asked if a vbucket has come of which nothing is known.
        """
        at = self._clock.monotonic()
        high = self.high_seqnos()
        if not high.keys() <= known.failover_logs.keys():
            return self.look()
        return replace(known, at=at, high_seqnos=high, has_old_logs=True)

    def _look(self, source: BlockingSource) -> BucketState:
        at = self._clock.monotonic()
        # logs first: a seqno that is asked for later is never above what its log allows
        logs = source.failover_logs()
        high = source.high_seqnos()
        homes = {vbucket: str(home) for vbucket, home in source.homes().items() if home is not None}
        return BucketState(at, high, logs, homes, logs_at=at)

    def _answered(self, question: Callable[[BlockingSource], T]) -> T:
        """Ask, again and again while the bucket can't be reached, for as long as the options allow."""
        began: float | None = None
        backoff = Backoff(dice())
        while True:
            try:
                return question(self._open())
            except ConnectError as error:
                self.close()
                now = self._clock.monotonic()
                began = now if began is None else began
                if isinstance(error, LoginError) or now - began >= self._options.retry_for_s:
                    raise
                self._on_trouble(f"the bucket can't be reached: {error}")
                if self._wait(backoff.next_s()):
                    raise

    def _open(self) -> BlockingSource:
        if self._source is None:
            source = open_source(self._options, "spark-mirror")
            source.__enter__()
            self._source = source
            self._on_open(source.bucket_uuid)
        return self._source

    def close(self) -> None:
        """Close the connections; they are made again when something is asked."""
        source, self._source = self._source, None
        if source is not None:
            with suppress(Exception):
                source.close()
