"""Work for the executors: a function and as many pieces of work as there are tasks, as one Spark job.

A classic session runs it on an RDD, which has no query to plan: of a round of a few changes that is a good
part. Remote sessions have no RDDs; for these it is a data frame whose rows are the answers.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from ... import errors
from ...errors import ConnectError, TailraceError, UsageError
from ...table import contract
from ..archived_modules import forget_packages_in_archives
from ..java_process import lost_java
from ..source.plain_errors import plain_errors

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["Jobs", "SparkJobs", "own_error", "python_trouble"]

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
    """What an executor runs; it gets the numbers of its pieces."""

    work: Work
    pieces: tuple[bytes, ...]
    """Pickled each: a task opens no other's."""

    def answers(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """For an RDD."""
        forget_packages_in_archives()
        for number in numbers:
            with plain_errors():
                answer = pickle.dumps(self.work(pickle.loads(self.pieces[number])))
            yield answer

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For ``mapInArrow``."""
        for batch in batches:
            for answer in self.answers(batch["id"].to_pylist()):
                yield pa.record_batch([pa.array([answer], pa.binary())], schema=_ANSWER)


class SparkJobs:
    """Jobs on a Spark session."""

    def __init__(self, spark: SparkSession, tag: str, parallelism: int | None = None) -> None:
        self._spark = spark
        self._tag = tag
        """Marks the jobs, for `cancel` and for people who look at Spark's own pages."""
        self._parallelism = parallelism
        self._context: SparkContext | None = None
        with suppress(Exception):  # remote sessions have none
            self._context = spark.sparkContext

    @property
    def parallelism(self) -> int:
        if self._parallelism is None and self._context is not None:
            self._parallelism = max(1, self._context.defaultParallelism)
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
        task = _Task(work, tuple(pickle.dumps(piece) for piece in pieces))
        try:
            if self._context is not None:
                answers = self._run_classic(self._context, task, description)
            else:
                answers = self._run_remote(task)
        except Exception as error:
            own = own_error(error) or lost_java(error) or python_trouble(error)
            if own is None:
                raise
            raise own from None
        return [pickle.loads(answer) for answer in answers]

    def _run_classic(self, context: SparkContext, task: _Task, description: str) -> list[bytes]:
        context.addJobTag(self._tag)
        context.setJobDescription(description)  # of the jobs of this thread, on Spark's pages
        count = len(task.pieces)
        return context.parallelize(range(count), count).mapPartitions(task.answers).collect()

    def _run_remote(self, task: _Task) -> list[bytes]:
        self._spark.addTag(self._tag)
        count = len(task.pieces)
        rows = self._spark.range(0, count, 1, count).mapInArrow(task.batches, _DDL).collect()
        return [bytes(row.answer) for row in rows]

    def cancel(self) -> None:
        with suppress(Exception):  # the session may be gone already
            if self._context is not None:
                self._context.cancelJobsWithTag(self._tag)
            else:
                self._spark.interruptTag(self._tag)


_NO_PYTHON = (
    "Cannot run program",
    "No module named 'tailrace",
    "No module named 'pyarrow",
    "No module named 'pyspark",
    "PYTHON_VERSION_MISMATCH",
)
_NO_ANSWER = "Python worker failed to connect back"
"""A Python that can't start, or one that had no time to: the machine may be busy."""


def python_trouble(error: BaseException) -> TailraceError | None:
    """What to do where Spark's workers have no Python, or one without us; Spark says it in many ways."""
    for line in str(error).splitlines():
        if _NO_ANSWER in line or any(words in line for words in _NO_PYTHON):
            kind = ConnectError if _NO_ANSWER in line else UsageError
            return kind(
                f"Spark's workers don't get a Python with Tailrace in it ({line.strip()[:200]}); make the "
                "session by ts.session(), or set PYSPARK_PYTHON to the tailrace-python of an environment "
                "that every machine has, before the session is made"
            )
    return None


_OWN = re.compile(r"(?:^|: )tailrace\.[\w.]*?(\w+): (.+)$")
"""At the start of a line, or behind what Spark says of the place."""


def own_error(error: BaseException) -> TailraceError | None:
    """The innermost of our own errors that Spark wrapped up, if there is one; it is in the text alone."""
    if isinstance(error, TailraceError):
        return error
    for line in reversed(str(error).splitlines()):
        told = _OWN.search(line.strip())
        if told is None:
            continue
        last, what = told.groups()
        kind = getattr(errors, last, None) or getattr(contract, last, None)
        if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
            return TailraceError(what)
        try:
            return kind(what)
        except TypeError:  # it wants its facts one by one
            return TailraceError(what)
    return None
