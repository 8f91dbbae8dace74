"""One blocking connection to one node, for the key-value client."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from .. import rng as rng_
from ..connstr import Address
from ..errors import ConnectError, RemoteProtocolError, reason_of
from ..protocol.handshake import HandshakeResult, Introduction, handshake
from ..protocol.script import Script, ScriptRunner
from ..wire.codes import Magic
from ..wire.framing import Framer
from ..wire.header import Frame

if TYPE_CHECKING:
    from .pipeline import Answers

__all__ = ["PIPELINED", "KvConnection", "dial", "no_connection", "wait"]

T = TypeVar("T")

PIPELINED = 0x8000_0000
"""Requests of a pipeline have opaques from here up, those of scripts smaller ones."""

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_RECEIVE_BYTES = 256 * 1024


class KvConnection:
    """A socket to one node, past its handshake: conversations one at a time (`run`), and beside them a
    pipeline whose requests are queued (`queue`) and whose answers are kept until they are taken.

    The socket never blocks. Sending goes along with reading: a server whose answers nobody reads stops
    reading requests, and an answer may be longer than its request (a refusal can carry a cluster map).
    """

    def __init__(
        self,
        address: Address,
        introduction: Introduction,
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        connect_timeout_s: float | None = None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._socket = dial(address, tls, timeout_s if connect_timeout_s is None else connect_timeout_s)
        self._socket.settimeout(0)
        self._framer = Framer()
        self._opaque = 0
        self._outbox: deque[memoryview] = deque()
        self._answers: list[Frame] = []
        """Answers to pipelined requests that came while a script was running."""
        try:
            self.handshake: HandshakeResult = self.run(handshake(introduction, rng_.source()))
        except BaseException:
            self.close()
            raise

    @property
    def collections(self) -> bool:
        return self.handshake.collections

    def run(self, script: Script[T]) -> T:
        """Run a script, and return its result."""
        self._opaque = (self._opaque + 0x10000) & 0x7FFF_0000  # a late answer fits no later script
        runner = ScriptRunner(script, self._opaque)
        self.queue(runner.start())
        while not runner.done:
            frame = self._receive()
            if not runner.expects(frame):
                raise RemoteProtocolError(f"an answer with opaque {frame.opaque}, which no request has")
            if more := runner.receive(frame):
                self.queue(more)
        return runner.result  # type: ignore[return-value]

    # pipelined requests

    def queue(self, data: bytes | memoryview) -> None:
        """Queue this behind what is there already, and send what the socket takes right away."""
        if data:
            self._outbox.append(memoryview(data))
            self._flush()

    def exchange(self) -> bool:
        """Send and receive what is possible without waiting; return whether anything was."""
        before = len(self._outbox)
        sent = self._flush()
        return self._read() or sent or len(self._outbox) < before

    def take_answers(self) -> list[Answers]:
        """The answers to pipelined requests that have come."""
        from .pipeline import Answers, answers_in, one_answer

        answers = [one_answer(frame) for frame in self._answers]
        self._answers.clear()
        for part in answers_in(self._framer):
            if isinstance(part, Answers):
                answers.append(part)
            elif not self._is_push(part):
                raise RemoteProtocolError(f"an answer with opaque {part.opaque}, which no request has")
        return answers

    @property
    def waits_to_send(self) -> bool:
        """Whether something queued is not sent yet."""
        return bool(self._outbox)

    def detach(self) -> tuple[socket.socket, bytes]:
        """Hand over the socket, and what was received on it but not read yet."""
        self._socket.settimeout(self._timeout_s)
        return self._socket, self._framer.take_rest()

    def close(self) -> None:
        self._socket.close()

    @property
    def is_closed(self) -> bool:
        """Whether it is of no more use: it was closed, or lost."""
        return self._socket.fileno() < 0

    # the socket

    def _lost(self, why: str) -> ConnectError:
        """The error to raise when nothing more can come."""
        self.close()
        return ConnectError(why)

    def _receive(self) -> Frame:
        while True:
            frame = self._framer.maybe_frame()
            if frame is not None:
                if self._is_push(frame):
                    continue
                if frame.opaque >= PIPELINED:
                    self._answers.append(frame)
                    continue
                return frame
            if not wait([self], self._timeout_s):
                raise self._lost(f"{self.address} does not answer")
            self.exchange()

    def _is_push(self, frame: Frame) -> bool:
        """Whether the frame is a push of the cluster map, which is ignored: we ask when we need the map."""
        if frame.magic != Magic.SERVER_REQUEST and frame.is_request:
            raise RemoteProtocolError(f"the server sends a request (0x{frame.opcode:02x}) to a client")
        return frame.magic == Magic.SERVER_REQUEST

    def _flush(self) -> bool:
        is_sent = False
        try:
            while self._outbox:
                sent = self._socket.send(self._outbox[0])
                is_sent = True
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                else:
                    self._outbox.popleft()
        except _NOT_NOW:
            pass
        except OSError as error:
            raise self._lost(f"the connection to {self.address} was lost: {_reason(error)}") from error
        return is_sent

    def _read(self) -> bool:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except _NOT_NOW:
            return False
        except OSError as error:
            raise self._lost(f"the connection to {self.address} was lost: {_reason(error)}") from error
        if not data:
            raise self._lost(f"{self.address} closed the connection")
        self._framer.feed(data)
        return True

    def is_pending(self) -> bool:
        """Whether bytes have come that poll does not show."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def fileno(self) -> int:
        return self._socket.fileno()


def wait(connections: Sequence[KvConnection], timeout_s: float) -> list[KvConnection]:
    """Wait for connections that have something to read, or room for what they have to send."""
    if ready := [connection for connection in connections if connection.is_pending()]:
        return ready
    if not hasattr(select, "poll"):  # Windows
        senders = [connection for connection in connections if connection.waits_to_send]
        readable, writable, _ = select.select(connections, senders, [], max(0.0, timeout_s))
        return list(dict.fromkeys([*readable, *writable]))
    poll, by_number = select.poll(), {}
    for connection in connections:
        by_number[connection.fileno()] = connection
        poll.register(connection, select.POLLIN | (select.POLLOUT if connection.waits_to_send else 0))
    return [by_number[number] for number, _ in poll.poll(max(0.0, timeout_s) * 1000)]


def dial(address: Address, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """A connected socket with TCP_NODELAY; `ConnectError` says why there is none."""
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
    """Why there is no connection, and what to check; ``tls`` if TLS failed."""
    if tls:
        advice = "does it speak TLS on this port, and do you trust its certificate?"
        return ConnectError(f"no TLS connection to {address}: {_reason(error)}; {advice}")
    return ConnectError(
        f"can't connect to {address}: {_reason(error)}; is the node running and the port right?"
    )


def _reason(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else None
    if number is not None and number > 0:
        return os.strerror(number)  # asyncio words it differently
    return reason_of(error)
