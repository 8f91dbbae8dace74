"""The 24-byte header and the frame that it begins.

offset  size  request                 response
     0     1  magic                   magic
     1     1  opcode                  opcode
     2     2  key length              key length          (flexible: 1 framing length, 1 key length)
     4     1  extras length           extras length
     5     1  datatype                datatype            (UPR draft A: subtype)
     6     2  vbucket id              status              (UPR draft A: always the vbucket id)
     8     4  total body length       total body length
    12     4  opaque                  opaque
    16     8  CAS                     CAS

body:  [framing extras] [extras] [TAP only: engine private] [key] [value]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import FrameTooLarge, FramingError, LocalProtocolError
from .codes import Magic
from .layout import layout

__all__ = [
    "HEADER",
    "HEADER_LAYOUT",
    "HEADER_SIZE",
    "MAX_FRAME",
    "MAX_FRAME_BEFORE_LOGIN",
    "MAX_NAME_BYTES",
    "Frame",
    "check_magic",
    "frame_size",
    "front_size",
]

# docs/spec/header.md#the-header
HEADER_LAYOUT = layout("""
    B magic          who speaks, and in which form
    B opcode         which message
    H key_length     of a flexible frame: a byte for the framing extras, a byte for the key
    B extras_length  bytes of the extras
    B datatype       what the value is; UPR draft A: the subtype
    H vbucket        of a response: the status
    I body_length    bytes behind the header
    I opaque         repeated in the answer
    Q cas            version of the document
""")
HEADER = HEADER_LAYOUT.struct
HEADER_SIZE = HEADER_LAYOUT.size
assert HEADER_SIZE == 24

MAX_FRAME = 30 * 1024 * 1024
"""The largest frame that is accepted by default, header included."""

MAX_FRAME_BEFORE_LOGIN = 16 * 1024
"""The largest frame that is accepted from a peer that has not logged in."""

MAX_NAME_BYTES = 200
"""The longest name that a peer may give itself or its change stream."""

_FLEXIBLE = frozenset(int(magic) for magic in Magic if magic.is_flexible)
_MAGICS = frozenset(int(magic) for magic in Magic)
_REQUESTS = frozenset(map(int, (Magic.REQUEST, Magic.FLEX_REQUEST, Magic.SERVER_REQUEST)))
_LENGTHS = HEADER_LAYOUT.only("magic", "key_length", "extras_length", "body_length").struct


@dataclass(slots=True)
class Frame:
    """A header and its body, not interpreted yet.

    ``vbucket`` is bytes 6-7 as they are: a response calls them `status`. ``body`` is everything after the
    framing extras; `extras`, `key` and `value` split it as every dialect but TAP does.
    """

    magic: int
    opcode: int
    key_length: int = 0
    extras_length: int = 0
    datatype: int = 0
    vbucket: int = 0
    opaque: int = 0
    cas: int = 0
    framing: bytes = b""
    body: bytes = b""

    @classmethod
    def parse(cls, buffer: bytes | bytearray | memoryview, offset: int = 0) -> Frame:
        """The frame that starts at ``offset``; all of it must be there (see `frame_size`)."""
        magic, opcode, keys, extras_length, datatype, vbucket, total, opaque, cas = HEADER.unpack_from(
            buffer, offset
        )
        body_at = offset + HEADER_SIZE
        end = body_at + total
        framing = b""
        if magic in _FLEXIBLE:
            framing_length, keys = keys >> 8, keys & 0xFF
            framing = bytes(buffer[body_at : body_at + framing_length])
            body_at += framing_length
        return cls(
            magic,
            opcode,
            keys,
            extras_length,
            datatype,
            vbucket,
            opaque,
            cas,
            framing,
            bytes(buffer[body_at:end]),
        )

    @property
    def status(self) -> int:
        """Bytes 6-7 of a response."""
        return self.vbucket

    @property
    def extras(self) -> bytes:
        """The extras."""
        return self.body[: self.extras_length]

    @property
    def key(self) -> bytes:
        """The key, where nothing lies between extras and key."""
        return self.body[self.extras_length : self.extras_length + self.key_length]

    @property
    def value(self) -> bytes:
        """The rest of the body, after extras and key."""
        return self.body[self.extras_length + self.key_length :]

    @property
    def is_request(self) -> bool:
        """Whether the magic is one of the three of requests."""
        return self.magic in _REQUESTS

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return HEADER_SIZE + len(self.framing) + len(self.body)

    def encode(self) -> bytes:
        """The frame as bytes; the opposite of `parse`."""
        keys = self.key_length
        if self.magic in _FLEXIBLE:
            if len(self.framing) > 0xFF or keys > 0xFF:
                raise LocalProtocolError(
                    "framing extras and key of a flexible frame hold up to 255 bytes each"
                )
            keys |= len(self.framing) << 8
        elif self.framing:
            raise LocalProtocolError(f"magic 0x{self.magic:02x} has no room for framing extras")
        if self.extras_length + self.key_length > len(self.body):
            raise LocalProtocolError("extras and key are longer than the body")
        total = len(self.framing) + len(self.body)
        try:
            header = HEADER.pack(
                self.magic,
                self.opcode,
                keys,
                self.extras_length,
                self.datatype,
                self.vbucket,
                total,
                self.opaque,
                self.cas,
            )
        except struct.error as error:
            raise LocalProtocolError(f"a header field does not fit: {error}") from None
        return header + self.framing + self.body


def check_magic(byte: int) -> None:
    """`FramingError` if no frame starts with this byte."""
    if byte not in _MAGICS:
        raise FramingError(f"no frame starts with the byte 0x{byte:02x}")


def frame_size(buffer: bytes | bytearray | memoryview, offset: int = 0, limit: int = MAX_FRAME) -> int:
    """How many bytes the frame at ``offset`` has, from its header alone.

    Raises `FramingError` for an unknown magic, a size above the limit, and lengths that don't fit into the
    body. There is no way to find the next frame after that.
    """
    magic, keys, extras_length, total = _LENGTHS.unpack_from(buffer, offset)
    check_magic(magic)
    size: int = HEADER_SIZE + total
    if size > limit:
        raise FrameTooLarge(size, limit)
    # a flexible frame has its framing length where others have the upper half of the key length
    inner = extras_length + (keys if magic not in _FLEXIBLE else (keys >> 8) + (keys & 0xFF))
    if inner > total:
        raise FramingError(f"framing, extras and key need {inner} bytes, the body has {total}")
    return size


def front_size(buffer: bytes | bytearray | memoryview, offset: int = 0) -> int:
    """How many bytes of the frame at ``offset`` come before its value, from its header alone."""
    magic, keys, extras_length, _ = _LENGTHS.unpack_from(buffer, offset)
    if magic in _FLEXIBLE:
        keys = (keys >> 8) + (keys & 0xFF)
    size: int = HEADER_SIZE + keys + extras_length
    return size
