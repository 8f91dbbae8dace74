"""N nodes, their coordinator, a client and a mirror in one process, under one seed.

The nodes are the product's (`server.node`), with their stores on simulated disks; the coordinator is the
product's, and its calls may fail; client and mirror run the product's protocol and resume policy. Simulated
are disks, network, time, and processes that end.

`World.step` does one thing, chosen by the seed. What must hold is checked where it could first be wrong:

    always           at most one node that serves a vbucket as active
                     no (vbucket, vb_uuid, seqno) names two changes, on any copy
                     what becomes active is a state that the bucket had
                     what the mirror publishes is a state that the bucket had
                     the mirror rolls back only after something was lost: never because of a planned move
    at quiet points  every vbucket has one active, its copies are equal to it, and so is the mirror
                     what was answered as durable is there, whatever node was lost
                     what was answered is there, unless the node that answered was lost
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.sim_client import Ack, Client, Mirror
from cluster.sim_network import End, Network, UpstreamEnd, Wire
from cluster.sim_nodes import Machine, SimulatedMember
from tailrace.client.cluster_map import vbucket_of
from tailrace.clock import ManualClock
from tailrace.cluster.coordinator import Coordinator
from tailrace.errors import RollbackImpossible, TailraceError
from tailrace.history import FailoverLog
from tailrace.server.upstream import Upstream
from tailrace.store.base import Compaction
from tailrace.store.files import MemoryFiles
from tailrace.store.format import Document
from tailrace.store.vbucket import History
from tailrace.wire.codes import DurabilityLevel, VBucketState

VBUCKETS = 4
KEYS = [b"key-%d" % number for number in range(10)]
STEPS = 200
QUIET_EVERY = 100
_SETTLE_S = 2.0
_COORDINATOR = "coordinator"


class Wrong(AssertionError):
    """Something that must hold does not."""


class World:
    """Everything that there is."""

    def __init__(self, seed: int, *, replicas: int | None = None) -> None:
        """``replicas``: somebody else chooses what happens, and nothing goes wrong by itself."""
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.trace: list[str] = []
        self.network = Network(self.rng)
        self.changes: dict[tuple[int, int, int], bytes] = {}
        self.lineages: dict[tuple[int, int], FailoverLog] = {}
        self.acks: list[Ack] = []
        self._fresh: Ack | None = None
        self.may_roll_back = [False] * VBUCKETS
        self._marks: dict[tuple[str, int], tuple[History, FailoverLog, int, bool]] = {}
        self._quiet = True
        self._is_calm = replicas is not None
        self._in_call = False
        self._settled_at = 0.0
        self._rebalance: Iterator[str] | None = None
        names = [f"n{number}" for number in range(1, 4)]
        self.machines = {
            name: Machine(self, name, port, random.Random(self.rng.random()))
            for port, name in enumerate(names, 1)
        }
        self._files = MemoryFiles()
        self.coordinator = self._make_coordinator()
        self.coordinator.create(
            nodes=3,
            bucket="default",
            vbuckets=VBUCKETS,
            replicas=self.rng.choice([1, 2, 2]) if replicas is None else replicas,
            ports=[one.port for one in self.machines.values()],
            settings=[],
        )
        self.coordinator.start()
        self.coordinator.auto_failover_s = self.rng.choice([0.0, 5.0])
        ports = {name: one.port for name, one in self.machines.items()}
        self.client = Client(self.rng, VBUCKETS, ports, self._dial)
        self.client.on_ack = self._acknowledged
        self.mirror = Mirror(self.rng, ports, self._dial, self.clock.monotonic)
        self.mirror.on_publish = self._published
        self.mirror.on_rollback = self._rolled_back
        self.client.connect()
        self._until(self._is_equal, "the nodes don't begin")
        self._quiet = False

    def _make_coordinator(self) -> Coordinator:
        return Coordinator(
            Path("simulated"),
            files=self._files,
            member=lambda name: SimulatedMember(self, self.machines[name]),
            clock=self.clock,
        )

    # what the parts ask of their world

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def _dial(self, place: str, port: int, end: End) -> bool:
        machine = next(one for one in self.machines.values() if one.port == port)
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
        return self.network.reaches(_COORDINATOR, name) and not self.machines[name].is_stopped

    def loses_answer(self) -> bool:
        return not self._quiet and not self._is_calm and self.rng.random() < 0.01

    def meanwhile(self) -> None:
        """While the coordinator waits for an answer, others go on."""
        if not self._quiet and not self._is_calm and not self._in_call and self.rng.random() < 0.3:
            self._in_call = True
            for _ in range(self.rng.randint(1, 4)):
                self._deliver()
            self._in_call = False

    def note(self, text: str) -> None:
        self.trace.append(text)

    def digest(self) -> str:
        """Of everything that happened: two runs of a seed have the same."""
        found = hashlib.sha256("\n".join(self.trace).encode())
        for name, frame in self.changes.items():
            found.update(repr(name).encode() + frame)
        return found.hexdigest()

    # the truth: which changes were made, and what a copy may hold

    def observe(self, name: str) -> None:
        """Look at what a node has that it did not have before."""
        machine = self.machines[name]
        if machine.node is None:
            return
        for number in range(VBUCKETS):
            vbucket = machine.vbucket(number)
            if vbucket is None:
                self._marks.pop((name, number), None)
                continue
            log, high = vbucket.failover_log, vbucket.high_seqno
            serves = vbucket.state == VBucketState.ACTIVE and not machine.node.fenced
            mark = self._marks.get((name, number))
            self._marks[name, number] = vbucket, log, high, serves
            seen = 0
            if mark is not None and mark[0] is vbucket and mark[1] is log and mark[2] <= high:
                if mark[2:] == (high, serves):
                    continue
                seen = mark[2]
            if serves:
                self.lineages.setdefault((number, vbucket.uuid), log)
            # what has just ceased to serve may have done so right after a change, and a fenced node may find
            # documents that have expired
            served = mark is not None and mark[0] is vbucket and mark[1] is log and mark[3]
            may_be_new = served or vbucket.state == VBucketState.ACTIVE
            for seqno in range(seen + 1, high + 1):
                self._check_change(machine, vbucket, seqno, may_be_new=may_be_new)
            if serves and (mark is None or mark[1] is not log or not mark[3]):
                self._check_state(
                    f"{name} becomes active with", number, vbucket.uuid, high, documents(vbucket)
                )
                self._check_one_active(number)

    def _check_change(self, machine: Machine, vbucket: History, seqno: int, *, may_be_new: bool) -> None:
        frame = vbucket.frame_at(seqno)
        branch = vbucket.failover_log.branch_of(seqno)
        if frame is None or not branch:
            return
        name = vbucket.id, branch, seqno
        if may_be_new:
            self.changes.setdefault(name, frame)
        if self.changes.get(name) != frame:
            known = "another" if name in self.changes else "no"
            raise Wrong(
                f"{machine.name} has {Document.of(frame).key!r} as "
                f"(vbucket {name[0]}, {name[1]:#x}, {seqno}), which names {known} change; "
                f"its log is {vbucket.failover_log.to_json()}"
            )

    def _check_one_active(self, number: int) -> None:
        serving = [
            name
            for name, one in self.machines.items()
            if one.node is not None
            and not one.node.fenced
            and (found := one.vbucket(number)) is not None
            and found.state == VBucketState.ACTIVE
        ]
        if len(serving) > 1:
            raise Wrong(f"vbucket {number} is active on {serving}")

    def _check_state(
        self, what: str, number: int, vb_uuid: int, seqno: int, found: dict[bytes, bytes]
    ) -> None:
        """A state must be one that the vbucket had at that place of its history."""
        log = self.lineages.get((number, vb_uuid))
        if log is None:
            raise Wrong(f"{what} branch {vb_uuid:#x} of vbucket {number}, which nobody began")
        expected: dict[bytes, bytes] = {}
        for at in range(1, seqno + 1):
            frame = self.changes.get((number, log.branch_of(at), at))
            if frame is not None:
                document = Document.of(frame)
                if document.deleted:
                    expected.pop(document.key, None)
                else:
                    expected[document.key] = document.value
        if found != expected:
            differ = {key for key in {*found, *expected} if found.get(key) != expected.get(key)}
            rows = {key: (found.get(key), expected.get(key)) for key in sorted(differ)}
            raise Wrong(
                f"{what} a state that vbucket {number} did not have at {seqno} of {vb_uuid:#x}: {rows}"
            )

    # what is heard from client and mirror

    def _acknowledged(self, ack: Ack) -> None:
        self.note(f"{ack.by} answers {ack.key!r} at {ack.seqno} of {ack.vb_uuid:#x}")
        self.acks.append(ack)
        if ack.level is not None:
            self._fresh = ack

    def _published(self, vbucket: int, vb_uuid: int, seqno: int, state: dict[bytes, bytes]) -> None:
        found = {b"\0" + key: value for key, value in state.items()}
        self.note(f"mirror publishes vbucket {vbucket} at {seqno}")
        self._check_state("the mirror publishes", vbucket, vb_uuid, seqno, found)

    def _rolled_back(self, vbucket: int, seqno: int) -> None:
        self.note(f"mirror rolls vbucket {vbucket} back to {seqno}")
        if not self.may_roll_back[vbucket]:
            raise Wrong(f"the mirror rolls vbucket {vbucket} back to {seqno}, and nothing was lost")

    def lose(self, name: str, *, power: bool) -> None:
        """A process ends at once: what only its memory had is gone."""
        machine = self.machines[name]
        if machine.node is None:
            return
        for number in range(VBUCKETS):
            found = machine.vbucket(number)
            if found is not None and found.state == VBucketState.ACTIVE:
                self.may_roll_back[number] = True
        self._forget_acks(name, only_memory=True)
        machine.crash(power=power)
        for key in [key for key in self._marks if key[0] == name]:
            del self._marks[key]

    def _forget_acks(self, name: str, *, only_memory: bool, vbuckets: set[int] | None = None) -> None:
        """What may be gone with a node: what it alone answered for, and what two lost nodes did."""
        for ack in (*self.acks, *self.client.answered(self.network.wires)):
            if ack.level is None:
                ack.is_void |= ack.by == name if vbuckets is None else ack.vbucket in vbuckets
            else:
                if not only_memory or ack.level != DurabilityLevel.PERSIST_TO_MAJORITY:
                    ack.failures.add(name)
                ack.is_void |= len(ack.failures) > 1
        self.acks = [ack for ack in self.acks if not ack.is_void]

    # steps that others choose

    def write(self) -> None:
        """One write, without durability."""
        self.note(self.client.write(KEYS))

    def trickle(self, *, slowly: bool = True) -> None:
        """A moment passes: one frame arrives on each connection (or several times everything, if not
        ``slowly``), and each node does one piece of work.
        """
        self.clock.advance(0.05)
        for _ in range(1 if slowly else 8):
            for wire in self.network.candidates(()):
                if wire.deliver_frames(self.now) if slowly else wire.deliver(None, self.now):
                    for place in wire.places:
                        if place in self.machines:
                            self.observe(place)
        for name, machine in self.machines.items():
            machine.handle_timer()
            machine.work(1)
            self.observe(name)
        self.mirror.turn()

    # steps

    def step(self) -> None:
        actions: dict[Callable[[], None], float] = {
            self._write: 24.0,
            self._deliver_some: 36.0,
            self._pass_time: 12.0,
            self._work: 10.0,
            self._close_checkpoint: 2.0,
            self._compact: 1.0,
            self._cut: 2.0,
            self._kill: 1.5,
            self._stop_for_a_while: 0.7,
            self._partition: 1.0,
            self._heal: 1.5,
            self._rewind: 0.4,
            self._jump: 0.7,
            self._restart_mirror: 0.7,
            self._restart_cluster: 0.15,
            self._bring_back: 3.0,
            self._fail_over: 3.0,
            self._begin_rebalance: 3.0,
            self._coordinate: 10.0,
        }
        self.rng.choices(list(actions), list(actions.values()))[0]()
        self.mirror.turn()
        if self._fresh is not None:
            ack, self._fresh = self._fresh, None
            if self.rng.random() < (0.7 if ack.by in self._torn() else 0.2):
                self._provoke(ack)

    def _write(self) -> None:
        """Some writes in a row to the keys of one vbucket, so that they overwrite each other."""
        hot = vbucket_of(self.rng.choice(KEYS), VBUCKETS)
        keys = [key for key in KEYS if vbucket_of(key, VBUCKETS) == hot]
        for _ in range(self.rng.choice([1, 1, 2, 4, 6])):
            level = self.rng.choice([None, None, None, *DurabilityLevel])
            self.note(self.client.write(keys, level))

    def _provoke(self, ack: Ack) -> None:
        """A durable write was answered: its active goes, perhaps after its copies came back from a crash."""
        chain = self.coordinator.chains[ack.vbucket]
        if len(chain) < 2 or chain[0] != ack.by:
            return
        self.note(f"{ack.key!r} at {ack.seqno} is tempted:")
        if ack.level == DurabilityLevel.PERSIST_TO_MAJORITY and self.rng.random() < 0.7:
            for name in chain[1:]:
                self._lose(name)
                self._try(f"bring {name} back", lambda name=name: self.coordinator.add(name))
        self._lose(chain[0])
        self.fail_over(chain[0])

    def _torn(self) -> list[str]:
        """Nodes whose loss would be worst: a copy of theirs has a part of a snapshot."""
        found = []
        for number, chain in enumerate(self.coordinator.chains):
            copies = [self.machines[name] for name in chain[1:] if self.machines[name].node is not None]
            vbuckets = [one.vbucket(number) for one in copies]
            if any(one is not None and one.complete_seqno < one.high_seqno for one in vbuckets):
                found.append(chain[0])
        return found

    def _deliver(self) -> None:
        """Bytes arrive somewhere; at quiet points everywhere."""
        stopped = [name for name, one in self.machines.items() if one.is_stopped]
        wires = self.network.candidates(stopped)
        if wires and not self._quiet:
            wires = [self.rng.choice(wires)]
        for wire in wires:
            if wire.deliver(None if self._quiet else self.rng, self.now):
                for place in wire.places:
                    if place in self.machines:
                        self.observe(place)

    def _deliver_some(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self._deliver()

    def _pass_time(self) -> None:
        self.clock.advance(0.5 if self._quiet else self.rng.choice([0.05, 0.3, 1.0]))
        for name, machine in self.machines.items():
            if self._quiet or self.rng.random() < 0.6:
                machine.handle_timer()
                self.observe(name)
        for wire in list(self.network.wires):
            if self.network.reaches(*wire.places):
                wire.tick(self.now)

    def _work(self) -> None:
        for name in self.machines:
            if self._quiet or self.rng.random() < 0.6:
                self.machines[name].work(1_000 if self._quiet else 1)
                self.observe(name)

    def _active(self) -> tuple[int, Machine, History] | None:
        """Some vbucket with its node, if that serves it."""
        number = self.rng.randrange(VBUCKETS)
        chain = self.coordinator.chains[number]
        machine = self.machines[chain[0]] if chain else None
        if machine is None or machine.node is None or machine.node.fenced or machine.is_stopped:
            return None
        vbucket = machine.vbucket(number)
        if vbucket is None or vbucket.state != VBucketState.ACTIVE or machine.bucket.busy:
            return None
        return number, machine, vbucket

    def _close_checkpoint(self) -> None:
        if found := self._active():
            found[2].close_checkpoint()

    def _running(self) -> list[str]:
        return [name for name, one in self.machines.items() if one.node is not None and not one.is_stopped]

    def _compact(self) -> None:
        if not (names := self._running()):
            return
        name, purge = self.rng.choice(names), self.rng.random() < 0.4
        self.note(f"compact {name}{', forgetting deletions' if purge else ''}")
        if purge:
            self.may_roll_back = [True] * VBUCKETS
        self.machines[name].bucket.compact(Compaction(drop_tombstones=purge), lambda error: None)

    def _cut(self) -> None:
        if self.network.wires:
            wire = self.rng.choice(self.network.wires)
            self.note(f"cut {wire.places}")
            wire.cut()

    def _lose(self, name: str) -> None:
        power = self.rng.random() < 0.5
        self.note(f"{name} {'loses power' if power else 'is killed'}")
        self.lose(name, power=power)

    def _kill(self) -> None:
        if len(names := self._running()) > 1:
            self._lose(self.rng.choice(names))

    def _stop_for_a_while(self) -> None:
        for name, machine in self.machines.items():
            if machine.is_stopped:
                machine.is_stopped = False
                self.note(f"{name} goes on")
                return
        if len(names := self._running()) > 2:
            name = self.rng.choice(names)
            self.note(f"{name} is stopped")
            self.machines[name].is_stopped = True

    def _partition(self) -> None:
        places = [*self.machines, Client.PLACE, Mirror.PLACE, _COORDINATOR]
        one, other = self.rng.choice(list(self.machines)), self.rng.choice(places)
        if one != other:
            self.note(f"{one} and {other} can't reach each other")
            self.network.partitions.add(frozenset((one, other)))

    def _heal(self) -> None:
        if self.network.partitions:
            self.note("the network is whole")
            self.network.partitions.clear()

    def _rewind(self) -> None:
        found = self._active()
        if found is None or self._rebalance is not None:
            return
        number, machine, vbucket = found
        target = self.rng.randint(0, vbucket.high_seqno)
        answered = self.client.answered(self.network.wires)
        try:
            machine.bucket.store.rollback({number: target}, branch=True)
        except RollbackImpossible:
            return
        self.note(f"rewind of vbucket {number} to {target}")
        machine.bucket.vbucket_changed(number)
        self.may_roll_back[number] = True
        self.acks = [ack for ack in self.acks if ack.vbucket != number or ack.seqno <= target]
        for ack in answered:
            ack.is_void |= ack.vbucket == number
        self.observe(machine.name)

    def _jump(self) -> None:
        machine = self.machines[self.rng.choice(list(self.machines))]
        machine.clock.offset_s = self.rng.choice([-86_400.0, -5.0, 0.0, 5.0, 3_600.0])
        self.note(f"the clock of {machine.name} is {machine.clock.offset_s:+g} s off")

    def _restart_mirror(self) -> None:
        self.note("the mirror is killed")
        self.mirror.restart()

    # the coordinator

    def _try(self, what: str, act: Callable[[], object]) -> bool:
        self.note(what)
        try:
            act()
        except TailraceError as error:
            self.note(f"  refused: {error}")
            return False
        return True

    def _restart_cluster(self) -> None:
        """The coordinator ends; its nodes stop cleanly, and another one takes up what it left."""
        self.note("the coordinator is restarted")
        self._rebalance = None
        for machine in self.machines.values():
            machine.stop()
        self._marks.clear()
        auto_failover_s = self.coordinator.auto_failover_s
        self.coordinator = self._make_coordinator()
        self.coordinator.load()
        self.coordinator.auto_failover_s = auto_failover_s
        self.coordinator.start()

    def _bring_back(self) -> None:
        down = [name for name, one in self.machines.items() if one.node is None]
        if down and self._rebalance is None:
            name = self.rng.choice(down)
            self._try(f"bring {name} back", lambda: self.coordinator.add(name))

    def _fail_over(self) -> None:
        names = [name for name in self.machines if name not in self.coordinator.out]
        if torn := [name for name in self._torn() if name in names]:
            self._lose(torn[0])
            self.fail_over(torn[0])
            return
        silent = [
            name for name in names if self.machines[name].node is None or self.machines[name].is_stopped
        ]
        if len(names) > 1 and (silent or self.rng.random() < 0.5):
            self.fail_over(self.rng.choice(silent or names))

    def fail_over(self, name: str) -> None:
        self._try(f"fail {name} over", lambda: self._failing_over(lambda: self.coordinator.failover(name)))

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
                self._forget_acks(name, only_memory=False, vbuckets=actives)

    def _begin_rebalance(self) -> None:
        if self._rebalance is not None:
            return
        leaving = self.rng.choice([None, None, *self.machines])
        if leaving is not None and (len(self._running()) < 3 or leaving in self.coordinator.out):
            leaving = None
        self.note(f"rebalance{'' if leaving is None else f' without {leaving}'}")
        self._rebalance = self.coordinator.rebalance(leaving=leaving)

    def _coordinate(self) -> None:
        """One round of the coordinator's loop, as in `cluster.service`."""
        if self.coordinator.auto_failover_s:
            self._failing_over(self.coordinator.watch)
        if self._rebalance is not None:
            self._step_rebalance()
        elif self.now - self._settled_at >= _SETTLE_S:
            self._settled_at = self.now
            self.coordinator.settle()

    def _step_rebalance(self) -> bool:
        """Whether it goes on."""
        assert self._rebalance is not None
        try:
            self.note(f"rebalance: {next(self._rebalance)}")
        except StopIteration:
            self._rebalance = None
        except TailraceError as error:
            self.note(f"rebalance ends: {error}")
            self._rebalance = None
        return self._rebalance is not None

    # quiet points

    def settle(self) -> None:
        """No more faults: everybody comes back, and all becomes equal."""
        self.note("quiet")
        self._quiet = True
        self.network.partitions.clear()
        for machine in self.machines.values():
            machine.is_stopped = False
        self._until(lambda: self._rebalance is None, "the rebalance does not end")
        for name, machine in self.machines.items():
            if machine.node is None:
                self.coordinator.add(name)
        self._rebalance = self.coordinator.rebalance()
        self._until(lambda: self._rebalance is None, "the rebalance does not end")
        self._until(self._is_equal, "the copies don't become equal")
        self._until(lambda: self._is_equal() and self._mirror_is_equal(), "the mirror does not become equal")
        self._check()
        self.may_roll_back = [False] * VBUCKETS
        for ack in (*self.acks, *self.client.answered(self.network.wires)):
            ack.failures.clear()
        self._quiet = False

    def _until(self, check: Callable[[], bool], what: str) -> None:
        for _ in range(600):
            if check():
                return
            if self._rebalance is not None:
                self._step_rebalance()
            self._pass_time()
            self._work()
            for _ in range(3):
                self._deliver()
            self.mirror.turn()
            if self._rebalance is None and self.now - self._settled_at >= _SETTLE_S:
                self._settled_at = self.now
                self.coordinator.settle()
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

    def _mirror_is_equal(self) -> bool:
        for number, chain in enumerate(self.coordinator.chains):
            vbucket = self.machines[chain[0]].vbucket(number)
            assert vbucket is not None
            at, state = self.mirror.published.get(number, (0, {}))
            if at != vbucket.high_seqno or {b"\0" + key: one for key, one in state.items()} != documents(
                vbucket
            ):
                return False
        return True

    def _check(self) -> None:
        for number, chain in enumerate(self.coordinator.chains):
            self._check_one_active(number)
            active = self.machines[chain[0]].vbucket(number)
            assert active is not None
            expected = documents(active)
            self._check_state(f"{chain[0]} has", number, active.uuid, active.high_seqno, expected)
            for name in chain[1:]:
                copy = self.machines[name].vbucket(number)
                assert copy is not None
                if documents(copy) != expected:
                    raise Wrong(f"vbucket {number} on {name} is not equal to {chain[0]}")
            for ack in self.acks:
                if ack.vbucket == number:
                    self._check_ack(ack, active)

    def _check_ack(self, ack: Ack, active: History) -> None:
        branch = active.failover_log.branch_of(ack.seqno)
        if ack.seqno > active.high_seqno or branch not in (ack.vb_uuid, 0):
            level = "answered" if ack.level is None else f"answered as {ack.level.name}"
            raise Wrong(
                f"{ack.key!r} at {ack.seqno} of {ack.vb_uuid:#x} in vbucket {ack.vbucket} was {level} by "
                f"{ack.by} and is lost; the active has {active.high_seqno} of {active.failover_log.to_json()}"
            )

    def close(self) -> None:
        for machine in self.machines.values():
            machine.stop()


def documents(vbucket: History) -> dict[bytes, bytes]:
    """The live documents of a copy, expired ones too: nobody has made an expiration of them yet."""
    found = {}
    for key in KEYS:
        frame = vbucket.get_any(b"\0" + key)
        if frame is not None and not (document := Document.of(frame)).deleted:
            found[document.key] = document.value
    return found


def run(seed: int, steps: int = STEPS) -> World:
    """Play a seed. What goes wrong says how to play it again, and what happened."""
    world = World(seed)
    try:
        for number in range(1, steps + 1):
            world.step()
            if number % QUIET_EVERY == 0:
                world.settle()
    except BaseException as error:
        story = "\n  ".join(world.trace[-60:])
        error.add_note(f"the last of {len(world.trace)} things that happened:\n  {story}")
        error.add_note(f"play it again: make simulate SEED={seed} STEPS={steps}")
        raise
    finally:
        world.close()
    return world
