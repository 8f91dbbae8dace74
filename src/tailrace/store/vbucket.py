"""Documents in a vbucket: what each key-value command does, with CAS, locks, expiry and conflict resolution.

Every new version of a document is made in `put`, every tombstone in `_bury`, and all are added by `_append`.
Refusals are `DocumentRefused` with the status that the protocol has for them.
"""

from __future__ import annotations

import random

import numpy as np

from ..errors import DocumentRefused
from ..large_bytes import LARGE_BYTES, put_before
from ..model import MAX_REPLICA_REV, MAX_REV
from ..wire.codes import Datatype, DcpOpcode, Status, VBucketState
from .base import Written
from .format import (
    COLLECTION,
    DATATYPE_TRAITS,
    DELETED,
    DELETION,
    DELETION_EXTRAS,
    EXPIRATION,
    EXPIRATION_EXTRAS,
    EXPIRED,
    EXPIRES,
    EXPIRY_BYTES,
    MUTATION,
    MUTATION_EXTRAS,
    MUTATION_START,
    NO_EXPIRY,
    NOTE_SHIFT,
    REQUEST,
    StoredDocument,
    cas_of,
    collection_of,
    counted,
    expiries_at,
    expiry_of,
    frame_key,
    seqno_of,
)
from .index import EXISTS, REV_SHIFT, make_entry, newest_seqno
from .received_history import ReceivedHistory, check_metadata

__all__ = ["EngineVBucket"]

_DELETION = int(DcpOpcode.DELETION)
_EXPIRATION = int(DcpOpcode.EXPIRATION)
_pack_mutation = MUTATION.pack
_new_tuple = tuple.__new__  # half the time of Written(...)
_XATTR_ROOM = 1 << 20


class EngineVBucket(ReceivedHistory):
    """A vbucket with its documents."""

    __slots__ = ()

    # Reading.

    def get(self, key: bytes) -> bytes | None:
        index = self._index if self._index is not None else self._load()
        entry = index.get(key, 0)
        if self._locks:
            self._locks.check_readable(key)
        if not entry & EXISTS:
            return None
        frame = self._newest(entry)
        if frame[EXPIRY_BYTES] != b"\0\0\0\0" and self._has_expired(frame):
            if self.state == VBucketState.ACTIVE:
                self._expire(key, frame, entry)
            return None
        return frame

    def get_any(self, key: bytes) -> bytes | None:
        index = self._index if self._index is not None else self._load()
        entry = index.get(key, 0)
        return self._newest(entry) if entry else None

    def live_keys(self, collection: int = 0) -> list[tuple[bytes, int]]:
        index = self._index if self._index is not None else self._load()
        return [
            (key, newest_seqno(entry))
            for key, entry in index.items()
            if entry & EXISTS and collection_of(key) == collection
        ]

    def random_key(self, collection: int = 0) -> bytes | None:
        keys = [key for key, _ in self.live_keys(collection)]
        rng: random.Random = self._bucket.rng
        while keys:
            frame = self.get(keys.pop(rng.randrange(len(keys))))
            if frame is not None:
                return frame
        return None

    def _newest(self, entry: int) -> bytes:
        seqno = newest_seqno(entry)
        frame = self.frame_at(seqno)
        if frame is None:
            raise self._bucket.corrupt(f"seqno {seqno} of vbucket {self.id} is missing")
        return frame

    def _has_expired(self, frame: bytes) -> bool:
        return expiry_of(frame) <= self._queue.clock.now_s()

    # Writing.

    def set(  # noqa: PLR0917
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0, cas: int = 0
    ) -> Written:
        written = _new_tuple(Written, self.put(key, value, flags, datatype, cas, expiry))
        self._bucket.cache.pop(key, None)
        return written

    def put(  # noqa: PLR0917
        self,
        key: bytes,
        value: bytes,
        flags: int,
        datatype: int,
        cas: int,
        expiry: int = 0,
        rev: int | None = None,
        new_cas: int = 0,
    ) -> tuple[int, int]:
        locks = self._locks
        if cas or locks:
            self._check_cas(key, cas)
        queue, index = self._queue, self._index
        size, key_length = len(value), len(key)
        if size > queue.max_value:
            self._check_size(size, datatype)
        if queue.memory_bytes > queue.memory_limit:
            raise queue.full()
        if index is None:
            index = self._load()
        old = index.get(key, 0)
        if rev is None:
            rev = (old >> REV_SHIFT if old else self.forgotten.rev_floor) + 1
            new_cas = queue.clock.next()
        if locks and locks.level:
            return self._prepare(key, value, flags, expiry, datatype, rev, new_cas)
        seqno = self.high_seqno + 1
        head = _pack_mutation(
            MUTATION_START,
            key_length,
            MUTATION_EXTRAS,
            datatype,
            self.id,
            MUTATION_EXTRAS + key_length + size,
            new_cas,
            seqno,
            rev,
            flags,
            expiry,
        )
        frame = head + key + value if size < LARGE_BYTES else put_before(head + key, value)
        traits = self._traits(key, expiry, datatype) if expiry or datatype or key[0] else 0
        self._append(frame, seqno, traits, old, key, rev << REV_SHIFT | seqno << NOTE_SHIFT | EXISTS)
        return new_cas, seqno

    def add(self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0) -> Written:
        if self.get(key) is not None:
            raise DocumentRefused(Status.KEY_EEXISTS)
        return self.set(key, value, flags, expiry, datatype)

    def replace(  # noqa: PLR0917
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0, cas: int = 0
    ) -> Written:
        self._existing(key, cas)
        return self.set(key, value, flags, expiry, datatype)

    def counter(self, key: bytes, delta: int, initial: int | None, expiry: int = 0) -> tuple[int, Written]:
        self._check_cas(key, 0)
        frame = self.get(key)
        if frame is None:
            if initial is None:
                raise DocumentRefused(Status.KEY_ENOENT)
            text = b"%d" % initial
            return initial, self.set(key, text, 0, expiry, Datatype.JSON)
        document = StoredDocument.of(frame)
        number = counted(document.value, delta)
        text = b"%d" % number
        written = self.set(key, text, document.flags, document.expiry, document.datatype)
        return number, written

    def touch(self, key: bytes, expiry: int) -> tuple[bytes, Written]:
        self._check_cas(key, 0)
        frame = self.get(key)
        if frame is None:
            raise DocumentRefused(Status.KEY_ENOENT)
        old = StoredDocument.of(frame)
        if old.expiry == expiry:
            return frame, Written(old.cas, old.seqno)
        written = self.set(key, old.value, old.flags, expiry, old.datatype)
        return self._tail.items[-2], written

    def delete(self, key: bytes, cas: int = 0) -> Written:
        frame = self._existing(key, cas)
        value, datatype = self._tombstone_value(frame)
        rev, clock = (self._entry(key) >> REV_SHIFT) + 1, self._queue.clock
        return self._end(key, _DELETION, value, datatype, rev, clock.next(), clock.now_s())

    def _end(  # noqa: PLR0917
        self, key: bytes, opcode: int, value: bytes, datatype: int, rev: int, cas: int, delete_time: int
    ) -> Written:
        """The end of a document, or its preparation."""
        if self._locks.level:
            return self._prepare(key, value, 0, delete_time, datatype, rev, cas, deleted=True)
        return self._bury(key, opcode, value, datatype, rev, cas, delete_time)

    def _bury(  # noqa: PLR0917
        self, key: bytes, opcode: int, value: bytes, datatype: int, rev: int, cas: int, delete_time: int
    ) -> Written:
        """A tombstone."""
        if self._queue.memory_bytes > self._queue.memory_limit:
            raise self._queue.full()
        seqno = self.high_seqno + 1
        entry = self._entry(key)
        layout, extras = (
            (DELETION, DELETION_EXTRAS) if opcode == _DELETION else (EXPIRATION, EXPIRATION_EXTRAS)
        )
        fields = (seqno, rev, delete_time, 0) if opcode == _DELETION else (seqno, rev, delete_time)
        body = extras + len(key) + len(value)
        head = layout.pack(REQUEST, opcode, len(key), extras, datatype, self.id, body, 0, cas, *fields)
        traits = DATATYPE_TRAITS[datatype] | (DELETED if opcode == _DELETION else EXPIRED)
        if key[0]:
            traits |= COLLECTION
        self._locks.pop(key, None)
        self._append(head + key + value, seqno, traits, entry, key, make_entry(seqno, exists=False, rev=rev))
        self._bucket.cache.pop(key, None)
        return Written(cas, seqno)

    def _traits(self, key: bytes, expiry: int, datatype: int) -> int:
        """What is unusual about a mutation."""
        traits = DATATYPE_TRAITS[datatype]
        if expiry:
            traits |= EXPIRES
        return traits | COLLECTION if key[0] else traits

    def _tombstone_value(self, frame: bytes) -> tuple[bytes, int]:
        document = StoredDocument.of(frame)
        if not document.datatype & Datatype.XATTR:
            return b"", 0
        return self._bucket.settings.tombstone_value(document.value, document.datatype)

    def _entry(self, key: bytes) -> int:
        index = self._index if self._index is not None else self._load()
        return index.get(key, 0)

    def _check_size(self, size: int, datatype: int) -> None:
        room = _XATTR_ROOM if datatype & Datatype.XATTR else 0
        if size > self._queue.max_value + room:
            raise DocumentRefused(
                Status.E2BIG,
                f"a value of {size} bytes: the limit is {self._queue.max_value} (setting max_value)",
            )

    def _existing(self, key: bytes, cas: int) -> bytes:
        """The live document, if the CAS fits and no lock is in the way."""
        if cas or self._locks:
            self._check_cas(key, cas)
        frame = self.get(key)
        if frame is None:
            raise DocumentRefused(Status.KEY_ENOENT)
        return frame

    def _check_cas(self, key: bytes, cas: int) -> None:
        """Refuse if the document has another CAS or is locked; the CAS of the lock opens it."""
        if self._locks.open(key, cas):
            return
        if cas:
            frame = self.get(key)
            if frame is None:
                raise DocumentRefused(Status.KEY_ENOENT)
            if cas_of(frame) != cas:
                raise DocumentRefused(Status.KEY_EEXISTS)

    # Locks.

    def get_locked(self, key: bytes, seconds: float) -> tuple[bytes, int]:
        frame = self.get(key)
        if frame is None:
            raise DocumentRefused(Status.KEY_ENOENT)
        return frame, self._locks.lock(key, seconds)

    def unlock(self, key: bytes, cas: int) -> None:
        if self.get(key) is None:
            raise DocumentRefused(Status.KEY_ENOENT)
        self._locks.unlock(key, cas)

    def is_locked(self, key: bytes) -> bool:
        return self._locks.is_locked(key)

    # With metadata that was made elsewhere.

    def set_with_meta(  # noqa: PLR0917
        self,
        key: bytes,
        value: bytes,
        flags: int,
        expiry: int,
        rev: int,
        meta_cas: int,
        datatype: int = 0,
        *,
        cas: int = 0,
        add: bool = False,
        resolve: bool = True,
        regenerate_cas: bool = False,
    ) -> Written:
        check_metadata(rev, 0 if regenerate_cas else meta_cas, self._max_rev)
        if cas or self._locks:
            self._check_cas(key, cas)
        if add and self.get(key) is not None:
            raise DocumentRefused(Status.KEY_EEXISTS)
        if resolve:
            self._resolve(key, rev, meta_cas, expiry, flags, datatype, deleted=False)
        new_cas = self._meta_cas(meta_cas, regenerate=regenerate_cas)
        written = Written._make(self.put(key, value, flags, datatype, 0, expiry, rev, new_cas))
        self._bucket.cache.pop(key, None)
        return written

    def delete_with_meta(  # noqa: PLR0917
        self,
        key: bytes,
        flags: int,
        delete_time: int,
        rev: int,
        meta_cas: int,
        value: bytes = b"",
        datatype: int = 0,
        *,
        cas: int = 0,
        resolve: bool = True,
        regenerate_cas: bool = False,
        expiration: bool = False,
    ) -> Written:
        check_metadata(rev, 0 if regenerate_cas else meta_cas, self._max_rev)
        if cas or self._locks:
            self._check_cas(key, cas)
        if resolve:
            self._resolve(key, rev, meta_cas, delete_time, flags, datatype, deleted=True)
        if len(value) > self._queue.max_value:
            self._check_size(len(value), datatype)
        new_cas = self._meta_cas(meta_cas, regenerate=regenerate_cas)
        opcode = _EXPIRATION if expiration else _DELETION
        time_s = delete_time or self._queue.clock.now_s()
        return self._end(key, opcode, value, datatype, rev, new_cas, time_s)

    @property
    def _max_rev(self) -> int:
        """Versions count on from the highest rev that a client may give; a TAP replica takes those."""
        return MAX_REV if self.state == VBucketState.ACTIVE else MAX_REPLICA_REV

    def _meta_cas(self, meta_cas: int, *, regenerate: bool) -> int:
        if regenerate or not meta_cas:
            return self._queue.clock.next()
        self._queue.clock.observe(meta_cas)
        return meta_cas

    def _resolve(  # noqa: PLR0917
        self, key: bytes, rev: int, cas: int, expiry: int, flags: int, datatype: int, *, deleted: bool
    ) -> None:
        """Refuse what loses against the stored version (docs/spec/header.md#conflict-resolution)."""
        frame = self.get_any(key)
        if frame is None:
            return
        old = StoredDocument.of(frame)
        if self._bucket.settings.last_write_wins:
            new_key, old_key = (cas, rev), (old.cas, old.rev)
        else:
            new_key, old_key = (rev, cas), (old.rev, old.cas)
        if new_key != old_key:
            wins = new_key > old_key
        elif deleted or old.deleted:
            wins = False
        elif expiry != old.expiry:
            wins = expiry > old.expiry
        elif flags != old.flags:
            wins = flags < old.flags
        else:
            wins = bool(
                self._bucket.settings.last_write_wins
                and datatype & Datatype.XATTR
                and not old.datatype & Datatype.XATTR
            )
        if not wins:
            raise DocumentRefused(Status.KEY_EEXISTS)

    # Expiry.

    def _expire(self, key: bytes, frame: bytes, entry: int) -> None:
        if self._queue.memory_bytes > self._queue.memory_limit:
            return  # a reader is not to blame; the next one tries again
        if self._locks.prepare(key) is not None:
            return  # its fate depends on what is prepared
        self._queue.expirations += 1
        value, datatype = self._tombstone_value(frame)
        time_s = expiry_of(frame)
        rev = (entry >> REV_SHIFT) + 1
        self._bury(key, _EXPIRATION, value, datatype, rev, self._queue.clock.next(), time_s)

    def expire_due(self, limit: int = 1_000) -> int:
        now = self._queue.clock.now_s()
        if self._next_expiry > now or self.state != VBucketState.ACTIVE:
            return 0
        index = self._index if self._index is not None else self._load()
        expired, next_expiry = self._expired_by(now)
        due = []
        for frame, seqno in expired:
            key = frame_key(frame)
            entry = index.get(key, 0)
            if entry & EXISTS and newest_seqno(entry) == seqno:
                due.append((key, frame, entry))
        for key, frame, entry in due[:limit]:
            self._expire(key, frame, entry)
        self._next_expiry = next_expiry if len(due) <= limit else now
        return min(len(due), limit)

    def _expired_by(self, now: int) -> tuple[list[tuple[bytes, int]], int]:
        """Changes whose expiry has come, superseded ones too, and the next expiry after that."""
        expired: list[tuple[bytes, int]] = []
        following = NO_EXPIRY
        for piece in self.pieces:
            if piece.min_expiry == NO_EXPIRY:
                continue
            for frames in piece.blocks():
                places = np.flatnonzero(frames.traits & EXPIRES)
                offsets = frames.offsets[places]
                expiries = expiries_at(frames.data, offsets)
                come = expiries <= now
                following = min([following, *expiries[~come].tolist()])
                for place, offset in zip(places[come].tolist(), offsets[come].tolist(), strict=True):
                    stop = offset + int(frames.lengths[place])
                    expired.append((frames.data[offset:stop].tobytes(), int(frames.seqnos[place])))
        sealed = self.sealed_seqno
        for tail in self.tails():
            for place in range(tail.after(sealed), len(tail)):
                frame, note = tail.items[2 * place : 2 * place + 2]
                if note & EXPIRES:
                    expiry = expiry_of(frame)
                    if expiry <= now:
                        expired.append((frame, seqno_of(frame)))
                    else:
                        following = min(following, expiry)
        return expired, following
