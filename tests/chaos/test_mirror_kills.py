"""Chaos with a real Spark: `tailrace mirror` in a process of its own, killed by SIGKILL at named places and
at any moment.

A kill at a place of the source or of the rewrite takes the Python process of an executor or of the reader,
one at a place of the mirror takes the driver; a kill at any moment takes them all with the JVM.
``make chaos SEED=7 KILLS=5`` plays one script again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace.spark as ts
from chaos.inprocess import Spark
from chaos.script import LOUD, QUIET, NotEqual, check_version
from chaos.world import World
from spark.naive import table_state
from tailrace.crashpoints import CRASH_POINTS

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(0)]

ANY_MOMENT = "any moment"
PLACES = tuple(place for place in CRASH_POINTS if place != "mirror.after-changes")
"""The change log has a place of its own, to which a mirror without one never comes."""
REPEATED = ("mirror.before-commit", "mirror.after-commit", "mirror.after-batch")
"""A driver lives as long as its query; the others may never come to a place for a second time."""
_PATIENCE_S = 900.0
_TOO_SLOW, _STARTS = "Python worker failed to connect back", 3
"""Spark gives a Python process ten seconds to start, which a busy machine may not keep."""
SEED, KILLS = os.environ.get("SEED"), os.environ.get("KILLS")
_KILLS_OF_A_SCRIPT = 10
campaign = pytest.mark.skipif(bool(SEED), reason="one script is played again")


class Kills:
    """One script."""

    def __init__(self, seed: int, directory: Path, max_rows: tuple[int, ...]) -> None:
        self.rng = random.Random(seed)
        self._max_rows = max_rows
        self.world = World(self.rng)
        self.directory = directory
        self.table = str(directory / "table")
        self.kills = 0

    def kill(self, where: str) -> None:
        """Accidents, and a life that ends there."""
        self._accidents()
        self.world.trace.append(f"-- killed at {where}")
        has_many_batches = max(self._max_rows) < 100
        count = self.rng.choice((1, 1, 2)) if where in REPEATED and has_many_batches else 1
        with self._mirror("" if where == ANY_MOMENT else f"{where}:{count}") as child:
            assert child.stdout is not None
            if where == ANY_MOMENT:
                moment = threading.Timer(self.rng.uniform(0.0, 4.0), _end, [child])
                # from its first commit on any moment will do
                any(line.startswith('{"batch"') for line in child.stdout)
                moment.start()
            left = 3
            for line in child.stdout:
                if left and line.startswith('{"batch"') and self.rng.random() < 0.5:
                    self.world.do(self.rng.choice(LOUD))
                    left -= 1
            self.kills += child.wait() != 0
        if Path(self.table).exists():
            check_version(self.world, self.table)

    def finish(self) -> None:
        """A life in peace, and the comparison."""
        self.world.trace.append("-- in peace")
        for _ in range(_STARTS):
            with self._mirror("") as child:
                out, _ = child.communicate()
            if _TOO_SLOW not in out:
                break
        if child.returncode:
            raise NotEqual(f"the mirror ended with {child.returncode}: {out[-2000:]}")
        figures = (self.directory / "metrics.prom").read_text()
        assert 'tailrace_mirror_lag_changes{bucket="default",table="' in figures, figures
        check_version(self.world, self.table)
        verdict = ts.verify(Spark(), self.world.node.url, self.table)
        bucket, rows = self.world.state(), table_state(self.table)
        if (verdict.equal, bucket == rows) != (True, True):
            raise NotEqual("; ".join(map(str, verdict.differences)))

    def _accidents(self) -> None:
        for _ in range(2):
            self.world.do(self.rng.choice(QUIET))
        if self.rng.random() < 0.7:
            self.world.do(self.rng.choice(LOUD))
            self.world.do("burst")

    @contextlib.contextmanager
    def _mirror(self, crash_at: str) -> Iterator[subprocess.Popen[str]]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TAILRACE_CRASH_AT": crash_at,
            "TMPDIR": str(self.directory),
        }
        command = [sys.executable, "-m", "tailrace", "mirror", self.world.node.url, self.table, "--once"]
        command += ["--json", "--max-rows", str(self.rng.choice(self._max_rows)), "--master", "local[2,2]"]
        command += ["--metrics-file", str(self.directory / "metrics.prom")]
        command += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            threading.Thread(target=_end_with, args=(child,), daemon=True).start()
            try:
                yield child
            finally:
                _end(child)


def _end_with(child: subprocess.Popen[str]) -> None:
    """What a driver leaves behind goes with it, so that its output ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE_S)
    _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """It, its JVM and its workers: they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def play(seed: int, places: list[str], directory: Path, max_rows: tuple[int, ...] = (10, 40)) -> int:
    """One script; how many kills there were."""
    directory.mkdir(exist_ok=True)
    kills = Kills(seed, directory, max_rows)
    try:
        with kills.world:
            for place in places:
                kills.kill(place)
            kills.finish()
    except BaseException as error:
        story = "\n  ".join(kills.world.trace)
        error.add_note(
            f"what happened:\n  {story}\nplay it again: make chaos SEED={seed} KILLS={len(places)}"
        )
        raise
    return kills.kills


def places_of(seed: int, count: int) -> list[str]:
    """Where the processes of a script are killed."""
    return random.Random(f"places {seed}").choices([ANY_MOMENT, *PLACES], k=count)


@campaign
@pytest.mark.timeout(900)
def test_a_driver_and_a_worker_are_killed(tmp_path: Path) -> None:
    assert play(1, ["mirror.before-commit", "source.in-read"], tmp_path, max_rows=(1_000,)) == 2


@campaign
@pytest.mark.long
def test_a_kill_at_every_place(tmp_path: Path) -> None:
    assert play(0, [*PLACES, ANY_MOMENT], tmp_path) >= len(PLACES)


@campaign
@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path) -> None:
    kills, seed = 0, 1
    while kills < 100:
        kills += play(seed, places_of(seed, _KILLS_OF_A_SCRIPT), tmp_path / str(seed))
        seed += 1


@pytest.mark.long
@pytest.mark.skipif(not (SEED and KILLS), reason="for make chaos SEED=… KILLS=…")
def test_a_script_again(tmp_path: Path) -> None:
    play(int(SEED or 0), places_of(int(SEED or 0), int(KILLS or 0)), tmp_path)
