"""No Python worker of a mirror on a real Spark needs a gibibyte, however large a vbucket or a value is."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tailrace.client.kv import KvClient
from tailrace.connstr import parse

pytestmark = [
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.xdist_group("spark-memory"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process does not say what it holds"),
]

GIB = 1 << 30
MIB = 1 << 20


def one_large_vbucket(url: str) -> None:
    """3 GiB of values of 1 MiB."""
    _write(url, 3 * 1024, MIB)


def one_large_value(url: str) -> None:
    """A value of the largest size, between small ones."""
    _write(url, 500, 256)
    _write(url, 1, 20 * MIB - 100, first=500)
    _write(url, 500, 256, first=501)


def one_long_snapshot(url: str) -> None:
    """A million changes, which a node sends as one snapshot."""
    subprocess.run(
        [sys.executable, "-m", "tailrace", "load", url, "--docs", "1000000", "--size", "128"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _write(url: str, count: int, size: int, first: int = 0) -> None:
    rng = random.Random(size)
    with KvClient(parse(url)) as client:
        for number in range(first, first + count):
            client.set(f"key::{number:06d}", json.dumps(rng.randbytes(size // 2).hex()).encode()[:size])


CASES: dict[str, tuple[Callable[[str], None], list[str], int]] = {
    "a vbucket of 3 GiB": (one_large_vbucket, [], 3 * 1024),
    "a value of 20 MiB": (one_large_value, [], 1001),
    "a snapshot of a million changes": (one_long_snapshot, ["--max-rows", "10000"], 1_000_000),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_needs_less_than_a_gibibyte(case: str, tmp_path: Path) -> None:
    fill, settings, documents = CASES[case]
    with node(tmp_path) as url:
        fill(url)
        table = str(tmp_path / "table")
        mirror = [sys.executable, "-m", "tailrace", "mirror", url, table, "--once", "--json", *settings]
        with subprocess.Popen(mirror, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            watch = MemoryWatch(process.pid)
            out, err = process.communicate()
            peaks = watch.stop()
        assert process.returncode == 0, err[-4000:]
        assert sum(json.loads(line)["changes"] for line in out.splitlines()) == documents
        print(f"{case}: {peaks}")
        assert peaks["worker"], "no worker was seen"
        assert peaks["worker"] < GIB
        assert peaks["driver"] < GIB
        verify = [sys.executable, "-m", "tailrace", "verify", url, table, "--json"]
        with subprocess.Popen(verify, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            watch = MemoryWatch(process.pid)
            out, err = process.communicate()
            peaks = watch.stop()
        assert process.returncode == 0, out[-2000:] + err[-4000:]
        assert json.loads(out.splitlines()[-1])["documents"] == documents
        print(f"{case}, verify: {peaks}")
        assert peaks["worker"] < GIB


@contextmanager
def node(folder: Path) -> Iterator[str]:
    """A node with one vbucket, in a process of its own."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", "--vbuckets", "1"]
    command += ["--data", str(folder / "data"), "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None, "the node did not start"
                time.sleep(0.05)
            yield f"couchbase://127.0.0.1:{json.loads(ready.read_text())['port']}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class MemoryWatch:
    """The peak memory of the Python processes below a process; Java's is a setting of the user's."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._done = threading.Event()
        self._peaks = {"driver": 0, "worker": 0}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._done.set()
        self._thread.join()
        return self._peaks

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            for pid in self._family():
                with suppress(OSError, IndexError, ValueError):
                    if "java" in Path(f"/proc/{pid}/comm").read_text():
                        continue
                    status = Path(f"/proc/{pid}/status").read_text()
                    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
                    role = "driver" if pid == self._driver else "worker"
                    self._peaks[role] = max(self._peaks[role], peak)

    def _family(self) -> list[int]:
        """The process and everything below it."""
        below: dict[int, list[int]] = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with suppress(OSError, IndexError):
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    below.setdefault(parent, []).append(int(path.name))
        family = [self._driver]
        for pid in family:
            family += below.get(pid, [])
        return family
