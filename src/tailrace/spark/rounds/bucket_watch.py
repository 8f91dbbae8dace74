"""What the driver asks of the bucket before each round, over connections that stay open between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...client.blocking import BlockingSource
from ...client.copy_survey import counted
from ...client.retry import Backoff
from ...clock import SYSTEM, Clock
from ...errors import ConnectError, LoginError, OutOfReach
from ...history import FailoverLog
from ...rng import source as dice
from ..source.feed import open_source
from ..source.options import Options

__all__ = ["BucketState", "BucketWatch", "UnaskedVBuckets"]

T = TypeVar("T")


@dataclass(frozen=True)
class BucketState:
    """The seqnos and branches of a bucket at a moment."""

    at: float
    """The time of the monotonic clock before it was asked."""
    high_seqnos: Mapping[int, int]
    failover_logs: Mapping[int, FailoverLog]
    homes: Mapping[int, str]
    """The node of each vbucket; vbuckets without a node are missing."""
    logs_at: float = 0.0
    """When the failover logs were asked for."""
    unasked: Mapping[int, str] = field(default_factory=dict)
    """VBuckets whose node could not be asked, and why: nothing is known of them, and they wait."""
    has_old_logs: bool = False
    """The failover logs are older than the seqnos: good for going on, which the node itself checks again, and
    for no other decision.
    """


class UnaskedVBuckets:
    """VBuckets that wait because their node can't be asked: reports it when that lasts, and gives up."""

    SAY_AFTER_S, SAY_EVERY_S = 3.0, 60.0

    def __init__(self, retry_for_s: float, on_trouble: Callable[[str], None]) -> None:
        self._retry_for_s = retry_for_s
        self._on_trouble = on_trouble
        self._since: dict[int, float] = {}
        self._say_at = 0.0

    def since(self) -> float | None:
        """Since when the first of them can't be asked."""
        return min(self._since.values(), default=None)

    def note(self, unasked: Mapping[int, str], now: float) -> None:
        """Note which vbuckets can't be asked, and why; `OutOfReach` if that lasts too long."""
        if not self._since:
            self._say_at = now + self.SAY_AFTER_S
        self._since = {vbucket: self._since.get(vbucket, now) for vbucket in unasked}
        for vbucket, since in self._since.items():
            if now - since >= self._retry_for_s:
                raise OutOfReach(
                    f"vbucket {vbucket} can't be read for {self._retry_for_s:g} s: {unasked[vbucket]}"
                )
        if unasked and now >= self._say_at:
            self._say_at = now + self.SAY_EVERY_S
            self._on_trouble(f"continues without vbuckets that can't be read; {counted(unasked)}")


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
        """``wait`` waits for some seconds and returns whether to give up. ``on_open`` gets the uuid of
        the bucket that a new connection found, and raises if it is the wrong one.
        """
        self._options = options
        self._clock = clock
        self._wait = wait
        self._on_trouble = on_trouble
        self._on_open = on_open
        self._source: BlockingSource | None = None
        self._silent_since: float | None = None
        self._waiting = UnaskedVBuckets(options.retry_for_s, on_trouble)

    def look(self) -> BucketState:
        """Ask the nodes that can be reached for everything that a plan needs; `OutOfReach` if a vbucket's
        node could not be reached for too long.
        """
        return self._noted(self._answered(self._look))

    def held_back(self, state: BucketState, vbuckets: Iterable[int]) -> dict[int, tuple[int, str]]:
        """VBuckets whose newest changes some copy does not have on disk: the seqno that all copies have, and
        which copy is last. If a copy can't be asked, the seqno is 0: what it has is not known.
        """
        branches = {vbucket: state.failover_logs[vbucket].newest.vb_uuid for vbucket in vbuckets}
        copies = self._answered(lambda source: source.persisted_seqnos(branches))
        return {
            vbucket: (seqno, copies.slowest[vbucket])
            for vbucket, seqno in copies.seqnos.items()
            if seqno < state.high_seqnos[vbucket]
        }

    def look_again(self, known: BucketState) -> BucketState:
        """Ask for the high seqnos only: one request per node instead of one per vbucket. Asks for everything
        if there is a vbucket of which nothing is known.
        """
        at = self._clock.monotonic()
        high, unasked = self._answered(self._seqnos)
        if not high.keys() <= known.failover_logs.keys():
            return self.look()
        return self._noted(replace(known, at=at, high_seqnos=high, unasked=unasked, has_old_logs=True))

    def _look(self, source: BlockingSource) -> BucketState:
        at = self._clock.monotonic()
        # logs first: they are then never newer than the seqnos
        logs = source.failover_logs(reachable_only=True)
        high, unasked = self._seqnos(source, logs)
        homes = {vbucket: str(home) for vbucket, home in source.homes().items() if home is not None}
        return BucketState(at, high, logs, homes, logs_at=at, unasked=unasked)

    def _seqnos(
        self, source: BlockingSource, logs: Mapping[int, FailoverLog] | None = None
    ) -> tuple[dict[int, int], dict[int, str]]:
        """The high seqnos of vbuckets that can be asked, and why the others can't; with ``logs``, a vbucket
        without a log counts among the others.
        """
        high = source.high_seqnos(reachable_only=True)
        if logs is not None:
            high = {vbucket: seqno for vbucket, seqno in high.items() if vbucket in logs}
        unasked = [vbucket for vbucket in range(source.vbucket_count) if vbucket not in high]
        why = source.unreachable() if unasked else {}
        return high, {vbucket: why.get(vbucket, "its node does not have it yet") for vbucket in unasked}

    def _noted(self, state: BucketState) -> BucketState:
        self._waiting.note(state.unasked, self._clock.monotonic())
        return state

    def _answered(self, question: Callable[[BlockingSource], T]) -> T:
        """Ask, again and again while the bucket can't be reached, for as long as the options allow."""
        backoff = Backoff(dice())
        while True:
            is_new = self._source is None
            try:
                answer = question(self._open())
            except ConnectError as error:
                self.close()
                now = self._clock.monotonic()
                if self._silent_since is None:
                    since = self._waiting.since()
                    self._silent_since = now if since is None else since
                if isinstance(error, LoginError):
                    raise
                # a source that gave up may have known old nodes only: try the seeds once more
                if is_new and now - self._silent_since >= self._options.retry_for_s:
                    raise OutOfReach(str(error)) from None
                self._on_trouble(f"the bucket can't be reached: {error}")
                if self._wait(backoff.next_s()):
                    raise
            else:
                self._silent_since = None
                return answer

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
