"""Captures: libpcap and pcapng files, down to the byte streams of their TCP conversations.

Both byte orders, micro- and nanoseconds; Ethernet with VLAN tags, Linux cooked (SLL, SLL2), loopback and raw
IP; IPv4 and IPv6. A TCP stream is reassembled from segments that come late, twice or overlapping; a repeated
byte is assumed to be the same. What was not captured is a `Gap`.

Everything has a limit: the size of a block, the number of conversations, and what waits for missing bytes.
"""

from __future__ import annotations

import ipaddress
import struct
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from .errors import InputError

__all__ = [
    "MAGICS",
    "CapturedBytes",
    "ConversationEnded",
    "Endpoint",
    "Gap",
    "Packet",
    "TcpStreams",
    "is_capture",
    "packets",
]

MAX_BLOCK = 16 << 20
MAX_INTERFACES = 1024
MAX_CONVERSATIONS = 10_000
MAX_ENDED = 1000
"""Conversations that are over but kept for late segments."""
MAX_WAITING = 8 << 20
"""Bytes of one direction that may wait for a missing segment; beyond that it counts as lost."""
MAX_WAITING_SEGMENTS = 4096
MAX_WAITING_IN_ALL = 256 << 20

_LITTLE, _BIG = "<", ">"
_PCAP_MAGICS = {
    b"\xd4\xc3\xb2\xa1": (_LITTLE, 1000),
    b"\xa1\xb2\xc3\xd4": (_BIG, 1000),
    b"\x4d\x3c\xb2\xa1": (_LITTLE, 1),
    b"\xa1\xb2\x3c\x4d": (_BIG, 1),
}
_PCAPNG_MAGIC = b"\x0a\x0d\x0d\x0a"
MAGICS = frozenset({*_PCAP_MAGICS, _PCAPNG_MAGIC})


def is_capture(head: bytes) -> bool:
    """Whether a file with these first four bytes is a capture."""
    return head[:4] in MAGICS


# files


@dataclass(frozen=True, slots=True)
class Packet:
    """One captured packet."""

    time_ns: int
    link_type: int
    data: bytes


def packets(file: IO[bytes], magic: bytes = b"") -> Iterator[Packet]:
    """The packets of a capture, in its order; `InputError` after the last good one if the file is damaged.

    ``magic`` is the file's first four bytes, if they have been read already.
    """
    magic = magic or _exactly(file, 4)
    if magic == _PCAPNG_MAGIC:
        return _pcapng(file)
    if magic in _PCAP_MAGICS:
        return _pcap(file, *_PCAP_MAGICS[magic])
    raise InputError("this is not a capture, files that tcpdump or Wireshark write begin differently")


def _pcap(file: IO[bytes], order: str, unit_ns: int) -> Iterator[Packet]:
    header = struct.Struct(order + "HHiIII")
    record = struct.Struct(order + "IIII")
    link_type = header.unpack(_exactly(file, header.size))[5] & 0xFFFF  # above: the size of a checksum
    while head := file.read(record.size):
        if len(head) < record.size:
            raise _cut_off()
        seconds, fraction, captured, _original = record.unpack(head)
        if captured > MAX_BLOCK:
            raise InputError(f"the capture has a packet of {captured} bytes, it must be damaged")
        yield Packet(seconds * 10**9 + fraction * unit_ns, link_type, _exactly(file, captured))


@dataclass(slots=True)
class _Interface:
    link_type: int
    snap_length: int
    ticks_per_s: int = 10**6
    offset_s: int = 0

    def time_ns(self, high: int, low: int) -> int:
        ticks = high << 32 | low
        return self.offset_s * 10**9 + ticks * 10**9 // self.ticks_per_s


_SECTION, _INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _ENHANCED_PACKET = 0x0A0D0D0A, 1, 2, 3, 6


def _pcapng(file: IO[bytes]) -> Iterator[Packet]:
    order = _LITTLE
    interfaces: list[_Interface] = []
    kind_bytes = _PCAPNG_MAGIC  # the caller has read it
    while kind_bytes:
        if len(kind_bytes) < 4:
            raise _cut_off()
        if kind_bytes == _PCAPNG_MAGIC:
            length_bytes, order_bytes = _exactly(file, 4), _exactly(file, 4)
            if order_bytes not in (b"\x4d\x3c\x2b\x1a", b"\x1a\x2b\x3c\x4d"):
                raise InputError("the capture has a section without a byte order, it must be damaged")
            order = _LITTLE if order_bytes[0] == 0x4D else _BIG
            interfaces = []
            _block_body(file, order, length_bytes, already=4)
        else:
            (kind,) = struct.unpack(order + "I", kind_bytes)
            body = _block_body(file, order, _exactly(file, 4))
            if kind == _INTERFACE:
                if len(interfaces) >= MAX_INTERFACES:
                    raise InputError(f"the capture has more than {MAX_INTERFACES} interfaces")
                interfaces.append(_interface(order, body))
            elif packet := _packet(order, kind, body, interfaces):
                yield packet
        kind_bytes = file.read(4)


def _block_body(file: IO[bytes], order: str, length_bytes: bytes, already: int = 0) -> bytes:
    """What is between a block's two lengths, without the bytes already read."""
    (length,) = struct.unpack(order + "I", length_bytes)
    if not 12 + already <= length <= MAX_BLOCK or length % 4:
        raise InputError(f"the capture has a block of {length} bytes, it must be damaged")
    body = _exactly(file, length - 12 - already)
    if _exactly(file, 4) != length_bytes:
        raise InputError("the capture has a block whose two lengths differ, it must be damaged")
    return body


def _interface(order: str, body: bytes) -> _Interface:
    if len(body) < 8:
        raise _damaged("an interface")
    link_type, snap_length = struct.unpack_from(order + "HxxI", body)
    interface = _Interface(link_type, snap_length)
    at = 8
    while at + 4 <= len(body):
        code, length = struct.unpack_from(order + "HH", body, at)
        value = body[at + 4 : at + 4 + length]
        if code == 9 and length == 1:  # if_tsresol: a power of 10, or of 2 if the high bit is set
            base, exponent = (2, value[0] & 0x7F) if value[0] & 0x80 else (10, value[0])
            if exponent > 30:
                raise _damaged("an interface")
            interface.ticks_per_s = base**exponent
        elif code == 14 and length == 8:  # if_tsoffset
            (interface.offset_s,) = struct.unpack(order + "q", value)
        elif code == 0:
            break
        at += 4 + length + -length % 4
    return interface


def _packet(order: str, kind: int, body: bytes, interfaces: list[_Interface]) -> Packet | None:
    """The packet in a block, if it has one."""
    number = high = low = 0
    if kind in (_ENHANCED_PACKET, _OLD_PACKET):
        if len(body) < 20:
            raise _damaged("a packet")
        number, high, low, captured = struct.unpack_from(order + "IIII", body)
        if kind == _OLD_PACKET:
            (number,) = struct.unpack_from(order + "H", body)
        at = 20
    elif kind == _SIMPLE_PACKET:
        if len(body) < 4:
            raise _damaged("a packet")
        (captured,) = struct.unpack_from(order + "I", body)
        at = 4
    else:
        return None
    if number >= len(interfaces):
        raise _damaged("a packet of an unknown interface")
    interface = interfaces[number]
    if kind == _SIMPLE_PACKET and interface.snap_length:
        captured = min(captured, interface.snap_length)
    if at + captured > len(body):
        raise _damaged("a packet")
    return Packet(interface.time_ns(high, low), interface.link_type, body[at : at + captured])


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise _cut_off()
    return data


def _cut_off() -> InputError:
    return InputError("the capture ends inside a packet, it was cut off")


def _damaged(what: str) -> InputError:
    return InputError(f"the capture has {what} that is too short or impossible, it must be damaged")


# from the link to TCP

_IPV4, _IPV6 = 0x0800, 0x86DD
_VLAN = frozenset({0x8100, 0x88A8, 0x9100})
_NULL, _ETHERNET, _RAW, _LOOP, _SLL, _IPV4_ONLY, _IPV6_ONLY, _SLL2 = 0, 1, 101, 108, 113, 228, 229, 276
_RAW_TOO = (12, 14)  # what some systems use for raw IP
_TCP = 6
_EXTENSIONS = frozenset({0, 43, 60})
_FRAGMENT, _AUTHENTICATION = 44, 51
_FIN, _SYN, _RST, _ACK = 0x01, 0x02, 0x04, 0x10


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One side of a conversation."""

    address: bytes
    port: int

    def __str__(self) -> str:
        host = str(ipaddress.ip_address(self.address))
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Segment:
    source: Endpoint
    destination: Endpoint
    seq: int
    flags: int
    data: bytes


class _UnknownLink(Exception):
    """A link type that is not supported."""


def _network(packet: Packet) -> bytes:
    """The IP packet in a link-layer packet; empty if there is none."""
    data, link_type = packet.data, packet.link_type
    if link_type in (_RAW, _IPV4_ONLY, _IPV6_ONLY, *_RAW_TOO):
        return data
    if link_type in (_NULL, _LOOP):
        return data[4:]  # the address family; IP's own version says the same
    if link_type == _SLL:
        at, kind = 16, data[14:16]
    elif link_type == _SLL2:
        at, kind = 20, data[0:2]
    elif link_type == _ETHERNET:
        at, kind = 14, data[12:14]
    else:
        raise _UnknownLink
    while int.from_bytes(kind, "big") in _VLAN:
        at, kind = at + 4, data[at + 2 : at + 4]
    return data[at:] if int.from_bytes(kind, "big") in (_IPV4, _IPV6) else b""


def _transport(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Source, destination and TCP segment of an IP packet; None for anything else, and for fragments."""
    version = data[0] >> 4 if data else 0
    if version == 4 and len(data) >= 20:
        header = (data[0] & 0x0F) * 4
        total = int.from_bytes(data[2:4], "big") or len(data)  # 0: segmented by the network card
        if data[9] != _TCP or header < 20 or int.from_bytes(data[6:8], "big") & 0x3FFF:
            return None
        return data[12:16], data[16:20], data[header:total]
    if version == 6 and len(data) >= 40:
        kind, at = data[6], 40
        length = int.from_bytes(data[4:6], "big")
        end = 40 + length if length else len(data)
        while kind != _TCP:
            if at + 8 > len(data):
                return None
            if kind in _EXTENSIONS:
                kind, at = data[at], at + 8 + data[at + 1] * 8
            elif kind == _AUTHENTICATION:
                kind, at = data[at], at + 8 + data[at + 1] * 4
            elif kind == _FRAGMENT and not int.from_bytes(data[at + 2 : at + 4], "big") & 0xFFF9:
                kind, at = data[at], at + 8  # the only fragment of its packet
            else:
                return None
        return data[8:24], data[24:40], data[at:end]
    return None


def _segment(packet: Packet) -> _Segment | None:
    carried = _transport(_network(packet))
    if carried is None:
        return None
    source, destination, tcp = carried
    if len(tcp) < 20:
        return None
    source_port, destination_port, seq = struct.unpack_from(">HHI", tcp)
    header = (tcp[12] >> 4) * 4
    if header < 20:
        return None
    return _Segment(
        Endpoint(source, source_port),
        Endpoint(destination, destination_port),
        seq,
        tcp[13],
        tcp[header:],
    )


# TCP


@dataclass(frozen=True, slots=True)
class CapturedBytes:
    """The next bytes of one direction of a conversation."""

    conversation: int
    source: Endpoint
    destination: Endpoint
    from_client: bool | None
    """None if the capture lacks the start of the conversation."""
    from_start: bool
    """Whether the stream was captured from its first byte."""
    time_ns: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a direction that were not captured."""

    conversation: int
    source: Endpoint
    size: int


@dataclass(frozen=True, slots=True)
class ConversationEnded:
    """Nothing more will come of a conversation. Not emitted for those still open at the capture's end."""

    conversation: int


@dataclass(slots=True)
class _Side:
    """One direction: which byte is next, and what came too early."""

    next: int | None = None
    """Position of the next byte; positions are sequence numbers that don't wrap."""
    first: int | None = None
    """Position of the first byte."""
    from_start: bool = False
    waiting: list[tuple[int, bytes]] = field(default_factory=list)
    waiting_bytes: int = 0
    end: int | None = None
    """Position after the last byte, once the sender's FIN is seen."""

    def start(self, seq: int, *, from_start: bool) -> None:
        self.first = self.next = (1 << 32) + seq
        self.from_start = from_start

    def position(self, seq: int) -> int:
        """The position of a sequence number: within 2 GiB before or after the next byte."""
        assert self.next is not None
        ahead = (seq - self.next) & 0xFFFF_FFFF
        return self.next + (ahead - (1 << 32) if ahead >= 1 << 31 else ahead)

    def has_come_to(self, seq: int) -> bool:
        """Whether a segment that begins there repeats what was sent, or directly follows it."""
        return (
            self.first is not None and self.next is not None and self.first <= self.position(seq) <= self.next
        )

    def take(self, seq: int, data: bytes) -> None:
        """Keep bytes until their turn."""
        at = self.position(seq)
        assert self.next is not None
        if at + len(data) > self.next:
            insort(self.waiting, (at, data), key=lambda waiting: waiting[0])
            self.waiting_bytes += len(data)

    def ready(self) -> bytes:
        """All bytes whose turn has come."""
        assert self.next is not None
        out = bytearray()
        used = 0
        for at, data in self.waiting:
            if at > self.next:
                break
            used += 1
            self.waiting_bytes -= len(data)
            if at + len(data) > self.next:
                out += data[self.next - at :]
                self.next = at + len(data)
        del self.waiting[:used]
        return bytes(out)

    def skip_gap(self) -> int:
        """Give up the missing bytes before the first that wait; returns how many."""
        assert self.next is not None
        size = self.waiting[0][0] - self.next
        self.next = self.waiting[0][0]
        return size

    @property
    def is_over(self) -> bool:
        """Whether everything up to the sender's FIN is there."""
        return self.end is not None and self.next is not None and self.next >= self.end

    @property
    def is_full(self) -> bool:
        return self.waiting_bytes > MAX_WAITING or len(self.waiting) > MAX_WAITING_SEGMENTS


@dataclass(slots=True)
class _Conversation:
    number: int
    client: Endpoint | None
    sides: dict[Endpoint, _Side]
    syn: int | None = None


class TcpStreams:
    """Reassembles the TCP conversations of a capture."""

    def __init__(self, port: int | None = None) -> None:
        self._port = port
        self._open: dict[frozenset[Endpoint], _Conversation] = {}
        self._over: dict[frozenset[Endpoint], _Conversation] = {}  # the newest that have ended
        self._time_ns = 0
        self._count = 0
        self._waiting_bytes = 0
        self.unknown_links: set[int] = set()
        """Link types whose packets were skipped."""

    def feed(self, packet: Packet) -> Iterator[CapturedBytes | Gap | ConversationEnded]:
        """What a packet adds to its conversation."""
        try:
            segment = _segment(packet)
        except _UnknownLink:
            self.unknown_links.add(packet.link_type)
            return
        if segment is None or self._port not in (None, segment.source.port, segment.destination.port):
            return
        key = frozenset((segment.source, segment.destination))
        self._time_ns = packet.time_ns
        if key not in self._open and not segment.flags & _SYN:
            if not segment.data:
                return  # the last acks of a conversation that is over
            ended = self._over.get(key)
            if ended is not None and ended.sides[segment.source].has_come_to(segment.seq):
                yield from self._add(ended, ended.sides[segment.source], segment, packet.time_ns)
                return
        before = self._open.get(key) or self._over.pop(key, None)
        conversation = self._conversation(key, segment)
        if before is not None and before is not conversation:  # the ports are used again
            yield from self._finish(before, packet.time_ns)
            yield ConversationEnded(before.number)
        side = conversation.sides[segment.source]
        waited = side.waiting_bytes
        yield from self._add(conversation, side, segment, packet.time_ns)
        self._waiting_bytes += side.waiting_bytes - waited
        if self._waiting_bytes > MAX_WAITING_IN_ALL:
            raise InputError("too many segments of the capture are missing, choose a --port")
        if segment.flags & _RST or all(direction.is_over for direction in conversation.sides.values()):
            yield from self._finish(conversation, packet.time_ns)
            self._over[key] = self._open.pop(key)
            if len(self._over) > MAX_ENDED:
                yield ConversationEnded(self._over.pop(next(iter(self._over))).number)

    def _add(
        self, conversation: _Conversation, side: _Side, segment: _Segment, time_ns: int
    ) -> Iterator[CapturedBytes | Gap]:
        seq, data = segment.seq, segment.data
        if segment.flags & _SYN:
            if side.next is None:
                side.start(seq + 1, from_start=True)
            seq = (seq + 1) & 0xFFFF_FFFF
        elif side.next is None:
            if not data:
                return
            side.start(seq, from_start=False)
        if segment.flags & _FIN:
            side.end = side.position(seq) + len(data)
        if data:
            side.take(seq, data)
        if ready := side.ready():
            yield _bytes(conversation, segment.source, time_ns, ready)
        while side.is_full:
            yield Gap(conversation.number, segment.source, side.skip_gap())
            yield _bytes(conversation, segment.source, time_ns, side.ready())

    def finish(self) -> Iterator[CapturedBytes | Gap]:
        """What is left at the capture's end: bytes after gaps that nothing has filled."""
        for conversation in self._open.values():
            yield from self._finish(conversation, self._time_ns)
        self._open.clear()

    def _conversation(self, key: frozenset[Endpoint], segment: _Segment) -> _Conversation:
        conversation = self._open.get(key)
        begins = segment.flags & (_SYN | _ACK) == _SYN
        if conversation is not None and not (begins and conversation.syn not in (None, segment.seq)):
            if begins and conversation.client is None:
                conversation.client, conversation.syn = segment.source, segment.seq
            return conversation
        if conversation is None and len(self._open) >= MAX_CONVERSATIONS:
            raise InputError(f"the capture has more than {MAX_CONVERSATIONS} conversations, choose a --port")
        self._count += 1
        begun = _Conversation(
            self._count,
            self._client(segment),
            {segment.source: _Side(), segment.destination: _Side()},
            segment.seq if begins else None,
        )
        self._open[key] = begun
        return begun

    def _client(self, segment: _Segment) -> Endpoint | None:
        """The endpoint that opened the conversation, if the segment tells."""
        if segment.flags & _SYN:
            return segment.destination if segment.flags & _ACK else segment.source
        if self._port is not None and segment.source.port != segment.destination.port:
            return segment.source if segment.destination.port == self._port else segment.destination
        return None

    def _finish(self, conversation: _Conversation, time_ns: int) -> Iterator[CapturedBytes | Gap]:
        for source, side in conversation.sides.items():
            self._waiting_bytes -= side.waiting_bytes
            while side.waiting:
                yield Gap(conversation.number, source, side.skip_gap())
                yield _bytes(conversation, source, time_ns, side.ready())


def _bytes(conversation: _Conversation, source: Endpoint, time_ns: int, data: bytes) -> CapturedBytes:
    (destination,) = set(conversation.sides) - {source} or {source}
    return CapturedBytes(
        conversation.number,
        source,
        destination,
        None if conversation.client is None else conversation.client == source,
        conversation.sides[source].from_start,
        time_ns,
        data,
    )
