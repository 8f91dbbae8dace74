"""Real processes under faults for as long as asked; see `campaign`.

``make campaign SEED=7 SECONDS=60`` plays the faults of seed 7 again. When each of them falls is up to the
machine, so the same seed may end differently.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster.campaign import Campaign, Tail, Writer, model
from cluster.processes import PATIENCE_S, Reader, until

pytestmark = pytest.mark.xdist_group("cluster")

SEED = os.environ.get("CAMPAIGN")
SECONDS = float(os.environ.get("SECONDS") or 300.0)


@contextmanager
def spark_mirror(where: str, table: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace", "mirror", where, str(table), "--retry-for", "10m"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
            assert process.poll() is None, "the mirror has ended"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def verifies(where: str, table: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "verify", where, str(table)], capture_output=True, check=False
    )
    return done.returncode == 0


def play(seed: int, seconds: float, directory: Path, *, spark: bool) -> None:
    with Campaign(seed, directory) as campaign, ExitStack() as stack:
        where = campaign.url
        writers = [Writer(where, seed + number) for number in range(2)]
        reader = Reader(where)
        tail = Tail(where, directory / "tail")
        stack.callback(tail.finish)
        stack.callback(reader.finish)
        if spark:
            stack.enter_context(spark_mirror(where, directory / "table"))
        try:
            for one in (*writers, reader):
                one.start()
            campaign.run(seconds)
            for one in writers:
                one.finish()
            campaign.recover()
            expected = campaign.documents()
            assert expected and sum(one.acknowledged for one in writers)
            until(lambda: reader.errors or model(reader) == expected, "the reader is not equal")
            assert not reader.errors, reader.errors
            until(lambda: tail.state() == expected, "tail is not equal")
            if spark:
                until(lambda: verifies(where, directory / "table"), "the table is not equal")
        except BaseException as error:
            story = "\n  ".join(campaign.trace)
            error.add_note(f"what happened:\n  {story}")
            error.add_note(f"play it again: make campaign SEED={seed} SECONDS={seconds:g}")
            raise
        finally:
            for one in writers:
                one.finish()


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
