"""Tests of a group run one after the other, on one worker: two Sparks at a time are too much for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import os, pytest
pytestmark = pytest.mark.xdist_group("heavy")
@pytest.mark.parametrize("number", range(4))
def test_one(number):
    with open("workers", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_a_group_stays_on_its_worker(tmp_path: Path) -> None:
    """pytest-xdist 3.8 wrote down a test's group where pytest 9.2 did not look for it."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text(CODE)
    options = ["-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == 12
    assert len(set(workers)) == 1, workers
