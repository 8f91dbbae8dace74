"""Reading the FlatBuffers in system events: one table of numbers and at most one text.

A table is a signed distance back to its vtable and then its fields; the vtable says at which byte of the
table each field is (0, or a vtable that is too short: it has its default). All numbers are little-endian. The
value comes from outside, so every place is checked.

Rules: docs/spec/servers.md#reading-a-flatbuffer.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from .codes import SCOPE_EVENTS, SystemEventId

__all__ = ["EventContent", "flatbuffer_event"]

_U16, _U32, _I32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")


class EventContent(NamedTuple):
    """What the value of a system event says, in whichever form."""

    manifest_uid: int
    scope_id: int
    collection_id: int | None = None
    max_ttl: int | None = None
    history: bool | None = None


def flatbuffer_event(event: int, value: bytes) -> EventContent:
    """What a FlatBuffer says: each kind of event has its own table. ValueError if it is none."""
    content = EventContent(_number(value, 0, "Q"), _number(value, 1, "I"))
    if event not in SCOPE_EVENTS:
        content = content._replace(collection_id=_number(value, 2, "I"))
    if event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_MODIFIED):
        max_ttl = _number(value, 4, "I") if _number(value, 3, "?") else None
        content = content._replace(max_ttl=max_ttl, history=bool(_number(value, 6, "?")))
    return content


def _number(data: bytes, slot: int, code: str) -> int:
    """The number in a slot of the root table, 0 if it has its default; ``code`` is that of `struct`."""
    try:
        (table,) = _U32.unpack_from(data)
        vtable = table - _I32.unpack_from(data, table)[0]
        if vtable < 0:
            raise ValueError("no FlatBuffer: its vtable is outside of it")
        (vtable_size,) = _U16.unpack_from(data, vtable)
        place = 4 + 2 * slot
        if place + 2 > vtable_size:
            return 0
        (offset,) = _U16.unpack_from(data, vtable + place)
        return int(struct.unpack_from("<" + code, data, table + offset)[0]) if offset else 0
    except struct.error:
        raise ValueError("no FlatBuffer: a field is outside of it") from None
