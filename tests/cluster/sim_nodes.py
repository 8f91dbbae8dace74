"""Machines of the simulated cluster: a disk that survives, a node while it runs, its coordinator's view."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.clock import ManualClock
from tailrace.cluster.member import Member
from tailrace.errors import ConnectError
from tailrace.protocol.handshake import KV_FEATURES, Introduction, handshake
from tailrace.protocol.script import Script, ScriptRunner
from tailrace.server.bucket import ServedBucket
from tailrace.server.node import Node
from tailrace.server.served_map import NodeAddress
from tailrace.server.session import Session
from tailrace.server.settings import Settings
from tailrace.store.base import Job
from tailrace.store.engine import Engine
from tailrace.store.vbucket_history import History
from tailrace.testing.faulty_files import SimulatedDisk
from tailrace.wire.framing import Framer

if TYPE_CHECKING:
    from cluster.sim_world import World

SETTINGS = ["history_changes=30", "replication_buffer=64k", "expiry_pager_interval=3"]


class NodeClock:
    """The world's time on a machine whose wall clock may be wrong."""

    def __init__(self, world: ManualClock) -> None:
        self._world = world
        self.offset_s = 0.0

    def time_ns(self) -> int:
        return self._world.time_ns() + int(self.offset_s * 1e9)

    def monotonic(self) -> float:
        return self._world.monotonic()


class Machine:
    """A machine on which a node runs, or does not."""

    def __init__(self, world: World, name: str, port: int, rng: random.Random) -> None:
        self.name, self.port = name, port
        self.clock = NodeClock(world.clock)
        self.disk = SimulatedDisk()
        self.node: Node | None = None
        self.is_stopped = False
        """Whether it exists but does nothing, as after SIGSTOP."""
        self.jobs: deque[tuple[Job, Callable[[], None]]] = deque()
        self.lives = 0
        self._world = world
        self._rng = rng
        self._checkpoint_items = rng.choice([6, 12, 40])  # not all have the same snapshots
        self._engine: Engine | None = None

    def start(self, vbuckets: int) -> None:
        settings = Settings.parse([*SETTINGS, f"checkpoint_items={self._checkpoint_items}"])
        self._engine = Engine(
            files=self.disk,
            settings=settings.for_store(),
            clock=self.clock,
            rng=random.Random(self._rng.random()),
        )
        if "default" not in self._engine.buckets:
            self._engine.create_bucket("default", vbuckets, active=False)
        self.node = Node(
            self._engine,
            settings=settings,
            clock=self.clock,
            rng=random.Random(self._rng.random()),
            run_job=lambda job, done: self.jobs.append((job, done)),
            fenced=True,
        )
        self.node.address = NodeAddress(port=self.port)
        self.node.dial = lambda link: self._world.dial_upstream(self.name, link)
        self.lives += 1

    @property
    def bucket(self) -> ServedBucket:
        assert self.node is not None
        return self.node.buckets["default"]

    def vbucket(self, number: int) -> History | None:
        vbucket = self.bucket.store.vbuckets[number]
        assert vbucket is None or isinstance(vbucket, History)
        return vbucket

    def work(self, count: int = 1_000) -> bool:
        """Finish background jobs; return whether there were any."""
        worked = False
        for _ in range(count):
            if not self.jobs or self.is_stopped:
                break
            job, done = self.jobs.popleft()
            job.run()
            done()
            worked = True
        return worked

    def handle_timer(self) -> None:
        if self.node is not None and not self.is_stopped:
            self.node.handle_timer(self.clock.monotonic())

    def stop(self) -> None:
        """A clean stop."""
        node = self._end()
        if node is not None:
            node.close()

    def crash(self, *, power: bool) -> None:
        """A kill, or (``power``) the machine loses power. Jobs may have got to any point."""
        if self.jobs and self._rng.random() < 0.5:
            self.jobs[0][0].run()
        self.jobs.clear()
        node, engine = self._end(), self._engine
        if node is not None and engine is not None:
            engine.crash()
            if power:
                self.disk = self.disk.power_cut(self._rng)

    def _end(self) -> Node | None:
        node = self.node
        if node is not None:
            self._world.network_lost(self.name)
            self.is_stopped = False
            self.work()
        self.node = None
        return node


class SimulatedMember(Member):
    """A machine, as the coordinator steers it: the product's own requests and answers, over calls that may
    fail before or after they were done.
    """

    def __init__(self, world: World, machine: Machine) -> None:
        super().__init__(machine.name, Path(machine.name), "default")
        self.machine = machine
        self._world = world
        self._session: Session | None = None

    @property
    def pid(self) -> int | None:
        return None

    @property
    def is_running(self) -> bool:
        return self.machine.node is not None

    def start(self, vbuckets: int, port: int, settings: Sequence[str]) -> None:
        self.machine.start(vbuckets)
        self.port = self.machine.port

    def stop(self) -> None:
        self.disconnect()
        self.machine.stop()

    def kill(self) -> None:
        self.disconnect()
        self._world.lose(self.name, power=False)

    def disconnect(self) -> None:
        if self._session is not None:
            self._session.connection_lost()
            self._session = None

    def _run(self, script: Script[Any]) -> Any:
        self._world.meanwhile()
        if not self.is_running:
            raise ConnectError(f"node {self.name} is not running")
        if not self._world.coordinator_reaches(self.name):
            self.disconnect()
            raise ConnectError(f"node {self.name} does not answer")
        if self._session is not None and self._session.node is not self.machine.node:
            self._session = None
            raise ConnectError(f"the connection to node {self.name} was lost")
        if self._session is None or self._session.closed:
            assert self.machine.node is not None
            self._session = self.machine.node.accept("coordinator", self._world.now)
            self._converse(
                handshake(Introduction("coordinator", "default", features=KV_FEATURES), self._world.rng)
            )
        result = self._converse(script)
        if self._world.loses_answer():
            self.disconnect()
            raise ConnectError(f"the answer of node {self.name} was lost")
        return result

    def _converse(self, script: Script[Any]) -> Any:
        session, framer, runner = self._session, Framer(), ScriptRunner(script)
        assert session is not None
        session.receive_data(runner.start(), self._world.now)
        while not runner.done:
            for part in session.data_to_send():
                framer.feed(part)
            moved = False
            for frame in framer.frames():
                if frame.is_request:
                    continue
                moved = True
                if more := runner.receive(frame):
                    session.receive_data(more, self._world.now)
            if not moved and not runner.done and not self.machine.work(1):
                self.disconnect()
                raise ConnectError(f"node {self.name} does not answer")
        self._world.observe(self.name)
        return runner.result
