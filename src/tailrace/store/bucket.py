"""A bucket: its vbuckets, what is queued for the disk, and its files."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..clock import Clock
from ..errors import DocumentRefused, RollbackImpossible, StoreCorrupt, StoreError
from ..files import Files
from ..history import FailoverLog
from ..rng import unique_name, vb_uuid
from ..wire.codes import Status, VBucketState
from .accepted_losses import LossPolicy
from .base import Job, StoreSettings
from .bucket_metadata import BucketMetadata
from .collections import Manifest
from .journal import CommitJob, HybridClock
from .log import LogBatch
from .recovery import recover
from .rewriting_after_loss import rewrite_what_is_left
from .sealing import SealedStore
from .vbucket import EngineVBucket
from .vbucket_history import History

__all__ = ["EngineBucket"]

_ALIVE = (VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.PENDING)


class EngineBucket(SealedStore):
    """One bucket of an engine. See `base.Bucket` for the contract."""

    def __init__(  # noqa: PLR0917
        self,
        name: str,
        directory: str,
        files: Files,
        settings: StoreSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        super().__init__(name, directory, files, settings, HybridClock(clock), rng)
        self.rng = rng
        self.persistence = True
        self.persisted: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # seqno of each vbucket on disk
        self.waiting: dict[History, None] = {}  # vbuckets on whose changes somebody waits, always in order
        self.flushes = 0
        self.metadata = BucketMetadata()
        self.cache: dict[bytes, Any] = {}

    # Creating, opening, closing.

    @classmethod
    def create(cls, *args: Any, vbucket_count: int, active: bool) -> EngineBucket:
        """A new bucket in an empty directory."""
        bucket = cls(*args)
        bucket.make_room(vbucket_count)
        bucket.metadata.uuid = unique_name(bucket.rng)  # the first manifest has it
        base = {
            "name": bucket.name,
            "vbucket_count": vbucket_count,
            "vbuckets": {},
            "sealed_log": 0,
            "next_batch": 1,
            "cas": 0,
            "clean": True,
            **bucket.metadata.to_json(),
        }
        if active:
            for number in range(vbucket_count):
                bucket.set_state(number, VBucketState.ACTIVE)
        bucket._commit_now({"clean": False})
        if not bucket.journal.synced.is_written:
            raise StoreError("its first mark could not be written")
        bucket.sealed.manifest_file.change(lambda _base, _table: (base, []))
        if not bucket.sealed.manifest_file.is_durable:
            raise StoreError("its manifest may not survive")
        return bucket

    @classmethod
    def open(cls, *args: Any, accept_loss: bool = False, has_marks: bool = True) -> EngineBucket:
        """A bucket that is there. After an unclean stop every active vbucket begins a new branch, and so it
        does if somebody accepts that something may be lost.
        """
        bucket = cls(*args)
        clean = recover(bucket, LossPolicy(accept=accept_loss), has_marks=has_marks)
        for vbucket in bucket:
            if vbucket.state == VBucketState.ACTIVE:
                vbucket.doubt_prepares()
            log = vbucket.failover_log
            if bucket.sealed.is_incomplete:
                # Changes of any age are gone: there is no seqno from which a reader, or a replica's active,
                # could go on.
                vbucket.failover_log = FailoverLog.new(bucket.new_uuid(log))
            elif vbucket.state == VBucketState.ACTIVE and (accept_loss or not clean):
                vbucket.failover_log = bucket.branched(log, vbucket.high_seqno, bucket.new_uuid(log))
            else:
                continue
            bucket.queue_meta(vbucket)
        # Two things must be on disk before anything is served: that this run has not stopped cleanly, and the
        # new branches, while the loss can still be seen.
        bucket._commit_now({"clean": False})
        if bucket.sealed.is_incomplete:
            bucket.seal()
            rewrite_what_is_left(bucket)
        return bucket

    def close(self) -> None:
        """A clean stop."""
        self._jobs.settle()
        if not self.persistence:
            # Changes that were never written are lost, as after a kill; the next start must notice.
            self._shut()
            return
        self.flush()
        self._commit_now({"clean": True}, exact_cas=True)
        self._shut()

    def _shut(self) -> None:
        self._jobs.is_closed = True
        for vbucket in self:
            vbucket.give_up_waiters()
        self.journal.close()
        self.sealed.segments = []

    def abandon(self) -> None:
        """Let go of everything and write nothing."""
        self._jobs.is_closed = True
        self.journal.rotate()
        self.sealed.segments = []

    def state(self) -> dict[str, Any]:
        """The manifest's content as of now, in case this is the end of a log."""
        return {
            "name": self.name,
            "vbucket_count": len(self.vbuckets),
            "vbuckets": {vbucket.id: vbucket.to_json(whole=True) for vbucket in self},
            "cas": self.clock.ceiling(),
            "clean": False,
            **self.metadata.to_json(),
        }

    def next_cas(self) -> int:
        return self.clock.next()

    # VBuckets.

    def make_room(self, vbucket_count: int) -> None:
        """As many vbuckets as the bucket will ever have, none of them here yet."""
        self.vbuckets = [None] * vbucket_count
        self.persisted = np.zeros(vbucket_count, np.uint64)

    def branched(self, log: FailoverLog, seqno: int, vb_uuid: int) -> FailoverLog:
        """The log with a new branch, as long as this bucket keeps them."""
        return log.branched_at(seqno, vb_uuid, max_entries=self.settings.failover_entries)

    def new_uuid(self, log: FailoverLog) -> int:
        """A vb_uuid that the log does not have: a seeded source may give the same one again."""
        while (uuid := vb_uuid(self.rng)) in log:
            pass
        return uuid

    def find(self, number: int) -> EngineVBucket:
        """A vbucket that is here."""
        vbucket = self.vbuckets[number] if 0 <= number < len(self.vbuckets) else None
        if vbucket is None:
            raise DocumentRefused(Status.NOT_MY_VBUCKET, f"no vbucket {number}")
        return vbucket

    def new_vbucket(self, number: int, state: int, log: FailoverLog | None = None) -> EngineVBucket:
        """An empty vbucket; not yet written anywhere."""
        if not 0 <= number < len(self.vbuckets):
            raise DocumentRefused(Status.ERANGE, f"there are {len(self.vbuckets)} vbuckets, no {number}")
        vbucket = EngineVBucket(self, number, state, log or FailoverLog.new(vb_uuid(self.rng)))
        self.vbuckets[number] = vbucket
        return vbucket

    def set_state(
        self, vbucket: int, state: int, *, takeover: bool = False, extra: Mapping[str, Any] | None = None
    ) -> EngineVBucket:
        if state not in tuple(VBucketState):
            raise DocumentRefused(Status.EINVAL, f"no vbucket state {state}")
        target = self.vbuckets[vbucket] if 0 <= vbucket < len(self.vbuckets) else None
        if target is None:
            target = self.new_vbucket(vbucket, state)
        elif state == VBucketState.ACTIVE != target.state:
            if not takeover:
                self._promote(target)
            target.drop_snapshot()  # what was announced will never come: its own changes get these seqnos
        target.state = int(state)
        self.cache.clear()
        if extra is not None:
            target.extra = dict(extra)
        if state == VBucketState.ACTIVE:
            target.apply_manifest(self.collections)
            target.doubt_prepares()
        self.queue_meta(target)
        target.changed()
        return target

    def _promote(self, vbucket: EngineVBucket) -> None:
        """Begin a new branch at the end of the last complete snapshot; what came after it was never a state
        of the bucket.
        """
        complete = vbucket.complete_seqno
        log = vbucket.failover_log
        log = self.branched(log, complete, self.new_uuid(log))
        if complete < vbucket.high_seqno and (not complete or complete >= vbucket.rollback_floor):
            self._roll_back({vbucket.id: complete}, {vbucket.id: log})
        vbucket.failover_log = log

    def delete_vbucket(self, vbucket: int) -> None:
        deleted = self.find(vbucket)
        self._jobs.settle()
        self._commit_now({"deleted": [vbucket]})
        self.remove_vbucket(deleted)

    def remove_vbucket(self, vbucket: EngineVBucket) -> None:
        """The part of a deletion that happens in memory."""
        vbucket.give_up_waiters()
        vbucket.drop_after(0)
        self.sealed.clip(vbucket.id, 0)
        self.vbuckets[vbucket.id] = None
        self.queue.forget_after({vbucket.id: 0})
        self.metadata.forget(vbucket)
        self.generations.recount(self)
        vbucket.changed()

    # Rollback.

    def rollback(self, targets: Mapping[int, int], *, branch: bool) -> None:
        vbuckets = {number: self.find(number) for number in targets}
        self._jobs.settle()
        for number, seqno in targets.items():
            vbucket = vbuckets[number]
            if seqno > vbucket.high_seqno or 0 < seqno < vbucket.rollback_floor or seqno < 0:
                raise RollbackImpossible(number, seqno, vbucket.rollback_floor, vbucket.high_seqno)
            inside = vbucket.folded_around(seqno)
            if inside.start < inside.end:
                raise RollbackImpossible(number, seqno, inside.end, vbucket.high_seqno)
        logs = {}
        for number, seqno in targets.items():
            log = vbuckets[number].failover_log
            uuid = self.new_uuid(log)
            logs[number] = self.branched(log, seqno, uuid) if branch else log.rolled_back_to(seqno, uuid)
        self._roll_back(targets, logs)
        for vbucket in vbuckets.values():
            vbucket.changed()

    def _roll_back(self, targets: Mapping[int, int], logs: Mapping[int, FailoverLog]) -> None:
        """In memory, then on disk; if that fails, memory is as it was."""
        self._jobs.settle()
        if self.persistence:
            self.flush()
        vbuckets = [self.find(number) for number in targets]
        before = [vbucket.kept() for vbucket in vbuckets]
        clips, persisted = self.sealed.clips(), self.persisted.copy()
        queued = self.queue.frames, self.queue.notes
        for vbucket in vbuckets:
            self.drop_after(vbucket, targets[vbucket.id])
            vbucket.failover_log = logs[vbucket.id]
        self.queue.forget_after(targets)
        for vbucket in vbuckets:
            if vbucket.state == VBucketState.ACTIVE:
                # Collections that began later are still there, and its readers must learn of them again.
                vbucket.apply_manifest(self.collections)
                vbucket.doubt_prepares()
        try:
            self._commit_now(
                {
                    "rollback": {str(number): seqno for number, seqno in targets.items()},
                    "logs": {str(number): log.to_json() for number, log in logs.items()},
                },
                take_changes=self.persistence,
            )
        except StoreError:
            for vbucket, fields in zip(vbuckets, before, strict=True):
                vbucket.restore(fields)
            self.sealed.set_clips(clips)
            self.persisted, (self.queue.frames, self.queue.notes) = persisted, queued
            self.generations.recount(self)
            raise
        self.generations.recount(self)
        for vbucket in vbuckets:
            vbucket.give_up_waiters(targets[vbucket.id])

    def drop_after(self, vbucket: EngineVBucket, seqno: int) -> None:
        """The part of a rollback that happens in memory; also when a log is read again."""
        self.sealed.clip(vbucket.id, seqno)
        vbucket.drop_after(seqno)

    def flush_all(self, *, everything: bool = False) -> None:
        states = _ALIVE if everything else (VBucketState.ACTIVE,)
        self.flushes += 1
        self.rollback({v.id: 0 for v in self if v.state in states}, branch=True)

    # Durability.

    def queue_meta(self, vbucket: History) -> None:
        """What is stored beside the changes is different now."""
        self.metadata.queue(vbucket)

    def begin_flush(self) -> Job | None:
        if self._jobs.commit is not None or not self.persistence or self._jobs.is_closed:
            return None
        seals = self.rotate_soon and self.generations.growing_bytes
        if not self.queue and not self.metadata.is_queued and not seals:
            return None
        self._jobs.commit = self._new_commit({}, take_changes=True)
        return self._jobs.commit

    def flush(self) -> None:
        if self._jobs.commit is not None:
            raise StoreError("a flush is under way: finish it first")
        job = self.begin_flush()
        if job is not None:
            job.finish()

    def _new_commit(self, meta: dict[str, Any], *, take_changes: bool, exact_cas: bool = False) -> CommitJob:
        batch = LogBatch(meta={**self.metadata.take(), **meta})
        if take_changes:
            batch.frames, batch.notes = self.queue.take()
        # While changes stay queued, the metadata might refer to some that are not on disk.
        meta_of = [] if self.queue else self.metadata.take_vbuckets()
        if meta_of:
            batch.meta["vbuckets"] = {str(v.id): v.to_json(whole=False) for v in meta_of}
        batch.cas_ceiling = self.clock.last if exact_cas else self.clock.ceiling()
        due = self.rotate_soon or self.flush_due
        rotate = self.state() if take_changes and due else None
        return CommitJob(self, batch, meta_of, rotate)

    def _commit_now(
        self, meta: dict[str, Any], *, take_changes: bool = False, exact_cas: bool = False
    ) -> None:
        """Write metadata at once, with or without the changes that are queued; if that fails, it is not to be
        found on disk.
        """
        try:
            self._new_commit(meta, take_changes=take_changes, exact_cas=exact_cas).finish()
        except StoreError:
            self.journal.disown()
            raise

    def committed(self, job: CommitJob) -> None:
        """A commit is durable."""
        self._jobs.commit = None
        for vbucket in job.meta_of:
            vbucket.logged(job.batch.meta["vbuckets"][str(vbucket.id)])
        logged = job.batch.logged
        if logged is not None:
            # Of several for the same vbucket the last one stays.
            self.persisted[logged.vbuckets] = logged.seqnos
            self.generations.logged.append(logged)
            self.last_change = self.clock.monotonic()
        if job.rotate is not None:
            self._rotate(job)
        if self.waiting:
            still = [vbucket for vbucket in list(self.waiting) if vbucket.tell_waiters()]
            self.waiting = dict.fromkeys(still)

    def not_committed(self, job: CommitJob) -> None:
        """A commit failed: everything is queued again."""
        self._jobs.commit = None
        self.queue.give_back(job.batch.frames, job.batch.notes)
        self.metadata.give_back(job.batch.meta, job.meta_of)

    # Collections, cursors, figures.

    @property
    def uuid(self) -> str:
        return self.metadata.uuid

    def set_uuid(self, uuid: str) -> None:
        self.metadata.set_uuid(uuid)

    @property
    def collections(self) -> Manifest:
        """The collections manifest, parsed."""
        return self.metadata.collections

    @property
    def histories(self) -> Mapping[int, bool]:
        """See `Manifest.histories`."""
        return self.metadata.histories

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.metadata.manifest

    def set_manifest(self, manifest: bytes) -> None:
        new, old = Manifest.parse(manifest), self.collections
        new.check_follows(old)
        self.metadata.set_collections(new)
        for vbucket in self:
            if vbucket.state == VBucketState.ACTIVE:
                vbucket.apply_manifest(new, old)

    def set_cursor(self, name: str, positions: Mapping[str, Any] | None) -> None:
        self.metadata.set_cursor(name, positions)

    @property
    def cursors(self) -> Mapping[str, Mapping[str, Any]]:
        return self.metadata.cursors

    def corrupt(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(f"bucket {self.name}: {what}")

    def stats(self) -> dict[str, int | float | str]:
        return {
            "memory_bytes": self.queue.memory_bytes,
            "memory_quota": self.settings.memory_quota,
            "pending_changes": len(self.queue.frames),
            "generations": len(self.generations),
            "segments": len(self.sealed),
            "disk_bytes": self.sealed.size + self.journal.valid_bytes,
            "sealed_changes": self.sealed.frames,
            "superseded_changes": self.sealed.superseded,
            "commits": self.journal.commits,
            "expirations": self.queue.expirations,
            "flush_failures": self.journal.failures,
            "persistence": int(self.persistence),
            "log": self.journal.number,
        }
