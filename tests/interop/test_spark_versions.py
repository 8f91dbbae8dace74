"""Every supported version of Spark does what people do with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from interop.spark_environment import ROOT, VERSIONS, python_with_spark, run_program
from spark.connect_server import connect_server

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1800)]

PROGRAM = ROOT / "tests" / "spark" / "every_way.py"


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=pytest.mark.xdist_group(f"spark-{version}")) for version in VERSIONS],
)
def test_a_version(version: str, tmp_path: Path) -> None:
    python = python_with_spark(version)
    assert run_program(python, PROGRAM, str(tmp_path)).split()[-1].startswith(f"{version}.")


@pytest.mark.xdist_group(f"spark-{min(VERSIONS)}")
def test_the_oldest_one_through_spark_connect(tmp_path: Path) -> None:
    oldest = min(VERSIONS)
    python = python_with_spark(oldest)
    with connect_server(tmp_path, python) as remote:
        said = run_program(python, PROGRAM, str(tmp_path), remote)
    assert said.split()[-1].startswith(f"{oldest}.")
