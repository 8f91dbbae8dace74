"""The demo, which people see first, run as they run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark.too_slow import PATIENT

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark-programs"), pytest.mark.timeout(900)]


def test_the_demo_loses_changes_repairs_itself_and_proves_it(tmp_path: Path) -> None:
    settings = " ".join(f"--conf {name}={value}" for name, value in PATIENT.items())
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell",
    }
    home = tmp_path / "demo"
    command = [sys.executable, "-m", "tailrace", "demo", "--docs", "1000", "--dir", str(home)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "failover! the last 6 changes of each vbucket are lost" in done.stderr
    assert "the mirror rolled" in done.stderr
    assert done.stdout.startswith("verify: equal: ")
    report = home / "report.html"
    assert f"report: {report}" in done.stdout
    page = report.read_text()
    assert "failover!" in page
    # the plot of versions ends where the banner says that the table is
    version = re.findall(r"at version (\d+)", done.stdout)[0]
    assert f">{version}</text>" in page.partition("<h2>Table version</h2>")[2]
    assert "Try next" in done.stdout
    activate = Path(sys.executable).with_name("activate")
    assert (f". {activate}" in done.stdout) == (shutil.which("tailrace") is None and activate.exists())
    # what was lost is named, in both places, with the same figures
    assert "the failover took 96 changes back" in done.stdout
    assert "and is gone" in done.stdout and " again\n" in done.stdout
    assert "96 changes that the table had taken" in page and "before the failover" in page
