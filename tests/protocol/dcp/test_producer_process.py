"""What readers that don't read cost a real node in its own process.

One node for the whole file: 64 vbuckets with about 60 MB on disk.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.client.kv import KvClient
from tailrace.connstr import parse
from tailrace.wire.admin import GetAllVbSeqnos, StartPersistence, StopPersistence
from tailrace.wire.codes import DcpOpcode, Feature, Op, Status
from tailrace.wire.dcp import DcpBufferAck, DcpControl, DcpOpen, DcpStreamRequest
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.kv import Set
from tailrace.wire.message import Message

VBUCKETS = 64
DOCUMENTS = 30_000
VALUE_BYTES = 2_000
QUOTA_BYTES = 32 << 20
LIMIT_BYTES = 32 << 20

pytestmark = pytest.mark.xdist_group("producer_process")


class Node:
    """A `tailrace serve` process."""

    def __init__(self, directory: Path) -> None:
        ready = directory / "ready.json"
        command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", "--vbuckets", str(VBUCKETS)]
        command += [
            "--data",
            str(directory / "data"),
            "--ready-file",
            str(ready),
            "--memory-quota",
            str(QUOTA_BYTES),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not ready.exists():
            assert self.process.poll() is None, "the node did not start"
            time.sleep(0.02)
        self.port: int = json.loads(ready.read_text())["port"]

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024


class Reader:
    """A raw DCP connection."""

    def __init__(self, node: Node, *, buffer_size: int = 0, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", node.port))
        self.socket.settimeout(60)
        self.framer = Framer()
        hello = Frame(0x80, Op.HELLO, body=struct.pack(">HH", Feature.COLLECTIONS, Feature.XERROR))
        self.send(
            hello.encode(),
            DcpOpen(key=b"reader-%d" % id(self), flags=1).encode(),
            DcpControl(key=b"enable_noop", value=b"true").encode(),
            DcpControl(key=b"connection_buffer_size", value=b"%d" % buffer_size).encode(),
        )
        for _ in range(4):
            assert self.frame().status == 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *messages: bytes) -> None:
        self.socket.sendall(b"".join(messages))

    def request_all(self, **fields: Any) -> None:
        self.send(*(DcpStreamRequest(vbucket=n, opaque=n, **fields).encode() for n in range(VBUCKETS)))

    def frame(self) -> Frame:
        while (frame := self.framer.maybe_frame()) is None:
            data = self.socket.recv(1 << 20)
            assert data, "the node closed the connection"
            self.framer.feed(data)
        return frame


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("node"))
    try:
        write(made, 0, DOCUMENTS)
        yield made
    finally:
        made.process.terminate()
        made.process.wait(60)


def write(node: Node, first: int, count: int) -> None:
    """Sets, pipelined; returns when all are stored. Those for which there is no memory now are sent again."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=60) as connection:
        for start in range(first, first + count, 500):
            left = list(range(start, start + 500))
            while left := refused(connection, left):
                time.sleep(0.01)


def refused(connection: socket.socket, numbers: list[int]) -> list[int]:
    """Set documents; the numbers of those that the node had no memory for."""
    value = bytes(range(250)) * (VALUE_BYTES // 250)
    batch = (Set(vbucket=n % VBUCKETS, key=b"key%d" % n, value=value).encode() for n in numbers)
    connection.sendall(b"".join(batch))
    framer, answers = Framer(), list[Frame]()
    while len(answers) < len(numbers):
        framer.feed(connection.recv(1 << 16))
        answers += framer.frames()
    assert {answer.status for answer in answers} <= {Status.SUCCESS, Status.ETMPFAIL}
    return [n for n, answer in zip(numbers, answers, strict=True) if answer.status]


def command(node: Node, message: Message) -> Frame:
    """Send one command."""
    framer = Framer()
    with socket.create_connection(("127.0.0.1", node.port), timeout=60) as connection:
        connection.sendall(message.encode())
        while (answer := framer.maybe_frame()) is None:
            framer.feed(connection.recv(1 << 16))
    assert answer.status == 0
    return answer


def memory_bytes(node: Node) -> int:
    """Of changes in the node's memory."""
    with KvClient(parse(f"couchbase://127.0.0.1:{node.port}")) as client:
        return int(client.stats()["ep_memory_bytes"])


def responsive(node: Node) -> None:
    """The node answers others; by then it has also handled what came before."""
    for _ in range(5):
        write(node, 10_000_000, 500)


def with_memory_in_use(node: Node) -> int:
    """The node's memory when writers alone have used up what they may use.

    How much of their quota they use depends on how far behind sealing is, so on what else this machine does:
    a measurement at any other moment says little.
    """
    command(node, StopPersistence())
    with socket.create_connection(("127.0.0.1", node.port), timeout=60) as connection:
        while not refused(connection, list(range(500))):
            pass
    assert memory_bytes(node) >= QUOTA_BYTES
    used = node.rss_bytes
    command(node, StartPersistence())
    while memory_bytes(node) >= QUOTA_BYTES // 2:
        time.sleep(0.02)
    return used


@pytest.mark.parametrize("buffer_size", [0, 4 << 20])
def test_stalled_reader(node: Node, buffer_size: int) -> None:
    """64 streams are asked for and not a byte of them is read."""
    responsive(node)
    before = node.rss_bytes
    with Reader(node, buffer_size=buffer_size, receive_buffer=4096) as reader:
        reader.request_all()
        responsive(node)
        assert node.rss_bytes - before <= buffer_size + LIMIT_BYTES


def test_ten_stalled_readers(node: Node) -> None:
    responsive(node)
    before = node.rss_bytes
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(Reader(node, receive_buffer=4096)).request_all()
        responsive(node)
        assert node.rss_bytes - before <= 10 * LIMIT_BYTES / 4


def test_stalled_reader_while_others_write(node: Node) -> None:
    """What is written meanwhile is not kept in memory for it, and it gets all of it when it reads again."""
    before = with_memory_in_use(node)
    with Reader(node, receive_buffer=4096) as reader:
        reader.request_all()
        write(node, 0, DOCUMENTS // 2)
        responsive(node)
        assert node.rss_bytes - before <= LIMIT_BYTES
        _read_all(node, reader)


def _read_all(node: Node, reader: Reader) -> None:
    highs = dict(struct.iter_unpack(">HQ", command(node, GetAllVbSeqnos()).value))
    reached = dict.fromkeys(highs, 0)
    newest: set[tuple[int, bytes]] = set()
    while reached != highs:
        frame = reader.frame()
        if frame.opcode == DcpOpcode.MUTATION:
            reached[frame.vbucket] = int.from_bytes(frame.extras[:8], "big")
            newest.add((frame.vbucket, frame.key))
        else:
            assert frame.opcode in (DcpOpcode.SNAPSHOT_MARKER, DcpOpcode.STREAM_REQUEST, DcpOpcode.NOOP)
    assert len(newest) >= DOCUMENTS


def test_slow_reader_with_a_small_window(node: Node) -> None:
    """A window far smaller than a chunk: everything comes in the end, and never more than was allowed."""
    window = 20_000
    with Reader(node, buffer_size=window) as reader:
        _read_within(reader, window)


def _read_within(reader: Reader, window: int) -> None:
    reader.send(DcpStreamRequest(vbucket=3, opaque=3, flags=4).encode())
    outstanding = 0
    while True:
        frame = reader.frame()
        if not frame.is_request or frame.opcode == DcpOpcode.NOOP:
            continue
        assert outstanding < window
        outstanding += frame.size
        if frame.opcode == DcpOpcode.STREAM_END:
            break
        if outstanding >= window:
            reader.send(DcpBufferAck(acked_bytes=outstanding // 2).encode())
            outstanding -= outstanding // 2
