"""Readers that we did not write, built when a test first needs them; without the tools they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def _java(folder: Path) -> list[str]:
    """java-dcp-client, from Maven Central."""
    java, maven = _tool("java"), _tool("mvn")
    pom = str(HERE / "java" / "pom.xml")
    build = [maven, "-q", "-B", "-f", pom, f"-Dtarget={folder}", "package", "dependency:copy-dependencies"]
    subprocess.run(build, check=True)
    return [java, "-cp", f"{folder}/classes:{folder}/dependency/*", "tailrace.Reader"]


def _go(folder: Path) -> list[str]:
    """gocbcore, from Go's module proxy."""
    program = str(folder / "reader")
    subprocess.run([_tool("go"), "build", "-o", program, "."], cwd=HERE / "go", check=True)
    return [program]


BUILDERS: dict[str, Callable[[Path], list[str]]] = {"java-dcp-client": _java, "gocbcore": _go}


@pytest.fixture(scope="session", params=BUILDERS)
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts a reader, to be followed by ``HOST:PORT BUCKET USER PASSWORD``."""
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))
