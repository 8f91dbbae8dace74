"""Header and extras of many frames: gathered from a buffer, split into arrays of words."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..frames import Bytes, Offsets
from ..wire import dcp
from ..wire.header import HEADER_LAYOUT, HEADER_SIZE
from ..wire.layout import Layout

__all__ = [
    "BLOCK_ROWS",
    "EXTRAS_FIELDS",
    "FIELDS",
    "GROUPS",
    "KEY_BYTE",
    "RECORD",
    "WORD_BYTES",
    "Words",
    "gather",
    "gather_words",
]

Words = list[NDArray[np.uint64]]
"""Header and extras of many frames: each array has eight bytes of every frame, in native byte order."""

WORD_BYTES = 8
RECORD = np.dtype((np.void, -(HEADER_SIZE + dcp.MUTATION.size) // WORD_BYTES * -WORD_BYTES))
"""What is gathered from each frame."""
BLOCK_ROWS = 4096
"""This many records stay in the nearest processor caches from one step to the next."""


class RecordField(NamedTuple):
    """Where a number is in the words."""

    word: int
    dtype: np.dtype[Any]
    place: int
    """Its index in the memory of that word, counted in numbers of this size."""
    bits: int
    """The bits of that word that it takes up."""

    @property
    def lowest(self) -> int:
        """The lowest of those bits: a number is put there by multiplying with it."""
        return self.bits & -self.bits

    def of(self, words: Words) -> NDArray[Any]:
        """The numbers of all frames, as a view into the words."""
        return words[self.word].view(self.dtype)[self.place :: WORD_BYTES // self.dtype.itemsize]


def _field(code: str, offset: int) -> RecordField:
    dtype = np.dtype(f"={code}")
    size = dtype.itemsize
    word, at = divmod(offset, WORD_BYTES)
    assert at % size == 0
    behind = WORD_BYTES - at - size
    place = (behind if sys.byteorder == "little" else at) // size
    return RecordField(word, dtype, place, ((1 << 8 * size) - 1) << 8 * behind)


def _fields(layout: Layout, names: dict[str, str]) -> dict[str, RecordField]:
    """Fields by the names of their columns; the values are their names in the layout."""
    declared = {name: layout.field(of) for name, of in names.items()}
    return {name: _field(field.code, field.offset) for name, field in declared.items()}


EXTRAS_FIELDS = {
    **_fields(
        HEADER_LAYOUT + dcp.MUTATION,
        {"seqno": "by_seqno", "rev": "rev_seqno", "flags": "flags", "expiry": "expiry", "nmeta": "nmeta"},
    ),
    # deletions have shorter extras, which use the same bytes differently
    **_fields(HEADER_LAYOUT + dcp.DELETION_V1, {"deletion_nmeta": "nmeta"}),
}
FIELDS = {
    # the whole header but the body length, which the walk has followed
    **_fields(HEADER_LAYOUT, {name: name for name in HEADER_LAYOUT.names if name != "body_length"}),
    **EXTRAS_FIELDS,
}
GROUPS = (slice(0, 2), slice(2, 5), slice(5, 7))
"""Words that share memory: CAS, seqno and rev become columns as they are and should not keep others alive."""
assert [FIELDS[name].word for name in ("cas", "seqno", "rev")] == [2, 3, 4]
KEY_BYTE = _field("B", HEADER_SIZE + dcp.MUTATION.size)
"""The first byte of a mutation's key, which just fits into the record: it begins the collection id."""


def gather(data: Bytes, at: Offsets, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """The records at ascending offsets; bytes after the end of the buffer read as zeros."""
    size = dtype.itemsize
    # A record at every offset, without a copy: fancy indexing reads only what is asked for.
    everywhere = np.ndarray((max(len(data) - size + 1, 0),), dtype=f"V{size}", buffer=data, strides=(1,))
    if not len(at) or at[-1] < len(everywhere):
        return everywhere[at].view(dtype)
    inside = int(np.searchsorted(at, len(everywhere)))
    tail = b"".join(data[offset:].tobytes().ljust(size, b"\0")[:size] for offset in at[inside:])
    return np.concatenate((everywhere[at[:inside]], np.frombuffer(tail, dtype=f"V{size}"))).view(dtype)


def gather_words(data: Bytes, at: Offsets) -> Words:
    """The records at ascending offsets, split into words."""
    groups = [(part, np.empty((part.stop - part.start, len(at)), dtype=np.uint64)) for part in GROUPS]
    for first in range(0, len(at), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        records = gather(data, at[block], RECORD).view(">u8").reshape(-1, RECORD.itemsize // WORD_BYTES)
        for part, group in groups:
            group[:, block] = records.T[part]
    return [word for _, group in groups for word in group]
