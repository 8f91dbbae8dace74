"""The product's blocking sources in the simulated cluster: their threads, their event loop, their sockets.

A thread of the product is a `Fiber` here: it runs alone, until it waits for something, and goes on when the
simulation says that this is there. Its event loop has the simulation's time and network. Everything above
that (`client.aio`, `client.blocking`, and their users) is the product's own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from unittest import mock

from cluster.sim_network import Dial
from tailrace import rng
from tailrace.client.blocking import BlockingSource
from tailrace.client.options import SourceOptions
from tailrace.connstr import ConnectionString
from tailrace.errors import TailraceError
from tailrace.spark.rounds import bucket_watch
from tailrace.spark.source import feed, stream

T = TypeVar("T")
_MOST_TURNS = 2_000
_here = threading.local()


class Killed(BaseException):
    """The process of a fiber has ended."""


class Fiber:
    """Blocking code that takes turns with the simulation."""

    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.process = process
        self._work = work
        self._ready: Callable[[], bool] = lambda: True
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self.is_killed = self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fiber", daemon=True)
        self._thread.start()

    @staticmethod
    def current() -> Fiber:
        """The fiber that is running."""
        fiber = _here.fiber
        assert isinstance(fiber, Fiber)
        return fiber

    def _run(self) -> None:
        _here.fiber = self
        self._mine.acquire()
        try:
            if not self.is_killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `turn`
            self._error = error
        finally:
            self._is_over = True
            self._others.release()

    def turn(self) -> bool:
        """Let it go on if what it waits for is there; return whether it did."""
        if self._is_over or not self._ready():
            return False
        self._switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True

    def _switch(self) -> None:
        self._mine.release()
        self._others.acquire()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Called by its own code."""
        while not self.is_killed and not ready():
            self._ready = ready
            self._others.release()
            self._mine.acquire()
        if self.is_killed:
            raise Killed

    def kill(self) -> None:
        self.is_killed = True
        if not self._is_over:
            self._switch()
        self._thread.join()


class _NoSelector:
    """A selector to which nothing comes from the real world."""

    def select(self, timeout: float | None) -> list[object]:
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop in simulated time."""

    def __init__(self, place: str, dial: Dial, now: Callable[[], float]) -> None:
        super().__init__()
        self._selector = _NoSelector()
        self._place, self._dial, self._now = place, dial, now
        self.sockets: list[SimulatedSocket] = []

    def time(self) -> float:
        return self._now()

    def _process_events(self, events: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        protocol = factory()
        socket = SimulatedSocket(self, protocol)
        if not self._dial(self._place, port, socket):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        self.sockets = [*(other for other in self.sockets if not other.closed), socket]
        protocol.connection_made(socket)
        return socket, protocol

    def run_ready(self) -> bool:
        """Do all that is due; return whether there was anything."""
        moved = False
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(_MOST_TURNS):
                if not self._ready and not self._is_due():  # type: ignore[attr-defined]
                    return moved
                moved = True
                self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(before)
        raise AssertionError("the event loop does not come to rest")

    def _is_due(self) -> bool:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        return any(handle.when() <= self.time() for handle in scheduled if not handle.cancelled())


class SimulatedSocket(asyncio.Transport):
    """A transport on one side, an end of the simulated network on the other."""

    def __init__(self, loop: SimulatedLoop, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self.closed = False
        self._loop = loop
        self._protocol = protocol
        self._out = bytearray()
        self._is_paused = self._has_told = False

    # of the transport

    def write(self, data: Any) -> None:
        self._out += data

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True
        self._tell(None)

    close = abort

    def _tell(self, error: Exception | None) -> None:
        if not self._has_told and not self._loop.is_closed():
            self._has_told = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    # of the network

    @property
    def wants_data(self) -> bool:
        return not self.closed and not self._is_paused

    def take(self) -> bytes:
        data = bytes(self._out)
        self._out.clear()
        return data

    def give(self, data: bytes, now: float) -> None:
        while data and not self.closed:
            room = memoryview(self._protocol.get_buffer(len(data)))
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            before = asyncio._get_running_loop()
            asyncio._set_running_loop(self._loop)
            try:
                self._protocol.buffer_updated(count)
            finally:
                asyncio._set_running_loop(before)
        self._loop.run_ready()

    def tick(self, now: float) -> None:
        pass  # the loop has the timers

    def lost(self) -> None:
        self.closed = True
        self._tell(ConnectionResetError(errno.ECONNRESET, "the connection was cut"))


class Process:
    """The process of a reader: what runs in it, and what is gone when it is killed."""

    def __init__(self, place: str, dial: Dial, now: Callable[[], float]) -> None:
        self.now = now
        self.is_killed = False
        self.loop = SimulatedLoop(place, dial, now)
        self._fibers: list[Fiber] = []

    def start(self, work: Callable[[], object]) -> None:
        """Start a thread of the process."""
        self._fibers.append(Fiber(self, work))

    def turn(self) -> None:
        """Let everything go on that can."""
        moved = True
        while moved:
            moved = self.loop.run_ready()
            for fiber in self._fibers:
                moved |= fiber.turn()

    def sleep(self, seconds: float) -> None:
        """Called by a fiber."""
        due = self.now() + seconds
        Fiber.current().wait_until(lambda: self.now() >= due)

    def kill(self) -> None:
        """End it immediately."""
        self.is_killed = True
        for fiber in self._fibers:
            fiber.kill()
        for socket in self.loop.sockets:
            socket.closed = True
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(RuntimeError):  # nothing is left to wait for what it still wants to do
                task.get_coro().close()
        self.loop.close()


class SimulatedSource(BlockingSource):
    """The product's source, whose thread is the simulation."""

    def __init__(self, where: str | ConnectionString, options: SourceOptions) -> None:
        super().__init__(where, options)
        self._process = Fiber.current().process

    def __enter__(self) -> BlockingSource:
        self._await(self._source.__aenter__())
        return self

    def _stop(self) -> None:
        pass

    def _running_loop(self) -> asyncio.AbstractEventLoop | None:
        return None if self._process.is_killed else self._process.loop

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        fiber = Fiber.current()
        if fiber.is_killed:
            work.close()
            raise Killed
        task = self._process.loop.create_task(work)
        fiber.wait_until(task.done)
        try:
            return task.result()
        except TailraceError as error:
            raise error.bare() from None


@contextlib.contextmanager
def simulated_sources(seed: int) -> Iterator[None]:
    """Sources connected while this lasts are in the simulation, and chance is the seed's."""
    dice = random.Random(seed)

    def chance(own: int | None = None) -> random.Random:
        return random.Random(dice.random() if own is None else own)

    def connect(where: str | ConnectionString, **options: Any) -> BlockingSource:
        return SimulatedSource(where, SourceOptions.of(options))

    with (
        mock.patch.object(feed, "connect_sync", connect),
        mock.patch.object(rng, "source", chance),
        mock.patch.object(bucket_watch, "dice", chance),
        mock.patch.object(stream, "POLL_S", 0.0),
    ):
        yield
