"""The two forms of a system event's value, integers and a FlatBuffer, each made from the other.

Rules: docs/spec/dcp.md#system-event, docs/spec/servers.md#flatbuffers-system-events.
"""

from __future__ import annotations

from dataclasses import replace

from .dcp import COLLECTION_EVENT, DcpSystemEvent
from .flatbuffer import EventContent, event_flatbuffer

__all__ = ["as_flatbuffer", "as_integers", "integers_of"]

_VALUES = {
    2: COLLECTION_EVENT.until("collection_id").struct,
    3: COLLECTION_EVENT.until("max_ttl").struct,
    4: COLLECTION_EVENT.struct,
}
"""By the number of integers: a scope, a collection, a collection with its longest time to live."""


def integers_of(content: EventContent) -> tuple[int, bytes]:
    """Version and value as integers, which have no place for the history flag."""
    ids = [number for number in content[:4] if number is not None]
    return int(len(ids) == 4), _VALUES[len(ids)].pack(*ids)


def as_flatbuffer(event: DcpSystemEvent) -> DcpSystemEvent:
    """The event in version 2."""
    if event.version == 2:
        return event
    return replace(event, version=2, value=event_flatbuffer(event.event, event.content(), event.key))


def as_integers(event: DcpSystemEvent) -> DcpSystemEvent:
    """The event in version 0 or 1; not for a modified collection, which these versions don't have."""
    if event.version != 2:
        return event
    version, value = integers_of(event.content())
    return replace(event, version=version, value=value)
