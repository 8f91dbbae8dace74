"""What a mirror reports while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...clock import SYSTEM, Clock
from ...model import Position
from .planning import ReadRange, changes_of

__all__ = ["RoundProgress", "RoundUnderway", "Standing", "TableCounts", "TableFigures"]

_MUCH = 10
"""The rate of a round is shown once one in this many of its changes is done: small tasks end first."""
_NO_TASK_S = 5.0
"""A job with no task begun after this long waits for executors."""


@dataclass(frozen=True)
class Standing:
    """How far the tables are behind the bucket."""

    as_of: float
    """The tables have all that the bucket had at this moment, by the monotonic clock."""
    behind: tuple[int, ...]
    """For each table, how many of the changes it lacks that the bucket had when it was last asked."""


@dataclass
class TableCounts:
    """What a round did to a table."""

    changes: int = 0
    rows_written: int = 0
    rows_masked: int = 0
    bytes_written: int = 0
    rows_rolled_back: int = 0
    rescued: int = 0


@dataclass(frozen=True)
class TableFigures:
    """The files and versions of a table, and what the round did to it."""

    table: str
    files: int
    masked_rows: int
    """Dead rows that are still in files, until compaction removes them."""
    undo_versions: int
    """Versions that a rollback can return to."""
    undo_s: float
    """How far back the oldest of them is."""
    version: int = 0
    counts: TableCounts = field(default_factory=TableCounts)


@dataclass(frozen=True)
class RoundProgress:
    """What a round did."""

    batch: int
    """The number of the round in this run."""
    changes: int
    """Changes of documents that went into the tables."""
    rolled_back: tuple[int, ...]
    """VBuckets that went back with the bucket."""
    versions: tuple[int, ...]
    """The versions of the tables."""
    rows_written: int = 0
    rows_masked: int = 0
    bytes_written: int = 0
    rows_rolled_back: int = 0
    """Rows that went with the changes that the bucket took back, and rows that came back in their place."""
    rescued: int = 0
    """Written rows of typed tables in which something does not fit its column."""
    lag_changes: int = 0
    """Changes that the bucket had when it was last asked and the tables don't have."""
    lag_s: float = 0.0
    """The tables show the bucket as it was at most this long ago."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: plan, read, write, schedule (the rest of the job's time), commit, maintain
    (cleaning, and the compaction's commit); and compaction, which ran beside the rounds.
    """
    went_back: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Of vbuckets that went back: the seqno at which they stood, and the one to which they went."""
    behind: Mapping[int, int] = field(default_factory=dict)
    """The changes of ``lag_changes`` by vbucket."""
    positions: Mapping[int, Position] = field(default_factory=dict)
    """The positions of the first table."""
    compacted: str = ""
    """The compaction that was committed in this round, if any."""
    tables: tuple[TableFigures, ...] = ()
    """The figures of the tables after the round."""

    @property
    def rate(self) -> float:
        """Changes a second, over the time spent on the round."""
        spent = sum(spent for name, spent in self.seconds.items() if name != "compaction")
        return self.changes / spent if spent else 0.0

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        report = asdict(self)
        del report["positions"], report["behind"]
        report["went_back"] = {str(number): list(ends) for number, ends in self.went_back.items()}
        report["tables"] = [{**table, **table.pop("counts")} for table in report["tables"]]
        report["lag_s"] = round(self.lag_s, 3)
        report["seconds"] = {name: round(spent, 4) for name, spent in self.seconds.items()}
        report["rolled_back"], report["versions"] = list(self.rolled_back), list(self.versions)
        return report


class RoundUnderway:
    """A round that is not committed yet: which step it is at, and how much of it is done. What a task has
    read counts when the task has ended: Spark reports nothing earlier.
    """

    def __init__(
        self,
        batch: int,
        changes: int,
        later: int = 0,
        clock: Clock = SYSTEM,
        is_waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_waiting`` returns whether no task has begun yet."""
        self.batch = batch
        self.changes = changes
        """How many are to be read, at most."""
        self.later = later
        """Changes that the bucket has and that are left to later rounds."""
        self.step = "plan"
        """plan, go back, read (and write), commit or maintain."""
        self._clock = clock
        self._is_waiting = is_waiting
        self._read_began = self._last_done = clock.monotonic()
        self._pieces: Sequence[Mapping[int, ReadRange]] = ()
        self._done: frozenset[int] = frozenset()

    def read(self, pieces: Sequence[Mapping[int, ReadRange]]) -> None:
        """These are read now; a round whose tables get new columns reads twice."""
        self._read_began = self._last_done = self._clock.monotonic()
        self._done = frozenset()
        self._pieces = pieces
        self.changes = changes_of(pieces)
        self.step = "read"

    def done(self, piece: int) -> None:
        """One of them is read and written; from any thread."""
        self._last_done = self._clock.monotonic()
        self._done |= {piece}

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        pieces, done = self._pieces, self._done
        read = [pieces[number] for number in done if number < len(pieces)]
        changes = changes_of(read)
        took_s = self._last_done - self._read_began
        is_much = 0 < self.changes <= changes * _MUCH
        return {
            "batch": self.batch,
            "step": self.step,
            "changes": changes,
            "changes_planned": self.changes,
            "changes_later": self.later,
            "vbuckets": sum(map(len, read)),
            "vbuckets_planned": sum(map(len, pieces)),
            "tasks": len(read),
            "tasks_planned": len(pieces),
            "rate": round(changes / took_s, 1) if is_much and took_s > 0 else 0.0,
        }

    def __str__(self) -> str:
        now = self.to_json()
        changes, vbuckets = f"{self.changes:,} changes", f"{now['vbuckets_planned']:,} vbuckets"
        match self.step:
            case "plan":
                doing = f"{changes} to read"
            case "go back":
                doing = "vbuckets go back with the bucket"
            case "read" if now["tasks"]:
                rate = f", {now['rate']:,.0f}/s" if now["rate"] else ""
                doing = f"{now['changes']:,} of {changes}, {now['vbuckets']:,} of {vbuckets}{rate}"
            case "read":
                doing = f"reading {changes} of {vbuckets}"
                if self._clock.monotonic() - self._read_began >= _NO_TASK_S and self._is_waiting():
                    doing += "; Spark has not started any task: are there executors?"
            case "commit":
                doing = f"committing {changes}"
            case _:
                doing = "compacting and cleaning"
        later = f"; {self.later:,} are left to later rounds" if self.later else ""
        return f"round {self.batch}: {doing}{later}"
