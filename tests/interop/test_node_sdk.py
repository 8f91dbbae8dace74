"""The official Node.js SDK, from npm: three nodes behind names, with TLS, and a failover."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from server.outside import outside_cluster, play

pytestmark = pytest.mark.interop

SOURCES = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node-sdk")
    for name in ("package.json", "outside.mjs"):
        shutil.copy(SOURCES / name, folder / name)
    install = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    subprocess.run(install, cwd=folder, check=True)
    return [node, str(folder / "outside.mjs")]


def test_the_node_sdk_from_outside(program: list[str], tmp_path: Path) -> None:
    with outside_cluster(tmp_path) as cluster:
        play(cluster, program)
