"""The values of system events as FlatBuffers: what control ``flatbuffers_system_events`` asks for.

Four small tables, each of numbers and at most one text; so only that much of the format is here. A table is a
signed distance back to its vtable and then its fields; the vtable says at which byte of the table each field
is (0: the field has its default). Everything is little-endian and aligned to its own size.

    Collection (created, flushed, modified)  0 uid u64, 1 scope u32, 2 collection u32, 3 has max TTL bool,
                                             4 max TTL u32, 5 name
    DroppedCollection                        0 uid u64, 1 scope u32, 2 collection u32
    Scope (created)                          0 uid u64, 1 scope u32, 2 name
    DroppedScope                             0 uid u64, 1 scope u32

Rules: docs/spec/servers.md#flatbuffers-system-events.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...wire.codes import SystemEventId
from ...wire.dcp import DcpSystemEvent

__all__ = ["system_event_value"]

_SIZES = {"Q": 8, "I": 4, "?": 1}


def system_event_value(event: DcpSystemEvent) -> bytes:
    """The value of version 2 of an event that we have in version 0 or 1."""
    uid, scope = ("Q", event.manifest_uid), ("I", event.scope_id)
    if event.event == SystemEventId.SCOPE_DROPPED:
        return _table([uid, scope])
    if event.event == SystemEventId.SCOPE_CREATED:
        return _table([uid, scope], event.key)
    collection = ("I", event.collection_id or 0)
    if event.event == SystemEventId.COLLECTION_END:
        return _table([uid, scope, collection])
    max_ttl = event.max_ttl
    return _table([uid, scope, collection, ("?", max_ttl is not None), ("I", max_ttl or 0)], event.key)


def _table(numbers: Sequence[tuple[str, int]], text: bytes | None = None) -> bytes:
    """A buffer with one table: its numbers in order, then a text if there is one."""
    count = len(numbers) + (text is not None)
    vtable_size = 4 + 2 * count
    vtable_at = 4
    table_at = _aligned(vtable_at + vtable_size, 8)
    # Largest fields first, behind the distance and a gap: the u64 is then aligned.
    places = [0] * count
    at = 8
    for size in (8, 4, 1):
        for index, (code, _) in enumerate(numbers):
            if _SIZES[code] == size:
                places[index] = at
                at += size
        if size == 4 and text is not None:
            places[-1] = at
            at += 4
    table_size = at
    text_at = _aligned(table_at + table_size, 4)

    out = bytearray(text_at)
    struct.pack_into("<I", out, 0, table_at)
    struct.pack_into(f"<HH{count}H", out, vtable_at, vtable_size, table_size, *places)
    struct.pack_into("<i", out, table_at, table_at - vtable_at)
    for (code, number), place in zip(numbers, places, strict=False):
        struct.pack_into("<" + code, out, table_at + place, number)
    if text is not None:
        struct.pack_into("<I", out, table_at + places[-1], text_at - (table_at + places[-1]))
        out += struct.pack("<I", len(text)) + text + b"\0"
        out += bytes(-len(out) % 4)
    return bytes(out)


def _aligned(at: int, size: int) -> int:
    return at + -at % size
