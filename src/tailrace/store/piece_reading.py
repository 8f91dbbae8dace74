"""Reading many small pieces of segments together, for a merge.

While a bucket is young, each generation has a few dozen frames of each of a thousand vbuckets. What lies side
by side in a file is read in one go and every block is checked. After that nothing is done block by block or
frame by frame: the columns of all are worked out together. The frames stay where they were read until it is
known which of them are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..files import File
from ..frames import Bytes, Mask, Offsets, Seqnos
from ..model import MAX_U64
from .format import BLOCK, COLUMN_BYTES, padded
from .segment import Frames, Segment, SegmentPiece

__all__ = ["Gathered", "Scattered", "gather"]


class Scattered(NamedTuple):
    """Frames anywhere in a buffer, with their columns."""

    data: Bytes
    offsets: Offsets
    seqnos: Seqnos
    lengths: npt.NDArray[np.uint32]
    crcs: npt.NDArray[np.uint32]
    traits: npt.NDArray[np.uint8]

    def part(self, which: slice | Mask) -> Scattered:
        """Some of the frames."""
        data, offsets, seqnos, lengths, crcs, traits = self
        return Scattered(data, offsets[which], seqnos[which], lengths[which], crcs[which], traits[which])

    def keep(self, mask: Mask) -> Frames:
        """The frames where the mask is true, back to back: copied run by run, which costs less than frame by
        frame.
        """
        data, offsets, seqnos, lengths, crcs, traits = self.part(mask)
        ends = offsets + lengths
        first, last = np.ones(len(ends), np.bool_), np.ones(len(ends), np.bool_)  # frames of a run
        first[1:] = last[:-1] = offsets[1:] != ends[:-1]
        view = data.data
        runs = [view[a:b] for a, b in zip(offsets[first].tolist(), ends[last].tolist(), strict=True)]
        return Frames(np.frombuffer(bytearray().join(runs), np.uint8), seqnos, lengths, crcs, traits)


class Gathered(NamedTuple):
    """Frames and pairs of several pieces, one piece after the other."""

    frames: Scattered
    stops: Offsets  # where the frames of each piece end
    news: Seqnos
    olds: Seqnos
    pair_stops: Offsets  # where the pairs of each piece end


class _Columns:
    """Where the columns of some parts of a buffer are; `counts` has the number of elements of each part."""

    def __init__(self, starts: list[int], counts: list[int]) -> None:
        self.starts, self.counts = np.array(starts, np.int64), np.array(counts, np.int64)
        self.places = np.arange(self.counts.sum()) - self.spread(np.cumsum(self.counts) - self.counts)

    def spread(self, values: Offsets) -> Offsets:
        """One value for each part, repeated for all elements of the part."""
        return np.repeat(values, self.counts)

    def at(self, skipped: int, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column; in each part it comes after columns of this many bytes per element."""
        starts = (self.starts + skipped * self.counts) // words.itemsize
        column: npt.NDArray[Any] = words[self.spread(starts) + self.places]
        return column


def gather(pieces: Sequence[SegmentPiece]) -> Gathered:
    """All frames and pairs of some pieces; StoreCorrupt if they are not what was written."""
    blocks = [piece.place if piece.count else (0, 0) for piece in pieces]
    pairs = [piece.pairs_place for piece in pieces]
    data, block_starts, pair_starts = _read(pieces, blocks, pairs)
    starts: list[int] = []
    counts: list[int] = []
    frame_starts: list[int] = []
    frame_bytes: list[int] = []
    stops = []
    for piece, (offset, size), at in zip(pieces, blocks, block_starts, strict=True):
        for place, head in piece.heads_in(data[at : at + size], offset):
            starts.append(at + place + BLOCK.size)
            counts.append(head.frames)
            frame_starts.append(starts[-1] + padded(head.frames * COLUMN_BYTES))
            frame_bytes.append(head.frame_bytes)
        stops.append(len(counts))
    view = data.data
    for piece, (_, size), at in zip(pieces, pairs, pair_starts, strict=True):
        piece.check_pairs(view[at : at + size])
    words, halves = data.view("<u8"), data.view("<u4")
    table = _Columns(starts, counts)
    lengths = table.at(8, halves)
    before = np.cumsum(lengths, dtype=np.int64) - lengths  # as if they lay back to back
    offsets = before + table.spread(np.array(frame_starts, np.int64) - np.cumsum([0, *frame_bytes])[:-1])
    frames = Scattered(data, offsets, table.at(0, words), lengths, table.at(12, halves), table.at(16, data))
    frame_stops = np.append(0, np.cumsum(table.counts))[stops]
    table = _Columns(pair_starts, [size // 16 for _, size in pairs])
    return _clipped(
        pieces, Gathered(frames, frame_stops, table.at(0, words), table.at(8, words), np.cumsum(table.counts))
    )


def _read(
    pieces: Sequence[SegmentPiece], blocks: list[tuple[int, int]], pairs: list[tuple[int, int]]
) -> tuple[Bytes, list[int], list[int]]:
    """Read the blocks and pairs of some pieces, given by offset and size in their files, into one buffer;
    also returns where each of them starts there.
    """
    by_segment: dict[Segment, list[int]] = {}
    for number, piece in enumerate(pieces):
        by_segment.setdefault(piece.segment, []).append(number)
    block_starts, pair_starts = [0] * len(pieces), [0] * len(pieces)
    runs: list[tuple[File, int, int]] = []  # what lies side by side: file, offset in it, and in the buffer
    at = 0
    for segment, numbers in by_segment.items():
        for places, starts in ((blocks, block_starts), (pairs, pair_starts)):
            stop = -1
            for number in numbers:
                offset, size = places[number]
                starts[number] = at
                if size:
                    if offset != stop:
                        runs.append((segment.file, offset, at))
                    stop = offset + size
                    at += size
    data = np.empty(at, np.uint8)
    view = data.data
    for (file, offset, start), end in zip(runs, [*(run[2] for run in runs[1:]), at], strict=True):
        file.read_into(view[start:end], offset)
    return data, block_starts, pair_starts


def _clipped(pieces: Sequence[SegmentPiece], gathered: Gathered) -> Gathered:
    """What is left without what rollbacks have removed."""
    if all(piece.clip is None for piece in pieces):
        return gathered
    clips = np.array([MAX_U64 if piece.clip is None else piece.clip for piece in pieces], np.uint64)
    frames, stops, news, olds, pair_stops = gathered
    mask = frames.seqnos <= np.repeat(clips, np.diff(stops, prepend=0))
    pairs_mask = news <= np.repeat(clips, np.diff(pair_stops, prepend=0))
    return Gathered(
        frames.part(mask),
        np.append(0, np.cumsum(mask))[stops],
        news[pairs_mask],
        olds[pairs_mask],
        np.append(0, np.cumsum(pairs_mask))[pair_stops],
    )
