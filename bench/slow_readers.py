"""What slow readers cost the writers of a node: sets a second, with and without them.

    python bench/slow_readers.py [--seconds S] [--rounds N] [--readers N]

A `tailrace serve` process is loaded. A writer in a process of its own sends sets, pipelined, and counts the
answers. In turns it writes alone, beside readers that have requested every vbucket and read nothing, and
beside readers that take 2 MB a second each. The share is the median of the rounds' shares, each relative to
the writer alone just before.

Target: at least 0.80 of the rate alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

from stream import connected, load, node, requests
from tailrace.wire.codes import AddStreamFlag
from tailrace.wire.kv import Set

VBUCKETS = 64
DEPTH = 200
VALUE = random.Random(1).randbytes(256)
SLOW_BYTES = 200_000
TARGET = 0.80


def write(port: int, seconds: float, rate: multiprocessing.connection.Connection) -> None:
    """The writer: sets a second."""
    batches = []
    for first in range(0, 20_000, DEPTH):
        numbers = range(first, first + DEPTH)
        sets = (Set(vbucket=n % VBUCKETS, key=b"hot%d" % n, value=VALUE).encode() for n in numbers)
        batches.append(b"".join(sets))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began, count = time.perf_counter(), 0
        while (taken := time.perf_counter() - began) < seconds:
            connection.sendall(batches[count // DEPTH % len(batches)])
            left = DEPTH * 24
            while left:
                left -= len(connection.recv(left))
            count += DEPTH
    rate.send(count / taken)


def written(port: int, seconds: float) -> float:
    here, there = multiprocessing.Pipe()
    writer = multiprocessing.Process(target=write, args=(port, seconds, there))
    writer.start()
    rate: float = here.recv()
    writer.join()
    return rate


class Readers:
    """Connections with a stream of every vbucket, read slowly or not at all, while in a ``with`` block."""

    def __init__(self, port: int, count: int, *, slow: bool) -> None:
        self._stop = threading.Event()
        self._connections = [connected(port, collections=True, name=b"reader-%d" % n) for n in range(count)]
        for connection in self._connections:
            connection.sendall(requests(VBUCKETS, flags=AddStreamFlag(0)))
        self._thread = threading.Thread(target=self._read, daemon=True) if slow else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for connection in self._connections:
            connection.close()

    def _read(self) -> None:
        while not self._stop.wait(0.1):
            for connection in self._connections:
                connection.recv(SLOW_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readers", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    with tempfile.TemporaryDirectory() as name, node(Path(name), VBUCKETS) as port:
        load(port, 100_000, 256)
        written(port, options.seconds)
        for slow in (False, True):
            shares, rates = [], []
            for _ in range(options.rounds):
                alone = written(port, options.seconds)
                with Readers(port, options.readers, slow=slow):
                    beside = written(port, options.seconds)
                shares.append(beside / alone)
                rates.append((alone, beside))
            share = statistics.median(shares)
            alone, beside = (statistics.median(column) for column in zip(*rates, strict=True))
            print(
                f"{options.readers} readers that {'are slow  ' if slow else 'read nothing'}: alone "
                f"{alone:8,.0f} sets/s, beside them {beside:8,.0f}, share {share:.2f}  target {TARGET:.2f}: "
                f"{'ok' if share >= TARGET else 'MISSED'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
