"""A real node in a thread of this process, with methods to make things go wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import ssl
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any, Protocol, TypeVar
from zlib import crc32

from ..clock import SYSTEM, Clock
from ..errors import StoreError, UsageError
from ..files import DiskFiles, Files, MemoryFiles
from ..keywords import check_values
from ..protocol.sasl import Users
from ..server.aio import Server, ServerConnection, listen, new_loop
from ..server.bucket import ServedBucket
from ..server.document_values import checked_value, split_document, tombstone_value
from ..server.node import Node
from ..server.settings import Settings
from ..server.upstream import ReplicationSource, Upstream
from ..store.base import Compaction, Job, VBucket, Written
from ..store.engine import Engine
from ..store.format import StoredDocument
from ..wire.codes import AddStreamFlag, Datatype, VBucketState

__all__ = ["RunningNode"]

T = TypeVar("T")


class ProducerAddress(Protocol):
    """What a node can receive changes from: a `RunningNode`, or whatever else listens there."""

    host: str
    port: int


class RunningNode:
    """A node on a socket of 127.0.0.1, from ``with`` to the end of its block.

    Documents live in memory that survives `kill` and `restart` as a disk would: what was not flushed is lost.
    With ``data`` they live in that directory. ``users`` maps names to passwords; without any, no login is
    needed. ``settings`` are those of ``tailrace serve --set``.
    """

    def __init__(
        self,
        vbuckets: int = 16,
        *,
        bucket: str = "default",
        buckets: Iterable[str] = (),
        data: str | Path | None = None,
        users: Mapping[str, str] | None = None,
        settings: Mapping[str, str | bool | int | float] | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        if type(vbuckets) is not int or not 1 <= vbuckets <= 1024 or vbuckets & (vbuckets - 1):
            raise UsageError(f"vbuckets must be a power of two from 1 to 1024, not {vbuckets!r}")
        given: dict[str, Any] = {"bucket": bucket, "data": data, "users": users, "tls": tls}
        check_values(RunningNode.__init__, given | {"buckets": buckets, "settings": settings})
        names = (bucket, *buckets)
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"a bucket's name must be text, not {name!r}")
        self.vbuckets = vbuckets
        self.bucket = bucket
        self.host = "127.0.0.1"
        self.port = 0
        self.tls_port: int | None = None
        self.settings = Settings.parse(f"{name}={value}" for name, value in (settings or {}).items())
        self.files: Files = MemoryFiles() if data is None else DiskFiles(data)
        self._buckets = names
        self._users = dict(users or {})
        self._tls = tls
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._kept: dict[int, socket.socket] = {}
        weakref.finalize(self, _let_go, self._kept)

    @property
    def url(self) -> str:
        """Its connection string."""
        return f"couchbase://{self.host}:{self.port}/{self.bucket}"

    # life

    def __enter__(self) -> RunningNode:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        _let_go(self._kept)

    def start(self) -> None:
        """Open the store and serve it, on the same port as before if it ran already."""
        if self._thread is not None:
            return
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="tailrace-node", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException:
            self._thread.join()
            self._thread = None
            raise

    def stop(self) -> None:
        """A clean stop."""
        self._end(lambda server: server.stop())

    def kill(self) -> None:
        """Stop the node as SIGKILL would: connections break, and what is not on disk is lost."""
        self._end(lambda server: server.kill())

    def restart(self) -> None:
        """A clean stop and a new start, on the same port and data."""
        self.stop()
        self.start()

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        loop = new_loop()
        try:
            try:
                loop.run_until_complete(self._start(loop))
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                ready.set_exception(error)
                return
            ready.set_result(None)
            server = self._server
            loop.run_forever()
            loop.run_until_complete(_close_late(server))
        finally:
            loop.close()

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        store_settings = self.settings.for_store()
        store_settings.tombstone_value = tombstone_value
        engine = Engine(files=self.files, settings=store_settings, clock=self._clock)
        try:
            for name in self._buckets:
                if name not in engine.buckets:
                    engine.create_bucket(name, self.vbuckets)
            server = _Server(
                lambda run_job: Node(
                    engine, users=self._users, settings=self.settings, clock=self._clock, run_job=run_job
                )
            )
            sockets = self._listen(self.port)
            tls_sockets = self._listen(self.tls_port or 0) if self._tls is not None else None
        except BaseException:
            engine.crash()
            raise
        await server.start(sockets, tls_sockets, self._tls)
        self._loop, self._server = loop, server
        self.port = server.node.address.port
        self.tls_port = server.node.address.tls_port

    def _listen(self, port: int) -> list[socket.socket]:
        """Listen on a port and keep it, even while the node is stopped.

        A socket that is bound and does not listen keeps the port: Linux never gives it to a process that asks
        for any free port, but lets us bind it by its number.
        """
        if sys.platform == "linux" and port not in self._kept:
            keeper = socket.socket()
            try:
                keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                keeper.bind((self.host, port))
            except OSError:
                keeper.close()
                raise
            port = keeper.getsockname()[1]
            self._kept[port] = keeper
        return listen(self.host, port)

    def _end(self, how: Callable[[_Server], Any]) -> None:
        if self._thread is None or self._loop is None or self._server is None:
            return
        server, loop = self._server, self._loop
        future = asyncio.run_coroutine_threadsafe(how(server), loop)
        try:
            future.result()
        finally:
            self._server = self._loop = None
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            self._thread = None

    def call(self, function: Callable[[Node], T]) -> T:
        """Call a function with the node, on the node's own thread."""
        server, loop = self._running()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(function(server.node))
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                result.set_exception(error)

        loop.call_soon_threadsafe(run)
        return result.result()

    def _running(self) -> tuple[_Server, asyncio.AbstractEventLoop]:
        if self._server is None or self._loop is None:
            raise UsageError("the node is not running")
        return self._server, self._loop

    # documents

    def vbucket_of(self, key: str | bytes) -> int:
        """The vbucket of a key."""
        return ((crc32(_raw(key)) >> 16) & 0x7FFF) % self.vbuckets

    def set(self, key: str | bytes, value: Any, *, expiry: int = 0, vbucket: int | None = None) -> Written:
        """Write a document: bytes as they are, everything else as JSON. ``expiry`` is in Unix seconds."""
        raw, datatype = self._stored(value)
        return self._on(key, vbucket, lambda vb, full: vb.set(full, raw, 0, expiry, datatype))

    def set_many(self, documents: Mapping[str | bytes, Any], *, vbucket: int | None = None) -> None:
        """Write many documents, in order; if one is refused, those before it are written."""
        keys = [_raw(key) for key in documents]
        places = [self.vbucket_of(key) if vbucket is None else vbucket for key in keys]
        stored = [self._stored(value) for value in documents.values()]

        def act(node: Node) -> None:
            bucket = node.buckets[self.bucket]
            for place, key, (raw, datatype) in zip(places, keys, stored, strict=True):
                _vbucket(bucket, place).set(b"\0" + key, raw, datatype=datatype)

        self.call(act)

    def _stored(self, value: Any) -> tuple[bytes, int]:
        """A value as the store has it, and its datatype."""
        raw = bytes(value) if isinstance(value, bytes | bytearray) else json.dumps(value).encode()
        return checked_value(raw, 0, self.settings)

    def get(self, key: str | bytes, *, vbucket: int | None = None) -> Any:
        """A document: JSON as a Python value, everything else as bytes; None if there is none."""
        frame = self._on(key, vbucket, lambda vb, full: vb.get(full))
        if frame is None:
            return None
        document = StoredDocument.of(frame)
        _, body, datatype = split_document(document.value, document.datatype, self.settings.max_inflated)
        return json.loads(body) if datatype & Datatype.JSON else body

    def delete(self, key: str | bytes, *, vbucket: int | None = None) -> Written:
        """Delete a document."""
        return self._on(key, vbucket, lambda vb, full: vb.delete(full))

    def _on(self, key: str | bytes, vbucket: int | None, act: Callable[[VBucket, bytes], T]) -> T:
        raw = _raw(key)
        at = self.vbucket_of(raw) if vbucket is None else vbucket
        return self.call(lambda node: act(_vbucket(node.buckets[self.bucket], at), b"\0" + raw))

    # history

    def high_seqno(self, vbucket: int) -> int:
        """The newest seqno of a vbucket."""
        return self.call(lambda node: _vbucket(node.buckets[self.bucket], vbucket).high_seqno)

    def failover_log(self, vbucket: int) -> list[tuple[int, int]]:
        """The branches of a vbucket, newest first: vb_uuid and seqno."""

        def read(node: Node) -> list[tuple[int, int]]:
            log = _vbucket(node.buckets[self.bucket], vbucket).failover_log
            return [(entry.vb_uuid, entry.seqno) for entry in log.entries]

        return self.call(read)

    def rewind(self, vbucket: int | Iterable[int], to_seqno: int) -> None:
        """Forget everything after a seqno, on a new branch, as a failover that loses data does."""
        check_values(RunningNode.rewind, {"to_seqno": to_seqno})
        targets = dict.fromkeys([vbucket] if isinstance(vbucket, int) else vbucket, to_seqno)

        def act(bucket: ServedBucket) -> None:
            for at in targets:
                _vbucket(bucket, at)
            bucket.store.rollback(targets, branch=True)
            for at in targets:
                bucket.vbucket_changed(at)

        self._exclusively(act)

    def set_vbucket_state(self, vbucket: int, state: VBucketState) -> None:
        """Make a vbucket active, replica, pending or dead."""

        def act(bucket: ServedBucket) -> None:
            bucket.store.set_state(vbucket, state)
            assert self._server is not None
            self._server.node.vbucket_changed(bucket, vbucket)

        self._exclusively(act)

    def replicate(
        self,
        vbuckets: Iterable[int],
        source: ProducerAddress | None,
        *,
        takeover: bool = False,
        dialect: str = "dcp",
    ) -> None:
        """Receive these vbuckets from another node from now on; with None stop receiving them.

        A vbucket that is not here, or is active or dead, becomes a replica. Other vbuckets are not affected.
        The node asks for them in a dialect that has requests: ``dcp``, ``upr-a`` or ``upr-b``.
        """
        check_values(RunningNode.replicate, {"source": source, "dialect": dialect})
        flags = int(AddStreamFlag.TAKE_OVER) if takeover else 0
        numbers = set(vbuckets)
        states = self.call(lambda node: {vb.id: vb.state for vb in node.buckets[self.bucket].store})
        if source is not None:
            for number in numbers:
                if states.get(number, VBucketState.ACTIVE) in (VBucketState.ACTIVE, VBucketState.DEAD):
                    self.set_vbucket_state(number, VBucketState.REPLICA)

        def order(node: Node) -> None:
            replication = node.replication[self.bucket]
            orders = {
                number: order for number, order in replication.ordered().items() if number not in numbers
            }
            if source is not None:
                at = ReplicationSource(source.host, source.port, dialect=dialect)
                orders.update(dict.fromkeys(numbers, (at, flags)))
            replication.order(orders, node.clock.monotonic())

        self.call(order)

    def replication_status(self) -> dict[str, Any]:
        """What the REPLICATE command answers: a row for each vbucket."""
        return self.call(lambda node: node.replication[self.bucket].status())

    def flush(self) -> None:
        """Delete everything, as the FLUSH command does."""

        def act(bucket: ServedBucket) -> None:
            bucket.store.flush_all()
            for vb in bucket.store:
                bucket.vbucket_changed(vb.id)

        self._exclusively(act)

    def _exclusively(self, act: Callable[[ServedBucket], None]) -> None:
        """Run something on the node's thread while no job is under way."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def begin(node: Node) -> None:
            bucket = node.buckets[self.bucket]

            def run() -> None:
                try:
                    act(bucket)
                except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                    done.set_exception(error)
                else:
                    done.set_result(None)

            bucket.work.exclusively(run)

        self.call(begin)
        done.result()

    # disk

    def persist(self) -> None:
        """Wait until everything that was written is on disk."""
        self._wait(lambda bucket, done: bucket.work.after_flush(done))

    def stop_persistence(self) -> None:
        """From now on nothing gets to disk: a `kill` loses it."""
        self.call(lambda node: setattr(node.buckets[self.bucket].store, "persistence", False))

    def start_persistence(self) -> None:
        """Write to disk again, including what has piled up."""
        self.call(lambda node: setattr(node.buckets[self.bucket].store, "persistence", True))
        self.persist()

    def compact(
        self,
        vbucket: int | None = None,
        *,
        drop_tombstones: bool = False,
        purge_before_seqno: int = 0,
    ) -> None:
        """Compact one vbucket or all; dropping tombstones raises the purge seqno."""
        compaction = Compaction(
            vbuckets=None if vbucket is None else [vbucket],
            purge_before_seqno=purge_before_seqno,
            drop_tombstones=drop_tombstones,
        )
        self._wait(lambda bucket, done: bucket.work.compact(compaction, done))

    def slow_disk(self, seconds: float) -> None:
        """From now on every commit and every merge takes this much longer."""
        check_values(RunningNode.slow_disk, {"seconds": seconds})
        self._running()[0].slow_disk_s = seconds

    def _wait(self, begin: Callable[[ServedBucket, Callable[[StoreError | None], None]], None]) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def finished(error: StoreError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.call(lambda node: begin(node.buckets[self.bucket], finished))
        done.result()

    # connections

    def cut_after(self, sent_bytes: int | None) -> None:
        """Break each new connection after this many bytes were sent on it; None stops that."""
        check_values(RunningNode.cut_after, {"sent_bytes": sent_bytes})
        self._running()[0].cut_after = sent_bytes

    def drop_connections(self) -> None:
        """Break every connection now."""
        server, _ = self._running()

        def act(_node: Node) -> None:
            for connection in list(server.connections):
                connection.abort()

        self.call(act)

    def refuse_logins(self, *, refuse: bool = True) -> None:
        """Refuse every login on new connections; with ``refuse=False`` accept them again."""

        def act(node: Node) -> None:
            node.needs_login = refuse or bool(self._users)
            node.users = Users({} if refuse else self._users or dict([_default_user()]), node.rng)

        self.call(act)


def _let_go(kept: dict[int, socket.socket]) -> None:
    while kept:
        kept.popitem()[1].close()


def _default_user() -> tuple[str, str]:
    from ..server.node import DEFAULT_USER

    return DEFAULT_USER


def _raw(key: object) -> bytes:
    match key:
        case str():
            return key.encode()
        case bytes() | bytearray() | memoryview():
            return bytes(key)
    raise UsageError(f"a key is a text or bytes, not {str(key)[:40]!r} ({type(key).__name__})")


def _vbucket(bucket: ServedBucket, at: int) -> VBucket:
    vbuckets = bucket.store.vbuckets
    vbucket = vbuckets[at] if isinstance(at, int) and 0 <= at < len(vbuckets) else None
    if vbucket is None:
        raise UsageError(f"the node has no vbucket {at}, only 0 to {len(vbuckets) - 1}")
    return vbucket


class _Server(Server):
    """The real pump, with faults."""

    slow_disk_s = 0.0
    cut_after: int | None = None

    def connection(self, *, tls: bool, upstream: Upstream | None = None) -> ServerConnection:
        if self.cut_after is None:
            return super().connection(tls=tls, upstream=upstream)
        return _CutConnection(self, tls=tls, upstream=upstream, cut_after=self.cut_after)

    def run(self, job: Job) -> None:
        sleep(self.slow_disk_s)
        super().run(job)

    async def kill(self) -> None:
        """Stop without writing anything more.

        Running jobs are waited for, since a thread can't be killed: it is as if the kill had come a little
        later.
        """
        await self.close_sockets()
        for connection in list(self.connections):
            connection.abort()
        await self.until_idle()
        self.node.engine.crash()


class _CutConnection(ServerConnection):
    """A connection that breaks after sending a given number of bytes."""

    def __init__(self, server: Server, *, tls: bool, upstream: Upstream | None, cut_after: int) -> None:
        super().__init__(server, tls=tls, upstream=upstream)
        self._left = cut_after

    def send(self, transport: asyncio.Transport, parts: list[bytes | memoryview]) -> None:
        data = b"".join(parts)
        transport.write(data[: self._left])
        if len(data) >= self._left:
            self._left = 0
            transport.close()
        else:
            self._left -= len(data)


async def _close_late(server: _Server | None) -> None:
    """Close connections that were accepted while the node stopped: nothing else will close them later."""
    # A task that is cancelled before its first turn never closes the socket that it was made for.
    await asyncio.sleep(0)
    late = asyncio.all_tasks() - {asyncio.current_task()}
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for _ in range(5):  # connections are made and closed by callbacks of callbacks
        for connection in list(server.connections) if server is not None else ():
            connection.abort()
        await asyncio.sleep(0)
