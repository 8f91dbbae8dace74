"""The system events of a vbucket: which collections and scopes began and ended in it, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ..wire.codes import SCOPE_EVENTS, SystemEventId
from .format import collection_of, scope_of, system_event, system_key
from .index import SEQNO
from .snapshot import NO_DROPS, Drops

__all__ = ["CollectionEvents", "KnownEvent"]

KnownEvent: TypeAlias = tuple[int, int, int, int]
"""Seqno, event, collection or scope id, scope id."""

_BEGAN_OR_ENDED = (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_END)


class CollectionEvents:
    """The events of one vbucket, and the last change in each collection."""

    __slots__ = ("highs", "known")

    def __init__(self, known: Iterable[KnownEvent] = ()) -> None:
        self.known = list(known)
        """In order; never changed in place, because a job on another thread may be reading it."""
        self.highs: dict[int, int] | None = None
        """By collection, the seqno of its last change; None until somebody asks."""

    def add(self, frame: bytes, seqno: int) -> int | None:
        """A new event; the collection whose documents are gone by it, if any."""
        event, subject = system_event(frame)
        scope = scope_of(frame) if event in _BEGAN_OR_ENDED else subject
        self.known = [*self.known, (seqno, event, subject, scope)]
        return subject if (seqno, subject) in self.drops else None

    def last_of(self, event: int, subject: int) -> int:
        """The seqno of the last event of the same collection or scope as another; 0 if there is none."""
        is_scope = event in SCOPE_EVENTS
        return max(
            (
                seqno
                for seqno, known, which, _ in self.known
                if which == subject and (known in SCOPE_EVENTS) == is_scope
            ),
            default=0,
        )

    @property
    def drops(self) -> list[tuple[int, int]]:
        """(seqno, collection) of every event that removed a collection's documents: it ended, or began once
        more, which is how a collection is emptied.
        """
        drops = []
        begun: set[int] = {0}
        for seqno, event, subject, _ in self.known:
            if event == SystemEventId.COLLECTION_END or (
                event == SystemEventId.COLLECTION_BEGIN and subject in begun
            ):
                drops.append((seqno, subject))
            if event == SystemEventId.COLLECTION_BEGIN:
                begun.add(subject)
        return drops

    def count_in(self, index: Mapping[bytes, int]) -> int:
        """How many keys of an index are those of events."""
        return sum(
            key in index for key in {system_key(event, subject) for _, event, subject, _ in self.known}
        )

    def drops_up_to(self, seqno: int) -> Drops:
        return Drops(self.drops, seqno) if self.known else NO_DROPS

    def count_highs(self, index: Mapping[bytes, int]) -> None:
        """Find the last change in each collection."""
        highs: dict[int, int] = {}
        for key, entry in index.items():
            if key[0] != 1:
                collection = collection_of(key)
                highs[collection] = max(highs.get(collection, 0), entry & SEQNO)
        self.highs = highs

    def high_seqno(self, collections: set[int]) -> int:
        """The last change, or event, in any of these collections; `count_highs` must have been called."""
        assert self.highs is not None
        events = [
            seqno
            for seqno, event, subject, _ in self.known
            if event in _BEGAN_OR_ENDED and subject in collections
        ]
        return max([self.highs.get(collection, 0) for collection in collections] + events, default=0)

    def up_to(self, seqno: int) -> CollectionEvents:
        """What is left after a rollback."""
        return CollectionEvents(event for event in self.known if event[0] <= seqno)
