"""Documents of any size, on every path between a bucket and a file: memory follows the limits, not the data.

Each path is a process of its own, as users start it, with its default memory, and 1.5 GiB of
values of 64 KiB, 1 MiB and 20 MiB, or a vbucket of 3 GiB: for `make soak`. ``pytest -s`` shows figures.
That batches are bounded in bytes is in `client.test_bytes_per_batch`, `spark.test_spool` and
`table.test_memory_bounds`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PYTHON_BYTES = 1 << 30
"""What a Python process may hold: a client, a driver, a worker of Spark."""
JAVA_BYTES = 2 << 30
"""Spark's own default heap of 1 GiB, its direct buffers, and Java itself."""
NODE_BYTES = 512 << 20
"""A quota of 256 MiB, the base, and values of 20 MiB in transit."""
SAMPLE_S = 0.05

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="a process does not say what it holds"
)


@dataclass
class Watch:
    """The peak memory of a process and of each of its descendants, by kind."""

    pid: int
    most: dict[str, int] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for pid in family(self.pid):
                name, held = held_by(pid)
                self.most[name] = max(held, self.most.get(name, 0))


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for task in _listed(Path(f"/proc/{parent}/task")):
            pids += [int(child) for child in _text(task / "children").split()]
    return pids


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # it has ended


def held_by(pid: int) -> tuple[str, int]:
    """The kind of a process, and its own resident bytes (mapped files are the kernel's)."""
    command = _text(Path(f"/proc/{pid}/cmdline")).split("\0")
    name = "java" if Path(command[0]).name == "java" else "python"
    counts = _text(Path(f"/proc/{pid}/statm")).split()
    own = int(counts[1]) - int(counts[2]) if counts else 0
    return name, own * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def node(directory: Path, name: str, *, vbuckets: int) -> Iterator[tuple[str, int]]:
    """A node as users start it; its address and process."""
    ready = directory / f"{name}.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", "--vbuckets", str(vbuckets)]
    command += ["--data", str(directory / name), "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.05)
            yield f"couchbase://127.0.0.1:{json.loads(ready.read_text())['port']}/default", process.pid
        finally:
            process.terminate()
            process.wait(120)


SOURCE = """
import sys
import tailrace.spark as ts
spark = ts.session()
rows = spark.read.format("tailrace").load(sys.argv[1])
print(rows.selectExpr("count(*)", "sum(octet_length(value))").first())
"""
STREAM = """
import sys
import tailrace.spark as ts
spark = ts.session()
rows = spark.readStream.format("tailrace").option("startingOffsets", "earliest").load(sys.argv[1])
sums = [0, 0]
def add(batch, _):
    for place, more in enumerate(batch.selectExpr("count(*)", "sum(octet_length(value))").first()):
        sums[place] += more or 0
query = rows.writeStream.foreachBatch(add).option("checkpointLocation", sys.argv[2])
query.trigger(availableNow=True).start().awaitTermination()
print(f"Row(={sums[0]}, ={sums[1]})")
"""
LIVE = """
import sys
import tailrace.spark as ts
spark = ts.session()
print(ts.table(spark, sys.argv[1]).selectExpr("count(*)", "sum(octet_length(value))").first())
"""


@dataclass
class Paths:
    """The same documents on every path; each must end well, with all of them, and hold little."""

    url: str
    node_pid: int
    documents: int
    size: int

    def run(self, name: str, *arguments: str, code: str | None = None) -> str:
        program = [sys.executable, *(["-m", "tailrace"] if code is None else ["-c", code])]
        began = time.monotonic()
        with (
            Watch(self.node_pid) as node_watch,
            subprocess.Popen(
                [*program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process,
            Watch(process.pid) as watch,
        ):
            said, aside = process.communicate()
        held = {**watch.most, "node": max(node_watch.most.values())}
        figures = ", ".join(f"{kind} {size >> 20} MiB" for kind, size in sorted(held.items()))
        print(f"{name}: {time.monotonic() - began:.1f} s, {figures}", flush=True)
        assert process.returncode == 0, f"{name}: {said[-2000:]}{aside[-4000:]}"
        for kind, most in (("python", PYTHON_BYTES), ("java", JAVA_BYTES), ("node", NODE_BYTES)):
            assert held.get(kind, 0) <= most, f"{name}: {figures}"
        return said

    def check(self, name: str, *arguments: str, code: str) -> None:
        said = self.run(name, *arguments, code=code)
        assert f"={self.documents}, " in said, f"{name}: {said[-1000:]}"
        assert f"={self.documents * self.size}" in said, f"{name}: {said[-1000:]}"


MIB = 1 << 20


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("size", "total", "vbuckets"),
    [
        pytest.param(64 << 10, 1536 * MIB, 256, id="64 KiB"),
        pytest.param(1 * MIB, 1536 * MIB, 256, id="1 MiB"),
        pytest.param(20 * MIB, 1520 * MIB, 256, id="20 MiB"),
        pytest.param(256 << 10, 3072 * MIB, 1, id="one vbucket"),
    ],
)
def test_every_path(tmp_path: Path, size: int, total: int, vbuckets: int) -> None:
    documents, table = total // size, str(tmp_path / "table")
    with node(tmp_path, "data", vbuckets=vbuckets) as (url, pid):
        paths = Paths(url, pid, documents, size)
        paths.run("load", "load", url, "--docs", str(documents), "--size", str(size))
        paths.run("mirror", "mirror", url, table, "--once")
        paths.run("verify", "verify", url, table)
        paths.check("ts.table", table, code=LIVE)
        counted = paths.run("query", "query", table, "select count(*) n from t", "--json")
        assert json.loads(counted) == {"n": documents}
        sizes = "select count(*) n, sum(octet_length(value)) bytes from t"
        summed = paths.run("query, all values", "query", table, sizes, "--json")
        assert json.loads(summed) == {"n": documents, "bytes": total}
        listed = paths.run("query, every value", "query", table, "select left(value, 1) v from t", "--json")
        assert len(listed.splitlines()) == documents
        for form in ("delta", "parquet"):
            out = tmp_path / form
            paths.run(f"export, {form}", "export", table, str(out), "--format", form)
            shutil.rmtree(out)
        shutil.rmtree(table)
        paths.check("source, stream", url, str(tmp_path / "checkpoint"), code=STREAM)
        paths.check("source, batch", url, code=SOURCE)
        for name in ("documents.parquet", "documents.jsonl"):
            paths.run(f"dump, {name}", "dump", url, "--out", str(tmp_path / name))
            (tmp_path / name).unlink()
        paths.run("record", "record", url, str(tmp_path / "stream.rec"))
        (tmp_path / "stream.rec").unlink()
        paths.run("tail", "tail", url, "--to", "now")
        with node(tmp_path, "copy", vbuckets=vbuckets) as (target, target_pid):
            with Watch(target_pid) as watch:
                paths.run("replicate", "replicate", url, target, "--to", "now")
            print(f"target: {watch.most['python'] >> 20} MiB")
            assert watch.most["python"] <= NODE_BYTES
        shutil.rmtree(tmp_path / "copy")
        paths.run("index", "index", url, str(tmp_path / "index"), "--to", "now")
