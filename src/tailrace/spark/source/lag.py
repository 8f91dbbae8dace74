"""How far a query is behind its bucket, from Spark's own progress reports.

A query's progress names two offsets: the one that it has reached, and the one at which the bucket is. Their
difference, vbucket by vbucket, is the lag in changes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from ...clock import SYSTEM, Clock
from ...errors import TailraceError
from ...model import BehindSince
from .offsets import from_offset

if TYPE_CHECKING:
    from ..rounds.progress import RoundProgress

__all__ = ["Lag", "LagListener", "lag_by_vbucket"]


@dataclass(frozen=True, slots=True)
class Lag:
    """How a query stood when it last reported."""

    query: str
    """Its name, or its id if it has none."""
    batch: int
    rows: int
    """Rows of the last batch."""
    rows_per_second: float
    by_vbucket: Mapping[int, int]
    observed: Mapping[str, Any]
    """The query's observed metrics; for a mirror, all that a commit reports, such as ``rolled_back``."""
    lag_s: float | None = None
    """How long the query has been behind, or how old the rows of a mirror's table are; None if unknown."""

    @property
    def changes(self) -> int:
        """How many changes the query is behind, all vbuckets together."""
        return sum(self.by_vbucket.values())

    @property
    def eta_s(self) -> float | None:
        """Seconds until it has caught up at the rate of the last batch; None if that had no rate."""
        if not self.changes:
            return 0.0
        return self.changes / self.rows_per_second if self.rows_per_second > 0 else None


def _seqnos(offset: str | None) -> dict[int, int]:
    positions = from_offset(json.loads(offset or "null") or {})
    return {vbucket: position.seqno for vbucket, position in positions.items()}


def lag_by_vbucket(end_offset: str | None, latest_offset: str | None) -> dict[int, int]:
    """Changes between two offsets as Spark reports them."""
    end = _seqnos(end_offset)
    return {vbucket: max(0, seqno - end.get(vbucket, 0)) for vbucket, seqno in _seqnos(latest_offset).items()}


class LagListener(StreamingQueryListener):
    """Keeps the `Lag` of every query that reads from Tailrace: ``spark.streams.addListener(LagListener())``.

    ``on_lag`` is called with each `Lag`, in Spark's listener thread. A mirror is not a streaming query, but
    it reports the same figures: ``ts.mirror(…, on_progress=listener.of_mirror("people"))``.
    """

    def __init__(self, on_lag: Callable[[Lag], None] | None = None, *, clock: Clock = SYSTEM) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._lags: dict[str, Lag] = {}
        self._clock = clock
        self._behind: dict[str, BehindSince] = {}

    @property
    def lags(self) -> dict[str, Lag]:
        """The last report of every running query, by the query's run id, and of mirrors by their names."""
        with self._lock:
            return dict(self._lags)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Compute the lag of a batch."""
        progress = event.progress
        if len(progress.sources) != 1:
            return
        try:
            lag = lag_by_vbucket(progress.sources[0].endOffset, progress.sources[0].latestOffset)
        except (TailraceError, ValueError, KeyError, TypeError, AttributeError):
            return  # not a source of ours
        observed = {
            name: value for row in progress.observedMetrics.values() for name, value in row.asDict().items()
        }
        run = str(progress.runId)
        end, latest = (
            _seqnos(offset) for offset in (progress.sources[0].endOffset, progress.sources[0].latestOffset)
        )
        since = self._behind.setdefault(run, BehindSince(self._clock.monotonic()))
        self._keep(
            run,
            Lag(
                progress.name or str(progress.id),
                progress.batchId,
                progress.numInputRows,
                progress.processedRowsPerSecond or 0.0,
                lag,
                observed,
                since.seconds(self._clock.monotonic(), end, latest),
            ),
        )

    def of_mirror(self, name: str) -> Callable[[RoundProgress], None]:
        """A function to pass to a mirror as ``on_progress``, which keeps the mirror's lag under this name."""

        def report(progress: RoundProgress) -> None:
            behind = {**dict.fromkeys(progress.positions, 0), **progress.behind}
            figures = progress.to_json()
            lag = Lag(name, progress.batch, progress.changes, progress.rate, behind, figures, progress.lag_s)
            self._keep(name, lag)

        return report

    def _keep(self, run: str, lag: Lag) -> None:
        with self._lock:
            self._lags[run] = lag
        if self._on_lag is not None:
            self._on_lag(lag)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """The last report still holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query."""
        with self._lock:
            self._lags.pop(str(event.runId), None)
        self._behind.pop(str(event.runId), None)
