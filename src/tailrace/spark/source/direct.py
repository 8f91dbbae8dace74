"""Reading without a spool: executors open streams for their vbuckets themselves.

This is how batch reads work, and streaming queries whose spool is gone after a restart. A stream runs to the
end of the snapshot that holds its last seqno, so a task reads a state that the vbucket really had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ...client.read_options import SeenEnd
from ...columns.row_kinds import ROLLBACK, kind_of, rollback_rows
from ...model import Position
from .feed import open_source, refuse_loss
from .options import parse_options
from .selection import Selection

__all__ = ["DirectPartition", "read_direct"]


class DirectPartition(InputPartition):
    """Ranges of vbuckets: from a position to the snapshot that holds a seqno."""

    def __init__(
        self,
        given: Mapping[str, str],
        ranges: Mapping[int, tuple[Position, int]],
        rollbacks: Mapping[int, Position] | None = None,
        *,
        selection: Selection,
        collections: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(None)
        self.given = dict(given)
        self.ranges = dict(ranges)
        self.rollbacks = dict(rollbacks or {})
        self.selection = selection
        self.collections = collections
        """The collections to stream instead of those of the options; the selection takes no others."""

    def __repr__(self) -> str:
        """Leave out the options: some are secret, and the inherited text shows every attribute."""
        return f"DirectPartition(vbuckets {sorted(self.ranges)})"


def read_direct(partition: DirectPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a partition that its selection takes."""
    selection = partition.selection
    for batch in _received(partition):
        rows = selection.rows_of(batch)
        if rows.num_rows:
            yield selection.columns_of(rows)


def _received(partition: DirectPartition) -> Iterator[pa.RecordBatch]:
    if partition.rollbacks:
        back = sorted(partition.rollbacks.items())
        yield rollback_rows((vbucket, position.vb_uuid, position.seqno) for vbucket, position in back)
    wanted = {
        vbucket: (start, end) for vbucket, (start, end) in partition.ranges.items() if end > start.seqno
    }
    if not wanted:
        return
    options = parse_options(partition.given)
    starts = {vbucket: start for vbucket, (start, _) in wanted.items()}
    ends = SeenEnd({vbucket: end for vbucket, (_, end) in wanted.items()})
    with open_source(options, "spark-read", partition.selection, partition.collections) as source:
        for portion in source.portions(starts, ends, vbuckets=list(wanted)):
            for batch in portion.batches(no_value=source.options.no_value):
                if kind_of(batch) == ROLLBACK:
                    vbucket, seqno = batch["vbucket"][0].as_py(), batch["seqno"][0].as_py()
                    refuse_loss(options, portion.log_of, starts, {vbucket: seqno})
                yield batch
