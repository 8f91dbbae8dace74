"""Engines that the suite does not install read a mirrored table: delta-spark, DataFusion, DuckDB, Daft."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from interop.delta_jars import SPARK, NoJars, delta_jars
from interop.spark_environment import ROOT, install_or_skip, python_with_spark, run_program
from table.aged_table import aged_table, save_stages

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent


@pytest.fixture
def aged(tmp_path: Path) -> tuple[Path, Path]:
    """The table, and what it held."""
    save_stages(aged_table(tmp_path / "table"), tmp_path / "stages.json")
    return tmp_path / "table", tmp_path / "stages.json"


@pytest.mark.xdist_group(f"spark-{SPARK}")
def test_delta_spark(aged: tuple[Path, Path]) -> None:
    path, saved = aged
    try:
        jars = delta_jars()
    except NoJars as error:
        pytest.skip(str(error))
    python = python_with_spark(SPARK)
    program = HERE / "delta_spark_reads.py"
    said = run_program(python, program, str(jars), str(path), str(saved))
    assert said.split()[-1].startswith(SPARK)


SMALL_ENGINES = (
    "duckdb==1.5.5",
    "duckdb-extensions==1.5.5",
    "duckdb-extension-delta==1.5.5",
    "datafusion==55.0.0",
    "daft==0.7.26",
)
"""DuckDB's extension for Delta is on PyPI for this version and not yet for 2.0."""


def test_duckdb_datafusion_and_daft(aged: tuple[Path, Path]) -> None:
    path, saved = aged
    folder = ROOT / "build" / "interop" / f"engines-{'-'.join(SMALL_ENGINES)}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install_or_skip(python, *SMALL_ENGINES)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (own / "of_the_suite.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / "ready").touch()
    run_program(str(python), HERE / "small_engines_read.py", str(path), str(saved))
