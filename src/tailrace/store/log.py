"""The log: batches of frames in the order in which they were committed, one sync each.

A batch is either whole or does not count: its checksums cover everything in it, and nothing is written behind
a batch before that batch is synced. So a crash can only tear the last batch of the newest log, and `read_log`
tells a torn tail from damage: behind a torn batch there is no other one. A log on which a write or sync
failed is given up, because nobody knows what its end holds; the next log says how many of its bytes count.
If none do, it is removed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..files import Buffer, File, Files
from ..frames import seqnos_at
from ..large_bytes import LARGE_BYTES
from .accepted_losses import lost
from .format import (
    BATCH,
    BATCH_MAGIC,
    FORMAT_VERSION,
    LOG,
    LOG_MAGIC,
    check_version,
    is_sound_inside,
    is_sound_to_end,
    number_in,
    numbered_name,
    vbuckets_at,
    with_crc_at_end,
    with_crc_inside,
)

__all__ = [
    "LogBatch",
    "LogHeader",
    "LogWriter",
    "LoggedColumns",
    "log_header",
    "log_name",
    "log_number",
    "read_log",
]

PREFIX = "log-"
PIECE_BYTES = 4 << 20
"""How much of a batch is written in one piece."""


def log_name(number: int) -> str:
    return numbered_name(PREFIX, number)


def log_number(name: str) -> int | None:
    """The number in a log's name; None for other files."""
    return number_in(name, PREFIX)


class LoggedColumns(NamedTuple):
    """What is known of the frames of a batch, in order. A segment needs it later, when the frames are no
    longer in the processor's cache and looking at them takes twice as long.
    """

    vbuckets: npt.NDArray[np.uint16]
    seqnos: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint32]
    crcs: npt.NDArray[np.uint32]
    notes: npt.NDArray[np.uint64]


@dataclass(slots=True)
class LogBatch:
    """What one sync makes durable: frames of any vbuckets, and metadata that holds after them."""

    frames: list[bytes] = field(default_factory=list)
    notes: list[int] = field(default_factory=list)  # of each frame, see format.NOTE_SHIFT
    meta: dict[str, Any] = field(default_factory=dict)
    cas_ceiling: int = 0
    logged: LoggedColumns | None = None  # after encode

    def encode(self, number: int, salt: int) -> Iterator[list[Buffer]]:
        """The bytes of the batch, to be written piece by piece.

        A large batch is joined piece by piece, and again when it is written: joined as a whole it would take
        as much memory as all the changes that wait for the disk.
        """
        lengths = np.fromiter(map(len, self.frames), "<u4", len(self.frames))
        notes = np.array(self.notes, "<u8")
        columns = lengths.tobytes() + notes.tobytes()
        size = int(lengths.sum(dtype=np.int64))
        edges = _edges(lengths)
        crc, joined, logged = zlib.crc32(columns, salt), b"", []
        for start, stop in pairwise(edges):
            joined = b"".join(self.frames[start:stop])
            crc = zlib.crc32(joined, crc)
            logged.append(_places(joined, lengths[start:stop]))
        if self.frames:
            vbuckets, seqnos = (np.concatenate(column) for column in zip(*logged, strict=True))
            crcs = np.fromiter(map(zlib.crc32, self.frames), np.uint32, len(self.frames))
            self.logged = LoggedColumns(vbuckets, seqnos, lengths, crcs, notes)
        meta = json.dumps(self.meta, separators=(",", ":")).encode() if self.meta else b""
        body_crc = zlib.crc32(meta, crc)
        head = BATCH.pack(
            BATCH_MAGIC, 0, number, self.cas_ceiling, len(self.frames), len(meta), size, body_crc
        )
        head = with_crc_inside(head, salt)
        if len(edges) <= 2:
            yield [head, columns, joined, meta]
            return
        del joined
        yield [head, columns]
        for start, stop in pairwise(edges):
            yield [b"".join(self.frames[start:stop])]
        yield [meta]


def _edges(lengths: npt.NDArray[np.uint32]) -> list[int]:
    """Where to cut a batch's frames into pieces of about `PIECE_BYTES`; the first and the last edge are its
    ends.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    if not len(ends):
        return [0]
    cuts = np.searchsorted(ends, np.arange(PIECE_BYTES, int(ends[-1]), PIECE_BYTES), "right").tolist()
    # A large frame is a piece of its own, which is not copied: that would hold up all other threads.
    large = np.flatnonzero(lengths >= LARGE_BYTES)
    return sorted({0, *cuts, *large.tolist(), *(large + 1).tolist(), len(ends)})


def _places(joined: bytes, lengths: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """VBucket and seqno of every frame."""
    data = np.frombuffer(joined, np.uint8)
    offsets = np.cumsum(lengths, dtype=np.int64) - lengths
    return vbuckets_at(data, offsets).astype(np.uint16), seqnos_at(data, offsets)


class LogHeader(NamedTuple):
    """What a log says about itself and the one before it."""

    number: int
    previous: int  # 0: there is none
    previous_bytes: int
    first_batch: int
    salt: int


class LogWriter:
    """The end of the newest log."""

    def __init__(self, files: Files, directory: str, header: LogHeader) -> None:
        self.number = header.number
        self.next_batch = header.first_batch
        self._salt = header.salt
        head = LOG.pack(LOG_MAGIC, FORMAT_VERSION, *header, 0)
        self._file = files.create(f"{directory}/{log_name(header.number)}")
        self._file.append([with_crc_at_end(head)])
        self._file.sync()
        files.sync_directory(directory)
        self.valid_bytes = self._file.size

    def commit(self, batch: LogBatch) -> None:
        """Append and sync. After an OSError this writer can't be used any more; `valid_bytes` stays what was
        synced.
        """
        for parts in batch.encode(self.next_batch, self._salt):
            self._file.append(parts)
        self._file.sync()
        self.valid_bytes = self._file.size
        self.next_batch += 1

    def close(self) -> None:
        self._file.close()


def log_header(file: File) -> LogHeader | None:
    """A log's header; None if it was never written whole, and so nothing behind it was."""
    if file.size < LOG.size:
        return None
    head = file.read(LOG.size, 0)
    magic, version, *fields, _ = LOG.unpack(head)
    if magic != LOG_MAGIC or not is_sound_to_end(head):
        return None
    check_version(file.path, version)
    return LogHeader(*fields)


def read_log(file: File, header: LogHeader, valid_bytes: int | None) -> Iterator[tuple[int, LogBatch]]:
    """The batches of a log, each with the offset behind it.

    `valid_bytes` is what the next log says about this one; None for the newest, whose last batch may be torn.
    """
    data = file.read(file.size if valid_bytes is None else valid_bytes, 0)
    at, number = LOG.size, header.first_batch
    while at < len(data):
        end = _batch_end(data, at, header.salt, number, number)
        batch = _decode(data, at, end, header.salt) if end is not None else None
        if end is None or batch is None:
            if valid_bytes is not None or _has_batch_after(data, at, header.salt, number):
                raise lost(f"{file.path} is damaged at byte {at}")
            return
        yield end, batch
        at, number = end, number + 1


def _batch_end(data: bytes, at: int, salt: int, lowest: int, highest: int) -> int | None:
    """Where the batch at this offset ends, if its header is sound, its number is one of these, and it
    fits.
    """
    if at + BATCH.size > len(data):
        return None
    magic, _, number, _, frames, meta_bytes, frame_bytes, _ = BATCH.unpack_from(data, at)
    if magic != BATCH_MAGIC or not is_sound_inside(data[at : at + BATCH.size], salt):
        return None
    if not lowest <= number <= highest:
        return None
    end = at + BATCH.size + frames * 12 + frame_bytes + meta_bytes
    return end if end <= len(data) else None


def _has_batch_after(data: bytes, at: int, salt: int, number: int) -> bool:
    """Whether anything behind a batch that can't be read shows that it was synced: then it is damaged, not
    torn.
    """
    end = _batch_end(data, at, salt, number, number)
    if end is not None and end < len(data):
        return True
    at -= 1
    while (at := data.find(BATCH_MAGIC, at + 1)) >= 0:
        end = _batch_end(data, at, salt, number + 1, 1 << 64)
        if end is not None and _decode(data, at, end, salt) is not None:
            return True
    return False


def _decode(data: bytes, at: int, end: int, salt: int) -> LogBatch | None:
    """The batch between two offsets, or None if its body is not what was written."""
    _, _, _, cas_ceiling, count, meta_bytes, frame_bytes, crc = BATCH.unpack_from(data, at)
    with memoryview(data) as view:
        if zlib.crc32(view[at + BATCH.size : end], salt) != crc:
            return None
    at += BATCH.size
    lengths = np.frombuffer(data, "<u4", count, at)
    notes = np.frombuffer(data, "<u8", count, at + 4 * count).tolist()
    at += 12 * count
    ends = (np.cumsum(lengths, dtype=np.int64) + at).tolist()
    frames = [data[start:stop] for start, stop in zip([at, *ends], ends, strict=False)]
    meta = json.loads(data[at + frame_bytes : at + frame_bytes + meta_bytes]) if meta_bytes else {}
    return LogBatch(frames, notes, meta, cas_ceiling)
