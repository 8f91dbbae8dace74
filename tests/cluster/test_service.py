"""The coordinator's process, its commands and its end, without nodes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.processes import until
from tailrace.cluster.coordinator import Coordinator
from tailrace.cluster.service import DOOR_FILE, Service, call
from tailrace.errors import ConnectError, TailraceError, UsageError


class _Unmoved(Coordinator):
    """A coordinator whose rebalance takes for ever."""

    def __init__(self, directory: Path, *, fails: bool = False) -> None:
        """``fails``: it can't give the rebalance up without an error."""
        super().__init__(directory)
        self.story: list[str] = []
        self._fails = fails

    def _start(self, name: str) -> None:
        self.story.append(f"{name} is started")

    def rebalance(self, *, leaving: str | None = None) -> Generator[str, None, None]:
        try:
            while True:
                yield "nothing moves"
        finally:
            self.story.append("the rebalance is given up")
            if self._fails:
                raise TailraceError("node n1 does not answer")

    def stop(self) -> None:
        self.story.append("the nodes are stopped")
        super().stop()


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the signals that the service handles."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def serve(directory: Path, coordinator: Coordinator, meanwhile: Callable[[], None]) -> None:
    """Run the service, and beside it something that ends with a stop."""

    def act() -> None:
        until((directory / DOOR_FILE).exists, "the service does not start")
        try:
            meanwhile()
        finally:
            call(directory, "stop")

    with ThreadPoolExecutor() as threads:
        acting = threads.submit(act)
        Service(coordinator).run()
        acting.result()


def test_what_can_not_be_understood_stops_nothing(tmp_path: Path, signals: None) -> None:
    def meanwhile() -> None:
        door = json.loads((tmp_path / DOOR_FILE).read_bytes())

        def answer(line: bytes) -> bytes:
            with (
                socket.create_connection(("127.0.0.1", door["port"]), timeout=60) as peer,
                contextlib.suppress(ConnectionError),  # it need not read all of it
            ):
                peer.sendall(line)
                peer.shutdown(socket.SHUT_WR)
                return peer.makefile("rb").read()
            return b""

        with_token = {"token": door["token"], "command": "failover"}
        for line in (
            b"",
            b'{"command": "status"}',
            b"{\n",
            b"[]\n",
            b"[" * 50_000 + b"\n",
            b"x" * (1 << 20) + b"\n",
            json.dumps({**with_token, "arguments": 1}).encode() + b"\n",
            json.dumps({**with_token, "arguments": {}}).encode() + b"\n",  # which node?
        ):
            assert answer(line) == b"", line[:20]
        refusal = json.loads(answer(b'{"token": "x", "command": "stop"}\n'))
        assert refusal == {"ok": False, "error": "the token is wrong", "usage": True}
        with pytest.raises(UsageError, match="there is no command 'start'"):
            call(tmp_path, "start")
        with pytest.raises(UsageError, match="there is no node 'n9'"):
            call(tmp_path, "remove", node="n9")
        assert call(tmp_path, "status")["rebalancing"] is False

    serve(tmp_path, _Unmoved(tmp_path), meanwhile)


def test_a_node_is_added(tmp_path: Path, signals: None) -> None:
    def meanwhile() -> None:
        with pytest.raises(UsageError, match="there is no node 'n9'"):
            call(tmp_path, "add", node="n9")
        assert call(tmp_path, "add") == {"node": "n1"}
        assert call(tmp_path, "add", node="n1") == {"node": "n1"}  # it is down

    coordinator = _Unmoved(tmp_path)
    serve(tmp_path, coordinator, meanwhile)
    assert coordinator.story == ["n1 is started", "n1 is started", "the nodes are stopped"]


def test_who_asked_for_a_rebalance_hears_how_it_ended(tmp_path: Path, signals: None) -> None:
    class Moving(Coordinator):
        outcomes = [None, TailraceError("node n1 is down")]

        def rebalance(self, *, leaving: str | None = None) -> Generator[str, None, None]:
            yield "it moves"
            if (error := self.outcomes.pop(0)) is not None:
                raise error

    def meanwhile() -> None:
        assert call(tmp_path, "rebalance") == coordinator.status()
        with pytest.raises(TailraceError, match=r"^node n1 is down$"):
            call(tmp_path, "rebalance")
        assert call(tmp_path, "status")["rebalancing"] is False

    coordinator = Moving(tmp_path)
    serve(tmp_path, coordinator, meanwhile)


def test_a_coordinator_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match=r"^no cluster is running in '.*'; start one with"):
        call(tmp_path, "status")
    door = tmp_path / DOOR_FILE
    for content in ("", "[]", "{}"):
        door.write_text(content)
        with pytest.raises(ConnectError, match=r"can't be reached \(.*is damaged\); if it was killed"):
            call(tmp_path, "status")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        door.write_text(json.dumps({"token": "t", "port": listening.getsockname()[1]}))
        with pytest.raises(ConnectError, match="the coordinator does not answer: "):
            call(tmp_path, "status", wait_s=0.05)
        listening.accept()[0].close()

        def hang_up() -> None:
            peer, _ = listening.accept()
            with peer, peer.makefile("rb") as lines:
                lines.readline()

        with ThreadPoolExecutor() as threads:
            threads.submit(hang_up)
            with pytest.raises(ConnectError, match="the coordinator has gone away"):
                call(tmp_path, "status")
    with pytest.raises(ConnectError, match=r"can't be reached \(Connection refused\)"):
        call(tmp_path, "status")


@pytest.mark.parametrize("fails", [False, True])
def test_a_stop_ends_a_rebalance_first_and_tells_who_asked_for_it(
    tmp_path: Path, signals: None, fails: bool
) -> None:
    coordinator = _Unmoved(tmp_path, fails=fails)

    def rebalance() -> None:
        until((tmp_path / DOOR_FILE).exists, "the service does not start")
        call(tmp_path, "rebalance")

    def stop() -> None:
        until((tmp_path / DOOR_FILE).exists, "the service does not start")
        until(lambda: call(tmp_path, "status")["rebalancing"], "the rebalance does not begin")
        with pytest.raises(UsageError, match="a rebalance is under way"):
            call(tmp_path, "add")
        call(tmp_path, "stop")

    with ThreadPoolExecutor() as threads:
        rebalanced, stopped = threads.submit(rebalance), threads.submit(stop)
        Service(coordinator).run()
        with pytest.raises(TailraceError, match=r"^the cluster was stopped in the middle of it$"):
            rebalanced.result()
        stopped.result()
    assert coordinator.story == ["the rebalance is given up", "the nodes are stopped"]
