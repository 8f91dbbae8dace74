"""Documents that are gone because their collection is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..frames import OPCODE_AT, collections_at
from ..wire.codes import SystemEventId
from .format import SYSTEM, UNSEEN, collection_of, frame_key, system_event
from .piece_reading import Scattered
from .segment import Frames

__all__ = ["NO_DROPS", "DroppedCollections"]

_MODIFIED = SystemEventId.COLLECTION_MODIFIED


class DroppedCollections:
    """Collections that ended or were emptied, as of a seqno: their earlier documents are gone without a
    deletion each.
    """

    __slots__ = ("_by_collection",)

    def __init__(self, drops: Iterable[tuple[int, int]], up_to: int) -> None:
        self._by_collection = {collection: seqno for seqno, collection in sorted(drops) if seqno <= up_to}

    def __bool__(self) -> bool:
        return bool(self._by_collection)

    @property
    def latest(self) -> int:
        """The last seqno at which a collection was dropped."""
        return max(self._by_collection.values(), default=0)

    def hides(self, frame: bytes, seqno: int, traits: int) -> bool:
        """Whether a change is gone with its collection: a document's, a prepare, an abort, or an event that
        modified the collection.
        """
        if not traits & SYSTEM or frame[OPCODE_AT] in UNSEEN:
            return seqno < self._by_collection.get(collection_of(frame_key(frame)), 0)
        event, subject = system_event(frame)
        return event == _MODIFIED and seqno < self._by_collection.get(subject, 0)

    def keep_mask(self, frames: Frames | Scattered) -> npt.NDArray[np.bool_] | None:
        """Which frames are left; None for all of them."""
        if not self._by_collection:
            return None
        ids = collections_at(frames.data, frames.offsets)
        hidden = np.zeros(len(ids), np.bool_)
        for collection, seqno in self._by_collection.items():
            hidden |= (ids == collection) & (frames.seqnos < seqno)
        events = (frames.traits & SYSTEM) != 0
        if events.any():
            offsets, lengths = frames.offsets, frames.lengths
            for place in np.flatnonzero(events).tolist():
                start = int(offsets[place])
                frame = frames.data[start : start + int(lengths[place])].tobytes()
                hidden[place] = self.hides(frame, int(frames.seqnos[place]), SYSTEM)
        return ~hidden if hidden.any() else None


NO_DROPS = DroppedCollections((), 0)
