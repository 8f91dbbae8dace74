"""Clusters of real processes for tests: coordinator here, nodes in processes, clients in threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tailrace
from tailrace.client.events import Deletion, Expiration, Mutation, Rollback
from tailrace.client.kv import KvClient
from tailrace.cluster.coordinator import Coordinator
from tailrace.errors import TailraceError

PATIENCE_S = 120.0
RETRY_FOR_S = 600.0
"""How long readers retry: on a busy machine a node may be down for long."""
VBUCKETS = 8
KEYS = [f"key-{number}" for number in range(40)]


@contextmanager
def kept_ports(count: int) -> Iterator[list[int]]:
    """Consecutive ports, kept from others while a node is down that has to come back there.

    They are bound, but nothing listens: Linux gives one to a process that asks for its number, but not to one
    that asks for any free port.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with ExitStack() as stack:
            ports = [_keep(stack, 0)]
            try:
                ports += [_keep(stack, ports[0] + number) for number in range(1, count)]
            except (OSError, OverflowError):  # somebody has one of them
                assert time.monotonic() < deadline, "there are no ports"
                continue
            yield ports
            return


def _keep(stack: ExitStack, port: int) -> int:
    keeper = stack.enter_context(socket.socket())
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", port))
    free_port: int = keeper.getsockname()[1]
    return free_port


@contextmanager
def cluster(directory: Path, nodes: int, *, replicas: int = 1) -> Iterator[Coordinator]:
    with kept_ports(nodes) as ports:
        made = Coordinator(directory)
        made.create(
            nodes=nodes,
            bucket="default",
            vbuckets=VBUCKETS,
            replicas=replicas,
            ports=ports,
            settings=["replication_noop_interval=1"],
        )
        try:
            made.start()
            yield made
        finally:
            made.stop()


def url(made: Coordinator) -> str:
    text: str = made.status()["url"]
    return text


def until(check: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (answer := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return answer


def replicated(made: Coordinator) -> bool:
    """Whether every copy has what its active has; a node that does not answer in time is asked again."""
    try:
        reports = {name: member.report() for name, member in made.members.items() if member.is_running}
    except TailraceError:
        return False
    return all(
        reports[name].get(number, {}).get("complete_seqno") == reports[chain[0]][number]["high_seqno"]
        for number, chain in enumerate(made.chains)
        for name in chain[1:]
    )


def actives(made: Coordinator) -> dict[int, list[str]]:
    holders: dict[int, list[str]] = {number: [] for number in range(VBUCKETS)}
    for name, member in made.members.items():
        if member.is_running:
            for number, row in member.report().items():
                if row["state"] == "active":
                    holders[number].append(name)
    return holders


class Writer(threading.Thread):
    """Writes rising numbers to a few keys, and remembers what was acknowledged."""

    def __init__(self, where: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: dict[str, int] = {}
        self.errors: list[Exception] = []
        self._where = where
        self._stop_it = threading.Event()

    def run(self) -> None:
        number = 0
        with KvClient(self._where, timeout_s=60.0) as client:
            while not self._stop_it.is_set():
                key = f"key-{number % 40}"
                try:
                    client.set(key, str(number).encode())
                except TailraceError as error:
                    self.errors.append(error)
                    return
                self.acknowledged[key] = number
                number += 1

    def finish(self) -> dict[str, int]:
        self._stop_it.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()
        assert not self.errors, self.errors
        return self.acknowledged


class Reader(threading.Thread):
    """Keeps a model of the bucket from its changes, undoing what it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__(daemon=True)
        self.history: dict[int, list[tuple[int, bytes, bytes | None]]] = {}
        self.rollbacks: list[tuple[int, int]] = []
        self.errors: list[Exception] = []
        self._where = where
        self._source: Any = None

    def run(self) -> None:
        try:
            with tailrace.connect_sync(self._where, retry_for_s=RETRY_FOR_S) as self._source:
                for change in self._source.changes(start="beginning"):
                    self._take(change)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def _take(self, change: Any) -> None:
        history = self.history.setdefault(change.vbucket, [])
        if isinstance(change, Rollback):
            self.rollbacks.append((change.vbucket, change.seqno))
            history[:] = [version for version in history if version[0] <= change.seqno]
        elif isinstance(change, Mutation):
            history.append((change.seqno, change.key, change.value))
        elif isinstance(change, Deletion | Expiration):
            history.append((change.seqno, change.key, None))

    def state(self) -> dict[bytes, bytes]:
        state: dict[bytes, bytes] = {}
        for history in list(self.history.values()):
            for _, key, value in list(history):
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
        return state

    def finish(self) -> None:
        if self._source is not None:
            self._source.close()
        self.join(PATIENCE_S)


def documents(where: str, keys: list[str]) -> dict[bytes, bytes]:
    values = {}
    with KvClient(where, timeout_s=30.0) as client:
        for key in keys:
            document = client.get(key)
            if document is not None:
                values[key.encode()] = document.value
    return values
