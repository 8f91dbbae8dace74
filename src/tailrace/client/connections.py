"""All sockets of a source: which are open, being dialled or being closed.

`aio.Source` decides what follows from what they bring or lose.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Coroutine, Iterator

from ..connstr import Address
from ..errors import ConnectError, TailraceError
from ..protocol.dcp.reader import DcpReader
from .connection import Connection
from .nodes import Nodes

__all__ = ["Connections"]

_CLOSE_TIMEOUT_S = 1.0


class Connections:
    """The connections of one source, at most one to a node.

    ``made`` is called when there is a new one, ``received`` when something was received and processed,
    ``lost`` when one is gone, ``refused`` when one could not be made, and ``failed`` with an error that no
    retry can cure. While ``is_busy`` says that the application has something to do, data may wait for more.
    """

    def __init__(
        self,
        nodes: Nodes,
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        on_wire: Callable[[int, bool, bytes | memoryview], None] | None,
        made: Callable[[], None],
        received: Callable[[], None],
        lost: Callable[[Connection, Exception], None],
        refused: Callable[[Address, Exception], None],
        failed: Callable[[Exception], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.lost_count = 0
        self._nodes = nodes
        self._tls = tls
        self._timeout_s = timeout_s
        self._on_wire = on_wire
        self._on_made, self._on_received, self._on_lost = made, received, lost
        self._on_refused, self._on_failed = refused, failed
        self._is_busy = is_busy
        self._open: dict[Address, Connection] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._made_count = 0
        self._is_closed = False

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open.values()))

    # making and closing

    def dial(self, address: Address) -> None:
        """Begin to connect to a node."""
        self.in_background(self._dial(address))

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run something that leads to a connection; `close` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self, address: Address) -> None:
        try:
            await Connection(
                address,
                made=self._made,
                received=self._received,
                lost=self._lost,
                is_busy=self._is_busy,
            ).dial(self._tls, self._timeout_s)
        except ConnectError as error:
            self._on_refused(address, error)

    def drop(self, address: Address) -> None:
        """Close a connection without reporting it as lost."""
        connection = self._open.pop(address)
        self._closing.add(connection.closed)
        connection.closed.add_done_callback(self._closing.discard)
        connection.abort()

    def drop_empty(self, address: Address) -> None:
        """Close a connection that nobody needs, unless what it brought is still to be taken."""
        if self._open[address].link.next_chunk() is None:
            self.drop(address)
            self._nodes.dropped(address)

    def drop_spent(self) -> None:
        """Close the connections that can't carry another reading; new ones are made when they are needed."""
        for connection in self:
            if connection.link.is_spent:
                self.drop(connection.address)
                self._nodes.dropped(connection.address)

    async def close(self) -> None:
        """Close all, and wait until they are closed."""
        self._is_closed = True
        for task in self._dialling:
            task.cancel()
        for connection in self:
            self.drop(connection.address)
        if self._dialling:
            await asyncio.gather(*self._dialling, return_exceptions=True)
        await asyncio.sleep(0)
        for connection in self:
            self.drop(connection.address)  # it was made while the others were closed
        # the sockets are closed by callbacks of the loop
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_TIMEOUT_S)

    def abort(self) -> None:
        """Close all immediately."""
        for connection in self:
            connection.abort()

    # what the pump does with all of them

    def flush(self) -> None:
        """Send what there is to send."""
        for connection in self._open.values():
            connection.flush()

    def look(self, *, at_all: bool = False) -> bool:
        """Call `Connection.look` on all connections; return whether there was anything."""
        has_come = False
        for connection in self:
            has_come |= connection.look(at_all=at_all)
        return has_come

    @property
    def has_more(self) -> bool:
        """Whether something waits for the application."""
        return any(connection.link.next_chunk() is not None for connection in self._open.values())

    def unheeded(self) -> list[Connection]:
        """Lost connections whose data the reading still has to take."""
        links = dict(self._nodes.links())
        return [
            connection
            for connection in self
            if connection.lost is not None and links.get(connection.address) is connection.link
        ]

    def next_timers(self) -> list[float | None]:
        """When `handle_timers` is due for each; a lost connection only has to be emptied."""
        return [connection.link.next_timer() for connection in self._open.values() if connection.lost is None]

    def handle_timers(self, now: float) -> None:
        """Give up connections that were silent for too long."""
        for connection in self:
            if connection.lost is not None:
                continue
            try:
                connection.link.handle_timer(now)
            except ConnectError as error:
                connection.give_up(error)

    # what connections report

    def _made(self, connection: Connection) -> DcpReader:
        """A connection is made; return the reader for it."""
        if self._is_closed:
            connection.abort()
        link = self._nodes.connected(connection.address, asyncio.get_running_loop().time())
        if self._on_wire is not None:
            link.on_wire = functools.partial(self._on_wire, self._made_count)
        self._made_count += 1
        self._open[connection.address] = connection
        self._on_made()
        return link

    def _received(self, connection: Connection) -> None:
        """Something was received and processed."""
        if self._open.get(connection.address) is not connection:
            return  # it was dropped
        if connection.link.granted is not None and not connection.opened:
            connection.opened = True
            try:
                self._nodes.opened(connection.address, asyncio.get_running_loop().time())
            except TailraceError as error:
                self._on_failed(error)
        connection.flush()
        self._on_received()

    def _lost(self, connection: Connection, error: Exception) -> None:
        """A connection is gone. What it brought is delivered before the loss is reported."""
        if self._open.get(connection.address) is not connection or self._is_closed:
            return
        self.lost_count += 1
        self._on_lost(connection, error)
