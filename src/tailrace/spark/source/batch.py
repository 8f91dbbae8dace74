"""The batch reader: the changes of a bucket between two offsets, in parallel over groups of vbuckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from ...errors import UsageError
from ...model import Position
from ..archived_modules import forget_packages_in_archives
from .direct import DirectPartition, read_direct
from .feed import Feed, check_collections, limited_collections
from .filters import Limits, limits_of
from .options import parse_options, partition_map
from .plain_errors import plain_errors
from .selection import Selection

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

__all__ = ["BatchReader"]


class _FilterPushing:
    """``pushFilters`` for sessions that have it turned on; for all others it seems not to be there.

    Spark refuses a reader with a method of that name unless ``spark.sql.python.filterPushdown.enabled`` is
    set. It looks at the function behind the method, which here is that of a reader without the method.
    """

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    @property
    def __func__(self) -> Any:
        return getattr(DataSourceReader, "pushFilters", None)  # Spark 4.0 has none

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        self._reader.limit(filters)
        return filters  # Spark applies them again to what it gets


class BatchReader(DataSourceReader):
    """``read`` of a bucket."""

    def __init__(self, given: Mapping[str, str], schema: StructType | None = None) -> None:
        self._given = dict(given)
        self._options = parse_options(given)
        if self._options.ending_offsets == "earliest":
            raise UsageError("option endingOffsets is 'earliest', but a read can't end where it begins")
        self._limits = Limits(Selection.of(self._options, schema))
        self.pushFilters = _FilterPushing(self)  # type: ignore[method-assign]

    def limit(self, filters: Iterable[Filter]) -> None:
        """Read no more than what can pass these filters, as far as they can be used."""
        self._limits = limits_of(filters, self._limits.selection)

    def partitions(self) -> Sequence[InputPartition]:
        """Groups of whole vbuckets, with the start and end of each."""
        with plain_errors():
            return self._partitions()

    def _partitions(self) -> list[InputPartition]:
        options, limits = self._options, self._limits
        check_collections(options)
        collections = limited_collections(options, limits.selection)
        feed = Feed(options)
        try:
            chosen = feed.vbuckets()
            if limits.vbuckets is not None:
                chosen = [vbucket for vbucket in chosen if vbucket in limits.vbuckets]
            starts = feed.starting_positions(options.starting_offsets or "earliest")
            starts = {vbucket: starts[vbucket] for vbucket in chosen}
            back = feed.taken_back(starts)
            starts |= back
            ends = self._ends(feed)
            partition_of = partition_map(options, chosen)
        finally:
            feed.close()
        if collections == ():
            starts = {}
        ranges: dict[int, dict[int, tuple[Position, int]]] = {}
        for vbucket, start in starts.items():
            end = ends.get(vbucket, 0)
            if end > start.seqno or vbucket in back:
                ranges.setdefault(partition_of[vbucket], {})[vbucket] = (start, end)
        if not ranges:
            return [DirectPartition(self._given, {}, selection=limits.selection)]
        return [
            DirectPartition(
                self._given,
                group,
                {vbucket: back[vbucket] for vbucket in group if vbucket in back},
                selection=limits.selection,
                collections=collections,
            )
            for _, group in sorted(ranges.items())
        ]

    def _ends(self, feed: Feed) -> dict[int, int]:
        ending = self._options.ending_offsets
        if isinstance(ending, str):
            return feed.high_seqnos()
        return {vbucket: position.seqno for vbucket, position in ending.items()}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition, on an executor."""
        assert isinstance(partition, DirectPartition)
        forget_packages_in_archives()
        with plain_errors():
            yield from read_direct(partition)
