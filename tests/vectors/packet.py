"""A second, plain reader of packets, for the tests only: it knows the header and nothing of any message."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["Packet"]

_FLEXIBLE = (0x08, 0x18)


@dataclass
class Packet:
    """The sections of a packet; `join` writes lengths that fit them."""

    magic: int
    opcode: int
    byte_5: int
    bytes_6_7: int
    opaque: int
    cas: int
    framing: bytes
    extras: bytes
    private: bytes
    key: bytes
    value: bytes

    @classmethod
    def split(cls, data: bytes, *, private: bool = False) -> Packet:
        """Cut a packet; ``private`` if TAP's engine-private section follows the extras."""
        magic, opcode, keys, extras_length, byte_5, bytes_6_7, _, opaque, cas = struct.unpack(
            ">BBHBBHIIQ", data[:24]
        )
        framing_length, key_length = (keys >> 8, keys & 0xFF) if magic in _FLEXIBLE else (0, keys)
        rest = data[24:]
        framing, rest = rest[:framing_length], rest[framing_length:]
        extras, rest = rest[:extras_length], rest[extras_length:]
        private_length = int.from_bytes(extras[:2]) if private else 0
        section, rest = rest[:private_length], rest[private_length:]
        return cls(
            magic,
            opcode,
            byte_5,
            bytes_6_7,
            opaque,
            cas,
            framing,
            extras,
            section,
            rest[:key_length],
            rest[key_length:],
        )

    def join(self) -> bytes:
        """The packet as bytes. The private length inside the extras is left as it is."""
        keys = len(self.key)
        if self.magic in _FLEXIBLE:
            keys |= len(self.framing) << 8
        body = self.framing + self.extras + self.private + self.key + self.value
        return (
            struct.pack(
                ">BBHBBHIIQ",
                self.magic,
                self.opcode,
                keys,
                len(self.extras),
                self.byte_5,
                self.bytes_6_7,
                len(body),
                self.opaque,
                self.cas,
            )
            + body
        )
