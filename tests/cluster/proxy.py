"""A proxy in front of each node: what goes through it can be held up or cut, as by a bad network."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_READ_BYTES = 64 << 10


class Proxies:
    """A loop in a thread of its own, on which all proxies run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._made: list[Proxy] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def proxy(self) -> Proxy:
        """A new one, on a port of its own; it leads nowhere yet."""
        made = Proxy(self)
        self.run(made.open())
        self._made.append(made)
        return made

    def close(self) -> None:
        for connection in self._made:
            self.run(connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Proxy:
    """One port that leads to another."""

    def __init__(self, proxies: Proxies) -> None:
        self.port = 0
        self.target: int | None = None
        """While this is None, connections are refused."""
        self._proxies = proxies
        self._flows: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._passes = asyncio.Event()
        self._passes.set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._flows.add(task)
        far_writer = None
        try:
            await self._passes.wait()
            if self.target is None:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
            both = [
                asyncio.ensure_future(self._flow(reader, far_writer)),
                asyncio.ensure_future(self._flow(far_reader, writer)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for flow in both:
                    flow.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._flows.discard(task)
            for stream in (writer, far_writer):
                if stream is not None:
                    stream.close()
                    with contextlib.suppress(OSError):
                        await stream.wait_closed()

    async def _flow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self._passes.wait()
            writer.write(data)
            await writer.drain()

    async def close(self) -> None:
        self._server.close()
        await self._cut()
        await self._server.wait_closed()

    async def _cut(self) -> None:
        flows = list(self._flows)
        for flow in flows:
            flow.cancel()
        await asyncio.gather(*flows, return_exceptions=True)

    def cut(self) -> None:
        """End all connections."""
        self._proxies.run(self._cut())

    def hold(self, *, hold: bool) -> None:
        """Let nothing pass, without refusing anything; or let everything go on."""

        async def act() -> None:
            (self._passes.clear if hold else self._passes.set)()

        self._proxies.run(act())
