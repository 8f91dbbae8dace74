"""Real processes under faults for as long as asked; see `campaign`.

``make campaign SEED=7 SECONDS=60`` plays the faults of seed 7 again. When each of them falls is up to the
machine, so the same seed may end differently.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.campaign import Campaign, Tail, Writer, interrupt, model
from cluster.processes import Reader, until
from spark.too_slow import PYTHON_WAS_TOO_SLOW

pytestmark = pytest.mark.xdist_group("cluster")

SEED = os.environ.get("CAMPAIGN")
SPARK_PATIENCE_S = 600.0
SECONDS = float(os.environ.get("SECONDS") or 300.0)
PROGRESS_S = 60.0
"""In a campaign of this length the mirror has to do something before the last fault, not only afterwards."""


class SparkMirror:
    """`tailrace mirror` in a process of its own, and its table."""

    def __init__(self, where: str, directory: Path) -> None:
        self._where = where
        self._table = directory / "table"
        self._said = directory / "mirror"
        self._found = ""
        self._start()

    def _start(self) -> None:
        with self._said.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tailrace", "mirror", self._where, str(self._table)),
                    *("--retry-for", "10m", "--json"),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def look_after(self) -> None:
        """Start a mirror that has ended again, as its operator would; but not whatever it ended for."""
        if self._process.poll() is not None:
            assert PYTHON_WAS_TOO_SLOW in self._said.read_text().splitlines()[-1], "the mirror has ended"
            self._start()

    def is_equal(self) -> bool:
        """Whether table and bucket are equal by `tailrace verify`."""
        self.look_after()
        done = subprocess.run(
            [sys.executable, "-m", "tailrace", "verify", self._where, str(self._table)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self._found = done.stdout
        return done.returncode == 0

    def batches(self) -> int:
        """How many batches it has applied, in all of its lives."""
        return self._said.read_text().count('{"batch"')

    def story(self) -> str:
        """What it said, and what `verify` said last."""
        return f"the mirror:\n{self._said.read_text()[-4000:]}\nverify:\n{self._found[-2000:]}"

    def finish(self) -> None:
        interrupt(self._process)


class Watch:
    """Watches a mirror between two faults, and counts what it does meanwhile."""

    def __init__(self, mirror: SparkMirror) -> None:
        self._mirror = mirror
        self._first: int | None = None
        self._last = 0

    def look(self) -> None:
        self._mirror.look_after()
        self._last = self._mirror.batches()
        if self._first is None:
            self._first = self._last

    def check(self, seconds: float) -> None:
        done = self._last - (self._first or 0)
        print(f"{done} batches on Spark between the first fault and the last")
        assert done or seconds < PROGRESS_S, f"the mirror did nothing in {seconds:g} s of faults"


def play(seed: int, seconds: float, directory: Path, *, spark: bool) -> list[str]:
    """The faults that there were."""
    with Campaign(seed, directory) as campaign, ExitStack() as stack:
        where = campaign.url
        writers = [Writer(where, seed + number) for number in range(2)]
        reader = Reader(where)
        tail = Tail(where, directory / "tail")
        stack.callback(tail.finish)
        stack.callback(reader.finish)
        mirror = SparkMirror(where, directory) if spark else None
        if mirror is not None:
            stack.callback(mirror.finish)
        try:
            for thread in (*writers, reader):
                thread.start()
            watch = None if mirror is None else Watch(mirror)
            campaign.run(seconds, watch.look if watch is not None else lambda: None)
            if watch is not None:
                watch.check(seconds)
            for writer in writers:
                writer.finish()
            campaign.recover()
            expected = campaign.documents()
            assert expected and sum(writer.acknowledged for writer in writers)
            until(lambda: reader.errors or model(reader) == expected, "the reader is not equal")
            assert not reader.errors, reader.errors
            until(lambda: tail.state() == expected, "tail is not equal")
            if mirror is not None:
                until(mirror.is_equal, "the table is not equal", SPARK_PATIENCE_S)
            writes = sum(writer.acknowledged for writer in writers)
            print(f"{len(campaign.trace)} things happened, {writes} writes, {len(expected)} documents")
            print(f"{mirror.batches() if mirror is not None else 0} batches on Spark")
            return campaign.trace
        except BaseException as error:
            story = "\n  ".join(campaign.trace)
            error.add_note(f"what happened:\n  {story}")
            if mirror is not None:
                error.add_note(mirror.story())
            error.add_note(f"play it again: make campaign SEED={seed} SECONDS={seconds:g}")
            raise
        finally:
            for writer in writers:
                writer.finish()


@pytest.mark.parametrize(("counts", "seconds"), [([5, 5, 6], 60), ([0, 0, 0], 59), ([0], 59), ([], 59)])
def test_a_mirror_that_goes_on(counts: list[int], seconds: float) -> None:
    watched(counts).check(seconds)


@pytest.mark.parametrize("counts", [[5, 5, 5], [0, 0], [1], []])
def test_a_mirror_that_does_nothing_is_noticed(counts: list[int]) -> None:
    with pytest.raises(AssertionError, match="did nothing in 60 s"):
        watched(counts).check(60)


def watched(counts: list[int]) -> Watch:
    class Mirror(SparkMirror):
        def __init__(self) -> None:
            self._counts = iter(counts)

        def look_after(self) -> None:
            pass

        def batches(self) -> int:
            return next(self._counts)

    watch = Watch(Mirror())
    for _ in counts:
        watch.look()
    return watch


def test_a_short_campaign(tmp_path: Path) -> None:
    play(1, 12.0, tmp_path, spark=False)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif(bool(SEED), reason="one seed is played again")
def test_a_long_campaign(tmp_path: Path) -> None:
    play(2, SECONDS, tmp_path, spark=True)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.skipif(not SEED, reason="for make campaign SEED=…")
def test_a_campaign_again(tmp_path: Path) -> None:
    play(int(SEED or 0), SECONDS, tmp_path, spark=True)
