"""The two forms of a system event's value, one made of the other: integers, and a FlatBuffer.

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
"""By the number of integers: of a scope; of a collection; and with its longest time to live."""


def integers_of(content: EventContent) -> tuple[int, bytes]:
    """Version and value of what integers can tell; there is no history in them."""
    ids = [number for number in content[:4] if number is not None]
    return int(len(ids) == 4), _VALUES[len(ids)].pack(*ids)


def as_flatbuffer(event: DcpSystemEvent) -> DcpSystemEvent:
    """The same in version 2."""
    if event.version == 2:
        return event
    return replace(event, version=2, value=event_flatbuffer(event.event, event.content(), event.key))


def as_integers(event: DcpSystemEvent) -> DcpSystemEvent:
    """The same in version 0 or 1; not for a collection that is modified, which they can't tell."""
    if event.version != 2:
        return event
    version, value = integers_of(event.content())
    return replace(event, version=version, value=value)
