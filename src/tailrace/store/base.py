"""The contract of a store: what the server, its producers and its replicas may count on.

One `engine.Engine` is one data directory with buckets; a `Bucket` has a fixed number of vbuckets and one
collections manifest; a `VBucket` has documents, a state, a failover log and a history of changes numbered by
seqno.

**Frames.** Every change is one DCP frame, made once: magic 0x80, opaque 0, the vbucket's id, header CAS =
document CAS, the datatype as stored, document keys with their collection prefix (LEB128; the default
collection is ``00``). Mutations are 0x57 with 31 bytes of extras, deletions 0x58 in the V2 layout (21 bytes,
with delete time), expirations 0x59 (20 bytes), system events 0x5f (13 bytes, key without prefix), prepares
0x60 (31 bytes) and aborts 0x63 (laid out like a deletion, see `format.aborted`). `get`
returns such a frame, snapshots hand out many at a time. `format.StoredDocument.of(frame)` takes one apart.
All *keys* in this interface have the prefix.

**Threads.** A bucket has one owner thread (the event loop), which makes every call except `Job.run`. What
takes long is a `Job`: the owner makes it (`begin_flush`, `begin_maintenance`), any thread runs it, the owner
finishes it. Nothing needs a lock, writes go on meanwhile, and a simulation runs jobs inline. `flush` and
`compact` are the same in one blocking call.

**Durability.** A write is in memory and queued when the call returns. It is on disk when
`VBucket.persisted_seqno` has reached its seqno: after the `finish` of a flush that took it. A failed flush
raises from `finish`; its changes stay queued, go to a new file next time, and were never reported as
persisted. Rollbacks and clean stops are on disk when the call returns. State changes, failover logs and
manifests are on disk with the next flush, in order with the changes.

**Memory.** Changes stay in memory until they are in a sealed segment, then as long as the quota allows.
After that a key costs only its index entry. When the disk can't keep up, or persistence is stopped, writes
beyond the quota are refused with ETMPFAIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..frames import CHUNK_BYTES, Chunk, Trait

if TYPE_CHECKING:
    from ..history import FailoverLog
    from .format import StoredPrepare

__all__ = [
    "Bucket",
    "Chunk",
    "Compaction",
    "Job",
    "ReceivedRange",
    "StoreSettings",
    "Trait",
    "VBucket",
    "VBucketSnapshot",
    "Written",
]


class Written(NamedTuple):
    """What a write made."""

    cas: int
    seqno: int


class ReceivedRange(NamedTuple):
    """Start and end seqno of the snapshot that a replica is receiving, or has received when the high seqno
    is its end.
    """

    start: int
    end: int


STATE_DISK_BYTES = 4 << 20
"""Twice what it takes to replace the state of 1,024 vbuckets with all their branches."""


@dataclass(slots=True)
class StoreSettings:
    """Limits and intervals, under the names that ``tailrace serve --set`` knows."""

    memory_quota: int = 256 << 20  # bytes: for changes in memory; writes beyond it wait for the disk
    checkpoint_share: float = 0.20  # of memory_quota: changes kept in memory for streams
    checkpoint_items: int = 10_000  # changes of a vbucket in a checkpoint before it is closed
    flush_interval: float = 0.25  # seconds between group commits (kept by the owner's timer)
    segment_fanout: int = 16  # sealed segments of a size before they are merged into one of the next
    quiet_time: float = 5.0  # seconds without a commit before segments are merged for readers' sake
    garbage_share: float = 0.5  # of sealed bytes that are superseded before all segments are merged
    history_changes: int = 200  # newest changes of each vbucket that a rollback can undo one by one
    history_retention_seconds: float = 0.0  # every version of the last N seconds is kept; 0: any age
    history_retention_bytes: int = 0  # ... up to this size of the bucket's changes; 0: any. Both 0: none
    tombstone_age: float = 259_200.0  # seconds before compaction forgets a deletion
    expiry_pager_interval: float = 600.0  # seconds (kept by the owner's timer)
    max_value: int = 20 << 20  # bytes of a document's value
    failover_entries: int = 25
    last_write_wins: bool = False  # conflict resolution by CAS instead of by rev seqno
    tombstone_value: Callable[[bytes, int], tuple[bytes, int]] = field(
        default=lambda value, datatype: (b"", 0)
    )
    """What a deletion keeps of a value with xattrs (value, datatype): the server keeps the system xattrs."""

    @property
    def keeps_history(self) -> bool:
        """Every version is kept for a while, for readers that ask for all of them."""
        return bool(self.history_retention_seconds or self.history_retention_bytes)

    @property
    def least_disk_bytes(self) -> int:
        """A node whose disk has this size and was full accepts writes again once half of it is free. With a
        smaller disk it may not: sealing what is in memory needs room for both the log and the segment, and
        for documents of a few bytes the two take 2.7 times as much as the documents in memory.
        """
        return 6 * self.memory_quota + STATE_DISK_BYTES


class Job(Protocol):
    """Work that may be done on another thread: run it there, then finish it on the owner's."""

    def run(self) -> None:
        """The long part. Never raises: what goes wrong is raised by `finish`."""
        ...

    def finish(self) -> None:
        """Take over the result, or raise `StoreError`. Exactly once, on the owner's thread, at shutdown
        too.
        """
        ...


class VBucketSnapshot(Protocol):
    """A stable read of a vbucket: everything after a seqno, each key once, as it was at ``end``.

    It outlives compactions, rollbacks and writes, and a disk snapshot holds no documents in memory. Snapshots
    follow each other: pass the ``end`` of one to get the next.
    """

    start: int  # first seqno that it may hold (the seqno asked for + 1)
    end: int  # the last frame has exactly this seqno
    in_memory: bool  # where it comes from, for the marker's flags
    checkpoint: bool  # it begins with a new checkpoint
    checkpoint_id: int  # number of the checkpoint that it belongs to; 0 for a disk snapshot
    history_start: int  # from this seqno on it has every version; 0: it has each key once

    def read(self, max_bytes: int = CHUNK_BYTES) -> Chunk | None:
        """The next frames, about `max_bytes` and at least one; None when all are read. May raise
        StoreCorrupt.
        """
        ...

    def close(self) -> None:
        """Release files; garbage collection does it too."""
        ...


@dataclass(slots=True, frozen=True)
class Compaction:
    """What a compaction may forget beyond superseded versions (the COMPACT command's fields)."""

    vbuckets: Sequence[int] | None = None  # None: all
    purge_before_time_s: int = 0  # tombstones older than this
    purge_before_seqno: int = 0  # ... and below this seqno; 0 is no such bound
    drop_tombstones: bool = False


class VBucket(Protocol):
    """One vbucket. Its operations on documents check CAS and locks but not the state: the server does
    that.
    """

    id: int
    state: int  # wire.codes.VBucketState
    high_seqno: int
    persisted_seqno: int
    failover_log: FailoverLog

    @property
    def purge_seqno(self) -> int:
        """Deletions up to here may be missing."""
        ...

    @property
    def deleted_rev(self) -> int:
        """The highest rev of a deletion that is or was here."""
        ...

    @property
    def rollback_floor(self) -> int:
        """A rollback can go to 0 and to this or any later seqno."""
        ...

    @property
    def received(self) -> ReceivedRange:
        """The snapshot that is being received, from the last complete one's end; (high, high) when active."""
        ...

    @property
    def persisted_snapshot(self) -> ReceivedRange:
        """The received snapshot that is only partly on disk: a promotion after a kill goes back to its
        start. (persisted, persisted) if there is none.
        """
        ...

    @property
    def uuid(self) -> int:
        """The current branch."""
        ...

    @property
    def complete_seqno(self) -> int:
        """End of the last complete snapshot: what a promotion keeps. The high seqno unless a snapshot is
        being received.
        """
        ...

    @property
    def item_count(self) -> int: ...

    @property
    def tombstone_count(self) -> int: ...

    @property
    def tombstones_in_memory(self) -> int:
        """Like `tombstone_count`, but 0 until the vbucket is used: nothing is read for it."""
        ...

    @property
    def disk_bytes(self) -> int:
        """Bytes of its frames in sealed segments."""
        ...

    # Documents. A refusal raises DocumentRefused with the status to answer. `expiry` is absolute (unix
    # seconds).

    def get(self, key: bytes) -> bytes | None:
        """The live document's frame. One that is found expired becomes an expiration if the vbucket is
        active.
        """
        ...

    def get_any(self, key: bytes) -> bytes | None:
        """The newest frame, tombstones and expired documents too."""
        ...

    def set(  # noqa: PLR0917
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0, cas: int = 0
    ) -> Written: ...

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
        """Make a new version of a document, for `set` and all other commands that do; returns its CAS and
        seqno as a plain pair. A version from elsewhere has its own ``rev`` and ``new_cas``. What the owner
        made of the previous version (`Bucket.cache`) stays: the owner replaces it.
        """
        ...

    def add(
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0
    ) -> Written: ...

    def replace(  # noqa: PLR0917
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, datatype: int = 0, cas: int = 0
    ) -> Written: ...

    def counter(self, key: bytes, delta: int, initial: int | None, expiry: int = 0) -> tuple[int, Written]:
        """Add `delta` (negative: decrement, floor 0); `initial` None: a missing document is refused."""
        ...

    def touch(self, key: bytes, expiry: int) -> tuple[bytes, Written]:
        """Set a new expiry; also returns the document's new frame, for GAT."""
        ...

    def delete(self, key: bytes, cas: int = 0) -> Written: ...

    def get_locked(self, key: bytes, seconds: float) -> tuple[bytes, int]:
        """Lock a document; its frame and the CAS that unlocks it."""
        ...

    def unlock(self, key: bytes, cas: int) -> None: ...

    def is_locked(self, key: bytes) -> bool: ...

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
        """Store a document with a given rev and CAS if it wins the conflict resolution or `resolve` is
        off.
        """
        ...

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
    ) -> Written: ...

    def random_key(self, collection: int = 0) -> bytes | None:
        """The frame of some live document."""
        ...

    def live_keys(self, collection: int = 0) -> list[tuple[bytes, int]]:
        """Every live document of a collection: key, and the seqno of its newest version; in no order."""
        ...

    def expire_due(self, limit: int = 1_000) -> int:
        """The pager: turn up to `limit` documents whose time has come into expirations; returns how many."""
        ...

    # Durable writes, see `prepares`.

    @property
    def undecided(self) -> Sequence[StoredPrepare]:
        """Durable writes that are prepared and neither committed nor aborted, oldest first."""
        ...

    def prepared_up_to(self, in_memory: int, on_disk: int) -> int:
        """The newest undecided prepare that is as safe as its level requires, like all before it, when
        snapshots up to these seqnos are whole here in memory and on disk; 0 if there is none.
        """
        ...

    @property
    def visible_seqno(self) -> int:
        """The highest seqno of a change that is neither a prepare nor an abort."""
        ...

    @property
    def has_unseen(self) -> bool:
        """Whether there may be prepares or aborts among the changes."""
        ...

    def begin_durable(self, level: int) -> None:
        """What is written until `end_durable` is only prepared. `Written.seqno` is then the prepare's."""
        ...

    def end_durable(self) -> None: ...

    def commit(self, prepared_seqno: int) -> Written | None:
        """Make a prepare visible; None if it is decided or gone."""
        ...

    def abort(self, prepared_seqno: int) -> bool:
        """Give up a prepare; False if it is decided or gone."""
        ...

    def commit_for(self, key: bytes, prepared_seqno: int, seqno: int) -> bytes:
        """The change that a replica is to `receive` for a commit; KEY_ENOENT if it has no such prepare."""
        ...

    # Streams.

    @property
    def history_start(self) -> int:
        """The seqno from which on every version is on disk; 0 if no history is kept."""
        ...

    def snapshot_after(
        self, after_seqno: int, *, memory: bool = True, history: bool = False
    ) -> VBucketSnapshot | None:
        """The next snapshot for a reader that has everything up to `after_seqno`, or None if there is nothing
        newer: the reader is then at the high seqno, even if no change has exactly that number.

        From memory if the changes are still there: one checkpoint at a time, up to the high seqno. Otherwise
        from disk, up to the newest sealed change. With ``memory=False``: one snapshot of everything that is
        persisted now, and None if that is nothing. With ``history`` it has every version that is kept; no
        chunk holds changes from both before and after `VBucketSnapshot.history_start`.
        """
        ...

    def collection_high_seqno(self, collections: Iterable[int]) -> int:
        """Highest seqno of a change (system events too) in any of these collections."""
        ...

    def on_append(self, callback: Callable[[], None] | None) -> None:
        """Call this (cheap, no argument) after every change to stream."""
        ...

    def on_change(self, callback: Callable[[], None] | None) -> None:
        """Call this (cheap, no argument) whenever the vbucket's history or state changed."""
        ...

    def when_persisted(
        self, seqno: int, callback: Callable[[bool], None], is_over: Callable[[], bool] | None = None
    ) -> None:
        """Call back once, with True when `seqno` is on disk, with False when it was rolled back or the
        bucket closes. Once ``is_over`` returns True, the call may never come.
        """
        ...

    # Checkpoints, for TAP and statistics. Numbers start at 1, only rise, and survive restarts.

    @property
    def checkpoint_id(self) -> int:
        """The open checkpoint's number."""
        ...

    def close_checkpoint(self) -> int:
        """Begin a new checkpoint with the next change; the new one's number."""
        ...

    def checkpoint_start(self, checkpoint_id: int) -> int | None:
        """The seqno after which this checkpoint's changes begin; None if it is no longer in memory."""
        ...

    # A replica's side. The frames' seqno, CAS and rev are taken as they are.

    def begin_snapshot(self, start: int, end: int, purge_seqno: int = 0, *, history: bool = False) -> None:
        """A marker came: DocumentRefused(ERANGE) if it lies wholly in the past, EINVAL if start > end.

        Deletions up to ``purge_seqno`` may be missing from it, and then from here too once a part of it has
        come. With ``history``, it lacks nothing else but versions in collections without history.
        """
        ...

    def receive(self, frame: bytes) -> None:
        """A change of the current snapshot, canonical (see format.canonical): ERANGE if its seqno does not
        fit.

        System events also update what this node knows of the vbucket's collections.
        """
        ...

    def end_snapshot(self) -> None:
        """The rest of the snapshot is not for this copy: it is complete with the last change that came."""
        ...

    def drop_snapshot(self) -> None:
        """Stop waiting for an announced snapshot of which nothing came."""
        ...

    def exact_seqno(self, seqno: int) -> int:
        """The last seqno up to this one that `rollback` can go to and that was a real state of the vbucket:
        not inside a snapshot in which the sender folded older versions away. 0 at worst.
        """
        ...

    def set_failover_log(self, log: FailoverLog) -> None:
        """Take over the active's log (after a successful stream request, before the first change)."""
        ...


class Bucket(Protocol):
    """One bucket."""

    name: str
    settings: StoreSettings

    @property
    def writes_refused(self) -> int:
        """Writes that were refused because the disk was behind."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes of the changes in memory."""
        ...

    @property
    def vbucket_count(self) -> int: ...

    @property
    def vbuckets(self) -> Sequence[VBucket | None]:
        """By id; None where this node has none."""
        ...

    cache: dict[bytes, Any]
    """What the owner made of live documents, by key, for its own use. There is one for all vbuckets, because
    lookups in one large dictionary miss the processor's cache less often. If several vbuckets have a key, the
    owner has to know which one is meant. The store removes what is no longer true, and everything when the
    history or state of a vbucket changes. The owner must not put in what expires, and must keep it small.
    """

    # VBuckets

    def set_state(
        self, vbucket: int, state: int, *, takeover: bool = False, extra: Mapping[str, Any] | None = None
    ) -> VBucket:
        """Create the vbucket, or change its state.

        Becoming active begins a new branch at the end of the last complete snapshot (a partly received one is
        rolled back first), except by takeover: then log and uuid are kept. `extra` (topology ...) is kept
        with the state.
        """
        ...

    def delete_vbucket(self, vbucket: int) -> None:
        """Forget it and all it holds; durable."""
        ...

    def rollback(self, targets: Mapping[int, int], *, branch: bool) -> None:
        """Forget everything after a seqno in each vbucket, durably; older versions come back as they were.

        With `branch` the failover log gets a new entry there (an active that lost data); without, only
        entries above are dropped (a replica that follows). All or nothing: RollbackImpossible names the
        lowest possible seqno.
        """
        ...

    def flush_all(self, *, everything: bool = False) -> None:
        """The FLUSH command: every active vbucket is empty, on a new branch at seqno 0; durable. With
        ``everything`` every vbucket that is not dead.
        """
        ...

    @property
    def flushes(self) -> int:
        """How often `flush_all` was called; counted before readers learn that a history changed."""
        ...

    # Durability

    def begin_flush(self) -> Job | None:
        """A group commit of everything written so far; None if there is nothing or one is under way."""
        ...

    @property
    def flush_due(self) -> bool:
        """So much was written that the next group commit should not wait for the interval."""
        ...

    def flush(self) -> None:
        """begin_flush, run, finish; an error while another flush is under way."""
        ...

    persistence: bool  # False: STOP_PERSISTENCE; begin_flush gives None

    rotate_soon: bool
    """Set it to have the maintenance after the next flush seal all that the flush takes, however little: a
    compaction sees only what is sealed.
    """

    # Maintenance

    def begin_maintenance(self) -> Job | None:
        """Sealing or merging that is due; None if nothing is, or it is under way. One of each may be: after
        each flush, ask until there is none.
        """
        ...

    def begin_compaction(self, compaction: Compaction) -> Job | None:
        """A compaction on request; None if a merge is under way (ask again after its finish). It sees only
        what is sealed.
        """
        ...

    last_change: float
    """When changes were last committed, on the monotonic clock."""

    def rest(self) -> None:
        """Nobody has written for a while: sealed changes leave memory. If much is not sealed yet, the next
        flush has it sealed (`rotate_soon`); call this again after that.
        """
        ...

    def remove_later(self) -> None:
        """From now on files that are no longer needed wait for `begin_removal`."""
        ...

    def begin_removal(self) -> Job | None:
        """A job that removes such files, if there are any; ask after each job of maintenance."""
        ...

    def compact(self, compaction: Compaction = ...) -> None:
        """A compaction in one blocking call; flushes first."""
        ...

    # Collections

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The collections manifest as its JSON object; see collections.Manifest for the parsed form."""
        ...

    def set_manifest(self, manifest: bytes) -> None:
        """Take over a manifest: every active vbucket gets the system events that lead to it.
        DocumentRefused: EINVAL, ERANGE.
        """
        ...

    def next_cas(self) -> int:
        """A CAS that no document has, above all that were given out: for `VBucket.set_with_meta`, when the
        value itself must contain it.
        """
        ...

    # Cursors: positions of named readers, kept over restarts (registered TAP clients); written with the next
    # flush.

    def set_cursor(self, name: str, positions: Mapping[str, Any] | None) -> None:
        """Remember a reader's positions (a small JSON object), or forget them (None)."""
        ...

    @property
    def uuid(self) -> str:
        """32 hex digits that no other bucket has, not even one of this name; "" for older buckets."""
        ...

    def set_uuid(self, uuid: str) -> None:
        """Become part of another bucket, with the next batch to the disk."""
        ...

    @property
    def cursors(self) -> Mapping[str, Mapping[str, Any]]: ...

    def stats(self) -> dict[str, int | float | str]:
        """Figures of this bucket for the statistics page."""
        ...

    def __iter__(self) -> Iterator[VBucket]:
        """The vbuckets that exist here, by id."""
        ...
