"""The encodings inside fields: LEB128 collection ids, framing extras, JSON, xattr sections, failover logs.

Rules: docs/spec/header.md#framing-extras, docs/spec/header.md#xattr-section, docs/spec/dcp.md#leb128.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import MalformedMessage
from .codes import DurabilityLevel, RequestFrameId, Status

__all__ = [
    "JSON_SHAPE",
    "Durability",
    "FrameInfo",
    "checked_key",
    "decode_duration_us",
    "decode_failover_log",
    "decode_frame_infos",
    "decode_leb128",
    "encode_failover_log",
    "encode_frame_infos",
    "encode_leb128",
    "is_json",
    "join_xattrs",
    "parse_json",
    "split_xattrs",
]

MAX_LOGICAL_KEY = 250
MAX_KEY_IN_COLLECTION = 246
"""In a collection other than the default one."""
_RESERVED_COLLECTIONS = range(1, 8)
_MAX_COLLECTION_ID = 0xFFFF_FFFF
_PAIR = struct.Struct(">QQ")
_LENGTH = struct.Struct(">I")
_ESCAPE = 15


# collection ids


def encode_leb128(number: int) -> bytes:
    """An unsigned 32-bit number, 7 bits a byte, low bits first."""
    if not 0 <= number <= _MAX_COLLECTION_ID:
        raise ValueError(f"{number} is not an unsigned 32-bit number")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_leb128(data: bytes) -> tuple[int, int]:
    """The number at the start of ``data``, and how many bytes it took; only the shortest form is accepted."""
    number = 0
    for at, byte in enumerate(data[:5]):
        number |= (byte & 0x7F) << (7 * at)
        if not byte & 0x80:
            if at and not byte:
                raise MalformedMessage("a collection id is not in its shortest LEB128 form")
            if number > _MAX_COLLECTION_ID:
                raise MalformedMessage("a collection id is larger than 32 bits")
            return number, at + 1
    raise MalformedMessage("a collection id does not end")


def checked_key(key: bytes, *, collections: bool) -> int:
    """The collection of a document's key; `MalformedMessage` if no document can have that key.

    With ``collections`` the key has a collection prefix.
    """
    collection, prefix = decode_leb128(key) if collections else (0, 0)
    limit = MAX_KEY_IN_COLLECTION if collection else MAX_LOGICAL_KEY
    size = len(key) - prefix
    if not 1 <= size <= limit:
        raise MalformedMessage(f"a key has 1 to {limit} bytes beside its collection id, not {size}")
    if collection in _RESERVED_COLLECTIONS:
        raise MalformedMessage(f"collection id {collection} is reserved")
    return collection


# framing extras


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One object of the framing extras."""

    id: int
    data: bytes = b""


def decode_frame_infos(framing: bytes) -> list[FrameInfo]:
    """The objects in framing extras; a nibble of 15 adds the byte that follows."""
    infos = []
    at, end = 0, len(framing)
    while at < end:
        number, length = framing[at] >> 4, framing[at] & 0x0F
        at += 1
        if number == _ESCAPE:
            if at >= end:
                raise MalformedMessage("framing extras end inside an id")
            number += framing[at]
            at += 1
        if length == _ESCAPE:
            if at >= end:
                raise MalformedMessage("framing extras end inside a length")
            length += framing[at]
            at += 1
        if at + length > end:
            raise MalformedMessage("framing extras are shorter than they say")
        infos.append(FrameInfo(number, framing[at : at + length]))
        at += length
    return infos


def encode_frame_infos(infos: Iterable[FrameInfo]) -> bytes:
    """Framing extras from objects."""
    out = bytearray()
    for info in infos:
        number, length = info.id, len(info.data)
        if not (0 <= number <= _ESCAPE + 0xFF and length <= _ESCAPE + 0xFF):
            raise ValueError(f"frame info {number} with {length} bytes can't be encoded")
        out.append(min(number, _ESCAPE) << 4 | min(length, _ESCAPE))
        if number >= _ESCAPE:
            out.append(number - _ESCAPE)
        if length >= _ESCAPE:
            out.append(length - _ESCAPE)
        out += info.data
    return bytes(out)


@dataclass(frozen=True, slots=True)
class Durability:
    """The durability that a write asks for."""

    level: DurabilityLevel
    timeout_ms: int | None = None

    @classmethod
    def decode(cls, info: FrameInfo) -> Durability:
        """Read a frame info; a wrong level is status 0xa0, a wrong shape 0x04."""
        if len(info.data) not in (1, 3):
            raise MalformedMessage("a durability frame has 1 or 3 bytes")
        try:
            level = DurabilityLevel(info.data[0])
        except ValueError:
            raise MalformedMessage(
                f"there is no durability level {info.data[0]}", Status.DURABILITY_INVALID_LEVEL
            ) from None
        if len(info.data) == 1:
            return cls(level)
        timeout_ms = int.from_bytes(info.data[1:], "big")
        if timeout_ms in (0, 0xFFFF):
            raise MalformedMessage(f"a durability timeout of {timeout_ms} ms is not allowed")
        return cls(level, timeout_ms)

    def encode(self) -> FrameInfo:
        """As a frame info."""
        data = bytes([self.level])
        if self.timeout_ms is not None:
            data += self.timeout_ms.to_bytes(2, "big")
        return FrameInfo(RequestFrameId.DURABILITY, data)


def decode_duration_us(info: FrameInfo) -> int:
    """Microseconds that a server worked on a command or held it back; 2 bytes encode them on a curve."""
    if len(info.data) != 2:
        raise MalformedMessage(f"a duration has 2 bytes, not {len(info.data)}")
    return round(math.pow(int.from_bytes(info.data, "big"), 1.74) / 2)


# JSON


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Bytes that a JSON text can begin with: the first byte rules out most values that are not JSON.
JSON_STARTS = frozenset(bytes([byte]) for byte in b'{["-0123456789tfn \t\r\n')

JSON_SHAPE = json.JSONDecoder(parse_int=bool, parse_float=bool, parse_constant=_refuse)
"""Only the shape matters, so it makes no numbers: cheaper, and their digits are not limited."""


def is_json(text: bytes) -> bool:
    """Whether bytes are one JSON text in UTF-8, not too deep, without NaN or Infinity."""
    if text[:1] not in JSON_STARTS:
        return False
    try:
        JSON_SHAPE.decode(text.decode())
    except (ValueError, RecursionError):
        return False
    return True


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8; `ValueError` if it is not JSON or Python can't hold it."""
    try:
        # Given bytes, json.loads would also read UTF-16; by default it accepts NaN.
        return json.loads(text.decode(), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON is too deep") from None


# xattrs


def split_xattrs(value: bytes) -> tuple[dict[str, bytes], bytes]:
    """The xattrs (name to JSON text) and the body of a value with the XATTR bit; 0x87 if it is broken.

    The texts returned are JSON for every reader: UTF-8, and without NaN or Infinity.
    """
    if len(value) < 4:
        raise MalformedMessage("an xattr section has at least 4 bytes", Status.XATTR_EINVAL)
    end = 4 + _LENGTH.unpack_from(value)[0]
    if end > len(value):
        raise MalformedMessage("an xattr section is longer than its value", Status.XATTR_EINVAL)
    xattrs: dict[str, bytes] = {}
    at = 4
    while at < end:
        if at + 4 > end:
            raise MalformedMessage("an xattr pair is cut off", Status.XATTR_EINVAL)
        pair_end = at + 4 + _LENGTH.unpack_from(value, at)[0]
        pair = value[at + 4 : pair_end]
        name, nul, text = pair.partition(b"\0")
        if pair_end > end or not nul or not name or not text.endswith(b"\0"):
            raise MalformedMessage("an xattr pair is not name NUL value NUL", Status.XATTR_EINVAL)
        try:
            key = name.decode()
            parse_json(text[:-1])
        except ValueError:
            raise MalformedMessage("an xattr is not UTF-8 and JSON", Status.XATTR_EINVAL) from None
        if key in xattrs:
            raise MalformedMessage("an xattr occurs twice", Status.XATTR_EINVAL)
        xattrs[key] = text[:-1]
        at = pair_end
    return xattrs, value[end:]


def join_xattrs(xattrs: dict[str, bytes], body: bytes) -> bytes:
    """A value with the XATTR bit from xattrs (name to JSON text) and body."""
    pairs = bytearray()
    for name, text in xattrs.items():
        pair = name.encode() + b"\0" + text + b"\0"
        pairs += _LENGTH.pack(len(pair)) + pair
    return _LENGTH.pack(len(pairs)) + bytes(pairs) + body


# failover logs


def decode_failover_log(value: bytes) -> list[tuple[int, int]]:
    """Pairs of vbucket UUID and seqno, in the order in which they came; at least one."""
    if not value or len(value) % _PAIR.size:
        raise MalformedMessage(
            f"a failover log has 16 bytes an entry and at least one entry, not {len(value)}"
        )
    return list(_PAIR.iter_unpack(value))


def encode_failover_log(entries: Sequence[tuple[int, int]]) -> bytes:
    """Pairs of vbucket UUID and seqno, newest first, as bytes."""
    return b"".join([_PAIR.pack(vb_uuid, seqno) for vb_uuid, seqno in entries])
