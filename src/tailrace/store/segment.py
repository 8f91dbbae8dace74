"""Sealed segments: the frames of many vbuckets, sorted by (vbucket, seqno), never changed again.

A vbucket's frames are a *piece* of the segment: blocks of about 1.5 MiB one after the other, each with its
own columns and checksums, so that a scan reads a block at a time and needs nothing else. The pieces of a
vbucket in different segments have ranges of seqnos that don't overlap. A rollback *clips* pieces: what lies
behind no longer counts, and the next compaction drops it from the file.

Besides its frames a piece has *pairs* (new, old): the change `new` superseded the change `old`. What was
current at seqno E is every frame up to E without those that are the `old` of a pair with `new` <= E.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ..errors import StoreCorrupt
from ..files import Buffer, Files
from ..frames import CHUNK_BYTES, Bytes, Offsets, Seqnos
from .accepted_losses import lost
from .format import (
    BLOCK,
    BLOCK_MAGIC,
    COLUMN_BYTES,
    DIRECTORY,
    FOOTER,
    OLD_SECTOR,
    SEGMENT,
    SEGMENT_MAGIC,
    check_version,
    checksum,
    is_sound_inside,
    is_sound_to_end,
    number_in,
    numbered_name,
    padded,
)

__all__ = ["Frames", "Segment", "SegmentPiece", "pieces_of", "segment_name", "segment_number"]

PREFIX = "segment-"
READ_BYTES = CHUNK_BYTES + CHUNK_BYTES // 8
"""Pieces up to this, which is a block with its columns, are read whole. All of a piece stays in memory while
any of it is still to be sent, so a reader that stalls must not hold more than that.
"""

_NONE: Seqnos = np.empty(0, np.uint64)
_NO_BYTES: Bytes = np.empty(0, np.uint8)
_NO_U32: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
_U8, _U32, _U64 = np.dtype(np.uint8), np.dtype("<u4"), np.dtype("<u8")


def segment_name(number: int) -> str:
    return numbered_name(PREFIX, number)


def segment_number(name: str) -> int | None:
    """The number in a segment's name; None for other files."""
    return number_in(name, PREFIX)


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
        before = np.zeros(len(self.lengths), np.int64)
        before[1:] = self.lengths[:-1]  # converted here: with two types, the next step would be slower
        return np.add.accumulate(before)

    def cut(self, start: int, stop: int) -> Frames:
        """The frames between two places, without copying them."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        first = int(ends[start - 1]) if start else 0
        last = int(ends[stop - 1]) if stop else 0
        part = slice(start, stop)
        return Frames(
            self.data[first:last], self.seqnos[part], self.lengths[part], self.crcs[part], self.traits[part]
        )

    def split(self, stops: Offsets) -> list[Frames]:
        """The frames up to each of these (ascending) places, without copying them."""
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        edges, places = [0, *ends[stops].tolist()], [0, *stops.tolist()]
        data, seqnos, lengths, crcs, traits = self
        return [
            Frames(data[first:last], seqnos[a:b], lengths[a:b], crcs[a:b], traits[a:b])
            for first, last, a, b in zip(edges, edges[1:], places, places[1:], strict=False)
        ]

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


_NO_FRAMES = Frames(_NO_BYTES, _NONE, _NO_U32, _NO_U32, _NO_BYTES)


def concatenate(parts: Sequence[Frames]) -> Frames:
    """Several runs of frames as one."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _NO_FRAMES
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Frames(*columns)


class Segment:
    """A sealed segment that is open for reading, and how far rollbacks have clipped it."""

    def __init__(self, files: Files, path: str) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]
        self.number = segment_number(self.name) or 0
        self.file = files.open(path)
        size = self.file.size
        if size < SEGMENT.size + FOOTER.size:
            raise lost(f"{path} is damaged (it is too short)")
        foot = self.file.read(FOOTER.size, size - FOOTER.size)
        offset, count, self.frames, self.pairs, table_crc, magic, version, _ = FOOTER.unpack(foot)
        if magic != SEGMENT_MAGIC or not is_sound_to_end(foot):
            raise lost(f"{path} is damaged (its footer)")
        check_version(path, version)
        self.version = version
        table = self.file.read(count * DIRECTORY.itemsize, offset)
        if zlib.crc32(table) != table_crc:
            raise lost(f"{path} is damaged (its directory)")
        self.size = size
        self.directory = np.frombuffer(table, DIRECTORY)
        self.clips: dict[int, int] = {}
        self._rows = {vbucket: row for row, vbucket in enumerate(self.directory["vbucket"].tolist())}
        self._pieces: WeakValueDictionary[int, SegmentPiece] = WeakValueDictionary()
        """The pieces in use. They refer to the segment: if it referred to them too, it would stay after it is
        replaced, with its file and the file's place on the disk, until the garbage collector runs.
        """
        self._gone: set[int] = set()
        """The vbuckets of which rollbacks have left nothing. They have no piece to remember, and making one
        to find that out reads the file.
        """

    def corrupt(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(f"{self.path} is damaged ({what}): restore it from a copy")

    def clip(self, vbucket: int, seqno: int) -> None:
        """Everything of a vbucket above this seqno is gone."""
        if vbucket in self._rows and seqno < self.clips.get(vbucket, 1 << 64):
            self.clips[vbucket] = seqno
            self._pieces.pop(vbucket, None)

    def set_clips(self, clips: dict[int, int]) -> None:
        """Replace the clips, for example with those before a rollback that failed."""
        self.clips = clips
        self._pieces.clear()
        self._gone.clear()

    def piece(self, vbucket: int) -> SegmentPiece | None:
        """A vbucket's part of this segment, or None if there is nothing."""
        piece = self._pieces.get(vbucket)
        if piece is not None:
            return piece
        row = self._rows.get(vbucket)
        if row is None or vbucket in self._gone:
            return None
        piece = SegmentPiece(self, self.directory[row], self.clips.get(vbucket))
        if not piece.count and not piece.pair_count:
            self._gone.add(vbucket)
            return None
        self._pieces[vbucket] = piece
        return piece


def pieces_of(vbucket: int, segments: Iterable[Segment]) -> list[SegmentPiece]:
    """A vbucket's parts of some segments, in the order of their seqnos."""
    pieces = [piece for segment in segments if (piece := segment.piece(vbucket)) is not None]
    pieces.sort(key=attrgetter("first"))
    return pieces


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


def _are_all_in(head: BlockHead, seqnos: Seqnos) -> bool:
    """Whether all frames of a block are among sorted seqnos, which may include some that are gone."""
    if head.last - head.first + 1 != head.frames:
        return False  # with gaps the header can't tell
    low, high = np.searchsorted(seqnos, np.array([head.first, head.last + 1], np.uint64))
    return int(high - low) == head.frames


class SegmentPiece:
    """The frames of one vbucket in one segment."""

    __slots__ = (
        "__weakref__",
        "_columns",
        "_pairs_crc",
        "clip",
        "count",
        "first",
        "frame_bytes",
        "last",
        "min_expiry",
        "pair_count",
        "pairs_place",
        "place",
        "segment",
        "traits",
        "vbucket",
    )

    def __init__(self, segment: Segment, entry: Any, clip: int | None) -> None:
        self.segment = segment
        (
            self.vbucket,
            self.traits,
            self.min_expiry,
            self.count,
            self.pair_count,
            self._pairs_crc,
            _,
            offset,
            size,
            self.frame_bytes,
            pairs_offset,
            self.first,
            self.last,
        ) = entry.item()
        self.place: tuple[int, int] = offset, size  # of its blocks in the file
        self.pairs_place: tuple[int, int] = pairs_offset, 16 * self.pair_count
        self.clip: int | None = None
        self._columns: PieceColumns | None = None
        if clip is not None and clip < self.last:
            self.clip = clip
            self.count = bisect_left(self.columns.seqnos, clip + 1) if clip >= self.first else 0
            self.last = self.columns.seqnos[self.count - 1] if self.count else 0
            self.frame_bytes = int(sum(self.columns.lengths[: self.count])) if self.count else 0
            self.pair_count = len(self.pairs()[0])

    @property
    def columns(self) -> PieceColumns:
        """Where each frame is; kept for the next get."""
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
            self._columns = PieceColumns(
                np.ascontiguousarray(frames.seqnos, np.uint64).data,
                np.concatenate(places).data,
                np.ascontiguousarray(frames.lengths, np.uint32).data,
                np.ascontiguousarray(frames.crcs, np.uint32).data,
            )
        return self._columns

    def frame(self, seqno: int) -> bytes | None:
        """The frame with this seqno, if it is here."""
        columns = self._columns or self.columns
        # Seqnos mostly follow each other without a gap, so the first guess is mostly right.
        place = seqno - self.first
        if place >= self.count or columns.seqnos[place] != seqno:
            place = bisect_left(columns.seqnos, seqno, 0, self.count)
            if place == self.count or columns.seqnos[place] != seqno:
                return None
        frame = self.segment.file.read(columns.lengths[place], columns.places[place])
        if zlib.crc32(frame) != columns.crcs[place]:
            raise self.segment.corrupt(f"seqno {seqno} of vbucket {self.vbucket} at {columns.places[place]}")
        return frame

    def blocks(self, after: int = 0, dead: Seqnos = _NONE) -> Iterator[Frames]:
        """The frames after a seqno, block by block; each block is the caller's own memory. Blocks of a large
        piece that are all ``dead`` (sorted seqnos) are not read: a document of 20 MiB that was written a
        hundred times would take a second for nothing.
        """
        if after >= self.last:
            return iter(())
        if self.place[1] <= READ_BYTES:
            return iter(self._read_at_once(after))
        return self._read_by_block(after, dead)

    def _read_at_once(self, after: int) -> list[Frames]:
        """All blocks of a small piece: usually there is just one."""
        offset, length = self.place
        buffer = np.empty(length, np.uint8)
        self.segment.file.read_into(buffer.data, offset)
        return self.blocks_in(buffer, offset, after)

    def _read_by_block(self, after: int, dead: Seqnos) -> Iterator[Frames]:
        """The blocks of a large piece. Nothing here keeps a block that was handed out: if the caller releases
        it before it asks for the next, that is read into the same memory, which is still in the processor's
        cache.
        """
        file, (offset, length) = self.segment.file, self.place
        end = offset + length
        raw = file.read(BLOCK.size, offset)
        while offset < end:
            head, size = self._head(raw, offset, end)
            if self.clip is not None and head.first > self.clip:
                return
            ahead = min(BLOCK.size, end - offset - size)  # the header of the next block comes with this one
            if head.last > after and not (len(dead) and _are_all_in(head, dead)):
                buffer = np.empty(size + ahead, np.uint8)
                view = buffer.data
                file.read_into(view, offset)
                raw = bytes(view[size:])
                blocks = [self._frames(buffer, offset, head, after)]
                del buffer, view
                yield blocks.pop()
            else:
                raw = file.read(ahead, offset + size)
            offset += size

    def blocks_in(self, buffer: Bytes, offset: int, after: int = 0) -> list[Frames]:
        """The frames after a seqno, block by block, in a buffer with the whole piece."""
        view, length = buffer.data, len(buffer)
        blocks = []
        at = 0
        while at < length:
            head, size = self._head(view[at : at + BLOCK.size], offset + at, offset + length)
            if self.clip is not None and head.first > self.clip:
                break
            if head.last > after:
                blocks.append(self._frames(buffer[at:] if at else buffer, offset + at, head, after))
            at += size
        return blocks

    def _frames(self, buffer: Bytes, offset: int, head: BlockHead, after: int) -> Frames:
        """The wanted frames of a block; StoreCorrupt if the block is not what was written."""
        count = head.frames
        frames = columns_of(buffer, BLOCK.size, count, self._data(buffer, offset, head))
        low = int(np.searchsorted(frames.seqnos, after, "right")) if head.first <= after else 0
        high = count if self.clip is None else int(np.searchsorted(frames.seqnos, self.clip, "right"))
        return frames.cut(low, high) if low or high < count else frames

    def _data(self, buffer: Bytes, offset: int, head: BlockHead) -> Bytes:
        """The bytes of a block's frames; StoreCorrupt if any of the block is not what was written."""
        start = BLOCK.size + padded(head.frames * COLUMN_BYTES)
        data = buffer[start : start + head.frame_bytes]
        if self.segment.version > 1:
            is_intact = checksum(buffer[BLOCK.size : start + head.frame_bytes]) == head[-2:]
        else:
            is_intact = zlib.crc32(buffer.data[BLOCK.size : start]) == head.columns_crc
            is_intact &= checksum(data, OLD_SECTOR) == head[-2:]
        if not is_intact:
            raise self.segment.corrupt(f"a block of vbucket {self.vbucket} at {offset}")
        return data

    def heads_in(self, buffer: Bytes, offset: int) -> Iterator[tuple[int, BlockHead]]:
        """Place and header of each block in a buffer with the whole piece; StoreCorrupt if it is damaged."""
        view, length = buffer.data, len(buffer)
        at = 0
        while at < length:
            head, size = self._head(view[at : at + BLOCK.size], offset + at, offset + length)
            self._data(buffer[at:] if at else buffer, offset + at, head)
            yield at, head
            at += size

    def pairs(self) -> tuple[Seqnos, Seqnos]:
        """(new, old) for every change here that superseded another one."""
        offset, size = self.pairs_place
        return self._pairs_in(self.segment.file.read(size, offset)) if size else (_NONE, _NONE)

    def check_pairs(self, data: Buffer) -> None:
        """Raise StoreCorrupt if the pairs that were read are not what was written."""
        if len(data) and zlib.crc32(data) != self._pairs_crc:
            raise self.segment.corrupt(f"the pairs of vbucket {self.vbucket}")

    def _pairs_in(self, data: Buffer) -> tuple[Seqnos, Seqnos]:
        self.check_pairs(data)
        count = len(data) // 16
        news = np.frombuffer(data, "<u8", count).astype(np.uint64, copy=False)
        olds = np.frombuffer(data, "<u8", count, 8 * count).astype(np.uint64, copy=False)
        if self.clip is not None:
            left = news <= self.clip  # not always ascending: commits of prepares come after all others
            news, olds = news[left], olds[left]
        return news, olds

    def _columns_of_blocks(self) -> Iterator[tuple[int, BlockHead, Bytes]]:
        """The blocks without their frames: the offset, the header, and the columns."""
        file = self.segment.file
        offset, length = self.place
        end = offset + length
        while offset < end:
            raw = file.read(BLOCK.size, offset)
            head, size = self._head(raw, offset, end)
            if self.clip is not None and head.first > self.clip:
                return
            table = file.read(padded(head.frames * COLUMN_BYTES), offset + BLOCK.size)
            if zlib.crc32(table) != head.columns_crc:
                raise self.segment.corrupt(f"a block of vbucket {self.vbucket} at {offset}")
            yield offset, head, np.frombuffer(table, np.uint8)
            offset += size

    def _head(self, raw: Buffer, offset: int, end: int) -> tuple[BlockHead, int]:
        """A block's header, and the size of the whole."""
        head = BlockHead._make(BLOCK.unpack(raw))
        size = BLOCK.size + padded(head.frames * COLUMN_BYTES) + padded(head.frame_bytes)
        if head.magic != BLOCK_MAGIC or not is_sound_inside(raw) or offset + size > end:
            raise self.segment.corrupt(f"no block of vbucket {self.vbucket} at {offset}")
        return head, size


def columns_of(buffer: Bytes, offset: int, count: int, data: Bytes = _NO_BYTES) -> Frames:
    """The columns of a block, with its frames if they are at hand."""
    return Frames(
        data,
        np.frombuffer(buffer, _U64, count, offset),
        np.frombuffer(buffer, _U32, count, offset + 8 * count),
        np.frombuffer(buffer, _U32, count, offset + 12 * count),
        np.frombuffer(buffer, _U8, count, offset + 16 * count),
    )


class PieceColumns(NamedTuple):
    """Where the frames of a piece are, as views that index fast."""

    seqnos: memoryview
    places: memoryview
    lengths: memoryview
    crcs: memoryview
