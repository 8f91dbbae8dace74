"""What the page costs a node: how soon requests are answered, and which share of a core they take.

    python bench/page.py [--connections N] [--each N] [--seconds S]

A `tailrace serve` process has 1,024 vbuckets and ``--connections`` readers (200) with ``--each`` streams (1).
The page's figures (``/api/view``) are requested every two seconds, as by a browser, and so are the samples
that its charts draw (``/api/past``, all of them) and the metrics. The share is processor time of the node's
process, less what it takes with nobody looking, so a busy machine does not change it; the answers' times are
by the clock, so it changes those.

Target: answers in under 100 ms, less than 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tailrace.wire.dcp import DcpOpen, DcpStreamRequest

VBUCKETS = 1024
EVERY_S = 2.0
END = (1 << 64) - 1


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what the page costs a node")
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--http-port", "0"]
        with subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL) as node:
            try:
                while not ready.exists():
                    time.sleep(0.05)
                told = json.loads(ready.read_text())
                measure(node.pid, told["port"], told["web_port"], given)
            finally:
                node.terminate()
                node.wait()
    return 0


def measure(pid: int, port: int, web_port: int, given: argparse.Namespace) -> None:
    readers = [reader(port, number, given.each) for number in range(given.connections)]
    try:
        idle = cpu_share(pid, given.seconds / 2, [])
        print(f"{VBUCKETS} vbuckets, {given.connections} readers with {given.each} streams each")
        print(f"{'':12}{'median':>10}{'longest':>10}{'bytes':>10}{'of a core':>11}")
        for path in ("api/view", "api/past", "metrics"):
            times: list[tuple[float, int]] = []
            share = cpu_share(pid, given.seconds, times, f"http://127.0.0.1:{web_port}/{path}") - idle
            spent = [spent for spent, _ in times]
            figures = f"{statistics.median(spent) * 1e3:>7.1f} ms{max(spent) * 1e3:>7.1f} ms"
            print(f"{path:12}{figures}{times[-1][1]:>10,}{share:>10.2%}")
    finally:
        for connection in readers:
            connection.close()


def reader(port: int, number: int, each: int) -> socket.socket:
    """A connection with open streams that nobody reads."""
    connection = socket.create_connection(("127.0.0.1", port))
    requests = [DcpOpen(key=b"reader%d" % number, flags=1).encode()]
    for at in range(each):
        vbucket = (number * each + at) % VBUCKETS
        requests.append(DcpStreamRequest(vbucket=vbucket, opaque=at, end_seqno=END).encode())
    connection.sendall(b"".join(requests))
    return connection


def cpu_share(pid: int, seconds: float, times: list[tuple[float, int]], url: str = "") -> float:
    """The share of a core that a process takes while a URL is requested."""
    before, began = cpu_s(pid), time.monotonic()
    while time.monotonic() - began < seconds:
        asked = time.monotonic()
        if url:
            with urllib.request.urlopen(url) as answer:
                size = len(answer.read())
            times.append((time.monotonic() - asked, size))
        time.sleep(max(0.0, asked + EVERY_S - time.monotonic()))
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
