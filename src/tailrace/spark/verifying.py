"""Whether table and bucket are equal, asked on Spark: every group of vbuckets is read and compared by a task.

A task streams its vbuckets from the beginning to where they were when the question was asked, folds the
stream to the last state of each document, and compares that with the table's rows. What the answer is about
is said with it: the position of the table, and the position up to which the bucket was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..model import Position
from .compare import Difference, compare
from .fold import DELETED, TABLE_SCHEMA, fold, table_schema
from .source.feed import open_source
from .source.options import Options, group_of, parse_options
from .table import MirrorTable, read_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Verdict", "verify"]

_DDL = "result string"
_SCHEMA = pa.schema([("result", pa.string())])
_FOLD_ROWS = 200_000


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    differences: tuple[Difference, ...]
    documents: int
    """Live documents of the bucket."""
    rows: int
    """Rows of the table."""
    table_version: int
    table_positions: Mapping[int, Position]
    bucket_seqnos: Mapping[int, int]
    """Up to where the bucket was read."""

    @property
    def equal(self) -> bool:
        """Whether nothing is different."""
        return not self.differences

    @property
    def behind(self) -> int:
        """How many changes the table has not come to."""
        return sum(
            max(0, seqno - self.table_positions.get(vbucket, Position.BEGINNING).seqno)
            for vbucket, seqno in self.bucket_seqnos.items()
        )


@dataclass(frozen=True)
class _Task:
    """What ``mapInArrow`` runs on the executors; the rows that it gets are numbers of groups."""

    given: dict[str, str]
    table_uri: str
    files: tuple[tuple[str, int, int], ...]
    scope: str
    collection: str
    groups: int
    vbucket_count: int
    seqnos: dict[int, int]
    """Of the table, by vbucket."""
    ends: dict[int, int]
    keep_deletes: bool
    storage_options: dict[str, str] | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Compare groups."""
        for batch in batches:
            for group in batch["id"].to_pylist():
                yield pa.record_batch([[json.dumps(self._compare_group(int(group)))]], schema=_SCHEMA)

    def _compare_group(self, group: int) -> dict[str, Any]:
        vbuckets = [
            vbucket
            for vbucket in range(self.vbucket_count)
            if group_of(vbucket, self.groups, self.vbucket_count) == group
        ]
        bucket, ends = self._read_bucket(vbuckets)
        table = self._read_table(vbuckets)
        positions = np.zeros(self.vbucket_count, dtype=np.int64)
        for vbucket in vbuckets:
            positions[vbucket] = self.seqnos.get(vbucket, 0)
        return {
            "differences": [asdict(one) for one in compare(bucket, table, positions)],
            "documents": bucket.num_rows - (pc.sum(bucket[DELETED.name]).as_py() or 0),
            "rows": table.num_rows,
            "ends": ends,
        }

    def _read_bucket(self, vbuckets: list[int]) -> tuple[pa.Table, dict[int, int]]:
        """The last state of each document, deletions included, and up to where that was read."""
        state = table_schema(keep_deletes=True).empty_table()
        ends = {vbucket: self.ends[vbucket] for vbucket in vbuckets if self.ends.get(vbucket)}
        if not ends:
            return state, ends
        waiting: list[pa.RecordBatch] = []
        with open_source(parse_options(self.given), "spark-verify") as source:
            for batch in source.batches("beginning", ends, vbuckets=list(ends)):
                waiting.append(batch)
                if sum(one.num_rows for one in waiting) >= _FOLD_ROWS:
                    state, waiting = self._fold(state, waiting), []
            positions = source.positions()
        state = self._fold(state, waiting) if waiting else state
        return state, {vbucket: positions[vbucket].seqno for vbucket in ends}

    def _fold(self, state: pa.Table, batches: list[pa.RecordBatch]) -> pa.Table:
        rows = pa.Table.from_batches(batches)
        own = pc.and_(pc.equal(rows["scope"], self.scope), pc.equal(rows["collection"], self.collection))
        return fold(state, rows.filter(pc.fill_null(own, False)), keep_deletes=True)

    def _read_table(self, vbuckets: list[int]) -> pa.Table:
        first, last = vbuckets[0], vbuckets[-1]
        files = [path for path, low, high in self.files if low <= last and first <= high]
        schema = table_schema(keep_deletes=self.keep_deletes)
        wanted = pc.field("vbucket").isin(vbuckets)
        rows = read_rows(self.table_uri, files, schema, wanted, storage_options=self.storage_options)
        if self.keep_deletes:
            rows = rows.filter(pc.invert(rows[DELETED.name])).drop_columns([DELETED.name])
        return rows.select(TABLE_SCHEMA.names)


def verify(
    spark: SparkSession,
    options: Mapping[str, str],
    table_uri: str,
    *,
    storage_options: dict[str, str] | None = None,
) -> Verdict:
    """Compare a bucket with its mirror; ``options`` are those of the source."""
    parsed: Options = parse_options(options)
    table = MirrorTable.open(table_uri, storage_options=storage_options)
    source = table.source
    with open_source(parsed, "spark-verify") as client:
        ends = client.high_seqnos()
    groups, vbucket_count = int(source["groups"]), int(source["vbuckets"])
    task = _Task(
        dict(options),
        table.uri,
        tuple((file.path, file.first_vbucket, file.last_vbucket) for file in table.files()),
        source["scope"],
        source["collection"],
        groups,
        vbucket_count,
        {vbucket: position.seqno for vbucket, position in table.current.positions.items()},
        ends,
        DELETED.name in table.schema.names,
        storage_options,
    )
    tasks = max(1, min(groups, spark.sparkContext.defaultParallelism))
    answers = spark.range(0, groups, numPartitions=tasks).mapInArrow(task, _DDL).collect()
    found = [json.loads(answer.result) for answer in answers]
    differences = [Difference(**one) for answer in found for one in answer["differences"]]
    return Verdict(
        tuple(sorted(differences, key=lambda one: (one.vbucket, one.key))),
        sum(answer["documents"] for answer in found),
        sum(answer["rows"] for answer in found),
        table.version,
        dict(table.current.positions),
        {int(vbucket): seqno for answer in found for vbucket, seqno in answer["ends"].items()},
    )
