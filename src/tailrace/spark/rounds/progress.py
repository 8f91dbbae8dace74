"""What a mirror says of itself while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...model import Position

__all__ = ["RoundProgress", "TableFigures"]


@dataclass(frozen=True)
class TableFigures:
    """How a table is kept."""

    table: str
    files: int
    masked_rows: int
    """Rows that are still in files although nobody sees them: what compaction takes away."""
    undo_versions: int
    """Versions that a rollback can return to."""
    undo_s: float
    """How far back the oldest of them is."""


@dataclass(frozen=True)
class RoundProgress:
    """What a round did."""

    batch: int
    """Its number in this run."""
    changes: int
    """Changes of documents that went into the tables."""
    rolled_back: tuple[int, ...]
    """VBuckets that went back with the bucket."""
    versions: tuple[int, ...]
    """Of the tables."""
    rows_written: int = 0
    rows_masked: int = 0
    bytes_written: int = 0
    rows_rolled_back: int = 0
    """Rows that went with the changes that the bucket took back, and rows that came back in their place."""
    rescued: int = 0
    """Rows of typed tables with something that does not fit, of those that were written."""
    lag_changes: int = 0
    """Changes that the bucket had when it was last asked and the tables have not."""
    lag_s: float = 0.0
    """The tables show the bucket as it was at most so long ago."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: plan, read, write, schedule (what the job took beside these two), commit, maintain
    (cleaning, and the compaction's commit); and compaction, which ran beside the rounds.
    """
    went_back: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Of vbuckets that went back: the seqno at which they stood, and the one to which they went."""
    behind: Mapping[int, int] = field(default_factory=dict)
    """Changes by vbucket of those that the tables have not."""
    positions: Mapping[int, Position] = field(default_factory=dict)
    """Of the first table."""
    compacted: str = ""
    """The compaction that was committed with it, if one was."""
    tables: tuple[TableFigures, ...] = ()
    """How its tables are kept, after it."""

    @property
    def rate(self) -> float:
        """Changes a second, of the time in which something was done."""
        spent = sum(spent for name, spent in self.seconds.items() if name != "compaction")
        return self.changes / spent if spent else 0.0

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        report = asdict(self)
        del report["positions"], report["behind"]
        report["went_back"] = {str(number): list(ends) for number, ends in self.went_back.items()}
        report["tables"] = list(report["tables"])
        report["lag_s"] = round(self.lag_s, 3)
        report["seconds"] = {name: round(spent, 4) for name, spent in self.seconds.items()}
        report["rolled_back"], report["versions"] = list(self.rolled_back), list(self.versions)
        return report
