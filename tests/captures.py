"""Writes captures as tcpdump does, for tests: packets of a TCP conversation, for any link and file form."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["LINKS", "Talk", "pcap_file", "pcapng_file", "tcp_packet"]

CLIENT, SERVER = 0, 1
FIN, SYN, RST, ACK = 0x01, 0x02, 0x04, 0x10


def tcp_packet(
    source: tuple[str, int],
    destination: tuple[str, int],
    seq: int,
    data: bytes = b"",
    flags: int = ACK,
    *,
    extension: bytes = b"",
) -> bytes:
    """An IP packet; addresses are dotted IPv4 or 32 hex digits of IPv6."""
    tcp = struct.pack(">HHIIBBHHH", source[1], destination[1], seq % 2**32, 0, 0x60, flags, 0xFFFF, 0, 0)
    tcp += b"\x01\x01\x01\x00" + data  # one word of options
    if "." in source[0]:
        addresses = b"".join(bytes(map(int, host.split("."))) for host in (source[0], destination[0]))
        total = 24 + len(tcp)
        header = struct.pack(">BBHHHBBH", 0x46, 0, total, 0, 0x4000, 64, 6, 0) + addresses + b"\x01" * 4
        return header + tcp
    addresses = bytes.fromhex(source[0]) + bytes.fromhex(destination[0])
    kind = extension[0] if extension else 6
    payload = extension[1:] + tcp
    return struct.pack(">IHBB", 6 << 28, len(payload), kind, 64) + addresses + payload


def _ethertype(packet: bytes) -> bytes:
    return b"\x86\xdd" if packet[0] >> 4 == 6 else b"\x08\x00"


LINKS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    # name: (link type, wrap)
    "ethernet": (1, lambda p: bytes(12) + _ethertype(p) + p + bytes(max(0, 46 - len(p)))),
    "vlan": (1, lambda p: bytes(12) + b"\x81\x00\x00\x07" + _ethertype(p) + p),
    "qinq": (1, lambda p: bytes(12) + b"\x88\xa8\x00\x01\x81\x00\x00\x07" + _ethertype(p) + p),
    "sll": (113, lambda p: bytes(14) + _ethertype(p) + p),
    "sll2": (276, lambda p: _ethertype(p) + bytes(18) + p),
    "null": (0, lambda p: struct.pack("<I", 2 if p[0] >> 4 == 4 else 24) + p),
    "loop": (108, lambda p: struct.pack(">I", 2 if p[0] >> 4 == 4 else 24) + p),
    "raw": (101, lambda p: p),
    "raw 12": (12, lambda p: p),
}


def pcap_file(
    packets: list[bytes], link_type: int = 1, *, order: str = "<", nanoseconds: bool = False
) -> bytes:
    """A libpcap file; packet n was captured n seconds and half of one after 2023-11-14 22:13:20 UTC."""
    magic = 0xA1B23C4D if nanoseconds else 0xA1B2C3D4
    out = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262144, link_type)
    for at, packet in enumerate(packets):
        fraction = 500_000_000 if nanoseconds else 500_000
        out += struct.pack(order + "IIII", 1_700_000_000 + at, fraction, len(packet), len(packet)) + packet
    return out


def _block(order: str, kind: int, body: bytes) -> bytes:
    body += bytes(-len(body) % 4)
    length = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + length + body + length


def pcapng_file(
    packets: list[bytes], link_type: int = 1, *, order: str = "<", kind: int = 6, resolution: int = 6
) -> bytes:
    """A pcapng file with the same times; ``kind`` 6 is an enhanced packet, 3 a simple and 2 an old one."""
    out = _block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    options = struct.pack(order + "HHBxxx", 9, 1, resolution) + struct.pack(order + "HH", 0, 0)
    out += _block(order, 1, struct.pack(order + "HHI", link_type, 0, 0) + options)
    out += _block(order, 5, bytes(12))  # statistics, which are ignored
    for at, packet in enumerate(packets):
        if kind == 3:
            body = struct.pack(order + "I", len(packet)) + packet
        else:
            ticks = (1_700_000_000 * 10 + at * 10 + 5) * 10 ** (resolution - 1)
            number = struct.pack(order + "I", 0) if kind == 6 else struct.pack(order + "HH", 0, 0)
            sizes = struct.pack(order + "IIII", ticks >> 32, ticks & 0xFFFFFFFF, len(packet), len(packet))
            body = number + sizes + packet
        out += _block(order, kind, body)
    return out


@dataclass
class Talk:
    """A TCP conversation, recorded packet by packet."""

    client: tuple[str, int] = ("127.0.0.1", 40112)
    server: tuple[str, int] = ("127.0.0.1", 11210)
    seqs: list[int] = field(default_factory=lambda: [1000, 9000])
    packets: list[bytes] = field(default_factory=list)

    def _ends(self, side: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return (self.client, self.server) if side == CLIENT else (self.server, self.client)

    def open(self) -> Talk:
        """The three-way handshake."""
        for side, flags in ((CLIENT, SYN), (SERVER, SYN | ACK)):
            self.packets.append(tcp_packet(*self._ends(side), self.seqs[side], flags=flags))
            self.seqs[side] += 1
        self.packets.append(tcp_packet(*self._ends(CLIENT), self.seqs[CLIENT]))
        return self

    def send(self, side: int, data: bytes, size: int = 1460) -> Talk:
        """Bytes in segments."""
        for at in range(0, len(data), size):
            self.packets.append(tcp_packet(*self._ends(side), self.seqs[side], data[at : at + size]))
            self.seqs[side] += len(data[at : at + size])
        return self

    def close(self) -> Talk:
        """Both sides close."""
        for side in (CLIENT, SERVER):
            self.packets.append(tcp_packet(*self._ends(side), self.seqs[side], flags=FIN | ACK))
            self.seqs[side] += 1
        self.packets.append(tcp_packet(*self._ends(CLIENT), self.seqs[CLIENT]))
        return self

    def wrapped(self, link: str = "ethernet") -> tuple[list[bytes], int]:
        """The packets in a link, and the link's type."""
        link_type, wrap = LINKS[link]
        return [wrap(packet) for packet in self.packets], link_type
