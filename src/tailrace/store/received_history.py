"""What a vbucket takes from elsewhere: a replica's snapshots from its active, and the system events that lead
to the bucket's manifest of collections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import DocumentRefused
from ..frames import OPCODE_AT
from ..history import FailoverLog
from ..model import MAX_CAS, MAX_REPLICA_REV, MAX_REV, MAX_SEQNO
from ..wire.codes import DcpOpcode, Status
from .base import ReceivedRange
from .format import (
    EVENT_EXTRAS,
    NOTE_SHIFT,
    REQUEST,
    SYSTEM,
    SYSTEM_EVENT,
    UNSEEN,
    cas_of,
    index_key,
    rev_of,
    seqno_of,
    system_event,
    traits_of,
)
from .index import entry_of
from .prepares import PreparingHistory

if TYPE_CHECKING:
    from .collections import Manifest

__all__ = ["ReceivedHistory"]


def check_metadata(rev: int, cas: int, max_rev: int = MAX_REV) -> None:
    """`DocumentRefused` for numbers from elsewhere that are so high that no later version could follow."""
    if rev > max_rev:
        raise DocumentRefused(Status.EINVAL, f"rev {rev} is too high")
    if cas > MAX_CAS:
        raise DocumentRefused(Status.EINVAL, f"CAS {cas} is too high")


def _check_numbers(frame: bytes, traits: int) -> None:
    """`DocumentRefused` for what no active can have made. A prepare's numbers become those of a document."""
    rev = rev_of(frame)
    if frame[OPCODE_AT] == DcpOpcode.ABORT:
        if rev > MAX_SEQNO:
            raise DocumentRefused(Status.ERANGE, f"an abort of the prepare {rev}: too high a seqno")
    elif frame[OPCODE_AT] == DcpOpcode.PREPARE or not traits & SYSTEM:
        check_metadata(rev, cas_of(frame), MAX_REPLICA_REV)
    else:
        check_metadata(0, cas_of(frame))


class ReceivedHistory(PreparingHistory):
    """A vbucket's history, as far as others decide its contents."""

    __slots__ = ()

    # Collections.

    def apply_manifest(self, manifest: Manifest, previous: Manifest | None = None) -> None:
        """Append the system events that lead from the collections that this vbucket knows to the
        manifest's.
        """
        keeps_history = self._bucket.settings.keeps_history
        events = list(manifest.events_from(self._events.known, previous, keeps_history=keeps_history))
        for event, version, name, value in events:
            self._append_event(event, version, name, value)

    def _append_event(self, event: int, version: int, name: bytes, value: bytes) -> None:
        seqno = self.high_seqno + 1
        frame = (
            SYSTEM_EVENT.pack(
                REQUEST,
                DcpOpcode.SYSTEM_EVENT,
                len(name),
                EVENT_EXTRAS,
                0,
                self.id,
                EVENT_EXTRAS + len(name) + len(value),
                0,
                self._bucket.clock.next(),
                seqno,
                event,
                version,
            )
            + name
            + value
        )
        self._append_system(frame, seqno)

    def _append_system(self, frame: bytes, seqno: int) -> None:
        event, subject = system_event(frame)
        replaced = self._events.last_of(event, subject) << NOTE_SHIFT
        self._append(frame, seqno, SYSTEM, replaced, index_key(frame), entry_of(frame, seqno, SYSTEM))

    # A replica's side.

    @property
    def persisted_snapshot(self) -> ReceivedRange:
        on_disk, persisted = self._received.on_disk, self.persisted_seqno
        is_inside = on_disk.start < persisted < on_disk.end
        return on_disk if is_inside else ReceivedRange(persisted, persisted)

    def begin_snapshot(self, start: int, end: int, purge_seqno: int = 0, *, history: bool = False) -> None:
        if start > end:
            raise DocumentRefused(Status.EINVAL, f"a snapshot from {start} to {end}")
        if end > MAX_SEQNO or purge_seqno > MAX_SEQNO:
            raise DocumentRefused(
                Status.ERANGE, f"a snapshot up to {max(end, purge_seqno)}: too high a seqno"
            )
        if start < self.high_seqno and end <= self.high_seqno:
            raise DocumentRefused(
                Status.ERANGE, f"a snapshot from {start} to {end} when {self.high_seqno} is here"
            )
        # Until it is complete, the vbucket can only be trusted up to what it has now.
        self._received.begin(self.complete_seqno, self.high_seqno, end, purge_seqno, history=history)
        self._bucket.queue_meta(self)

    def receive(self, frame: bytes) -> None:
        seqno = seqno_of(frame)
        if not self.high_seqno < seqno <= self.received.end:
            raise DocumentRefused(
                Status.ERANGE,
                f"seqno {seqno} after {self.high_seqno}, in a snapshot up to {self.received.end}",
            )
        traits = traits_of(frame)
        _check_numbers(frame, traits)
        self._take_purge()
        if seqno != self.high_seqno + 1:
            self._received.has_gaps = True
        self._tail.expect(seqno)
        self._bucket.clock.observe(cas_of(frame))
        if frame[OPCODE_AT] in UNSEEN:
            self._receive_unseen(frame, seqno)
        elif traits & SYSTEM:
            self._append_system(frame, seqno)
        else:
            index = self._index if self._index is not None else self._load()
            key = index_key(frame)
            if self._locks:
                self._decide(key, seqno)
            self._append(frame, seqno, traits, index.get(key, 0), key, entry_of(frame, seqno, traits))
            self._bucket.cache.pop(key, None)
        if seqno == self._received.newest.end:
            self._received.note_folded(self._needed_seqno())
        self._bucket.queue_meta(self)

    def end_snapshot(self) -> None:
        self._take_purge()
        self._received.end(self.complete_seqno, self.high_seqno, self._needed_seqno())
        self._bucket.queue_meta(self)

    def drop_snapshot(self) -> None:
        self._received.announced_purge = 0
        self.end_snapshot()

    def _take_purge(self) -> None:
        """Some of the snapshot is here, so what was purged before it is missing here, too."""
        self.forgotten.purge_seqno = max(self.forgotten.purge_seqno, self._received.announced_purge)

    def _needed_seqno(self) -> int:
        """Nobody asks for a state before this."""
        return min(self.forgotten.history_floor, self.sealed_seqno)

    def set_failover_log(self, log: FailoverLog) -> None:
        self.failover_log = log
        self._bucket.queue_meta(self)
