"""One socket of the asyncio pump: bytes between a transport and the reader of its connection.

`aio.Source` decides which connections there are, and what follows from what they bring or lose.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from ..connstr import Address
from ..errors import ConnectError, reason_of
from ..protocol.dcp.reader import DcpReader
from .kv_connection import no_connection

__all__ = ["Connection"]

# While the application is busy, data is gathered for this long before it is processed: a few large pieces
# cost far less than many small ones.
_GATHER_S = 0.02


class Connection(asyncio.BufferedProtocol):
    """One socket and the reader on it.

    ``made`` gives the reader when the socket is connected; ``received`` is called when the reader has
    processed what came, and ``lost``, once and with the reason, when the connection is gone or was given up.
    While ``is_busy`` says that the application has something to do, data may wait for more.
    """

    def __init__(
        self,
        address: Address,
        *,
        made: Callable[[Connection], DcpReader],
        received: Callable[[Connection], None],
        lost: Callable[[Connection, Exception], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.address = address
        self.opened = False
        self.lost: Exception | None = None
        self.link: DcpReader
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._on_made, self._on_received, self._on_lost = made, received, lost
        self._is_busy = is_busy
        self._gathering: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._watching = self._grew = self._paused = False

    async def dial(self, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        """Connect, or raise `ConnectError`."""
        host, port = self.address.host, self.address.port
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.create_connection(
                    lambda: self, host, port, ssl=tls, server_hostname=None if tls is None else host
                )
        except TimeoutError:
            raise ConnectError(f"{self.address} does not answer") from None
        except OSError as error:  # TLS errors, too
            # a refused connection never got to TLS
            at_tls = tls is not None and (isinstance(error, ssl.SSLError) or not error.errno)
            raise no_connection(self.address, error, tls=at_tls) from error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.link = self._on_made(self)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.link.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.link.buffer_updated(nbytes)
        self._grew = True
        if self.link.is_full or self.link.is_awaited:
            self._process()
        elif not self._watching:
            self._watching = True
            self._loop.call_soon(self._watch)

    def _watch(self) -> None:
        """Process what came when a round of the loop brings no more: under load, pieces become large."""
        if self._grew:
            self._grew = False
            self._loop.call_soon(self._watch)
            return
        self._watching = False
        if self._is_busy():
            if self._gathering is None:
                self._gathering = self._loop.call_later(_GATHER_S, self._process)
        else:
            self._process()

    def look(self, *, at_all: bool = False) -> bool:
        """Process data that waits for more, with ``at_all`` any data; return whether there was some."""
        if self._gathering is None and not (at_all and self._watching):
            return False
        self._process()
        return True

    def _process(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self.lost is not None:
            return
        try:
            self.link.process(self._loop.time())
        except Exception as error:  # noqa: BLE001 - whatever it is, the application gets it
            self.give_up(error)
            return
        if self.link.is_swamped and self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._on_received(self)

    def flush(self) -> None:
        """Send what the reader has to send; resume reading if that was paused."""
        if self.lost is not None or self._transport is None:
            return
        if not self._transport.get_write_buffer_size():
            self.link.all_sent()
        data = self.link.data_to_send()
        if data:
            self._transport.write(data)
        if self._paused and not self.link.is_swamped:
            self._paused = False
            self.link.reads_again(self._loop.time())
            self._transport.resume_reading()

    def give_up(self, error: Exception) -> None:
        """Close the connection for this reason."""
        if self.lost is None:
            self.lost = error
            self.abort()
            self._on_lost(self, error)

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # closed with data still to send, it breaks if it is closed again
        if not self.closed.done():
            self.closed.set_result(None)
        if self.lost is not None:
            return
        self._process()  # what came before the end may not have been processed yet
        if exc is None and self.lost is None:
            self.link.close_received()
            self._process()
        if self.lost is None:
            reason = "closed by the server" if exc is None else reason_of(exc)
            self.lost = ConnectError(f"the connection to {self.address} was lost: {reason}")
            self._on_lost(self, self.lost)
