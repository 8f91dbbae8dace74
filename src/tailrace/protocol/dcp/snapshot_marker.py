"""The markers of a producer's stream: what the reader is told about a snapshot, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire.codes import MarkerFlag, OsoFlag
from .controls import ConnectionOptions, Oso
from .stream_messages import StreamMessages
from .stream_request import Accepted

if TYPE_CHECKING:
    from ...store.base import VBucketSnapshot

__all__ = ["SnapshotMarker"]

_MEMORY, _DISK, _CHECKPOINT = int(MarkerFlag.MEMORY), int(MarkerFlag.DISK), int(MarkerFlag.CHECKPOINT)
_DUPLICATES = int(MarkerFlag.MAY_CONTAIN_DUPLICATES)
_EVERY_VERSION = int(MarkerFlag.HISTORY) | _DUPLICATES


class SnapshotMarker:
    """The marker of the snapshot that a stream is in, and what the reader was told to expect."""

    __slots__ = (
        "_accepted",
        "_has_oso_begun",
        "_is_first",
        "_options",
        "_says_history",
        "_start",
        "_without_history",
        "announced_end",
        "end",
        "is_due",
        "is_oso",
    )

    def __init__(self, accepted: Accepted, options: ConnectionOptions) -> None:
        self.announced_end = accepted.start_seqno
        """The seqno up to which the reader has been told to expect changes."""
        self.end = 0
        """The end that the marker gives; 0: it is not known yet."""
        self.is_due = False
        self.is_oso = False
        """The snapshot may come in any order, and has other messages around it."""
        self._has_oso_begun = False
        self._without_history = False
        """It is announced, and the part with every version, which has its own marker, is still to come."""
        self._says_history = False
        self._start = 0
        self._is_first = True
        self._accepted = accepted
        self._options = options

    def begin(self, end: int, *, is_initial_backfill: bool, has_history: bool = False) -> None:
        """The stream begins a snapshot that ends at ``end``.

        It is announced, unless it continues what the last marker announced.
        """
        if end > self.announced_end:
            self.is_due = True  # ... or still is: perhaps nothing of the last one was for the reader
            self.announced_end = self.end = end
        self.is_oso = (
            self._options.oso is not Oso.OFF
            and is_initial_backfill
            and self._accepted.filter.is_one_collection
            and not has_history
        )
        self._has_oso_begun = False
        # It continues what was announced for a part that had each key once.
        self._without_history = has_history and not self.is_due and not self._says_history

    def wants(self, snapshot: VBucketSnapshot, first_seqno: int) -> bool:
        """Whether a marker is due before the message with this seqno."""
        return self.is_due or (self._without_history and first_seqno >= snapshot.history_start)

    def announce(
        self,
        snapshot: VBucketSnapshot,
        first_seqno: int,
        position: int,
        says: StreamMessages,
        extra_flags: int,
    ) -> bytes:
        """The marker, before the first message with a seqno of the snapshot."""
        self.is_due = False
        if self.is_oso:
            self._has_oso_begun = True
            return says.oso(OsoFlag.START)
        vbucket = self._accepted.vbucket
        purge_seqno = vbucket.purge_seqno
        # What a replica has received from a disk may all be in its memory, but lacks purged deletions too.
        as_memory = snapshot.in_memory and position >= purge_seqno
        flags = (_MEMORY if as_memory else _DISK) | extra_flags
        start = snapshot.start
        self._says_history = 0 < snapshot.history_start <= first_seqno
        if self._says_history:
            flags |= _EVERY_VERSION
        if snapshot.checkpoint or not as_memory:
            flags |= _CHECKPOINT
        else:
            start = first_seqno
        if self._without_history:
            # The two parts are one snapshot: docs/spec/servers.md#change-history.
            self._without_history = False
            return says.marker(self._start, self.end, flags, vbucket)
        self._without_history = bool(snapshot.history_start and first_seqno < snapshot.history_start)
        if self._is_first:
            start = min(start, self._accepted.snapshot_start)
            self._is_first = False
        if snapshot.end < self.end and snapshot.start <= vbucket.received.start:
            # Keys that came before the replica's open snapshot may come again in the rest of it:
            # docs/spec/dcp.md#snapshots-of-a-replica.
            flags |= _DUPLICATES
        self._start = start
        return says.marker(start, self.end, flags, vbucket)

    def finish(self, end: int, last_sent_seqno: int, says: StreamMessages) -> list[bytes]:
        """The messages that end a snapshot, if it came in any order."""
        if not self._has_oso_begun:
            return []
        closing = [says.oso(OsoFlag.END)]
        if self._options.oso is Oso.WITH_SEQNO_ADVANCED and last_sent_seqno != end:
            closing.insert(0, says.seqno_advanced(end))
        return closing
