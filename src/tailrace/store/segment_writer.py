"""Writing a sealed segment: many vbuckets at a time, a few steps for each of them and none for each frame.

A generation has a few dozen changes of each of a thousand vbuckets. What to write is worked out for many
vbuckets together, as columns; only the headers of blocks are made one by one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..files import Buffer, File
from ..frames import CHUNK_BYTES, Offsets, Seqnos
from .format import (
    BLOCK,
    BLOCK_MAGIC,
    COLUMN_BYTES,
    CRC_BYTES,
    DIRECTORY,
    EXPIRES,
    FOOTER,
    FORMAT_VERSION,
    NO_EXPIRY,
    SEGMENT,
    SEGMENT_MAGIC,
    checksum,
    expiries_at,
    with_crc_at_end,
    with_crc_inside,
)
from .segment import Frames

__all__ = ["Pieces", "SegmentWriter", "full_blocks"]

WRITE_BYTES = 1 << 20
SYNC_BYTES = 8 << 20
_PADDING = [bytes(-size % 8) for size in range(8)]


class Pieces(NamedTuple):
    """Frames and pairs of several vbuckets, one vbucket after the other."""

    vbuckets: list[int]  # ascending
    frames: Frames
    stops: list[int]  # where the frames of each vbucket end
    news: Seqnos
    olds: Seqnos
    pair_stops: list[int]  # where the pairs of each vbucket end


@dataclass(slots=True)
class _Entry:
    """What the directory says about a vbucket, in the order of its fields."""

    vbucket: int
    traits: int = 0
    min_expiry: int = NO_EXPIRY
    count: int = 0
    pairs: int = 0
    pairs_crc: int = 0
    spare: int = 0
    offset: int = 0
    bytes: int = 0
    frame_bytes: int = 0
    pairs_offset: int = 0
    first: int = 0
    last: int = 0


_row = attrgetter(*(field.name for field in fields(_Entry)))  # `astuple` copies deeply: 50 times slower


class SegmentWriter:
    """Writes a segment from its first vbucket to its last into an empty file; it is whole and synced after
    `finish`, and the caller closes it.
    """

    def __init__(self, file: File, number: int) -> None:
        self._file = file
        self._parts: list[Buffer] = []
        self._pending = 0
        self._unsynced = 0
        self._offset = 0
        self._directory: list[_Entry] = []
        self._pairs: list[Buffer] = []
        self._pairs_bytes = 0
        self._put(SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, number, 0))

    def add(self, pieces: Pieces) -> None:
        """Append frames and pairs. The first vbucket may be the last one of the previous call: then its piece
        goes on, and its pairs come with the last call for it.
        """
        frames = pieces.frames
        ends = np.zeros(len(frames.lengths) + 1, np.int64)
        np.cumsum(frames.lengths, out=ends[1:])
        starts, stops = [0, *pieces.stops], pieces.stops
        sizes = np.diff(ends[starts]).tolist()
        blocks = [
            (vbucket, *block)
            for vbucket, start, stop, size in zip(pieces.vbuckets, starts, stops, sizes, strict=False)
            for block in _blocks(ends, start, stop, size)
        ]
        headers = self._headers(frames, ends, blocks)
        pair_starts = [0, *pieces.pair_stops]
        at = 0
        for vbucket, start, stop in zip(pieces.vbuckets, pair_starts, pieces.pair_stops, strict=False):
            entry = self._entry(vbucket)
            while at < len(blocks) and blocks[at][0] == vbucket:
                self._add_block(entry, *next(headers))
                at += 1
            if start < stop:
                self._add_pairs(entry, pieces.news[start:stop], pieces.olds[start:stop])

    def _headers(
        self, frames: Frames, ends: Offsets, blocks: list[tuple[int, int, int]]
    ) -> Iterator[tuple[int, int, int, int, int, Buffer, Buffer]]:
        """Of each block: traits, earliest expiry, number of frames, first and last seqno; its header with the
        columns, and its frames.
        """
        if not blocks:
            return
        places = np.array([start for _, start, _ in blocks])
        lasts = np.array([stop for _, _, stop in blocks]) - 1
        described = zip(
            blocks,
            frames.seqnos[places].tolist(),
            frames.seqnos[lasts].tolist(),
            np.bitwise_or.reduceat(frames.traits, places).tolist(),
            ends[places].tolist(),
            ends[lasts + 1].tolist(),
            strict=True,
        )
        seqnos = frames.seqnos.astype("<u8", copy=False).view(np.uint8).data
        lengths = frames.lengths.astype("<u4", copy=False).view(np.uint8).data
        crcs = frames.crcs.astype("<u4", copy=False).view(np.uint8).data
        every_trait = frames.traits.data
        for (vbucket, start, stop), first, last, traits, at, end in described:
            count, size = stop - start, end - at
            columns = b"".join(
                (
                    seqnos[8 * start : 8 * stop],
                    lengths[4 * start : 4 * stop],
                    crcs[4 * start : 4 * stop],
                    every_trait[start:stop],
                    _PADDING[count * COLUMN_BYTES % 8],
                )
            )
            min_expiry = NO_EXPIRY
            if traits & EXPIRES:
                offsets = ends[start:stop][(frames.traits[start:stop] & EXPIRES) != 0]
                min_expiry = int(expiries_at(frames.data, offsets).min())
            data = frames.data[at:end]
            columns_crc = zlib.crc32(columns)
            if len(columns) + size <= CRC_BYTES:
                sums = zlib.crc32(data.data, columns_crc), 0  # `checksum` of both, without joining them
            else:
                sums = checksum(np.concatenate((np.frombuffer(columns, np.uint8), data)))
            head = BLOCK.pack(
                BLOCK_MAGIC,
                0,
                columns_crc,
                vbucket,
                traits,
                count,
                size,
                min_expiry,
                first,
                last,
                *sums,
            )
            yield traits, min_expiry, count, first, last, with_crc_inside(head) + columns, data.data

    def _entry(self, vbucket: int) -> _Entry:
        if not self._directory or self._directory[-1].vbucket != vbucket:
            self._directory.append(_Entry(vbucket, offset=self._offset, pairs_offset=self._pairs_bytes))
        return self._directory[-1]

    def _add_block(  # noqa: PLR0917
        self,
        entry: _Entry,
        traits: int,
        min_expiry: int,
        count: int,
        first: int,
        last: int,
        head: Buffer,
        data: Buffer,
    ) -> None:
        if not entry.count:
            entry.first = first
        entry.last = last
        entry.count += count
        entry.traits |= traits
        entry.min_expiry = min(entry.min_expiry, min_expiry)
        entry.frame_bytes += len(data)
        self._put(head, data, _PADDING[len(data) % 8])
        entry.bytes = self._offset - entry.offset

    def _add_pairs(self, entry: _Entry, news: Seqnos, olds: Seqnos) -> None:
        pairs = news.astype("<u8", copy=False).tobytes() + olds.astype("<u8", copy=False).tobytes()
        entry.pairs = len(news)
        entry.pairs_crc = zlib.crc32(pairs)
        self._pairs.append(pairs)
        self._pairs_bytes += len(pairs)

    def finish(self) -> None:
        """Write pairs, directory and footer, and sync."""
        rows = [_row(entry) for entry in self._directory if entry.count or entry.pairs]
        directory = np.array(rows, DIRECTORY)
        directory["pairs_offset"] += np.uint64(self._offset)
        self._put(*self._pairs)
        offset, table = self._offset, directory.tobytes()
        self._put(table)
        foot = FOOTER.pack(
            offset,
            len(directory),
            int(directory["count"].sum()),
            int(directory["pairs"].sum()),
            zlib.crc32(table),
            SEGMENT_MAGIC,
            FORMAT_VERSION,
            0,
        )
        self._put(with_crc_at_end(foot))
        self._write()
        self._file.sync()

    def _put(self, *parts: Buffer) -> None:
        for part in parts:
            size = len(part)
            if size:
                self._parts.append(part)
                self._offset += size
                self._pending += size
        if self._pending >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        self._file.append(self._parts)
        self._parts = []
        self._unsynced += self._pending
        self._pending = 0
        if self._unsynced >= SYNC_BYTES:
            # In steps, so that the log's next sync doesn't have to wait for all of this.
            self._file.sync()
            self._unsynced = 0


def full_blocks(lengths: npt.NDArray[np.uint32]) -> int:
    """How many of these frames are in full blocks; more may join the others."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    starts = [start for start, _ in _blocks(ends, 0, len(lengths), int(ends[-1]))]
    return starts[-1] if starts else 0


def _blocks(ends: Offsets, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Where to cut frames into blocks of about `CHUNK_BYTES`, or of one larger frame."""
    if size <= CHUNK_BYTES:
        if start < stop:
            yield start, stop
        return
    while start < stop:
        fitting = int(np.searchsorted(ends[: stop + 1], ends[start] + CHUNK_BYTES, "right")) - 1
        end = max(fitting, start + 1)
        yield start, end
        start = end
