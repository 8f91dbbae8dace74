"""What a client holds does not depend on how much it has read.

What it holds at a moment is up to chance: how much of the window came while it was busy, and which of the
pieces that it freed the allocators keep. A leak would come on top of that. The short run finds out if
received bytes are kept, the long one finds a leak of ten bytes a change. The reader is a process of its own;
the server is here, made of arrays, so most of the time is the client's.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from client import fake_server
from client.fake_server import UUID, Connection, FakeServer
from tailrace.wire.dcp import DcpBufferAck, DcpMutation, DcpStreamEnd, DcpStreamRequest
from tailrace.wire.dialect import DCP
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction

VBUCKETS = 64
SNAPSHOT = 1000
WINDOW_BYTES = 4 << 20
SLACK_BYTES = 24 << 20
"""How much more may be held in the second half of the way than in the first: the window as received, as
gathered and as columns, each twice. In the short run twice as many bytes are received in the second half."""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="a process does not say what it holds"
)


def snapshot_of(request: DcpStreamRequest, first: int) -> bytes:
    """A marker and the changes that it announces, all different."""
    template = DcpMutation(
        key=b"\0doc::%08d" % 0,
        value=b'{"n":"%064d"}' % first,
        by_seqno=1,
        rev_seqno=1,
        cas=first << 16,
        opaque=request.opaque,
        vbucket=request.vbucket,
    ).encode()
    rows = np.tile(np.frombuffer(template, dtype=np.uint8), (SNAPSHOT, 1))
    seqnos = np.arange(first, first + SNAPSHOT)
    rows[:, 24:32] = seqnos.astype(">u8").view(np.uint8).reshape(-1, 8)
    digits, at = seqnos.copy(), 24 + 31 + 6
    for place in reversed(range(8)):
        digits, digit = np.divmod(digits, 10)
        rows[:, at + place] = digit + ord("0")
    return fake_server.marker(request, first, first + SNAPSHOT - 1) + rows.tobytes()


class Producer:
    """Sends all vbuckets in turn, a snapshot at a time, within the reader's window."""

    def __init__(self, snapshots: int) -> None:
        self.snapshots = snapshots
        self.open_bytes = 0
        self.changed = threading.Condition()
        self.streams: list[tuple[Connection, DcpStreamRequest]] = []
        self.thread = threading.Thread(target=self._send)

    def on_stream(self, connection: Connection, request: DcpStreamRequest) -> None:
        connection.send(fake_server.accepted(request, [(UUID, 0)]))
        self.streams.append((connection, request))
        if len(self.streams) == VBUCKETS:
            self.thread.start()

    def on_ack(self, frame: Frame) -> None:
        ack = DCP.decode(frame, Direction.TO_PRODUCER)
        assert isinstance(ack, DcpBufferAck)
        with self.changed:
            self.open_bytes -= ack.acked_bytes
            self.changed.notify()

    def _send(self) -> None:
        for number in range(self.snapshots):
            for connection, request in self.streams:
                data = snapshot_of(request, number * SNAPSHOT + 1)
                with self.changed:
                    self.changed.wait_for(lambda: self.open_bytes < WINDOW_BYTES)
                    self.open_bytes += len(data)
                connection.send(data)
        for connection, request in self.streams:
            connection.send(DcpStreamEnd(opaque=request.opaque, vbucket=request.vbucket).encode())


def held_while_reading(how: str, snapshots: int, state: Path) -> np.ndarray:
    """Bytes that a reader held, at equal intervals of its reading."""
    producer = Producer(snapshots)
    total = snapshots * SNAPSHOT * VBUCKETS
    with FakeServer(producer.on_stream, vbuckets=VBUCKETS) as server:
        server.high_seqnos = dict.fromkeys(range(VBUCKETS), snapshots * SNAPSHOT)
        server.on_ack = producer.on_ack
        reader = Path(__file__).with_name("flat_reader.py")
        command = [sys.executable, str(reader), server.url, how, str(state), str(total // 40)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        producer.thread.join()
    lines = np.array([line.split() for line in done.stdout.splitlines()], dtype=np.int64)
    assert lines[-1, 0] == total
    return lines[:, 1]


def check_flat(how: str, snapshots: int, state: Path) -> None:
    held = held_while_reading(how, snapshots, state)
    warm = held[len(held) // 10 :]
    half = len(warm) // 2
    growth = int(warm[half:].max() - warm[:half].max())
    print(f"{how}: {held[0] >> 20} MiB at first, {held[-1] >> 20} MiB at last, {growth >> 10} KiB of growth")
    assert growth < SLACK_BYTES


@pytest.mark.parametrize("how", ["changes", "batches"])
def test_a_reader_of_many_changes_stays_small(how: str, tmp_path: Path) -> None:
    check_flat(how, 12, tmp_path / "state")


@pytest.mark.long
@pytest.mark.parametrize("how", ["changes", "batches"])
def test_a_reader_of_five_million_changes_stays_small(how: str, tmp_path: Path) -> None:
    check_flat(how, 79, tmp_path / "state")
