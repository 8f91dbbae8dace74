"""What one run of `changes()` or `batches()` reads: from where, up to where, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..model import Position

__all__ = ["End", "ReadOptions", "SeenEnd", "Start", "check_vbuckets"]

Start = str | Mapping[int, Position]
"""``beginning``, ``now``, or where to start in each vbucket (those left out start at the beginning)."""
End = str | Mapping[int, int]
"""``forever``, ``now``, or the seqno at which each vbucket ends (those left out are not read)."""


def check_vbuckets(count: int, *named: Start | End | Iterable[int] | None) -> None:
    """Raise `UsageError` if what limits a reading names a vbucket that the bucket does not have."""
    for limit in named:
        if limit is None or isinstance(limit, str):
            continue
        if unknown := [vbucket for vbucket in limit if not 0 <= vbucket < count]:
            raise UsageError(f"there is no vbucket {unknown[0]}, the last is {count - 1}")


class SeenEnd(dict[int, int]):
    """Seqnos that the bucket had; where changes were taken back since, the reading ends at what is left."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one run."""

    start: Start = "beginning"
    end: End = "forever"
    vbuckets: tuple[int, ...] | None = None
    retry_for_s: float = 60.0
    persisted_only: bool = False
    """Hold changes back until all copies have them on disk, so that a failover can't take them back."""
    replica_patience_s: float | None = None
    """How long ``persisted_only`` waits for a replica that can't be reached; None: while the map names it."""
    persisted_timeout_s: float | None = None
    """How long changes may be held back before that is an error; None: for ever."""
    rollback_points: Callable[[int], Iterable[int | Position]] | None = None
    """The only seqnos of a vbucket that the application can go back to."""
    is_shared: bool = False
    """A group decides, again and again, which vbuckets are read; the reading begins with none."""

    def __post_init__(self) -> None:
        if isinstance(self.start, str) and self.start not in ("beginning", "now"):
            raise UsageError(f"a reading starts at the beginning, now or at positions, not at {self.start!r}")
        if isinstance(self.end, str) and self.end not in ("forever", "now"):
            raise UsageError(f"a reading ends now, at seqnos or never (forever), not at {self.end!r}")
