"""Many documents at once: what `EngineVBucket.put` and `History._append` do, for a batch.

Only what must happen document by document does: looking into the index, numbering, and putting the change
where the vbucket has its changes. All that stands in the frames is worked out for all of them together, as
columns. A batch in which anything needs a closer look goes through `EngineVBucket.set`, one after the other.

Frames that were made together and then entered their vbuckets one by one, by `_append`, took 1.6 times the
time: each vbucket's memory is touched once here, and three times there
(docs/decisions/0023-many-writes-at-once.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .format import (
    COLLECTION,
    DATATYPE_TRAITS,
    MUTATION,
    MUTATION_EXTRAS,
    MUTATION_HEADS,
    MUTATION_START,
    NOTE_SHIFT,
    REPLACES,
)
from .index import ENTRY_BYTES, EXISTS, REV_SHIFT, SEQNO

if TYPE_CHECKING:
    from .bucket import EngineBucket
    from .vbucket import EngineVBucket

__all__ = ["set_many"]

_HEAD = np.dtype((np.void, MUTATION.size))
_LOW = (1 << REV_SHIFT) - 1
_LIVE = EXISTS + 1  # with this added, an entry whose low bits are all set is of a document with the next rev
_first_byte = itemgetter(0)


def set_many(
    bucket: EngineBucket,
    numbers: Sequence[int],
    keys: Sequence[bytes],
    values: Sequence[bytes],
    datatype: int,
) -> None:
    """`EngineVBucket.set` for many documents, in order."""
    if not len(numbers) == len(keys) == len(values):
        raise ValueError(f"{len(numbers)} vbuckets, {len(keys)} keys, {len(values)} values")
    if not keys or not _Batch(bucket, numbers, keys).set(values, datatype):
        for number, key, value in zip(numbers, keys, values, strict=True):
            bucket.find(number).set(key, value, datatype=datatype)


class _Batch:
    """Documents that are stored together, and what the vbuckets had before."""

    def __init__(self, bucket: EngineBucket, numbers: Sequence[int], keys: Sequence[bytes]) -> None:
        self._bucket = bucket
        self._numbers = numbers
        self._keys = keys
        self._vbuckets: list[EngineVBucket] = []
        self._items: list[list[Any]] = []  # where each vbucket has its changes
        self._seqnos: list[int] = []
        self._olds: list[bytes] = []  # the index entries; of a new key only the rev from which it goes on
        self._watched: list[tuple[EngineVBucket, bytes, int]] = []  # changes of which somebody must know

    def set(self, values: Sequence[bytes], datatype: int) -> bool:
        """Store the documents; False if that needs a closer look, and nothing has changed."""
        bucket, queue, count = self._bucket, self._bucket.queue, len(values)
        key_lengths = np.fromiter(map(len, self._keys), np.int64, count)
        value_lengths = np.fromiter(map(len, values), np.int64, count)
        size = int(key_lengths.sum() + value_lengths.sum()) + MUTATION.size * count
        if queue.memory_bytes + size > queue.memory_limit or value_lengths.max() > queue.max_value:
            return False
        try:
            if not self._index():
                self._undo()
                return False
            # Two columns: the seqno with whether the document was there, and the rev.
            before, revs = np.frombuffer(b"".join(self._olds), "<u8").reshape(-1, 2).T
            cas = queue.clock.next()
            heads = np.zeros(count, MUTATION_HEADS)
            heads["magic+opcode"] = MUTATION_START
            heads["key_length"] = key_lengths
            heads["extras_length"] = MUTATION_EXTRAS
            heads["datatype"] = datatype
            heads["vbucket"] = np.array(self._numbers, np.uint16)
            heads["body_length"] = key_lengths + value_lengths + MUTATION_EXTRAS
            heads["cas"] = np.arange(cas, cas + count, dtype=np.uint64)
            heads["by_seqno"] = np.array(self._seqnos, np.uint64)
            heads["rev_seqno"] = revs + np.uint64(1)
            starts: list[Any] = heads.view(_HEAD).tolist()
            frames = list(map(b"".join, zip(starts, self._keys, values, strict=True)))
            is_new = before < EXISTS
            traits = np.where(is_new, np.uint64(0), np.uint64(REPLACES))
            traits[np.fromiter(map(_first_byte, self._keys), np.bool_, count)] |= np.uint64(COLLECTION)
            traits |= np.uint64(DATATYPE_TRAITS[datatype])
            notes = ((before & np.uint64(SEQNO)) << np.uint64(NOTE_SHIFT) | traits).tolist()
        except BaseException:
            self._undo()
            raise
        deque(map(list.extend, self._items, zip(frames, notes, strict=True)), maxlen=0)
        queue.frames += frames
        queue.notes += notes
        queue.memory_bytes += size
        queue.clock.last = cas + count - 1
        for place in np.flatnonzero(is_new).tolist():
            vbucket = self._vbuckets[place]
            if vbucket._items is not None:
                vbucket._items += 1
        if bucket.cache:
            for key in self._keys:
                bucket.cache.pop(key, None)
        for vbucket, key, seqno in self._watched:
            vbucket._tell(key, seqno)
        return True

    def _index(self) -> bool:
        """Number the documents and put them into the indexes, until there is something unusual."""
        vbuckets, numbers = self._bucket.vbuckets, self._numbers
        if min(numbers) < 0 or max(numbers) >= len(vbuckets):
            return False
        add_vbucket, add_items = self._vbuckets.append, self._items.append
        add_seqno, add_old = self._seqnos.append, self._olds.append
        for number, key in zip(numbers, self._keys, strict=True):
            vbucket = vbuckets[number]
            if vbucket is None or vbucket._index is None or vbucket._locks:
                return False
            index, tail = vbucket._index, vbucket._tail
            if tail.seqnos is not None:
                return False
            old = index.get(key) or vbucket.forgotten.rev_floor << REV_SHIFT
            seqno = vbucket.high_seqno + 1
            add_vbucket(vbucket)
            add_items(tail.items)
            add_seqno(seqno)
            add_old(old.to_bytes(ENTRY_BYTES, "little"))
            index[key] = (old | _LOW) + (_LIVE + seqno)
            vbucket.high_seqno = seqno
            if seqno >= vbucket._tell_from:
                self._watched.append((vbucket, key, seqno))
        return True

    def _undo(self) -> None:
        """The vbuckets are as they were, last things first: a key may be there twice."""
        changes = zip(self._vbuckets, self._keys, self._seqnos, self._olds, strict=False)
        for vbucket, key, seqno, old in reversed(list(changes)):
            index, entry = vbucket._index, int.from_bytes(old, "little")
            assert index is not None
            if entry & _LOW:
                index[key] = entry
            else:
                index.pop(key, None)
            vbucket.high_seqno = seqno - 1
