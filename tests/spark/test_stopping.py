"""`tailrace mirror` is stopped as people and systems stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tailrace.testing
from spark.naive import bucket_state, table_state
from spark.too_slow import PATIENT

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark-programs"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_mirror_that_runs_stops_without_a_fuss(tmp_path: Path, number: int, code: int) -> None:
    """The whole group is told, as by Ctrl-C and `timeout`. It used to be answered with the
    tracebacks of Spark's own handler, and of a Java that was gone too early.
    """
    table = str(tmp_path / "table")
    settings = [text for name, value in PATIENT.items() for text in ("--conf", f"{name}={value}")]
    with tailrace.testing.node(vbuckets=4) as node:
        for n in range(20):
            node.set(f"k{n}", {"n": n})
        with subprocess.Popen(
            [sys.executable, "-m", "tailrace", "mirror", node.url, table, "--json", *settings],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as mirror:
            assert mirror.stdout is not None
            changes = 0
            for line in mirror.stdout:
                changes += json.loads(line)["changes"]
                if changes == 20:
                    break
            os.killpg(mirror.pid, number)
            out, said = mirror.communicate()
        assert mirror.returncode == code, out + said
        assert "Traceback" not in said and "ERROR" not in said, said
        assert table_state(table) == bucket_state("127.0.0.1", node.port)


def java_below(pid: int) -> int | None:
    """The Java that a process has started, if it has."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == "java":
                return int(child)
    return None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may stay until somebody asks how."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_mirror_that_starts_takes_its_java_along(tmp_path: Path, number: int, code: int) -> None:
    """A Java that nobody waited for stayed for ever."""
    with (
        tailrace.testing.node(vbuckets=4) as node,
        subprocess.Popen(
            [sys.executable, "-m", "tailrace", "mirror", node.url, str(tmp_path / "table")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as mirror,
    ):
        deadline = time.monotonic() + 300
        while (java := java_below(mirror.pid)) is None:
            assert mirror.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(mirror.pid, number)
        said = mirror.communicate(timeout=300)[1]
        assert mirror.returncode == code and not said, said
        while is_alive(java):
            assert time.monotonic() < deadline
            time.sleep(0.05)
