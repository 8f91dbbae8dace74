"""Nodes, network and clock in one process under one seed: at every quiet moment all is well.

    python -m pytest "tests/cluster/test_simulation.py::test_all_is_well_at_every_quiet_moment[17]"

plays seed 17 again, exactly. What happens: writes, overwrites, deletes, durable writes, checkpoints, flushes,
compactions, rewinds, cut connections, crashes that lose what was not flushed, failovers, takeovers, nodes
that come back. Bytes arrive in pieces of any size, and connections get ahead of each other.

What must hold: one active for each vbucket; every replica equal to it, with its failover log; no (vbucket,
vb_uuid, seqno) that names two changes; a write that was answered as persisted to a majority is there after
any number of failures, one at a time.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tailrace.clock import ManualClock
from tailrace.errors import RollbackImpossible
from tailrace.server.bucket import ServedBucket
from tailrace.server.node import Node
from tailrace.server.session import Session
from tailrace.server.settings import Settings
from tailrace.server.topology import ClusterMap, NodeAddress, bucket_map
from tailrace.server.upstream import Source, Upstream
from tailrace.store.base import Compaction
from tailrace.store.engine import Engine
from tailrace.store.files import MemoryFiles
from tailrace.store.format import Document
from tailrace.store.vbucket import History
from tailrace.wire.codes import AddStreamFlag, DurabilityLevel, VBucketState

NODES = 3
VBUCKETS = 2
SEEDS = range(40)
MANY_SEEDS = range(1000, 3000)
STEPS = 250
QUIET_EVERY = 50


class Wire:
    """A connection between two nodes: two queues of bytes."""

    def __init__(self, link: Upstream, session: Session) -> None:
        self.link, self.session = link, session
        self.there = bytearray()  # to the session
        self.back = bytearray()
        self.is_open = True

    def collect(self) -> None:
        for part in self.link.data_to_send():
            self.there += part
        while parts := self.session.data_to_send(1 << 16):
            for part in parts:
                self.back += part

    def deliver(self, rng: random.Random, now: float) -> bool:
        """Some bytes arrive; whether there were any."""
        self.collect()
        moved = False
        if self.there and self.session.wants_data:
            count = rng.randint(1, len(self.there))
            data, self.there = bytes(self.there[:count]), self.there[count:]
            self.session.receive_data(data, now)
            moved = True
        if self.back and self.link.wants_data:
            count = rng.randint(1, len(self.back))
            data, self.back = bytes(self.back[:count]), self.back[count:]
            self.link.exchange(data, now)
            moved = True
        if self.link.closed or self.session.closed:
            self.cut()
        return moved

    def cut(self) -> None:
        if self.is_open:
            self.is_open = False
            self.link.connection_lost()
            self.session.connection_lost()


class Simulation:
    """Three nodes, and a coordinator that is always right about who runs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.files = [MemoryFiles() for _ in range(NODES)]
        self.nodes: list[Node | None] = [None] * NODES
        self.engines: list[Engine | None] = [None] * NODES
        self.wires: list[Wire] = []
        self.chains = [[at % NODES, (at + 1) % NODES, (at + 2) % NODES] for at in range(VBUCKETS)]
        self.rev = 0
        self.moving: dict[int, int] = {}
        self.changes: dict[tuple[int, int, int], bytes] = {}
        self.durable: dict[tuple[int, bytes], int] = {}
        self.answered: list[int] = []  # vbuckets with a durable write that was just answered
        self.number = 0
        for at in range(NODES):
            self.start(at)
        for at, chain in enumerate(self.chains):
            self.set_state(chain[0], at, VBucketState.ACTIVE)
        self.order()

    # nodes

    def start(self, at: int) -> None:
        settings = Settings.parse(["checkpoint_items=20", "history_changes=30", "replication_buffer=64k"])
        engine = Engine(
            files=self.files[at],
            settings=settings.for_store(),
            clock=self.clock,
            rng=random.Random(self.rng.random()),
        )
        if "default" not in engine.buckets:
            engine.create_bucket("default", VBUCKETS, active=False)
        node = Node(engine, settings=settings, clock=self.clock, rng=random.Random(self.rng.random()))
        node.address = NodeAddress(port=at + 1)
        node.dial = self.dial
        self.engines[at], self.nodes[at] = engine, node
        for number in range(VBUCKETS):
            self.set_state(at, number, VBucketState.REPLICA)

    def dial(self, link: Upstream) -> None:
        target = self.nodes[link.source.port - 1]
        session = None if target is None else target.accept("sim", self.clock.monotonic())
        if session is None:
            link.close("refused")
        else:
            self.wires.append(Wire(link, session))

    def bucket(self, at: int) -> ServedBucket:
        node = self.nodes[at]
        assert node is not None
        return node.buckets["default"]

    def vbucket(self, at: int, number: int) -> History:
        found = self.bucket(at).store.vbuckets[number]
        assert isinstance(found, History)
        return found

    def active(self, number: int) -> History:
        return self.vbucket(self.chains[number][0], number)

    def set_state(self, at: int, number: int, state: VBucketState) -> None:
        node = self.nodes[at]
        assert node is not None
        bucket = node.buckets["default"]
        bucket.store.set_state(number, state)
        node.vbucket_changed(bucket, number)

    def living(self) -> list[int]:
        return [at for at, node in enumerate(self.nodes) if node is not None]

    def order(self) -> None:
        """Tell everybody what is theirs, as a coordinator would."""
        self.rev += 1
        addresses = [NodeAddress(port=at + 1, host="sim") for at in range(NODES)]
        rows = [(chain + [-1] * NODES)[:NODES] for chain in self.chains]
        for at in self.living():
            node = self.nodes[at]
            assert node is not None
            made = bucket_map("default", "0" * 32, addresses, rows, epoch=2, rev=self.rev, this_node=at)
            node.set_map("default", ClusterMap(2, self.rev, made.text))
            orders = {}
            for number, chain in enumerate(self.chains):
                flags = int(AddStreamFlag.TAKE_OVER) if self.moving.get(number) == at else 0
                if at in chain[1:] and chain[0] in self.living():
                    orders[number] = Source("sim", chain[0] + 1), flags
            node.replication["default"].order(orders, self.clock.monotonic())

    # what happens

    def step(self) -> None:
        actions = {
            self.write: 30.0,
            self.write_durably: 6.0,
            self.network: 40.0,
            self.time_passes: 8.0,
            self.checkpoint: 3.0,
            self.compact: 1.0,
            self.cut: 3.0,
            self.crash: 1.5,
            self.restart: 3.0,
            self.rewind: 0.5,
            self.take_over: 3.0,
        }
        action = self.rng.choices(list(actions), list(actions.values()))[0]
        action()
        self.look_at_takeovers()
        if self.answered and self.rng.random() < 0.2:
            self.provoke(self.rng.choice(self.answered))
        self.answered.clear()

    def provoke(self, number: int) -> None:
        """Right after a durable write was answered its active goes, perhaps after all others came back from
        a crash of their own.
        """
        if self.rng.random() < 0.5:
            for replica in self.chains[number][1:]:
                self.crash(replica)
                self.restart()
        self.crash(self.chains[number][0])

    def write(self) -> int | None:
        number = self.rng.randrange(VBUCKETS)
        if not self.chains[number] or self.active(number).state != VBucketState.ACTIVE:
            return None
        vbucket = self.active(number)
        key = b"\0key-%d" % self.rng.randrange(8)
        self.number += 1
        if self.rng.random() < 0.15 and vbucket.get(key) is not None:
            vbucket.delete(key)
        else:
            vbucket.set(key, b"value %d" % self.number)
        self.note(vbucket, number)
        return number

    def note(self, vbucket: History, number: int) -> None:
        """Remember every change that was ever made."""
        frame = vbucket.frame_at(vbucket.high_seqno)
        assert frame is not None
        name = number, vbucket.failover_log.branch_of(vbucket.high_seqno), vbucket.high_seqno
        assert self.changes.setdefault(name, frame) == frame, f"{name} names two changes"

    def write_durably(self) -> None:
        number = self.write()
        if number is None:
            return
        vbucket, bucket = self.active(number), self.bucket(self.chains[number][0])
        if not bucket.durability.is_possible(number):
            return
        seqno = vbucket.high_seqno
        name = number, vbucket.failover_log.branch_of(seqno)
        frame = vbucket.frame_at(seqno)
        assert frame is not None
        key = Document.of(frame).key
        missing = [2]

        def reached(ok: bool) -> None:
            missing[0] -= 1 if ok else 100
            if not missing[0] and (*name, seqno) in self.changes:
                self.durable[number, key] = max(seqno, self.durable.get((number, key), 0))
                self.answered.append(number)

        vbucket.when_persisted(seqno, reached)
        bucket.durability.wait(number, seqno, DurabilityLevel.PERSIST_TO_MAJORITY, reached, lambda: False)

    def network(self) -> bool:
        self.wires = [wire for wire in self.wires if wire.is_open]
        if not self.wires:
            return False
        return self.rng.choice(self.wires).deliver(self.rng, self.clock.monotonic())

    def time_passes(self) -> None:
        """Some nodes notice, and flush what they have; others are busy."""
        self.clock.advance(self.rng.choice([0.05, 0.3, 1.0]))
        for at in self.living():
            if self.rng.random() < 0.5:
                continue
            node = self.nodes[at]
            assert node is not None
            node.handle_timer(self.clock.monotonic())
        for wire in self.wires:
            for side in (wire.link, wire.session):
                timer = side.next_timer()
                if timer is not None and timer <= self.clock.monotonic() and not side.closed:
                    side.handle_timer(self.clock.monotonic())

    def checkpoint(self) -> None:
        number = self.rng.randrange(VBUCKETS)
        if self.chains[number]:
            self.active(number).close_checkpoint()

    def compact(self) -> None:
        bucket = self.bucket(self.rng.choice(self.living()))
        bucket.compact(Compaction(), lambda error: None)

    def cut(self) -> None:
        if self.wires:
            self.rng.choice(self.wires).cut()

    def crash(self, at: int | None = None) -> None:
        """One node at a time: its actives go on where the most is complete."""
        if len(self.living()) < NODES or not all(self.is_in_step(number) for number in range(VBUCKETS)):
            return
        at = self.rng.choice(self.living()) if at is None else at
        for wire in self.wires:
            if wire.link.node is self.nodes[at] or wire.session.node is self.nodes[at]:
                wire.cut()
        engine = self.engines[at]
        assert engine is not None
        self.nodes[at] = self.engines[at] = None
        engine.crash()
        for number, chain in enumerate(self.chains):
            self.moving.pop(number, None)
            old = chain[0]
            self.chains[number] = left = [one for one in chain if one != at]
            if old != at and self.active(number).state == VBucketState.ACTIVE:
                continue
            taken = [one for one in left if self.vbucket(one, number).state == VBucketState.ACTIVE]
            best = taken[0] if taken else max(left, key=lambda one: self.vbucket(one, number).complete_seqno)
            self.chains[number] = [best, *(one for one in left if one != best)]
            for one in left:
                state = VBucketState.ACTIVE if one == best else VBucketState.REPLICA
                if self.vbucket(one, number).state != state:
                    self.set_state(one, number, state)
        self.order()

    def is_in_step(self, number: int) -> bool:
        """All copies are on the active's branch: whoever goes on goes on with the right history."""
        chain = self.chains[number]
        return all(self.vbucket(one, number).uuid == self.vbucket(chain[0], number).uuid for one in chain)

    def restart(self) -> None:
        for at in range(NODES):
            if self.nodes[at] is None:
                self.start(at)
                for number, chain in enumerate(self.chains):
                    self.chains[number] = [*chain, at]
                self.order()
                return

    def rewind(self) -> None:
        number = self.rng.randrange(VBUCKETS)
        at = self.chains[number][0]
        vbucket = self.vbucket(at, number)
        if vbucket.state != VBucketState.ACTIVE or number in self.moving:
            return
        target = self.rng.randint(0, vbucket.high_seqno)
        try:
            self.bucket(at).store.rollback({number: target}, branch=True)
        except RollbackImpossible:
            return
        self.bucket(at).vbucket_changed(number)
        self.durable = {
            name: seqno for name, seqno in self.durable.items() if name[0] != number or seqno <= target
        }

    def take_over(self) -> None:
        number = self.rng.randrange(VBUCKETS)
        chain = self.chains[number]
        if number in self.moving or len(chain) < 2 or self.active(number).state != VBucketState.ACTIVE:
            return
        self.moving[number] = self.rng.choice(chain[1:])
        self.order()

    def look_at_takeovers(self) -> None:
        for number, new in list(self.moving.items()):
            node = self.nodes[new]
            assert node is not None
            row = node.replication["default"].status()[str(number)]
            if row.get("stream") != "over":
                continue
            old = self.chains[number][0]
            del self.moving[number]
            if row["state"] == "active":
                assert self.vbucket(old, number).state == VBucketState.DEAD, "two are active"
                self.chains[number] = [new, *(one for one in self.chains[number] if one != new)]
                self.set_state(old, number, VBucketState.REPLICA)
            else:  # undone
                self.order()
                if row["state"] != "replica":
                    self.set_state(new, number, VBucketState.REPLICA)
                if self.vbucket(old, number).state != VBucketState.ACTIVE:
                    self.set_state(old, number, VBucketState.ACTIVE)
            self.order()

    # quiet moments

    def settle(self) -> None:
        for _ in range(400):
            self.time_passes()
            for _ in range(60):
                self.network()
                self.look_at_takeovers()
            if not self.moving and all(self.is_equal(number) for number in range(VBUCKETS)):
                return
        raise AssertionError(f"the nodes don't become equal: {json.dumps(self.describe())}")

    def is_equal(self, number: int) -> bool:
        chain = self.chains[number]
        first = self.contents(chain[0], number)
        return all(self.contents(one, number) == first for one in chain[1:])

    def contents(self, at: int, number: int) -> Any:
        vbucket = self.vbucket(at, number)
        documents = {}
        for key in (b"\0key-%d" % one for one in range(8)):
            frame = vbucket.get_any(key)
            if frame is not None and not Document.of(frame).deleted:
                documents[key] = frame
        return documents, vbucket.failover_log, vbucket.high_seqno

    def describe(self) -> Any:
        return {
            str(at): self.nodes[at].replication["default"].status()  # type: ignore[union-attr]
            for at in self.living()
        }

    def check(self) -> None:
        for number, chain in enumerate(self.chains):
            states = [self.vbucket(one, number).state for one in self.living()]
            assert states.count(VBucketState.ACTIVE) == 1, f"vbucket {number} has states {states}"
            assert self.active(number).state == VBucketState.ACTIVE
            for one in chain:
                vbucket = self.vbucket(one, number)
                for key in (b"\0key-%d" % place for place in range(8)):
                    frame = vbucket.get_any(key)
                    if frame is not None:
                        seqno = Document.of(frame).seqno
                        branch = vbucket.failover_log.branch_of(seqno)
                        if branch:
                            assert self.changes[number, branch, seqno] == frame
            for (of, key), seqno in self.durable.items():
                if of == number:
                    frame = self.active(number).get_any(key)
                    assert frame is not None and Document.of(frame).seqno >= seqno, (
                        f"durable {key!r} at {seqno} in vbucket {number} is lost"
                    )

    def close(self) -> None:
        for wire in self.wires:
            wire.cut()
        for at in self.living():
            node = self.nodes[at]
            assert node is not None
            node.close()


def run(seed: int, steps: int = STEPS) -> Simulation:
    simulation = Simulation(seed)
    for number in range(1, steps + 1):
        simulation.step()
        if number % QUIET_EVERY == 0:
            simulation.settle()
            simulation.check()
    return simulation


@pytest.mark.parametrize("seed", SEEDS)
def test_all_is_well_at_every_quiet_moment(seed: int) -> None:
    run(seed).close()


@pytest.mark.long
@pytest.mark.parametrize("seed", MANY_SEEDS)
def test_all_is_well_at_every_quiet_moment_of_many_runs(seed: int) -> None:
    run(seed, 600).close()


def test_a_seed_plays_the_same_every_time() -> None:
    first, second = run(5), run(5)
    assert first.changes == second.changes
    assert first.durable == second.durable
    first.close()
    second.close()
