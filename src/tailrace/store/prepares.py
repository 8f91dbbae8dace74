"""Durable writes in a vbucket: prepares, commits and aborts.

A durable write is first *prepared*: a change with a seqno of its own, which streams to copies that ask for it
and which nobody reads. Then it is either *committed*, which makes a plain change of the document with the
next seqno, or *aborted*. An undecided prepare keeps other writes from its key (`locks`). Only what decides it
supersedes it, so no compaction drops it before.

The decisions are made in `server.durability`. Why prepares are stored like this:
docs/decisions/0022-prepares-are-changes.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DocumentRefused
from ..frames import OPCODE_AT
from ..wire.codes import DcpOpcode, DurabilityLevel, Status
from .base import Written
from .dropped_collections import DroppedCollections
from .format import (
    NOTE_SHIFT,
    PREPARE,
    PREPARE_EXTRAS,
    REQUEST,
    SYSTEM,
    UNSEEN,
    StoredDocument,
    StoredPrepare,
    aborted,
    cas_of,
    collection_of,
    committed,
    frame_key,
    rev_of,
    seqno_of,
    traits_of,
)
from .index import entry_of, newest_seqno
from .snapshot import superseded
from .vbucket_history import History, Unseen

__all__ = ["PreparingHistory"]

_MAX_UNDECIDED = 10_000
"""Per vbucket. Each has a client that waits for it, or did."""

_PREPARE = int(DcpOpcode.PREPARE)


class PreparingHistory(History):
    """A vbucket's history, with durable writes."""

    __slots__ = ()

    # What there is.

    @property
    def undecided(self) -> list[StoredPrepare]:
        return self._locks.prepares if self._locks else []

    def prepared_up_to(self, in_memory: int, on_disk: int) -> int:
        reached = 0
        for prepare in self.undecided:
            if prepare.seqno > (
                on_disk if prepare.level == DurabilityLevel.PERSIST_TO_MAJORITY else in_memory
            ):
                break
            reached = prepare.seqno
        return reached

    @property
    def visible_seqno(self) -> int:
        visible, last = self._unseen
        return visible if last == self.high_seqno else self.high_seqno

    @property
    def has_unseen(self) -> bool:
        return self._unseen.last > 0

    # Making them.

    def begin_durable(self, level: int) -> None:
        self._locks.begin_durable(level)

    def end_durable(self) -> None:
        self._locks.end_durable()

    def _prepare(  # noqa: PLR0917
        self,
        key: bytes,
        value: bytes,
        flags: int,
        expiry: int,
        datatype: int,
        rev: int,
        cas: int,
        *,
        deleted: bool = False,
    ) -> Written:
        """A new version of a document, or its end, that is only prepared."""
        queue, level = self._queue, self._locks.level
        if queue.memory_bytes > queue.memory_limit:
            raise queue.full()
        if len(self._locks) > _MAX_UNDECIDED:
            raise DocumentRefused(Status.ETMPFAIL, "too many durable writes are undecided")
        newest = newest_seqno(self.load_index().get(key, 0))
        if newest > self._checkpoints.open_start and any(newest in tail.decisions for tail in self.tails()):
            # The key's last commit must not be folded away, so this prepare goes into another snapshot.
            self.close_checkpoint()
        seqno = self.high_seqno + 1
        body = PREPARE_EXTRAS + len(key) + len(value)
        start = REQUEST, _PREPARE, len(key), PREPARE_EXTRAS, datatype, self.id, body, 0, cas
        head = PREPARE.pack(*start, seqno, rev, flags, expiry, 0, 0, deleted, level)
        self._append(head + key + value, seqno, SYSTEM)
        return Written(cas, seqno)

    # Deciding them.

    def commit(self, prepared_seqno: int) -> Written | None:
        prepare = self._undecided_at(prepared_seqno)
        if prepare is None:
            return None
        seqno = self.high_seqno + 1
        frame = self._committed(prepare, seqno)
        index = self._index if self._index is not None else self._load()
        self._decide(prepare.key, seqno)
        traits = traits_of(frame)
        entry = entry_of(frame, seqno, traits)
        self._append(frame, seqno, traits, index.get(prepare.key, 0), prepare.key, entry)
        self._bucket.cache.pop(prepare.key, None)
        return Written(cas_of(frame), seqno)

    def abort(self, prepared_seqno: int) -> bool:
        prepare = self._undecided_at(prepared_seqno)
        if prepare is None:
            return False
        clock, seqno = self._queue.clock, self.high_seqno + 1
        frame = aborted(self.id, prepare.key, seqno, prepared_seqno, clock.now_s(), clock.next())
        self._append(frame, seqno, SYSTEM, prepared_seqno << NOTE_SHIFT)
        return True

    def _undecided_at(self, prepared_seqno: int) -> StoredPrepare | None:
        return self._locks.prepare_at(prepared_seqno)

    def _committed(self, prepare: StoredPrepare, seqno: int) -> bytes:
        frame = self.frame_at(prepare.seqno)
        if frame is None:
            raise self._bucket.corrupt(f"the prepare {prepare.seqno} of vbucket {self.id} is missing")
        return committed(frame, seqno)

    def _decide(self, key: bytes, seqno: int) -> None:
        """The next change of this key, with this seqno, decides its prepare if there is one."""
        prepare = self._locks.prepare(key)
        if prepare is not None:
            self._tail.decisions[seqno] = prepare.seqno
            self._locks.decided(prepare)

    def doubt_prepares(self) -> None:
        """Another active may have committed what is undecided here."""
        self._locks.doubtful.update(prepare.key for prepare in self.undecided)

    # Receiving them.

    def _receive_unseen(self, frame: bytes, seqno: int) -> None:
        key = frame_key(frame)
        before = self._locks.prepare(key)
        if frame[OPCODE_AT] != _PREPARE:
            # from disk, an abort may come without its prepare
            time_s, cas = StoredDocument.of(frame).expiry, self._queue.clock.next()
            frame = aborted(self.id, key, seqno, rev_of(frame), time_s, cas)
        self._append(frame, seqno, SYSTEM, 0 if before is None else before.seqno << NOTE_SHIFT)

    def commit_for(self, key: bytes, prepared_seqno: int, seqno: int) -> bytes:
        prepare = self._locks.prepare(key)
        if prepare is None or prepare.seqno != prepared_seqno:
            raise DocumentRefused(Status.KEY_ENOENT, f"no prepare {prepared_seqno} of this key")
        return self._committed(prepare, seqno)

    # What a change means, and what is left of it.

    def _note(self, frame: bytes, seqno: int, traits: int) -> None:
        if not traits & SYSTEM or frame[OPCODE_AT] not in UNSEEN:
            super()._note(frame, seqno, traits)
            if traits & SYSTEM and self._locks:
                self._forget_dropped()
            return
        self._unseen = Unseen(self.visible_seqno, seqno)
        before = self._locks.prepare(frame_key(frame))
        if before is not None:
            self._locks.decided(before)
        if frame[OPCODE_AT] == _PREPARE:
            self._locks.add_prepare(StoredPrepare.of(frame))

    def _forget_dropped(self) -> None:
        """Forget prepares whose collection was dropped."""
        dropped = {collection: seqno for seqno, collection in self.drops}
        for prepare in self.undecided:
            if prepare.seqno < dropped.get(collection_of(prepare.key), 0):
                self._locks.decided(prepare)

    def replay(self, frames: Sequence[bytes], notes: Sequence[int]) -> None:
        if not self._locks and not any(note & SYSTEM for note in notes):
            super().replay(frames, notes)
            return
        for frame, note in zip(frames, notes, strict=True):
            if self._locks and not note & SYSTEM:
                self._decide(frame_key(frame), seqno_of(frame))
            super().replay([frame], [note])

    def drop_after(self, seqno: int) -> None:
        super().drop_after(seqno)
        if self.has_unseen:
            self._find_unseen()

    def _find_unseen(self) -> None:
        """Work out from the changes which prepares are undecided, and the last change that is visible."""
        frames: dict[int, bytes] = {}
        decided: set[int] = set()
        last_seen = last_unseen = 0
        for piece in self.pieces:
            if piece.traits & SYSTEM:
                for block in piece.blocks():
                    opcodes = block.data[block.offsets + OPCODE_AT]
                    for place, opcode in enumerate(opcodes.tolist()):
                        number = int(block.seqnos[place])
                        if opcode not in UNSEEN:
                            last_seen = number
                            continue
                        last_unseen = number
                        if opcode == _PREPARE:
                            start = int(block.offsets[place])
                            stop = start + int(block.lengths[place])
                            frames[number] = block.data[start:stop].tobytes()
            else:
                last_seen = max(last_seen, piece.last)
        decided.update(superseded(self.pieces).tolist())
        sealed = self.sealed_seqno
        for tail in self.tails():
            for place in range(tail.after(sealed), len(tail)):
                frame, note = tail.items[2 * place : 2 * place + 2]
                decided.add(note >> NOTE_SHIFT)
                number = seqno_of(frame)
                if frame[OPCODE_AT] not in UNSEEN:
                    last_seen = number
                    continue
                last_unseen = number
                if frame[OPCODE_AT] == _PREPARE:
                    frames[number] = frame
            decided.update(tail.decisions.values())
        self._unseen = Unseen(last_seen, last_unseen)
        dropped = DroppedCollections(self.drops, self.high_seqno)
        for number, frame in sorted(frames.items()):
            if number not in decided and not dropped.hides(frame, number, SYSTEM):
                self._locks.add_prepare(StoredPrepare.of(frame))

    def to_json(self, *, whole: bool) -> dict[str, Any]:
        meta = super().to_json(whole=whole)
        if whole and self.has_unseen:
            meta["unseen"] = list(self._unseen)
            meta["prepares"] = [prepare.seqno for prepare in self.undecided]
        return meta

    def take_json(self, meta: dict[str, Any]) -> None:
        super().take_json(meta)
        if "unseen" in meta:
            self._unseen = Unseen(*meta["unseen"])
            for number in meta["prepares"]:
                frame = self.frame_at(number)
                if frame is not None:  # otherwise it is an accepted loss
                    self._locks.add_prepare(StoredPrepare.of(frame))
