"""What a restart of a mirror would do, without doing it and without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..history import Action, FailoverLog, plan
from ..model import Position
from .table import MirrorTable

__all__ = ["VBucketPlan", "plan_mirror", "summary"]


@dataclass(frozen=True, slots=True)
class VBucketPlan:
    """What happens to one vbucket."""

    vbucket: int
    action: Action
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
            case Action.RESUME:
                what = f"resume at {self.held.seqno}" if self.held.seqno else "resume, it is empty"
            case Action.BACKFILL:
                what = "backfill"
            case Action.ROLL_BACK:
                what = f"roll back to {self.position.seqno} (from {self.held.seqno}, version {self.version})"
            case Action.START_OVER:
                what = f"start over (from {self.held.seqno})"
        return f"{where}{what}, {self.changes} to read"


def plan_mirror(
    table: MirrorTable,
    logs: Mapping[int, FailoverLog],
    high_seqnos: Mapping[int, int],
    purge_seqnos: Mapping[int, int],
) -> list[VBucketPlan]:
    """What a restart would do, vbucket by vbucket, as far as can be said now."""
    found = []
    for vbucket in sorted(logs):
        held = table.current.position(vbucket)
        ways_back = list(table.lineage(vbucket))
        decided = plan(
            held,
            None,
            producer_log=logs[vbucket],
            high_seqno=high_seqnos.get(vbucket, 0),
            purge_seqno=purge_seqnos.get(vbucket, 0),
            earlier=[position for _, position in ways_back],
        )
        version = next((number for number, position in ways_back if position == decided.base), None)
        found.append(
            VBucketPlan(
                vbucket,
                decided.action,
                held,
                decided.request,
                version if decided.action is Action.ROLL_BACK else None,
                high_seqnos.get(vbucket, 0),
            )
        )
    return found


def summary(plans: list[VBucketPlan]) -> str:
    """One line for people."""
    counts = Counter(str(one.action) for one in plans)
    what = ", ".join(f"{count} {action}" for action, count in sorted(counts.items()))
    return f"{len(plans)} vbuckets: {what}; {sum(one.changes for one in plans)} changes to read"
