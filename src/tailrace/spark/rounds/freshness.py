"""How old what the tables show is, in changes and in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from ...table.contract import Table
from .bucket import BucketState

__all__ = ["Freshness"]


class Freshness:
    """Compares the tables of a mirror with states of the bucket."""

    def __init__(self, tables: Sequence[Table], now: float) -> None:
        self._tables = tables
        self.as_of = now
        """The tables have all that the bucket had at this moment."""
        self._unreached: BucketState | None = None

    def lag(self, state: BucketState) -> int:
        """Changes that the bucket had and the table furthest behind has not."""
        stands = [table.current for table in self._tables]
        return sum(
            max(0, high - min(version.position(vbucket).seqno for version in stands))
            for vbucket, high in state.high_seqnos.items()
        )

    def went_back(self, state: BucketState) -> None:
        """What was to be reached before is no longer the bucket's."""
        self._unreached = state

    def reached(self, state: BucketState) -> None:
        """Take note if the tables have come to what the bucket had at some moment."""
        if self._unreached is None:
            self._unreached = state
        while self._unreached is not None and not self.lag(self._unreached):
            self.as_of = max(self.as_of, self._unreached.at)
            self._unreached = None if self._unreached is state else state
