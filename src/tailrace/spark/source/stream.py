"""Spark's stream reader: our reader runs ahead of the micro-batches, and a spool stands between them.

Spark keeps one instance of the reader in a process of its own while the query runs; the reader's thread lives
there. A second instance is made where the query is planned, and pickled copies of it read on the executors:
they get everything through their `InputPartition`. Only the first of the three connects, so only it imports
the client, which takes longer than all that the other two do.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ...crashpoints import crash_point
from ...errors import UsageError
from ...model import Position
from ..archived_modules import forget_packages_in_archives
from .offsets import bucket_of, from_offset, rollbacks_of, to_offset
from .options import Options, parse_options, partition_map
from .plain_errors import plain_errors
from .selection import Selection
from .spool_place import SpoolPlace, open_place, spooled_rows

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ...table.store import TableStore
    from .feed import Feed
    from .spool import Spool, SpoolSegment

__all__ = ["SpooledPartition", "StreamReader"]

POLL_S = 0.05
"""How long a batch waits for its first change; Spark asks again immediately."""

_ENOUGH_BYTES = 256 << 20
"""The default size of a batch of a query that ends: its tasks may hold it in memory."""

_FIRST_LOOKS = 10
"""How often the first batch of such a query looks for that much before it takes less."""

_RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
"""The module that Spark starts as the process in which a stream's reader lives."""


class SpooledPartition(InputPartition):
    """Files of the spool."""

    def __init__(self, files: Sequence[str], store: TableStore | None = None) -> None:
        super().__init__(None)
        self.files = list(files)
        self.store = store


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """``readStream`` of a bucket."""

    def __init__(self, given: Mapping[str, str], schema: StructType | None = None) -> None:
        self._given = dict(given)
        self._schema = schema
        self._options: Options = parse_options(given)
        self._selection = Selection.of(self._options, schema)
        self._feed: Feed | None = None
        self._spool: Spool | None = None
        self._place: SpoolPlace | None = None
        self._initial: dict[str, Any] | None = None
        self._behind: dict[str, int] = {}
        """By offset, the number of the first segment after it."""
        self._ends = False
        """The query ends when it has what the bucket held at its start."""
        self.connecting: Future[Feed] | None = None
        """The feed that is being made before Spark needs it."""
        if _is_runner():  # Spark prepares its first batch for a while before it asks for anything
            from .feed import Feed

            self.connecting = Future()
            make = partial(Feed, self._options, self._selection)
            self._in_background(partial(_keep_promise, self.connecting, make))

    def __reduce__(self) -> tuple[type[StreamReader], tuple[dict[str, str], StructType | None]]:
        return StreamReader, (self._given, self._schema)

    # planning, in the reader's own process

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        if self._initial is None:
            from .feed import check_collections

            with plain_errors():
                check_collections(self._options)
                starting = self._connected().starting_positions(self._options.starting_offsets or "latest")
            self._initial = self._offset(starting)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of a batch, from the options."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The query ends when it has what the bucket holds at this moment."""
        self._ends = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch: as much of the spool as fits, or ``start`` itself if nothing is new."""
        with plain_errors():
            return self._latest_offset(start, limit)

    def _latest_offset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        spool, place = self._running(start)
        place.renew()
        first = self._behind[_text(start)]
        # Spark asks for the next batch when it is done with the one before, but calls `commit` only when
        # there is a next one; and there is none while the segments of the one before fill the spool
        self._release(first)
        max_rows = None if isinstance(limit, ReadAllAvailable) else self._options.max_rows
        max_bytes = None if isinstance(limit, ReadAllAvailable) else self._options.max_bytes
        for look in itertools.count():
            finished = spool.finished  # read first: `take` then sees everything that came before
            segments = spool.take(
                first,
                max_rows=max_rows,
                max_bytes=max_bytes,
                wait_s=POLL_S,
                gather_bytes=self._enough(first, look),
            )
            if segments:
                return self._end_after(self._positions(start), segments)
            if finished or not self._ends:
                break
        return start

    def _enough(self, first: int, look: int) -> int | None:
        """How much a batch should have before it begins; None if it should begin with any change. A batch
        costs about the same whatever is in it, so a query that ends gathers. Its first batch gathers only for
        half a second: more is received while Spark plans it and starts its workers.
        """
        if not self._ends:
            return None
        return _ENOUGH_BYTES if first or look < _FIRST_LOOKS else 1

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the bucket is, for computing the lag."""
        if self._feed is None:
            return None
        with plain_errors():
            return self._offset(self._feed.latest_positions())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The spool's files by partition; without a spool, ranges that the executors read themselves."""
        with plain_errors():
            return self._partitions(start, end)

    def _partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if _text(start) == _text(end):
            return []
        first, last = self._behind.get(_text(start)), self._behind.get(_text(end))
        crash_point("source.after-plan")
        if self._spool is None or self._place is None or first is None or last is None:
            return self._direct_partitions(start, end)
        files: dict[int, list[str]] = {}
        for segment in self._spool.between(first, last):
            for partition, path in segment.files.items():
                files.setdefault(partition, []).append(path)
        return [SpooledPartition(paths, self._place.store) for _, paths in sorted(files.items())]

    def commit(self, end: dict[str, Any]) -> None:
        """Spark is done with everything up to here."""
        last = self._behind.get(_text(end))
        if last is not None:
            self._release(last)

    def _release(self, before: int) -> None:
        if self._spool is not None:
            self._spool.release(before)
            self._behind = {text: number for text, number in self._behind.items() if number >= before}

    def stop(self) -> None:
        """The query is over."""
        if self._spool is not None:
            self._spool.close()
        if self._feed is not None:
            self._feed.close()
        if self._place is not None:
            self._place.remove()

    def _offset(
        self, positions: Mapping[int, Position], rollbacks: Mapping[int, Position] | None = None
    ) -> dict[str, Any]:
        return to_offset(positions, rollbacks, bucket=self._options.bucket)

    def _positions(self, offset: Mapping[str, Any]) -> dict[int, Position]:
        """The positions in an offset of a checkpoint, which may be damaged or another bucket's."""
        try:
            positions = from_offset(offset)
            bucket = bucket_of(offset)
            rollbacks_of(offset)
        except UsageError as error:
            raise UsageError(
                f"the checkpoint is damaged: {error}; give the query a new checkpointLocation, and say "
                "where it begins with startingOffsets"
            ) from None
        if bucket not in (None, self._options.bucket):
            raise UsageError(
                f"the checkpoint is of bucket {bucket!r}, but this query reads {self._options.bucket!r}; "
                "give each query a checkpointLocation of its own"
            )
        return positions

    def _connected(self) -> Feed:
        if self._feed is None:
            from .feed import Feed

            early, self.connecting = self.connecting, None
            self._feed = Feed(self._options, self._selection) if early is None else early.result()
        return self._feed

    def _running(self, start: dict[str, Any]) -> tuple[Spool, SpoolPlace]:
        """The spool and its place, with the reader's thread filling the spool from ``start`` on."""
        if self._spool is None or self._place is None:
            from .spool import Spool, segment_rows

            positions = self._positions(start)
            feed = self._connected()
            self._place = open_place(self._options.spool_dir, self._options.storage_options)
            self._spool = Spool(
                self._place,
                list(self._partition_of().values()),
                self._options.spool_bytes,
                segment_rows=segment_rows(self._options.max_rows),
                batch_bytes=self._options.max_bytes,
                form=self._selection.columns_of,
            )
            self._behind[_text(start)] = 0
            _remove_at_end(self._place)
            deliveries = feed.deliveries(positions, end="now" if self._ends else "forever")
            self._in_background(partial(self._spool.fill, deliveries))
        return self._spool, self._place

    def _in_background(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="tailrace-feed", daemon=True).start()

    def _partition_of(self) -> dict[int, int]:
        return partition_map(self._options, range(self._connected().vbucket_count))

    def _end_after(self, positions: dict[int, Position], segments: Sequence[SpoolSegment]) -> dict[str, Any]:
        rollbacks: dict[int, Position] = {}
        for segment in segments:
            positions.update(segment.positions)
            rollbacks.update(segment.rollbacks)
        end = self._offset(positions, rollbacks)
        self._behind[_text(end)] = segments[-1].number + 1
        return end

    def _direct_partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        from .direct import DirectPartition

        begin, finish, back = self._positions(start), self._positions(end), rollbacks_of(end)
        ranges: dict[int, dict[int, tuple[Position, int]]] = {}
        partition_of = self._partition_of()
        for vbucket, position in finish.items():
            held = back.get(vbucket, begin.get(vbucket, Position.BEGINNING))
            if held != position or vbucket in back:
                ranges.setdefault(partition_of[vbucket], {})[vbucket] = (held, position.seqno)
        return [
            DirectPartition(
                self._given,
                ranges[partition],
                {v: back[v] for v in ranges[partition] if v in back},
                selection=self._selection,
            )
            for partition in sorted(ranges)
        ]

    # reading, on the executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, as they were received."""
        crash_point("source.in-read")
        forget_packages_in_archives()
        with plain_errors():
            yield from self._read(partition)

    def _read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SpooledPartition):
            for name in partition.files:
                yield from spooled_rows(partition.store, name)
            return
        from .direct import DirectPartition, read_direct

        assert isinstance(partition, DirectPartition)
        yield from read_direct(partition)


def _is_runner() -> bool:
    """Whether this is the process of the stream's reader; under another name it only connects later."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", None) == _RUNNER


def _keep_promise(promise: Future[Feed], make: Callable[[], Feed]) -> None:
    """Make the feed of a promise; what goes wrong is raised where the feed is asked for."""
    try:
        promise.set_result(make())
    except BaseException as error:  # noqa: BLE001 - see above
        promise.set_exception(error)


def _text(offset: Mapping[str, Any]) -> str:
    """An offset as text, which is what Spark compares."""
    return json.dumps(offset, separators=(",", ":"))


def _remove_at_end(place: SpoolPlace) -> None:
    """Remove the place on SIGTERM too, with which Spark ends this process more often than with `stop`."""

    def remove(number: int, frame: FrameType | None) -> None:
        place.remove()
        sys.exit(0)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, remove)
