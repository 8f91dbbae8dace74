"""Nodes, coordinator, client and mirror in one process: under any seed all is well (see `simulation`).

``make simulate SEED=17`` plays seed 17 again, exactly, and says what happened; STEPS is how long, and
CAUTIOUS=1 has the reader with ``persisted_only`` in the mirror's place, and beside it the product's mirror
and a query on its Spark source.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.bug import Bug
from cluster.planted_cluster_bugs import BUGS
from cluster.sim_followers import Follower, StreamingQuery, TableMirror
from cluster.sim_readers import CautiousMirror, Mirror
from cluster.sim_truth import Wrong
from cluster.simulation import CAUTIOUS, STEPS, run
from tailrace.client.nodes import KnownNode, Nodes
from tailrace.errors import TailraceError

SEED = os.environ.get("SIMULATE")
SEEDS = 80
"""For `make test`; `make soak` plays the next ten thousand."""
MOST_SEEDS = 200
"""For a bug that its own seed no longer catches."""
CAUTIOUS_SEEDS = 30
MANY_SEEDS = 10_000
BATCH = 10
TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "failover.md"


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_all_is_well_under_many_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        run(seed)


@pytest.mark.parametrize("first", range(0, CAUTIOUS_SEEDS, BATCH))
def test_nothing_that_a_cautious_reader_was_given_is_taken_back(first: int) -> None:
    """Rollback mitigation: whichever copy is promoted, it has what was handed out, and the reader goes on. So
    do the mirror and a query on the Spark source.
    """
    for seed in range(first, first + BATCH):
        run(seed, mirror=CautiousMirror, followers=CAUTIOUS)


@pytest.mark.long
@pytest.mark.skipif(bool(SEED), reason="one seed is played again")
@pytest.mark.parametrize("first", range(CAUTIOUS_SEEDS, 1_000, BATCH * 5))
def test_nothing_that_a_cautious_reader_was_given_is_taken_back_in_many_seeds(first: int) -> None:
    for seed in range(first, first + BATCH * 5):
        run(seed, mirror=CautiousMirror, followers=CAUTIOUS)


@pytest.mark.long
@pytest.mark.skipif(bool(SEED), reason="one seed is played again")
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, BATCH * 10))
def test_all_is_well_under_very_many_seeds(first: int) -> None:
    for seed in range(first, first + BATCH * 10):
        run(seed, 2 * STEPS)


@pytest.mark.long
@pytest.mark.skipif(not SEED, reason="for make simulate SEED=…")
def test_a_seed_again() -> None:
    is_cautious = bool(os.environ.get("CAUTIOUS"))
    mirror, followers = (CautiousMirror, CAUTIOUS) if is_cautious else (Mirror, ())
    world = run(int(SEED or 0), int(os.environ.get("STEPS") or STEPS), mirror=mirror, followers=followers)
    print("\n".join(world.trace))


def test_a_seed_plays_the_same_in_every_process() -> None:
    code = "import sys; from cluster.simulation import run; print(*(run(seed).digest() for seed in (5, 33)))"
    outcomes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
                "PYTHONHASHSEED": salt,
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    for seed in (bug.seed, *range(MOST_SEEDS)):
        try:
            with bug.plant():
                run(seed)
        except (Wrong, TailraceError):
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not catch it: {bug.about}")


@pytest.mark.parametrize(("follower", "seed"), [(TableMirror, 8), (StreamingQuery, 1)])
def test_a_follower_that_does_not_ask_the_replicas_is_caught(
    follower: type[Follower], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the active has on its disk is handed out, and a failover takes it back."""

    def only_the_active(nodes: Nodes, vbucket: int) -> list[KnownNode]:
        node = nodes.node_of(vbucket)
        return [] if node is None else [node]

    monkeypatch.setattr(Nodes, "copies_of", only_the_active)
    for number in (seed, *range(MOST_SEEDS)):
        try:
            run(number, followers=[follower])
        except Wrong as error:
            assert "it was taken back" in str(error)
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not catch it")


def test_the_page_lists_the_bugs() -> None:
    rows = "\n".join(f"| {bug.name} | {bug.about} |" for bug in BUGS)
    assert f"| bug | what is wrong with it |\n|---|---|\n{rows}\n" in PAGE.read_text()
