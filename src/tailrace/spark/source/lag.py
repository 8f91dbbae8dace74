"""How far a query is behind its bucket, from what Spark itself reports of it.

A query's progress names two offsets: the one that it has come to, and the one at which the bucket is. Their
difference, vbucket by vbucket, is the lag in changes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from ...errors import TailraceError
from .offsets import from_offset

__all__ = ["Lag", "LagListener", "lag_by_vbucket"]


@dataclass(frozen=True, slots=True)
class Lag:
    """How a query stood when it last reported."""

    query: str
    """Its name, or its id if it has none."""
    batch: int
    rows: int
    """Of the last batch."""
    rows_per_second: float
    by_vbucket: Mapping[int, int]
    observed: Mapping[str, Any]
    """Figures that the query observes, such as ``changes`` and ``rollbacks`` of a mirror."""

    @property
    def changes(self) -> int:
        """How many changes the query is behind, all vbuckets together."""
        return sum(self.by_vbucket.values())

    @property
    def eta_s(self) -> float | None:
        """Seconds until it has caught up at the rate of the last batch; None if that says nothing."""
        if not self.changes:
            return 0.0
        return self.changes / self.rows_per_second if self.rows_per_second > 0 else None


def lag_by_vbucket(end_offset: str | None, latest_offset: str | None) -> dict[int, int]:
    """Changes between two offsets as Spark reports them."""
    end = from_offset(json.loads(end_offset or "null") or {})
    latest = from_offset(json.loads(latest_offset or "null") or {})
    return {
        vbucket: max(0, position.seqno - (end[vbucket].seqno if vbucket in end else 0))
        for vbucket, position in latest.items()
    }


class LagListener(StreamingQueryListener):
    """Keeps the `Lag` of every query that reads from Tailrace: ``spark.streams.addListener(LagListener())``.

    ``on_lag`` is called with each, in Spark's listener thread.
    """

    def __init__(self, on_lag: Callable[[Lag], None] | None = None) -> None:
        self._on_lag = on_lag
        self._lock = threading.Lock()
        self._lags: dict[str, Lag] = {}

    @property
    def lags(self) -> dict[str, Lag]:
        """The last report of every running query, by the query's run id."""
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
        measured = Lag(
            progress.name or str(progress.id),
            progress.batchId,
            progress.numInputRows,
            progress.processedRowsPerSecond or 0.0,
            lag,
            observed,
        )
        with self._lock:
            self._lags[str(progress.runId)] = measured
        if self._on_lag is not None:
            self._on_lag(measured)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """The last report still holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query."""
        with self._lock:
            self._lags.pop(str(event.runId), None)
