"""N nodes, their coordinator, a client and readers in one process, under one seed.

`sim_world` has what there is, `sim_steps` what happens to it, `sim_truth` and `sim_promises` what must hold.
It is checked where it could first be wrong:

    always           at most one node that serves a vbucket as active
                     no (vbucket, vb_uuid, seqno) names two changes, on any copy
                     what becomes active is a state that the bucket had
                     what a reader publishes is a state that the bucket had, whichever copy it reads
                     the mirror rolls back only after something was lost: never because of a planned move
    at quiet points  every vbucket has one active, its copies are equal to it, and so are the readers
                     what was answered as durable is there, whatever node was lost
                     what was answered is there, unless the node that answered was lost
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from cluster.sim_followers import Follower, StreamingQuery, TableMirror
from cluster.sim_pump import simulated_sources
from cluster.sim_readers import CautiousMirror, Mirror
from cluster.sim_steps import Steps
from cluster.sim_world import World

STEPS = 160
QUIET_EVERY = 80


CAUTIOUS: Sequence[type[Follower]] = (TableMirror, StreamingQuery)
"""What reads with ``persisted_only`` beside the cautious reader."""


def run(
    seed: int,
    steps: int = STEPS,
    *,
    mirror: type[Mirror] = Mirror,
    followers: Sequence[type[Follower]] = (),
) -> World:
    """Play a seed. A failure says how to play it again, and what happened."""
    with _rarely_collected(), simulated_sources(seed) if followers else nullcontext():
        world = _play(seed, steps, mirror, followers)
    if followers:
        gc.collect()  # each process was an event loop with all that it held, in reference cycles
    return world


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Collect garbage rarely: a world is small and all of it lives to the end."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _play(seed: int, steps: int, mirror: type[Mirror], followers: Sequence[type[Follower]]) -> World:
    world = World(seed, mirror=mirror, followers=followers)
    chosen = Steps(world)
    try:
        for number in range(steps):
            if number % QUIET_EVERY == 0:
                chosen.begin()
            chosen.step()
            if (number + 1) % QUIET_EVERY == 0:
                world.settle()
    except BaseException as error:
        story = "\n  ".join(world.trace[-60:])
        error.add_note(f"the last of {len(world.trace)} things that happened:\n  {story}")
        cautious = " CAUTIOUS=1" if mirror is CautiousMirror else ""
        error.add_note(f"play it again: make simulate SEED={seed} STEPS={steps}{cautious}")
        raise
    finally:
        world.close()
    return world
