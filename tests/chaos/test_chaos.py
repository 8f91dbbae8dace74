"""Chaos in this process: every round ends with an independent comparison.

``make chaos SEED=7 ROUNDS=12`` plays one script again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos.local_engine import Chaos

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Writers that a kill left behind warn when they are collected."""

SEED = os.environ.get("SEED")
ROUNDS = int(os.environ.get("ROUNDS") or 12)


def play(seed: int, rounds: int, directory: Path) -> int:
    """Play one script; return how often the mirror was started."""
    chaos = Chaos(seed, directory)
    try:
        chaos.run(rounds)
    except BaseException as error:
        story = "\n  ".join(chaos.world.trace)
        error.add_note(f"what happened:\n  {story}\nplay it again: make chaos SEED={seed} ROUNDS={rounds}")
        raise
    return chaos.restarts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_few_rounds(tmp_path: Path, seed: int) -> None:
    assert play(seed, 3, tmp_path) >= 3


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif(bool(SEED), reason="one script is played again")
def test_a_thousand_restarts(tmp_path: Path) -> None:
    restarts, seed = 0, 1_000
    while restarts < 1_000:
        directory = tmp_path / str(seed)
        directory.mkdir()
        restarts += play(seed, ROUNDS, directory)
        seed += 1


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif(not SEED or bool(os.environ.get("KILLS")), reason="for make chaos SEED=… ROUNDS=…")
def test_a_script_again(tmp_path: Path) -> None:
    play(int(SEED or 0), ROUNDS, tmp_path)
