"""What the coordinator must not do, in a simulated cluster where nothing else goes wrong."""

from __future__ import annotations

from unittest import mock

import pytest

from cluster.sim_nodes import SimulatedMember
from cluster.sim_truth import KEYS, VBUCKETS
from cluster.sim_world import World
from tailrace.client.cluster_map import vbucket_of
from tailrace.errors import ConnectError, TailraceError
from tailrace.wire.codes import DurabilityLevel, VBucketState


def test_a_node_that_still_has_what_is_not_its_own_stays_fenced() -> None:
    world = World(3, replicas=1)
    coordinator = world.coordinator
    name = coordinator.chains[0][0]
    world.lose(name, power=False)
    world.fail_over(name)
    original = SimulatedMember.set_states

    def set_states(self: SimulatedMember, states: dict[int, VBucketState]) -> None:
        if self.name == name:
            raise ConnectError("cut off")
        original(self, states)

    with mock.patch.object(SimulatedMember, "set_states", set_states):
        coordinator.add(name)
    node = world.machines[name].node
    assert node is not None
    assert node.fenced, "it has the vbucket as active, and so has another node"
    assert coordinator.settle()
    assert not node.fenced
    world.settle()
    world.close()


def test_a_copy_that_has_received_nothing_is_no_copy() -> None:
    world = World(3, replicas=1)
    coordinator = world.coordinator
    for _ in range(40):
        world.write()
        world.trickle(slowly=False)
    world.settle()
    active, replica = coordinator.chains[0]
    third = next(name for name in world.machines if name not in (active, replica))
    world.lose(replica, power=False)
    world.fail_over(replica)
    steps = coordinator.rebalance()
    while third not in coordinator.chains[0]:
        next(steps)  # it has the future copy, but nothing in it yet
    vbucket = world.machines[third].vbucket(0)
    assert vbucket is None or not vbucket.complete_seqno
    with pytest.raises(TailraceError, match="no other copy"):
        coordinator.failover(active)
    assert coordinator.chains[0][0] == active
    world.settle()
    world.close()


def test_a_failover_ends_a_rebalance() -> None:
    world = World(3, replicas=1)
    coordinator = world.coordinator
    old, new = coordinator.chains[0]
    third = next(name for name in world.machines if name not in (old, new))
    steps = coordinator._move({0: (new, third)})
    while "taken over" not in next(steps):
        world.trickle()
    world.lose(third, power=False)
    world.fail_over(third)
    with pytest.raises(TailraceError, match="failed over"):
        for _ in steps:
            world.trickle()
    assert all(third not in chain for chain in coordinator.chains), "a chain names a node that is out"
    assert coordinator.chains[0][0] == new
    world.settle()
    world.close()


def test_of_two_branches_the_newer_goes_on() -> None:
    """A rewind that the coordinator has not seen yet: one copy has followed it, the other has more changes of
    the branch that was given up.
    """
    world = World(3, replicas=2)
    coordinator = world.coordinator
    for _ in range(60):
        world.write()
        world.trickle(slowly=False)
    world.settle()
    active, follower, other = coordinator.chains[0]
    machine = world.machines[active]
    high = machine.vbucket(0).high_seqno
    assert high > 2
    world.machines[other].node.replication["default"].order({}, world.now)  # it receives no more
    machine.bucket.store.rollback({0: high - 2}, branch=True)
    machine.bucket.vbucket_changed(0)
    world.may_roll_back[0] = True
    world.promises.rewound(0, high - 2, [])
    uuid = machine.vbucket(0).uuid
    for _ in range(60):
        world.trickle(slowly=False)
        world.observe(active)
    assert world.machines[follower].vbucket(0).uuid == uuid
    assert world.machines[other].vbucket(0).complete_seqno == high
    world.lose(active, power=False)
    world.fail_over(active)
    assert coordinator.chains[0][0] == follower
    world.settle()
    world.close()


def test_copies_go_when_the_new_ones_have_all_that_was_answered() -> None:
    world = World(3, replicas=1)
    coordinator = world.coordinator
    active, old = coordinator.chains[0]
    new = next(name for name in world.machines if name not in (active, old))
    keys = [key for key in KEYS if vbucket_of(key, VBUCKETS) == 0]

    def write() -> int:
        world.client.write(keys)
        for _ in range(4):
            world.trickle(slowly=False)
        return world.machines[active].vbucket(0).high_seqno

    high = write()
    steps = coordinator._move({0: (active, new)})
    while (vbucket := world.machines[new].vbucket(0)) is None or vbucket.complete_seqno < high:
        next(steps)
        world.trickle(slowly=False)
    world.network.partitions.add(frozenset((active, new)))
    high = write()
    assert world.machines[old].vbucket(0).complete_seqno == high > vbucket.complete_seqno
    for _ in range(20):
        next(steps)  # it does not end: the new copy lacks a write that the old one has
        world.trickle(slowly=False)
    world.lose(active, power=False)
    world.fail_over(active)
    assert coordinator.chains[0][0] == old
    assert world.machines[old].vbucket(0).high_seqno == high
    steps.close()  # type: ignore[attr-defined]
    world.settle()
    world.close()


def test_a_copy_that_is_down_may_be_the_one_with_the_durable_write() -> None:
    world = World(3, replicas=2)
    coordinator = world.coordinator
    active, holder, other = coordinator.chains[0]
    world.network.partitions.add(frozenset((active, other)))
    keys = [key for key in KEYS if vbucket_of(key, VBUCKETS) == 0]
    for _ in range(3):  # a deletion may find nothing
        world.client.write(keys, DurabilityLevel.PERSIST_TO_MAJORITY)
    for _ in range(20):
        world.trickle(slowly=False)
    assert world.promises.take_fresh() is not None
    world.lose(holder, power=False)
    world.lose(active, power=False)
    with pytest.raises(TailraceError, match="alone may have writes that were answered as durable"):
        coordinator.failover(active)
    coordinator.add(holder)
    coordinator.failover(active)
    assert coordinator.chains[0][0] == holder
    world.settle()
    world.close()
