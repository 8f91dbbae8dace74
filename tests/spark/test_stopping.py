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
    """The whole process group gets the signal, as from Ctrl-C and `timeout`. There are no tracebacks, neither
    from Spark's own handler nor because Java is gone too early.
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
    """Whether a process runs; one that has ended may stay until its exit code is read."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_mirror_that_starts_takes_its_java_along(tmp_path: Path, number: int, code: int) -> None:
    """A Java that nothing waits for would stay forever."""
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


def test_a_mirror_whose_java_is_killed_says_so_in_one_line(tmp_path: Path) -> None:
    """The system does this when it runs out of memory. Spark's server for accumulators must not write a
    traceback, and a mirror that has nothing to do must not go on without a Java.
    """
    table = str(tmp_path / "table")
    settings = [text for name, value in PATIENT.items() for text in ("--conf", f"{name}={value}")]
    with (
        tailrace.testing.node(vbuckets=4) as node,
        subprocess.Popen(
            [sys.executable, "-m", "tailrace", "mirror", node.url, table, "--json", *settings],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as mirror,
    ):
        for n in range(2_000):
            node.set(f"k{n}", {"n": n})
        assert mirror.stdout is not None and mirror.stdout.readline()
        java = java_below(mirror.pid)
        assert java is not None
        os.kill(java, signal.SIGKILL)
        said = mirror.communicate(timeout=300)[1]
    assert mirror.returncode == 1, said
    *_, last = lines = said.splitlines()
    assert last.startswith("tailrace: error: Spark's Java process was killed (SIGKILL); start again"), said
    assert all(line.startswith("tailrace: ") for line in lines), said


def test_a_java_that_can_not_work_says_why(tmp_path: Path) -> None:
    """It ends by itself if it can't make its folder; that is not a lack of memory."""
    (tmp_path / "file").touch()
    settings = ["--once", "--conf", f"spark.local.dir={tmp_path}/file/work"]
    with tailrace.testing.node(vbuckets=4) as node:
        done = subprocess.run(
            [sys.executable, "-m", "tailrace", "mirror", node.url, str(tmp_path / "table"), *settings],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("tailrace: error: Spark's Java process ended with 53 (java.")
    assert f"{tmp_path}/file" in done.stderr and done.stderr.count("\n") == 1
