"""A server that can be told to misbehave: what ``serve --fault-token`` runs, for everybody's tests."""

from __future__ import annotations

import asyncio
from collections import deque

from .aio import Server, ServerConnection
from .upstream import Upstream

__all__ = ["FaultServer"]


class FaultServer(Server):
    """The real pump, with a delay before everything that is sent."""

    delay_s = 0.0

    def connection(self, *, tls: bool, upstream: Upstream | None = None) -> ServerConnection:
        return _DelayedConnection(self, tls=tls, upstream=upstream)


class _DelayedConnection(ServerConnection):
    """Sends in order, but as late as the server says."""

    def __init__(self, server: FaultServer, *, tls: bool, upstream: Upstream | None) -> None:
        super().__init__(server, tls=tls, upstream=upstream)
        self._faults = server
        self._late: deque[tuple[asyncio.Transport, list[bytes | memoryview]]] = deque()

    def send(self, transport: asyncio.Transport, parts: list[bytes | memoryview]) -> None:
        delay_s = self._faults.delay_s
        if not delay_s and not self._late:
            super().send(transport, parts)
            return
        # whole and in order, even if the delay has become shorter meanwhile; the caller empties the list
        self._late.append((transport, list(parts)))
        asyncio.get_running_loop().call_later(delay_s, self._send_first)

    def _send_first(self) -> None:
        transport, parts = self._late.popleft()
        if not transport.is_closing():
            super().send(transport, parts)
