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
from .planning import Range

__all__ = ["Taker", "read_ranges"]

_ENDS = 10
"""How often the end of a vbucket's snapshot is asked for again, where a bucket stops inside of it."""


class Taker(Protocol):
    """Who takes what streams bring."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Rows as they come; of a vbucket that is left out below, any may have come before."""
        ...

    def stand(self, vbucket: int, position: Position) -> None:
        """A vbucket has come to the end of a snapshot; nothing more comes of it."""
        ...

    def refuse(self, vbucket: int, requested: Position) -> None:
        """The bucket does not go on from there: what came of the vbucket does not count."""
        ...

    def hold(self, vbucket: int, why: str) -> None:
        """Not every copy has a vbucket's changes on disk: what came of it does not count."""
        ...

    def fail(self, vbucket: int, why: str) -> None:
        """A vbucket can't be read to the end of a snapshot: what came of it does not count."""
        ...


def read_ranges(source: BlockingSource, ranges: Mapping[int, Range], taker: Taker) -> None:
    """Stream vbuckets, and say of each where it stands or why it does not."""
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
    """Ranges with changes, as neighbours that are streamed together: few enough that what comes of them fits
    into a file, so that the files of a first load don't overlap.
    """

    FIRST_CHANGES = 10_000
    MOST_CHANGES = 40_000
    BYTES = 24 << 20

    def __init__(self, ranges: Mapping[int, Range]) -> None:
        self._ranges = {vbucket: span for vbucket, span in ranges.items() if span.changes}
        self._order = deque(sorted(self._ranges))
        self._rows = 0
        self._bytes = 0

    def saw(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        self._bytes += batch.nbytes

    def next_wave(self) -> dict[int, Range]:
        """One vbucket at least; none if there is none left."""
        wave: dict[int, Range] = {}
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
    source: BlockingSource, left: Mapping[int, Range], taker: Taker, waves: _Waves
) -> dict[int, Range]:
    """Stream; what is left stands inside a snapshot: a bucket need not go on to its end by itself."""
    stands = {vbucket: span.start for vbucket, span in left.items()}
    waited_for, left_out = set(left), set[int]()
    ends = SeenEnd({vbucket: span.end for vbucket, span in left.items()})
    try:
        with closing(source.portions(dict(stands), ends, vbuckets=list(left))) as portions:
            for portion in portions:
                events = [told.event for told in portion.told]
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
    again: dict[int, Range] = {}
    for vbucket in left.keys() - left_out:
        position = stands[vbucket]
        if position.at_snapshot_end:
            taker.stand(vbucket, Position.at(position.vb_uuid, position.seqno))
        else:
            again[vbucket] = Range(position, position.snapshot_end)
    return again
