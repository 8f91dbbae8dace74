"""The jars of delta-spark, from Maven; used again while they are there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPARK = "4.2"
"""The newest Spark for which there is a delta-spark."""


class NoJars(Exception):
    """The jars can't be had here; the text says why."""


def delta_jars() -> Path:
    """The folder with the jars."""
    target = ROOT / "build" / "interop" / f"delta-spark-{SPARK}"
    jars = target / "dependency"
    if (target / "ready").exists():
        return jars
    maven = shutil.which("mvn")
    if maven is None:
        raise NoJars("mvn is not installed")
    pom = str(Path(__file__).parent / "delta" / "pom.xml")
    command = [maven, "-q", "-B", "-f", pom, f"-Dtarget={target}", f"-Dspark={SPARK}"]
    command += ["dependency:copy-dependencies", "-DincludeGroupIds=io.delta,io.unitycatalog"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if "ERROR" in line]
        raise NoJars(f"the jars of delta-spark can't be had: {(lines or ['mvn failed'])[0][:200]}")
    (target / "ready").touch()
    return jars
