"""Sealed segments: the frames of many vbuckets, sorted by (vbucket, seqno), never changed again.

A vbucket's frames are a *piece* of the segment: blocks of about 512 KiB one behind the other, each with its
own columns and checksums, so that a scan reads a block at a time and needs nothing else. The pieces of a
vbucket in different segments have ranges of seqnos that don't overlap. A rollback *clips* pieces: what lies
behind is no longer there, until compaction drops it from the file.

Besides its frames a piece has *pairs* (new, old): the change `new` superseded the change `old`. What was
current at seqno E is every frame up to E without those that are the `old` of a pair with `new` <= E.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import StoreCorrupt, StoreTooNew
from ..frames import Bytes, Offsets
from .files import Buffer, Files
from .format import (
    BLOCK,
    BLOCK_MAGIC,
    COLUMN_BYTES,
    DIRECTORY,
    EXPIRES,
    FOOTER,
    FORMAT_VERSION,
    NO_EXPIRY,
    SEGMENT,
    SEGMENT_MAGIC,
    checksum,
    expiries_at,
    padded,
)

__all__ = ["Block", "Frames", "Piece", "Segment", "SegmentWriter", "segment_name", "segment_number"]

PREFIX = "segment-"
BLOCK_BYTES = 512 << 10
READ_BYTES = BLOCK_BYTES + (64 << 10)
"""Pieces up to this, which is a block with its columns, are read at once. All of it stays in memory while
a part of it is to be sent, so a reader that stalls must not have more than that.
"""
WRITE_BYTES = 1 << 20
SYNC_BYTES = 8 << 20

Seqnos = npt.NDArray[np.uint64]
_NONE: Seqnos = np.empty(0, np.uint64)
_NO_BYTES: Bytes = np.empty(0, np.uint8)


def segment_name(number: int) -> str:
    return f"{PREFIX}{number:010d}"


def segment_number(name: str) -> int | None:
    """The number in a segment's name; None for other files."""
    digits = name.removeprefix(PREFIX)
    return int(digits) if name.startswith(PREFIX) and len(digits) == 10 and digits.isdecimal() else None


class Frames(NamedTuple):
    """Frames of one vbucket back to back, with their columns."""

    data: Bytes
    seqnos: Seqnos
    lengths: npt.NDArray[np.uint32]
    crcs: npt.NDArray[np.uint32]
    traits: npt.NDArray[np.uint8]

    @property
    def offsets(self) -> Offsets:
        """Where each frame starts."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def cut(self, start: int, stop: int) -> Frames:
        """The frames between two places, without copying them."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        first = int(ends[start - 1]) if start else 0
        last = int(ends[stop - 1]) if stop else 0
        part = slice(start, stop)
        return Frames(
            self.data[first:last], self.seqnos[part], self.lengths[part], self.crcs[part], self.traits[part]
        )

    def keep(self, mask: npt.NDArray[np.bool_]) -> Frames:
        """Only the frames where the mask is true: copied run by run, which costs less than frame by frame."""
        if mask.all():
            return self
        framed = np.zeros(len(mask) + 2, np.bool_)
        framed[1:-1] = mask
        edges = np.flatnonzero(framed[1:] != framed[:-1])
        ends = np.zeros(len(mask) + 1, np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        places = ends[edges].tolist()
        view = self.data.data
        data = bytearray().join(
            [view[start:stop] for start, stop in zip(places[::2], places[1::2], strict=True)]
        )
        return Frames(
            np.frombuffer(data, np.uint8),
            self.seqnos[mask],
            self.lengths[mask],
            self.crcs[mask],
            self.traits[mask],
        )


def concatenate(parts: Sequence[Frames]) -> Frames:
    """Several runs of frames as one."""
    if len(parts) == 1:
        return parts[0]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Frames(*columns)


Block = Frames


class SegmentWriter:
    """Writes a segment from its first vbucket to its last; it is whole and synced after `finish`."""

    def __init__(self, files: Files, directory: str, number: int) -> None:
        self.path = f"{directory}/{segment_name(number)}"
        self._file = files.create(self.path)
        self._parts: list[Buffer] = []
        self._pending = 0
        self._unsynced = 0
        self._offset = 0
        self._directory: list[tuple[int, ...]] = []
        self._pairs: list[bytes] = []
        self._pairs_bytes = 0
        self._put(SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, number, 0))
        self._begin(0)

    def _begin(self, vbucket: int) -> None:
        self._vbucket = vbucket
        self._start = self._offset
        self._count = self._frame_bytes = self._traits = self._first = self._last = 0
        self._min_expiry = NO_EXPIRY

    def add(self, frames: Frames) -> None:
        """Append frames to the current piece; in order, over all calls."""
        if len(frames.data) <= BLOCK_BYTES:
            if len(frames.data):
                self._add_block(frames)
            return
        ends = np.cumsum(frames.lengths, dtype=np.int64)
        start = 0
        while start < len(ends):
            base = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, base + BLOCK_BYTES, "right")), start + 1)
            part = slice(start, stop)
            data = frames.data[base : int(ends[stop - 1])]
            self._add_block(
                Frames(
                    data, frames.seqnos[part], frames.lengths[part], frames.crcs[part], frames.traits[part]
                )
            )
            start = stop

    def _add_block(self, block: Frames) -> None:
        traits = int(np.bitwise_or.reduce(block.traits))
        min_expiry = NO_EXPIRY
        if traits & EXPIRES:
            places = block.offsets[(block.traits & EXPIRES) != 0]
            min_expiry = int(expiries_at(block.data, places).min())
        first, last = int(block.seqnos[0]), int(block.seqnos[-1])
        count = len(block.seqnos)
        columns = b"".join(
            (
                block.seqnos.astype("<u8", copy=False).tobytes(),
                block.lengths.astype("<u4", copy=False).tobytes(),
                block.crcs.astype("<u4", copy=False).tobytes(),
                block.traits.tobytes(),
                bytes(padded(count * COLUMN_BYTES) - count * COLUMN_BYTES),
            )
        )
        size = len(block.data)
        head = BLOCK.pack(
            BLOCK_MAGIC,
            0,
            zlib.crc32(columns),
            self._vbucket,
            traits,
            count,
            size,
            min_expiry,
            first,
            last,
            *checksum(block.data),
        )
        self._put(head[:4], zlib.crc32(head[8:]).to_bytes(4, "little"), head[8:], columns, block.data.data)
        self._put(bytes(padded(size) - size))
        if not self._count:
            self._first = first
        self._last = last
        self._count += count
        self._frame_bytes += size
        self._traits |= traits
        self._min_expiry = min(self._min_expiry, min_expiry)

    def end(self, vbucket: int, news: Seqnos, olds: Seqnos) -> None:
        """The current piece is complete."""
        if self._count or len(news):
            pairs = news.astype("<u8", copy=False).tobytes() + olds.astype("<u8", copy=False).tobytes()
            self._directory.append(
                (
                    vbucket,
                    self._traits,
                    self._min_expiry,
                    self._count,
                    len(news),
                    zlib.crc32(pairs),
                    0,
                    self._start,
                    self._offset - self._start,
                    self._frame_bytes,
                    self._pairs_bytes,
                    self._first,
                    self._last,
                )
            )
            self._pairs.append(pairs)
            self._pairs_bytes += len(pairs)
        self._begin(vbucket + 1)

    def begin(self, vbucket: int) -> None:
        """The next frames are this vbucket's."""
        self._begin(vbucket)

    def finish(self) -> None:
        """Write pairs, directory and footer, and sync."""
        directory = np.array(self._directory, DIRECTORY)
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
        )[:-4]
        self._put(foot, zlib.crc32(foot).to_bytes(4, "little"))
        self._write()
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        """Something went wrong: let go of the file."""
        self._file.close()

    def _put(self, *parts: Buffer) -> None:
        for part in parts:
            if len(part):
                self._parts.append(part)
                self._offset += len(part)
                self._pending += len(part)
        if self._pending >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        self._file.append([b"".join(self._parts)])
        self._parts = []
        self._unsynced += self._pending
        self._pending = 0
        if self._unsynced >= SYNC_BYTES:
            # Bit by bit, so that the log's next sync doesn't have to wait for all of this.
            self._file.sync()
            self._unsynced = 0


class Segment:
    """A sealed segment that is open for reading, and how far rollbacks have clipped it."""

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]
        self.number = segment_number(self.name) or 0
        self.file = files.open(path)
        size = self.file.size
        if size < SEGMENT.size + FOOTER.size:
            raise self.corrupt("it is too short")
        foot = self.file.read(FOOTER.size, size - FOOTER.size)
        offset, count, self.frames, self.pairs, table_crc, magic, version, crc = FOOTER.unpack(foot)
        if magic != SEGMENT_MAGIC or zlib.crc32(foot[:-4]) != crc:
            raise self.corrupt("its footer is damaged")
        if version > FORMAT_VERSION:
            raise StoreTooNew(f"{path} has format {version}, this Tailrace reads up to {FORMAT_VERSION}")
        table = self.file.read(count * DIRECTORY.itemsize, offset)
        if zlib.crc32(table) != table_crc:
            raise self.corrupt("its directory is damaged")
        self.size = size
        self.directory = np.frombuffer(table, DIRECTORY)
        self.clips: dict[int, int] = {}
        self._rows = {vbucket: row for row, vbucket in enumerate(self.directory["vbucket"].tolist())}
        self._pieces: dict[int, Piece | None] = {}

    def corrupt(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"{self.path} is damaged ({what}): restore it from a copy, or start over without it"
        )

    def clip(self, vbucket: int, seqno: int) -> None:
        """Everything of a vbucket above this seqno is gone."""
        if vbucket in self._rows and seqno < self.clips.get(vbucket, 1 << 64):
            self.clips[vbucket] = seqno
            self._pieces.pop(vbucket, None)

    def set_clips(self, clips: dict[int, int]) -> None:
        """The clips as they were before a rollback that failed."""
        self.clips = clips
        self._pieces = {}

    def piece(self, vbucket: int) -> Piece | None:
        """A vbucket's part of this segment, or None if there is nothing."""
        try:
            return self._pieces[vbucket]
        except KeyError:
            row = self._rows.get(vbucket)
            piece = None
            if row is not None:
                piece = Piece(self, self.directory[row], self.clips.get(vbucket))
                if not piece.count and not piece.pair_count:
                    piece = None
            self._pieces[vbucket] = piece
            return piece


class BlockHead(NamedTuple):
    """The header of a block."""

    magic: bytes
    crc: int
    columns_crc: int
    vbucket: int
    traits: int
    frames: int
    frame_bytes: int
    min_expiry: int
    first: int
    last: int
    sum_a: int
    sum_b: int


class Piece:
    """The frames of one vbucket in one segment."""

    __slots__ = (
        "_columns",
        "_entry",
        "clip",
        "count",
        "first",
        "frame_bytes",
        "last",
        "min_expiry",
        "pair_count",
        "segment",
        "traits",
        "vbucket",
    )

    def __init__(self, segment: Segment, entry: Any, clip: int | None) -> None:
        self.segment = segment
        self.vbucket = int(entry["vbucket"])
        self.traits = int(entry["traits"])
        self.min_expiry = int(entry["min_expiry"])
        self.first = int(entry["first"])
        self.last = int(entry["last"])
        self.count = int(entry["count"])
        self.pair_count = int(entry["pairs"])
        self.frame_bytes = int(entry["frame_bytes"])
        self.clip: int | None = None
        self._entry = entry
        self._columns: Columns | None = None
        if clip is not None and clip < self.last:
            self.clip = clip
            self.count = bisect_left(self.columns.seqnos, clip + 1) if clip >= self.first else 0
            self.last = self.columns.seqnos[self.count - 1] if self.count else 0
            self.frame_bytes = int(sum(self.columns.lengths[: self.count])) if self.count else 0
            self.pair_count = len(self.pairs()[0])

    @property
    def columns(self) -> Columns:
        """Where each frame is; kept, because gets come again."""
        if self._columns is None:
            parts = []
            places = []
            for offset, head, columns in self._columns_of_blocks():
                block = columns_of(columns, 0, head.frames)
                lengths = block.lengths.astype(np.uint64)
                start = offset + BLOCK.size + padded(len(block.seqnos) * COLUMN_BYTES)
                places.append(np.cumsum(lengths) - lengths + np.uint64(start))
                parts.append(block)
            frames = concatenate(parts)
            self._columns = Columns(
                np.ascontiguousarray(frames.seqnos, np.uint64).data,
                np.concatenate(places).data,
                np.ascontiguousarray(frames.lengths, np.uint32).data,
                np.ascontiguousarray(frames.crcs, np.uint32).data,
            )
        return self._columns

    def frame(self, seqno: int) -> bytes | None:
        """The frame with this seqno, if it is here."""
        columns = self._columns or self.columns
        # Seqnos mostly follow each other without a gap, so the first guess is right.
        place = seqno - self.first
        if place >= self.count or columns.seqnos[place] != seqno:
            place = bisect_left(columns.seqnos, seqno, 0, self.count)
            if place == self.count or columns.seqnos[place] != seqno:
                return None
        frame = self.segment.file.read(columns.lengths[place], columns.places[place])
        if zlib.crc32(frame) != columns.crcs[place]:
            raise self.segment.corrupt(f"seqno {seqno} of vbucket {self.vbucket} at {columns.places[place]}")
        return frame

    def blocks(self, after: int = 0) -> Iterator[Frames]:
        """The frames after a seqno, block by block; each block is the caller's own memory.

        Nothing here holds on to a block that was handed out: if the caller lets go of it before it asks for
        the next, that is read into the same memory, which is still in the processor's cache.
        """
        if after >= self.last:
            return
        offset, length = int(self._entry["offset"]), int(self._entry["bytes"])
        if length <= READ_BYTES:
            found = self._read_at_once(offset, length, after)
            while found:
                yield found.pop()
            return
        file, end = self.segment.file, offset + length
        raw = file.read(BLOCK.size, offset)
        while offset < end:
            head = self._head(raw, offset, end)
            if self.clip is not None and head.first > self.clip:
                return
            size = block_bytes(head)
            ahead = min(BLOCK.size, end - offset - size)  # the header of the next block comes with this one
            if head.last > after:
                buffer = np.empty(size + ahead, np.uint8)
                file.read_into(buffer.data, offset)
                raw = buffer[size:].tobytes()
                found = [self._frames(buffer, offset, head, after)]
                del buffer
                yield found.pop()
            else:
                raw = file.read(ahead, offset + size)
            offset += size

    def _read_at_once(self, offset: int, length: int, after: int) -> list[Frames]:
        """All blocks of a small piece, the last one first: mostly there is just one."""
        buffer = np.empty(length, np.uint8)
        view = buffer.data
        self.segment.file.read_into(view, offset)
        found = []
        at = 0
        while at < length:
            head = self._head(view[at : at + BLOCK.size], offset + at, offset + length)
            if self.clip is not None and head.first > self.clip:
                break
            if head.last > after:
                found.append(self._frames(buffer[at:] if at else buffer, offset + at, head, after))
            at += block_bytes(head)
        found.reverse()
        return found

    def _frames(self, buffer: Bytes, offset: int, head: BlockHead, after: int) -> Frames:
        """The frames of a block that were asked for, if the block is what was written."""
        count = head.frames
        start = BLOCK.size + padded(count * COLUMN_BYTES)
        if zlib.crc32(buffer[BLOCK.size : start].data) != head.columns_crc:
            raise self.segment.corrupt(f"a block of vbucket {self.vbucket} at {offset}")
        data = buffer[start : start + head.frame_bytes]
        if checksum(data) != head[-2:]:
            raise self.segment.corrupt(f"frames of vbucket {self.vbucket} at {offset}")
        frames = columns_of(buffer, BLOCK.size, count, data)
        low = int(np.searchsorted(frames.seqnos, after, "right")) if head.first <= after else 0
        high = count if self.clip is None else int(np.searchsorted(frames.seqnos, self.clip, "right"))
        return frames.cut(low, high) if low or high < count else frames

    def pairs(self) -> tuple[Seqnos, Seqnos]:
        """(new, old) for every change here that superseded another one."""
        count = int(self._entry["pairs"])
        if not count:
            return _NONE, _NONE
        data = self.segment.file.read(16 * count, int(self._entry["pairs_offset"]))
        if zlib.crc32(data) != int(self._entry["pairs_crc"]):
            raise self.segment.corrupt(f"the pairs of vbucket {self.vbucket}")
        news = np.frombuffer(data, "<u8", count).astype(np.uint64, copy=False)
        olds = np.frombuffer(data, "<u8", count, 8 * count).astype(np.uint64, copy=False)
        if self.clip is not None:
            stop = int(np.searchsorted(news, self.clip, "right"))
            news, olds = news[:stop], olds[:stop]
        return news, olds

    def _columns_of_blocks(self) -> Iterator[tuple[int, BlockHead, Bytes]]:
        """The blocks without their frames: the offset, the header, and the columns."""
        file = self.segment.file
        offset = int(self._entry["offset"])
        end = offset + int(self._entry["bytes"])
        while offset < end:
            raw = file.read(BLOCK.size, offset)
            head = self._head(raw, offset, end)
            if self.clip is not None and head.first > self.clip:
                return
            table = file.read(padded(head.frames * COLUMN_BYTES), offset + BLOCK.size)
            if zlib.crc32(table) != head.columns_crc:
                raise self.segment.corrupt(f"a block of vbucket {self.vbucket} at {offset}")
            yield offset, head, np.frombuffer(table, np.uint8)
            offset += block_bytes(head)

    def _head(self, raw: Buffer, offset: int, end: int) -> BlockHead:
        head = BlockHead(*BLOCK.unpack(raw))
        if head.magic != BLOCK_MAGIC or head.crc != zlib.crc32(raw[8:]) or offset + block_bytes(head) > end:
            raise self.segment.corrupt(f"no block of vbucket {self.vbucket} at {offset}")
        return head


def block_bytes(head: BlockHead) -> int:
    """The size of a block with this header."""
    return int(BLOCK.size + padded(head.frames * COLUMN_BYTES) + padded(head.frame_bytes))


def columns_of(buffer: Bytes, offset: int, count: int, data: Bytes = _NO_BYTES) -> Frames:
    """The columns of a block, with the frames that they are about where these are at hand."""
    return Frames(
        data,
        np.frombuffer(buffer, "<u8", count, offset),
        np.frombuffer(buffer, "<u4", count, offset + 8 * count),
        np.frombuffer(buffer, "<u4", count, offset + 12 * count),
        np.frombuffer(buffer, np.uint8, count, offset + 16 * count),
    )


class Columns(NamedTuple):
    """Where the frames of a piece are, as views that index fast."""

    seqnos: memoryview
    places: memoryview
    lengths: memoryview
    crcs: memoryview
