"""The asyncio pump: sockets, timers and iterators around the sans-IO policy.

    async with tailrace.connect("couchbase://127.0.0.1/default") as source:
        async for change in source.changes(start="beginning"):
            ...

The connections are read whether or not the application asks for changes: noops are answered and dead servers
noticed while it is busy, and the window bounds what can pile up. But the event loop must keep running:
an application that computes for long between two awaits should use `tailrace.connect_sync`, which has a
thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from .. import __version__
from .. import rng as rng_
from ..connstr import Address, ConnectionString
from ..errors import ConnectError, StoreError, TailraceError, UsageError
from ..history import FailoverLog
from ..keywords import shows_keywords
from ..model import Position
from ..protocol.script import ask
from ..wire.admin import DeregisterTapClient
from .autosave import Autosave
from .catalog import Catalog
from .connection import Connection
from .connections import Connections
from .copy_survey import CopiesOnDisk
from .events import Event
from .groups.reader import GroupAutosave, GroupReader
from .node_questions import NodeQuestions
from .nodes import Nodes
from .options import SourceKeywords, SourceOptions, complete, read_options, resolve, vbucket_numbers
from .portion import Portion, release
from .question_scripts import failover_logs, high_seqnos
from .read_options import End, Start, check_vbuckets
from .resume import Reading
from .rollback_count import RollbackCount
from .srv_records import find_seeds
from .tls import tls_context

__all__ = ["Source", "connect"]

T = TypeVar("T")


@shows_keywords(SourceOptions)
def connect(url: str | ConnectionString, **options: Unpack[SourceKeywords]) -> Source:
    """A source of changes, to be used with ``async with``; `SourceOptions` has the options."""
    return Source(url, SourceOptions.of(options))


class Source:
    """The changes of one bucket, from all nodes that have a part of it. One reading at a time."""

    def __init__(self, where: str | ConnectionString, options: SourceOptions) -> None:
        self.where = resolve(where, options)
        self.options = options = complete(options, self.where)
        self._rng = rng_.source()
        self._group = self._member_of(options)
        self._state = (
            Autosave(options.state_store(self.where.bucket), is_automatic=options.autosave)
            if self._group is None
            else GroupAutosave(self._group, is_automatic=options.autosave)
        )
        self._settings = options.settings()
        self._nodes = Nodes(
            self.where,
            self._settings,
            agent=f"tailrace/{__version__}",
            allow_plain=options.allow_plain,
            retry_for_s=options.retry_for_s,
            rng=self._rng,
            speech=options.speech(),
        )
        self._nodes.on_change = self._turn_soon
        self._catalog = Catalog(
            self.where.bucket,
            scope=options.scope,
            collections=tuple(options.collections),
            include_system=options.include_system,
            include_transactions=options.include_transactions,
        )
        self._reading: Reading | None = None
        self._portion: Portion | None = None
        self._connections = Connections(
            self._nodes,
            tls=tls_context(self.where, options.tls),
            timeout_s=options.connect_timeout_s,
            on_wire=options.on_wire,
            made=self._turn_soon,
            received=self._wake,
            lost=self._disconnected,
            refused=self._lost,
            failed=self._fail,
            is_busy=self._is_busy,
        )
        self._asking = NodeQuestions(
            self._nodes,
            self._connections,
            reading=lambda: self._reading,
            retry_for_s=options.retry_for_s,
            needs_replicas=options.persisted_only,
            turn=self._turn,
            until=self._until,
            wake=self._wake,
        )
        self._error: Exception | None = None
        self._opened = False
        self._closed = False
        self._turning = False
        self._timer: asyncio.TimerHandle | None = None
        self._changes = 0

    def _member_of(self, options: SourceOptions) -> GroupReader | None:
        if options.group_store is None or options.group is None:
            return None
        return GroupReader(
            options.group,
            options.group_store,
            self.where.bucket,
            slot=options.slot(),
            timeout_s=options.group_timeout_s,
            retry_for_s=options.retry_for_s,
            on_change=self._turn_soon,
            on_error=self._fail,
        )

    # life

    async def __aenter__(self) -> Source:
        if self._opened:
            raise UsageError("a source is opened once; make another one with connect() or connect_sync()")
        self._opened = True
        self._loop = asyncio.get_running_loop()
        self._something = asyncio.Event()
        try:
            if self.where.name is not None:
                await self._find_seeds()
            self._turn()
            await self._until(lambda: self._nodes.map is not None and bool(self._nodes.ready()))
        except BaseException:
            await self.close()
            raise
        if self.options.on_open is not None:
            self.options.on_open(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the reading and close all connections; what is not saved stays unsaved."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._group is not None:
            await self._group.leave()
        await self._connections.close()

    # reading

    async def changes(
        self,
        start: Start = "beginning",
        end: End = "forever",
        *,
        vbuckets: Iterable[int] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Every change as an event, in order within its vbucket.

        ``start``: ``"beginning"``, ``"now"``, positions by vbucket, or their JSON. Saved state wins over it.
        ``end``: ``"forever"``, ``"now"`` (what is there at the start), or seqnos by vbucket.
        """
        async with contextlib.aclosing(self.portions(start, end, vbuckets=vbuckets)) as portions:
            async for portion in portions:
                for event in portion.events():
                    yield event

    async def batches(
        self,
        start: Start = "beginning",
        end: End = "forever",
        *,
        vbuckets: Iterable[int] | None = None,
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """The same as Arrow batches, straight from the wire; `columns.batch.SCHEMA` has the columns.

        A batch is delivered when it is full, where a snapshot of one of its vbuckets ends and the next one
        begins, or when nothing more is there. A rollback is a batch of one row with op ``rollback``, in its
        place; a system event one with op ``system``.
        """
        async with contextlib.aclosing(self.portions(start, end, vbuckets=vbuckets)) as portions:
            async for portion in portions:
                for batch in portion.batches(no_value=self.options.no_value):
                    yield batch

    async def portions(
        self,
        start: Start = "beginning",
        end: End = "forever",
        *,
        vbuckets: Iterable[int] | None = None,
    ) -> AsyncGenerator[Portion, None]:
        """What a node sent in one go, for an application that chooses between events and batches.

        Asking for the next portion releases this one.
        """
        reading = await self.begin(start, end, vbuckets=vbuckets)
        try:
            while (portion := await self.next_portion(reading)) is not None:
                yield portion
        finally:
            self.end(reading)

    async def begin(
        self, start: Start = "beginning", end: End = "forever", *, vbuckets: Iterable[int] | None = None
    ) -> Reading:
        """Begin a reading; an earlier one ends."""
        self._check_usable()
        if self._reading is not None:
            self.end(self._reading)
        uuid = "" if self._nodes.map is None else self._nodes.map.uuid
        saved = await self._state.load(uuid)
        wanted = read_options(self.options, start, end, vbuckets)
        check_vbuckets(self.vbucket_count, wanted.vbuckets, wanted.start, wanted.end)
        if (slot := self.options.slot()) is not None and self._group is None:
            wanted = replace(wanted, vbuckets=tuple(slot.vbuckets(self.vbucket_count)))
        self._catalog.renew()
        reading = self._reading = Reading(self._nodes, self._catalog, wanted, saved, rng=self._rng)
        self._turn()
        if self._group is not None:
            is_from_now = wanted.start == "now"
            await self._group.begin(reading, self.vbucket_count, bucket_uuid=uuid, is_from_now=is_from_now)
            self._turn()
        return reading

    def end(self, reading: Reading) -> None:
        """Stop a reading; positions stay as the application has them."""
        if self._portion is not None:
            self._portion.settle()
            # the connection is kept: unacknowledged bytes would stay in its window for ever
            release(self._portion)
            self._portion = None
            self._nodes.patience.came_back(self._loop.time())
        if self._reading is reading and not reading.is_over:
            reading.close()
            if self._group is not None:
                self._group.stop()
            for connection in self._connections.unheeded():
                # nobody wants what it brought any more, so its successor can be dialled
                self._lost(connection.address, connection.lost)
            self._connections.drop_spent()
            self._connections.flush()

    async def next_portion(self, reading: Reading) -> Portion | None:
        """The next portion, or None at the end. The previous one is finished."""
        if self._portion is not None:
            taken, self._portion = self._portion, None
            self._changes += taken.row_count
            self._state.moved()
            reading.finish(taken)
            self._connections.flush()
        while True:
            self._check_usable()
            if self._reading is not reading:
                raise UsageError("this reading has ended because another one began")
            self._something.clear()
            try:
                if self._group is not None and not await self._group.between_portions():
                    continue
                portion = reading.take(self._loop.time())
            except TailraceError as error:
                self._fail(error)
                raise error.bare() from None
            except Exception as error:
                self._fail(error)
                raise
            self._connections.flush()
            if portion is not None:
                if portion.between:
                    self._turn_soon()
                self._portion = portion
            if self._group is None:  # a group saves them itself
                await self._state.save_starts(reading.new_starts())
            if portion is not None:
                return portion
            if self._connections.look():
                continue
            self._decide()
            await self._autosave(reading)
            if reading.finished:
                return None
            if not self._something.is_set():
                await self._something.wait()

    @property
    def is_idle(self) -> bool:
        """Whether nothing more is here: the next change is still on its way, or not made yet."""
        self._connections.look(at_all=True)
        return not self._connections.has_more

    async def pause(self, vbuckets: Iterable[int]) -> None:
        """Stop receiving some vbuckets; `resume` continues exactly there. Only DCP can do that."""
        if self.options.dialect != "dcp":
            raise UsageError(f"{self.options.dialect} can't close a stream, so nothing can be paused")
        self._active().pause(vbucket_numbers(vbuckets))
        self._turn()

    async def resume(self, vbuckets: Iterable[int]) -> None:
        """Go on with vbuckets that were paused."""
        self._active().resume(vbucket_numbers(vbuckets))
        self._turn()

    # positions

    def positions(self) -> dict[int, Position]:
        """What the application has: every event that it was given is at or below these."""
        if self._portion is not None:
            self._portion.settle()
        known = {} if self._reading is None else self._reading.positions()
        if self._group is None:
            return known
        return {vbucket: position for vbucket, position in known.items() if vbucket in self._group.owned}

    @property
    def assigned(self) -> frozenset[int]:
        """The vbuckets that this reader has now; in a group, those assigned to it."""
        if self._group is not None:
            return self._group.owned
        return frozenset() if self._reading is None else frozenset(self._reading.progress)

    def reached_seqnos(self) -> dict[int, int]:
        """By vbucket, the seqno that the application had reached when it last asked for more."""
        return (
            {}
            if self._reading is None
            else {vbucket: position.seqno for vbucket, position in self._reading.positions().items()}
        )

    async def save(self) -> None:
        """Save the last whole snapshot of every vbucket that the application has; raise if that fails."""
        if self._reading is not None:
            if self._portion is not None:
                self._portion.settle()
            await self._state.save(self._reading.to_save(), self._loop.time())

    async def _autosave(self, reading: Reading) -> None:
        """Save when nothing is waiting, and otherwise every second."""
        if self._state.is_wanted and (
            self.is_idle or self._state.is_overdue(self._loop.time()) or reading.finished
        ):
            try:
                await self.save()
            except (StoreError, ConnectError):
                if self._group is None:
                    raise
                self._state.moved()  # the group keeps track of how long its store is away

    # questions

    @property
    def vbucket_count(self) -> int:
        """How many vbuckets the bucket has."""
        self._check_usable()
        assert self._nodes.map is not None
        return self._nodes.map.vbucket_count

    @property
    def bucket_uuid(self) -> str:
        """The bucket's UUID, a new one if it is deleted and created again. Empty if the server gives none."""
        self._check_usable()
        assert self._nodes.map is not None
        return self._nodes.map.uuid

    async def high_seqnos(self, *, reachable_only: bool = False) -> dict[int, int]:
        """The newest seqno of every vbucket; with ``reachable_only``, of those whose nodes answer."""
        seqnos: dict[int, int] = {}
        for answer in await self._asking.everybody(lambda _: high_seqnos(), reachable_only=reachable_only):
            seqnos |= answer
        return dict(sorted(seqnos.items()))

    async def failover_logs(
        self, vbuckets: Iterable[int] | None = None, *, reachable_only: bool = False
    ) -> dict[int, FailoverLog]:
        """The branches of vbuckets, newest first; with ``reachable_only``, of those whose nodes answer."""
        chosen = range(self.vbucket_count) if vbuckets is None else vbucket_numbers(vbuckets)
        check_vbuckets(self.vbucket_count, chosen)
        logs: dict[int, FailoverLog] = {}
        for answer in await self._asking.everybody(
            lambda address: failover_logs(
                [vbucket for vbucket in chosen if self._nodes.address_of(vbucket) == address]
            ),
            reachable_only=reachable_only,
        ):
            logs |= answer
        return dict(sorted(logs.items()))

    def unreachable(self) -> dict[int, str]:
        """The vbuckets that no node can be asked about now, and why."""
        return self._asking.unreachable(range(self.vbucket_count))

    async def persisted_seqnos(self, branches: Mapping[int, int]) -> CopiesOnDisk:
        """Up to which seqno every copy has a branch on disk; ``branches`` are vb_uuids by vbucket.

        For sources with ``persisted_only``, which keep connections to replicas too.
        """
        self._check_usable()
        if not self.options.persisted_only:
            raise UsageError("persisted_seqnos is for sources with persisted_only")
        return await self._asking.copies(branches, patience_s=self.options.replica_patience_s)

    def homes(self) -> dict[int, Address | None]:
        """The node that has each vbucket, by the newest map."""
        return {vbucket: self._nodes.address_of(vbucket) for vbucket in range(self.vbucket_count)}

    async def deregister(self) -> None:
        """Make all nodes forget this TAP reader; otherwise they remember its name for ever."""
        if self.options.dialect != "tap":
            raise UsageError(f"{self.options.dialect} has no readers that a node remembers")
        name = self.options.tap_settings.name or self._settings.name
        await self._asking.everybody(lambda _: ask(DeregisterTapClient(key=name.encode()), "deregister"))

    @property
    def has_collections(self) -> bool:
        """Whether the server supports collections."""
        granted = [link.granted for _, link in self._nodes.links() if link.granted is not None]
        return any(agreed.handshake.collections for agreed in granted)

    @property
    def collection_names(self) -> Mapping[int, tuple[str, str]]:
        """Scope and name of every collection that this source knows, by id."""
        return self._catalog.names.collections

    def stats(self) -> dict[str, Any]:
        """Figures of this source, and why it waits if it does."""
        now = self._loop.time()
        taken_back = RollbackCount() if self._reading is None else self._reading.taken_back
        return {
            "name": self._settings.name,
            "bucket": self.where.bucket,
            "waits_for": self._waits_for(now),
            "changes": self._changes,
            "rollbacks": taken_back.rollbacks,
            "rolled_back_changes": taken_back.changes,
            "lost_connections": self._connections.lost_count,
            "vbuckets": {} if self._reading is None else self._reading.states(),
            **({} if self._group is None else {"group": self._group.stats()}),
            **self._nodes.stats(now),
        }

    def _waits_for(self, now: float) -> str:
        if self._reading is None or self._reading.is_over:
            return "a reading to begin" if self._nodes.map is not None else "the cluster map"
        if self._is_busy() and not self._reading.holds_back:
            return "the application"
        return self._reading.waits_for(now)

    # the pump

    def _turn_soon(self) -> None:
        """Run `_turn` once the current callback has returned."""
        if not self._turning and not self._closed:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Let the policy decide, do what it says, and wake all waiters."""
        self._turning = False
        self._decide()
        self._wake()

    def _wake(self) -> None:
        """Have all waiters look again."""
        self._something.set()

    def _decide(self) -> None:
        if self._closed or self._error is not None:
            return
        now = self._loop.time()
        try:
            if self._reading is not None:
                self._reading.turn(now)
                self._reading.check(now)
            self._nodes.check(now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the application gets it
            self._fail(error)
            return
        for address in self._nodes.to_connect(now):
            self._connections.dial(address)
        if self._nodes.wants_seeds(now):
            self._nodes.begin_lookup(now)
            self._connections.in_background(self._find_seeds())
        for address in self._nodes.to_disconnect():
            self._connections.drop_empty(address)
        self._connections.flush()
        self._arm(now)

    def _arm(self, now: float) -> None:
        times = [self._nodes.next_timer(now), *self._connections.next_timers()]
        if self._reading is not None:
            times.append(self._reading.next_timer())
        due = min((time for time in times if time is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        # data first: if the loop was held up, what has arrived must count before the timer does
        self._connections.look(at_all=True)
        self._connections.handle_timers(self._loop.time())
        self._turn()

    async def _find_seeds(self) -> None:
        """Ask DNS where the cluster is."""
        try:
            seeds = await self._loop.run_in_executor(None, find_seeds, self.where)
        except ConnectError:
            if self._nodes.map is None:
                raise
            return  # the cluster was found before: wait for it
        self._nodes.found_seeds(seeds)

    def _is_busy(self) -> bool:
        """Whether the application has something to do."""
        return self._portion is not None or self._connections.has_more

    def _disconnected(self, connection: Connection, error: Exception) -> None:
        """A connection is gone. What it brought is delivered before the loss is reported."""
        reading = self._reading
        if reading is not None and not reading.is_over and not reading.finished:
            reading.link_closed(connection.address, error)
            self._turn_soon()
        else:
            self._lost(connection.address, error)

    def _lost(self, address: Address, error: Exception | None) -> None:
        """A connection is gone, or could not be made."""
        assert error is not None
        try:
            self._nodes.lost(address, error, self._loop.time())
        except TailraceError as fatal:
            self._fail(fatal)
        self._turn_soon()

    def _fail(self, error: Exception) -> None:
        """An error that no retry can cure: the application gets it."""
        if self._error is None:
            self._error = error
        self._connections.abort()
        self._wake()

    def _check_usable(self) -> None:
        if isinstance(self._error, TailraceError):
            raise self._error.bare()
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UsageError("the source is closed")

    def _active(self) -> Reading:
        if self._reading is None or self._reading.is_over:
            raise UsageError("nothing is being read")
        return self._reading

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._check_usable()
            self._something.clear()
            await self._something.wait()
        self._check_usable()
