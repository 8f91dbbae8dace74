"""A plain socket that speaks in packets, and readers of each dialect built on it with `struct` only.

Nothing here uses the package's own wire code, so that a mistake in it can't hide on both sides.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field

HEADER = struct.Struct(">BBHBBHIIQ")
NEVER = 2**64 - 1
TIMEOUT_S = 30.0


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

    def __init__(self, node, *, receive_buffer: int | None = None) -> None:
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
        found = self.receive()
        assert found is not None, "the node closed the connection"
        return found

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
        """Nothing has come that was sent before the answer to a no-op."""
        answer = self.ask(packet(0x80, 0x0A, opaque=0xFFFF_FFFE))
        return answer.magic == 0x81 and answer.opcode == 0x0A and answer.opaque == 0xFFFF_FFFE

    def stats(self, group: str) -> dict[str, str]:
        self.send(packet(0x80, 0x10, key=group.encode()))
        found: dict[str, str] = {}
        while (answer := self.next()).key_length:
            found[answer.key.decode()] = answer.value.decode()
        assert answer.half == 0
        return found


def until(condition, what: str = "it") -> None:
    """Wait for something that must become true; the limit only ends a broken run."""
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

    def word(self, found: Packet) -> str:
        """What a packet is."""
        if self.name == "upr-a":
            assert found.magic == 0x81
            names = {
                (2, 1): "ok",
                (2, 2): "log" if found.body else "not-my-vbucket",
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
            return names[found.opcode, found.byte_5]
        if found.magic == 0x81:
            status = {0: "ok", 0x23: "rollback", 0x07: "not-my-vbucket"}.get(found.half, hex(found.half))
            return "log" if found.opcode == 0x51 and status == "ok" else status
        assert found.magic == 0x80
        if found.opcode == 0x53:
            return {0: "over-ok", 1: "over-state"}[int.from_bytes(found.extras, "big")]
        names = ["begin", "", "start", "end", "mutation", "deletion", "expiration", "flush", "state"]
        return names[found.opcode - 0x52]


@dataclass
class UprReader:
    """Keeps a map of one vbucket by a draft: documents with their metadata, positions, and the rules."""

    draft: Upr
    vbucket: int
    documents: dict[bytes, tuple] = field(default_factory=dict)
    committed: int = 0
    words: list[str] = field(default_factory=list)
    _inside: bool = False
    _seqno: int = 0

    def take(self, found: Packet) -> str:
        word = self.draft.word(found)
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
            seqno, rev = struct.unpack_from(">QQ", found.body)
            assert seqno > self._seqno
            self._seqno = seqno
            if word == "mutation":
                assert found.extras_length == 28
                flags, expiry, lock = struct.unpack_from(">III", found.body, 16)
                assert lock == 0
                self.documents[found.key] = (found.value, found.cas, rev, flags, expiry)
            else:
                assert found.extras_length == (28 if self.draft.name == "upr-a" else 16)
                assert not found.value
                self.documents.pop(found.key, None)
        return word

    def read(self, peer: Peer, until_word: str) -> None:
        while self.take(peer.next()) != until_word:
            pass

    def read_to(self, peer: Peer, seqno: int) -> None:
        """Up to the end of the snapshot that holds this seqno."""
        while self.committed < seqno:
            self.take(peer.next())
