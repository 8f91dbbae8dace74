"""Chaos with a real Spark: `tailrace mirror` in a process of its own, killed by SIGKILL at named places and
at any moment.

A kill at a place of a task takes the Python process of an executor, one at a place of the mirror takes the
driver; a kill at any moment takes them all with the JVM.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.script import LOUD, QUIET, NotEqual, check_version
from chaos.world import World
from spark.local_jobs import LocalJobs
from spark.naive import table_state
from spark.too_slow import PATIENT, PYTHON_WAS_TOO_SLOW, STARTS
from tailrace.crashpoints import CRASH_POINTS, TABLE_CRASH_POINTS
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark-programs"), pytest.mark.timeout(0)]

ANY_MOMENT = "any moment"
IN_TASKS = ("mirror.in-task", "mirror.in-read", "table.in-lookup", "table.in-write", "mirror.after-task")
IN_THE_DRIVER = (
    "mirror.in-recovery",
    "mirror.after-plan",
    "mirror.before-commit",
    "table.before-commit",
    "table.after-commit",
    "mirror.after-commit",
    "mirror.before-cleaning",
)
PLACES = (*IN_TASKS, *IN_THE_DRIVER)
"""Places that every mirror reaches; the engine in this process has the others too."""
assert {*PLACES} <= {*CRASH_POINTS, *TABLE_CRASH_POINTS}
REPEATED = ("mirror.before-commit", "mirror.after-commit")
"""A driver lives as long as its mirror; other processes may never reach a place a second time."""
_PATIENCE_S = 900.0
_CODE_OF = dict.fromkeys(PLACES, -signal.SIGKILL) | {ANY_MOMENT: -signal.SIGKILL}
_CODE_OF |= dict.fromkeys(IN_TASKS, 1)
"""The driver's exit code by place. For the last ones another process is killed, and the driver says so."""
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
        self.kills: Counter[str] = Counter()
        self._hung = False

    def kill(self, where: str) -> None:
        """Accidents, and a life that ends at a place."""
        self._accidents()
        self.world.trace.append(f"-- killed at {where}")
        has_many_batches = max(self._max_rows) < 100
        count = self.rng.choice((1, 1, 2)) if where in REPEATED and has_many_batches else 1
        for _ in range(STARTS):
            code, said = self._life(where, count)
            if PYTHON_WAS_TOO_SLOW not in said:
                break
            self.world.trace.append("   Spark did not wait for a Python process")
        if code not in (0, _CODE_OF[where]) or PYTHON_WAS_TOO_SLOW in said:
            raise NotEqual(f"the mirror ended with {code}, but was to be killed at {where}: {said[-2000:]}")
        if code:
            self.kills[where] += 1
        if Path(self.table).exists():
            check_version(self.world, self.table)

    def _life(self, where: str, count: int) -> tuple[int, str]:
        """The exit code of a mirror, and its output."""
        said = ""
        moment = None
        with self._mirror("" if where == ANY_MOMENT else f"{where}:{count}") as child:
            assert child.stdout is not None
            left = 3
            for line in child.stdout:
                said += line
                if not line.startswith('{"batch"'):
                    continue
                if where == ANY_MOMENT and moment is None:  # from its first commit on any moment will do
                    moment = threading.Timer(self.rng.uniform(0.0, 4.0), _end, [child])
                    moment.start()
                elif left and self.rng.random() < 0.5:
                    self.world.do(self.rng.choice(LOUD))
                    left -= 1
            code = child.wait()
            if moment is not None:
                moment.cancel()
        return code, said

    def finish(self, *, on_spark: bool) -> None:
        """An undisturbed life, and the comparison."""
        self.world.trace.append("-- in peace")
        if on_spark:
            self._live_in_peace()
        else:
            made = build_mirror(LocalJobs(), self.world.node.url, self.table, once=True, in_background=False)
            made.prepare()
            made.run()
        check_version(self.world, self.table)
        held, given = open_table(self.table), source_options(self.world.node.url)
        verdict = verify_table(LocalJobs(), given, held)
        bucket, rows = self.world.state(), table_state(self.table)
        if (verdict.equal, bucket == rows) != (True, True):
            raise NotEqual("; ".join(map(str, verdict.differences)))

    def _live_in_peace(self) -> None:
        for _ in range(STARTS):
            with self._mirror("") as child:
                out, _ = child.communicate()
            if PYTHON_WAS_TOO_SLOW not in out:
                break
        if child.returncode:
            raise NotEqual(f"the mirror ended with {child.returncode}: {out[-2000:]}")
        figures = (self.directory / "metrics.prom").read_text()
        assert 'tailrace_mirror_lag_changes{bucket="default",collection="_default._default",' in figures, (
            figures
        )

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
        settings = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"} | PATIENT
        command += [text for name, value in settings.items() for text in ("--conf", f"{name}={value}")]
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            threading.Thread(target=self._end_with, args=(child,), daemon=True).start()
            try:
                yield child
            finally:
                _end(child)
        if self._hung:
            raise NotEqual(f"the mirror did not end in {_PATIENCE_S:g} s")

    def _end_with(self, child: subprocess.Popen[str]) -> None:
        """End what a driver leaves behind, so that its output ends."""
        try:
            child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._hung = True
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """End a process and its whole session; its JVM has its own, and ends after the driver."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def play(
    seed: int,
    places: list[str],
    directory: Path,
    max_rows: tuple[int, ...] = (10, 40),
    *,
    on_spark: bool = True,
) -> Counter[str]:
    """Play one script; return the kills by place. With ``on_spark`` the last life is on Spark, too."""
    directory.mkdir(exist_ok=True)
    kills = Kills(seed, directory, max_rows)
    try:
        with kills.world:
            for place in places:
                kills.kill(place)
            kills.finish(on_spark=on_spark)
    except BaseException as error:
        story = "\n  ".join(kills.world.trace)
        error.add_note(
            f"what happened:\n  {story}\nplay it again: make chaos SEED={seed} KILLS={len(places)}"
        )
        raise
    finally:
        close_idle_sources()
    return kills.kills


def places_of(seed: int, count: int) -> list[str]:
    """Where the processes of a script are killed."""
    return random.Random(f"places {seed}").choices([ANY_MOMENT, *PLACES], k=count)


@campaign
@pytest.mark.timeout(900)
def test_a_driver_and_a_worker_are_killed(tmp_path: Path) -> None:
    places = ["mirror.before-commit", "mirror.in-read"]
    assert play(1, places, tmp_path, max_rows=(1_000,), on_spark=False) == Counter(places)


@campaign
@pytest.mark.long
def test_a_kill_at_every_place(tmp_path: Path) -> None:
    assert play(0, [*PLACES, ANY_MOMENT], tmp_path) >= Counter(PLACES)


@campaign
@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path) -> None:
    kills: Counter[str] = Counter()
    seed = 1
    while kills.total() < 100:
        kills += play(seed, places_of(seed, _KILLS_OF_A_SCRIPT), tmp_path / str(seed))
        print(f"{kills.total()} kills after {seed} scripts: {dict(kills)}")
        seed += 1


@pytest.mark.long
@pytest.mark.skipif(not (SEED and KILLS), reason="for make chaos SEED=… KILLS=…")
def test_a_script_again(tmp_path: Path) -> None:
    print(dict(play(int(SEED or 0), places_of(int(SEED or 0), int(KILLS or 0)), tmp_path)))
