"""What a restart of a mirror would do, without doing it and without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...history import FailoverLog, RestartAction
from ...model import Position
from ...table.contract import Table
from .planning import decide

__all__ = ["VBucketForecast", "forecast", "summary"]


@dataclass(frozen=True, slots=True)
class VBucketForecast:
    """What would happen to one vbucket."""

    vbucket: int
    action: RestartAction
    held: Position
    position: Position
    """Where it goes on."""
    version: int | None
    """The version of the table whose rows come back, if any."""
    high_seqno: int

    @property
    def changes(self) -> int:
        """How many seqnos lie ahead."""
        return max(0, self.high_seqno - self.position.seqno)

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "vbucket": self.vbucket,
            "action": str(self.action),
            "seqno": self.held.seqno,
            "vb_uuid": str(self.held.vb_uuid),
            "to_seqno": self.position.seqno,
            "version": self.version,
            "high_seqno": self.high_seqno,
            "changes": self.changes,
        }

    def __str__(self) -> str:
        where = f"vbucket {self.vbucket}: "
        match self.action:
            case RestartAction.RESUME:
                action = f"resume at {self.held.seqno}" if self.held.seqno else "resume, it is empty"
            case RestartAction.BACKFILL:
                action = "backfill"
            case RestartAction.ROLL_BACK:
                action = (
                    f"roll back to {self.position.seqno} (from {self.held.seqno}, version {self.version})"
                )
            case RestartAction.START_OVER:
                action = f"start over (from {self.held.seqno})"
        return f"{where}{action}, {self.changes} to read"


def forecast(
    table: Table,
    logs: Mapping[int, FailoverLog],
    high_seqnos: Mapping[int, int],
    purge_seqnos: Mapping[int, int],
) -> list[VBucketForecast]:
    """What a restart would do, vbucket by vbucket, as far as can be said now."""
    forecasts = []
    for vbucket in sorted(logs):
        high = high_seqnos.get(vbucket, 0)
        decided = decide(table, vbucket, logs[vbucket], high, purge_seqno=purge_seqnos.get(vbucket, 0))
        forecasts.append(
            VBucketForecast(vbucket, decided.action, decided.held, decided.request, decided.version, high)
        )
    return forecasts


def summary(forecasts: list[VBucketForecast]) -> str:
    """One line for people."""
    counts = Counter(str(forecast.action) for forecast in forecasts)
    what = ", ".join(f"{count} {action}" for action, count in sorted(counts.items()))
    changes = sum(forecast.changes for forecast in forecasts)
    return f"{len(forecasts)} vbuckets: {what}; {changes} changes to read"
