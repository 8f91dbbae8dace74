"""`tailrace mirror` is stopped as people and systems stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace.testing
from spark.naive import bucket_state, table_state
from spark.too_slow import PATIENT

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_mirror_that_runs_stops_without_a_fuss(tmp_path: Path, number: int, code: int) -> None:
    """Ctrl-C used to be answered with the tracebacks of Spark's own handler."""
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
        ) as mirror:
            assert mirror.stdout is not None
            changes = 0
            for line in mirror.stdout:
                changes += json.loads(line)["changes"]
                if changes == 20:
                    break
            mirror.send_signal(number)
            out, said = mirror.communicate()
        assert mirror.returncode == code, out + said
        assert "Traceback" not in said and "ERROR" not in said, said
        assert table_state(table) == bucket_state("127.0.0.1", node.port)
