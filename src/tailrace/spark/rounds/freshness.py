"""How far the tables are behind the bucket, in changes and in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...model import Position
from ...table.contract import Table
from .bucket_watch import BucketState
from .progress import Standing

__all__ = ["Freshness", "Stands"]


class Stands:
    """The positions of tables, read once per version because a round asks for them many times."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, dict[int, Position]]] = {}

    def of(self, table: Table) -> Mapping[int, Position]:
        """The positions of a table; a vbucket that is not among them stands at the beginning."""
        read = self._known.get(id(table))
        if read is None or read[0] != table.version:
            read = self._known[id(table)] = (table.version, dict(table.current.positions))
        return read[1]


class Freshness:
    """Compares the tables of a mirror with states of the bucket."""

    def __init__(self, tables: Sequence[Table], stands: Stands, now: float) -> None:
        self._tables = tables
        self._stands = stands
        self.as_of = now
        """The tables have all that the bucket had at this moment."""
        self._unreached: BucketState | None = None

    def lag(self, state: BucketState) -> int:
        """How many changes of the bucket the table furthest behind lacks."""
        return sum(self.behind(state).values())

    def behind(self, state: BucketState) -> dict[int, int]:
        """The same, of each vbucket that is behind."""
        stands = [self._stands.of(table) for table in self._tables]
        behind: dict[int, int] = {}
        for vbucket, high in state.high_seqnos.items():
            for stand in stands:
                if stand.get(vbucket, Position.BEGINNING).seqno < high:
                    least = min(held.get(vbucket, Position.BEGINNING).seqno for held in stands)
                    behind[vbucket] = high - least
                    break
        return behind

    def standing(self, state: BucketState, tables: int) -> Standing:
        """How far the first ``tables`` are behind this state of the bucket."""
        stands = [self._stands.of(table) for table in self._tables[:tables]]
        missing = tuple(
            sum(
                max(0, high - stand.get(vbucket, Position.BEGINNING).seqno)
                for vbucket, high in state.high_seqnos.items()
            )
            for stand in stands
        )
        return Standing(self.as_of, missing)

    def went_back(self, state: BucketState) -> None:
        """Note that vbuckets went back: the state that was to be reached is no longer the bucket's."""
        self._unreached = _whole(state)

    def reached(self, state: BucketState) -> None:
        """Note if the tables now have what the bucket had at the moment of an earlier state."""
        if self._unreached is None:
            self._unreached = _whole(state)
        while self._unreached is not None and not self.lag(self._unreached):
            self.as_of = max(self.as_of, self._unreached.at)
            self._unreached = None if self._unreached is state else _whole(state)


def _whole(state: BucketState) -> BucketState | None:
    """The state, or None if some vbuckets could not be asked: then reaching it proves nothing."""
    return None if state.unasked else state
