"""A plain socket that speaks in packets, and readers of each dialect built on it with `struct` only.

Nothing here uses the package's own wire code, so a mistake in it can't hide on both sides.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tailrace.testing.running import RunningNode

HEADER = struct.Struct(">BBHBBHIIQ")
NEVER = 2**64 - 1
TIMEOUT_S = 60.0


@dataclass
class Packet:
    """A packet as it came, cut at its header only."""

    magic: int
    opcode: int
    key_length: int
    extras_length: int
    byte_5: int
    half: int  # vbucket or status
    opaque: int
    cas: int
    body: bytes
    raw: bytes = field(repr=False)

    @property
    def extras(self) -> bytes:
        return self.body[: self.extras_length]

    @property
    def private(self) -> bytes:
        """TAP's engine-private section."""
        length = int.from_bytes(self.body[:2], "big")
        return self.body[self.extras_length : self.extras_length + length]

    def key_at(self, start: int) -> bytes:
        return self.body[start : start + self.key_length]

    @property
    def key(self) -> bytes:
        return self.key_at(self.extras_length)

    @property
    def value(self) -> bytes:
        return self.body[self.extras_length + self.key_length :]

    @property
    def tap_key(self) -> bytes:
        return self.key_at(self.extras_length + len(self.private))

    @property
    def tap_value(self) -> bytes:
        return self.body[self.extras_length + len(self.private) + self.key_length :]

    @property
    def tap_flags(self) -> int:
        return int.from_bytes(self.body[2:4], "big")

    @property
    def ttl(self) -> int:
        return self.body[4]

    @property
    def code(self) -> int:
        """The number of a TAP opaque message or vbucket set."""
        return int.from_bytes(self.private, "big")


def packet(  # noqa: PLR0917
    magic: int,
    opcode: int,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    half: int = 0,
    opaque: int = 0,
    cas: int = 0,
    byte_5: int = 0,
) -> bytes:
    body = extras + key + value
    head = HEADER.pack(magic, opcode, len(key), len(extras), byte_5, half, len(body), opaque, cas)
    return head + body


class Peer:
    """A connection to a node."""

    def __init__(self, node: RunningNode, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect((node.host, node.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = bytearray()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> Packet | None:
        """The next packet; None when the node has closed the connection."""
        if not self._fill(24):
            return None
        fields = HEADER.unpack_from(self._data)
        size = 24 + fields[6]
        assert self._fill(size), "the connection ended inside a packet"
        raw = bytes(self._data[:size])
        del self._data[:size]
        magic, opcode, key_length, extras_length, byte_5, half, _, opaque, cas = fields
        return Packet(magic, opcode, key_length, extras_length, byte_5, half, opaque, cas, raw[24:], raw)

    def _fill(self, size: int) -> bool:
        while len(self._data) < size:
            try:
                more = self.socket.recv(1 << 18)
            except ConnectionResetError:
                more = b""
            if not more:
                assert not self._data, "the connection ended inside a packet"
                return False
            self._data += more
        return True

    def next(self) -> Packet:
        packet = self.receive()
        assert packet is not None, "the node closed the connection"
        return packet

    def expect(self, raw: bytes) -> None:
        """The next packet has exactly these bytes."""
        assert self.next().raw.hex() == raw.hex()

    def is_closed(self) -> bool:
        """Whether nothing but the end comes."""
        return self.receive() is None

    def ask(self, request: bytes) -> Packet:
        self.send(request)
        return self.next()

    def is_silent(self) -> bool:
        """Whether nothing was sent before the answer to a no-op."""
        answer = self.ask(packet(0x80, 0x0A, opaque=0xFFFF_FFFE))
        return answer.magic == 0x81 and answer.opcode == 0x0A and answer.opaque == 0xFFFF_FFFE

    def stats(self, group: str) -> dict[str, str]:
        self.send(packet(0x80, 0x10, key=group.encode()))
        figures: dict[str, str] = {}
        while (answer := self.next()).key_length:
            figures[answer.key.decode()] = answer.value.decode()
        assert answer.half == 0
        return figures


def until(condition: Callable[..., Any], what: str = "it") -> None:
    """Wait for something to become true; the limit only ends a broken run."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)


# UPR: both drafts by one reader


@dataclass
class Upr:
    """What a draft's packets look like from outside."""

    name: str

    def request(  # noqa: PLR0917
        self,
        vbucket: int,
        start: int = 0,
        uuid: int = 0,
        end: int = NEVER,
        group: bytes = b"g",
        opaque: int = 7,
    ) -> bytes:
        resume = struct.pack(">QQQQ", start, end, uuid, 0)
        if self.name == "upr-a":
            return packet(0x80, 0x01, resume, group, half=vbucket, opaque=opaque, byte_5=1)
        return packet(0x80, 0x50, bytes(8) + resume, group, half=vbucket, opaque=opaque)

    def log_request(self, vbucket: int, opaque: int = 9) -> bytes:
        if self.name == "upr-a":
            return packet(0x80, 0x01, half=vbucket, opaque=opaque, byte_5=2)
        return packet(0x80, 0x51, half=vbucket, opaque=opaque)

    def word(self, received: Packet) -> str:
        """What a packet is."""
        if self.name == "upr-a":
            assert received.magic == 0x81
            names = {
                (2, 1): "ok",
                (2, 2): "log" if received.body else "not-my-vbucket",
                (2, 3): "rollback",
                (3, 0): "begin",
                (4, 1): "start",
                (4, 2): "end",
                (4, 3): "mutation",
                (4, 4): "deletion",
                (4, 5): "expiration",
                (4, 6): "flush",
                (5, 1): "over-ok",
                (5, 2): "over-state",
            }
            return names[received.opcode, received.byte_5]
        if received.magic == 0x81:
            status = {0: "ok", 0x23: "rollback", 0x07: "not-my-vbucket"}.get(
                received.half, hex(received.half)
            )
            return "log" if received.opcode == 0x51 and status == "ok" else status
        assert received.magic == 0x80
        if received.opcode == 0x53:
            return {0: "over-ok", 1: "over-state"}[int.from_bytes(received.extras, "big")]
        words = ["begin", "", "start", "end", "mutation", "deletion", "expiration", "flush", "state"]
        return words[received.opcode - 0x52]


@dataclass
class UprReader:
    """Keeps a map of one vbucket in a draft: documents, their metadata, positions; checks the rules."""

    draft: Upr
    vbucket: int
    documents: dict[bytes, tuple[Any, ...]] = field(default_factory=dict)
    committed: int = 0
    words: list[str] = field(default_factory=list)
    _inside: bool = False
    _seqno: int = 0

    def take(self, received: Packet) -> str:
        word = self.draft.word(received)
        self.words.append(word)
        if word == "start":
            assert not self._inside
            self._inside = True
        elif word == "end":
            assert self._inside
            self._inside = False
            self.committed = self._seqno
        elif word == "flush":
            self.documents.clear()
            self._seqno = self.committed = 0
        elif word in ("mutation", "deletion", "expiration"):
            assert self._inside
            seqno, rev = struct.unpack_from(">QQ", received.body)
            assert seqno > self._seqno
            self._seqno = seqno
            if word == "mutation":
                assert received.extras_length == 28
                flags, expiry, lock = struct.unpack_from(">III", received.body, 16)
                assert lock == 0
                self.documents[received.key] = (received.value, received.cas, rev, flags, expiry)
            else:
                assert received.extras_length == (28 if self.draft.name == "upr-a" else 16)
                assert not received.value
                self.documents.pop(received.key, None)
        return word

    def read(self, peer: Peer, until_word: str) -> None:
        while self.take(peer.next()) != until_word:
            pass

    def read_to(self, peer: Peer, seqno: int) -> None:
        """Read up to the end of the snapshot that holds this seqno."""
        while self.committed < seqno:
            self.take(peer.next())


# TAP

BACKFILL, DUMP, LIST, TAKEOVER, ACK = 0x01, 0x02, 0x04, 0x08, 0x10
KEYS_ONLY, CHECKPOINT, REGISTERED, FIX_BYTEORDER = 0x20, 0x40, 0x80, 0x100
FROM_NOW = struct.pack(">Q", NEVER)

TAP_WORDS = {
    0x0A: "noop",
    0x41: "mutation",
    0x42: "delete",
    0x43: "flush",
    0x44: "opaque",
    0x45: "state",
    0x46: "checkpoint-start",
    0x47: "checkpoint-end",
}


def tap_connect(name: bytes = b"", flags: int | None = None, value: bytes = b"", opaque: int = 0) -> bytes:
    extras = b"" if flags is None else flags.to_bytes(4, "big")
    return packet(0x80, 0x40, extras, name, value, opaque=opaque)


def vbucket_list(*numbers: int) -> bytes:
    return struct.pack(f">H{len(numbers)}H", len(numbers), *numbers)


def tap_push(  # noqa: PLR0917
    opcode: int,
    vbucket: int,
    key: bytes = b"",
    value: bytes = b"",
    private: bytes = b"",
    item: tuple[int, int] | None = None,
    flags: int = 1,
    ttl: int = 255,
    opaque: int = 1,
    cas: int = 0,
    datatype: int = 0,
) -> bytes:
    """A producer's message; ``item`` is (flags, expiry)."""
    extras = struct.pack(">HHB3x", len(private), flags, ttl)
    if item is not None:
        extras += struct.pack(">II", *item)
    body = extras + private + key + value
    return HEADER.pack(0x80, opcode, len(key), len(extras), datatype, vbucket, len(body), opaque, cas) + body


def mutation(key: bytes, value: bytes, rev: int, cas: int, vbucket: int = 0, **more: Any) -> bytes:
    private = struct.pack(">QB", rev, 0)
    return tap_push(0x41, vbucket, key, value, private, more.pop("item", (0, 0)), cas=cas, **more)


def delete(key: bytes, rev: int, cas: int, vbucket: int = 0, **more: Any) -> bytes:
    return tap_push(0x42, vbucket, key, private=struct.pack(">Q", rev), cas=cas, **more)


@dataclass
class TapReader:
    """Keeps a map of every vbucket, acknowledges what asks for it, and checks the rules of the stream."""

    peer: Peer
    acks: bool = True
    documents: dict[int, dict[bytes, tuple[Any, ...]]] = field(default_factory=dict)
    log: list[Packet] = field(default_factory=list)
    checkpoints: dict[int, int] = field(default_factory=dict)  # last closed
    number: int | None = None
    check_ttl: bool = True
    _words: list[str] = field(default_factory=list, repr=False)

    def connect(self, name: bytes = b"", flags: int | None = None, value: bytes = b"") -> TapReader:
        self.peer.send(tap_connect(name, flags, value))
        self.supports_ack = bool((flags or 0) & ACK)
        return self

    def take(self) -> Packet | None:
        packet = self.peer.receive()
        if packet is not None:
            self._take(packet)
        return packet

    def next(self) -> Packet:
        packet = self.take()
        assert packet is not None, "the node closed the connection"
        return packet

    def _take(self, received: Packet) -> None:
        assert received.magic == 0x80, received
        word = TAP_WORDS[received.opcode]
        self.log.append(received)
        if word == "noop":
            assert (received.opaque, received.body) == (0, b"")
            return
        assert (received.ttl == 255 or not self.check_ttl) and received.body[5:8] == bytes(3)
        if self.number is None:
            assert received.opaque >= 1
        else:
            assert received.opaque == self.number % 0xFFFF_FFFF + 1
        self.number = received.opaque
        held = self.documents.setdefault(received.half, {})
        if word == "mutation":
            assert received.extras_length == 16 and len(received.private) == 9
            flags, expiry = struct.unpack_from(">II", received.body, 8)
            rev = int.from_bytes(received.private[:8], "big")
            held[received.tap_key] = (received.tap_value, received.cas, rev, flags, expiry)
        elif word == "delete":
            assert received.extras_length == 8 and len(received.private) == 8 and not received.tap_value
            held.pop(received.tap_key, None)
        elif word == "flush":
            self.documents.clear()
        elif word == "opaque" and received.code == 1:
            held.clear()
        elif word == "checkpoint-end":
            self.checkpoints[received.half] = int.from_bytes(received.body[-8:], "big")
        asks = bool(received.tap_flags & 1)
        if not self.supports_ack:
            assert not asks
        elif word in ("opaque", "state", "checkpoint-start", "checkpoint-end"):
            assert asks
        if asks and self.acks:
            self.ack(received)

    def ack(self, received: Packet, status: int = 0) -> None:
        self.peer.send(packet(0x81, received.opcode, half=status, opaque=received.opaque))

    def words(self) -> list[str]:
        """What came, with codes and states."""
        for packet in self.log[len(self._words) :]:
            word = TAP_WORDS[packet.opcode]
            self._words.append(f"{word} {packet.code}" if word in ("opaque", "state") else word)
        return self._words

    def read(self, word: str, vbucket: int | None = None) -> Packet:
        """Read up to a message (of a vbucket)."""
        while True:
            packet = self.next()
            if self.words()[-1] == word and vbucket in (None, packet.half):
                return packet

    def read_until(self, condition: Callable[..., Any]) -> None:
        while not condition():
            self.next()

    def read_all(self) -> None:
        """Read up to the end of the connection."""
        while self.take() is not None:
            pass
