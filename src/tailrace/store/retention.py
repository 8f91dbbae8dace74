"""How far back every version of a document is kept: the change history of a bucket.

Superseded versions stay in the segments until a merge drops them (`compaction`). With a retention it drops
only those that were superseded before the retained part: by age, by size, or by whichever is exceeded first.
The age of a change is that of its CAS. Each vbucket has an equal share of the size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .format import cas_of
from .segment import SegmentPiece

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """Which of a vbucket's sealed changes are retained at a moment."""

    max_bytes: int
    """Of its newest changes; 0: any size."""
    oldest_cas: int
    """Changes with a lower CAS are too old; 0: none are."""

    def floor(self, pieces: Sequence[SegmentPiece]) -> int:
        """The newest seqno that need not be retained, in pieces in the order of their seqnos; 0 if there is
        none.
        """
        with_frames = [piece for piece in pieces if piece.count]
        return max(self._by_size(with_frames), self._by_age(with_frames))

    def _by_size(self, pieces: Sequence[SegmentPiece]) -> int:
        if not self.max_bytes:
            return 0
        left = self.max_bytes
        for piece in reversed(pieces):
            if piece.frame_bytes > left:
                sizes = np.asarray(piece.columns.lengths[: piece.count], np.int64)[::-1].cumsum()
                fitting = int(np.searchsorted(sizes, left, "right"))
                return int(piece.columns.seqnos[piece.count - fitting - 1])
            left -= piece.frame_bytes
        return 0

    def _by_age(self, pieces: Sequence[SegmentPiece]) -> int:
        if not self.oldest_cas:
            return 0
        for piece in reversed(pieces):
            seqnos = piece.columns.seqnos[: piece.count]
            # a clock that only rises made them, except those from elsewhere: near enough
            recent = bisect_left(
                range(len(seqnos)), self.oldest_cas, key=lambda at: self._cas(piece, seqnos[at])
            )
            if recent:
                return int(seqnos[recent - 1])
        return 0

    @staticmethod
    def _cas(piece: SegmentPiece, seqno: int) -> int:
        frame = piece.frame(seqno)
        assert frame is not None
        return cas_of(frame)
