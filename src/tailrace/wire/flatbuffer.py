"""The FlatBuffers in system events: one table of numbers and at most one text.

A table is a signed distance back to its vtable and then its fields; the vtable says at which byte of the
table each field is (0, or no entry because the vtable is too short: the default). All numbers are
little-endian and aligned to their own size. The input comes from outside, so every place is checked.

    Collection (created, flushed, modified)  0 uid u64, 1 scope u32, 2 collection u32, 3 has max TTL bool,
                                             4 max TTL u32, 5 name, 6 history bool
    DroppedCollection                        0 uid u64, 1 scope u32, 2 collection u32
    Scope (created)                          0 uid u64, 1 scope u32, 2 name
    DroppedScope                             0 uid u64, 1 scope u32

Rules: docs/spec/servers.md#flatbuffers-system-events, docs/spec/servers.md#reading-a-flatbuffer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from .codes import SCOPE_EVENTS, SystemEventId

__all__ = ["EventContent", "event_flatbuffer", "flatbuffer_event"]

_SIZES = {"Q": 8, "I": 4, "?": 1}
_TEXT = "s"
_U16, _U32, _I32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")


class EventContent(NamedTuple):
    """What the value of a system event says, in either form."""

    manifest_uid: int
    scope_id: int
    collection_id: int | None = None
    max_ttl: int | None = None
    history: bool | None = None


def flatbuffer_event(event: int, value: bytes) -> EventContent:
    """What a FlatBuffer says; each kind of event has its own table. ValueError if it is malformed."""
    content = EventContent(_number(value, 0, "Q"), _number(value, 1, "I"))
    if event not in SCOPE_EVENTS:
        content = content._replace(collection_id=_number(value, 2, "I"))
    if event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_MODIFIED):
        max_ttl = _number(value, 4, "I") if _number(value, 3, "?") else None
        content = content._replace(max_ttl=max_ttl, history=bool(_number(value, 6, "?")))
    return content


def _number(data: bytes, slot: int, code: str) -> int:
    """The number in a slot of the root table, 0 if it has its default; ``code`` is its struct code."""
    try:
        (table,) = _U32.unpack_from(data)
        vtable = table - _I32.unpack_from(data, table)[0]
        if table < _U32.size or vtable < _U32.size:
            raise ValueError("not a FlatBuffer: its vtable is outside it")
        (vtable_size,) = _U16.unpack_from(data, vtable)
        if vtable_size < 4 or vtable_size % 2 or vtable + vtable_size > len(data):
            raise ValueError("not a FlatBuffer: its vtable has an impossible size")
        place = 4 + 2 * slot
        if place + 2 > vtable_size:
            return 0
        (offset,) = _U16.unpack_from(data, vtable + place)
        return int(struct.unpack_from("<" + code, data, table + offset)[0]) if offset else 0
    except struct.error:
        raise ValueError("not a FlatBuffer: a field is outside it") from None


def event_flatbuffer(event: int, content: EventContent, name: bytes) -> bytes:
    """What `flatbuffer_event` reads, with the name of the scope or collection."""
    ids: list[_Field] = [("Q", content.manifest_uid), ("I", content.scope_id)]
    if event == SystemEventId.SCOPE_DROPPED:
        return _table(ids)
    if event == SystemEventId.SCOPE_CREATED:
        return _table([*ids, (_TEXT, name)])
    ids.append(("I", content.collection_id or 0))
    if event == SystemEventId.COLLECTION_END:
        return _table(ids)
    max_ttl = content.max_ttl
    return _table(
        [*ids, ("?", max_ttl is not None), ("I", max_ttl or 0), (_TEXT, name), ("?", bool(content.history))]
    )


_Field = tuple[str, int | bytes]
"""A struct code and its number, or `_TEXT` and its bytes."""


def _table(fields: Sequence[_Field]) -> bytes:
    """A buffer with one table, followed by its text."""
    count = len(fields)
    vtable_size = 4 + 2 * count
    vtable_at = 4
    table_at = _aligned(vtable_at + vtable_size, 8)
    # Largest fields first, after the distance and a gap, to align the u64. A text's field is a distance.
    places = [0] * count
    at = 8
    for size in (8, 4, 1):
        for slot, (code, _) in enumerate(fields):
            if _SIZES.get(code, 4) == size:
                places[slot] = at
                at += size
    text_at = _aligned(table_at + at, 4)

    out = bytearray(text_at)
    struct.pack_into("<I", out, 0, table_at)
    struct.pack_into(f"<HH{count}H", out, vtable_at, vtable_size, at, *places)
    struct.pack_into("<i", out, table_at, table_at - vtable_at)
    for (code, content), place in zip(fields, places, strict=True):
        if isinstance(content, bytes):
            struct.pack_into("<I", out, table_at + place, text_at - (table_at + place))
            out += struct.pack("<I", len(content)) + content + b"\0"
            out += bytes(-len(out) % 4)
        else:
            struct.pack_into("<" + code, out, table_at + place, content)
    return bytes(out)


def _aligned(at: int, size: int) -> int:
    return at + -at % size
