"""`tailrace mirror` on disks that are really full: small file systems that only the mirror's process sees."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.too_slow import PATIENT

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark-programs"), pytest.mark.timeout(900)]


@cache
def private_mounts() -> list[str]:
    """The command prefix for a program that may mount file systems for itself; empty if none may."""
    for how in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        try:
            mount = [*how, "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
            tried = subprocess.run(mount, capture_output=True, check=False)
        except OSError:
            return []
        if tried.returncode == 0:
            return how
    return []


@pytest.fixture(scope="module")
def node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=4) as node:
        for n in range(100):
            node.set(f"k{n}", {"random": os.urandom(4096).hex()})
        yield node


def mirror(node: Any, table: Path, full: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A mirror that finds a full disk there."""
    if not private_mounts():
        pytest.skip("no file system can be mounted here")
    full.mkdir()
    settings = [text for name, value in PATIENT.items() for text in ("--conf", f"{name}={value}")]
    # a task that fails is not repeated by Spark, only by the mirror
    command = [sys.executable, "-m", "tailrace", "mirror", node.url, str(table), "--once"]
    command += ["--master", "local[2]", *settings, *options]
    mount = f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(full))}"
    return subprocess.run(
        [*private_mounts(), "sh", "-c", f"{mount} && exec {shlex.join(command)}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_disk_of_the_table_is_full(node: Any, tmp_path: Path) -> None:
    full = tmp_path / "full"
    done = mirror(node, full / "table", full)
    assert done.returncode == 1, done.stderr
    assert all(line.startswith("tailrace: ") for line in done.stderr.splitlines()), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tailrace: error: an executor can't read or write: No space left on device "), last
    assert f"({full / 'table'}/part-" in last
