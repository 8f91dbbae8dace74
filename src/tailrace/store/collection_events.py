"""The system events of a vbucket: which collections and scopes began and ended in it, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..wire.codes import SCOPE_EVENTS, SystemEventId
from .dropped_collections import NO_DROPS, DroppedCollections
from .format import collection_of, event_content, system_event, system_key
from .index import newest_seqno

__all__ = ["UNKNOWN_TTL", "CollectionEvents", "KnownEvent"]

UNKNOWN_TTL = -1
"""The max TTL of events in stores from before it was kept with them."""


class KnownEvent(NamedTuple):
    """What is remembered of an event."""

    seqno: int
    event: int
    subject: int
    """The collection, or scope."""
    scope: int
    max_ttl: int | None = None
    history: bool | None = None
    """None: not known."""

    @classmethod
    def of_json(cls, members: list[int | None]) -> KnownEvent:
        """From a store's files; older ones have only the first four members."""
        known = cls(*members)  # type: ignore[arg-type]
        return known._replace(max_ttl=UNKNOWN_TTL) if len(members) == 4 else known


class CollectionEvents:
    """The events of one vbucket, and the last change in each collection."""

    __slots__ = ("highs", "known")

    def __init__(self, known: Iterable[KnownEvent] = ()) -> None:
        self.known = list(known)
        """In order; never changed in place, because a job on another thread may be reading it."""
        self.highs: dict[int, int] | None = None
        """By collection, the seqno of its last change; None until somebody asks."""

    def add(self, frame: bytes, seqno: int) -> int | None:
        """Add an event; return the collection whose documents it removes, if any."""
        event, subject = system_event(frame)
        content = event_content(frame)
        known = KnownEvent(seqno, event, subject, content.scope_id, content.max_ttl, content.history)
        self.known = [*self.known, known]
        return subject if (seqno, subject) in self.drops else None

    def last_of(self, event: int, subject: int) -> int:
        """The seqno of the last event that one of this kind and subject replaces; 0 if there is none."""
        key = system_key(event, subject)
        same = (seen.seqno for seen in self.known if system_key(seen.event, seen.subject) == key)
        return max(same, default=0)

    @property
    def drops(self) -> list[tuple[int, int]]:
        """(seqno, collection) of every event that removed a collection's documents: it ended, or began once
        more, which is how a collection is emptied.
        """
        drops = []
        begun: set[int] = {0}
        for seqno, event, subject, *_ in self.known:
            if event == SystemEventId.COLLECTION_END or (
                event == SystemEventId.COLLECTION_BEGIN and subject in begun
            ):
                drops.append((seqno, subject))
            if event == SystemEventId.COLLECTION_BEGIN:
                begun.add(subject)
        return drops

    def count_in(self, index: Mapping[bytes, int]) -> int:
        """How many keys of an index are those of events."""
        return sum(key in index for key in {system_key(seen.event, seen.subject) for seen in self.known})

    def drops_up_to(self, seqno: int) -> DroppedCollections:
        return DroppedCollections(self.drops, seqno) if self.known else NO_DROPS

    def count_highs(self, index: Mapping[bytes, int]) -> None:
        """Find the last change in each collection."""
        highs: dict[int, int] = {}
        for key, entry in index.items():
            if key[0] != 1:
                collection = collection_of(key)
                highs[collection] = max(highs.get(collection, 0), newest_seqno(entry))
        self.highs = highs

    def high_seqno(self, collections: set[int]) -> int:
        """The last change, or event, in any of these collections; `count_highs` must have been called."""
        assert self.highs is not None
        events = [
            seen.seqno
            for seen in self.known
            if seen.event not in SCOPE_EVENTS and seen.subject in collections
        ]
        return max([self.highs.get(collection, 0) for collection in collections] + events, default=0)

    def up_to(self, seqno: int) -> CollectionEvents:
        """What is left after a rollback."""
        return CollectionEvents(seen for seen in self.known if seen.seqno <= seqno)
