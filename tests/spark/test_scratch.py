"""Directories of a process: removed by it, or by the next one if it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tailrace.spark.source.scratch import Scratch

MAKE = "import sys, tailrace.spark.source.scratch as s; made = s.Scratch(sys.argv[1], 'run')"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"{MAKE}; print(made.path, flush=True); input()", str(tmp_path)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        (left / "file").write_bytes(b"x")
        mine = Scratch(tmp_path, "run")
        assert (left / "file").exists(), "its owner is alive"
        child.send_signal(signal.SIGKILL)
        child.wait()
    other = Scratch(tmp_path, "spool")
    assert left.exists(), "of another kind"
    again = Scratch(tmp_path, "run")
    assert not left.exists()
    assert mine.path.exists() and mine.path != again.path
    for scratch in (mine, other, again):
        scratch.remove()
        scratch.remove()
    assert not any(tmp_path.iterdir())


def test_nothing_is_left_by_a_process_that_ends(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", MAKE, str(tmp_path)], env=ENVIRONMENT, check=True)
    assert not any(tmp_path.iterdir())


def test_without_a_place_it_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Scratch(None, "run")
    assert made.path.parent.parent == tmp_path
    assert made.path.parent.stat().st_mode & 0o077 == 0
    made.remove()


def test_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    """A place may be any directory of the user's, with other files in it."""
    for name in ("run-2024", "run-of-mine", "spool-of-wire"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_bytes(b"x")
    (tmp_path / "run-2024" / "lock").write_bytes(b"")
    Scratch(tmp_path, "run").remove()
    Scratch(tmp_path, "spool").remove()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("precious")) == [
        "run-2024/precious",
        "run-of-mine/precious",
        "spool-of-wire/precious",
    ]
    assert not (tmp_path / "run-of-mine" / "lock").exists()
