"""The pump: asyncio's sockets, threads and clock around a `Node`."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ..store.base import Job
from .held_bytes import HeldBytes
from .http import (
    HTTP_STARTS,
    LAST_CHUNK,
    STREAM_POLL_S,
    STREAM_UNREAD_BYTES,
    HttpRequestBuffer,
    HttpStream,
    HttpStreaming,
    stream_head,
)
from .management import management_service
from .node import Node
from .served_map import NodeAddress
from .session import Session
from .transport import PlainTransport, accept_plain
from .turn import TURN_S
from .upstream import Upstream

__all__ = ["Server", "listen", "new_loop"]

log = logging.getLogger("tailrace.server")

HandleHttp: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
"""Handles an HTTP connection, see `tailrace.web`."""

_BACKLOG = 1024
_GATHERED_BYTES = 1 << 20
"""How much is gathered for one system call: backfills of small vbuckets go together."""
_WRITE_BYTES = 256 << 10
"""How much may wait in a transport before no more is handed to it."""
_TURN_BYTES = 1 << 20
"""The most that one connection sends in a turn."""
_SMALL = 16 << 10
"""Smaller parts are joined before they are written: one system call for many answers."""
_DISK_CHECK_S = 10.0
_HTTP_S = 10.0
"""For an HTTP request to arrive."""
_JOB_THREADS = 12
"""At most; they are started when needed. A bucket commits, seals and merges at the same time, and no
commit should wait for another bucket's merge.
"""


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop that can wait for plain sockets: on Windows the default one can't."""
    return asyncio.SelectorEventLoop() if sys.platform == "win32" else asyncio.new_event_loop()


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for an address, several if a name has several; port 0 takes a free one.

    Made with IPPROTO_TCP: asyncio, which serves TLS and the web, sets TCP_NODELAY only on sockets that say
    so, and without it answers wait for the peer's delayed acks.
    """
    made: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            made.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if not port and len(made) > 1:
                address = (address[0], made[0].getsockname()[1], *address[2:])
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
    except OSError:
        for listener in made:
            listener.close()
        raise
    return made


class Server:
    """A node on sockets. All of it runs on one event loop; jobs run on some threads beside it."""

    def __init__(self, node_of: Callable[[Callable[[Job, Callable[[], None]], None]], Node]) -> None:
        """``node_of`` makes the node, given what runs its jobs."""
        self._threads = ThreadPoolExecutor(_JOB_THREADS, "tailrace-job")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self.connections: set[ServerConnection] = set()
        self.node = node_of(self._run_job)
        self.node.dial = self._dial
        self.management = management_service(self.node)
        self._tasks: set[asyncio.Task[None]] = set()
        self.unread: HeldBytes[ServerConnection] = HeldBytes()
        self.unprocessed: HeldBytes[ServerConnection] = HeldBytes()

    # connections that we make

    def _dial(self, upstream: Upstream) -> None:
        self.run_beside(self._connect(upstream))

    async def _connect(self, upstream: Upstream) -> None:
        assert self._loop is not None
        source = upstream.source
        try:
            async with asyncio.timeout(self.node.settings.auth_timeout):
                await self._loop.create_connection(
                    lambda: self.connection(tls=source.tls is not None, upstream=upstream),
                    source.host,
                    source.port,
                    ssl=None if source.tls is None else source.tls.context(),
                )
        except (OSError, TimeoutError) as error:
            upstream.close(str(error) or "no answer in time")

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this on the loop until it ends, or the sockets are closed."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # jobs

    def _run_job(self, job: Job, done: Callable[[], None]) -> None:
        assert self._loop is not None
        loop = self._loop
        future = loop.run_in_executor(self._threads, self.run, job)

        def finished(_: asyncio.Future[None]) -> None:
            done()
            self._arm()
            self._idle.set()

        future.add_done_callback(finished)

    def run(self, job: Job) -> None:
        """Run a job, on one of the threads."""
        job.run()

    def connection(self, *, tls: bool, upstream: Upstream | None = None) -> ServerConnection:
        """The protocol of a connection that has just come in, or (``upstream``) that we made."""
        return ServerConnection(self, tls=tls, upstream=upstream)

    # bytes held for peers, see `held_bytes`

    def count_unread(self, connection: ServerConnection, size: int) -> None:
        """Set how many bytes of answers wait for a peer that takes no more for now; 0 when it does again."""
        self.unread.count(connection, size)
        while self.unread.total > self.node.settings.max_unread:
            total, slow = self.unread.total, self.unread.heaviest()
            log.info(  # not a warning: a peer could fill the log with it
                "%s reads none of its answers and is disconnected: %d bytes wait for all peers (max_unread)",
                slow.peer,
                total,
            )
            slow.abort()

    def count_unprocessed(self, connection: ServerConnection, size: int) -> None:
        """Set how many bytes of a peer's requests have come that can't be processed yet, mostly because the
        rest of one is missing.
        """
        self.unprocessed.count(connection, size)
        while self.unprocessed.total > self.node.settings.max_unprocessed:
            total, slow = self.unprocessed.total, self.unprocessed.heaviest()
            log.info(
                "%s does not finish its request and is disconnected: %d bytes of all peers' requests wait "
                "(max_unprocessed)",
                slow.peer,
                total,
            )
            slow.abort()

    # life

    async def start(
        self,
        sockets: list[socket.socket],
        tls_sockets: list[socket.socket] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Accept connections."""
        self._loop = loop = asyncio.get_running_loop()
        port = sockets[0].getsockname()[1]
        tls_port = tls_sockets[0].getsockname()[1] if tls_sockets else None
        self.node.address = NodeAddress(port, tls_port, alternates=self.node.address.alternates)
        for listener in sockets:
            accept_plain(loop, listener, lambda: self.connection(tls=False))
        self._listeners += sockets
        for listener in tls_sockets or ():
            self._servers.append(
                await loop.create_server(
                    lambda: self.connection(tls=True),
                    sock=listener,
                    ssl=tls,
                    ssl_handshake_timeout=self.node.settings.auth_timeout,
                )
            )
        self._arm()

    async def start_web(
        self, sockets: list[socket.socket], handle: HandleHttp, tls: ssl.SSLContext | None = None
    ) -> int:
        """Serve page, JSON and metrics, over TLS if a context is given; returns the port."""
        for listener in sockets:
            server = await asyncio.start_server(handle, sock=listener, limit=8 << 10, ssl=tls)
            self._servers.append(server)
        port: int = sockets[0].getsockname()[1]
        if tls is None:  # configs announce it as the management port without TLS
            self.node.address = replace(self.node.address, web_port=port)
        return port

    def watch_disk(self, directory: Path) -> None:
        """Let the node know how full its disk is."""
        checked_at, share = -_DISK_CHECK_S, 0.0

        def used_share() -> float:
            nonlocal checked_at, share
            now = self.node.clock.monotonic()
            if now - checked_at >= _DISK_CHECK_S:
                usage = shutil.disk_usage(directory)
                checked_at, share = now, usage.used / (usage.used + usage.free or 1)
            return share

        self.node.disk_used_share = used_share

    def _arm(self) -> None:
        """One timer for the node's work in the background."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self.node.next_timer()
        if when is not None and self._loop is not None and self._listeners:
            delay = max(0.0, when - self.node.clock.monotonic())
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self.node.handle_timer(self.node.clock.monotonic())
        self._arm()

    async def stop(self) -> None:
        """A clean stop: no new connections, unfinished commands get some time, everything on disk."""
        await self.close_sockets()
        node = self.node
        deadline = node.clock.monotonic() + node.settings.drain_timeout
        while node.stop_sessions("the node stops") and node.clock.monotonic() < deadline:
            for bucket in node.buckets.values():
                bucket.work.flush_wanted = True
                bucket.work.settle()
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.drop("the node stops")
        await self.until_idle()
        node.close()

    async def close_sockets(self) -> None:
        """Accept and make no more connections."""
        for task in self._tasks:
            task.cancel()
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for server in self._servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        # Connections that asyncio has just accepted are set up in the next turn of the loop. If the server
        # were closed before that, their sockets would never be closed.
        await asyncio.sleep(0)
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def until_idle(self) -> None:
        """Begin no more work in the background, and wait for the jobs under way and the threads."""
        if self._timer is not None:
            self._timer.cancel()
        while self.node.busy:
            self._idle.clear()
            await self._idle.wait()
        self._threads.shutdown()
        await asyncio.sleep(0)  # transports close in the next turn of the loop


class ServerConnection(asyncio.Protocol):
    """A transport and its session."""

    def __init__(self, server: Server, *, tls: bool, upstream: Upstream | None = None) -> None:
        self._server = server
        self._upstream = upstream
        self._monotonic = server.node.clock.monotonic
        self._tls = tls
        self._session: Session | Upstream | None = None
        self._transport: asyncio.Transport | None = None
        self._full = False  # the transport wants no more for now
        self._unprocessed = 0  # as last counted
        self._reading = True
        self._pumping = False
        self._pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._may_log_in = True
        self._is_new = upstream is None
        self._http: HttpRequestBuffer | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        server = self._server
        self._transport = transport
        session: Session | Upstream | None = self._upstream
        if session is None:
            peer = transport.get_extra_info("peername")
            name = f"{peer[0]}:{peer[1]}" if peer else "?"
            session = server.node.accept(name, server.node.clock.monotonic(), tls=self._tls)
        if session is None or session.closed:
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_WRITE_BYTES)
        self._session = session
        session.wake = self._wake
        server.connections.add(self)
        self._arm()
        if self._upstream is not None:
            self._wake()  # the side that connects speaks first

    def data_received(self, data: bytes) -> None:
        session = self._session
        if self._is_new:
            self._is_new = False
            if data[0] in HTTP_STARTS and session is not None:
                self._turn_to_http(session)
                session = None
        if session is None:
            if self._http is not None:
                self._receive_http(self._http, data)
            return
        if answers := session.exchange(data, self._monotonic()):
            assert self._transport is not None
            self.send(self._transport, [answers])
            if not self._full:
                return
        self._pump()
        if self._full:
            self._count_unread()

    def _turn_to_http(self, session: Session | Upstream) -> None:
        """The peer does not speak the binary protocol: it wants management."""
        self._session = None
        session.close("it speaks HTTP")
        session.connection_lost()
        if len(self._server.connections) > self._server.node.settings.max_connections:
            self.abort()
            return
        self._http = HttpRequestBuffer()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_HTTP_S, self.abort)

    def _receive_http(self, request: HttpRequestBuffer, data: bytes) -> None:
        transport = self._transport
        if transport is not None and request.add(data):
            self._http = None  # one request per connection
            answer = request.answer(self._server.management)
            if isinstance(answer, HttpStream):
                if self._timer is not None:
                    self._timer.cancel()
                transport.write(stream_head())
                if answer.with_body:
                    self._stream_http(HttpStreaming(answer))
                    return
            else:
                transport.write(answer)
            transport.close()

    def _stream_http(self, streaming: HttpStreaming) -> None:
        """Send the next part of an endless answer, and schedule the one after it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        part = streaming.next_part(self._monotonic())
        if part is None:
            transport.write(LAST_CHUNK)
            transport.close()
        elif transport.get_write_buffer_size() > STREAM_UNREAD_BYTES:
            self.abort()
        else:
            if part:
                transport.write(part)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(STREAM_POLL_S, self._stream_http, streaming)

    def eof_received(self) -> bool:
        return False  # half-closed connections are closed

    def pause_writing(self) -> None:
        self._full = True
        self._count_unread()

    def resume_writing(self) -> None:
        self._full = False
        self._server.count_unread(self, 0)
        self._pump()

    def _count_unread(self) -> None:
        session, transport = self._session, self._transport
        # not on connections that we made: there the other side is the server
        if isinstance(session, Session) and transport is not None and not transport.is_closing():
            self._server.count_unread(self, transport.get_write_buffer_size() + session.queued_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.connections.discard(self)
        self._server.count_unread(self, 0)
        self._server.count_unprocessed(self, 0)
        if self._session is not None:
            session, self._session = self._session, None
            session.connection_lost()

    # our side

    @property
    def peer(self) -> str:
        """Who is on the other side, for the log."""
        return "?" if self._session is None else self._session.peer

    @property
    def stream_name(self) -> str | None:
        """What the change stream on it is called; None if there is none."""
        session = self._session
        return session.stream_name if isinstance(session, Session) and session.handler is not None else None

    def _wake(self) -> None:
        """The session has something to send: do it in the next turn of the loop, once for all calls until
        then.
        """
        if not self._pump_due and self._session is not None:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._awake)

    def _awake(self) -> None:
        self._pump_due = False
        self._pump()

    def _pump(self) -> None:
        """Send what the session has, then update all that may have changed with it."""
        session, transport = self._session, self._transport
        if session is None or transport is None or self._pumping:
            return
        if not self._pump_due:  # else it waits for the turn that is due
            self._move(session, transport)
        if isinstance(session, Session) and session.unprocessed_bytes != self._unprocessed:
            self._unprocessed = session.unprocessed_bytes
            self._server.count_unprocessed(self, self._unprocessed)
        if session.closed:
            if not self._full and not self._pump_due:  # all that it had is sent
                _close(transport)
            self._linger(transport)
            return
        # a peer that takes no answers is not read from; acks of a stream are always wanted
        wanted = session.wants_data and (not self._full or session.handler is not None)
        if wanted != self._reading:
            self._reading = wanted
            (transport.resume_reading if self._reading else transport.pause_reading)()
        # the idle deadline only moves later, so it is checked when its timer fires; others may come sooner
        if self._timer is None or session.unfinished or session.handler is not None or self._may_log_in:
            self._may_log_in = not getattr(session, "authenticated", True)
            self._arm()

    def _go_on(self) -> None:
        """Continue with what was too much for one turn. Mostly there is only more to send."""
        self._pump_due = False
        session, transport = self._session, self._transport
        if session is None or transport is None or self._pumping:
            return
        if self._unprocessed or not self._reading or not self._move(session, transport):
            self._pump()

    def _move(self, session: Session | Upstream, transport: asyncio.Transport) -> bool:
        """Move what the session has to the transport, while it takes it. A stream to a fast reader, or
        requests of a fast writer, would never end, so after a turn it stops for other connections and returns
        True.
        """
        self._pumping = True
        left, turn_ends = _TURN_BYTES, self._monotonic() + TURN_S
        try:
            while not self._full:
                parts = session.data_to_send(_GATHERED_BYTES)
                if parts:
                    self.send(transport, parts)
                    left -= sum(map(len, parts))
                    parts.clear()  # its memory is used for what comes next, while it is in the cache
                elif not session.has_backlog:
                    break
                if not session.has_more:
                    break
                if left <= 0 or self._monotonic() >= turn_ends:
                    if not self._pump_due:
                        self._pump_due = True
                        asyncio.get_running_loop().call_soon(self._go_on)
                    return True
        finally:
            self._pumping = False
        return False

    def send(self, transport: asyncio.Transport, parts: list[bytes | memoryview]) -> None:
        """Hand bytes to the transport: small parts together, large ones as they are."""
        if len(parts) == 1:
            transport.write(parts[0])
            return
        pieces: list[bytes | memoryview] = []
        small: list[bytes | memoryview] = []
        for part in parts:
            if len(part) < _SMALL:
                small.append(part)
                continue
            if small:
                pieces.append(b"".join(small))
                small = []
            pieces.append(part)
        if small:
            pieces.append(b"".join(small))
        if isinstance(transport, PlainTransport):
            transport.writelines(pieces)
        else:  # asyncio's would join them
            for piece in pieces:
                transport.write(piece)

    def _arm(self) -> None:
        """Set the timer that the session wants."""
        session = self._session
        when = None if session is None else session.next_timer()
        if when is None:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, when - self._server.node.clock.monotonic())
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._session is not None:
            self._session.handle_timer(self._server.node.clock.monotonic())
            self._pump()

    def _linger(self, transport: asyncio.Transport) -> None:
        """Receive nothing more. The connection stays open only while the peer keeps taking what is left: a
        peer that does not read would otherwise keep it, and its answers, for ever.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(
            self._server.node.settings.drain_timeout,
            self._end_lingering,
            transport,
            transport.get_write_buffer_size(),
        )

    def _end_lingering(self, transport: asyncio.Transport, unsent: int) -> None:
        if transport.get_write_buffer_size() < unsent:
            self._linger(transport)
        else:
            transport.abort()

    def drop(self, reason: str) -> None:
        """Close after what is ready has been sent."""
        if self._session is not None:
            self._session.close(reason)
            self._pump_due = False  # there is no later turn
            self._pump()
        if self._transport is not None:
            _close(self._transport)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()


def _close(transport: asyncio.Transport) -> None:
    """Close only once: asyncio's TLS transport drops what it has to send when it is closed again."""
    if not transport.is_closing():
        transport.close()
