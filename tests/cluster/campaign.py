"""A cluster of real processes under faults: three nodes behind proxies, writers, a mirror and `tail`.

A seed chooses the faults: a node is killed, stopped, cut off or held up by its proxy; vbuckets are rewound; a
planned rebalance moves everything meanwhile. At the end all nodes come back, and every reader of the bucket
must have what it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.processes import PATIENCE_S, RETRY_FOR_S, VBUCKETS, Reader, kept_ports, replicated, until, url
from cluster.proxy import Proxies
from tailrace.client.kv import KvClient
from tailrace.cluster.coordinator import Coordinator
from tailrace.cluster.member import Member
from tailrace.connstr import Address
from tailrace.errors import TailraceError

KEYS = 200
_PAUSE_S = (0.5, 3.0)
_LOOK_S = 0.5


class ProxiedMember(Member):
    """A node that all but its coordinator reach through a proxy."""

    def __init__(self, name: str, directory: Path, proxies: Proxies, own_port: int) -> None:
        super().__init__(name, directory, "default")
        self.proxy = proxies.proxy()
        self._own_port = own_port

    def start(self, vbuckets: int, port: int, settings: Sequence[str]) -> None:
        super().start(vbuckets, self._own_port, settings)
        self.proxy.target = self._own_port
        self.port = self.proxy.port

    def _address(self) -> Address:
        return Address("127.0.0.1", self._own_port)


class Writer(threading.Thread):
    """Writes and deletes, whatever happens."""

    def __init__(self, where: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged = 0
        self._where = where
        self._rng = random.Random(seed)
        self._stop_it = threading.Event()

    def run(self) -> None:
        while not self._stop_it.is_set():
            with contextlib.suppress(TailraceError), KvClient(self._where, timeout_s=5.0) as client:
                while not self._stop_it.is_set():
                    key = f"key-{self._rng.randrange(KEYS)}"
                    if self._rng.random() < 0.1:
                        client.delete(key)
                    else:
                        client.set(key, {"n": self.acknowledged, "by": self.name})
                    self.acknowledged += 1
            self._stop_it.wait(0.1)

    def finish(self) -> None:
        self._stop_it.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()


class Tail:
    """`tailrace tail` in a process of its own; its lines make a model of the bucket."""

    def __init__(self, where: str, path: Path) -> None:
        self._path = path
        with path.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tailrace", "tail", where, "--from", "beginning", "--json"),
                    *("--retry-for", f"{RETRY_FOR_S:g}s"),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def state(self) -> dict[str, Any]:
        history: dict[int, list[tuple[int, str, Any]]] = {}
        for line in self._path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            event = json.loads(line)
            held = history.setdefault(event["vbucket"], [])
            if event["op"] == "rollback":
                held[:] = [version for version in held if version[0] <= event["seqno"]]
            elif event["op"] in ("mutation", "deletion", "expiration"):
                held.append((event["seqno"], event["key"], event.get("value")))
        state: dict[str, Any] = {}
        for held in history.values():
            for _, key, value in held:
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
        return state

    def finish(self) -> None:
        interrupt(self._process)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, then a kill if it does not end in time."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Campaign:
    """One seed's faults."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.trace: list[str] = []
        self._rng = random.Random(seed)
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._own_ports = iter(self._stack.enter_context(kept_ports(3)))
        self._proxies = Proxies()
        self._members: dict[str, ProxiedMember] = {}
        self.coordinator = Coordinator(directory / "cluster", member=self._make_member)
        self.coordinator.create(
            nodes=3,
            bucket="default",
            vbuckets=VBUCKETS,
            replicas=self._rng.choice([1, 2]),
            ports=[0] * 3,
            settings=[],
        )
        self.coordinator.auto_failover_s = 10.0

    def _make_member(self, name: str) -> Member:
        made = ProxiedMember(name, self._directory / "cluster" / name, self._proxies, next(self._own_ports))
        self._members[name] = made
        return made

    def __enter__(self) -> Campaign:
        self.coordinator.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members.values():
            member.proxy.hold(hold=False)
        self.coordinator.stop()
        self._proxies.close()
        self._stack.close()

    @property
    def url(self) -> str:
        ports = ",".join(f"127.0.0.1:{member.proxy.port}" for member in self._members.values())
        return f"couchbase://{ports}/default"

    def _note(self, text: str) -> None:
        self.trace.append(text)

    # faults

    def run(self, seconds: float, look_after: Callable[[], None]) -> None:
        """Faults, one after the other, for so many seconds; ``look_after`` is called between them."""
        faults: list[Callable[[], None]] = [
            self._kill,
            self._stop,
            self._hold,
            self._cut,
            self._rewind,
            self._rebalance,
            self._fail_over,
        ]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            fault = self._rng.choice(faults)
            try:
                fault()
            except TailraceError as error:
                self._note(f"  refused: {error}")
            self._look_after(self._rng.uniform(*_PAUSE_S))
            look_after()

    def _look_after(self, seconds: float) -> None:
        """The coordinator's loop, as in `cluster.service`."""
        deadline = time.monotonic() + seconds
        while True:
            if (gone := self.coordinator.watch()) is not None:
                self._note(f"{gone} was failed over because it was silent")
            self.coordinator.settle()
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_S)

    def _up(self) -> list[str]:
        return [name for name, member in self._members.items() if member.is_running]

    def _victim(self) -> ProxiedMember | None:
        """A node, unless another is down already: one fault at a time is what a cluster survives."""
        if len(self._up()) < 3:
            down = next(name for name, member in self._members.items() if not member.is_running)
            self._note(f"bring {down} back")
            self.coordinator.add(down)
            return None
        return self._members[self._rng.choice(self._up())]

    def _signal(self, member: ProxiedMember, number: signal.Signals) -> None:
        if member.pid is not None:
            os.kill(member.pid, number)

    def _kill(self) -> None:
        if (member := self._victim()) is not None:
            self._note(f"kill {member.name}")
            self._signal(member, signal.SIGKILL)
            until(lambda: not member.is_running, "a killed process lives")

    def _fail_over(self) -> None:
        if (member := self._victim()) is not None:
            self._kill_and_fail_over(member)

    def _kill_and_fail_over(self, member: ProxiedMember) -> None:
        self._note(f"kill {member.name} and fail it over")
        self._signal(member, signal.SIGKILL)
        self.coordinator.failover(member.name)

    def _stop(self) -> None:
        if (member := self._victim()) is not None:
            self._note(f"stop {member.name} for a while")
            self._signal(member, signal.SIGSTOP)
            time.sleep(self._rng.uniform(*_PAUSE_S))
            self._signal(member, signal.SIGCONT)

    def _hold(self) -> None:
        member = self._members[self._rng.choice(list(self._members))]
        self._note(f"nobody reaches {member.name} for a while")
        member.proxy.hold(hold=True)
        self._look_after(self._rng.uniform(*_PAUSE_S))
        member.proxy.hold(hold=False)

    def _cut(self) -> None:
        member = self._members[self._rng.choice(list(self._members))]
        self._note(f"cut all connections to {member.name}")
        member.proxy.cut()

    def _rewind(self) -> None:
        vbucket, lose = self._rng.randrange(VBUCKETS), self._rng.randint(1, 20)
        self._note(f"rewind vbucket {vbucket} by {lose}")
        with KvClient(url(self.coordinator), timeout_s=5.0) as client:
            client.rewind([vbucket], lose=lose)

    def _rebalance(self) -> None:
        leaving = self._rng.choice([None, *self._up()]) if len(self._up()) == 3 else None
        self._note(f"rebalance{'' if leaving is None else f' without {leaving}'}")
        for _ in self.coordinator.rebalance(leaving=leaving):
            time.sleep(0.02)

    # the end

    def recover(self) -> None:
        """All come back, and every copy has what its active has."""
        self._note("the end")
        for name, member in self._members.items():
            member.proxy.hold(hold=False)
            self._signal(member, signal.SIGCONT)
            if not member.is_running:
                self.coordinator.add(name)
        until(self._is_balanced, "the cluster does not become whole")
        until(lambda: replicated(self.coordinator), "the copies don't become equal")

    def _is_balanced(self) -> bool:
        try:
            for _ in self.coordinator.rebalance():
                time.sleep(0.02)
        except TailraceError as error:
            self._note(f"  refused: {error}")
            self._look_after(0.0)
            return False
        return True

    def documents(self) -> dict[str, Any]:
        """What the bucket has, read by key."""
        documents = {}
        with KvClient(self.url, timeout_s=PATIENCE_S) as client:
            for number in range(KEYS):
                document = client.get(f"key-{number}")
                if document is not None:
                    documents[f"key-{number}"] = json.loads(document.value)
        return documents


def model(reader: Reader) -> dict[str, Any]:
    return {key.decode(): json.loads(value) for key, value in reader.state().items()}
