"""The spool: changes that were received and wait for their micro-batch.

A DCP range can't be read twice with the same result: the producer folds repeated changes, and after a
failover it is another range. So changes are received once, written as Arrow files (segments), handed to the
executors as they are, and deleted when Spark has committed the batch. The size of the spool is bounded;
when it is full the reader's thread waits, and with it, through flow control, the producer.

A segment is cut by partition: rows of a vbucket always go to the same one, in order. Deliveries are small,
and a file for each would cost more than its contents, so they are gathered while the planner has enough to
do. If the planner is waiting, they are written immediately, by either of the two threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...model import Position
from .spool_place import SpoolPlace

__all__ = ["FeedDelivery", "Spool", "SpoolSegment", "segment_bytes", "segment_rows"]

SEGMENT_ROWS = 50_000
SEGMENT_BYTES = 64 << 20
"""The most rows, and about the most bytes, that are gathered in memory for a segment."""


def segment_rows(batch_rows: int | None) -> int:
    """How many rows a segment has, so that whole ones fill a batch of at most ``batch_rows``."""
    return SEGMENT_ROWS if batch_rows is None else batch_rows // -(-batch_rows // SEGMENT_ROWS)


def segment_bytes(batch_bytes: int | None, spool_bytes: int) -> int:
    """The same in bytes; a segment is never more than the whole spool may hold."""
    whole = spool_bytes if batch_bytes is None else min(batch_bytes, spool_bytes)
    return whole // max(1, -(-whole // SEGMENT_BYTES))


_RUN_ROWS = 256
"""Runs shorter than this on average are copied together, since every Arrow batch has a fixed cost."""
_JOINED_BYTES = 4 << 20
"""About the most that is copied together: Spark holds a whole batch in memory on both sides of its pipe."""


class FeedDelivery(NamedTuple):
    """What a reader hands over: rows, and where the vbuckets in them stand afterwards."""

    rows: pa.RecordBatch
    positions: Mapping[int, Position]
    rollbacks: Mapping[int, Position] = MappingProxyType({})
    """VBuckets that went back before these rows, and where to."""


@dataclass(frozen=True, slots=True)
class SpoolSegment:
    """Rows of some deliveries, in files."""

    number: int
    rows: int
    size: int
    positions: Mapping[int, Position]
    """VBuckets with changes in it, and where they are after it."""
    rollbacks: Mapping[int, Position]
    files: Mapping[int, str]
    """By partition, as the spool's place names them."""


class Spool:
    """Segments in their place; the reader's thread appends, the planner takes, Spark's commit releases."""

    def __init__(
        self,
        place: SpoolPlace,
        partition_of: Sequence[int],
        limit_bytes: int,
        *,
        segment_rows: int = SEGMENT_ROWS,
        batch_bytes: int | None = None,
        form: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda rows: rows,
    ) -> None:
        """``batch_bytes`` limits a micro-batch; ``form`` turns rows into what is written of them."""
        self._place = place
        self._partition_of = np.asarray(partition_of, dtype=np.int32)
        self._limit_bytes = limit_bytes
        self._form = form
        self._segment_rows = segment_rows
        self._segment_bytes = segment_bytes(batch_bytes, limit_bytes)
        self._segments: deque[SpoolSegment] = deque()
        self._gathered: list[FeedDelivery] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._next = 0
        self._size = 0
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        """Held from taking what was gathered until its segment is there: segments keep the order."""
        self._awaited = False
        self._error: BaseException | None = None
        self._lost = False
        """A segment could not be written: none may follow it."""
        self._closed = False
        self._finished = False

    # the reader's side

    @property
    def held_bytes(self) -> int:
        """The bytes of rows that were gathered and are not written yet."""
        with self._changed:
            return self._gathered_bytes

    def fill(self, deliveries: Iterable[FeedDelivery]) -> None:
        """Append everything that comes; errors are raised in the planner's thread."""
        try:
            for delivery in deliveries:
                self.append(delivery)
                if self._is_over():
                    return
            self.flush()
        except BaseException as error:  # noqa: BLE001 - it is raised again by `take`
            self._fail(error)
        with self._changed:
            self._finished = self._error is None
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Accept nothing after this: the reader must not skip what is missing."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._closed or self._finished or self._error is not None

    def append(self, delivery: FeedDelivery) -> None:
        """Keep a delivery; waits while the spool is full."""
        size = delivery.rows.nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or self._size < self._limit_bytes)
            if self._is_over():
                return
            fits = (
                self._gathered_rows + delivery.rows.num_rows <= self._segment_rows
                and self._gathered_bytes + size <= self._segment_bytes
            )
        if delivery.rollbacks or not fits:  # what went back begins a new segment
            self.flush()
        with self._changed:
            self._gathered.append(delivery)
            self._gathered_rows += delivery.rows.num_rows
            self._gathered_bytes += size
            self._size += size
            is_awaited = self._awaited
        if is_awaited:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        with self._writing:
            with self._changed:
                gathered, rows, size = self._gathered, self._gathered_rows, self._gathered_bytes
                self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0
            if not gathered or self._closed or self._lost:
                return
            try:
                self._write(gathered, rows, size)
            except BaseException as error:
                self._lost = True
                self._fail(error)
                raise

    def _write(self, gathered: Sequence[FeedDelivery], rows: int, held_bytes: int) -> None:
        """Write deliveries, which hold ``held_bytes`` of memory, as a segment."""
        parts: dict[int, list[pa.RecordBatch]] = {}
        for delivery in gathered:
            for partition, part in self._cut(delivery.rows):
                parts.setdefault(partition, []).append(self._form(part))
        files: dict[int, str] = {}
        size = 0
        for partition, batches in parts.items():
            files[partition], written = self._place.write(_joined(batches))
            size += written
        positions: dict[int, Position] = {}
        rollbacks: dict[int, Position] = {}
        for delivery in gathered:
            positions.update(delivery.positions)
            rollbacks.update(delivery.rollbacks)
        with self._changed:
            segment = SpoolSegment(self._next, rows, size, positions, rollbacks, files)
            self._segments.append(segment)
            self._next += 1
            self._size += size - held_bytes
            self._changed.notify_all()

    def _cut(self, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows by partition, in order. A backfill comes in long runs of one vbucket, which are passed on
        without a copy.
        """
        # `to_numpy`, like `pa.array` for the mask, would import pandas: half a second before the first batch
        partitions = self._partition_of[np.from_dlpack(rows["vbucket"])]
        borders = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(partitions)]
        if len(borders) > 2 and len(borders) * _RUN_ROWS > len(partitions):
            for partition in np.unique(partitions).tolist():
                yield partition, rows.filter(_mask(partitions == partition))
        elif len(partitions):
            for first, last in pairwise(borders):
                yield int(partitions[first]), rows.slice(first, last - first)

    # the planner's side

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        with self._changed:
            return self._finished

    def take(
        self,
        after: int,
        *,
        max_rows: int | None,
        max_bytes: int | None,
        wait_s: float,
        gather_bytes: int | None = None,
    ) -> list[SpoolSegment]:
        """The segments from number ``after`` on that fit into a batch, at least one if there is any.

        Waits up to ``wait_s`` for the first one; with ``gather_bytes``, for that much, or as much as a batch
        may have, or half of what the spool may hold. Raises what stopped the reader once everything that
        came before has been taken.
        """

        def is_enough() -> bool:
            later = [segment for segment in self._segments if segment.number >= after]
            size = sum(segment.size for segment in later)
            rows = sum(segment.rows for segment in later)
            return (
                self._size >= self._limit_bytes
                or size >= min(self._limit_bytes // 2, gather_bytes or 0)
                or (max_rows is not None and rows >= max_rows)
                or (max_bytes is not None and size >= max_bytes)
            )

        if gather_bytes is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or is_enough(), timeout=wait_s)
                if not (self._is_over() or is_enough()):
                    return []
        self._flush_for(after)
        with self._changed:
            self._awaited = True
            self._changed.wait_for(lambda: self._is_over() or self._next > after, timeout=wait_s)
            self._awaited = False
            segments: list[SpoolSegment] = []
            rows = size = 0
            for segment in self._segments:
                if segment.number < after:
                    continue
                rows += segment.rows
                size += segment.size
                if segments and (
                    (max_rows is not None and rows > max_rows) or (max_bytes is not None and size > max_bytes)
                ):
                    break
                segments.append(segment)
            if not segments and self._error is not None:
                raise self._error
            return segments

    def _flush_for(self, after: int) -> None:
        """The planner has nothing to do: write what there is."""
        with self._changed:
            has_some = self._next > after
        if not has_some:
            self.flush()

    def between(self, first: int, last: int) -> list[SpoolSegment]:
        """The segments with these numbers, the last one excluded."""
        with self._changed:
            return [segment for segment in self._segments if first <= segment.number < last]

    def release(self, before: int) -> None:
        """Delete the segments below this number."""
        released = []
        with self._changed:
            while self._segments and self._segments[0].number < before:
                segment = self._segments.popleft()
                self._size -= segment.size
                released.append(segment)
            self._changed.notify_all()
        self._delete(released)

    def close(self) -> None:
        """Release the reader's thread and delete everything."""
        with self._changed:
            self._closed = True
            left = list(self._segments)
            self._segments.clear()
            self._gathered.clear()
            self._changed.notify_all()
        with self._writing:  # what is being written would stay behind
            self._delete([*left, *self._segments])

    def _delete(self, segments: Iterable[SpoolSegment]) -> None:
        self._place.delete([name for segment in segments for name in segment.files.values()])


def _mask(chosen: NDArray[np.bool_]) -> pa.Array:
    return pa.Array.from_buffers(
        pa.bool_(), len(chosen), [None, pa.py_buffer(np.packbits(chosen, bitorder="little"))]
    )


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The same rows; if the batches are small, in fewer of them."""
    if len(batches) * _RUN_ROWS <= sum(batch.num_rows for batch in batches):
        return batches
    joined: list[pa.RecordBatch] = []
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if group and size + batch.nbytes > _JOINED_BYTES:
            joined += _as_one(group)
            group, size = [], 0
        group.append(batch)
        size += batch.nbytes
    return joined + _as_one(group)


def _as_one(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return batches if len(batches) < 2 else pa.Table.from_batches(batches).combine_chunks().to_batches()
