"""A planned move, interrupted at every step by the end of either side or of their connection: resumed or
undone, and nothing lost.

The whole cluster is simulated (see `simulation`), with the product's own coordinator and nodes. Between two
steps one frame arrives on each connection, so that a kill falls between any two messages of a takeover. The
world checks as it goes: one active, no change of two names, no state that never was, and no reader that rolls
back unless an active was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.sim_world import World
from tailrace.errors import TailraceError
from tailrace.wire.codes import VBucketState

MOST_STEPS = 400
STRIDE = 2
"""Each test takes every n-th step; together they take all."""


class Move:
    """A node leaves while a client writes."""

    def __init__(self) -> None:
        self.world = World(3, replicas=1)
        self.is_over = False
        self._count = 0
        self._takes_over = False
        for _ in range(12):
            self.world.write()
            self.world.trickle(slowly=False)
        self._steps: Iterator[str] = self.world.coordinator.rebalance(leaving="n1")

    def step(self) -> None:
        """One frame everywhere (before the takeovers, all of them), now and then a write, one look of the
        coordinator.
        """
        world = self.world
        self._count += 1
        if self._count % 5 == 0:
            world.write()
        world.trickle(slowly=self._takes_over)
        try:
            said = next(self._steps)
            self._takes_over |= "taken over" in said
            world.note(said)
        except StopIteration:
            self.is_over = True
        except TailraceError as error:
            world.note(f"ends: {error}")
            self.is_over = True

    def finish(self) -> None:
        for _ in range(MOST_STEPS):
            if self.is_over:
                return
            self.step()
        raise AssertionError("the move does not end")


def steps_of_a_move() -> int:
    move = Move()
    count = 0
    while not move.is_over:
        move.step()
        count += 1
        assert count < MOST_STEPS
    move.world.settle()
    move.world.close()
    return count


def test_an_undisturbed_move_ends() -> None:
    assert steps_of_a_move() > 2 * STRIDE


@pytest.mark.parametrize("first", range(STRIDE))
@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("fails_over", [True, False], ids=["failed over", "comes back"])
def test_a_move_is_interrupted_at_every_step(victim: str, fails_over: bool, first: int) -> None:
    for at in range(first, steps_of_a_move(), STRIDE):
        move = Move()
        world = move.world
        for _ in range(at):
            move.step()
        name = "n1" if victim == "source" else "n2"
        world.note(f"step {at}: {name} is killed")
        with ends_well(world):
            world.lose(name, power=at % 3 == 0)
            if fails_over and name not in world.coordinator.out:
                world.fail_over(name)
            move.finish()
            named = {name for chain in world.coordinator.chains for name in chain}
            assert not named & world.coordinator.out, "a chain names a node that was failed over"


@pytest.mark.parametrize("first", range(STRIDE))
@pytest.mark.parametrize("later", [0, 1, 4], ids=["both see it", "the source sees it later", "much later"])
def test_the_connection_breaks_at_every_step(later: int, first: int) -> None:
    """The source gets what the others had sent before it learns, ``later`` steps on, that they are gone."""
    for at in range(first, steps_of_a_move(), STRIDE):
        move = Move()
        world = move.world
        for _ in range(at):
            move.step()
        wires = [wire for wire in world.network.of("n1") if wire.places[0] in world.machines]
        world.note(f"step {at}: {len(wires)} connections to n1 are lost")
        for wire in wires:
            wire._collect()
            wire.is_open = False
            wire.end.lost()
        with ends_well(world):
            for _ in range(later):
                if not move.is_over:
                    move.step()
            for wire in wires:
                wire.session.receive_data(bytes(wire.there), world.now)
                wire.session.connection_lost()
            move.finish()
            assert not any("n1" in chain for chain in world.coordinator.chains), "the move is not resumed"


@contextmanager
def ends_well(world: World) -> Iterator[None]:
    """In the end each vbucket has one active, and all that was written is there; a failure says why not."""
    try:
        yield
        world.settle()
    except BaseException as error:
        error.add_note("\n".join(world.trace))
        raise
    check_actives(world)
    world.close()


def check_actives(world: World) -> None:
    """Check that each vbucket has one active."""
    for number in range(len(world.coordinator.chains)):
        states = [machine.vbucket(number) for machine in world.machines.values()]
        assert [vbucket.state for vbucket in states if vbucket is not None].count(VBucketState.ACTIVE) == 1
