"""The batch reader: the changes of a bucket between two offsets, in parallel over groups of vbuckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from ...errors import UsageError
from ...model import Position
from ..archived_modules import forget_packages_in_archives
from .direct import DirectPartition, read_direct
from .feed import Feed
from .options import parse_options, partition_map

__all__ = ["BatchReader"]


class BatchReader(DataSourceReader):
    """``read`` of a bucket."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = dict(given)
        self._options = parse_options(given)
        if self._options.ending_offsets == "earliest":
            raise UsageError("option endingOffsets is 'earliest', but a read can't end where it begins")

    def partitions(self) -> Sequence[InputPartition]:
        """Groups of whole vbuckets, with where each begins and ends."""
        feed = Feed(self._options)
        try:
            starts = feed.starting_positions(self._options.starting_offsets or "earliest")
            back = feed.taken_back(starts)
            starts |= back
            ends = self._ends(feed)
            partition_of = partition_map(self._options, feed.vbucket_count)
        finally:
            feed.close()
        ranges: dict[int, dict[int, tuple[Position, int]]] = {}
        for vbucket, start in starts.items():
            end = ends.get(vbucket, 0)
            if end > start.seqno or vbucket in back:
                ranges.setdefault(partition_of[vbucket], {})[vbucket] = (start, end)
        if not ranges:
            return [DirectPartition(self._given, {})]
        return [
            DirectPartition(self._given, own, {vbucket: back[vbucket] for vbucket in own if vbucket in back})
            for _, own in sorted(ranges.items())
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
        yield from read_direct(partition)
