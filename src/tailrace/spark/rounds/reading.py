"""Streams of some vbuckets, each from a position to the end of the snapshot that holds a seqno."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import closing
from typing import Protocol

import pyarrow as pa

from ...client.blocking import BlockingSource
from ...client.events import Flush, Rollback, StreamEnd
from ...client.read_options import SeenEnd
from ...errors import ConnectError, LoginError, NotPersistedYet
from ...model import Position
from .planning import ReadRange

__all__ = ["Taker", "read_ranges"]

_ENDS = 10
"""How often a vbucket is asked for the end of its snapshot if the stream stops inside it."""


class Taker(Protocol):
    """Takes what streams bring."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows as they come; those of a vbucket that is refused, held or failed later don't count."""
        ...

    def stand(self, vbucket: int, position: Position) -> None:
        """Note that a vbucket has come to the end of a snapshot; no more of its rows come."""
        ...

    def refuse(self, vbucket: int, requested: Position) -> None:
        """Note that the bucket does not go on from there; the rows of the vbucket don't count."""
        ...

    def hold(self, vbucket: int, why: str) -> None:
        """Note that some copy does not have a vbucket's changes on disk; its rows don't count."""
        ...

    def fail(self, vbucket: int, why: str) -> None:
        """Note that a vbucket can't be read to the end of a snapshot; its rows don't count."""
        ...


def read_ranges(source: BlockingSource, ranges: Mapping[int, ReadRange], taker: Taker) -> None:
    """Stream vbuckets, and report for each where it stands or why it could not be read."""
    for vbucket, span in ranges.items():
        if not span.changes:
            taker.stand(vbucket, span.start)
    waves = _Waves(ranges)
    while left := waves.next_wave():
        for _ in range(_ENDS):
            if left:
                left = _read_once(source, left, taker, waves)
        for vbucket in left:
            taker.fail(vbucket, f"vbucket {vbucket} does not come to the end of a snapshot")


class _Waves:
    """Ranges with changes, in groups of neighbours that are streamed together: few enough for their rows to
    fit into one file, so the files of a first load don't overlap.
    """

    FIRST_CHANGES = 10_000
    MOST_CHANGES = 40_000
    BYTES = 24 << 20

    def __init__(self, ranges: Mapping[int, ReadRange]) -> None:
        self._ranges = {vbucket: span for vbucket, span in ranges.items() if span.changes}
        self._order = deque(sorted(self._ranges))
        self._rows = 0
        self._bytes = 0

    def saw(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        self._bytes += batch.nbytes

    def next_wave(self) -> dict[int, ReadRange]:
        """The next group, of at least one vbucket; empty if none is left."""
        wave: dict[int, ReadRange] = {}
        room = self._changes()
        while self._order:
            span = self._ranges[self._order[0]]
            if wave and span.changes > room:
                break
            wave[self._order.popleft()] = span
            room -= span.changes
        return wave

    def _changes(self) -> int:
        if not self._rows:
            return self.FIRST_CHANGES
        return min(self.MOST_CHANGES, self.BYTES * self._rows // max(1, self._bytes))


def _read_once(
    source: BlockingSource, left: Mapping[int, ReadRange], taker: Taker, waves: _Waves
) -> dict[int, ReadRange]:
    """Stream once; the ranges of vbuckets that stopped inside a snapshot, which a bucket need not finish."""
    stands = {vbucket: span.start for vbucket, span in left.items()}
    waited_for, left_out = set(left), set[int]()
    ends = SeenEnd({vbucket: span.end for vbucket, span in left.items()})
    try:
        with closing(source.portions(dict(stands), ends, vbuckets=list(left))) as portions:
            for portion in portions:
                events = [placed.event for placed in portion.between]
                back = {event.vbucket for event in events if isinstance(event, Rollback | Flush)}
                back &= waited_for
                for vbucket in back:
                    taker.refuse(vbucket, left[vbucket].start)
                for batch in portion.batches(no_value=source.options.no_value, by_snapshot=False):
                    waves.saw(batch)
                    taker.add(batch)
                stands.update(portion.ends)
                left_out |= back
                waited_for -= back
                waited_for -= {event.vbucket for event in events if isinstance(event, StreamEnd)}
                if back:
                    source.pause(back)
                if left_out and not waited_for:
                    break  # what is paused never comes to an end by itself
    except LoginError:
        raise
    except NotPersistedYet as error:
        for vbucket in waited_for:
            taker.hold(vbucket, str(error))
        left_out |= waited_for
    except ConnectError as error:
        for vbucket in waited_for:
            taker.fail(vbucket, str(error))
        left_out |= waited_for
    again: dict[int, ReadRange] = {}
    for vbucket in left.keys() - left_out:
        position = stands[vbucket]
        if position.at_snapshot_end:
            taker.stand(vbucket, Position.at(position.vb_uuid, position.seqno))
        else:
            again[vbucket] = ReadRange(position, position.snapshot_end)
    return again
