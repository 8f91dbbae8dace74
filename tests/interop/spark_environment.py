"""An environment for each version of Spark: only Spark is its own, everything else is that of the suite.

They are made below `build/`, once, and used again while the version is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyspark
import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.1", "4.3": "4.3.0"}
"""The newest patch release of each when this was written."""


def python_with_spark(version: str) -> str:
    """The Python of an environment with this version of Spark; skips the test if it can't be had."""
    wanted = VERSIONS[version]
    if pyspark.__version__.startswith(f"{version}."):
        return sys.executable
    folder = ROOT / "build" / "interop" / f"spark-{wanted}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install_or_skip(python, f"pyspark=={wanted}")
        install_or_skip(python, "--no-deps", "--editable", str(ROOT))
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (own / "of_the_suite.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / "ready").touch()
    return str(python)


def install_or_skip(python: Path, *what: str) -> None:
    """Install packages into an environment; skips the test if they can't be had."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"{what[-1]} can't be installed: {reason}")


def program_environment(**environment: str) -> dict[str, str]:
    """The environment variables of a program of the suite that runs with another Spark."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    surroundings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    }
    return {**surroundings, "PYTHONPATH": paths, "SPARK_LOCAL_IP": "127.0.0.1", **environment}


def run_program(python: str, program: Path, *arguments: str, **environment: str) -> str:
    """Run a program of the suite in an environment; return what it printed."""
    command = [python, str(program), *arguments]
    done = subprocess.run(
        command, env=program_environment(**environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
