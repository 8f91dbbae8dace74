"""A vbucket's history: numbered changes in memory and in segments, the index of its keys, its state and
branches.

What may be written, and under which conditions, is in `documents`; what comes from elsewhere in `received`.
Here a change is a frame that has its seqno already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..history import FailoverLog
from ..wire.codes import SystemEventId, VBucketState
from .base import ReceivedRange, VBucketSnapshot
from .checkpoint import Checkpoints, Tail
from .format import (
    EXPIRES,
    NO_EXPIRY,
    NOTE_SHIFT,
    NOTE_TRAITS,
    REPLACES,
    SYSTEM,
    TOMBSTONE,
    collection_of,
    expiry_of,
    index_key,
    rev_of,
    scope_of,
    seqno_of,
    system_event,
)
from .index import EXISTS, SEQNO, count_documents, entry_of, forget_collection, index_frames
from .segment import SegmentPiece
from .snapshot import NO_DROPS, DiskSnapshot, Drops, MemorySnapshot, fold, superseded

if TYPE_CHECKING:
    from .bucket import EngineBucket
    from .compaction import Generation

__all__ = ["History"]


class History:
    """State, seqnos, branches, index and changes of one vbucket."""

    # What a write needs comes first, so that it lies together: writes go from vbucket to vbucket, and each
    # place that is not in the processor's cache costs more than the work done there.
    __slots__ = (  # noqa: RUF023
        "_index",
        "_bucket",
        "high_seqno",
        "id",
        "_tail",
        "_locks",
        "_items",
        "_collection_highs",
        "_checkpoint_end",
        "_on_append",
        "_on_change",
        "rev_floor",
        "state",
        "_announced_purge",
        "_checkpoints",
        "_folded",
        "_has_gaps",
        "_meta_queued",
        "_next_expiry",
        "_old",
        "_pieces",
        "_pieces_epoch",
        "_received",
        "_waiters",
        "deleted_rev",
        "events",
        "extra",
        "failover_log",
        "purge_seqno",
        "rollback_floor",
    )

    def __init__(self, bucket: EngineBucket, vbucket: int, state: int, log: FailoverLog) -> None:
        self.id = vbucket
        self.state = state
        self.extra: dict[str, Any] | None = None
        self.failover_log = log
        self.high_seqno = 0
        self.purge_seqno = 0
        self.rollback_floor = 0
        self._received = ReceivedRange(0, 0)
        self._announced_purge = 0  # of the snapshot that is being received, if nothing of it is here yet
        # what is here of the snapshot that is being received has gaps; unknown (True) after a restart
        self._has_gaps = True
        self._folded: list[ReceivedRange] = []  # received snapshots with gaps, rising
        # highest rev of a tombstone that was purged: a document that comes back goes on from there
        self.rev_floor = 0
        self.deleted_rev = 0
        self.events: list[tuple[int, int, int, int]] = []  # seqno, event, collection or scope id, scope id
        self._bucket = bucket
        self._index: dict[bytes, int] | None = None
        self._locks: dict[bytes, tuple[int, float]] = {}  # the CAS that unlocks, and until when (monotonic)
        self._items: int | None = 0
        self._tail = Tail(1)
        self._old: list[Tail] = []
        self._meta_queued = False
        self._pieces: tuple[SegmentPiece, ...] = ()
        self._pieces_epoch = -1
        self._next_expiry = NO_EXPIRY
        self._collection_highs: dict[int, int] | None = None
        self._checkpoints = Checkpoints(1, 0)
        self._checkpoint_end = bucket.settings.checkpoint_items
        self._on_append: Callable[[], None] | None = None
        self._on_change: Callable[[], None] | None = None
        self._waiters: list[tuple[int, Callable[[bool], None]]] = []

    # What it is.

    @property
    def uuid(self) -> int:
        return self.failover_log.newest.vb_uuid

    @property
    def persisted_seqno(self) -> int:
        return int(self._bucket.persisted[self.id])

    @persisted_seqno.setter
    def persisted_seqno(self, seqno: int) -> None:
        self._bucket.persisted[self.id] = seqno

    @property
    def received(self) -> ReceivedRange:
        if self.state == VBucketState.ACTIVE:
            return ReceivedRange(self.high_seqno, self.high_seqno)
        return self._received

    @property
    def complete_seqno(self) -> int:
        start, end = self.received
        return min(start, self.high_seqno) if self.high_seqno < end else self.high_seqno

    def exact_seqno(self, seqno: int) -> int:
        seqno = min(seqno, self.high_seqno)
        if seqno > self.received.start and self.high_seqno < self.received.end:
            seqno = self.complete_seqno
        seqno = self._folded_around(seqno).start
        return seqno if seqno >= self.rollback_floor else 0

    def _folded_around(self, seqno: int) -> ReceivedRange:
        """The received snapshot inside which a seqno lies, where older versions were folded away by whoever
        sent it; inside of none it is a range by itself.

        In such a snapshot there is no state between its start and its end that the vbucket really had.
        """
        for folded in self._folded:
            if folded.start < seqno < folded.end:
                return folded
        return ReceivedRange(seqno, seqno)

    @property
    def item_count(self) -> int:
        if self._items is None:
            self._load()
        return self._items or 0

    @property
    def tombstone_count(self) -> int:
        index = self._index if self._index is not None else self._load()
        return sum(1 for key, entry in index.items() if not entry & EXISTS and key[0] != 1)

    @property
    def disk_bytes(self) -> int:
        return sum(piece.frame_bytes for piece in self.pieces)

    @property
    def checkpoint_id(self) -> int:
        return self._checkpoints.open_id

    @property
    def pieces(self) -> tuple[SegmentPiece, ...]:
        """Its parts of the sealed segments, in the order of their seqnos."""
        if self._pieces_epoch != self._bucket.epoch:
            pieces = (segment.piece(self.id) for segment in self._bucket.segments)
            self._pieces = tuple(sorted((piece for piece in pieces if piece), key=lambda piece: piece.first))
            self._pieces_epoch = self._bucket.epoch
        return self._pieces

    @property
    def sealed_seqno(self) -> int:
        """The newest change that is in a segment."""
        return max([piece.last for piece in self.pieces], default=0)

    # Changes.

    def _append(  # noqa: PLR0917
        self, key: bytes, frame: bytes, seqno: int, entry: int, old: int, traits: int
    ) -> None:
        """A new change. `entry` and `old` are the key's new and old index entries, old 0 if there is none."""
        if old & EXISTS:
            note = (old & SEQNO) << NOTE_SHIFT | traits | REPLACES
        else:
            note = (old & SEQNO) << NOTE_SHIFT | traits
        if self._index is not None:
            self._index[key] = entry
        bucket = self._bucket
        if bucket.cache:
            bucket.cache.pop(key, None)
        tail = self._tail
        items = tail.items
        items.append(frame)
        items.append(note)
        if tail.seqnos is not None:
            tail.seqnos.append(seqno)
        self.high_seqno = seqno
        bucket.pending.append(frame)
        bucket.notes.append(note)
        bucket.memory_bytes += len(frame)
        if (entry ^ old) & EXISTS and self._items is not None and not traits & SYSTEM:
            self._items += 1 if entry & EXISTS else -1
        if traits:
            self._note(frame, seqno, traits)
        if seqno >= self._checkpoint_end or self._on_append is not None or self._collection_highs is not None:
            self._tell(key, seqno)

    def _tell(self, key: bytes, seqno: int) -> None:
        """A change is there of which somebody may have to know."""
        if self._collection_highs is not None:
            self._collection_highs[collection_of(key)] = seqno
        if seqno >= self._checkpoint_end:
            self._close_checkpoint(seqno)
        if self._on_append is not None:
            self._on_append()

    def _note(self, frame: bytes, seqno: int, traits: int) -> None:
        """What an unusual change means beyond its key."""
        if traits & TOMBSTONE:
            self.deleted_rev = max(self.deleted_rev, rev_of(frame))
        if traits & EXPIRES:
            self._next_expiry = min(self._next_expiry, expiry_of(frame))
        if traits & SYSTEM:
            event, subject = system_event(frame)
            is_of_collection = event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.COLLECTION_END)
            scope = scope_of(frame) if is_of_collection else subject
            self._bucket.cache.clear()
            self.events = [*self.events, (seqno, event, subject, scope)]
            if (seqno, subject) in self.drops:
                self._items = None
                if self._index is not None:
                    forget_collection(self._index, subject, seqno)
                    self._items = count_documents(self._index)

    @property
    def drops(self) -> list[tuple[int, int]]:
        """(seqno, collection) of every event that removed a collection's documents: it ended, or began once
        more, which is how a collection is emptied.
        """
        drops = []
        begun: set[int] = {0}
        for seqno, event, subject, _ in self.events:
            if event == SystemEventId.COLLECTION_END or (
                event == SystemEventId.COLLECTION_BEGIN and subject in begun
            ):
                drops.append((seqno, subject))
            if event == SystemEventId.COLLECTION_BEGIN:
                begun.add(subject)
        return drops

    def _drops_up_to(self, seqno: int) -> Drops:
        return Drops(self.drops, seqno) if self.events else NO_DROPS

    def frame_at(self, seqno: int) -> bytes | None:
        """The frame with this seqno, from memory or disk."""
        tail = self._tail
        if seqno >= tail.first:
            return tail.frame(seqno)
        for tail in reversed(self._old):
            if seqno >= tail.first:
                return tail.frame(seqno)
        for piece in reversed(self.pieces):
            if piece.first <= seqno <= piece.last:
                return piece.frame(seqno)
        return None

    # The index.

    def load_index(self) -> dict[bytes, int]:
        """The index of its keys, built if it is not there."""
        return self._index if self._index is not None else self._load()

    def _load(self) -> dict[bytes, int]:
        """Build the index from every change that is left, in order: the newest stays."""
        index: dict[bytes, int] = {}
        for piece in self.pieces:
            for frames in piece.blocks():
                index_frames(index, frames)
        sealed = self.sealed_seqno
        for tail in (*self._old, self._tail):
            for place in range(tail.after(sealed), len(tail)):
                frame, note = tail.items[2 * place : 2 * place + 2]
                index[index_key(frame)] = entry_of(frame, seqno_of(frame), note)
        drops = self.drops
        for seqno, collection in drops:
            forget_collection(index, collection, seqno)
        self._index = index
        if self._items is None:
            self._items = count_documents(index)
        return index

    def forget_purged(self, purged: Iterable[tuple[bytes, int]]) -> None:
        """Compaction dropped these tombstones."""
        if self._index is not None:
            for key, seqno in purged:
                if self._index.get(key, 0) & SEQNO == seqno:
                    del self._index[key]

    def collection_high_seqno(self, collections: Iterable[int]) -> int:
        wanted = set(collections)
        if not self.events and 0 in wanted:
            return self.high_seqno
        highs = self._collection_highs
        if highs is None:
            highs = {}
            for key, entry in (self._index if self._index is not None else self._load()).items():
                if key[0] != 1:
                    collection = collection_of(key)
                    highs[collection] = max(highs.get(collection, 0), entry & SEQNO)
            self._collection_highs = highs
        events = (seqno for seqno, event, subject, _ in self.events if event in (0, 1) and subject in wanted)
        return max([highs.get(collection, 0) for collection in wanted] + list(events), default=0)

    # Streams.

    def snapshot_after(self, after_seqno: int, *, memory: bool = True) -> VBucketSnapshot | None:
        if not memory:
            return self._persisted_snapshot(after_seqno)
        if after_seqno >= self.high_seqno:
            return None
        first = self._old[0] if self._old else self._tail
        sealed = self.sealed_seqno
        if after_seqno + 1 >= first.first or after_seqno >= sealed:
            checkpoint_id, start, end = self._checkpoints.containing(after_seqno + 1)
            return self._memory_snapshot(
                after_seqno,
                self.high_seqno if end is None else self._folded_around(end).end,
                checkpoint=start == after_seqno,
                checkpoint_id=checkpoint_id,
            )
        return self._disk_and_memory_snapshot(after_seqno, sealed, self._folded_around(sealed).end)

    def _memory_snapshot(
        self, after: int, end: int, *, checkpoint: bool = False, checkpoint_id: int = 0
    ) -> MemorySnapshot | None:
        frames: list[bytes] = []
        notes: list[int] = []
        seqnos: list[int] = []
        for tail in (*self._old, self._tail):
            start, stop = tail.after(after), tail.after(end)
            if start < stop:
                frames += tail.frames(start, stop)
                notes += tail.notes(start, stop)
                seqnos += tail.numbers(start, stop)
        if not frames:
            return None
        # The last change up to `end`: a replica's checkpoint may end in a gap.
        last = seqnos[-1]
        kept, traits = fold(frames, seqnos, notes, self._drops_up_to(last))
        return MemorySnapshot(
            after + 1, last, kept, traits, checkpoint=checkpoint, checkpoint_id=checkpoint_id
        )

    def _disk_snapshot(self, after: int, end: int) -> DiskSnapshot:
        pieces = self.pieces
        return DiskSnapshot(after, end, pieces, superseded(pieces, after), self._drops_up_to(end))

    def _persisted_snapshot(self, after: int) -> VBucketSnapshot | None:
        """Everything on disk: the segments, and what the logs hold of the changes in memory."""
        if after >= self.persisted_seqno:
            return None
        end = self._folded_around(self.persisted_seqno).end
        sealed = self.sealed_seqno
        if after >= sealed:
            # Not None only if there is a change: a replica that was rolled back may end in a gap.
            snapshot = self._memory_snapshot(after, end)
            if snapshot is not None:
                snapshot.in_memory = False
                snapshot.checkpoint = True
            return snapshot
        return self._disk_and_memory_snapshot(after, sealed, end)

    def _disk_and_memory_snapshot(self, after: int, sealed: int, end: int) -> VBucketSnapshot:
        """The segments, and then the changes in memory up to a seqno."""
        rest = self._memory_snapshot(sealed, end) if end > sealed else None
        if rest is None:
            return self._disk_snapshot(after, sealed)
        dead = superseded(self.pieces, after)
        notes: list[int] = []
        for tail in (*self._old, self._tail):
            notes += tail.notes(tail.after(sealed), tail.after(rest.end))
        olds = np.array(notes, np.uint64) >> np.uint64(NOTE_SHIFT)
        later = olds[(olds > after) & (olds <= sealed)]
        if len(later):
            dead = np.union1d(dead, later)
        drops = self._drops_up_to(rest.end)
        return DiskSnapshot(after, rest.end, self.pieces, dead, drops, rest=rest)

    def on_append(self, callback: Callable[[], None] | None) -> None:
        self._on_append = callback

    def on_change(self, callback: Callable[[], None] | None) -> None:
        self._on_change = callback

    def changed(self) -> None:
        """Something other than a new change happened that streams must know."""
        if self._on_change is not None:
            self._on_change()

    def close_checkpoint(self) -> int:
        return self._close_checkpoint(self.high_seqno)

    def _close_checkpoint(self, seqno: int) -> int:
        before = self._checkpoints.open_id
        self._checkpoints.close(seqno)
        self._checkpoint_end = self._checkpoints.open_start + self._bucket.settings.checkpoint_items
        if self._checkpoints.open_id != before:
            self._bucket.queue_meta(self)
        return self._checkpoints.open_id

    def checkpoint_start(self, checkpoint_id: int) -> int | None:
        start = self._checkpoints.start_of(checkpoint_id)
        first = self._old[0].first if self._old else self._tail.first
        return start if start is not None and start + 1 >= first else None

    # Durability.

    def when_persisted(self, seqno: int, callback: Callable[[bool], None]) -> None:
        if seqno <= self.persisted_seqno:
            callback(True)
        else:
            self._waiters.append((seqno, callback))
            self._bucket.waiting[self] = None

    def tell_waiters(self) -> bool:
        """A flush has come to its end; whether somebody still waits."""
        seqno = self.persisted_seqno
        due = [callback for wanted, callback in self._waiters if wanted <= seqno]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > seqno]
        for callback in due:
            callback(True)
        return bool(self._waiters)

    def give_up_waiters(self, after: int = 0) -> None:
        """What they wait for will never come."""
        lost = [callback for wanted, callback in self._waiters if wanted > after]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] <= after]
        for callback in lost:
            callback(False)

    def rotate(self, generation: Generation) -> Tail | None:
        """What is on disk of the growing tail belongs to a generation that is now complete."""
        tail = self._tail
        flushed = tail.after(self.persisted_seqno)
        if not flushed:
            return None
        self._tail = tail.part(flushed, len(tail), self.persisted_seqno + 1)
        tail.cut(flushed)
        tail.generation = generation
        self._old.append(tail)
        return tail

    def forget_tail(self, generation: Generation) -> None:
        """A generation is sealed and leaves memory."""
        if self._old and self._old[0].generation is generation:
            del self._old[0]
            first = self._old[0].first if self._old else self._tail.first
            self._checkpoints.forget_before(first - 1)

    def drop_after(self, seqno: int) -> None:
        """The part of a rollback that happens in memory; segments are clipped by the bucket."""
        # Copies, because a job on another thread may be reading the old ones.
        kept = [tail for tail in self._old if tail.first <= seqno]
        self._old = [tail.part(0, tail.after(seqno), tail.first) for tail in kept]
        for new, old in zip(self._old, kept, strict=True):
            new.generation = old.generation
        tail = self._tail
        if tail.first <= seqno:
            self._tail = tail.part(0, tail.after(seqno), tail.first)
        else:
            self._tail = Tail(seqno + 1)
        self.high_seqno = seqno
        self.persisted_seqno = min(self.persisted_seqno, seqno)
        self._received = ReceivedRange(seqno, seqno)
        self._announced_purge = 0
        self._has_gaps = True
        self._folded = [folded for folded in self._folded if folded.end <= seqno]
        self.events = [event for event in self.events if event[0] <= seqno]
        if seqno == 0:
            self.purge_seqno = self.rollback_floor = self.rev_floor = self.deleted_rev = 0
        self._index = None
        self._bucket.cache.clear()
        self._items = None if seqno else 0
        self._collection_highs = None
        self._next_expiry = 0
        self._checkpoints = Checkpoints(self._checkpoints.open_id + 1, seqno)
        self._checkpoint_end = seqno + self._bucket.settings.checkpoint_items
        self._pieces_epoch = -1

    def kept(self) -> dict[str, Any]:
        """Everything as it is now, for `restore`."""
        slots = (name for each in type(self).__mro__ for name in getattr(each, "__slots__", ()))
        return {name: getattr(self, name) for name in slots}

    def restore(self, kept: dict[str, Any]) -> None:
        """What `drop_after` did is undone."""
        for name, value in kept.items():
            setattr(self, name, value)

    # What is stored beside the changes.

    def to_json(self, *, whole: bool) -> dict[str, Any]:
        """For a batch: what changes without a change. `whole`, for the manifest: all that can't be
        computed again.
        """
        meta: dict[str, Any] = {
            "state": self.state,
            "failover_log": self.failover_log.to_json(),
            "received": list(self._received),
            "checkpoint": self._checkpoints.open_id,
            "purge_seqno": self.purge_seqno,
        }
        if self._folded:
            meta["folded"] = [list(folded) for folded in self._folded]
        if self.extra is not None:
            meta["extra"] = self.extra
        if whole:
            meta["high_seqno"] = self.high_seqno
            meta["rollback_floor"] = self.rollback_floor
            meta["rev_floor"] = self.rev_floor
            meta["deleted_rev"] = self.deleted_rev
            meta["items"] = self._items
            meta["events"] = self.events
            meta["next_expiry"] = self._next_expiry
        return meta

    def take_json(self, meta: dict[str, Any]) -> None:
        """The reverse of `to_json`."""
        self.state = meta["state"]
        self.failover_log = FailoverLog.from_json(meta["failover_log"])
        self._received = ReceivedRange(*meta["received"])
        self._folded = [ReceivedRange(*ends) for ends in meta.get("folded", [])]
        self.extra = meta.get("extra")
        self.purge_seqno = max(self.purge_seqno, meta.get("purge_seqno", 0))
        self._checkpoints = Checkpoints(meta["checkpoint"], self._checkpoints.open_start)
        if "high_seqno" in meta:
            self.high_seqno = self.persisted_seqno = meta["high_seqno"]
            self.rollback_floor = meta["rollback_floor"]
            self.rev_floor = meta["rev_floor"]
            self.deleted_rev = meta.get("deleted_rev", self.rev_floor)  # before it was kept: of those purged
            self._items = meta["items"]
            self.events = [(s, e, i, p) for s, e, i, p in meta["events"]]
            self._next_expiry = meta["next_expiry"]
            self._tail = Tail(self.high_seqno + 1)
            self._checkpoints = Checkpoints(meta["checkpoint"], self.high_seqno)

    def replay(self, frames: Sequence[bytes], notes: Sequence[int]) -> None:
        """Changes that a log holds."""
        tail = self._tail
        for frame, note in zip(frames, notes, strict=True):
            seqno = seqno_of(frame)
            tail.expect(seqno)
            if tail.seqnos is not None:
                tail.seqnos.append(seqno)
            tail.items += (frame, note)
            if note & 0x7F:
                self._note(frame, seqno, note & NOTE_TRAITS)
            if self._items is not None and not note & SYSTEM:
                self._items += (not note & TOMBSTONE) - bool(note & REPLACES)
        self._bucket.memory_bytes += sum(map(len, frames))
        self.high_seqno = self.persisted_seqno = seqno_of(frames[-1])

    def recovered(self) -> None:
        """All logs are read: what comes next is in a checkpoint of its own."""
        first = self._old[0].first if self._old else self._tail.first
        self._checkpoints = Checkpoints(self._checkpoints.open_id + 1, first - 1)
        self._checkpoint_end = first - 1 + self._bucket.settings.checkpoint_items
