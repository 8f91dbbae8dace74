"""A producer of both UPR drafts that a node dials, built with `struct` only; a test tells it what to send."""

from __future__ import annotations

import socket
import struct
from typing import Any

from dialects.raw_peer import TIMEOUT_S, Packet, Peer, Upr, packet

HELLO, NOOP = 0x1F, 0x0A
UUID = 0xABCD


class RawProducer:
    """Listens; `accept` gives the node's next connection, past its handshake."""

    host = "127.0.0.1"

    def __init__(self, draft: Upr) -> None:
        self.draft = draft
        self._listener = socket.create_server((self.host, 0))
        self._listener.settimeout(TIMEOUT_S)
        self.port = self._listener.getsockname()[1]
        self._connections: list[Connection] = []

    def __enter__(self) -> RawProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.socket.close()

    def accept(self, *, features: bool = True) -> Connection:
        made = Connection(self._listener.accept()[0], self.draft)
        self._connections.append(made)
        made.greet(features=features)
        return made


class Connection(Peer):
    """One connection of a node, which consumes."""

    def __init__(self, accepted: socket.socket, draft: Upr) -> None:
        self.socket = accepted
        self.socket.settimeout(TIMEOUT_S)
        self._data = bytearray()
        self.draft = draft
        self.opaque = 0
        self.vbucket = 0

    def greet(self, *, features: bool) -> None:
        """Answer what comes before the first stream: hello, select bucket, get cluster config."""
        for _ in range(3):
            asked = self.next()
            if asked.opcode == HELLO and not features:
                self.send(packet(0x81, HELLO, half=0x81, opaque=asked.opaque))
            else:
                value = asked.value if asked.opcode == HELLO else b""
                self.send(packet(0x81, asked.opcode, value=value, opaque=asked.opaque))

    def request(self) -> Packet:
        """The node's next request; requests for a sign of life are answered."""
        while (asked := self.next()).opcode == NOOP:
            self.send(packet(0x81, NOOP, opaque=asked.opaque))
        return asked

    def requested(self) -> tuple[Packet, Packet, Packet]:
        """The three requests of a stream: for the log, for the stream, for the log again."""
        before, stream, after = self.request(), self.request(), self.request()
        assert [_kind(asked) for asked in (before, stream, after)] == ["log", "stream", "log"]
        assert stream.key.startswith(b"tailrace-replication:127.0.0.1:")  # the group id
        self.opaque, self.vbucket = stream.opaque, stream.half
        return before, stream, after

    def open(self, log: list[tuple[int, int]] | None = None) -> tuple[int, int, int, int]:
        """Accept a stream on this log; returns what was asked for: start, end, uuid, high seqno."""
        before, stream, after = self.requested()
        self.answer_log(before, log)
        self.say("ok", "begin")
        self.answer_log(after, log)
        return asked_for(stream)

    def answer_log(self, asked: Packet, log: list[tuple[int, int]] | None = None) -> None:
        value = b"".join(struct.pack(">QQ", *entry) for entry in log or [(UUID, 0)])
        self.send(self.log_answer(asked, value))

    def log_answer(self, asked: Packet, value: bytes) -> bytes:
        if self.draft.name == "upr-a":
            return packet(0x81, 0x02, value=value, half=asked.half, opaque=asked.opaque, byte_5=2)
        return packet(0x81, 0x51, value=value, opaque=asked.opaque)

    def answer_rollback(self, seqno: int) -> None:
        value = seqno.to_bytes(8, "big")
        if self.draft.name == "upr-a":
            self.send(packet(0x81, 0x02, value=value, half=self.vbucket, opaque=self.opaque, byte_5=3))
        else:
            self.send(packet(0x81, 0x50, value=value, half=0x23, opaque=self.opaque))

    def say(self, *words: str) -> None:
        """Messages without a body."""
        self.send(b"".join(self.word(frame) for frame in words))

    def word(self, word: str, **header: Any) -> bytes:
        header = {"half": self.vbucket, "opaque": self.opaque, **header}
        if self.draft.name == "upr-a":
            opcode, byte_5 = {
                "ok": (2, 1),
                "not-mine": (2, 2),
                "begin": (3, 0),
                "start": (4, 1),
                "end": (4, 2),
                "flush": (4, 6),
                "over-ok": (5, 1),
                "over-state": (5, 2),
            }[word]
            return packet(0x81, opcode, byte_5=byte_5, **header)
        if word in ("ok", "not-mine"):
            return packet(0x81, 0x50, **{**header, "half": 0x07 if word == "not-mine" else 0})
        opcode, extras = {
            "begin": (0x52, b""),
            "start": (0x54, b""),
            "end": (0x55, b""),
            "flush": (0x59, b""),
            "over-ok": (0x53, bytes(4)),
            "over-state": (0x53, b"\0\0\0\1"),
        }[word]
        return packet(0x80, opcode, extras, **header)

    def mutation(self, key: bytes, seqno: int, value: bytes = b"v", *, rev: int = 3, **header: int) -> bytes:
        extras = struct.pack(">QQIII", seqno, rev, 9, 0, 0)
        header = {"half": self.vbucket, "opaque": self.opaque, "cas": 77, **header}
        if self.draft.name == "upr-a":
            return packet(0x81, 0x04, extras, key, value, byte_5=3, **header)
        return packet(0x80, 0x56, extras, key, value, **header)

    def snapshot(self, first: int, last: int) -> bytes:
        """A whole snapshot: a document for each seqno."""
        changes = [self.mutation(b"k%d" % seqno, seqno) for seqno in range(first, last + 1)]
        return b"".join([self.word("start"), *changes, self.word("end")])

    def set_state(self, state: int) -> bytes:
        return packet(0x80, 0x5A, bytes([state]), half=self.vbucket, opaque=self.opaque)


def asked_for(stream: Packet) -> tuple[int, int, int, int]:
    """Start, end, uuid and high seqno of a stream request."""
    return struct.unpack(">QQQQ", stream.extras[-32:])


def _kind(asked: Packet) -> str:
    if asked.opcode == 0x01:
        return {1: "stream", 2: "log"}[asked.byte_5]
    return {0x50: "stream", 0x51: "log"}[asked.opcode]
