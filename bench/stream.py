"""Streaming a bucket from disk, side by side with raw loopback: bytes a second.

    python bench/stream.py [--docs N] [--sizes 64,256,1024] [--vbuckets N] [--rounds N] [--old-client]

A `tailrace serve` process is loaded and stopped, what was in its memory is sealed into segments, and it is
started again: everything then comes from its data directory. The first read is checked: every document must
come exactly once, in disk snapshots. Its bytes are kept, and a second process does nothing but send the same
bytes in pieces of 256 KiB. Then both are read in turns by the same loop, which only counts. All sockets have
the kernel's defaults, with TCP_NODELAY as asyncio sets it. The clock starts with the request, so the time to
open the streams counts for the node. The share is the median of the rounds' shares: the two measurements of a
round directly follow each other, so that other load on the machine affects both. After it comes the best
round of each, which was disturbed least.

Target: 0.40 / 0.45 / 0.45 of raw loopback for values of 64, 256 and 1,024 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tailrace.store.engine import Engine
from tailrace.wire.codes import AddStreamFlag, DcpOpcode, Feature, MarkerFlag, Op, OpenFlag
from tailrace.wire.dcp import DcpControl, DcpOpen, DcpSnapshotMarker, DcpStreamRequest
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame

TARGETS = {64: 0.40, 256: 0.45, 1024: 0.45}
PIECE_BYTES = 256 << 10
READ_BYTES = 1 << 20
OPEN_FLAGS = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES


@contextlib.contextmanager
def node(directory: Path, vbuckets: int) -> Iterator[int]:
    """A node in a process of its own; its port."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", "--vbuckets", str(vbuckets)]
    command += ["--data", str(directory / "data"), "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit("the node did not start")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["port"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def load(port: int, docs: int, size: int) -> None:
    url = f"couchbase://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tailrace", "load", url, "--docs", str(docs), "--size", str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def connected(port: int, *, collections: bool, name: bytes = b"bench") -> socket.socket:
    """A DCP connection, opened."""
    features = [Feature.XERROR, Feature.SNAPPY, *([Feature.COLLECTIONS] if collections else [])]
    hello = Frame(0x80, Op.HELLO, body=b"".join(struct.pack(">H", feature) for feature in features))
    opening = [hello.encode(), DcpOpen(key=name, flags=OPEN_FLAGS).encode()]
    # collections require no-ops; the raw sender does not have their bytes, so none may come due
    opening.append(DcpControl(key=b"enable_noop", value=b"true").encode())
    opening.append(DcpControl(key=b"set_noop_interval", value=b"10800").encode())
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"".join(opening))
    framer = Framer()
    for _ in opening:
        while (answer := framer.maybe_frame()) is None:
            framer.feed(connection.recv(READ_BYTES))
        assert answer.status == 0
    return connection


def requests(vbuckets: int, flags: AddStreamFlag = AddStreamFlag.TO_LATEST) -> bytes:
    asked = (
        DcpStreamRequest(vbucket=number, opaque=number, flags=flags).encode() for number in range(vbuckets)
    )
    return b"".join(asked)


def first_read(port: int, vbuckets: int, docs: int, *, collections: bool) -> bytes:
    """Everything that comes for the requests, checked."""
    connection = connected(port, collections=collections)
    connection.sendall(requests(vbuckets))
    framer, received, ended, keys = Framer(), bytearray(), 0, set[tuple[int, bytes]]()
    while ended < vbuckets:
        data = connection.recv(READ_BYTES)
        assert data, "the node closed the connection"
        received += data
        framer.feed(data)
        for frame in framer.frames():
            if frame.opcode == DcpOpcode.MUTATION:
                keys.add((frame.vbucket, frame.key))
            elif frame.opcode == DcpOpcode.STREAM_END:
                ended += 1
            elif frame.opcode == DcpOpcode.SNAPSHOT_MARKER:
                assert DcpSnapshotMarker.decode(frame).flags & MarkerFlag.DISK, "not from disk"
            else:
                assert (frame.opcode, frame.status) == (DcpOpcode.STREAM_REQUEST, 0), frame
    assert len(keys) == docs, f"{len(keys)} of {docs} documents came"
    connection.close()
    return bytes(received)


def read(connection: socket.socket, request: bytes, size: int) -> float:
    """Seconds from the request until all bytes are there."""
    buffer = bytearray(READ_BYTES)
    left = size
    began = time.perf_counter()
    connection.sendall(request)
    while left > 0:
        count = connection.recv_into(buffer)
        assert count, "the connection was closed"
        left -= count
    return time.perf_counter() - began


def send_raw(path: str, port_there: multiprocessing.connection.Connection) -> None:
    """The other process: every client that connects gets the file."""
    listener = socket.create_server(("127.0.0.1", 0))
    port_there.send(listener.getsockname()[1])
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                connection.recv(1)
                for at in range(0, len(view), PIECE_BYTES):
                    connection.sendall(view[at : at + PIECE_BYTES])
            connection.close()


def measure(docs: int, size: int, vbuckets: int, rounds: int, *, collections: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with node(directory, vbuckets) as port:
            load(port, docs, size)
        engine = Engine(directory / "data")
        engine.buckets["default"].compact()
        engine.close()
        with node(directory, vbuckets) as port:
            data = first_read(port, vbuckets, docs, collections=collections)
            kept = directory / "bytes"
            kept.write_bytes(data)
            here, there = multiprocessing.Pipe()
            sender = multiprocessing.Process(target=send_raw, args=(str(kept), there), daemon=True)
            sender.start()
            raw_port = here.recv()
            asked = requests(vbuckets)
            rates: list[tuple[float, float]] = []
            for _ in range(rounds):
                with socket.create_connection(("127.0.0.1", raw_port)) as raw:
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    raw_s = read(raw, b"x", len(data))
                with connected(port, collections=collections) as connection:
                    streamed_s = read(connection, asked, len(data))
                rates.append((len(data) / raw_s, len(data) / streamed_s))
            sender.kill()
    share = statistics.median(streamed / raw for raw, streamed in rates)
    raw, streamed = (statistics.median(column) / 1e6 for column in zip(*rates, strict=True))
    best_raw, best_streamed = (max(column) / 1e6 for column in zip(*rates, strict=True))
    target = TARGETS.get(size)
    verdict = "" if target is None else f"  target {target:.2f}: {'ok' if share >= target else 'MISSED'}"
    print(
        f"{size:>5} B values, {docs:>9,} documents, {len(data) / 1e6:5.0f} MB: "
        f"raw {raw:6.0f} MB/s, stream {streamed:6.0f} MB/s, share {share:.2f}{verdict}; "
        f"best {best_raw:.0f} and {best_streamed:.0f}: {best_streamed / best_raw:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=int, help="documents; default: about 200 MB of them")
    parser.add_argument("--sizes", default="64,256,1024")
    parser.add_argument("--vbuckets", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--old-client", action="store_true", help="without collections: keys lose a byte")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parent.parent / "src"))
    for size in map(int, options.sizes.split(",")):
        docs = options.docs or 200_000_000 // (size + 75) // 1000 * 1000
        measure(docs, size, options.vbuckets, options.rounds, collections=not options.old_client)


if __name__ == "__main__":
    main()
