"""Real processes on a real disk, killed by SIGKILL: see crash_child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "crash_child.py"


def run(*arguments: object) -> int:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert child.returncode == 0, f"{' '.join(command)}\n{child.stderr}"
    return int(child.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)  # some hundred processes, on a machine that may be busy
def test_a_kill_at_every_call_that_writes(tmp_path: Path) -> None:
    assert run("nth", tmp_path, 11, 200) > 100


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random(tmp_path: Path, seed: int) -> None:
    # how many writes there were between the kills depends on the machine: a few each are enough
    assert run("random", tmp_path / "data", seed, 50) > 50


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_thousand_kills(tmp_path: Path) -> None:
    for seed in range(10):
        assert run("random", tmp_path / f"data{seed}", seed, 100) > 100
    for seed in range(100, 110):
        assert run("nth", tmp_path / str(seed), seed, 200) > 100
