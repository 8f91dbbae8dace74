"""Work for the executors: a function and as many pieces of work as there are tasks, as one Spark job.

A classic session runs it on an RDD, which has no query to plan: in a round of a few changes, planning would
take a good part of the time. Remote sessions have no RDDs; there it is a data frame whose rows are the
answers.

A callback learns which pieces are done. The tasks of a classic session report it through an accumulator,
which Spark passes on when a task ends; the answers of a remote session come one by one, in the order of their
pieces.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, cast

import pyarrow as pa

from ... import errors
from ...errors import ConnectError, StorageError, TailraceError, UsageError, reason_of
from ...table import contract
from ..archived_modules import forget_packages_in_archives
from ..java_process import lost_java
from ..source.plain_errors import plain_errors

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.accumulators import AccumulatorParam
    from pyspark.sql import SparkSession

__all__ = ["Jobs", "OnDone", "SparkJobs", "Work", "own_error", "python_trouble", "what_failed"]

_DDL = "piece bigint, answer binary"
_ANSWER = pa.schema([("piece", pa.int64()), ("answer", pa.binary())])
_OF_A_GROUP = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_PROBE_ROWS = 4096

Work = Callable[[Any], Any]
OnDone = Callable[[int], None]
"""Called with the number of a piece that is done; from any thread, and twice if its task ran twice."""


class Jobs(Protocol):
    """Runs the tasks of a mirror."""

    @property
    def parallelism(self) -> int:
        """How many tasks run at the same time."""
        ...

    def run(
        self, work: Work, pieces: Sequence[Any], description: str, on_done: OnDone | None = None
    ) -> list[Any]:
        """Run ``work`` on each piece, anywhere; give the answers in any order. All must be picklable."""
        ...

    def is_waiting(self) -> bool:
        """Whether there is a job and none of its tasks has begun, as far as is known; from any thread."""
        ...

    def cancel(self) -> None:
        """End what runs now, from another thread."""
        ...


_RunPieces = set[tuple[int, int]]
"""Pairs of a run and a piece of it."""


class _DonePieces:
    """The tasks' end of the accumulator: which pieces of which run are done."""

    def zero(self, _value: _RunPieces) -> _RunPieces:
        return set()

    def addInPlace(self, done: _RunPieces, more: _RunPieces) -> _RunPieces:
        return done | more


class _Listener(_DonePieces):
    """The driver's end of it. It keeps nothing, but calls the callback of the run."""

    def __init__(self) -> None:
        self.waiting: dict[int, OnDone] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _DonePieces, ()  # for the tasks

    def addInPlace(self, done: _RunPieces, more: _RunPieces) -> _RunPieces:
        for run, number in more:
            on_done = self.waiting.get(run)  # None if the attempt of a lost executor ends late
            if on_done is not None:
                on_done(number)
        return done


@dataclass(frozen=True)
class _Task:
    """What an executor runs; it gets the numbers of its pieces."""

    work: Work
    pieces: tuple[bytes, ...]
    """Each pickled separately, so a task unpickles only its own."""
    run: int = 0
    done: Accumulator[_RunPieces] | None = None

    def answers(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """For an RDD."""
        forget_packages_in_archives()
        for number in numbers:
            with plain_errors(), _errors_of_the_disk():
                answer = pickle.dumps(self.work(pickle.loads(self.pieces[number])))
            if self.done is not None:
                self.done.add({(self.run, number)})
            yield answer

    def batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For ``mapInArrow``."""
        for batch in batches:
            numbers = batch["id"].to_pylist()
            for number, answer in zip(numbers, self.answers(numbers), strict=True):
                yield pa.record_batch([[number], [answer]], schema=_ANSWER)


@contextmanager
def _errors_of_the_disk() -> Iterator[None]:
    """Turn an error of a disk into one of ours: of others people see only the first line, in which Spark
    merely says that there was an error.
    """
    try:
        yield
    except OSError as error:
        file = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        raise StorageError(f"an executor can't read or write: {reason_of(error)}{file}") from error


def what_failed(error: BaseException) -> str:
    """An error as one line. If Spark has wrapped another error, the line is about that one: the last line of
    its traceback, or Java's text from the class name on.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    inner = [match[0] for line in lines if (match := _INNER.match(line))]
    traced = any(line.startswith("Traceback") for line in lines)
    if inner and _WRAPPING.match(lines[0]):
        return (inner[-1] if traced else inner[0]).removeprefix(": ")[:_SHOWN]
    return lines[0][:_SHOWN]


class SparkJobs:
    """Jobs on a Spark session."""

    def __init__(self, spark: SparkSession, tag: str, parallelism: int | None = None) -> None:
        self._spark = spark
        self._tag = tag
        """Marks the jobs, for `cancel` and for people who look at Spark's own pages."""
        self._parallelism = parallelism
        self._runs = count()
        self._groups: list[str] = []
        """Job groups of what runs now."""
        self._listener = _Listener()
        self._done: Accumulator[_RunPieces] | None = None
        self._context: SparkContext | None = None
        with suppress(Exception):  # remote sessions have none
            self._context = spark.sparkContext

    @property
    def parallelism(self) -> int:
        if self._parallelism is None and self._context is not None:
            self._parallelism = max(1, self._context.defaultParallelism)
        if self._parallelism is None:
            from pyspark.sql import functions as sf

            # by default a range has as many partitions as the cluster runs at once, in remote sessions too
            partitions = self._spark.range(_PROBE_ROWS).select(sf.spark_partition_id().alias("partition"))
            self._parallelism = max(1, partitions.distinct().count())
        return self._parallelism

    def run(
        self, work: Work, pieces: Sequence[Any], description: str, on_done: OnDone | None = None
    ) -> list[Any]:
        if not pieces:
            return []
        run = next(self._runs)
        if len(pieces) == 1:
            on_done = None  # there is nothing to tell before all is done
        task = _Task(work, tuple(pickle.dumps(piece) for piece in pieces), run)
        try:
            if self._context is not None:
                answers = self._run_classic(self._context, task, description, on_done)
            else:
                answers = self._run_remote(task, on_done)
        except Exception as error:
            own = own_error(error) or lost_java(error) or python_trouble(error)
            if own is None:
                raise
            raise own from None
        return [pickle.loads(answer) for answer in answers]

    def _run_classic(
        self, context: SparkContext, task: _Task, description: str, on_done: OnDone | None
    ) -> list[bytes]:
        if on_done is not None:
            task = replace(task, done=self._accumulator(context))
            self._listener.waiting[task.run] = on_done
        pieces = len(task.pieces)
        try:
            with self._named(context, f"{self._tag}-{task.run}", description):
                return context.parallelize(range(pieces), pieces).mapPartitions(task.answers).collect()
        finally:
            self._listener.waiting.pop(task.run, None)

    @contextmanager
    def _named(self, context: SparkContext, group: str, description: str) -> Iterator[None]:
        """Mark the jobs of this thread as ours, on Spark's pages and for `cancel`, and undo that afterwards:
        the thread may be a notebook's.
        """
        before = {name: context.getLocalProperty(name) for name in _OF_A_GROUP}
        context.addJobTag(self._tag)
        context.setJobGroup(group, description)
        self._groups.append(group)
        try:
            yield
        finally:
            self._groups.remove(group)
            with suppress(Exception):  # Java may be gone, which is reported elsewhere
                context.removeJobTag(self._tag)
                for name, value in before.items():
                    context.setLocalProperty(name, cast(str, value))

    def _accumulator(self, context: SparkContext) -> Accumulator[_RunPieces]:
        if self._done is None:  # one for all runs, since Spark never frees an accumulator
            self._done = context.accumulator(set(), cast("AccumulatorParam[_RunPieces]", self._listener))
        return self._done

    def is_waiting(self) -> bool:
        context = self._context
        if context is None or not self._groups:
            return False
        try:
            tracker = context.statusTracker()
            for group in list(self._groups):
                for job in tracker.getJobIdsForGroup(group):
                    for number in info.stageIds if (info := tracker.getJobInfo(job)) else ():
                        stage = tracker.getStageInfo(number)
                        if stage is not None and (stage.numActiveTasks or stage.numCompletedTasks):
                            return False
        except Exception:  # noqa: BLE001 - Java may be gone, which is reported elsewhere
            return False
        return True

    def _run_remote(self, task: _Task, on_done: OnDone | None) -> list[bytes]:
        self._spark.addTag(self._tag)
        pieces = len(task.pieces)
        rows = self._spark.range(0, pieces, 1, pieces).mapInArrow(task.batches, _DDL)
        answers = []
        try:
            for row in rows.toLocalIterator():
                answers.append(bytes(row.answer))
                if on_done is not None:
                    on_done(row.piece)
        finally:
            with suppress(Exception):
                self._spark.removeTag(self._tag)
        return answers

    def cancel(self) -> None:
        with suppress(Exception):  # the session may be gone already
            if self._context is not None:
                self._context.cancelJobsWithTag(self._tag)
            else:
                self._spark.interruptTag(self._tag)


_WRAPPING = re.compile("An (exception was thrown from|error occurred while calling)")
_INNER = re.compile(r"(: )?([A-Za-z_][\w$]*\.)*[A-Z]\w*(Error|Exception|Interrupt|Failure): \S.*")
_SHOWN = 300

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
    """The error to raise if Spark's workers have no Python, or one without us; None for other errors."""
    for line in str(error).splitlines():
        if _NO_ANSWER in line or any(words in line for words in _NO_PYTHON):
            kind = ConnectError if _NO_ANSWER in line else UsageError
            return kind(
                f"Spark's workers don't get a Python with Tailrace in it ({line.strip()[:200]}); make the "
                "session with ts.session(), or set PYSPARK_PYTHON to the tailrace-python of an environment "
                "that every machine has, before the session is made"
            )
    return None


_OWN = re.compile(r"(?:^|: )tailrace\.[\w.]*?(\w+): (.+)$")
"""Our error at the start of a line, or after Spark's words about the place."""


def own_error(error: BaseException) -> TailraceError | None:
    """The innermost of our own errors that Spark wrapped, if any; only its text has been kept."""
    if isinstance(error, TailraceError):
        return error
    for line in reversed(str(error).splitlines()):
        match = _OWN.search(line.strip())
        if match is None:
            continue
        class_name, text = match.groups()
        kind = getattr(errors, class_name, None) or getattr(contract, class_name, None)
        if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
            return TailraceError(text)
        try:
            return kind(text)
        except TypeError:  # this class takes facts instead of a text
            return TailraceError(text)
    return None
