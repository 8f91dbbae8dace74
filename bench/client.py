"""From the socket into Arrow, side by side with raw loopback and with a decoder of one message at a time.

    python bench/client.py [--mib N] [--sizes 64,256,1024] [--rounds N] [--json]

Another process has distinct mutations ready (random values, one vbucket, one snapshot) and sends the same
bytes in pieces of 256 KiB to every contender, so that none waits for a server to compute. In every round four
contenders receive all of them, one after the other:

- raw: `recv_into` a buffer of 1 MiB, without looking at the bytes;
- batches: `tailrace.connect(...).batches()`, all 18 columns, with handshake, flow control and all checks;
- changes: the same with an event object per message, from `changes()`;
- per message: a bare `struct` loop over the same bytes that makes a tuple per message, without any check,
  flow control or column: the least that a Python decoder does.

A share is bytes a second relative to raw's in the same round, the median over the rounds.
Target: batches at 0.15 / 0.22 / 0.30 of raw for values of 64, 256 and 1,024 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import struct
import subprocess
import sys
import time

import numpy as np

import tailrace
from tailrace import Mutation
from tailrace.wire.codes import Datatype, DcpOpcode, Feature, Magic, Op
from tailrace.wire.dcp import DcpMutation, DcpSnapshotMarker, DcpStreamEnd, DcpStreamRequestResponse
from tailrace.wire.framing import Framer
from tailrace.wire.header import HEADER, Frame

TARGETS = {64: 0.15, 256: 0.22, 1024: 0.30}
PIECE_BYTES = 256 << 10
READ_BYTES = 1 << 20
UUID = 0xABCDEF
_MUTATION = struct.Struct(">QQIIIHB")


def mutations(count: int, size: int) -> np.ndarray:
    """Distinct mutations, one per row."""
    template = DcpMutation(
        key=b"\0doc::%08d" % 0, value=bytes(size), by_seqno=1, rev_seqno=1, cas=1 << 60, datatype=1
    ).encode()
    rows = np.tile(np.frombuffer(template, dtype=np.uint8), (count, 1))
    seqnos = np.arange(1, count + 1)
    rows[:, 24:32] = seqnos.astype(">u8").view(np.uint8).reshape(count, 8)
    digits, at = seqnos.copy(), 24 + 31 + 6
    for place in reversed(range(8)):
        digits, digit = np.divmod(digits, 10)
        rows[:, at + place] = digit + ord("0")
    letters = np.random.default_rng(7).integers(97, 123, (count, size), dtype=np.uint8)
    rows[:, at + 8 :] = letters
    return rows


def serve(count: int, size: int) -> None:
    """The other process: a client that says "raw" gets just the bytes, any other a producer."""
    rows = mutations(count, size)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], rows.nbytes, flush=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            first = connection.recv(3, socket.MSG_PEEK)
            if first == b"raw":
                connection.recv(3)
                data = rows.reshape(-1).data
                for at in range(0, len(data), PIECE_BYTES):
                    connection.sendall(data[at : at + PIECE_BYTES])
            else:
                produce(connection, rows, listener.getsockname()[1])
        except OSError:
            pass
        connection.close()


def produce(connection: socket.socket, rows: np.ndarray, port: int) -> None:
    """Serve one reader: canned answers, then all rows within its window."""
    framer = Framer()
    window = outstanding = 0
    pending = memoryview(b"")
    end = b""
    while True:
        if pending and outstanding < window:
            part = pending[:PIECE_BYTES]
            connection.sendall(part)
            pending = pending[len(part) :]
            outstanding += len(part)
            connection.setblocking(False)
            if not pending:
                connection.setblocking(True)
                connection.sendall(end)
        else:
            connection.setblocking(True)
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            connection.setblocking(True)
            continue
        finally:
            connection.setblocking(True)
        if not data:
            return
        framer.feed(data)
        for frame in framer.frames():
            if frame.opcode == DcpOpcode.BUFFER_ACK:
                outstanding -= int.from_bytes(frame.extras, "big")
            elif frame.opcode == DcpOpcode.STREAM_REQUEST:
                rows[:, 12:16] = np.frombuffer(frame.opaque.to_bytes(4, "big"), dtype=np.uint8)
                accepted = DcpStreamRequestResponse.ok([(UUID, 0)], opaque=frame.opaque).encode()
                marker = DcpSnapshotMarker(start=1, end=len(rows), flags=2, opaque=frame.opaque).encode()
                end = DcpStreamEnd(opaque=frame.opaque).encode()
                connection.sendall(accepted + marker)
                pending = rows.reshape(-1).data
            elif frame.is_request:
                if frame.opcode == DcpOpcode.CONTROL and frame.key == b"connection_buffer_size":
                    window = int(frame.value)
                connection.sendall(answer(frame, port, len(rows)))


def answer(frame: Frame, port: int, high_seqno: int) -> bytes:
    value, datatype = b"", 0
    if frame.opcode == Op.HELLO:
        value = struct.pack(">HHH", Feature.XERROR, Feature.JSON, Feature.COLLECTIONS)
    elif frame.opcode == Op.GET_CLUSTER_CONFIG:
        config = {"rev": 1, "vBucketServerMap": {"serverList": [f"$HOST:{port}"], "vBucketMap": [[0]]}}
        value, datatype = json.dumps(config).encode(), int(Datatype.JSON)
    elif frame.opcode == Op.GET_COLLECTIONS_MANIFEST:
        value = b'{"uid":"0","scopes":[]}'
    elif frame.opcode == Op.GET_ALL_VB_SEQNOS:
        value = struct.pack(">HQ", 0, high_seqno)
    return Frame(Magic.RESPONSE, frame.opcode, 0, 0, datatype, 0, frame.opaque, body=value).encode()


# contenders: each gives the seconds that all bytes took


def raw(port: int, size_bytes: int, _count: int) -> float:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        buffer = bytearray(READ_BYTES)
        began = time.perf_counter()
        connection.sendall(b"raw")
        left = size_bytes
        while left:
            left -= connection.recv_into(buffer)
        return time.perf_counter() - began


def per_message(port: int, size_bytes: int, count: int) -> float:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.perf_counter()
        connection.sendall(b"raw")
        made, left, tail = 0, size_bytes, b""
        header, extras = HEADER.unpack_from, _MUTATION.unpack_from
        while left:
            received = connection.recv(READ_BYTES)
            left -= len(received)
            data = tail + received
            at, end = 0, len(data)
            messages = []
            while at + 24 <= end:
                _, opcode, keys, extra, datatype, vbucket, total, _, cas = header(data, at)
                if at + 24 + total > end:
                    break
                seqno, rev, flags, expiry, *_ = extras(data, at + 24)
                key_at = at + 24 + extra
                key = data[key_at + 1 : key_at + keys]
                value = data[key_at + keys : at + 24 + total]
                messages.append((opcode, vbucket, seqno, rev, cas, flags, expiry, datatype, key, value))
                at += 24 + total
            made += len(messages)
            tail = data[at:]
        assert made == count
        return time.perf_counter() - began


async def batches(source: tailrace.Source, count: int) -> float:
    rows = 0
    began = time.perf_counter()
    async for batch in source.batches(end="now"):
        rows += batch.num_rows
    assert rows == count
    return time.perf_counter() - began


async def changes(source: tailrace.Source, count: int) -> float:
    rows = 0
    began = time.perf_counter()
    async for event in source.changes(end="now"):
        rows += isinstance(event, Mutation)
    assert rows == count
    return time.perf_counter() - began


async def round_of(port: int, size_bytes: int, count: int) -> dict[str, float]:
    url = f"couchbase://127.0.0.1:{port}/default"
    seconds = {"raw": raw(port, size_bytes, count)}
    for name, contender in (("batches", batches), ("changes", changes)):
        async with tailrace.connect(url) as source:
            seconds[name] = await contender(source, count)
    seconds["per message"] = per_message(port, size_bytes, count)
    return seconds


def measure(size: int, mib: int, rounds: int, *, as_json: bool) -> None:
    count = (mib << 20) // (size + 69)
    command = [sys.executable, __file__, "--serve", f"{count},{size}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            port, size_bytes = map(int, server.stdout.readline().split())
            # the first round loads what is loaded when it is first needed
            results = [asyncio.run(round_of(port, size_bytes, count)) for _ in range(rounds + 1)][1:]
        finally:
            server.kill()
    shares = {
        name: statistics.median(result["raw"] / result[name] for result in results)
        for name in results[0]
        if name != "raw"
    }
    rates = {name: statistics.median(count / result[name] for result in results) for name in results[0]}
    if as_json:
        print(json.dumps({"size": size, "messages": count, "shares": shares, "messages_a_second": rates}))
        return
    verdict = "ok" if shares["batches"] >= TARGETS.get(size, 0) else "MISSED"
    print(
        f"{size:>5} B  raw {size_bytes / 1e6 * rates['raw'] / count:6.0f} MB/s"
        f"  batches {rates['batches'] / 1e6:5.2f} M/s, share {shares['batches']:.2f}"
        f" (target {TARGETS.get(size, 0):.2f}: {verdict})"
        f"  changes {rates['changes'] / 1e6:5.2f} M/s, {shares['changes']:.3f}"
        f"  per message {rates['per message'] / 1e6:5.2f} M/s, {shares['per message']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=192, help="how much to send")
    parser.add_argument("--sizes", default="64,256,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*map(int, options.serve.split(",")))
    for size in map(int, options.sizes.split(",")):
        measure(size, options.mib, options.rounds, as_json=options.json)


if __name__ == "__main__":
    main()
