"""macOS and Windows lack some of what Linux has. Neither is here, so what they lack is removed instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = """
import os, select, selectors, signal, socket, sys, warnings
import importlib, pkgutil

MODULES = {modules!r}
NAMES = {names!r}
import asyncio, subprocess, tempfile, multiprocessing, ssl  # what the standard library itself needs is there
import numpy, pyarrow, click
import filelock  # Windows has a lock of its own, which filelock takes there
for name in MODULES:
    sys.modules[name] = None
for owner, attributes in NAMES.items():
    for attribute in attributes:
        if hasattr(sys.modules[owner], attribute):
            delattr(sys.modules[owner], attribute)
selectors.DefaultSelector = selectors.SelectSelector
warnings.simplefilter("error")
"""
_MACOS = {"os": ["fdatasync", "preadv", "pwritev"], "select": ["epoll"]}
_WINDOWS = {
    "os": [
        *(
            "fdatasync",
            "preadv",
            "pwritev",
            "pread",
            "pwrite",
            "writev",
            "O_CLOEXEC",
            "O_DIRECTORY",
            "getuid",
        ),
        *("setpgrp", "fork", "register_at_fork", "sched_getaffinity", "nice", "uname", "set_blocking"),
    ],
    "select": ["epoll", "poll"],
    "signal": ["SIGHUP", "SIGKILL", "SIGCONT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE"],
}
_SYSTEMS = {
    "macos": ([], _MACOS),
    "windows": (["fcntl", "resource", "pwd", "grp", "termios", "pty"], _WINDOWS),
}
_IMPORTS = """
import tailrace
wrong = []
for found in pkgutil.walk_packages(tailrace.__path__, "tailrace."):
    if found.name in ("tailrace.__main__", "tailrace.bench") or found.name.startswith("tailrace.bench."):
        continue
    try:
        importlib.import_module(found.name)
    except Exception as error:
        wrong.append(f"{found.name}: {error!r}")
print("\\n".join(wrong) or "all of them")
"""
_WORKS = """
import tailrace, tailrace.testing
from pathlib import Path
from tailrace.cli.main import main
from tailrace.errors import StoreLocked
from tailrace.store.engine import Engine

with tailrace.testing.node(vbuckets=4, data=Path("data")) as node:
    for number in range(300):
        node.set(f"key{number}", {"n": number})
    node.persist()
    try:
        Engine("data")
    except StoreLocked as error:
        print("locked")
    with tailrace.connect_sync(node.url) as source:
        changes = list(source.changes(end="now"))
        print(len({change.key for change in changes if isinstance(change, tailrace.Mutation)}))
    assert main(["load", node.url, "--docs", "50"]) == 0
with tailrace.testing.node(vbuckets=4, data=Path("data")) as node:
    print(node.get("key7"))
"""


_TABLE = """
import pyarrow as pa
from tailrace.model import Position
from tailrace.table.contract import Commit
from tailrace.table.opening import open_or_create, open_table

schema = pa.schema([("key", pa.string()), ("vbucket", pa.int32())])
source = {"bucket": "b", "scope": "s", "collection": "c"}
table = open_or_create("people", schema=schema, source=source)
table.claim()
table.commit(Commit("TAILRACE ROUND", positions={3: Position(7, 12, 12, 12)}))
print(open_table("people").current.position(3).seqno)
"""


def run(system: str, program: str, folder: Path) -> str:
    modules, names = _SYSTEMS[system]
    text = _WITHOUT.format(modules=modules, names=names) + program
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("system", _SYSTEMS)
def test_every_module_is_imported(system: str, tmp_path: Path) -> None:
    assert run(system, _IMPORTS, tmp_path) == "all of them\n"


@pytest.mark.parametrize("system", _SYSTEMS)
def test_a_node_on_disk_and_a_reader_work(system: str, tmp_path: Path) -> None:
    """As far as can be tested here: not what those systems have but do differently."""
    shown = run(system, _WORKS, tmp_path).splitlines()
    assert shown[:2] == ["locked", "300"] and "7" in shown[-1]


@pytest.mark.parametrize("system", _SYSTEMS)
def test_a_table_is_claimed_and_written(system: str, tmp_path: Path) -> None:
    assert run(system, _TABLE, tmp_path) == "12\n"
