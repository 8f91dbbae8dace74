"""How tests are shared out: those of a group run on one worker, and slow ones begin first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROUPED = """
import os, pytest
pytestmark = pytest.mark.xdist_group("heavy")
@pytest.mark.parametrize("number", range(4))
def test_one(number):
    with open("workers", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""
SLOW = """
import pytest
def test_quick():
    pass
@pytest.mark.slow
def test_slow():
    pass
"""


def run_pytest(folder: Path, code: str, *options: str) -> str:
    """Three modules under the conftest of this folder; what pytest says."""
    for name in ("conftest.py", "quick_java.py"):
        (folder / name).write_text((Path(__file__).parent / name).read_text())
    for name in ("a", "b", "c"):
        (folder / f"test_{name}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_group_stays_on_its_worker(tmp_path: Path) -> None:
    """pytest-xdist 3.8 wrote down a test's group where pytest 9.2 did not look for it."""
    run_pytest(tmp_path, GROUPED, "-n", "2", "--dist", "loadgroup")
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 12
    assert len(set(workers)) == 1, workers


@pytest.mark.parametrize("order", [["-p", "randomly"], ["-p", "no:randomly"]], ids=" ".join)
def test_slow_tests_begin_first(tmp_path: Path, order: list[str]) -> None:
    said = run_pytest(tmp_path, SLOW, "--collect-only", *order)
    tests = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
    assert tests == ["test_slow"] * 3 + ["test_quick"] * 3
