"""Changes in memory: what is not yet sealed, and the checkpoints that live streams read.

A vbucket's newest changes are in `Tail`s, oldest first: one that grows, and those of earlier generations
that are being sealed into a segment, or that are sealed and only kept for streams as long as the quota
allows. Checkpoints are not a second copy: they are marks on the same changes. A snapshot from memory never
crosses the end of a checkpoint, and folds repeated keys only up to its own end, so that it is a state that
the vbucket really had.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generations import Generation

__all__ = ["Checkpoints", "Tail"]


class Tail:
    """Changes of one vbucket that are in memory, in the order of their seqnos, superseded versions too.

    ``items`` has two elements a change, its frame and its note, in one list: a write touches a thousand
    vbuckets' memory in turn, and each place that is not in the processor's cache costs more than the work
    done there. A note is the seqno that the change supersedes (0 for none) and the frame's traits, see
    `format.NOTE_SHIFT`.
    """

    __slots__ = ("decisions", "first", "generation", "items", "seqnos")

    def __init__(self, first: int) -> None:
        self.first = first  # no change before this is here, and all from it on are here or in a later tail
        self.items: list[Any] = []
        self.seqnos: array[int] | None = None  # None: they follow each other from `first` on
        self.generation: Generation | None = None
        self.decisions: dict[int, int] = {}
        """Changes that committed a prepare: their seqnos, and that of the prepare, which is superseded, too.
        A note has room for one superseded seqno, and that is the document's."""

    def __len__(self) -> int:
        return len(self.items) >> 1

    def expect(self, seqno: int) -> None:
        """The next change has this seqno: note it if that leaves a gap."""
        if self.seqnos is None and seqno != self.first + len(self):
            self.seqnos = array("Q", range(self.first, self.first + len(self)))

    def frame(self, seqno: int) -> bytes | None:
        """The frame with this seqno, if it is here."""
        if self.seqnos is None:
            place = seqno - self.first
            if not 0 <= place < len(self):
                return None
        else:
            place = bisect_left(self.seqnos, seqno)
            if place == len(self.seqnos) or self.seqnos[place] != seqno:
                return None
        frame: bytes = self.items[2 * place]
        return frame

    def after(self, seqno: int) -> int:
        """The place of the first change after a seqno."""
        if self.seqnos is None:
            return min(max(seqno - self.first + 1, 0), len(self))
        return bisect_right(self.seqnos, seqno)

    def frames(self, start: int = 0, stop: int | None = None) -> list[bytes]:
        return self.items[2 * start : None if stop is None else 2 * stop : 2]

    def notes(self, start: int = 0, stop: int | None = None) -> list[int]:
        return self.items[2 * start + 1 : None if stop is None else 2 * stop : 2]

    def numbers(self, start: int = 0, stop: int | None = None) -> Sequence[int]:
        """The seqnos between two places."""
        if self.seqnos is None:
            return range(self.first + start, self.first + (len(self) if stop is None else stop))
        return self.seqnos[start:stop]

    def cut(self, stop: int) -> None:
        """Keep only the changes before a place."""
        if self.decisions:
            self.decisions = self._decisions(0, stop)
        del self.items[2 * stop :]
        if self.seqnos is not None:
            del self.seqnos[stop:]

    def part(self, start: int, stop: int, first: int) -> Tail:
        """A copy of the changes between two places."""
        tail = Tail(first)
        tail.items = self.items[2 * start : 2 * stop]
        if self.seqnos is not None:
            tail.seqnos = self.seqnos[start:stop]
        elif stop > start and self.first + start != first:
            tail.seqnos = array("Q", self.numbers(start, stop))
        if self.decisions:
            tail.decisions = self._decisions(start, stop)
        return tail

    def _decisions(self, start: int, stop: int) -> dict[int, int]:
        """Those made between two places."""
        numbers = self.numbers(start, stop)
        if not len(numbers):
            return {}
        low, high = numbers[0], numbers[-1]
        return {new: old for new, old in self.decisions.items() if low <= new <= high}


class Checkpoints:
    """Marks on a vbucket's changes: checkpoint `id` holds those after its start, up to the start of the
    next.
    """

    __slots__ = ("_first_id", "_items", "_starts", "full_at")

    def __init__(self, open_id: int, start: int, items: int) -> None:
        self._first_id = open_id
        self._starts = [start]
        self._items = items  # changes in a checkpoint before it is closed
        self.full_at = start + items
        """The seqno with which the open checkpoint is full."""

    def following(self, start: int) -> Checkpoints:
        """A new open checkpoint behind ``start``, with the next number."""
        return self.numbered(self.open_id + 1, start)

    def numbered(self, open_id: int, start: int) -> Checkpoints:
        """An open checkpoint behind ``start``, with a given number."""
        return Checkpoints(open_id, start, self._items)

    @property
    def open_id(self) -> int:
        return self._first_id + len(self._starts) - 1

    @property
    def open_start(self) -> int:
        return self._starts[-1]

    def close(self, seqno: int) -> bool:
        """End the open checkpoint here; False if it is empty, and stays open."""
        if seqno <= self._starts[-1]:
            return False
        self._starts.append(seqno)
        self.full_at = seqno + self._items
        return True

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
