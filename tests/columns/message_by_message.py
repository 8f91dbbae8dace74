"""A second decoder of DCP changes, written from the documents: plain struct, one message at a time.

It shares no code with the columns that it is compared with, nor with `wire`; numbers are as in
`docs/spec/dcp.md`. It also makes test buffers: every kind of frame, well-formed or broken, with values that
hold forged frames.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

HEADER = struct.Struct(">BBHBBHIIQ")
MAGICS = (0x80, 0x81, 0x08, 0x18, 0x82, 0x83)
LIMIT = 30 * 1024 * 1024
OPS = {0x57: "mutation", 0x58: "deletion", 0x59: "expiration"}


class Framing(Exception):
    """No frame can be found."""


class Malformed(Exception):
    """A change that breaks its rules."""


@dataclass
class Decoded:
    rows: list[dict[str, Any]] = field(default_factory=list)
    controls: list[tuple[int, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    opaques: list[int] = field(default_factory=list)
    used: int = 0
    error: type[Exception] | None = None


def decode(
    data: bytes, *, collections: Mapping[int, tuple[str, str]] | None = None, limit: int = LIMIT
) -> Decoded:
    """Everything at the start of a buffer, up to the first frame that is broken or incomplete."""
    decoded = Decoded()
    at = 0
    while len(data) - at >= 24:
        try:
            size = _size(data, at, limit)
            if at + size > len(data):
                break
            row = _row(data[at : at + size], collections)
        except (Framing, Malformed) as error:
            decoded.error = type(error)
            break
        if row is None:
            decoded.controls.append((len(decoded.rows), at, at + size))
        else:
            decoded.rows.append(row)
            decoded.sizes.append(size)
            decoded.opaques.append(HEADER.unpack_from(data, at)[7])
        at += size
        decoded.used = at
    return decoded


def _size(data: bytes, at: int, limit: int) -> int:
    magic, _, keys, extras, _, _, body, _, _ = HEADER.unpack_from(data, at)
    if magic not in MAGICS or 24 + body > limit:
        raise Framing
    framing, key = divmod(keys, 256) if magic in (0x08, 0x18) else (0, keys)
    if framing + extras + key > body:
        raise Framing
    return 24 + int(body)


def _row(frame: bytes, collections: Mapping[int, tuple[str, str]] | None) -> dict[str, Any] | None:
    magic, opcode, keys, extras_length, datatype, vbucket, body, _, cas = HEADER.unpack_from(frame)
    if magic not in (0x80, 0x08) or opcode not in OPS:
        return None
    framing, key_length = divmod(keys, 256) if magic == 0x08 else (0, keys)
    if magic == 0x08 and opcode != 0x57 and framing == 0 and frame[24:25] == b"\x22":  # noqa: SIM102
        if 3 + extras_length + key_length <= body:
            framing = 3
    rest = frame[24 + framing :]
    extras, key, value = (
        rest[:extras_length],
        rest[extras_length : extras_length + key_length],
        rest[extras_length + key_length :],
    )
    flags = expiry = None
    nmeta = 0
    if opcode == 0x57 and len(extras) == 31:
        seqno, rev, flags, expiry, _, nmeta, _ = struct.unpack(">QQIIIHB", extras)
    elif opcode == 0x58 and len(extras) == 18:
        seqno, rev, nmeta = struct.unpack(">QQH", extras)
    elif (opcode == 0x58 and len(extras) == 21) or (opcode == 0x59 and len(extras) == 20):
        seqno, rev = struct.unpack_from(">QQ", extras)
    else:
        raise Malformed
    if seqno == 0 or not 1 <= len(key) <= 251 or datatype > 7 or nmeta > len(value):
        raise Malformed
    value = value[: len(value) - nmeta]
    if opcode != 0x57 and (datatype in (1, 3) or (value and not datatype & 6)):
        raise Malformed
    collection = 0
    if collections is not None:
        collection, key = _collection(key)
    return {
        "op": OPS[opcode],
        "key": key,
        "value": value,
        "collection": collection,
        "vbucket": vbucket,
        "seqno": signed(seqno, 64),
        "rev": signed(rev, 64),
        "cas": signed(cas, 64),
        "flags": None if flags is None else signed(flags, 32),
        "expiry": expiry,
        "datatype": datatype,
        "event_time": datetime.fromtimestamp(0, UTC) + timedelta(microseconds=(cas >> 16 << 16) // 1000)
        if cas
        else None,
    }


def _collection(key: bytes) -> tuple[int, bytes]:
    number = 0
    for place in range(5):
        if place >= len(key):
            raise Malformed
        number |= (key[place] & 0x7F) << 7 * place
        if key[place] < 0x80:
            break
    else:
        raise Malformed
    if (place and not key[place]) or number >= 1 << 32 or place + 1 == len(key):
        raise Malformed
    return number, key[place + 1 :]


def finish(row: dict[str, Any], names: Mapping[int, tuple[str, str]], bucket: str) -> dict[str, Any]:
    """A row as the columns show it: inflated, xattrs split off, names instead of numbers."""
    value, datatype, xattrs = row["value"], row["datatype"], None
    if value and datatype & 2:
        size = shift = at = 0
        while True:
            size |= (value[at] & 0x7F) << shift
            shift += 7
            at += 1
            if value[at - 1] < 0x80:
                break
        value = pa.Codec("snappy").decompress(value, size, asbytes=True)
    if row["value"] and datatype & 4:
        (length,) = struct.unpack_from(">I", value)
        pairs, value = value[4 : 4 + length], value[4 + length :]
        parsed = {}
        while pairs:
            (size,) = struct.unpack_from(">I", pairs)
            name, text, _ = pairs[4 : 4 + size].split(b"\0")
            parsed[name.decode()] = json.loads(text)
            pairs = pairs[4 + size :]
        xattrs = parsed
    scope, collection = names[row["collection"]]
    return {
        **row,
        "value": None if row["op"] != "mutation" and not value else value,
        "bucket": bucket,
        "scope": scope,
        "collection": collection,
        "datatype": "json" if datatype & 1 else "raw",
        "xattrs": xattrs,
    }


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >= 1 << (bits - 1) else number


# buffers


def frame(
    opcode: int,
    *,
    magic: int = 0x80,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    framing: bytes = b"",
    framing_length: int | None = None,
    datatype: int = 0,
    vbucket: int = 0,
    opaque: int = 0,
    cas: int = 0,
) -> bytes:
    """Any frame."""
    keys = len(key)
    if magic in (0x08, 0x18):
        keys |= (len(framing) if framing_length is None else framing_length) << 8
    body = framing + extras + key + value
    header = HEADER.pack(magic, opcode, keys, len(extras), datatype, vbucket, len(body), opaque, cas)
    return header + body


def mutation(seqno: int, key: bytes = b"key", value: bytes = b"", nmeta: int = 0, **header: Any) -> bytes:
    extras = struct.pack(">QQIIIHB", seqno, 3, 0x0200_0006, 0, 0, nmeta, 0)
    return frame(0x57, extras=extras, key=key, value=value, **header)


class Buffers:
    """Random buffers that repeat for a seed."""

    NAMES = {0: ("_default", "_default"), 8: ("inventory", "hotel"), 0x555: ("inventory", "airline")}
    PREFIXES = (b"\x00", b"\x08", b"\xd5\x0a")
    CONTROLS = (
        (0x80, 0x56, struct.pack(">QQI", 1, 9, 1)),  # snapshot marker
        (0x80, 0x55, b"\0\0\0\0"),  # stream end
        (0x80, 0x5C, b""),  # noop
        (0x80, 0x5F, struct.pack(">QIB", 4, 0, 0)),  # system event
        (0x80, 0x64, struct.pack(">Q", 7)),  # seqno advanced
        (0x80, 0x65, struct.pack(">I", 1)),  # OSO snapshot
        (0x80, 0x5B, b"\x01"),  # set vbucket state
        (0x80, 0x60, bytes(31)),  # prepare
        (0x81, 0x57, b""),  # a response with the opcode of a mutation
        (0x18, 0x58, b""),
        (0x82, 0x01, b"\0\0\0\0"),
        (0x80, 0xEE, b"unknown"),
    )

    def __init__(self, seed: int, *, collections: bool = False, hostile: bool = True) -> None:
        self.random = random.Random(seed)
        self.collections = collections
        self.hostile = hostile

    def buffer(self, frames: int) -> bytes:
        """Frames of all kinds, the last often cut off; if hostile, a few bytes of headers are changed."""
        rng = self.random
        made = [self.any_frame() for _ in range(frames)]
        data = bytearray(b"".join(made))
        if self.hostile:
            for _ in range(rng.randint(0, 3)):
                start = sum(map(len, made[: rng.randrange(frames)]))
                at = min(start + rng.randrange(45), len(data) - 1)
                data[at] = rng.choice((0, 1, 0x22, 0x57, 0x80, 0xFF, rng.randrange(256)))
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        return bytes(data)

    def any_frame(self) -> bytes:
        rng = self.random
        if rng.random() < 0.15:
            magic, opcode, extras = rng.choice(self.CONTROLS)
            value = rng.randbytes(rng.choice((0, 0, 5, 40)))
            return frame(opcode, magic=magic, extras=extras, key=b"k" * rng.randrange(3), value=value)
        opcode = rng.choice((0x57, 0x57, 0x57, 0x57, 0x58, 0x59))
        datatype, value = self._value(opcode)
        nmeta = rng.choice((0, 0, 0, 4)) if opcode == 0x57 else 0
        seqno, rev = rng.randint(1, 1 << rng.choice((8, 40, 64))) or 1, rng.getrandbits(64)
        seqno = min(seqno, (1 << 64) - 1)
        extras = struct.pack(">QQ", seqno, rev)
        if opcode == 0x57:
            extras += struct.pack(
                ">IIIHB", rng.getrandbits(32), rng.getrandbits(32), 0, nmeta, rng.randrange(256)
            )
        elif opcode == 0x59:
            extras += rng.randbytes(4)
        elif rng.random() < 0.5:
            extras += rng.randbytes(5)
        else:
            nmeta = rng.choice((0, 0, 3))
            extras += struct.pack(">H", nmeta)
        key = rng.randbytes(rng.choice((1, 2, 5, 12, 13, 30, 100, 246)))
        if self.collections:
            key = rng.choice(self.PREFIXES) + key
        header: dict[str, Any] = {"magic": 0x80}
        if rng.random() < 0.3:
            header = {"magic": 0x08, "framing": b"\x22" + rng.randbytes(2)}
            if opcode != 0x57 and rng.random() < 0.5:
                header["framing_length"] = 0
        return frame(
            opcode,
            extras=extras,
            key=key,
            value=value + bytes(nmeta),
            datatype=datatype,
            vbucket=rng.randrange(1024),
            opaque=rng.getrandbits(32),
            cas=rng.choice((0, rng.getrandbits(62), rng.getrandbits(64))),
            **header,
        )

    def _value(self, opcode: int) -> tuple[int, bytes]:
        rng = self.random
        kind = rng.random()
        if opcode != 0x57:
            body = b""
            datatype = rng.choice((0, 0, 4, 5, 6, 2))
        else:
            datatype = rng.choice((0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7))
            if kind < 0.4:
                body = rng.randbytes(rng.choice((0, 1, 11, 12, 13, 64, 300)))
            else:
                body = b'{"n":%d}' % rng.getrandbits(40)
                if kind > 0.7:  # a forged frame or two, perhaps with the start or the end missing
                    forged = mutation(rng.randint(0, 9), b"forged", rng.randbytes(rng.randrange(40)))
                    forged *= rng.randint(1, 3)
                    body = forged[rng.choice((0, 0, 3)) : rng.choice((None, None, -5))]
        if datatype & 4:
            pairs = b""
            for name in rng.sample((b"_sync", b"meta", b"x\xc3\xa9"), rng.randint(0, 3)):
                pair = name + b"\0" + rng.choice((b'{"rev":1}', b'"\xc3\xa4"', b"12", b"null")) + b"\0"
                pairs += struct.pack(">I", len(pair)) + pair
            body = struct.pack(">I", len(pairs)) + pairs + body
        if datatype & 2:
            body = pa.Codec("snappy").compress(body, asbytes=True)
        return datatype, body
