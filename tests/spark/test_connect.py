"""Everything that people call, through Spark Connect: a real server, and a client without a Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark.connect_server import connect_server
from tailrace.spark.spark_session import prepare_environment

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark-programs"), pytest.mark.timeout(900)]


def test_everything_through_a_remote_session(tmp_path: Path) -> None:
    prepare_environment()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = str(Path(__file__).with_name("every_way.py"))
    with connect_server(tmp_path) as remote:
        command = [sys.executable, program, str(tmp_path), remote]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1].startswith("4.")
