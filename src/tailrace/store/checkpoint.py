"""Changes in memory: what is not yet sealed, and the checkpoints that live streams read.

A vbucket's newest changes stand in `Tail`s, oldest first: one that grows, and those of earlier generations
that are being sealed into a segment, or that are sealed and only kept for streams as long as the quota
allows. Checkpoints are no second copy: they are marks on the same changes. A snapshot from memory never
crosses the end of a checkpoint, and folds repeated keys only up to its own end, so that it is a state that
the vbucket really had.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compaction import Generation

__all__ = ["Checkpoints", "Tail"]


class Tail:
    """Changes of one vbucket that are in memory, in the order of their seqnos, superseded versions too."""

    __slots__ = ("first", "frames", "generation", "replaced", "seqnos", "traits")

    def __init__(self, first: int) -> None:
        # no change before this seqno is here, and all from it on are here or in a later tail
        self.first = first
        self.frames: list[bytes] = []
        self.seqnos: array[int] = array("Q")
        self.replaced: array[int] = array("Q")  # seqno that each change supersedes; 0 for none
        self.traits = bytearray()
        self.generation: Generation | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def frame(self, seqno: int) -> bytes | None:
        """The frame with this seqno, if it is here."""
        place = seqno - self.first
        seqnos = self.seqnos
        if place >= len(seqnos) or seqnos[place] != seqno:
            place = bisect_left(seqnos, seqno)
            if place == len(seqnos) or seqnos[place] != seqno:
                return None
        return self.frames[place]

    def after(self, seqno: int) -> int:
        """The place of the first change after a seqno."""
        return bisect_right(self.seqnos, seqno)

    def part(self, start: int, stop: int, first: int) -> Tail:
        """A copy of the changes between two places."""
        tail = Tail(first)
        tail.frames = self.frames[start:stop]
        tail.seqnos = self.seqnos[start:stop]
        tail.replaced = self.replaced[start:stop]
        tail.traits = self.traits[start:stop]
        return tail


class Checkpoints:
    """Marks on a vbucket's changes: checkpoint `id` holds those after its start, up to the start of the
    next.
    """

    __slots__ = ("_first_id", "_starts")

    def __init__(self, open_id: int, start: int) -> None:
        self._first_id = open_id
        self._starts = [start]

    @property
    def open_id(self) -> int:
        return self._first_id + len(self._starts) - 1

    @property
    def open_start(self) -> int:
        return self._starts[-1]

    def close(self, seqno: int) -> None:
        """The open checkpoint ends here; an empty one stays open."""
        if seqno > self._starts[-1]:
            self._starts.append(seqno)

    def containing(self, seqno: int) -> tuple[int, int, int | None]:
        """Number, start and end (None while it is open) of the checkpoint that a change is in."""
        place = max(bisect_left(self._starts, seqno) - 1, 0)
        end = self._starts[place + 1] if place + 1 < len(self._starts) else None
        return self._first_id + place, self._starts[place], end

    def start_of(self, checkpoint_id: int) -> int | None:
        place = checkpoint_id - self._first_id
        return self._starts[place] if 0 <= place < len(self._starts) else None

    def forget_before(self, seqno: int) -> None:
        """Changes up to here have left memory, and so have the checkpoints that lie wholly before."""
        place = max(bisect_right(self._starts, seqno) - 1, 0)
        self._first_id += place
        del self._starts[:place]

    def rolled_back_to(self, seqno: int) -> None:
        """Changes after this are gone; what comes next is in a checkpoint with a new number."""
        next_id = self.open_id + 1
        self._first_id, self._starts = next_id, [seqno]
