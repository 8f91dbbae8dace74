"""The coordinator as a process: a loop that looks after the nodes, and a door on loopback for commands.

A command is one line of JSON with the token of `DOOR_FILE`, the answer one line of JSON. Only those who can
read the cluster's directory can steer the cluster.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Generator
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any

from .. import rng as rng_
from ..clock import SYSTEM, Clock
from ..errors import ClusterError, ConnectError, TailraceError, UsageError
from ..files import atomic_write, remove_file
from .coordinator import Coordinator

__all__ = ["DOOR_FILE", "Service", "call"]

log = logging.getLogger("tailrace.cluster")

DOOR_FILE = "coordinator.json"
_IDLE_S = 0.25
_BUSY_S = 0.02
_WATCH_S = 0.5
_SETTLE_S = 2.0
_MAX_LINE = 64 << 10
_PEER_S = 5.0


class Service:
    """A coordinator that takes commands."""

    def __init__(self, coordinator: Coordinator, *, clock: Clock = SYSTEM) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._token = rng_.nonce(rng_.source()).decode()
        self._stopping = False
        self._rebalance: tuple[Generator[str, None, None], socket.socket, str] | None = None
        self._progress = ""
        self._watched_at = self._settled_at = 0.0
        self._stoppers: list[socket.socket] = []

    def run(self) -> None:
        """Run until a command or a signal stops it, or `DOOR_FILE` is gone: then no command could."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        door = socket.create_server(("127.0.0.1", 0))
        coordinator = self._coordinator
        path = coordinator.directory / DOOR_FILE
        try:
            coordinator.start()
            content = {"pid": os.getpid(), "port": door.getsockname()[1], "token": self._token}
            atomic_write(path, json.dumps(content).encode() + b"\n", private=True)
            while not self._stopping and _token_in(path) == self._token:
                busy = self._rebalance is not None
                if select.select([door], [], [], _BUSY_S if busy else _IDLE_S)[0]:
                    peer, _ = door.accept()
                    self._serve(peer)
                self._look_after()
        finally:
            door.close()
            self._give_up_rebalance()
            coordinator.stop()
            if _token_in(path) == self._token:
                remove_file(path)
            for peer in self._stoppers:
                _answer(peer, {"ok": True, "result": None})

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _look_after(self) -> None:
        now = self._clock.monotonic()
        if now - self._watched_at >= _WATCH_S:
            self._watched_at = now
            self._coordinator.watch()
        if self._rebalance is not None:
            self._step()
        elif now - self._settled_at >= _SETTLE_S:
            self._settled_at = now
            self._coordinator.settle()

    def _step(self) -> None:
        assert self._rebalance is not None
        steps, peer, label = self._rebalance
        try:
            self._progress = next(steps)
        except StopIteration:
            self._rebalance = None
            _answer(peer, {"ok": True, "result": self._coordinator.status()})
        except TailraceError as error:
            self._rebalance = None
            log.error("%s: %s", label, error)
            _answer(peer, {"ok": False, "error": str(error)})

    def _give_up_rebalance(self) -> None:
        """End a rebalance while the nodes still run and can report what has moved."""
        if self._rebalance is None:
            return
        (steps, peer, label), self._rebalance = self._rebalance, None
        try:
            steps.close()
        except (TailraceError, OSError) as error:
            log.error("%s: %s", label, error)
        _answer(peer, {"ok": False, "error": "the cluster was stopped in the middle of it"})

    # commands

    def _serve(self, peer: socket.socket) -> None:
        try:
            request = json.loads(_read_line(peer))
            token = str(request.get("token", ""))
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                raise UsageError("the token is wrong")
            result = self._do(str(request.get("command")), dict(request.get("arguments", {})), peer)
        except TailraceError as error:
            usage = isinstance(error, UsageError)
            _answer(peer, {"ok": False, "error": str(error), "usage": usage})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            log.warning("a command can't be understood: %s", error)
            peer.close()
        else:
            if result is not None:
                _answer(peer, {"ok": True, "result": result})

    def _do(self, command: str, arguments: dict[str, Any], peer: socket.socket) -> Any:
        """Run a command; None if the peer gets its answer later."""
        coordinator = self._coordinator
        if command == "status":
            return {**coordinator.status(), "rebalancing": self._rebalance is not None}
        if command == "stop":
            self._stopping = True
            self._stoppers.append(peer)
            return None
        if command == "failover":
            return coordinator.failover(str(arguments["node"]), force=bool(arguments.get("force")))
        if self._rebalance is not None:
            raise UsageError("a rebalance is under way, wait for its end")
        if command == "add":
            name = arguments.get("node")
            return {"node": coordinator.add(None if name is None else str(name))}
        if command in ("rebalance", "remove"):
            leaving = str(arguments["node"]) if command == "remove" else None
            if leaving is not None and leaving not in coordinator.members:
                raise UsageError(f"there is no node {leaving!r}, there are {', '.join(coordinator.members)}")
            self._rebalance = coordinator.rebalance(leaving=leaving), peer, command
            return None
        raise UsageError(f"there is no command {command!r}")


def _token_in(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_bytes())["token"])
    except (OSError, ValueError, KeyError):
        return None


def _read_line(peer: socket.socket) -> bytes:
    peer.settimeout(_PEER_S)
    data = b""
    while not data.endswith(b"\n"):
        part = peer.recv(_MAX_LINE)
        if not part or len(data) > _MAX_LINE:
            raise ValueError("no line")
        data += part
    return data


def _answer(peer: socket.socket, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a peer that has gone needs no answer
        peer.settimeout(_PEER_S)
        peer.sendall(json.dumps(content).encode() + b"\n")
    peer.close()


def call(directory: Path, command: str, *, wait_s: float = 3600.0, **arguments: Any) -> Any:
    """Send a command to the coordinator of a cluster's directory; return its result, or raise its refusal."""
    path = directory / DOOR_FILE
    try:
        door = json.loads(path.read_bytes())
        token = door["token"]
        peer = socket.create_connection(("127.0.0.1", door["port"]), timeout=_PEER_S)
    except FileNotFoundError:
        raise ConnectError(
            f"no cluster is running in {str(directory)!r}; start one with 'tailrace cluster start'"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or f"{str(path)!r} is damaged"
        raise ConnectError(
            f"the coordinator of {str(directory)!r} can't be reached ({why}); if it was killed, "
            "start the cluster again with 'tailrace cluster start'"
        ) from None
    with peer:
        peer.settimeout(wait_s)
        request = {"token": token, "command": command, "arguments": arguments}
        try:
            peer.sendall(json.dumps(request).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                part = peer.recv(1 << 16)
                if not part:
                    raise ConnectError("the coordinator has gone away")
                data += part
        except OSError as error:
            raise ConnectError(f"the coordinator does not answer: {error}") from None
    answer = json.loads(data)
    if answer["ok"]:
        return answer["result"]
    raise (UsageError if answer.get("usage") else ClusterError)(answer["error"])


def wait_until_ready(directory: Path, process_ended: Any, wait_s: float) -> None:
    """Wait until the coordinator takes commands; `ClusterError` if it ends before that."""
    deadline = SYSTEM.monotonic() + wait_s
    while not (directory / DOOR_FILE).exists():
        if process_ended() or SYSTEM.monotonic() > deadline:
            raise ClusterError(f"the cluster did not start; see {str(directory / 'log')!r}")
        sleep(0.05)
