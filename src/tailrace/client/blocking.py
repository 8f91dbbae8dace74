"""The blocking pump: the same source for programs with threads.

    with tailrace.connect_sync("couchbase://127.0.0.1/default") as source:
        for change in source.changes(start="beginning"):
            ...

The asyncio pump runs in a thread of its own, which keeps the connections alive however long the application
takes over a change. A source is used by one thread at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from ..connstr import Address, ConnectionString
from ..errors import TailraceError, UsageError
from ..history import FailoverLog
from ..keywords import shows_keywords
from ..model import Position
from . import aio
from .copy_survey import CopiesOnDisk
from .events import Event
from .options import SourceKeywords, SourceOptions
from .portion import Portion
from .read_options import End, Start

__all__ = ["BlockingSource", "connect_sync"]

T = TypeVar("T")


@shows_keywords(SourceOptions)
def connect_sync(url: str | ConnectionString, **options: Unpack[SourceKeywords]) -> BlockingSource:
    """A source of changes, to be used with ``with``; `SourceOptions` has the options."""
    return BlockingSource(url, SourceOptions.of(options))


class BlockingSource:
    """The changes of one bucket, from all nodes that have a part of it. One reading at a time."""

    def __init__(self, where: str | ConnectionString, options: SourceOptions) -> None:
        self._source = aio.Source(where, options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def options(self) -> SourceOptions:
        """The options that this source was made with."""
        return self._source.options

    # life

    def __enter__(self) -> BlockingSource:
        if self._thread is not None:
            raise UsageError("the source is open already; make another one with connect_sync()")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tailrace-source", daemon=True)
        self._thread.start()
        try:
            self._await(self._source.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reading and close all connections; what is not saved stays unsaved."""
        if self._running_loop() is not None:
            try:
                self._await(self._source.close())
            finally:
                self._stop()

    def _stop(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        # all in the loop's own thread: the caller's may have a running loop, as in a notebook
        asyncio.run_coroutine_threadsafe(_cancel_the_others(), loop).result()
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The pump's loop, if it is running.

        It is not in a process forked from its own, nor while Python shuts down: the pump's thread is gone or
        stands still then.
        """
        is_running = self._thread is not None and self._thread.is_alive() and not sys.is_finalizing()
        return self._loop if is_running else None

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the pump's thread, and wait for it."""
        loop = self._running_loop()
        if loop is None:
            work.close()
            raise UsageError("the source is closed, or was not opened by 'with'")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise UsageError("the source was closed by another thread") from None
        except TailraceError as error:
            raise error.bare() from None
        except BaseException:
            future.cancel()
            raise

    def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._await(call())

    # reading

    def changes(
        self,
        start: Start = "beginning",
        end: End = "forever",
        *,
        vbuckets: Iterable[int] | None = None,
    ) -> Generator[Event, None, None]:
        """Every change as an event, in order within its vbucket.

        ``start``: ``"beginning"``, ``"now"``, positions by vbucket, or their JSON. Saved state wins over it.
        ``end``: ``"forever"``, ``"now"`` (what is there at the start), or seqnos by vbucket.
        """
        with contextlib.closing(self.portions(start, end, vbuckets=vbuckets)) as portions:
            for portion in portions:
                yield from portion.events()

    def batches(
        self,
        start: Start = "beginning",
        end: End = "forever",
        *,
        vbuckets: Iterable[int] | None = None,
    ) -> Generator[pa.RecordBatch, None, None]:
        """The same as Arrow batches, straight from the wire; `columns.batch.SCHEMA` has the columns.

        A batch is delivered when it is full or when nothing more is there. A rollback is a batch of one row
        with op ``rollback``, in its place; a system event one with op ``system``.
        """
        with contextlib.closing(self.portions(start, end, vbuckets=vbuckets)) as portions:
            for portion in portions:
                yield from portion.batches(no_value=self.options.no_value)

    def portions(
        self,
        start: Start = "beginning",
        end: End = "forever",
        *,
        vbuckets: Iterable[int] | None = None,
    ) -> Generator[Portion, None, None]:
        """What a node sent in one go, for an application that chooses between events and batches.

        Asking for the next portion releases this one.
        """
        reading = self._await(self._source.begin(start, end, vbuckets=vbuckets))
        try:
            while (portion := self._await(self._source.next_portion(reading))) is not None:
                yield portion
        finally:
            if self._running_loop() is not None:
                self._call(lambda: self._source.end(reading))

    @property
    def is_idle(self) -> bool:
        """Whether nothing more is here: the next change is still on its way, or not made yet."""
        return self._call(lambda: self._source.is_idle)

    def pause(self, vbuckets: Iterable[int]) -> None:
        """Stop receiving some vbuckets; `resume` continues exactly there. Only DCP can do that."""
        self._await(self._source.pause(vbuckets))

    def resume(self, vbuckets: Iterable[int]) -> None:
        """Go on with vbuckets that were paused."""
        self._await(self._source.resume(vbuckets))

    # positions and questions

    def positions(self) -> dict[int, Position]:
        """What the application has: every event that it was given is at or below these."""
        return self._call(self._source.positions)

    @property
    def assigned(self) -> frozenset[int]:
        """The vbuckets that this reader has now; in a group, those assigned to it."""
        return self._source.assigned

    def save(self) -> None:
        """Save the last whole snapshot of every vbucket that the application has; raise if that fails."""
        self._await(self._source.save())

    @property
    def vbucket_count(self) -> int:
        """How many vbuckets the bucket has."""
        return self._call(lambda: self._source.vbucket_count)

    @property
    def bucket_uuid(self) -> str:
        """The bucket's UUID, a new one if it is deleted and created again. Empty if the server gives none."""
        return self._call(lambda: self._source.bucket_uuid)

    def high_seqnos(self, *, reachable_only: bool = False) -> dict[int, int]:
        """The newest seqno of every vbucket; with ``reachable_only``, of those whose nodes answer."""
        return self._await(self._source.high_seqnos(reachable_only=reachable_only))

    def failover_logs(
        self, vbuckets: Iterable[int] | None = None, *, reachable_only: bool = False
    ) -> dict[int, FailoverLog]:
        """The branches of vbuckets, newest first; with ``reachable_only``, of those whose nodes answer."""
        return self._await(self._source.failover_logs(vbuckets, reachable_only=reachable_only))

    def unreachable(self) -> dict[int, str]:
        """The vbuckets that no node can be asked about now, and why."""
        return self._call(self._source.unreachable)

    def persisted_seqnos(self, branches: Mapping[int, int]) -> CopiesOnDisk:
        """Same as `Source.persisted_seqnos`."""
        return self._await(self._source.persisted_seqnos(branches))

    def homes(self) -> dict[int, Address | None]:
        """The node that has each vbucket, by the newest map."""
        return self._call(self._source.homes)

    def deregister(self) -> None:
        """Make all nodes forget this TAP reader; otherwise they remember its name for ever."""
        self._await(self._source.deregister())

    @property
    def has_collections(self) -> bool:
        """Whether the server supports collections."""
        return self._call(lambda: self._source.has_collections)

    @property
    def collection_names(self) -> Mapping[int, tuple[str, str]]:
        """Scope and name of every collection that this source knows, by id."""
        return self._call(lambda: dict(self._source.collection_names))

    def stats(self) -> dict[str, Any]:
        """Figures of this source, and why it waits if it does."""
        return self._call(self._source.stats)


async def _cancel_the_others() -> None:
    """Cancel all other tasks: on a stopped loop they would never end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
