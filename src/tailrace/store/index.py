"""The index of a vbucket's keys.

It has an integer for each key: in the low 64 bits the note of a change that supersedes the newest one (its
seqno, and whether there is a document to replace), above them its rev. It says *what* is newest, never where
that is: places change with each compaction, seqnos don't. It is built when it is first needed, and again
after a rollback.
"""

from __future__ import annotations

import numpy as np

from ..frames import OPCODE_AT
from ..wire.codes import SystemEventId
from ..wire.header import HEADER_SIZE
from .format import (
    NOTE_SHIFT,
    REPLACES,
    SYSTEM,
    TOMBSTONE,
    UNSEEN,
    collection_of,
    index_key,
    rev_of,
    revs_at,
    system_event,
    system_key,
)
from .segment import Frames

__all__ = [
    "EXISTS",
    "NOTE",
    "REV_SHIFT",
    "count_documents",
    "entry_of",
    "forget_collection",
    "index_change",
    "index_frames",
    "make_entry",
    "newest_seqno",
]

EXISTS = REPLACES
REV_SHIFT = 64
NOTE = (1 << REV_SHIFT) - 1
_NO_DOCUMENT = TOMBSTONE | SYSTEM
BEGINS = (SystemEventId.COLLECTION_BEGIN, SystemEventId.SCOPE_CREATED, SystemEventId.COLLECTION_MODIFIED)


def make_entry(seqno: int, *, exists: bool, rev: int = 0) -> int:
    """The index entry of a key whose newest change has this seqno."""
    return rev << REV_SHIFT | seqno << NOTE_SHIFT | (EXISTS if exists else 0)


def newest_seqno(entry: int) -> int:
    """The seqno of the newest change, from its entry."""
    return (entry & NOTE) >> NOTE_SHIFT


def count_documents(index: dict[bytes, int]) -> int:
    """How many keys of an index are live documents."""
    return sum(1 for key, entry in index.items() if entry & EXISTS and key[0] != 1)


def entry_of(frame: bytes, seqno: int, traits: int) -> int:
    """The index entry for a frame."""
    if traits & SYSTEM:
        return make_entry(seqno, exists=system_event(frame)[0] in BEGINS)
    return make_entry(seqno, exists=not traits & TOMBSTONE, rev=rev_of(frame))


def index_change(index: dict[bytes, int], frame: bytes, seqno: int, traits: int) -> None:
    """Put the key of a change into an index. Prepares and aborts change nothing that can be read."""
    if frame[OPCODE_AT] not in UNSEEN:
        index[index_key(frame)] = entry_of(frame, seqno, traits)


def forget_collection(index: dict[bytes, int], collection: int, seqno: int) -> None:
    """Remove what went when a collection ended or was emptied: its documents, and that it was modified."""
    gone = [
        key
        for key, entry in index.items()
        if key[0] != 1 and collection_of(key) == collection and newest_seqno(entry) < seqno
    ]
    modified = system_key(SystemEventId.COLLECTION_MODIFIED, collection)
    if modified in index and newest_seqno(index[modified]) < seqno:
        gone.append(modified)
    for key in gone:
        del index[key]


def index_frames(index: dict[bytes, int], frames: Frames) -> None:
    """Put the keys of whole frames into an index, in order."""
    offsets = frames.offsets
    data = frames.data
    traits = frames.traits
    starts = offsets + HEADER_SIZE + data[offsets + 4]
    ends = starts + (data[offsets + 2].astype(np.int64) << 8) + data[offsets + 3]
    raw = data.tobytes()
    keys = [raw[start:stop] for start, stop in zip(starts.tolist(), ends.tolist(), strict=True)]
    exists = np.where(traits & _NO_DOCUMENT, np.uint64(0), np.uint64(EXISTS))
    notes = frames.seqnos << np.uint64(NOTE_SHIFT) | exists
    revs = revs_at(data, offsets).tolist()
    entries = [rev << REV_SHIFT | note for rev, note in zip(revs, notes.tolist(), strict=True)]
    for place in reversed(np.flatnonzero(traits & SYSTEM).tolist()):
        start = int(offsets[place])
        frame = raw[start : start + int(frames.lengths[place])]
        if frame[OPCODE_AT] in UNSEEN:
            del keys[place], entries[place]
            continue
        keys[place] = index_key(frame)
        entries[place] = entry_of(frame, int(frames.seqnos[place]), int(traits[place]))
    index.update(zip(keys, entries, strict=True))
