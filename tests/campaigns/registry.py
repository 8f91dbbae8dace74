"""The campaigns of `make chaos`: node, reader, mirror and cluster."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from campaigns import node_disk, node_wire, reader
from campaigns.bug import Campaign, Tally
from chaos import planted, test_mirror_kills
from chaos.local_engine import Chaos
from cluster import planted_cluster_bugs, simulation, test_campaign
from cluster.sim_truth import Wrong
from store import test_kills
from tailrace.errors import TailraceError

__all__ = ["CAMPAIGNS"]

ROUNDS = 4
KILLS = 6
CLUSTER_SECONDS = 30.0
KILL = re.compile(r"\bkill\b|is killed|loses power")
FAULT = re.compile(
    rf"{KILL.pattern}|^cut |is stopped|can't reach|s off$|is torn|^rewind of|coordinator is restarted"
)
REAL_FAULT = re.compile(r"^(kill|stop|nobody reaches|cut|rewind)")
"""These tell the faults from the other notes of a cluster, such as writes, answers and published states."""


def play_node(seed: int, directory: Path) -> Tally:
    """Frames and clocks, the disk, and now and then processes that are killed."""
    if seed % 100 == 99:
        kills = 20
        test_kills.run("random", directory / "data", seed, kills)
        return Tally(schedules=1, kills=kills)
    return node_wire.play_wire(seed) if seed % 2 else node_disk.play_disk(seed)


def play_mirror(seed: int, directory: Path) -> Tally:
    """A script in this process, and now and then one on a real Spark whose processes are killed."""
    if seed % 60 == 59:
        kills = test_mirror_kills.play(seed, test_mirror_kills.places_of(seed, KILLS), directory / "kills")
        return Tally(schedules=1, kills=kills.total(), faults=2 * KILLS)
    chaos = Chaos(seed, directory)
    try:
        chaos.run(ROUNDS)
    except BaseException as error:
        story = "\n  ".join(chaos.world.trace)
        error.add_note(f"what happened:\n  {story}")
        raise
    return chaos.tally()


def play_cluster(seed: int, directory: Path) -> Tally:
    """A simulated one, and now and then one of real processes."""
    if seed % 200 == 199:
        spark = shutil.which("java") is not None and seed % 1000 == 999
        trace = test_campaign.play(seed, CLUSTER_SECONDS, directory, spark=spark)
        return Tally(schedules=1, kills=_count(KILL, trace), faults=_count(REAL_FAULT, trace))
    world = simulation.run(seed)
    kills, faults = (_count(of, world.trace) for of in (KILL, FAULT))
    return Tally(schedules=1, kills=kills, frames=world.network.frames, faults=faults)


def _count(pattern: re.Pattern[str], trace: list[str]) -> int:
    return sum(pattern.search(text) is not None for text in trace)


CAMPAIGNS = (
    Campaign(
        "node",
        "commands, frames, disks, clocks",
        play_node,
        node_disk.BUGS + node_wire.BUGS,
        (AssertionError, TailraceError, ValueError),
    ),
    Campaign(
        "reader",
        "a server that lies, a node with accidents, the rollback rule in a random world",
        reader.play_reader,
        reader.BUGS,
        (AssertionError, TailraceError, OverflowError),
    ),
    Campaign(
        "mirror",
        "rounds, tables and change logs under everything of this page",
        play_mirror,
        planted.BUGS,
        (AssertionError, TailraceError),
    ),
    Campaign(
        "cluster",
        "a simulated cluster, and one of real processes",
        play_cluster,
        planted_cluster_bugs.BUGS,
        (Wrong, TailraceError, AssertionError),
    ),
)
