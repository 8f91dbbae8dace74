"""Work for the executors: a function and as many pieces of work as there are tasks, as one Spark job.

Nothing here needs more of a session than Spark Connect has, so that a mirror runs on classic sessions and on
remote ones alike.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from ... import errors
from ...errors import TailraceError
from ...table import contract
from ..archived_modules import forget_packages_in_archives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Jobs", "SparkJobs", "own_error"]

_DDL = "answer binary"
_ANSWER = pa.schema([("answer", pa.binary())])
_PROBE_ROWS = 4096

Work = Callable[[Any], Any]


class Jobs(Protocol):
    """Who runs the tasks of a mirror."""

    @property
    def parallelism(self) -> int:
        """How many tasks run at the same time."""
        ...

    def run(self, work: Work, pieces: Sequence[Any], description: str) -> list[Any]:
        """Run ``work`` on each piece, anywhere, and give the answers in any order. Both must be picklable."""
        ...

    def cancel(self) -> None:
        """End what runs now, from another thread."""
        ...


@dataclass(frozen=True)
class _Task:
    """What ``mapInArrow`` runs; the rows that it gets are numbers of pieces."""

    work: Work
    pieces: tuple[Any, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        forget_packages_in_archives()
        for batch in batches:
            for number in batch["id"].to_pylist():
                answer = pickle.dumps(self.work(self.pieces[number]))
                yield pa.record_batch([pa.array([answer], pa.binary())], schema=_ANSWER)


class SparkJobs:
    """Jobs on a Spark session."""

    def __init__(self, spark: SparkSession, tag: str, parallelism: int | None = None) -> None:
        self._spark = spark
        self._tag = tag
        """Marks the jobs, for `cancel` and for people who look at Spark's own pages."""
        self._parallelism = parallelism

    @property
    def parallelism(self) -> int:
        if self._parallelism is None:
            from pyspark.sql import functions as sf

            # a range without a number of partitions has as many as the cluster runs at once, and that is
            # known of remote sessions, too
            partitions = self._spark.range(_PROBE_ROWS).select(sf.spark_partition_id().alias("partition"))
            self._parallelism = max(1, partitions.distinct().count())
        return self._parallelism

    def run(self, work: Work, pieces: Sequence[Any], description: str) -> list[Any]:
        if not pieces:
            return []
        self._describe(description)
        count = len(pieces)
        numbers = self._spark.range(0, count, 1, count)
        try:
            rows = numbers.mapInArrow(_Task(work, tuple(pieces)), _DDL).collect()
        except Exception as error:
            raise own_error(error) or error from error
        return [pickle.loads(row.answer) for row in rows]

    def cancel(self) -> None:
        with suppress(Exception):  # the session may be gone already
            self._spark.interruptTag(self._tag)

    def _describe(self, description: str) -> None:
        """What Spark's pages show of the jobs of this thread."""
        self._spark.addTag(self._tag)
        with suppress(Exception):  # remote sessions have none
            self._spark.sparkContext.setJobDescription(description)


def own_error(error: BaseException) -> TailraceError | None:
    """The innermost of our own errors that Spark wrapped up, if there is one; it is in the text alone."""
    if isinstance(error, TailraceError):
        return error
    for line in reversed(str(error).splitlines()):
        name, colon, what = line.strip().partition(": ")
        if not (colon and name.startswith("tailrace.") and what):
            continue
        last = name.rpartition(".")[2]
        kind = getattr(errors, last, None) or getattr(contract, last, None)
        if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
            return TailraceError(what)
        try:
            return kind(what)
        except TypeError:  # it wants its facts one by one
            return TailraceError(what)
    return None
