"""Stable reads of a vbucket for streams: from the changes in memory, and from sealed segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..frames import CHUNK_BYTES, OPCODE_AT, Chunk, Offsets, seqnos_at
from ..large_bytes import LARGE_BYTES
from ..wire.codes import DcpOpcode
from ..wire.header import HEADER_SIZE
from .deduplication import NOTHING_DEDUPLICATED, Deduplicated
from .dropped_collections import DroppedCollections
from .format import NOTE_SHIFT, NOTE_TRAITS, SYSTEM
from .segment import Frames, SegmentPiece

__all__ = ["DiskSnapshot", "MemorySnapshot", "superseded"]

STREAM_TRAITS = 0x7F
"""What a producer wants to know about a chunk: all but REPLACES."""

_PREPARE = int(DcpOpcode.PREPARE)
_NO_SEQNOS = np.empty(0, np.uint64)
_FEW = 32


def superseded(
    pieces: Sequence[SegmentPiece], after: int = 0, by_before: int | None = None
) -> npt.NDArray[np.uint64]:
    """The sorted seqnos of all changes after a seqno that a later change in these pieces has superseded; with
    ``by_before``, only by changes before that seqno.
    """
    pairs = [piece.pairs() for piece in pieces if piece.pair_count]
    if not pairs:
        return _NO_SEQNOS
    every = np.concatenate([olds for _, olds in pairs])
    chosen = every > after
    if by_before is not None:
        chosen &= np.concatenate([news for news, _ in pairs]) < by_before
    return np.sort(every[chosen])


def in_sorted(seqnos: npt.NDArray[np.uint64], among: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which seqnos are among others; both are ascending."""
    low = int(np.searchsorted(among, seqnos[0]))
    high = int(np.searchsorted(among, seqnos[-1], "right"))
    if low == high:
        return np.zeros(len(seqnos), np.bool_)
    part = among[low:high]
    places = np.searchsorted(part, seqnos)
    is_among: npt.NDArray[np.bool_] = part[np.minimum(places, len(part) - 1)] == seqnos
    return is_among


class MemorySnapshot:
    """Changes that are in memory; it keeps their frames until they are read."""

    in_memory = True

    def __init__(
        self,
        start: int,
        end: int,
        frames: list[bytes],
        traits: bytes,
        *,
        checkpoint: bool,
        checkpoint_id: int,
        history_start: int = 0,
    ) -> None:
        self.start = start
        self.end = end
        self.history_start = history_start
        self.checkpoint = checkpoint
        self.checkpoint_id = checkpoint_id
        self._frames = frames
        self._traits = traits
        self._lengths: Offsets | None = None
        self._at = 0

    def read(self, max_bytes: int = CHUNK_BYTES) -> Chunk | None:
        at, count = self._at, len(self._frames)
        if at == count:
            return None
        if self._lengths is None:
            self._lengths = np.fromiter(map(len, self._frames), np.int64, count)
        lengths = self._lengths[at : at + max_bytes // HEADER_SIZE + 1]  # more can't fit
        ends = np.cumsum(lengths)
        if ends[-1] > max_bytes:
            fitting = max(int(np.searchsorted(ends, max_bytes, "right")), 1)
            lengths, ends = lengths[:fitting], ends[:fitting]
        stop = at + len(ends)
        frames = self._frames if stop - at == count else self._frames[at:stop]
        if len(frames) == 1 and len(frames[0]) >= LARGE_BYTES:
            data = np.frombuffer(frames[0], np.uint8).copy()  # into huge pages, where there are any
        else:
            data = np.frombuffer(bytearray().join(frames), np.uint8)
        offsets = ends - lengths
        traits = np.frombuffer(self._traits, np.uint8, stop - at, at)
        self._at = stop
        if stop == count:
            self.close()
        every = int(np.bitwise_or.reduce(traits)) & STREAM_TRAITS
        return Chunk(data, offsets, int(seqnos_at(data, offsets[-1:])[0]), every)

    def close(self) -> None:
        self._frames, self._traits, self._lengths, self._at = [], b"", None, 0


def fold(
    frames: list[bytes],
    seqnos: Sequence[int],
    notes: Sequence[int],
    drops: DroppedCollections,
    only: Deduplicated | None = None,
) -> tuple[list[bytes], bytes]:
    """Only the newest version of each key, from changes in order; and their traits. With ``only``, every
    version of all other changes.
    """
    first = seqnos[0]
    if len(notes) < _FEW:  # most snapshots of a live stream are this short: not worth an array
        dead = {old for note in notes if (old := note >> NOTE_SHIFT) >= first}
        traits = bytes([note & NOTE_TRAITS for note in notes])
    else:
        noted = np.array(notes, np.uint64)
        olds = noted >> np.uint64(NOTE_SHIFT)
        dead = set(olds[olds >= first].tolist())
        traits = (noted & np.uint64(NOTE_TRAITS)).astype(np.uint8).tobytes()
    if dead and only is not None:
        dead = {
            seqno
            for frame, seqno, trait in zip(frames, seqnos, traits, strict=True)
            if only and seqno in dead and only.has(frame, seqno, trait)
        }
    if dead and any(trait & SYSTEM for trait in traits):
        # A copy that never got a prepare could make nothing of its abort.
        dead -= {seqno for frame, seqno in zip(frames, seqnos, strict=True) if frame[OPCODE_AT] == _PREPARE}
    if not dead and not drops:
        return frames, traits
    kept = [
        place
        for place, seqno in enumerate(seqnos)
        if seqno not in dead and not (drops and drops.hides(frames[place], seqno, traits[place]))
    ]
    return [frames[place] for place in kept], bytes([traits[place] for place in kept])


class DiskSnapshot:
    """What the sealed segments held when it was made, then (for a stream of what is on disk only) changes in
    memory.

    It keeps the segments' files open, but no frames: each block is read when it is asked for.
    """

    in_memory = False
    checkpoint_id = 0

    def __init__(
        self,
        after: int,
        end: int,
        pieces: Sequence[SegmentPiece],
        dead: npt.NDArray[np.uint64],
        drops: DroppedCollections,
        *,
        rest: MemorySnapshot | None = None,
        history_start: int = 0,
        dead_where_deduplicated: npt.NDArray[np.uint64] = _NO_SEQNOS,
        deduplicated: Deduplicated = NOTHING_DEDUPLICATED,
    ) -> None:
        """``dead`` changes are left out; ``dead_where_deduplicated`` only where no history is kept."""
        self.start = after + 1
        self.end = end
        self.history_start = history_start
        self._few = deduplicated, dead_where_deduplicated if deduplicated else _NO_SEQNOS
        self.checkpoint = True
        self._seqno = after
        self._pieces = [piece for piece in pieces if piece.count and piece.last > after]
        self._dead = dead
        self._drops = drops
        self._is_current = not len(dead) and not drops and not len(self._few[1])  # all that is read
        self._rest = rest
        self._blocks: Iterator[Frames] | None = None

    def read(self, max_bytes: int = CHUNK_BYTES) -> Chunk | None:
        while self._pieces:
            piece = self._pieces[0]
            if self._blocks is None:
                self._blocks = piece.blocks(self._seqno, self._dead)
            frames = next(self._blocks, None)
            if frames is None:
                self._blocks = None
                del self._pieces[0]
                continue
            if len(frames.data) > max_bytes and len(frames.seqnos) > 1:
                # Less than a block was asked for. The rest is read again rather than held.
                ends = np.cumsum(frames.lengths, dtype=np.int64)
                frames = frames.cut(0, max(int(np.searchsorted(ends, max_bytes, "right")), 1))
                self._blocks = None
            if self.history_start and frames.seqnos.item(0) < self.history_start <= frames.seqnos.item(-1):
                # The two parts have markers of their own, so no chunk has changes of both.
                frames = frames.cut(0, int(np.searchsorted(frames.seqnos, self.history_start)))
                self._blocks = None
            last_seqno = self._seqno = frames.seqnos.item(-1)
            traits = piece.traits & STREAM_TRAITS
            if last_seqno == piece.last:
                self._blocks = None
                del self._pieces[0]
            if not self._is_current:
                frames = self._current(frames)
                if not len(frames.seqnos):
                    continue
                last_seqno = frames.seqnos.item(-1)
            if traits:  # of some frames of the piece
                traits &= int(np.bitwise_or.reduce(frames.traits))
            return Chunk(frames.data, frames.offsets, last_seqno, traits)
        return self._rest.read(max_bytes) if self._rest else None

    def _current(self, frames: Frames) -> Frames:
        mask = None
        if len(self._dead):
            mask = ~in_sorted(frames.seqnos, self._dead)
        deduplicated, dead = self._few
        if len(dead):
            gone = in_sorted(frames.seqnos, dead)
            gone &= deduplicated.mask(frames)
            mask = ~gone if mask is None else mask & ~gone
        kept = self._drops.keep_mask(frames)
        if kept is not None:
            mask = kept if mask is None else mask & kept
        return frames if mask is None else frames.keep(mask)

    def close(self) -> None:
        self._pieces, self._blocks, self._rest = [], None, None
