"""How long a health check waits while others keep the node busy: its p50 and p99 under each kind of load.

    python bench/fairness.py [--seconds S] [--mib N] [--only NAME,...]

A `tailrace serve` process with users holds ``--mib`` MiB of documents. A second process sends a NOOP every
5 ms, on a connection that is logged in, and waits for the answer. Meanwhile a third one, for some seconds:

    idle      does nothing
    flood     sends 100,000 requests, without a login, that are refused; again and again
    write     writes values of 20 MiB
    streams   opens 1,000 streams on a connection, closes it, and begins again
    backfill  reads everything from disk (1 GiB by default)
    seal      writes as fast as it can, so that log files are filled and sealed
    merge     has the bucket compacted while it writes

    json      as write, with JSON values, which the node inspects

    all       flood, write, streams, backfill, seal and merge together

Target: p99 of at most 50 ms under each. On a busy machine the other lines of each load count: how long the
same check takes meanwhile with an asyncio server that does nothing else, in a process of its own (the
machine's share, if more processes want to compute than it has processors); how much the node computes from
one pass over all connections to the next (the longest, and the p99 of what a check at a random moment meets);
and the longest turns of one connection (see `turns.py`).

On a quiet machine:  python bench/fairness.py --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

from tailrace.wire.admin import Compact, Noop, SaslAuth
from tailrace.wire.codes import AddStreamFlag, Feature, Op, OpenFlag
from tailrace.wire.dcp import DcpControl, DcpOpen, DcpStreamRequest
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.kv import Get, Set

TARGET_MS = 50.0
PROBE_S = 0.005
VBUCKETS = 1024
FLOOD = 100_000
STREAMS = 1_000
LARGE = 20 << 20
LONGEST = 3
LOGIN = SaslAuth(key=b"PLAIN", value=b"\0bench\0secret").encode()
HELLO = Frame(0x80, Op.HELLO, body=struct.pack(">H", Feature.XERROR)).encode()
READ_BYTES = 1 << 20


@contextlib.contextmanager
def node(directory: Path, *arguments: str, turns: Path | None = None) -> Iterator[tuple[int, int]]:
    """A node with users, in a process of its own; its port and process id."""
    ready = directory / "ready.json"
    program = ["-m", "tailrace"] if turns is None else [str(Path(__file__).with_name("turns.py")), str(turns)]
    command = [sys.executable, *program, "serve", "--port", "0", "--vbuckets", str(VBUCKETS)]
    command += ["--user", "bench:secret", "--data", str(directory / "data"), "--ready-file", str(ready)]
    command += arguments
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit("the node did not start")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["port"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Peer:
    """A connection, logged in or not."""

    def __init__(self, port: int, *, login: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._framer = Framer(limit=1 << 30)
        self.call(HELLO)
        if login:
            assert self.call(LOGIN).status == 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def call(self, request: bytes) -> Frame:
        self.socket.sendall(request)
        return self.answers(1)

    def answers(self, count: int) -> Frame:
        """Receive this many answers; returns the last."""
        frame: Frame | None = None
        for _ in range(count):
            while (frame := self._framer.maybe_frame()) is None:
                data = self.socket.recv(READ_BYTES)
                assert data, "the node closed the connection"
                self._framer.feed(data)
        assert frame is not None
        return frame

    def take(self, size: int) -> None:
        """Receive this many bytes without looking at them."""
        while size > 0:
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the node closed the connection")
            size -= len(data)

    def _send(self, requests: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the side that waits for the answers notices
            self.socket.sendall(requests)

    def exchange(self, requests: bytes, size: int) -> None:
        """Send requests while ``size`` bytes of answers are taken."""
        sender = threading.Thread(target=self._send, args=(requests,))
        sender.start()
        self.take(size)
        sender.join()


def probe(port: int, stop: Event, result: multiprocessing.connection.Connection) -> None:
    """The health check: milliseconds that each answer took."""
    noop, taken_ms = Noop().encode(), []
    with Peer(port) as peer:
        result.send(None)
        while not stop.is_set():
            began = time.perf_counter()
            peer.call(noop)
            taken_ms.append((time.perf_counter() - began) * 1e3)
            time.sleep(PROBE_S)
    result.send(taken_ms)


def probe_machine(stop: Event, result: multiprocessing.connection.Connection) -> None:
    """The same with a server that only answers: the milliseconds that the machine takes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=answer_only, args=(there,), daemon=True)
    server.start()
    noop, taken_ms = Noop().encode(), []
    with socket.create_connection(("127.0.0.1", here.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        result.send(None)
        while not stop.is_set():
            began = time.perf_counter()
            connection.sendall(noop)
            connection.recv(READ_BYTES)
            taken_ms.append((time.perf_counter() - began) * 1e3)
            time.sleep(PROBE_S)
    server.terminate()
    server.join()
    result.send(taken_ms)


def answer_only(ready: multiprocessing.connection.Connection) -> None:
    """Answer whatever comes with as many bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ_BYTES):
            writer.write(data)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def idle(port: int, until: Callable[[], bool]) -> None:
    while not until():
        time.sleep(0.05)


def flood(port: int, until: Callable[[], bool]) -> None:
    request = Get(key=b"a").encode()
    while not until():
        with contextlib.suppress(ConnectionError), Peer(port, login=False) as peer:
            size = len(peer.call(request).encode())
            while not until():  # or until the node no longer waits for a login (auth_timeout)
                peer.exchange(request * FLOOD, size * FLOOD)


def write(port: int, until: Callable[[], bool]) -> None:
    write_large(port, until, random.Random(1).randbytes(LARGE))


def write_json(port: int, until: Callable[[], bool]) -> None:
    row = b'{"name":"a row of a large document","price":12.5,"tags":["one","two"]},'
    write_large(port, until, b"[" + row * (LARGE // len(row) - 1) + b"0]")


def write_large(port: int, until: Callable[[], bool], value: bytes) -> None:
    with Peer(port) as peer:
        number = 0
        while not until():
            number += 1
            request = Set(vbucket=number % VBUCKETS, key=b"large%d" % (number % 8), value=value)
            peer.call(request.encode())
            time.sleep(0.2)


def opened(port: int) -> Peer:
    peer = Peer(port)
    peer.call(DcpOpen(key=b"bench-%d" % peer.socket.getsockname()[1], flags=OpenFlag.PRODUCER).encode())
    peer.call(DcpControl(key=b"enable_noop", value=b"true").encode())
    return peer


def streams(port: int, until: Callable[[], bool]) -> None:
    from_now_on = (
        DcpStreamRequest(vbucket=number, opaque=number, flags=AddStreamFlag.FROM_LATEST).encode()
        for number in range(STREAMS)
    )
    requests = b"".join(from_now_on)
    while not until():
        with opened(port) as peer:
            peer.socket.sendall(requests)
            peer.answers(STREAMS)


def backfill(port: int, until: Callable[[], bool]) -> None:
    to_latest = (
        DcpStreamRequest(vbucket=number, opaque=number, flags=AddStreamFlag.TO_LATEST).encode()
        for number in range(VBUCKETS)
    )
    requests = b"".join(to_latest)
    while not until():
        with opened(port) as peer:
            peer.socket.sendall(requests)
            peer.socket.settimeout(2.0)  # if nothing comes for this long, it is over
            with contextlib.suppress(TimeoutError):
                peer.take(1 << 40)


def seal(port: int, until: Callable[[], bool]) -> None:
    value, depth = random.Random(1).randbytes(1024), 200
    with Peer(port) as peer:
        first = 0
        while not until():
            numbers = range(first, first + depth)
            peer.socket.sendall(
                b"".join(Set(vbucket=n % VBUCKETS, key=b"s%d" % n, value=value).encode() for n in numbers)
            )
            peer.answers(depth)
            first = (first + depth) % 200_000


def merge(port: int, until: Callable[[], bool]) -> None:
    with Peer(port) as peer:
        number = 0
        while not until():
            number += 1
            peer.call(Set(vbucket=number % VBUCKETS, key=b"m", value=b"x" * 1024).encode())
            peer.call(Compact(vbucket=number % VBUCKETS).encode())


def everything(port: int, until: Callable[[], bool]) -> None:
    loads = (flood, write, streams, backfill, seal, merge)
    threads = [threading.Thread(target=load, args=(port, until)) for load in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


LOADS = {
    "idle": idle,
    "flood": flood,
    "write": write,
    "json": write_json,
    "streams": streams,
    "backfill": backfill,
    "seal": seal,
    "merge": merge,
    "all": everything,
}


def run_load(name: str, port: int, stop: Event) -> None:
    LOADS[name](port, stop.is_set)


def met_by(passes_ms: list[float], share: float) -> float:
    """The pass length that this share of checks does not exceed; a long pass is met more often."""
    rest = (1 - share) * sum(passes_ms)
    for length in reversed(passes_ms):
        rest -= length
        if rest < 0:
            return length
    return 0.0


def measure(name: str, port: int, seconds: float, turns: Path) -> bool:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    stop_load, stop_probe = context.Event(), context.Event()
    machine, its_end = context.Pipe()
    probers = [
        context.Process(target=probe, args=(port, stop_probe, there)),
        context.Process(target=probe_machine, args=(stop_probe, its_end)),
    ]
    for prober in probers:
        prober.start()
    here.recv()
    machine.recv()
    load = context.Process(target=run_load, args=(name, port, stop_load))
    load.start()
    began = time.monotonic()
    time.sleep(seconds)
    stop_load.set()
    load.join()
    stop_probe.set()
    taken_ms, machine_ms = sorted(here.recv()), sorted(machine.recv())
    for prober in probers:
        prober.join()
    p50, p99 = statistics.median(taken_ms), taken_ms[int(len(taken_ms) * 0.99)]
    ok = bool(p99 <= TARGET_MS)
    print(
        f"{name:<9} {len(taken_ms):>6,} checks  p50 {p50:7.2f} ms  p99 {p99:7.2f} ms  "
        f"max {taken_ms[-1]:7.1f} ms  target {TARGET_MS:.0f} ms: {'ok' if ok else 'MISSED'}",
        flush=True,
    )
    print(
        f"          a server that does nothing else: p50 {statistics.median(machine_ms):7.2f} ms  "
        f"p99 {machine_ms[int(len(machine_ms) * 0.99)]:7.2f} ms  max {machine_ms[-1]:7.1f} ms",
        flush=True,
    )
    seen = [line for line in map(json.loads, turns.read_text().splitlines()) if line["at"] >= began]
    passes_ms = sorted(line["pass_ms"] for line in seen if "pass_ms" in line)
    if passes_ms:
        print(
            f"          passes of the loop, computed: p99 {met_by(passes_ms, 0.99):6.1f} ms, "
            f"longest {passes_ms[-1]:6.1f} ms",
            flush=True,
        )
    long = [turn for turn in seen if "computed_ms" in turn]
    long.sort(key=lambda turn: turn["computed_ms"], reverse=True)
    for turn in long[:LONGEST]:
        print(
            "          turn of {ms:6.1f} ms, computed {computed_ms:6.1f}, gc {gc_ms:5.1f}: {what}".format(
                **turn
            )
        )
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--mib", type=int, default=1024, help="documents of 1 KiB that the node holds")
    parser.add_argument("--only", help=f"some of {', '.join(LOADS)}")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    names = options.only.split(",") if options.only else list(LOADS)
    with (
        tempfile.TemporaryDirectory() as directory,
        node(Path(directory), turns=(turns := Path(directory, "turns"))) as (port, _),
    ):
        url = f"couchbase://bench:secret@127.0.0.1:{port}"
        command = [sys.executable, "-m", "tailrace", "load", url, "--size", "1024"]
        subprocess.run([*command, "--docs", str(options.mib << 10)], check=True, stdout=subprocess.DEVNULL)
        time.sleep(2.0)  # what the load has left to seal and merge
        missed = sum(not measure(name, port, options.seconds, turns) for name in names)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
