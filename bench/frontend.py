"""The key-value front end, side by side with memcached: requests a second, pipelined and one at a time.

    python bench/frontend.py [--seconds S] [--rounds N]

Both servers run at the same time on this machine, memcached with one thread (-t 1 -R 1000); they get load in
turns, from a generator in a process of its own that only sends prepared bytes and counts the bytes that come
back. The share is the median of the rounds' shares: the two measurements of a round directly follow each
other, so that other load on the machine affects both. After it comes the share of the best rounds of each,
which were disturbed least.

Target: at least 0.35 of memcached pipelined with 10 % sets, at least 0.5 with one request at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any
from zlib import crc32

from tailrace.wire.codes import Op
from tailrace.wire.header import HEADER

KEYS = 10_000
VBUCKETS = 1024
VALUE = bytes(random.Random(1).randbytes(256))
SET_SHARE = 0.10
LOADS = [  # connections, requests in flight on each of them, target
    (4, 32, 0.35),
    (4, 100, 0.35),
    (1, 1, 0.50),
    (4, 1, 0.50),
]


opaques = itertools.count()


def request(opcode: int, key: bytes, extras: bytes = b"", value: bytes = b"") -> bytes:
    opaque = next(opaques)
    vbucket = ((crc32(key) >> 16) & 0x7FFF) % VBUCKETS
    total = len(extras) + len(key) + len(value)
    return (
        HEADER.pack(0x80, opcode, len(key), len(extras), 0, vbucket, total, opaque, 0) + extras + key + value
    )


def key_of(number: int) -> bytes:
    return b"user::%08d" % number


def set_(number: int) -> bytes:
    return request(Op.SET, key_of(number), bytes(8), VALUE)


def batches(depth: int) -> list[tuple[bytes, int]]:
    """Prepared requests and how many bytes their answers have."""
    rng = random.Random(2)
    made = []
    for _ in range(max(64, 2048 // depth)):
        parts, answer = [], 0
        for _ in range(depth):
            number = rng.randrange(KEYS)
            if rng.random() < SET_SHARE:
                parts.append(set_(number))
                answer += 24
            else:
                parts.append(request(Op.GET, key_of(number)))
                answer += 24 + 4 + len(VALUE)
        made.append((b"".join(parts), answer))
    return made


def connect(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def receive(connection: socket.socket, size: int, buffer: bytearray) -> None:
    while size > 0:
        got = connection.recv_into(buffer, min(size, len(buffer)))
        if not got:
            raise SystemExit("a server closed the connection")
        size -= got


def fill(port: int) -> None:
    with connect(port) as connection:
        buffer = bytearray(1 << 20)
        for start in range(0, KEYS, 500):
            connection.sendall(b"".join(set_(number) for number in range(start, start + 500)))
            receive(connection, 24 * 500, buffer)


def generate(port: int, connections: int, depth: int, seconds: float, result: Any) -> None:
    """The generator's process: requests a second."""
    prepared = batches(depth)
    sockets = [connect(port) for _ in range(connections)]
    buffer = bytearray(1 << 20)
    done = at = 0
    began = time.perf_counter()
    end = began + seconds
    while time.perf_counter() < end:
        sent = []
        for connection in sockets:
            data, answer = prepared[at % len(prepared)]
            at += 1
            connection.sendall(data)
            sent.append((connection, answer))
        for connection, answer in sent:
            receive(connection, answer, buffer)
        done += connections * depth
    result.put(done / (time.perf_counter() - began))


def measure(port: int, connections: int, depth: int, seconds: float) -> float:
    result: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=generate, args=(port, connections, depth, seconds, result))
    process.start()
    rate: float = result.get(timeout=seconds + 60)
    process.join()
    return rate


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far, in all threads."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1000):
        try:
            connect(port).close()
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit(f"{process.args!r} did not start") from None
            time.sleep(0.01)
    raise SystemExit("a server does not listen")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    memcached = shutil.which("memcached")
    if memcached is None:
        print("skipped: memcached is not installed (Debian: apt-get install memcached)")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        ports = {"memcached": free_port(), "tailrace": free_port()}
        command = {
            "memcached": f"{memcached} -U 0 -l 127.0.0.1 -p {ports['memcached']} -t 1 -R 1000 -u nobody",
            "tailrace": f"{sys.executable} -m tailrace serve --port {ports['tailrace']}"
            f" --data {directory}/data --vbuckets {VBUCKETS}",
        }
        running = {
            name: subprocess.Popen(program.split(), stdout=subprocess.DEVNULL)
            for name, program in command.items()
        }
        try:
            for name, port in ports.items():
                wait_for(port, running[name])
                fill(port)
            return report(ports, {name: process.pid for name, process in running.items()}, arguments)
        finally:
            for process in running.values():
                process.terminate()
                process.wait()


def report(ports: dict[str, int], pids: dict[str, int], arguments: argparse.Namespace) -> int:
    results = []
    for connections, depth, target in LOADS:
        rates: dict[str, list[float]] = {name: [] for name in ports}
        costs: dict[str, list[float]] = {name: [] for name in ports}
        for _ in range(arguments.rounds):
            for name, port in ports.items():
                before = cpu_seconds(pids[name])
                rate = measure(port, connections, depth, arguments.seconds)
                rates[name].append(rate)
                costs[name].append((cpu_seconds(pids[name]) - before) / (rate * arguments.seconds) * 1e6)
        typical = {name: statistics.median(rate) for name, rate in rates.items()}
        share = statistics.median(
            ours / theirs for ours, theirs in zip(rates["tailrace"], rates["memcached"], strict=True)
        )
        results.append(
            {
                "connections": connections,
                "depth": depth,
                "set_share": SET_SHARE,
                "value_bytes": len(VALUE),
                "memcached_per_s": round(typical["memcached"]),
                "tailrace_per_s": round(typical["tailrace"]),
                "share": round(share, 3),
                "best_share": round(max(rates["tailrace"]) / max(rates["memcached"]), 3),
                "memcached_cpu_us": round(statistics.median(costs["memcached"]), 2),
                "tailrace_cpu_us": round(statistics.median(costs["tailrace"]), 2),
                "target": target,
            }
        )
    if arguments.json:
        print(json.dumps(results))
        return 0
    print("connections  depth   memcached/s    tailrace/s   share    best  target   CPU us a request")
    for row in results:
        print(
            f"{row['connections']:>11}{row['depth']:>7}{row['memcached_per_s']:>14,}{row['tailrace_per_s']:>14,}"
            f"{row['share']:>8.2f}{row['best_share']:>8.2f}{row['target']:>8.2f}"
            f"{row['memcached_cpu_us']:>10.2f} /{row['tailrace_cpu_us']:>6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
