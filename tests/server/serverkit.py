"""What the server's tests share: a raw connection that speaks messages, and a node without sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

from tailrace import rng
from tailrace.clock import ManualClock
from tailrace.server.document_values import tombstone_value
from tailrace.server.http import HttpRequestBuffer, HttpService
from tailrace.server.node import Node
from tailrace.server.session import Session
from tailrace.server.settings import Settings
from tailrace.store.engine import Engine
from tailrace.wire.admin import Hello, HelloResponse
from tailrace.wire.codes import Magic, Status
from tailrace.wire.dialect import DCP, KV
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction, Message, Response

TIMEOUT_S = 60.0
M = TypeVar("M", bound=Message)


class Wire:
    """A blocking connection to a node."""

    def __init__(self, port: int, *, host: str = "127.0.0.1", wrap: Any = None) -> None:
        self.socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        if wrap is not None:
            self.socket = wrap(self.socket)
        self._framer = Framer(limit=1 << 30)
        self._opaque = 0x10

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: Message | bytes) -> None:
        self.socket.sendall(
            b"".join(message if isinstance(message, bytes) else message.encode() for message in messages)
        )

    def frame(self) -> Frame:
        """The next frame; EOFError if the server closed."""
        while (frame := self._framer.maybe_frame()) is None:
            data = self.socket.recv(1 << 18)
            if not data:
                raise EOFError
            self._framer.feed(data)
        return frame

    def receive(self) -> Any:
        frame = self.frame()
        return DCP.decode(frame, Direction.TO_RECEIVER)

    def call(self, message: Message) -> Any:
        """Send a request and take its answer, decoded by the request's own declaration."""
        self._opaque += 1
        message.opaque = self._opaque
        self.send(message)
        frame = self.frame()
        assert frame.magic == Magic.RESPONSE, frame
        assert (frame.opcode, frame.opaque) == (message.OPCODE, message.opaque), frame
        response = message.RESPONSE or Response
        return response.decode(frame)

    def ok(self, message: Message) -> Any:
        answer = self.call(message)
        assert answer.status == Status.SUCCESS, (message, Status(answer.status), answer.value)
        return answer

    def refused(self, message: Message) -> Status:
        answer = self.call(message)
        assert answer.status != Status.SUCCESS
        return Status(answer.status)

    def hello(self, *features: int) -> list[int]:
        value = b"".join(struct.pack(">H", feature) for feature in features)
        answer: HelloResponse = self.ok(Hello(key=b"test", value=value))
        return answer.features

    def is_closed(self) -> bool:
        """Whether the server closes without another byte."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


class Bench:
    """A node without sockets, on a clock that is turned by hand."""

    def __init__(
        self,
        *,
        vbuckets: int = 4,
        users: dict[str, str] | None = None,
        buckets: Iterable[str] = ("default",),
        **settings: Any,
    ) -> None:
        self.clock = ManualClock()
        self.settings = Settings.parse(f"{name}={value}" for name, value in settings.items())
        store_settings = self.settings.for_store()
        store_settings.tombstone_value = tombstone_value
        self.engine = Engine(None, settings=store_settings, clock=self.clock, rng=rng.source(7))
        for name in buckets:
            self.engine.create_bucket(name, vbuckets)
        self.jobs: list[tuple[Any, Any]] = []
        self.node = Node(
            self.engine,
            users=users,
            settings=self.settings,
            clock=self.clock,
            rng=rng.source(8),
            run_job=lambda job, done: self.jobs.append((job, done)),
        )

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def session(self) -> Session:
        session = self.node.accept("test:1", self.now)
        assert session is not None
        return session

    def run_jobs(self) -> None:
        """Run what would run on a thread."""
        while self.jobs:
            job, done = self.jobs.pop(0)
            job.run()
            done()

    def advance(self, seconds: float) -> None:
        """Time passes, and every timer that came due was kept."""
        end = self.now + seconds
        while True:
            timers = [
                self.node.next_timer(),
                *(session.next_timer() for session in self.node.sessions if not session.closed),
            ]
            due = min((timer for timer in timers if timer is not None), default=end + 1)
            if due > end:
                break
            self.clock.advance(max(0.0, due - self.now))
            self.node.handle_timer(self.now)
            for session in list(self.node.sessions):
                session.handle_timer(self.now)
        self.clock.advance(end - self.now)


def take(session: Session) -> list[Frame]:
    """Everything that a session has to send, as frames."""
    return list(frames_of(b"".join(bytes(part) for part in session.data_to_send(1 << 30))))


def frames_of(data: bytes) -> Iterator[Frame]:
    framer = Framer(limit=1 << 30)
    framer.feed(data)
    yield from framer.frames()
    assert not framer.buffered


def ask(bench: Bench, session: Session, *messages: Message | bytes) -> list[Frame]:
    """Send requests in one piece and take what is answered at once."""
    data = b"".join(message if isinstance(message, bytes) else message.encode() for message in messages)
    session.receive_data(data, bench.now)
    return take(session)


def decode(frame: Frame) -> Any:
    return KV.decode(frame, Direction.TO_RECEIVER)


def http_answer(service: HttpService, head: Sequence[str], body: bytes = b"") -> bytes:
    """What a service answers to a request; ``head`` are its first line and its headers."""
    buffer = HttpRequestBuffer()
    lines = [*head, f"Content-Length: {len(body)}", "", ""]
    assert buffer.add("\r\n".join(lines).encode() + body)
    answer = buffer.answer(service)
    assert isinstance(answer, bytes)
    return answer
