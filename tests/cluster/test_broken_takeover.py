"""A takeover by DCP whose connection breaks at any message, while both nodes live: one of them is active."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import tailrace.testing
from tailrace.client.kv import KvClient
from tailrace.cluster import takeover
from tailrace.cluster.takeover import take_over
from tailrace.connstr import parse
from tailrace.errors import TailraceError
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState

VBUCKETS = 64
KEYS = [f"k{number}" for number in range(3)]


class Line:
    """The line between the two nodes: breaks instead of passing on the ``at``-th message ``to`` one of them.

    If it is ``late``, the target sees the end immediately, the source that message and the end when told to.
    """

    def __init__(self, port: int, *, to: str, at: int, late: bool) -> None:
        self._port, self._to, self._at, self._late = port, to, at, late
        self.is_cut = False
        self._release = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends = []
        self._threads = []
        self._start(self._accept)

    def _start(self, work: Callable[..., Any], *arguments: socket.socket | str) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                target = self._listener.accept()[0]
                source = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [source, target]
                self._start(self._pass_on, target, source, "source")
                self._start(self._pass_on, source, target, "target")

    def _pass_on(self, here: socket.socket, other: socket.socket, to: str) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                message = receive(here)
                with self._lock:
                    if self.is_cut:
                        return
                    if not message:
                        break
                    if (to, number) == (self._to, self._at):
                        self.is_cut = True
                    else:
                        other.sendall(message)
                if self.is_cut:
                    self._cut(here, other, message)
                    return
        with self._lock:
            if not self.is_cut:
                hang_up(here)
                hang_up(other)

    def _cut(self, here: socket.socket, other: socket.socket, message: bytes) -> None:
        hang_up(here)
        if self._late:
            self._release.wait(60)
            with contextlib.suppress(OSError):
                other.sendall(message)
        hang_up(other)

    def release(self) -> None:
        self._release.set()

    def close(self) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            hang_up(end)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


def receive(connection: socket.socket) -> bytes:
    """A whole message; empty when there are no more."""
    message = b""
    while len(message) < 24 or len(message) < 24 + int.from_bytes(message[8:12], "big"):
        wanted = (
            24 - len(message)
            if len(message) < 24
            else 24 + int.from_bytes(message[8:12], "big") - len(message)
        )
        data = connection.recv(wanted)
        if not data:
            return b""
        message += data
    return message


def hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def wait_until(done: Callable[..., Any]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sees_streams(source: RunningNode) -> bool:
    with KvClient(source.url) as client:
        return any(":stream_" in name for name in client.stats("dcp"))


def state(node: RunningNode, number: int) -> str:
    return VBucketState(node.call(lambda inner: inner.buckets["default"].store.vbuckets[number].state)).name


@pytest.mark.parametrize(
    ("to", "late"), [("source", False), ("target", False), ("source", True)], ids=["source", "target", "late"]
)
def test_a_takeover_that_breaks_at_any_message(monkeypatch: pytest.MonkeyPatch, to: str, late: bool) -> None:
    real_order, real_give_back = takeover._Node.order, takeover._Takeover._give_back
    line = None

    def order(self: Any, *arguments: Any) -> dict[str, Any]:
        return real_order(self, *arguments) | ({"port": line.port} if line is not None else {})

    def give_back(self: Any, vbuckets: list[int]) -> None:
        """The source sees the end when it is waited for, or when all is done."""

        def sleep(seconds: Any) -> None:
            if line:
                line.release()
            time.sleep(seconds)

        with monkeypatch.context() as patch:
            patch.setattr(takeover, "sleep", sleep)
            real_give_back(self, vbuckets)

    monkeypatch.setattr(takeover._Node, "order", order)
    monkeypatch.setattr(takeover._Takeover, "_give_back", give_back)
    with (
        tailrace.testing.node(vbuckets=VBUCKETS) as source,
        tailrace.testing.node(vbuckets=VBUCKETS) as target,
    ):
        urls = parse(source.url), parse(target.url)
        take_over(*urls, [])
        given_up = broken = 0
        for number in range(VBUCKETS):
            for key in KEYS:
                source.set(key, number, vbucket=number)
            line = Line(source.port, to=to, at=number, late=late)
            try:
                with contextlib.suppress(TailraceError):
                    take_over(*urls, [number])
                line.release()
                wait_until(lambda: not sees_streams(source))
                was_cut = line.is_cut
            finally:
                line.close()
                line = None
            broken += was_cut
            given_up += was_cut and state(target, number) == "ACTIVE"
            assert {state(node, number) for node in (source, target)} == {"ACTIVE", "DEAD"}, (to, number)
            take_over(*urls, [number])
            assert (state(source, number), state(target, number)) == ("DEAD", "ACTIVE")
            assert [target.get(key, vbucket=number) for key in KEYS] == [number] * len(KEYS)
            if not was_cut:
                break
        else:
            raise AssertionError("there are more messages than vbuckets")
        assert broken > 15 and given_up <= broken
