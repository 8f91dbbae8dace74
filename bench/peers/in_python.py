"""Reads a bucket in Python whenever it is asked to, and reports how long that took.

Arguments: batches|changes|async|floor|bytes|loopback HOST:PORT BUCKET USER PASSWORD CA-FILE|- snappy|plain.
A line on stdin, ``read DOCUMENTS`` or ``check DOCUMENTS``, asks for a reading; a line of JSON on stdout is
the answer.
``batches`` are Arrow's, ``changes`` an object per message from `connect_sync`, ``async`` the same from
`connect`; ``floor`` reads one message at a time, as the scripts of the old tools do: no flow control, no
check, no resume, no TLS. ``bytes`` is not a reader: it takes as many bytes as its ``check`` counted and
acknowledges them without looking at them. Nothing can be faster: it shows what the node can send.
``loopback`` does not ask the node: a process of its own sends as many bytes, also over loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import tailrace
from tailrace import Mutation
from tailrace.wire.codes import ControlKey, DcpOpcode, Feature, Op, OpenFlag
from tailrace.wire.dcp import DcpBufferAck, DcpControl, DcpOpen, DcpStreamRequest
from tailrace.wire.header import HEADER, Frame
from tailrace.wire.message import Message

_WORD = (1 << 64) - 1
_WINDOW_BYTES = 20 << 20
_SEQNO = struct.Struct(">Q")
_CONTROLS = {
    ControlKey.ENABLE_NOOP: b"true",
    ControlKey.CONNECTION_BUFFER_SIZE: str(_WINDOW_BYTES).encode(),
    ControlKey.MAX_MARKER_VERSION: b"2.2",
}
"""Options of our client, as far as they change what the node sends."""


@dataclass
class Answer:
    """What every program reports of a reading: what it saw, and what that cost."""

    documents: int = 0
    value_bytes: int = 0
    seqnos: int = 0
    cas: int = 0
    contents: int = 0
    seconds: float = 0.0
    first_s: float = 0.0
    cpu_s: float = 0.0
    peak_kib: int = 0
    sender_cpu_s: float = 0.0
    """CPU time of a sender that is not the node."""
    began: float = field(default_factory=time.perf_counter)
    cpu_before: float = field(default_factory=time.process_time)

    def first(self) -> None:
        self.first_s = time.perf_counter() - self.began

    def text(self) -> str:
        self.cpu_s = time.process_time() - self.cpu_before
        self.peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.seqnos &= _WORD
        answer = asdict(self)
        del answer["began"], answer["cpu_before"]
        return json.dumps(answer)

    def add_batch(self, batch: pa.RecordBatch, check: bool) -> None:
        if not self.documents:
            self.first()
        values = batch["value"]
        self.documents += batch.num_rows
        self.value_bytes += pc.sum(pc.binary_length(values)).as_py()
        self.seqnos += int(pc.sum(batch["seqno"]).as_py())
        self.cas ^= int(np.bitwise_xor.reduce(batch["cas"].to_numpy().astype(np.uint64)))
        if check:
            for key, value in zip(batch["key"].to_pylist(), values.to_pylist(), strict=True):
                self.contents += zlib.crc32(value, zlib.crc32(key))

    def add_changes(self, documents: int, value_bytes: int, seqnos: int, cas: int, contents: int) -> None:
        self.documents = documents
        self.value_bytes = value_bytes
        self.seqnos = seqnos
        self.cas = cas
        self.contents = contents


def options(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    where, bucket, user, password, authorities, _ = arguments  # ours always takes compressed values
    scheme = "couchbase" if authorities == "-" else "couchbases"
    keywords: dict[str, Any] = {
        "username": user,
        "password": password,
    }
    if authorities != "-":
        keywords["tls"] = tailrace.TlsOptions(ca_file=authorities)
    return f"{scheme}://{where}/{bucket}", keywords


async def read_batches(url: str, keywords: dict[str, Any], answer: Answer, check: bool, wanted: int) -> None:
    async with tailrace.connect(url, **keywords) as source:
        async for batch in source.batches():
            answer.add_batch(batch, check)
            if answer.documents >= wanted:
                answer.seconds = time.perf_counter() - answer.began
                break


# Both count in local variables: a method of the answer takes a third of the time of a change.


async def read_async(url: str, keywords: dict[str, Any], answer: Answer, check: bool, wanted: int) -> None:
    documents = value_bytes = seqnos = cas = contents = 0
    async with tailrace.connect(url, **keywords) as source:
        async for change in source.changes():
            if isinstance(change, Mutation):
                if not documents:
                    answer.first()
                documents += 1
                value_bytes += len(change.value)
                seqnos += change.seqno
                cas ^= change.cas
                if check:
                    contents += zlib.crc32(change.value, zlib.crc32(change.key))
                if documents >= wanted:
                    answer.seconds = time.perf_counter() - answer.began
                    break
    answer.add_changes(documents, value_bytes, seqnos, cas, contents)


def read_changes(url: str, keywords: dict[str, Any], answer: Answer, check: bool, wanted: int) -> None:
    documents = value_bytes = seqnos = cas = contents = 0
    with tailrace.connect_sync(url, **keywords) as source:
        for change in source.changes():
            if isinstance(change, Mutation):
                if not documents:
                    answer.first()
                documents += 1
                value_bytes += len(change.value)
                seqnos += change.seqno
                cas ^= change.cas
                if check:
                    contents += zlib.crc32(change.value, zlib.crc32(change.key))
                if documents >= wanted:
                    answer.seconds = time.perf_counter() - answer.began
                    break
    answer.add_changes(documents, value_bytes, seqnos, cas, contents)


@contextlib.contextmanager
def requested(arguments: list[str], controls: dict[bytes, bytes]) -> Iterator[tuple[socket.socket, BinaryIO]]:
    """A connection on which the streams of all vbuckets are requested; with controls, collections too."""
    where, bucket, user, password, authorities, compression = arguments
    if authorities != "-" or compression != "plain":
        raise SystemExit("this reader is plain")
    host, port = where.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as stream:
        features = [Feature.XERROR, Feature.JSON, *([Feature.COLLECTIONS] if controls else [])]
        login = f"\0{user}\0{password}".encode()
        opening: list[Frame | Message] = [
            Frame(0x80, Op.HELLO, body=struct.pack(f">{len(features)}H", *features)),
            Frame(0x80, Op.SASL_AUTH, key_length=5, body=b"PLAIN" + login),
            Frame(0x80, Op.SELECT_BUCKET, key_length=len(bucket), body=bucket.encode()),
            DcpOpen(key=b"floor", flags=OpenFlag.PRODUCER),
            *(DcpControl(key=key, value=value) for key, value in controls.items()),
        ]
        for message in opening:
            connection.sendall(message.encode())
            _message(stream)
        connection.sendall(Frame(0x80, Op.GET_ALL_VB_SEQNOS).encode())
        vbuckets = len(_message(stream)[2]) // 10
        requests = [DcpStreamRequest(vbucket=number, opaque=number).encode() for number in range(vbuckets)]
        connection.sendall(b"".join(requests))
        yield connection, stream


def read_bytes(arguments: list[str], answer: Answer, wanted_bytes: int) -> None:
    """Take what comes, and acknowledge it like a reader with a window."""
    with requested(arguments, _CONTROLS) as (connection, stream):
        taken, unacknowledged = 0, 0
        block = bytearray(1 << 20)
        while taken < wanted_bytes:
            count = stream.readinto1(block)  # type: ignore[attr-defined]
            if not count:
                raise SystemExit("the node has closed the connection")
            if not taken:
                answer.first()
            taken += count
            unacknowledged += count
            if unacknowledged > _WINDOW_BYTES // 5:
                connection.sendall(DcpBufferAck(acked_bytes=unacknowledged).encode())
                unacknowledged = 0
        answer.seconds = time.perf_counter() - answer.began


def count_bytes(arguments: list[str], answer: Answer, wanted: int) -> int:
    """The bytes that the streams send up to the last document, answers and markers included."""
    with requested(arguments, _CONTROLS) as (connection, stream):
        total = unacknowledged = 0
        while answer.documents < wanted:
            _, opcode, body = _message(stream)
            if opcode == DcpOpcode.NOOP:
                continue  # it is sent by the clock, so not in every reading
            total += HEADER.size + len(body)
            unacknowledged += HEADER.size + len(body)
            if opcode == DcpOpcode.MUTATION:
                answer.documents += 1
            if unacknowledged > _WINDOW_BYTES // 5:
                connection.sendall(DcpBufferAck(acked_bytes=unacknowledged).encode())
                unacknowledged = 0
    return total


def read_loopback(answer: Answer, wanted_bytes: int) -> None:
    """Take as many bytes from a process that does nothing but send them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if not child:
            with socket.create_connection(listener.getsockname()) as connection:
                piece = memoryview(bytes(1 << 20))
                for left in range(wanted_bytes, 0, -len(piece)):
                    connection.sendall(piece[:left])
            os._exit(0)
        connection, _ = listener.accept()
    taken, block = 0, bytearray(4 << 20)
    with connection:
        while count := connection.recv_into(block):
            if not taken:
                answer.first()
            taken += count
    answer.seconds = time.perf_counter() - answer.began
    usage = os.wait4(child, 0)[2]
    answer.sender_cpu_s = usage.ru_utime + usage.ru_stime


def read_floor(arguments: list[str], answer: Answer, check: bool, wanted: int) -> None:
    with requested(arguments, {}) as (_, stream):
        while answer.documents < wanted:
            fields, opcode, body = _message(stream)
            if opcode != DcpOpcode.MUTATION:
                continue
            if not answer.documents:
                answer.first()
            key_at = fields[3]
            value_at = key_at + fields[2]
            answer.documents += 1
            answer.value_bytes += len(body) - value_at
            answer.seqnos += _SEQNO.unpack_from(body)[0]
            answer.cas ^= fields[8]
            if check:
                answer.contents += zlib.crc32(body[value_at:], zlib.crc32(body[key_at:value_at]))
        answer.seconds = time.perf_counter() - answer.began


def _message(stream: BinaryIO) -> tuple[tuple[int, ...], int, bytes]:
    fields = HEADER.unpack(stream.read(HEADER.size))
    return fields, fields[1], stream.read(fields[6])


def asked() -> Iterator[tuple[bool, int]]:
    for line in sys.stdin:
        word, count = line.split()
        yield word == "check", int(count)


def main() -> None:
    level, *arguments = sys.argv[1:]
    url, keywords = options(arguments)
    wanted_bytes = 0
    for check, wanted in asked():
        answer = Answer()
        if level == "batches":
            asyncio.run(read_batches(url, keywords, answer, check, wanted))
        elif level == "async":
            asyncio.run(read_async(url, keywords, answer, check, wanted))
        elif level == "floor":
            read_floor(arguments, answer, check, wanted)
        elif level in ("bytes", "loopback") and check:
            wanted_bytes = count_bytes(arguments, answer, wanted)
        elif level == "loopback":
            read_loopback(answer, wanted_bytes)
        elif level == "bytes":
            read_bytes(arguments, answer, wanted_bytes)
        else:
            read_changes(url, keywords, answer, check, wanted)
        print(answer.text(), flush=True)


if __name__ == "__main__":
    main()
