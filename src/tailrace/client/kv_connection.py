"""One blocking connection to one node, for the key-value client."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from typing import TypeVar

from .. import rng as rng_
from ..connstr import Address
from ..errors import ConnectError, RemoteProtocolError
from ..protocol.handshake import HandshakeResult, Introduction, handshake
from ..protocol.script import Script, ScriptRunner
from ..wire.codes import Magic, Op
from ..wire.framing import Framer
from ..wire.header import Frame

__all__ = ["FENCE_OPAQUE", "KvConnection", "dial"]

T = TypeVar("T")

FENCE_OPAQUE = 0xFFFF_FFFF
"""The opaque of the NOOP behind a batch of quiet requests."""

_RECEIVE_BYTES = 256 * 1024


class KvConnection:
    """A blocking socket to one node, past its handshake."""

    def __init__(
        self, address: Address, introduction: Introduction, *, tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        self.address = address
        self._socket = dial(address, tls, timeout_s)
        self._framer = Framer()
        self._opaque = 0
        try:
            self.session: HandshakeResult = self.run(handshake(introduction, rng_.source()))
        except BaseException:
            self.close()
            raise

    @property
    def collections(self) -> bool:
        return self.session.collections

    def run(self, script: Script[T]) -> T:
        """Have the conversation that the script is, and give its result."""
        self._opaque = (
            self._opaque + 0x10000
        ) & 0x7FFF_0000  # an answer that comes late fits no later script
        runner = ScriptRunner(script, self._opaque)
        self._send(runner.start())
        while not runner.done:
            frame = self._receive()
            if not runner.expects(frame):
                raise RemoteProtocolError(f"an answer with opaque {frame.opaque}, which nobody waits for")
            if more := runner.receive(frame):
                self._send(more)
        return runner.result  # type: ignore[return-value]

    def write(self, data: bytes | memoryview, fence: bytes) -> None:
        """Send a batch of quiet requests and the fence behind it."""
        self._send(data)
        self._send(fence)

    def errors_before_fence(self) -> Iterator[Frame]:
        """What the quiet requests before the next fence have to say."""
        while True:
            frame = self._receive()
            if frame.opaque == FENCE_OPAQUE and frame.opcode == Op.NOOP:
                return
            yield frame

    def detach(self) -> tuple[socket.socket, bytes]:
        """The socket, to go on with it in another way, and what came and was not read yet."""
        return self._socket, self._framer.take_rest()

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectError(f"the connection to {self.address} was lost: {_reason(error)}") from error

    def _receive(self) -> Frame:
        while True:
            frame = self._framer.maybe_frame()
            if frame is not None:
                if frame.magic == Magic.SERVER_REQUEST:
                    continue  # a push of the cluster map; we ask when we need it
                if frame.is_request:
                    raise RemoteProtocolError(
                        f"the server sends a request (0x{frame.opcode:02x}) to a client"
                    )
                return frame
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except TimeoutError:
                raise ConnectError(f"{self.address} does not answer") from None
            except OSError as error:
                raise ConnectError(f"the connection to {self.address} was lost: {_reason(error)}") from error
            if not data:
                raise ConnectError(f"{self.address} closed the connection")
            self._framer.feed(data)


def dial(address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """A connected socket without delays; `ConnectError` says why there is none."""
    try:
        plain = socket.create_connection((address.host, address.port), timeout_s)
    except TimeoutError:
        raise ConnectError(f"{address} does not answer; is the node running and the port right?") from None
    except OSError as error:
        raise no_connection(address, error) from error
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain if tls is None else tls.wrap_socket(plain, server_hostname=address.host)
    except (OSError, ValueError) as error:
        plain.close()
        raise no_connection(address, error, tls=True) from error


def no_connection(address: Address, error: Exception, *, tls: bool = False) -> ConnectError:
    """Why there is none, and what to look at; ``tls`` if it failed at that."""
    if tls:
        advice = "does it speak TLS on this port, and is its certificate one that you believe?"
        return ConnectError(f"no TLS connection to {address}: {_reason(error)}; {advice}")
    return ConnectError(
        f"can't connect to {address}: {_reason(error)}; is the node running and the port right?"
    )


def _reason(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
    if number is not None and number > 0:
        return os.strerror(number)  # asyncio has words of its own
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
