"""Our transport and asyncio's keep the same contract: every test runs on both."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tailrace.server import transport as transport_module
from tailrace.server.transport import PlainTransport, Poller, accept_plain

END_S = 60.0
SOME = bytes(range(256)) * 8  # as the answer to a few requests
MUCH = bytes(range(256)) * (16 << 10)  # 4 MiB: more than the sockets here take at once


class Recorder(asyncio.Protocol):
    """Records what happens to it."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.received = b""
        self.lost = asyncio.Event()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.got = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.got.set()
        if self.received == b"bug":
            raise ZeroDivisionError

    def eof_received(self) -> bool:
        self.events.append("eof")
        return False

    def pause_writing(self) -> None:
        self.events.append("full")
        self.paused.set()

    def resume_writing(self) -> None:
        self.events.append("room")
        self.resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost" if exc is None else type(exc).__name__)
        self.lost.set()


async def ours(connection: socket.socket, protocol: asyncio.Protocol) -> None:
    loop = asyncio.get_running_loop()
    PlainTransport(loop, Poller(loop), connection, protocol)


async def asyncios(connection: socket.socket, protocol: asyncio.Protocol) -> None:
    await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)


@pytest.fixture(params=[ours, asyncios])
def connected(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A recorder on one end of a connection, and the other end."""

    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[Recorder, socket.socket]]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname())
            connection, _ = listener.accept()
        for end in (peer, connection):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        peer.setblocking(False)
        connection.setblocking(False)
        recorder = Recorder()
        await request.param(connection, recorder)
        with peer:
            yield recorder, peer
        if not recorder.lost.is_set():
            recorder.transport.abort()
        await in_time(recorder.lost.wait())
        await asyncio.sleep(0)
        assert connection.fileno() == -1

    return make


async def in_time(what: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(what, END_S)


async def receive(peer: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < size and (some := await in_time(loop.sock_recv(peer, 1 << 20))):
        data += some
    return bytes(data)


def test_what_is_written_comes_in_order_however_much_it_is(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            transport = recorder.transport
            transport.set_write_buffer_limits(high=100_000)
            assert transport.get_write_buffer_size() == 0
            parts: list[Any] = [b"first", MUCH, b"", b"between", memoryview(MUCH)[5:], bytearray(b"last")]
            for part in parts:
                transport.write(part)
            assert transport.get_write_buffer_size() > 100_000
            assert recorder.events == ["made", "full"]
            whole = b"".join(parts)
            assert await receive(peer, len(whole)) == whole
            await in_time(recorder.resumed.wait())
            assert transport.get_write_buffer_size() == 0
            assert recorder.events == ["made", "full", "room"]

    asyncio.run(run())


@pytest.mark.parametrize("waits", [False, True])
def test_many_are_written_in_order_however_much_it_is(connected: Callable[..., Any], waits: bool) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            transport = recorder.transport
            before = [MUCH, b"before"] if waits else []
            few: list[Any] = [b"first", bytearray(b""), memoryview(b"second")]
            many: list[Any] = [
                b"third",
                MUCH,
                b"",
                b"between",
                memoryview(MUCH)[5:],
                *(b"%d" % at for at in range(2000)),
            ]
            for part in before:
                transport.write(part)
            transport.writelines(few)
            assert bool(transport.get_write_buffer_size()) == waits
            transport.writelines(iter(many))
            transport.write(b"last")
            assert recorder.events == ["made", "full"]
            whole = b"".join([*before, *few, *many, b"last"])
            assert await receive(peer, len(whole)) == whole
            await in_time(recorder.resumed.wait())
            assert transport.get_write_buffer_size() == 0

    asyncio.run(run())


def test_a_writer_that_waits_for_room_is_asked_again(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            for _ in range(3):
                recorder.paused.clear()
                recorder.resumed.clear()
                recorder.transport.write(MUCH)
                await in_time(recorder.paused.wait())
                assert await receive(peer, len(MUCH)) == MUCH
                await in_time(recorder.resumed.wait())
            assert recorder.events == ["made", *["full", "room"] * 3]

    asyncio.run(run())


def test_what_resume_writing_writes_is_sent_too(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            recorder.resume_writing = lambda: recorder.transport.write(b"the rest")
            recorder.transport.write(MUCH)
            assert await receive(peer, len(MUCH) + 8) == MUCH + b"the rest"

    asyncio.run(run())


def test_close_sends_what_is_left(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            recorder.transport.write(MUCH)
            recorder.transport.close()
            recorder.transport.close()
            assert recorder.transport.is_closing()
            assert (await receive(peer, 2 * len(MUCH))) == MUCH
            await in_time(recorder.lost.wait())
            assert [event for event in recorder.events if event != "room"] == ["made", "full", "lost"]

    asyncio.run(run())


def test_abort_forgets_what_is_left(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            recorder.transport.write(MUCH)
            recorder.transport.abort()
            recorder.transport.abort()
            assert recorder.transport.get_write_buffer_size() == 0
            await in_time(recorder.lost.wait())
            assert len(await receive(peer, len(MUCH))) < len(MUCH)
            assert recorder.events == ["made", "full", "lost"]

    asyncio.run(run())


def test_the_peer_closes(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            peer.sendall(b"good bye")
            peer.close()
            await in_time(recorder.lost.wait())
            assert recorder.received == b"good bye"
            assert recorder.events == ["made", "eof", "lost"]

    asyncio.run(run())


def test_the_peer_breaks_off_while_it_is_written_to(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            recorder.transport.write(MUCH)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.close()
            await in_time(recorder.lost.wait())
            assert recorder.events in (
                ["made", "full", error] for error in ("ConnectionResetError", "BrokenPipeError")
            )

    asyncio.run(run())


def test_who_is_not_read_is_read_later(connected: Callable[..., Any]) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            transport = recorder.transport
            await asyncio.sleep(0)
            transport.pause_reading()
            transport.pause_reading()
            assert not transport.is_reading()
            peer.sendall(b"wait")
            for _ in range(10):
                await asyncio.sleep(0)
            assert recorder.received == b""
            transport.resume_reading()
            transport.resume_reading()
            assert transport.is_reading()
            while recorder.received != b"wait":
                recorder.got.clear()
                await in_time(recorder.got.wait())

    asyncio.run(run())


def test_a_bug_closes_the_connection_and_is_logged(
    connected: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with connected() as (recorder, peer):
            peer.sendall(b"bug")
            await in_time(recorder.lost.wait())
            assert recorder.events == ["made", "ZeroDivisionError"]
            assert await receive(peer, 1) == b""

    asyncio.run(run())
    assert "ZeroDivisionError" in caplog.text


class Answering(Recorder):
    """Writes answers to what it receives, then looks at what those before it have not sent yet."""

    def __init__(self, before: Sequence[Recorder], answers: list[bytes], then: str | None) -> None:
        super().__init__()
        self._before, self._answers, self._then = before, answers, then
        self.unsent: list[int] = []

    def data_received(self, data: bytes) -> None:
        for answer in self._answers:
            self.transport.write(answer)
        if self._then is not None:
            getattr(self.transport, self._then)()
        self.unsent = [connection.transport.get_write_buffer_size() for connection in self._before]
        super().data_received(data)


class TestSeveralAreReady:
    """All are read before the first is answered."""

    @pytest.fixture(autouse=True)
    def _one_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make turns long enough for any machine: a turn that ends in between sends what it holds."""
        monkeypatch.setattr(transport_module, "_POLL_S", 60)

    def exchange(self, *all_answers: list[bytes], then: str | None = None) -> tuple[list[bytes], list[int]]:
        """What each peer gets, and how much was not sent when the last one had been read; the first does
        something more after it has answered.
        """
        protocols: list[Answering] = []

        async def run() -> list[bytes]:
            loop = asyncio.get_running_loop()
            poller, peers, connections = Poller(loop), [], []
            with socket.create_server(("127.0.0.1", 0)) as listener:
                for answers in all_answers:
                    peers.append(socket.create_connection(listener.getsockname()))
                    connections.append(listener.accept()[0])
                    for end in (peers[-1], connections[-1]):
                        end.setblocking(False)
                    protocols.append(Answering(protocols[:], answers, None if protocols else then))
                    PlainTransport(loop, poller, connections[-1], protocols[-1])
            for peer, connection in zip(peers, connections, strict=True):  # the loop stands still meanwhile
                peer.sendall(b"ask")
                assert select.select([connection], [], [], END_S)[0]
            for protocol in protocols:
                await in_time(protocol.got.wait())
                protocol.transport.close()
            got = [await receive(peer, 1 << 30) for peer in peers]
            for peer, protocol in zip(peers, protocols, strict=True):
                await in_time(protocol.lost.wait())
                peer.close()
            return got

        return asyncio.run(run()), protocols[-1].unsent

    def test_answers_wait_for_each_other(self) -> None:
        assert self.exchange([SOME], [2 * SOME], [SOME]) == (
            [SOME, 2 * SOME, SOME],
            [len(SOME), 2 * len(SOME)],
        )

    def test_one_alone_does_not_wait(self) -> None:
        assert self.exchange([SOME, SOME]) == ([SOME + SOME], [])

    def test_small_ones_go_at_once(self) -> None:
        assert self.exchange([b"one"], [SOME], [b"3"]) == ([b"one", SOME, b"3"], [0, len(SOME)])

    def test_large_ones_go_at_once_behind_those_before_them(self) -> None:
        large = bytes(transport_module._HELD_BYTES + 1)
        got, unsent = self.exchange([SOME], [large], [SOME])
        assert got == [SOME, large, SOME]
        assert unsent[0] == 0

    def test_what_is_written_behind_it_stays_behind_it(self) -> None:
        got, _ = self.exchange([SOME, b"next", b"", SOME, b"last"], [MUCH, SOME, b"end"], [b"3", SOME])
        assert got == [SOME + b"next" + SOME + b"last", MUCH + SOME + b"end", b"3" + SOME]

    @pytest.mark.parametrize(("name", "limit"), [("_HELD", 2), ("_HELD_BYTES", 2 * len(SOME))])
    def test_no_more_than_some_wait(self, monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
        monkeypatch.setattr(transport_module, name, limit)
        assert self.exchange(*[[SOME]] * 5) == ([SOME] * 5, [0, 0, 0, 0])

    def test_close_sends_it(self) -> None:
        assert self.exchange([SOME], [b"2"], then="close")[0] == [SOME, b"2"]

    def test_abort_forgets_it(self) -> None:
        assert self.exchange([SOME], [b"2"], then="abort")[0] == [b"", b"2"]

    def test_a_bug_in_one_does_not_hold_up_the_others(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        write, failed = PlainTransport._write, []

        def buggy(transport: PlainTransport) -> None:
            if not failed:
                failed.append(transport)
                raise ZeroDivisionError
            write(transport)

        monkeypatch.setattr(PlainTransport, "_write", buggy)
        assert self.exchange([SOME], [SOME], [SOME])[0] == [b"", SOME, SOME]
        assert "ZeroDivisionError" in caplog.text


class TestAccepting:
    def test_it_goes_on_when_there_are_descriptors_again(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(transport_module, "_RETRY_S", 0.0)

        class Listener(socket.socket):
            refusals = 2

            def accept(self) -> tuple[socket.socket, tuple[str, int]]:
                if self.refusals:
                    self.refusals -= 1
                    raise OSError(errno.EMFILE, "too many open files")
                return super().accept()

        async def run() -> None:
            with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                listener.setblocking(False)
                loop, recorder = asyncio.get_running_loop(), Recorder()
                accept_plain(loop, listener, lambda: recorder)
                with socket.create_connection(listener.getsockname()) as peer:
                    peer.sendall(b"here")
                    await in_time(recorder.got.wait())
                    extra = recorder.transport.get_extra_info
                    assert extra("peername") == peer.getsockname()
                    assert extra("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                await in_time(recorder.lost.wait())
                loop.remove_reader(listener)
                await asyncio.sleep(0)

        asyncio.run(run())
        assert "too many open files" in caplog.text


class TestPoller:
    """Sockets that the loop does not know one by one."""

    def test_who_was_taken_out_in_the_same_turn_is_not_called(self) -> None:
        async def run() -> None:
            poller, called = Poller(asyncio.get_running_loop()), []
            pairs = [socket.socketpair() for _ in range(3)]
            left = {here.fileno() for here, _ in pairs}
            done = asyncio.Event()

            def read(own: int) -> None:
                called.append(own)
                for fd in left:
                    poller.remove_reader(fd)
                done.set()

            for here, there in pairs:
                there.send(b"x")
                poller.add_reader(here.fileno(), partial(read, here.fileno()))
            await in_time(done.wait())
            await asyncio.sleep(0)
            assert len(called) == 1
            assert called[0] in left
            for pair in pairs:
                for end in pair:
                    end.close()

        asyncio.run(run())

    def test_reading_and_writing_come_and_go_one_by_one(self) -> None:
        async def run() -> None:
            poller, called = Poller(asyncio.get_running_loop()), []
            here, there = socket.socketpair()
            fd, done = here.fileno(), asyncio.Event()

            def note(what: str, end: bool) -> None:
                called.append(what)
                if end:
                    done.set()

            def read() -> None:
                here.recv(1)
                note("read", end=False)

            def once(remove: Callable[[int], None], what: str) -> Callable[[], None]:
                def ready() -> None:
                    remove(fd)
                    note(what, end=True)

                return ready

            there.send(b"x")
            poller.remove_writer(fd)  # it was never there
            poller.add_reader(fd, read)
            poller.add_writer(fd, once(poller.remove_writer, "written"))
            await in_time(done.wait())
            assert sorted(called) == ["read", "written"]
            poller.remove_reader(fd)
            done.clear()
            called.clear()
            there.send(b"x")  # nobody asks
            poller.add_writer(fd, once(poller.remove_writer, "written again"))
            await in_time(done.wait())
            poller.add_reader(fd, once(poller.remove_reader, "read again"))
            done.clear()
            await in_time(done.wait())
            assert called == ["written again", "read again"]
            here.close()
            there.close()

        asyncio.run(run())
