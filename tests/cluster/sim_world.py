"""N nodes, their coordinator, a client and readers in one process: everything that there is.

The nodes are the product's (`server.node`), with their stores on simulated disks; the coordinator is the
product's, and its calls may fail; client and readers run the product's protocol and resume policy. Disks,
network, time and the end of processes are simulated. A seed (`sim_steps`) or a test chooses what happens
next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from cluster.sim_client import Client
from cluster.sim_followers import Follower
from cluster.sim_handed_out import HandedOut
from cluster.sim_network import End, Network, UpstreamEnd, Wire
from cluster.sim_nodes import Machine, SimulatedMember
from cluster.sim_promises import Promises
from cluster.sim_readers import CautiousMirror, CopyReader, Mirror
from cluster.sim_truth import KEYS, VBUCKETS, Truth, Wrong, documents
from tailrace.clock import ManualClock
from tailrace.cluster.coordinator import Coordinator
from tailrace.errors import TailraceError
from tailrace.files import MemoryFiles
from tailrace.server.upstream import Upstream
from tailrace.wire.codes import VBucketState

COORDINATOR = "coordinator"
_SETTLE_S = 2.0
_MOST_TURNS = 600


class World:
    """Everything that there is."""

    def __init__(
        self,
        seed: int,
        *,
        replicas: int | None = None,
        mirror: type[Mirror] = Mirror,
        followers: Sequence[type[Follower]] = (),
    ) -> None:
        """``replicas``: a test chooses what happens, and nothing goes wrong by itself."""
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.trace: list[str] = []
        self.network = Network(self.rng)
        self.may_roll_back = [False] * VBUCKETS
        self.rewound: set[int] = set()
        """Vbuckets that were made to forget changes, on disk or not."""
        self.moves: Generator[str, None, None] | None = None
        """The rebalance that is under way."""
        self._is_quiet = True
        self._is_calm = replicas is not None
        self._in_call = False
        self._settled_at = 0.0
        names = [f"n{number}" for number in range(1, 4)]
        self.machines = {
            name: Machine(self, name, port, random.Random(self.rng.random()))
            for port, name in enumerate(names, 1)
        }
        self.truth = Truth(self.machines)
        self._files = MemoryFiles()
        self.coordinator = self._make_coordinator()
        self.coordinator.create(
            nodes=3,
            bucket="default",
            vbuckets=VBUCKETS,
            replicas=self.rng.choice([1, 2, 2]) if replicas is None else replicas,
            ports=[machine.port for machine in self.machines.values()],
            settings=[],
        )
        self.coordinator.start()
        self.coordinator.auto_failover_s = self.rng.choice([0.0, 5.0])
        ports = {name: machine.port for name, machine in self.machines.items()}
        self.client = Client(self.rng, VBUCKETS, ports, self._dial)
        self.promises = Promises(self.client, self.network, self.note)
        self.mirror = mirror(self.rng, ports, self._dial, self.clock.monotonic)
        self.copy_reader = CopyReader(self.rng, ports, self._dial, self.clock.monotonic)
        for reader in (self.mirror, self.copy_reader):
            reader.on_publish = self._published(reader.PLACE)
        self.mirror.on_rollback = self._rolled_back
        if isinstance(self.mirror, CautiousMirror):
            self.mirror.on_loss = self._taken_back
        self.followers = [self._follower(kind, ports) for kind in followers]
        self.client.connect()
        self._until(self._is_equal, "the nodes don't begin")
        self._is_quiet = False

    def _follower(self, kind: type[Follower], ports: dict[str, int]) -> Follower:
        follower = kind(self.rng, ports, self._dial, self.clock)
        handed_out = HandedOut(self.truth, kind.NAME, self.rewound)
        follower.on_publish = self._published(kind.NAME)
        follower.on_hand_out = handed_out.note
        return follower

    def _make_coordinator(self) -> Coordinator:
        return Coordinator(
            Path("simulated"),
            files=self._files,
            member=lambda name: SimulatedMember(self, self.machines[name]),
            clock=self.clock,
        )

    def close(self) -> None:
        if self.moves is not None:
            self.moves.close()  # it would ask the nodes of a dead world whenever it is collected
        for machine in self.machines.values():
            machine.stop()
        for follower in self.followers:
            follower.close()

    # what the parts ask of their world

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def _dial(self, place: str, port: int, end: End) -> bool:
        machine = next(machine for machine in self.machines.values() if machine.port == port)
        if machine.node is None or not self.network.reaches(place, machine.name):
            return False
        session = machine.node.accept(place, self.now)
        if session is None:
            return False
        self.network.connect(Wire(end, session, (place, machine.name)))
        return True

    def dial_upstream(self, place: str, link: Upstream) -> None:
        if not self._dial(place, link.source.port, UpstreamEnd(link)):
            link.close("refused")

    def network_lost(self, name: str) -> None:
        for wire in self.network.of(name):
            wire.cut()

    def coordinator_reaches(self, name: str) -> bool:
        return self.network.reaches(COORDINATOR, name) and not self.machines[name].is_stopped

    def loses_answer(self) -> bool:
        return not self._is_quiet and not self._is_calm and self.rng.random() < 0.01

    def meanwhile(self) -> None:
        """Let others go on while the coordinator waits for an answer."""
        if not self._is_quiet and not self._is_calm and not self._in_call and self.rng.random() < 0.3:
            self._in_call = True
            for _ in range(self.rng.randint(1, 4)):
                self.deliver()
            self._in_call = False

    def observe(self, name: str) -> None:
        self.truth.observe(name)

    def note(self, text: str) -> None:
        self.trace.append(text)

    def digest(self) -> str:
        """A digest of everything that happened: two runs of a seed have the same."""
        return self.truth.digest(self.trace)

    def _published(self, who: str) -> Callable[[int, int, int, dict[bytes, bytes]], None]:
        def published(vbucket: int, vb_uuid: int, seqno: int, state: dict[bytes, bytes]) -> None:
            self.note(f"{who} publishes vbucket {vbucket} at {seqno}")
            published = {b"\0" + key: value for key, value in state.items()}
            self.truth.check_state(f"the {who} publishes", vbucket, vb_uuid, seqno, published)

        return published

    def _rolled_back(self, vbucket: int, seqno: int) -> None:
        self.note(f"mirror rolls vbucket {vbucket} back to {seqno}")
        if not self.may_roll_back[vbucket]:
            raise Wrong(f"the mirror rolls vbucket {vbucket} back to {seqno}, and nothing was lost")

    def _taken_back(self, vbucket: int, seqnos: list[int]) -> None:
        if vbucket not in self.rewound:
            raise Wrong(f"{seqnos} of vbucket {vbucket} were handed out and are taken back")

    # what can be done: bytes, time and work

    def deliver(self) -> None:
        """Bytes arrive somewhere; at quiet points everywhere."""
        stopped = [name for name, machine in self.machines.items() if machine.is_stopped]
        wires = self.network.candidates(stopped)
        if wires and not self._is_quiet:
            wires = [self.rng.choice(wires)]
        for wire in wires:
            if wire.deliver(None if self._is_quiet else self.rng, self.now):
                self.observe_both(wire)

    def observe_both(self, wire: Wire) -> None:
        """Bytes have arrived: look at the nodes that may have changed."""
        for place in wire.places:
            if place in self.machines:
                self.observe(place)

    def pass_time(self) -> None:
        self.clock.advance(0.5 if self._is_quiet else self.rng.choice([0.05, 0.3, 1.0]))
        for name, machine in self.machines.items():
            if self._is_quiet or self.rng.random() < 0.6:
                machine.handle_timer()
                self.observe(name)
        for wire in list(self.network.wires):
            if self.network.reaches(*wire.places):
                wire.tick(self.now)

    def work(self) -> None:
        for name in self.machines:
            if self._is_quiet or self.rng.random() < 0.6:
                self.machines[name].work(1_000 if self._is_quiet else 1)
                self.observe(name)

    def turn_readers(self) -> None:
        for reader in self.readers:
            reader.turn()

    @property
    def readers(self) -> list[Mirror | Follower]:
        return [self.mirror, self.copy_reader, *self.followers]

    def write(self) -> None:
        """One write, without durability."""
        self.note(self.client.write(KEYS))

    def trickle(self, *, slowly: bool = True) -> None:
        """A moment passes: one frame arrives on each connection (or, if not ``slowly``, everything, several
        times), and each node does one piece of work.
        """
        self.clock.advance(0.05)
        for _ in range(1 if slowly else 8):
            for wire in self.network.candidates(()):
                if wire.deliver_frames(self.now) if slowly else wire.deliver(None, self.now):
                    self.observe_both(wire)
        for name, machine in self.machines.items():
            machine.handle_timer()
            machine.work(1)
            self.observe(name)
        self.turn_readers()

    # what can be done: nodes and their coordinator

    def running(self) -> list[str]:
        return [
            name
            for name, machine in self.machines.items()
            if machine.node is not None and not machine.is_stopped
        ]

    def lose(self, name: str, *, power: bool) -> None:
        """A process ends abruptly: what only its memory had is gone."""
        machine = self.machines[name]
        if machine.node is None:
            return
        for number in range(VBUCKETS):
            vbucket = machine.vbucket(number)
            if vbucket is not None and vbucket.state == VBucketState.ACTIVE:
                self.may_roll_back[number] = True
        self.promises.node_lost(name, only_memory=True)
        machine.crash(power=power)
        self.truth.forget(name)

    def attempt(self, what: str, act: Callable[[], object]) -> None:
        """Something that the coordinator may refuse."""
        self.note(what)
        try:
            act()
        except TailraceError as error:
            self.note(f"  refused: {error}")

    def fail_over(self, name: str) -> None:
        self.attempt(f"fail {name} over", lambda: self._failing_over(lambda: self.coordinator.failover(name)))

    def _failing_over(self, act: Callable[[], object]) -> None:
        """Whatever the coordinator fails over in an action may be lost with it."""
        before, chains = set(self.coordinator.out), list(self.coordinator.chains)
        try:
            act()
        finally:
            for name in sorted(self.coordinator.out - before):
                actives = {number for number, chain in enumerate(chains) if chain[:1] == (name,)}
                for number in actives:
                    self.may_roll_back[number] = True
                self.promises.node_lost(name, only_memory=False, vbuckets=actives)

    def restart_cluster(self) -> None:
        """The coordinator ends; its nodes stop cleanly, and another one continues with what it left."""
        self.note("the coordinator is restarted")
        self.moves = None
        for machine in self.machines.values():
            machine.stop()
        self.truth.forget()
        auto_failover_s = self.coordinator.auto_failover_s
        self.coordinator = self._make_coordinator()
        self.coordinator.load()
        self.coordinator.auto_failover_s = auto_failover_s
        self.coordinator.start()

    def coordinate(self) -> None:
        """One round of the coordinator's loop, as in `cluster.service`."""
        if self.coordinator.auto_failover_s:
            self._failing_over(self.coordinator.watch)
        self._coordinate()

    def _coordinate(self) -> None:
        if self.moves is not None:
            self._step_moves(self.moves)
        elif self.now - self._settled_at >= _SETTLE_S:
            self._settled_at = self.now
            self.coordinator.settle()

    def _step_moves(self, moves: Generator[str, None, None]) -> None:
        try:
            self.note(f"rebalance: {next(moves)}")
        except StopIteration:
            self.moves = None
        except TailraceError as error:
            self.note(f"rebalance ends: {error}")
            self.moves = None

    # quiet points

    def settle(self) -> None:
        """No more faults: all come back, and everything becomes equal."""
        self.note("quiet")
        self._is_quiet = True
        self.network.partitions.clear()
        for machine in self.machines.values():
            machine.is_stopped = False
        self._until(lambda: self.moves is None, "the rebalance does not end")
        for name, machine in self.machines.items():
            if machine.node is None:
                self.coordinator.add(name)
        self.moves = self.coordinator.rebalance()
        self._until(lambda: self.moves is None, "the rebalance does not end")
        self._until(self._is_equal, "the copies don't become equal")
        for reader in self.readers:
            name = reader.NAME if isinstance(reader, Follower) else reader.PLACE
            self._until(
                lambda reader=reader: self._is_equal() and self._has_all(reader),  # type: ignore[misc]
                f"the {name} does not become equal",
            )
        self._check()
        self.may_roll_back = [False] * VBUCKETS
        self.rewound.clear()
        self.promises.all_are_back()
        self._is_quiet = False

    def _until(self, check: Callable[[], bool], what: str) -> None:
        for _ in range(_MOST_TURNS):
            if check():
                return
            self.pass_time()
            self.work()
            for _ in range(3):
                self.deliver()
            self.turn_readers()
            self._coordinate()
        raise Wrong(f"{what}; {self.coordinator.status()}")

    def _is_equal(self) -> bool:
        for number, chain in enumerate(self.coordinator.chains):
            copies = [self.machines[name].vbucket(number) for name in chain]
            if not copies or None in copies or copies[0].state != VBucketState.ACTIVE:
                return False
            first = copies[0]
            for other in copies[1:]:
                if (other.failover_log, other.complete_seqno) != (first.failover_log, first.high_seqno):
                    return False
        return True

    def _has_all(self, reader: Mirror | Follower) -> bool:
        """Whether a reader has every document of every vbucket that its node has."""
        for number, chain in enumerate(self.coordinator.chains):
            if not reader.can_read([self.machines[name].port for name in chain]):
                continue
            vbucket = self.machines[chain[0]].vbucket(number)
            assert vbucket is not None
            at, state = reader.published.get(number, (0, {}))
            published = {b"\0" + key: value for key, value in state.items()}
            if at != vbucket.high_seqno or published != documents(vbucket):
                return False
            if isinstance(reader, Mirror) and reader.has_part(number):
                return False  # it is of a snapshot that its node has lost, and it has yet to learn that
        return True

    def _check(self) -> None:
        for number, chain in enumerate(self.coordinator.chains):
            self.truth.check_one_active(number)
            active = self.machines[chain[0]].vbucket(number)
            assert active is not None
            expected = documents(active)
            self.truth.check_state(f"{chain[0]} has", number, active.uuid, active.high_seqno, expected)
            for name in chain[1:]:
                copy = self.machines[name].vbucket(number)
                assert copy is not None
                if documents(copy) != expected:
                    raise Wrong(f"vbucket {number} on {name} is not equal to {chain[0]}")
            self.promises.check(active)
