"""Malformed twins: a good packet with one thing wrong, made by rule from the shape in the documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from .corpus import FOLDER, Vector
from .packet import Packet

__all__ = ["Malformed", "Shape", "malformed", "shape_of", "shapes", "too_short", "twins"]

LONGEST_KEY = 251
UNKNOWN_DATATYPE = 0x08


@dataclass(frozen=True)
class Shape:
    """What a message may have, from the tables of the protocol notes."""

    dialect: str
    kind: str
    direction: str
    opcode: int
    extras: list[int]
    key: str
    value: str
    source: str
    subtype: int | None = None
    datatypes: int = 0
    cas: str = "any"
    vbucket: str = "any"
    sizes: list[int] | None = None
    unit: int = 1
    private: bool = False

    @property
    def place(self) -> tuple[str, str, str, int, int | None]:
        """Where the message is in its dialect's table."""
        return self.dialect, self.kind, self.direction, self.opcode, self.subtype


@cache
def shapes() -> dict[tuple[str, str, str, int, int | None], Shape]:
    """All shapes, by place."""
    rows: list[dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text())
    return {shape.place: shape for shape in (Shape(**row) for row in rows)}


_KINDS = {
    0x80: "request",
    0x08: "request",
    0x81: "response",
    0x18: "response",
    0x82: "server request",
    0x83: "server response",
}


def shape_of(vector: Vector) -> Shape | None:
    """The shape of a good packet; None for an answer that is not a success, which has none."""
    magic, opcode, byte_5 = vector.data[0], vector.data[1], vector.data[5]
    if vector.header.get("status"):
        return None
    subtype = byte_5 if vector.dialect == "upr-a" else None
    return shapes().get((vector.dialect, _KINDS[magic], vector.direction, opcode, subtype))


def twins(vector: Vector, shape: Shape) -> Iterator[tuple[str, bytes]]:
    """Each way to break the packet that its shape forbids: what is wrong, and the bytes."""
    good = Packet.split(vector.data, private=shape.private)
    extras, value = good.extras, good.value

    def broken(what: str, **changes: Any) -> tuple[str, bytes]:
        return what, replace(good, **changes).join()

    if len(extras) + 1 not in shape.extras:
        yield broken("extras too long", extras=extras + b"\0")
    if extras and len(extras) - 1 not in shape.extras:
        yield broken("extras too short", extras=extras[:-1])
    if extras and 0 not in shape.extras:
        yield broken("extras missing", extras=b"")
    if shape.key == "must":
        yield broken("key missing", key=b"")
    if shape.key == "no":
        yield broken("key not allowed", key=b"k")
    else:
        yield broken("key too long", key=b"k" * (LONGEST_KEY + 1))
    if shape.value == "must":
        yield broken("value missing", value=b"")
    if shape.value == "no":
        yield broken("value not allowed", value=b"v")
    elif shape.sizes is not None or shape.unit > 1:
        for what, other in (("value too long", value + b"\0"), ("value too short", value[:-1])):
            fits = len(other) in shape.sizes if shape.sizes is not None else not len(other) % shape.unit
            if not fits:
                yield broken(what, value=other)
    if shape.dialect != "upr-a":
        yield broken("unknown datatype", byte_5=good.byte_5 | UNKNOWN_DATATYPE)
        if not shape.datatypes and "request" in shape.kind:
            yield broken("datatype not allowed", byte_5=0x01)
    if shape.cas == "zero":
        yield broken("CAS not allowed", cas=1)
    if shape.cas == "set":
        yield broken("CAS missing", cas=0)
    if shape.vbucket == "zero":
        yield broken("vbucket not allowed", bytes_6_7=1)


def too_short(vector: Vector) -> bytes | None:
    """The packet with a body that is shorter than framing, extras and key: not a frame at all."""
    good = Packet.split(vector.data)
    inner = len(good.framing) + len(good.extras) + len(good.key)
    if not inner:
        return None
    return vector.data[:8] + (inner - 1).to_bytes(4) + vector.data[12 : 24 + inner - 1]


@dataclass(frozen=True)
class Malformed:
    """A packet that is wrong in its own way, with the status that must answer it."""

    id: str
    dialect: str
    direction: str
    source: str
    why: str
    hex: str
    status: int

    def __str__(self) -> str:
        return self.id

    @property
    def data(self) -> bytes:
        """The packet."""
        return bytes.fromhex(self.hex)


@cache
def malformed() -> tuple[Malformed, ...]:
    """All of them."""
    return tuple(Malformed(**row) for row in json.loads((FOLDER / "malformed.json").read_text()))
