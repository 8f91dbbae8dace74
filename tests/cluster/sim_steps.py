"""What happens in the simulated cluster, one thing after the other, as a seed chooses.

Most of it is bytes that arrive, time that passes and writes. Faults fall where they hurt: `_tear` makes
snapshots in which keys were overwritten, lets each reader of the active have another part of them, and then
takes something away; `_provoke` attacks nodes that have just answered for a durable write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.sim_client import Ack, Client
from cluster.sim_followers import Follower
from cluster.sim_network import UpstreamEnd, Wire
from cluster.sim_nodes import Machine
from cluster.sim_readers import CopyReader, Mirror
from cluster.sim_truth import KEYS, VBUCKETS
from cluster.sim_world import COORDINATOR, World
from tailrace.client.cluster_map import vbucket_of
from tailrace.errors import RollbackImpossible
from tailrace.store.base import Compaction
from tailrace.store.vbucket_history import History
from tailrace.wire.codes import DurabilityLevel, VBucketState

_CATCH_UP_TURNS = 20
_CREEP_TURNS = 30
_HURRY_TURNS = 60
_SHORT_BYTES = 150


class Steps:
    """A seed's choices."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self._soon: list[Callable[[], None]] = []
        self._places = [*world.machines, Client.PLACE, Mirror.PLACE, CopyReader.PLACE]
        self._weights: dict[Callable[[], None], float] = {
            self._write: 20.0,
            self._deliver: 32.0,
            world.pass_time: 12.0,
            world.work: 10.0,
            self._tear_gently: 1.0,
            self._close_checkpoint: 2.0,
            self._compact: 1.0,
            self._cut: 2.0,
            self._kill: 1.5,
            self._stop_for_a_while: 0.7,
            self._partition: 1.0,
            self._heal: 1.5,
            self._rewind: 0.4,
            self._jump: 0.7,
            self._restart_reader: 0.7,
            self._move_reader: 1.5,
            self._restart_cluster: 0.15,
            self._bring_back: 3.0,
            self._fail_over: 2.0,
            self._begin_rebalance: 3.0,
            world.coordinate: 10.0,
        }

    def begin(self) -> None:
        """Tear snapshots while the cluster is still whole, when that hurts it most."""
        self._soon = [self._tear_gently, self._tear_gently, lambda: self._tear(lossy=True)]

    def step(self) -> None:
        """One thing happens."""
        if self._soon and self.rng.random() < 0.3:
            self._soon.pop(0)()
        else:
            self.rng.choices(list(self._weights), list(self._weights.values()))[0]()
        self.world.turn_readers()
        ack = self.world.promises.take_fresh()
        if ack is not None:
            self._provoke(ack)

    # writers and readers

    def _write(self) -> None:
        """Some writes in a row to the keys of one vbucket, so they overwrite each other."""
        keys = _keys_of(vbucket_of(self.rng.choice(KEYS), VBUCKETS))
        for _ in range(self.rng.choice([1, 1, 2, 4, 6])):
            level = self.rng.choice([None, None, None, *DurabilityLevel])
            self.world.note(self.world.client.write(keys, level))

    def _deliver(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.world.deliver()

    def _restart_reader(self) -> None:
        reader = self.rng.choice(self.world.readers)
        self.world.note(f"the {reader.NAME if isinstance(reader, Follower) else reader.PLACE} is killed")
        reader.restart()

    def _move_reader(self) -> None:
        self.world.note("the copy reader goes elsewhere")
        self.world.copy_reader.move()

    # snapshots that are torn apart

    def _tear(self, *, lossy: bool) -> None:
        """Write all keys of a vbucket, then some of them once more, and give each reader another part of
        that: some have the first writes whole, others get a part of both folded into one snapshot. Then take
        something away from them: their active, or (not ``lossy``) less than that.
        """
        active = self._active()
        if active is None:
            return
        number, machine, _ = active
        world, keys = self.world, _keys_of(number)
        world.note(f"vbucket {number} of {machine.name} is torn:")
        self._catch_up(machine)
        wires = self._wires(machine, *world.machines, Mirror.PLACE, CopyReader.PLACE)
        copies = [wire for wire in wires if isinstance(wire.end, UpstreamEnd)]
        ahead = copies[: self.rng.choice([0, 0, 1, 1, 1])]
        self._write_each(machine, keys)
        for wire in ahead:
            self._deliver_on(wire, whole=True)
        is_sealed = not lossy and self.rng.random() < 0.5
        if is_sealed:
            machine.bucket.work.compact(Compaction(), lambda error: None)
            machine.work()
        self._write_each(machine, self.rng.sample(keys, self.rng.randint(1, len(keys) - 1)))
        for wire in wires:
            if self.rng.random() < (0.3 if wire in ahead else 0.9):
                self._deliver_on(wire, whole=False)
        for name, other in world.machines.items():
            if name != machine.name:
                for wire in self._wires(other, CopyReader.PLACE):
                    self._deliver_on(wire, whole=True)
        world.turn_readers()
        if world.followers and self.rng.random() < 0.7:
            self._hurry(machine)
        if lossy:
            self._lose(machine.name)
            world.fail_over(machine.name)
        elif is_sealed:
            # what was one snapshot is now two
            machine.bucket.store.forget_memory()  # type: ignore[attr-defined]
            for wire in wires:
                wire.cut()
            if machine.name in self._torn() and self.rng.random() < 0.5:
                self._creep(machine)
        else:
            self._move_reader()

    def _hurry(self, machine: Machine) -> None:
        """A node writes to its disk and its followers get everything, before any copy gets more."""
        world = self.world
        machine.work(1_000)
        world.observe(machine.name)
        for number in range(_HURRY_TURNS):
            world.clock.advance(0.05 if number % 4 == 0 else 0.0)
            for other in world.machines.values():
                for wire in self._wires(other, Mirror.PLACE):
                    self._deliver_on(wire, whole=True)
            for follower in world.followers:
                follower.turn()

    def _creep(self, machine: Machine) -> None:
        """Peers that were cut off from a node connect again. Its copies get one message at a time, and their
        readers see every state in between.
        """
        world = self.world
        world.clock.advance(1.0)
        for _ in range(_CREEP_TURNS):
            for name, other in world.machines.items():
                other.handle_timer()
                world.observe(name)
                for wire in self._wires(other, CopyReader.PLACE) if name != machine.name else ():
                    self._deliver_on(wire, whole=True)
            for wire in self._wires(machine, *world.machines):
                if wire.deliver_frames(world.now, unless_short=_SHORT_BYTES):
                    world.observe_both(wire)
            world.copy_reader.turn()

    def _tear_gently(self) -> None:
        self._tear(lossy=False)

    def _catch_up(self, machine: Machine) -> None:
        """Deliver everything between a node and its peers."""
        self.world.client.connect()
        for _ in range(_CATCH_UP_TURNS):
            wires = self._wires(machine, *self._places)
            if not sum([self._deliver_on(wire, whole=True) for wire in wires]):
                return
            self.world.turn_readers()

    def _write_each(self, machine: Machine, keys: list[bytes]) -> None:
        """One write to each key, in some order, and they are done."""
        for key in self.rng.sample(keys, len(keys)):
            self.world.note(self.world.client.write([key]))
        for wire in self._wires(machine, Client.PLACE):
            self._deliver_on(wire, whole=True)

    def _wires(self, machine: Machine, *places: str) -> list[Wire]:
        """Connections of these places to a node on which bytes can arrive, in some order."""
        stopped = [name for name, machine in self.world.machines.items() if machine.is_stopped]
        pairs = [
            wire
            for wire in self.world.network.candidates(stopped)
            if wire.places[1] == machine.name and wire.places[0] in places
        ]
        self.rng.shuffle(pairs)
        return pairs

    def _deliver_on(self, wire: Wire, *, whole: bool) -> bool:
        now = self.world.now
        moved = wire.deliver(None, now) if whole else wire.deliver_part(self.rng, now)
        if moved:
            self.world.observe_both(wire)
        return moved

    def _torn(self) -> list[str]:
        """Nodes whose loss would be worst: a copy of theirs has a part of a snapshot."""
        machines, actives = self.world.machines, []
        for number, chain in enumerate(self.world.coordinator.chains):
            copies = [machines[name] for name in chain[1:] if machines[name].node is not None]
            vbuckets = [machine.vbucket(number) for machine in copies]
            if any(
                vbucket is not None and vbucket.complete_seqno < vbucket.high_seqno for vbucket in vbuckets
            ):
                actives.append(chain[0])
        return actives

    # stores

    def _active(self) -> tuple[int, Machine, History] | None:
        """Some vbucket with its node, if that serves it."""
        number = self.rng.randrange(VBUCKETS)
        chain = self.world.coordinator.chains[number]
        machine = self.world.machines[chain[0]] if chain else None
        if machine is None or machine.node is None or machine.node.fenced or machine.is_stopped:
            return None
        vbucket = machine.vbucket(number)
        if vbucket is None or vbucket.state != VBucketState.ACTIVE or machine.bucket.work.busy:
            return None
        return number, machine, vbucket

    def _close_checkpoint(self) -> None:
        if active := self._active():
            active[2].close_checkpoint()

    def _compact(self) -> None:
        if not (names := self.world.running()):
            return
        name, purge = self.rng.choice(names), self.rng.random() < 0.4
        self.world.note(f"compact {name}{', forgetting deletions' if purge else ''}")
        if purge:
            self.world.may_roll_back = [True] * VBUCKETS
        self.world.machines[name].bucket.work.compact(Compaction(drop_tombstones=purge), lambda error: None)

    def _rewind(self) -> None:
        active = self._active()
        if active is None or self.world.moves is not None:
            return
        number, machine, vbucket = active
        target = self.rng.randint(0, vbucket.high_seqno)
        answered = self.world.client.answered(self.world.network.wires)
        try:
            machine.bucket.store.rollback({number: target}, branch=True)
        except RollbackImpossible:
            return
        self.world.note(f"rewind of vbucket {number} to {target}")
        machine.bucket.vbucket_changed(number)
        self.world.may_roll_back[number] = True
        self.world.rewound.add(number)
        self.world.promises.rewound(number, target, answered)
        self.world.observe(machine.name)

    # machines and network

    def _cut(self) -> None:
        if self.world.network.wires:
            wire = self.rng.choice(self.world.network.wires)
            self.world.note(f"cut {wire.places}")
            wire.cut()

    def _lose(self, name: str) -> None:
        power = self.rng.random() < 0.5
        self.world.note(f"{name} {'loses power' if power else 'is killed'}")
        self.world.lose(name, power=power)

    def _kill(self) -> None:
        if len(names := self.world.running()) > 1:
            self._lose(self.rng.choice(names))

    def _stop_for_a_while(self) -> None:
        for name, machine in self.world.machines.items():
            if machine.is_stopped:
                machine.is_stopped = False
                self.world.note(f"{name} goes on")
                return
        if len(names := self.world.running()) > 2:
            name = self.rng.choice(names)
            self.world.note(f"{name} is stopped")
            self.world.machines[name].is_stopped = True

    def _partition(self) -> None:
        here = self.rng.choice(list(self.world.machines))
        other = self.rng.choice([*self._places, COORDINATOR])
        if here != other:
            self.world.note(f"{here} and {other} can't reach each other")
            self.world.network.partitions.add(frozenset((here, other)))

    def _heal(self) -> None:
        if self.world.network.partitions:
            self.world.note("the network is whole")
            self.world.network.partitions.clear()

    def _jump(self) -> None:
        machine = self.world.machines[self.rng.choice(list(self.world.machines))]
        machine.clock.offset_s = self.rng.choice([-86_400.0, -5.0, 0.0, 5.0, 3_600.0])
        self.world.note(f"the clock of {machine.name} is {machine.clock.offset_s:+g} s off")

    # the coordinator

    def _provoke(self, ack: Ack) -> None:
        """A durable write was answered: take its active away, perhaps after its copies came back from a
        crash; always if it looks as if the answer was not true.
        """
        chain = self.world.coordinator.chains[ack.vbucket]
        if len(chain) < 2 or chain[0] != ack.by:
            return
        needs_disk = ack.level == DurabilityLevel.PERSIST_TO_MAJORITY
        is_doubtful = needs_disk and 2 * self._count_on_disk(ack, chain) <= len(chain)
        if not is_doubtful and self.rng.random() > (0.7 if ack.by in self._torn() else 0.2):
            return
        self.world.note(f"{ack.key!r} at {ack.seqno} is tempted:")
        if needs_disk and (is_doubtful or self.rng.random() < 0.7):
            for name in chain[1:]:
                self._lose(name)
                self._add(name)
        self._lose(chain[0])
        self.world.fail_over(chain[0])

    def _count_on_disk(self, ack: Ack, chain: Iterable[str]) -> int:
        """How many of the copies that run have a write on disk."""
        machines = [self.world.machines[name] for name in chain]
        copies = [machine.vbucket(ack.vbucket) for machine in machines if machine.node is not None]
        return sum(vbucket is not None and vbucket.persisted_seqno >= ack.seqno for vbucket in copies)

    def _add(self, name: str) -> None:
        self.world.attempt(f"bring {name} back", lambda: self.world.coordinator.add(name))

    def _bring_back(self) -> None:
        down = [name for name, machine in self.world.machines.items() if machine.node is None]
        if down and self.world.moves is None:
            self._add(self.rng.choice(down))

    def _fail_over(self) -> None:
        machines = self.world.machines
        names = [name for name in machines if name not in self.world.coordinator.out]
        if torn := [name for name in self._torn() if name in names]:
            self._lose(torn[0])
            self.world.fail_over(torn[0])
            return
        silent = [name for name in names if machines[name].node is None or machines[name].is_stopped]
        if len(names) > 1 and (silent or self.rng.random() < 0.5):
            self.world.fail_over(self.rng.choice(silent or names))

    def _begin_rebalance(self) -> None:
        world = self.world
        if world.moves is not None:
            return
        leaving = self.rng.choice([None, None, *world.machines])
        if leaving is not None and (len(world.running()) < 3 or leaving in world.coordinator.out):
            leaving = None
        world.note(f"rebalance{'' if leaving is None else f' without {leaving}'}")
        world.moves = world.coordinator.rebalance(leaving=leaving)

    def _restart_cluster(self) -> None:
        self.world.restart_cluster()


def _keys_of(vbucket: int) -> list[bytes]:
    return [key for key in KEYS if vbucket_of(key, VBUCKETS) == vbucket]
