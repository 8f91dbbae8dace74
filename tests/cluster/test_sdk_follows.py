"""The official SDK follows the map: a rebalance moves its vbuckets, a failover takes a node away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import pytest

from cluster.processes import KEYS, actives, cluster, documents, replicated, until, url
from tailrace.cluster.coordinator import Coordinator

pytest.importorskip("couchbase")
pytestmark = pytest.mark.xdist_group("cluster")

PATIENCE_S = 200.0


class Follower:
    """The child process: one line in, the same line out when it is done."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def do(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def finished(self, text: str) -> None:
        assert self._lines.get(timeout=PATIENCE_S) == text


@contextmanager
def follower(made: Coordinator) -> Iterator[Follower]:
    hosts = url(made).removeprefix("couchbase://").removesuffix("/default")
    script = Path(__file__).with_name("sdk_follower.py")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), hosts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield Follower(process)
        finally:
            process.kill()


def test_the_sdk_follows_a_rebalance_and_a_failover(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", 2) as made, follower(made) as sdk:

        def has(text: str) -> bool:
            values = documents(url(made), KEYS)
            return len(values) == len(KEYS) and all(
                json.loads(value) == {"round": text} for value in values.values()
            )

        sdk.do("before")
        sdk.finished("before")
        assert has("before")

        assert made.add() == "n3"
        sdk.do("meanwhile")  # while vbuckets move
        for _ in made.rebalance():
            pass
        sdk.finished("meanwhile")
        sdk.do("moved")
        sdk.finished("moved")
        assert has("moved")
        assert {name for holders in actives(made).values() for name in holders} == {"n1", "n2", "n3"}

        until(lambda: replicated(made), "the copies are not complete")
        pid = made.members["n1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        sdk.do("failed over")  # begins against a node that is gone
        made.failover("n1")
        sdk.finished("failed over")
        assert has("failed over")
