"""Collections of which only the newest versions are wanted, in a bucket that keeps every version for a while.

A collection's history can be switched on and off: the system events of a vbucket say where. A version is part
of the history if it was made while that was on. Where no event says anything about it, as in stores older
than such events, the manifest's setting holds for all versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ..frames import collections_at
from ..model import MAX_U64
from ..wire.codes import SCOPE_EVENTS
from .collection_events import KnownEvent
from .format import SYSTEM, collection_of, frame_key
from .piece_reading import Scattered
from .segment import Frames

__all__ = ["NOTHING_DEDUPLICATED", "Deduplicated"]

_FOR_EVER = MAX_U64


class Deduplicated:
    """The changes of one vbucket that go as soon as they are superseded."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Mapping[int, list[tuple[int, int]]]) -> None:
        """``spans``: by collection, the first seqno of each range and the one after its last."""
        self._spans = spans

    @classmethod
    def of(cls, events: Iterable[KnownEvent], histories: Mapping[int, bool]) -> Deduplicated:
        """From a vbucket's events, for the collections that have their own setting; others follow the
        bucket's.
        """
        if not histories:
            return NOTHING_DEDUPLICATED
        spans: dict[int, list[tuple[int, int]]] = {}
        # Where history is off, since when. The default collection began without an event, as the bucket does.
        off_since = {uid: 0 for uid, history in histories.items() if uid and not history}
        has_event: set[int] = set()
        for event in events:
            uid = event.subject
            if event.event in SCOPE_EVENTS or event.history is None or uid not in histories:
                continue
            if uid not in has_event:
                has_event.add(uid)
                off_since.pop(uid, None)
            if not event.history:
                off_since.setdefault(uid, event.seqno)
            elif uid in off_since:
                spans.setdefault(uid, []).append((off_since.pop(uid), event.seqno))
        for uid, start in off_since.items():
            spans.setdefault(uid, []).append((start, _FOR_EVER))
        return cls(spans) if spans else NOTHING_DEDUPLICATED

    def __bool__(self) -> bool:
        return bool(self._spans)

    def has(self, frame: bytes, seqno: int, traits: int) -> bool:
        """Whether a change is one of them."""
        if traits & SYSTEM:
            return False
        spans = self._spans.get(collection_of(frame_key(frame)), ())
        return any(start <= seqno < end for start, end in spans)

    def mask(self, frames: Frames | Scattered) -> npt.NDArray[np.bool_]:
        """Which changes are among them."""
        ids = collections_at(frames.data, frames.offsets)
        seqnos = frames.seqnos
        among = np.zeros(len(ids), np.bool_)
        for collection, spans in self._spans.items():
            in_collection = ids == collection
            for start, end in spans:
                among |= in_collection & (seqnos >= np.uint64(start)) & (seqnos < np.uint64(end))
        among &= (frames.traits & SYSTEM) == 0
        return among


NOTHING_DEDUPLICATED = Deduplicated({})
