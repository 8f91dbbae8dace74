"""Spark's micro-batch engine as far as the mirror uses it, in this process: no JVM, no children, no waiting.

The mirror's own code runs unchanged on it: the stream reader with its feed and spool, the rewrite, the
driver's half and `verify`. So a restart costs a few milliseconds, and a test can stand between any two
steps. Calls come in the order in which Spark makes them (see `StreamReader`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from tailrace.spark.source.stream import StreamReader


class Killed(BaseException):
    """The process is gone at this place: nobody catches it, nothing is tidied up."""


class Frame:
    """A DataFrame that lies in partitions of Arrow batches."""

    def __init__(self, partitions: Iterable[Callable[[], Iterable[pa.RecordBatch]]]) -> None:
        self._partitions = list(partitions)

    def mapInArrow(self, function: Callable[..., Iterator[pa.RecordBatch]], _ddl: str) -> Frame:
        sent = pickle.dumps(function)  # as it goes to the executors
        return Frame([lambda part=part: pickle.loads(sent)(iter(part())) for part in self._partitions])  # type: ignore[misc]

    def collect(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(**row)
            for part in self._partitions
            for batch in part()
            for row in batch.to_pylist()
        ]


class Query:
    """A streaming query; it moves only when it is asked to."""

    def __init__(self, options: dict[str, str], apply: Callable[[Any, int], None], *, once: bool) -> None:
        self._reader = StreamReader(options)
        self._apply = apply
        self._batch = 0
        if once:
            self._reader.prepareForTriggerAvailableNow()
        self._start = self._reader.initialOffset()
        self._limit = self._reader.getDefaultReadLimit()

    def step(self) -> bool:
        """One micro-batch, or nothing if nothing is new."""
        end = self._reader.latestOffset(self._start, self._limit)
        if end is self._start:
            return False
        if self._batch:
            self._reader.commit(self._start)
        reader = pickle.loads(pickle.dumps(self._reader))
        partitions = self._reader.partitions(self._start, end)
        self._apply(Frame([lambda part=part: reader.read(part) for part in partitions]), self._batch)  # type: ignore[misc]
        self._batch += 1
        self._start = end
        return True

    def awaitTermination(self) -> None:
        """To the end of a query that has one."""
        while self.step():
            pass

    def stop(self) -> None:
        """Also what is left of a process that was killed: its sockets close, its memory is gone."""
        self._reader.stop()


class _Writer:
    def __init__(self, options: dict[str, str], started: list[Query]) -> None:
        self._options = options
        self._started = started
        self._once = False

    def foreachBatch(self, apply: Callable[[Any, int], None]) -> _Writer:
        self._function = apply
        return self

    def option(self, _name: str, _value: str) -> _Writer:
        return self

    def queryName(self, _name: str) -> _Writer:
        return self

    def trigger(self, *, availableNow: bool = False, processingTime: str = "") -> _Writer:
        self._once = availableNow
        return self

    def start(self) -> Query:
        query = Query(self._options, self._function, once=self._once)
        self._started.append(query)
        return query


class Spark:
    """What `mirror` and `verify` ask of a session."""

    sparkContext = SimpleNamespace(defaultParallelism=3)

    def __init__(self) -> None:
        self.started: list[Query] = []

    @property
    def readStream(self) -> Any:
        found: dict[str, str] = {}

        def options(**given: str) -> Any:
            found.update(given)
            return reader  # type: ignore[has-type]

        frame = SimpleNamespace()
        reader = SimpleNamespace(format=lambda _name: reader, options=options, load=lambda: frame)  # type: ignore[has-type]
        frame.writeStream = _Writer(found, self.started)
        return reader

    def range(self, first: int, last: int, numPartitions: int) -> Frame:
        numbers = [range(first + part, last, numPartitions) for part in range(numPartitions)]
        ids = [pa.record_batch([pa.array(part, pa.int64())], names=["id"]) for part in numbers]
        return Frame([lambda batch=batch: [batch] for batch in ids])  # type: ignore[misc]
