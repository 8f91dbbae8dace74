"""A vbucket's history: numbered changes in memory and in segments, the index of its keys, its state and
branches.

`vbucket` decides what may be written, `received_history` what is taken from elsewhere. Here a change is a
frame that has its seqno already; each is added by `_append`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..history import FailoverLog
from ..wire.codes import VBucketState
from .base import ReceivedRange, VBucketSnapshot
from .checkpoint import Checkpoints, Tail
from .collection_events import CollectionEvents, KnownEvent
from .deduplication import Deduplicated
from .forgotten import Forgotten
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
    rev_of,
    seqno_of,
)
from .index import (
    NOTE,
    count_documents,
    forget_collection,
    index_change,
    index_frames,
    newest_seqno,
)
from .listeners import Listeners
from .locks import Locks
from .received_snapshots import ReceivedSnapshots
from .segment import Segment, SegmentPiece, pieces_of
from .snapshot import DiskSnapshot, MemorySnapshot, fold, superseded
from .write_queue import WriteQueue

if TYPE_CHECKING:
    from .bucket import EngineBucket
    from .generations import Generation

__all__ = ["History", "Unseen"]

_MEANINGFUL = TOMBSTONE | EXPIRES | SYSTEM
_COUNTED = TOMBSTONE | SYSTEM | REPLACES


class Unseen(NamedTuple):
    """Prepares and aborts (see `prepares`): only readers that ask for them see their seqnos."""

    visible: int = 0
    """The last other change before the newest of them."""
    last: int = 0
    """The newest of them, 0 if there has been none."""


class History:
    """State, seqnos, branches, index and changes of one vbucket."""

    # What a write needs comes first, in one place: writes go from vbucket to vbucket, and each cache miss
    # costs more than the work done there.
    __slots__ = (  # noqa: RUF023
        "_index",
        "_queue",
        "high_seqno",
        "id",
        "_tail",
        "_locks",
        "_items",
        "_tell_from",
        "forgotten",
        "state",
        "_bucket",
        "_checkpoints",
        "_events",
        "_listeners",
        "_next_expiry",
        "_old",
        "_pieces",
        "_received",
        "_unseen",
        "extra",
        "failover_log",
    )

    def __init__(self, bucket: EngineBucket, vbucket: int, state: int, log: FailoverLog) -> None:
        self.id = vbucket
        self.state = state
        self.extra: dict[str, Any] | None = None
        self.failover_log = log
        self.high_seqno = 0
        self.forgotten = Forgotten()
        self._received = ReceivedSnapshots()
        self._unseen = Unseen()
        self._bucket = bucket
        self._queue: WriteQueue = bucket.queue
        self._index: dict[bytes, int] | None = None
        self._locks = Locks(bucket.clock)
        self._items: int | None = 0
        self._tail = Tail(1)
        self._old: list[Tail] = []
        self._pieces: tuple[int, tuple[SegmentPiece, ...]] = -1, ()  # since which epoch of the segments
        self._next_expiry = NO_EXPIRY
        self._events = CollectionEvents()
        self._checkpoints = Checkpoints(1, 0, bucket.settings.checkpoint_items)
        self._listeners = Listeners()
        self._tell_from = 0  # `_tell` hears of changes from this seqno on; 0: of all
        self._look_who_listens()

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
    def purge_seqno(self) -> int:
        return self.forgotten.purge_seqno

    @property
    def rollback_floor(self) -> int:
        return self.forgotten.rollback_floor

    @property
    def history_start(self) -> int:
        if not self._bucket.settings.keeps_history:
            return 0
        return max(1, self.forgotten.history_floor, self._received.folded_up_to(self.high_seqno))

    @property
    def deduplicated(self) -> Deduplicated:
        """Which changes go as soon as they are superseded, in spite of the bucket's history."""
        return Deduplicated.of(self._events.known, self._bucket.histories)

    @property
    def deleted_rev(self) -> int:
        return self.forgotten.deleted_rev

    @property
    def received(self) -> ReceivedRange:
        if self.state == VBucketState.ACTIVE:
            return ReceivedRange(self.high_seqno, self.high_seqno)
        return self._received.newest

    @property
    def complete_seqno(self) -> int:
        start, end = self.received
        return min(start, self.high_seqno) if self.high_seqno < end else self.high_seqno

    def exact_seqno(self, seqno: int) -> int:
        seqno = min(seqno, self.high_seqno)
        if seqno > self.received.start and self.high_seqno < self.received.end:
            seqno = self.complete_seqno
        seqno = self._received.around(seqno).start
        return seqno if seqno >= self.forgotten.rollback_floor else 0

    def folded_around(self, seqno: int) -> ReceivedRange:
        """The received snapshot inside which a seqno lies; see `ReceivedSnapshots.around`."""
        return self._received.around(seqno)

    @property
    def item_count(self) -> int:
        if self._items is None:
            self._load()
        return self._items or 0

    @property
    def tombstone_count(self) -> int:
        index = self._index if self._index is not None else self._load()
        # by what is known, not by looking at each key: there may be millions
        dead_or_event = len(index) - self.item_count
        return dead_or_event - self._events.count_in(index)

    @property
    def tombstones_in_memory(self) -> int:
        return 0 if self._index is None else self.tombstone_count

    @property
    def disk_bytes(self) -> int:
        return sum(piece.frame_bytes for piece in self.pieces)

    @property
    def checkpoint_id(self) -> int:
        return self._checkpoints.open_id

    @property
    def pieces(self) -> tuple[SegmentPiece, ...]:
        """Its parts of the segments, ordered by seqno."""
        sealed = self._bucket.sealed
        epoch, pieces = self._pieces
        if epoch != sealed.epoch:
            pieces = tuple(pieces_of(self.id, sealed.segments))
            self._pieces = sealed.epoch, pieces
        return pieces

    def let_go(self, segments: Sequence[Segment]) -> None:
        """They are merged: a piece would keep their files."""
        self._pieces = -1, tuple(piece for piece in self._pieces[1] if piece.segment not in segments)

    @property
    def sealed_seqno(self) -> int:
        """The newest change that is in a segment."""
        return max([piece.last for piece in self.pieces], default=0)

    # Changes.

    def _append(  # noqa: PLR0917
        self, frame: bytes, seqno: int, traits: int, old: int = 0, key: bytes = b"", entry: int = 0
    ) -> None:
        """Add a new change. ``old`` and ``entry`` are the key's old and new index entries; a prepare or an
        abort is not in the index and has no key. The caller drops what `Bucket.cache` has of the document.
        """
        note = old & NOTE | traits
        if note & _COUNTED != REPLACES:
            self._count(note)
        if key and self._index is not None:
            self._index[key] = entry
        tail = self._tail
        tail.items += (frame, note)
        if tail.seqnos is not None:
            tail.seqnos.append(seqno)
        queue = self._queue
        queue.frames.append(frame)
        queue.notes.append(note)
        queue.memory_bytes += len(frame)
        if traits & _MEANINGFUL:
            self._note(frame, seqno, traits)
        self.high_seqno = seqno
        if seqno >= self._tell_from:
            self._tell(key, seqno)

    def _count(self, note: int) -> None:
        """Count the documents after a change."""
        if self._items is not None and not note & SYSTEM:
            self._items += (not note & TOMBSTONE) - bool(note & REPLACES)

    def _look_who_listens(self) -> None:
        """Whether each change is told, or only that which fills a checkpoint."""
        everything = self._listeners.on_append is not None or self._events.highs is not None
        self._tell_from = 0 if everything else self._checkpoints.full_at

    def _tell(self, key: bytes, seqno: int) -> None:
        """Tell whoever has to know of a new change."""
        if key and self._events.highs is not None:
            self._events.highs[collection_of(key)] = seqno
        if seqno >= self._checkpoints.full_at:
            self._close_checkpoint(seqno)
        if self._listeners.on_append is not None:
            self._listeners.on_append()

    def _note(self, frame: bytes, seqno: int, traits: int) -> None:
        """What an unusual change means beyond its key."""
        if traits & TOMBSTONE:
            self.forgotten.deleted_rev = max(self.forgotten.deleted_rev, rev_of(frame))
        if traits & EXPIRES:
            self._next_expiry = min(self._next_expiry, expiry_of(frame))
        if traits & SYSTEM:
            self._bucket.cache.clear()
            dropped = self._events.add(frame, seqno)
            if dropped is not None:
                self._items = None
                if self._index is not None:
                    forget_collection(self._index, dropped, seqno)
                    self._items = count_documents(self._index)

    @property
    def drops(self) -> list[tuple[int, int]]:
        """See `CollectionEvents.drops`."""
        return self._events.drops

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
        for tail in self.tails():
            for place in range(tail.after(sealed), len(tail)):
                frame, note = tail.items[2 * place : 2 * place + 2]
                index_change(index, frame, seqno_of(frame), note)
        for seqno, collection in self.drops:
            forget_collection(index, collection, seqno)
        self._index = index
        if self._items is None:
            self._items = count_documents(index)
        return index

    def forget_purged(self, purged: Iterable[tuple[bytes, int]]) -> None:
        """Compaction dropped these tombstones."""
        if self._index is not None:
            for key, seqno in purged:
                if newest_seqno(self._index.get(key, 0)) == seqno:
                    del self._index[key]

    def collection_high_seqno(self, collections: Iterable[int]) -> int:
        wanted = set(collections)
        if not self._events.known and 0 in wanted:
            return self.high_seqno
        if self._events.highs is None:
            self._events.count_highs(self.load_index())
            self._look_who_listens()
        return self._events.high_seqno(wanted)

    # Streams.

    def snapshot_after(
        self, after_seqno: int, *, memory: bool = True, history: bool = False
    ) -> VBucketSnapshot | None:
        history = history and self._bucket.settings.keeps_history
        if not memory:
            return self._persisted_snapshot(after_seqno, history=history)
        if after_seqno >= self.high_seqno:
            return None
        first = self._old[0] if self._old else self._tail
        sealed = self.sealed_seqno
        if after_seqno + 1 >= first.first or after_seqno >= sealed:
            checkpoint_id, start, checkpoint_end = self._checkpoints.containing(after_seqno + 1)
            end = self.high_seqno if checkpoint_end is None else self._received.around(checkpoint_end).end
            folded = self._received.folded_up_to(self.high_seqno)
            if history and after_seqno < folded:
                # Versions are missing up to there, so it is a snapshot as for everybody; history follows it.
                history, end = False, min(end, folded)
            return self._memory_snapshot(
                after_seqno,
                end,
                checkpoint=start == after_seqno,
                checkpoint_id=checkpoint_id,
                history=history,
            )
        return self._disk_and_memory_snapshot(
            after_seqno, sealed, self._received.around(sealed).end, history=history
        )

    def _memory_snapshot(
        self,
        after: int,
        end: int,
        *,
        checkpoint: bool = False,
        checkpoint_id: int = 0,
        history: bool = False,
    ) -> MemorySnapshot | None:
        frames: list[bytes] = []
        notes: list[int] = []
        seqnos: list[int] = []
        for tail in self.tails():
            start, stop = tail.after(after), tail.after(end)
            if start < stop:
                frames += tail.frames(start, stop)
                notes += tail.notes(start, stop)
                seqnos += tail.numbers(start, stop)
        if not frames:
            return None
        # The last change up to `end`: a replica's checkpoint may end in a gap.
        last = seqnos[-1]
        only = self.deduplicated if history else None
        kept, traits = fold(frames, seqnos, notes, self._events.drops_up_to(last), only)
        return MemorySnapshot(
            after + 1,
            last,
            kept,
            traits,
            checkpoint=checkpoint,
            checkpoint_id=checkpoint_id,
            history_start=after + 1 if history else 0,
        )

    def _persisted_snapshot(self, after: int, *, history: bool) -> VBucketSnapshot | None:
        """Everything on disk: the segments, and what the logs hold of the changes in memory."""
        if after >= self.persisted_seqno:
            return None
        end = self._received.around(self.persisted_seqno).end
        sealed = self.sealed_seqno
        if after >= sealed:
            # Not None only if there is a change: a replica that was rolled back may end in a gap.
            history = history and after >= self._received.folded_up_to(self.high_seqno)
            snapshot = self._memory_snapshot(after, end, history=history)
            if snapshot is not None:
                snapshot.in_memory = False
                snapshot.checkpoint = True
            return snapshot
        return self._disk_and_memory_snapshot(after, sealed, end, history=history)

    def _disk_and_memory_snapshot(
        self, after: int, sealed: int, end: int, *, history: bool
    ) -> VBucketSnapshot:
        """The segments, and then the changes in memory up to a seqno."""
        history_start = max(self.history_start, after + 1) if history else 0
        # Versions that are missing in memory: then there is no part with all of them.
        history = 0 < history_start <= sealed + 1
        rest = self._memory_snapshot(sealed, end, history=history) if end > sealed else None
        last = sealed if rest is None else rest.end
        dead = superseded(self.pieces, after)
        if rest is not None:
            notes: list[int] = []
            for tail in self.tails():
                notes += tail.notes(tail.after(sealed), tail.after(last))
            olds = np.array(notes, np.uint64) >> np.uint64(NOTE_SHIFT)
            later = olds[(olds > after) & (olds <= sealed)]
            if len(later):
                dead = np.union1d(dead, later)
        drops = self._events.drops_up_to(last)
        if not history:
            return DiskSnapshot(after, last, self.pieces, dead, drops, rest=rest)
        return DiskSnapshot(
            after,
            last,
            self.pieces,
            superseded(self.pieces, after, history_start),
            drops,
            rest=rest,
            history_start=history_start,
            dead_where_deduplicated=dead,
            deduplicated=self.deduplicated,
        )

    def on_append(self, callback: Callable[[], None] | None) -> None:
        self._listeners.on_append = callback
        self._look_who_listens()

    def on_change(self, callback: Callable[[], None] | None) -> None:
        self._listeners.on_change = callback

    def changed(self) -> None:
        """Something other than a new change happened that streams must know."""
        if self._listeners.on_change is not None:
            self._listeners.on_change()

    def close_checkpoint(self) -> int:
        return self._close_checkpoint(self.high_seqno)

    def _close_checkpoint(self, seqno: int) -> int:
        if self._checkpoints.close(seqno):
            self._bucket.queue_meta(self)
            self._look_who_listens()
        return self._checkpoints.open_id

    def checkpoint_start(self, checkpoint_id: int) -> int | None:
        start = self._checkpoints.start_of(checkpoint_id)
        first = self._old[0].first if self._old else self._tail.first
        return start if start is not None and start + 1 >= first else None

    # Durability.

    def when_persisted(
        self, seqno: int, callback: Callable[[bool], None], is_over: Callable[[], bool] | None = None
    ) -> None:
        if seqno <= self.persisted_seqno:
            callback(True)
        else:
            self._listeners.await_persisted(seqno, callback, is_over)
            self._bucket.waiting[self] = None

    def tell_waiters(self) -> bool:
        """A flush has ended; return whether somebody still waits."""
        return self._listeners.persisted(self.persisted_seqno)

    def give_up_waiters(self, after: int = 0) -> None:
        """Tell those who wait that it will never come."""
        self._listeners.give_up(after)

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

    def tails(self) -> tuple[Tail, ...]:
        """Its changes in memory, oldest first."""
        return *self._old, self._tail

    def forget_tail(self, generation: Generation) -> None:
        """A generation is sealed and leaves memory."""
        if self._old and self._old[0].generation is generation:
            del self._old[0]
            first = self._old[0].first if self._old else self._tail.first
            self._checkpoints.forget_before(first - 1)

    def drop_after(self, seqno: int) -> None:
        """The part of a rollback that happens in memory; segments are clipped by the bucket.

        Nothing is changed in place except who listens: `restore` must find everything as it was.
        """
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
        self._received = self._received.up_to(seqno)
        self._events = self._events.up_to(seqno)
        self.forgotten = replace(self.forgotten) if seqno else Forgotten()
        self._index = None
        self._locks = Locks(self._bucket.clock)
        self._bucket.cache.clear()
        self._items = None if seqno else 0
        self._next_expiry = 0
        self._checkpoints = self._checkpoints.following(seqno)
        self._look_who_listens()
        self._pieces = -1, ()

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
        """For a batch of the log: what may differ without a new change. With `whole`, for the manifest: all
        that can't be computed again.
        """
        meta: dict[str, Any] = {
            "state": self.state,
            "failover_log": self.failover_log.to_json(),
            **self._received.to_json(),
            "checkpoint": self._checkpoints.open_id,
            "purge_seqno": self.forgotten.purge_seqno,
        }
        if self.extra is not None:
            meta["extra"] = self.extra
        if whole:
            meta["high_seqno"] = self.high_seqno
            meta["rollback_floor"] = self.forgotten.rollback_floor
            meta["history_floor"] = self.forgotten.history_floor
            meta["rev_floor"] = self.forgotten.rev_floor
            meta["deleted_rev"] = self.forgotten.deleted_rev
            meta["items"] = self._items
            meta["events"] = self._events.known
            meta["next_expiry"] = self._next_expiry
        return meta

    def logged(self, meta: dict[str, Any]) -> None:
        """What `to_json` gave is on disk."""
        self._received.on_disk = ReceivedRange(*meta["received"])

    def take_json(self, meta: dict[str, Any]) -> None:
        """The reverse of `to_json`."""
        self.state = meta["state"]
        self.failover_log = FailoverLog.from_json(meta["failover_log"])
        self._received.take_json(meta)
        self.extra = meta.get("extra")
        self.forgotten.purge_seqno = max(self.forgotten.purge_seqno, meta.get("purge_seqno", 0))
        start = self._checkpoints.open_start
        if "high_seqno" in meta:
            self.high_seqno = self.persisted_seqno = start = meta["high_seqno"]
            self.forgotten.take_json(meta)
            self._items = meta["items"]
            self._events = CollectionEvents(map(KnownEvent.of_json, meta["events"]))
            self._next_expiry = meta["next_expiry"]
            self._tail = Tail(self.high_seqno + 1)
        self._checkpoints = self._checkpoints.numbered(meta["checkpoint"], start)
        self._look_who_listens()

    def replay(self, frames: Sequence[bytes], notes: Sequence[int]) -> None:
        """Changes that a log holds."""
        tail = self._tail
        for frame, note in zip(frames, notes, strict=True):
            seqno = seqno_of(frame)
            tail.expect(seqno)
            if tail.seqnos is not None:
                tail.seqnos.append(seqno)
            tail.items += (frame, note)
            if note & _MEANINGFUL:
                self._note(frame, seqno, note & NOTE_TRAITS)
            self._count(note)
        self._queue.memory_bytes += sum(map(len, frames))
        self.high_seqno = self.persisted_seqno = seqno_of(frames[-1])

    def recovered(self) -> None:
        """All logs are read: what comes next is in a checkpoint of its own."""
        first = self._old[0].first if self._old else self._tail.first
        self._checkpoints = self._checkpoints.following(first - 1)
        self._look_who_listens()
