"""What a node holds while it is busy, and when it is idle again.

    python bench/memory.py [--seconds S] [--idle S] [--mib N]

A `tailrace serve --memory-quota 256m` process, its resident memory (RSS) sampled every 20 ms. It holds
``--mib`` MiB of documents of 1 KiB and 20,000 of 16 KiB; the memory for their index is part of the base,
which is measured when the node is idle.

    streams  four readers read everything from disk, at the same time and over and over
    writers  two writers overwrite the documents of 16 KiB, as fast as the node takes them

After each, ``--idle`` seconds with nothing to do, and more while the node still computes or a merge is
running, which takes longer on a busy machine.

Targets: at most base + quota + 10 % while it writes; at most base + 10 % when it is idle again.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

from fairness import VBUCKETS, Peer, backfill, node, opened
from tailrace.wire.codes import AddStreamFlag, Status
from tailrace.wire.dcp import DcpStreamRequest
from tailrace.wire.kv import Get, Set

QUOTA_MIB = 256
SAMPLE_S = 0.02
LOOK_S = 6.0  # the node looks for free memory every 5 s
IDLE_SHARE = 0.02
LONGEST_REST_S = 300.0
VALUE = random.Random(1).randbytes(16 << 10)
DEPTH = 16
KEYS = 10_240  # a multiple of VBUCKETS: a key stays in its vbucket


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def computed_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rest(pid: int, idle_s: float) -> None:
    """Wait until the node has been idle for a while."""
    time.sleep(idle_s)
    ends = time.monotonic() + LONGEST_REST_S
    while time.monotonic() < ends:
        before = computed_s(pid)
        time.sleep(LOOK_S)
        merges = any(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
        if not merges and computed_s(pid) - before < IDLE_SHARE * LOOK_S:
            return


class Sampled:
    """The highest resident memory while in a ``with`` block."""

    def __init__(self, pid: int) -> None:
        self.peak_mib = 0.0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.peak_mib = max(self.peak_mib, rss_mib(self._pid))


def warm_up(port: int) -> None:
    with Peer(port) as peer:
        peer.call(Set(key=b"warm", value=b"{}").encode())
        peer.call(Get(key=b"warm").encode())
    with opened(port) as reader:
        reader.call(DcpStreamRequest(flags=AddStreamFlag.TO_LATEST).encode())


def write(peer: Peer, name: bytes, first: int) -> None:
    """Write some values of 16 KiB; refused ones are sent again, as a client would."""
    keys = [(n % VBUCKETS, b"%b%d" % (name, n % KEYS)) for n in range(first, first + DEPTH)]
    requests = b"".join(Set(vbucket=number, key=key, value=VALUE).encode() for number, key in keys)
    while True:
        peer.socket.sendall(requests)
        if peer.answers(DEPTH).status != Status.ETMPFAIL:
            return
        time.sleep(0.01)


def write_once(port: int) -> None:
    with Peer(port) as peer:
        for name in (b"0-", b"1-"):
            for first in range(0, KEYS, DEPTH):
                write(peer, name, first)


def write_until(port: int, name: bytes, stop: Event) -> None:
    with Peer(port) as peer:
        first = 0
        while not stop.is_set():
            write(peer, name, first)
            first += DEPTH


def read_until(port: int, _name: bytes, stop: Event) -> None:
    backfill(port, stop.is_set)


@contextlib.contextmanager
def running(work: Callable[[int, bytes, Event], None], port: int, count: int) -> Iterator[None]:
    """Run a number of processes while in the block."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes = [context.Process(target=work, args=(port, b"%d-" % n, stop)) for n in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join()


def report(what: str, mib: float, limit_mib: float | None = None) -> bool:
    ok = limit_mib is None or mib <= limit_mib
    verdict = "" if limit_mib is None else f"  target {limit_mib:6.0f} MiB: {'ok' if ok else 'MISSED'}"
    print(f"{what:<28} {mib:7.0f} MiB{verdict}", flush=True)
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--idle", type=float, default=30.0)
    parser.add_argument("--mib", type=int, default=512)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    arguments = ["--memory-quota", f"{QUOTA_MIB}m"]
    with tempfile.TemporaryDirectory() as directory, node(Path(directory), *arguments) as (port, pid):
        report("after the start", rss_mib(pid))
        url = f"couchbase://bench:secret@127.0.0.1:{port}"
        command = [sys.executable, "-m", "tailrace", "load", url, "--size", "1024"]
        command += ["--docs", str(options.mib << 10)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        write_once(port)
        warm_up(port)
        rest(pid, options.idle)
        base = rss_mib(pid)
        report("base: with documents, idle", base)
        with Sampled(pid) as streaming, running(read_until, port, 4):
            time.sleep(options.seconds)
        report("four large streams", streaming.peak_mib)
        rest(pid, options.idle)
        results = [report("idle after streams", rss_mib(pid), 1.1 * base)]
        with Sampled(pid) as writing, running(write_until, port, 2):
            time.sleep(options.seconds)
        results.append(report("two fast writers", writing.peak_mib, 1.1 * (base + QUOTA_MIB)))
        rest(pid, options.idle)
        results.append(report("idle after writers", rss_mib(pid), 1.1 * base))
    if not all(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
