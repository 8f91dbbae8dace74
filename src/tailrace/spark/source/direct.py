"""Reading without a spool: executors open streams for their vbuckets themselves.

That is how batch reads work, and a stream whose spool is gone after a restart. A stream runs to the end of
the snapshot that holds its last seqno, so what a task reads is a state that the vbucket really had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ...client.bounds import SeenEnd
from ...columns import SCHEMA
from ...model import Position
from .feed import open_source, refuse_loss, signed
from .options import parse_options

__all__ = ["DirectPartition", "read_direct"]


class DirectPartition(InputPartition):
    """Ranges of vbuckets: from a position to the snapshot that holds a seqno."""

    def __init__(
        self,
        given: Mapping[str, str],
        ranges: Mapping[int, tuple[Position, int]],
        rollbacks: Mapping[int, Position] | None = None,
    ) -> None:
        super().__init__(None)
        self.given = dict(given)
        self.ranges = dict(ranges)
        self.rollbacks = dict(rollbacks or {})


def read_direct(partition: DirectPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a partition."""
    if partition.rollbacks:
        yield _rollback_rows(partition.rollbacks)
    wanted = {
        vbucket: (start, end) for vbucket, (start, end) in partition.ranges.items() if end > start.seqno
    }
    if not wanted:
        return
    options = parse_options(partition.given)
    starts = {vbucket: start for vbucket, (start, _) in wanted.items()}
    ends = SeenEnd({vbucket: end for vbucket, (_, end) in wanted.items()})
    with open_source(options, "spark-read") as source:
        for batch in source.batches(starts, ends, vbuckets=list(wanted)):
            if batch.num_rows == 1 and batch["op"][0].as_py() == "rollback":
                refuse_loss(options, source, starts, {batch["vbucket"][0].as_py(): batch["seqno"][0].as_py()})
            yield batch


def _rollback_rows(rollbacks: Mapping[int, Position]) -> pa.RecordBatch:
    rows = [
        {"op": "rollback", "vbucket": vbucket, "vb_uuid": signed(position.vb_uuid), "seqno": position.seqno}
        for vbucket, position in sorted(rollbacks.items())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
