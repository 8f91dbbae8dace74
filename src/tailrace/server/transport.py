"""TCP connections with less between the socket and its protocol than asyncio puts there.

asyncio's own transports serve every kind of socket and loop. When each read brings one request they take a
sixth of the whole time, and they copy what a peer does not take at once. These do only what a node needs and
keep asyncio's contract, so that a protocol can't tell the difference; TLS stays with asyncio.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from .turn import TURN_S

__all__ = ["PlainTransport", "accept_plain"]

log = logging.getLogger("tailrace.server")

_READ_BYTES = 256 << 10
_PIECES = 64
_SEND_BYTES = 1 << 20
"""At most this many pieces, and about this many bytes, go to one system call: over loopback the system does
the receiver's work in it too, and took 20 ms for what it accepts of a value of 20 MiB.
"""
_AT_ONCE = 64
"""At most this many connections are accepted in a row."""
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 1.0
_IN_A_ROW = 16
"""About how many sockets are served before the loop's other work has its turn."""
_POLL_S = 2 * TURN_S
"""How long sockets are served before that."""
_READABLE, _WRITABLE = 1, 4  # EPOLLIN and EPOLLOUT
_BUG = "a bug in handling a connection, which is closed"
_HELD = 16
_HELD_BYTES = 128 << 10
"""At most this many answers, and this many bytes, are held back while several sockets are read."""
_WORTH_HOLDING_BYTES = 1 << 10
"""A smaller answer is for a peer that asks for one thing at a time; it is sent at once."""


class Poller:
    """Waits for many sockets in place of the loop, which sees a single descriptor. Ready sockets are served
    from here, and it polls again at once: a turn of the loop costs more than a get.

    If several sockets are ready, all are read before large answers are sent. Sending between two reads would
    empty the processor's caches, and would wake a peer that then waits for answers on its other connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self.holds = False  # what is written now is sent later
        self._held: list[PlainTransport] = []
        self._held_bytes = 0
        self._readers: dict[int, Callable[[], None]] = {}
        self._writers: dict[int, Callable[[], None]] = {}
        self._due: deque[tuple[int, int]] = deque()
        """Sockets that are ready and not served yet. They are kept because epoll moves every socket that it
        has reported to the end of its own list: polled again, it might report some of them too late.
        """

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self._change(fd, self._readers, callback)

    def remove_reader(self, fd: int) -> None:
        self._change(fd, self._readers, None)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        self._change(fd, self._writers, callback)

    def remove_writer(self, fd: int) -> None:
        self._change(fd, self._writers, None)

    def _change(
        self, fd: int, callbacks: dict[int, Callable[[], None]], callback: Callable[[], None] | None
    ) -> None:
        readers, writers = self._readers, self._writers
        was_idle, was_known = not (readers or writers), fd in readers or fd in writers
        if callback is not None:
            callbacks[fd] = callback
        elif callbacks.pop(fd, None) is None:
            return
        events = (_READABLE if fd in readers else 0) | (_WRITABLE if fd in writers else 0)
        if not events:
            self._epoll.unregister(fd)
            if not (readers or writers):
                self._loop.remove_reader(self._epoll.fileno())
        elif was_known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
            if was_idle:
                self._loop.add_reader(self._epoll.fileno(), self._poll)

    def _poll(self) -> None:
        readers, writers, due, time = self._readers, self._writers, self._due, self._loop.time
        left, turn_ends = _IN_A_ROW, time() + _POLL_S
        while left > 0:
            if not due:
                due.extend(self._epoll.poll(0))
                if not due:
                    return
            left -= len(due)
            self.holds = len(due) > 1
            try:
                while due:
                    fd, events = due.popleft()
                    # An earlier callback may have removed this one.
                    if events & ~_WRITABLE and (read := readers.get(fd)) is not None:
                        read()
                    if events & ~_READABLE and (write := writers.get(fd)) is not None:
                        write()
                    if time() >= turn_ends:
                        return  # the others are served first the next time
            finally:
                self.holds = False
                if self._held:
                    self._release()

    def hold(self, transport: PlainTransport, size: int) -> bool:
        """Whether these bytes are held back; if so, `send_held` is called later."""
        if len(self._held) >= _HELD or self._held_bytes + size > _HELD_BYTES:
            self._release()
        if size > _HELD_BYTES:
            return False
        self._held.append(transport)
        self._held_bytes += size
        return True

    def _release(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        for transport in held:
            transport.send_held()


def _for_one_call(pieces: Iterable[bytes | bytearray | memoryview]) -> list[bytes | bytearray | memoryview]:
    """As much of these as goes into one system call."""
    sendable: list[bytes | bytearray | memoryview] = []
    left = _SEND_BYTES
    for piece in islice(pieces, _PIECES):
        sendable.append(piece if len(piece) <= left else memoryview(piece)[:left])
        left -= len(piece)
        if left <= 0:
            break
    return sendable


def _send_joined(to: socket.socket, pieces: list[bytes | bytearray | memoryview]) -> int:
    return to.send(b"".join(pieces))


_send: Callable[[socket.socket, list[bytes | bytearray | memoryview]], int] = getattr(
    socket.socket, "sendmsg", _send_joined
)
"""Sends several pieces in one system call; Windows has none for that."""


class PlainTransport(asyncio.Transport):
    """A connected, non-blocking socket and its protocol; see asyncio's documentation for what each method
    promises.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        poller: Poller | asyncio.AbstractEventLoop,
        connection: socket.socket,
        protocol: asyncio.Protocol,
    ) -> None:
        super().__init__({"peername": connection.getpeername(), "socket": connection})
        self._loop = loop
        self._poller = poller
        self._socket = connection
        self._fd = connection.fileno()
        self._protocol = protocol
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high, self._low = 64 << 10, 16 << 10
        self._is_full = False
        self._is_reading = True
        self._is_closing = False
        self._is_lost = False
        protocol.connection_made(self)
        if self._is_reading and not self._is_closing:
            poller.add_reader(self._fd, self._read)

    def is_closing(self) -> bool:
        return self._is_closing

    # Reading.

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        try:
            if data:
                self._protocol.data_received(data)
            elif self._protocol.eof_received():
                self._poller.remove_reader(self._fd)
            else:
                self.close()
        except Exception as error:
            log.exception(_BUG)
            self._fail(error)

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        if self.is_reading():
            self._is_reading = False
            self._poller.remove_reader(self._fd)

    def resume_reading(self) -> None:
        if not self._is_reading and not self._is_closing:
            self._is_reading = True
            self._poller.add_reader(self._fd, self._read)

    # Writing.

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = (64 << 10 if low is None else 4 * low) if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send; what does not go at once is kept without a copy, so the caller must not change it then."""
        if self._is_lost:
            return
        if self._unsent:
            if not data:
                return
            rest = memoryview(data)
        elif len(data) >= _WORTH_HOLDING_BYTES and self._is_held(len(data)):
            rest = memoryview(data)
        else:
            try:
                sent = self._socket.send(data if len(data) <= _SEND_BYTES else memoryview(data)[:_SEND_BYTES])
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._fail(error)
                return
            if sent == len(data):
                return
            rest = memoryview(data)[sent:]
            self._poller.add_writer(self._fd, self._write)
        self._unsent.append(rest)
        self._unsent_bytes += len(rest)
        if self._unsent_bytes > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def _is_held(self, size: int) -> bool:
        poller = self._poller
        return isinstance(poller, Poller) and poller.holds and poller.hold(self, size)

    def send_held(self) -> None:
        """Send what was written while other sockets were read. Others are sent after it, so it never
        raises.
        """
        try:
            if self._unsent:
                self._write()
                if self._unsent:
                    self._poller.add_writer(self._fd, self._write)
        except Exception as error:
            log.exception(_BUG)
            self._fail(error)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Like `write`, for several pieces: in one system call, without copying."""
        pieces = list(list_of_data)
        if not self._unsent and not self._is_lost:
            try:
                sent = _send(self._socket, _for_one_call(pieces))
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._fail(error)
                return
            done = 0
            while done < len(pieces) and sent >= len(pieces[done]):
                sent -= len(pieces[done])
                done += 1
            del pieces[:done]
            if sent:
                pieces[0] = memoryview(pieces[0])[sent:]
        for piece in pieces:
            self.write(piece)

    def _write(self) -> None:
        unsent = self._unsent
        try:
            sent = _send(self._socket, _for_one_call(unsent))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(error)
            return
        self._unsent_bytes -= sent
        while sent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = unsent[0][sent:]
        if self._is_full and self._unsent_bytes <= self._low:
            self._is_full = False
            self._protocol.resume_writing()  # and may write more
        if not unsent:
            self._poller.remove_writer(self._fd)
            if self._is_closing and not self._is_lost:
                self._lose(None)

    # The end.

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._poller.remove_reader(self._fd)
            if not self._unsent:
                self._lose(None)

    def abort(self) -> None:
        self._fail(None)

    def _fail(self, error: Exception | None) -> None:
        """Close at once; what was not sent is lost."""
        if not self._is_lost:
            self._is_closing = True
            self._poller.remove_reader(self._fd)
            self._poller.remove_writer(self._fd)
            self._unsent.clear()
            self._unsent_bytes = 0
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self._is_lost = True
        self._loop.call_soon(self._end, error)

    def _end(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


def accept_plain(
    loop: asyncio.AbstractEventLoop, listener: socket.socket, protocol_of: Callable[[], asyncio.Protocol]
) -> None:
    """Accept connections from now on, until the listener is closed or taken from the loop."""
    poller = Poller(loop) if hasattr(select, "epoll") else loop

    def accept() -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF:
                    raise
                log.error("no connection can be accepted for now: %s", error)
                loop.remove_reader(listener)
                loop.call_later(_RETRY_S, again)
                return
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                PlainTransport(loop, poller, connection, protocol_of())
            except OSError:  # the peer is gone already
                connection.close()
            except BaseException:
                connection.close()
                raise

    def again() -> None:
        if listener.fileno() >= 0:
            loop.add_reader(listener, accept)

    loop.add_reader(listener, accept)
