"""A bucket's files and memory: what has grown in memory is sealed into segments, and segments are merged.

One generation is sealed at a time; meanwhile some segments may be merged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..files import Files
from .base import Compaction, Job, StoreSettings
from .compaction import MergeJob, SealJob, choose_merge, plan_compaction
from .generations import Generation, Generations
from .journal import BaseJob, CommitJob, HybridClock, Journal
from .sealed_segments import SealedSegments
from .segment import Segment
from .write_queue import WriteQueue

if TYPE_CHECKING:
    from .vbucket import EngineVBucket

__all__ = ["SealedStore"]


_WORTH_SEALING_BYTES = 4 << 20
"""Less than this may stay in memory, and in its log, while nobody writes."""


@dataclass(slots=True)
class _Jobs:
    """The jobs under way, at most one of each kind."""

    commit: CommitJob | None = None
    sealing: SealJob | None = None
    merging: MergeJob | None = None
    is_closed: bool = False  # no job may begin any more
    seal_failed: bool = False  # at the last attempt
    sealed_alone: bool = False  # nothing was merged during the last seal, nor since

    def settle(self) -> None:
        """Complete what is under way on other threads. A merge that nobody asked for is cancelled."""
        if self.commit is not None:
            self.commit.settle()
        if self.merging is not None:
            self.merging.cancel()
        for job in (self.sealing, self.merging):
            if job is not None:
                job.settle()


class SealedStore:
    """The part of a bucket that looks after its files and its memory."""

    def __init__(  # noqa: PLR0917
        self,
        name: str,
        directory: str,
        files: Files,
        settings: StoreSettings,
        clock: HybridClock,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.settings = settings
        self.vbuckets: list[EngineVBucket | None] = []
        self.queue = WriteQueue(settings, clock)
        self.generations = Generations(settings, self.queue)
        self.sealed = SealedSegments(files, directory)
        self.journal = Journal(files, directory, rng)
        self.last_change = clock.monotonic()
        self.rotate_soon = False
        self._jobs = _Jobs()

    def flush(self) -> None:
        """Commit everything that is queued; the bucket implements it."""
        raise NotImplementedError

    @property
    def clock(self) -> HybridClock:
        return self.queue.clock

    @property
    def memory_bytes(self) -> int:
        return self.queue.memory_bytes

    @property
    def writes_refused(self) -> int:
        return self.queue.refusals

    @property
    def segments(self) -> list[Segment]:
        return self.sealed.segments

    @property
    def vbucket_count(self) -> int:
        return len(self.vbuckets)

    def __iter__(self) -> Iterator[EngineVBucket]:
        return (vbucket for vbucket in self.vbuckets if vbucket is not None)

    # Generations: what is in memory until it is sealed.

    @property
    def flush_due(self) -> bool:
        return self.generations.is_full

    def _rotate(self, job: CommitJob) -> None:
        """Everything up to the batch that was just committed is a complete generation."""
        assert job.rotate is not None
        self.rotate_soon = False
        generation = Generation(job.rotate, self.journal.number, self.journal.next_batch)
        generation.bytes = job.growing_bytes
        self.generations.complete(generation, self)
        self.journal.rotate()

    def forget_memory(self, room: int = 0) -> None:
        """Drop sealed changes from memory, oldest first, until no more than ``room`` bytes are left."""
        self.generations.forget(room, self, later=self.sealed.manifest_file.removes_later)

    def rest(self) -> None:
        """Nobody writes: drop what is in memory only for speed."""
        if self._jobs.is_closed or self.queue.memory_bytes == 0:
            return
        if self.generations.growing_bytes >= _WORTH_SEALING_BYTES:
            self.rotate_soon = True
        self.forget_memory()

    # Maintenance.

    def begin_maintenance(self) -> Job | None:
        jobs = self._jobs
        if jobs.is_closed:
            return None
        if jobs.seal_failed:
            # There may be room for a seal or a merge, but not for both: no merge begins beside the next
            # attempt to seal. But merging may make room, so it goes next after a seal that was tried alone.
            merge = self._begin_merge() if jobs.sealing is None and jobs.sealed_alone else None
            return merge or self._begin_seal()
        return self._begin_seal() or self._begin_merge()

    def _begin_seal(self) -> Job | None:
        jobs, generation = self._jobs, self.generations.next_to_seal
        if jobs.sealing is not None or generation is None:
            return None
        jobs.sealing = SealJob(self, generation)
        jobs.sealed_alone = jobs.merging is None
        return jobs.sealing

    def _begin_merge(self) -> Job | None:
        jobs = self._jobs
        if jobs.merging is not None or (plan := choose_merge(self)) is None:
            return None
        jobs.merging = MergeJob(self, plan)
        jobs.sealed_alone = False
        return jobs.merging

    def begin_compaction(self, compaction: Compaction, *, alone: bool = False) -> Job | None:
        if self._jobs.merging is not None:
            return None
        plan = plan_compaction(self, compaction)
        self._jobs.merging = MergeJob(self, plan, asked=True, alone=alone)
        return self._jobs.merging

    def remove_later(self) -> None:
        self.sealed.manifest_file.removes_later = True

    def begin_removal(self) -> Job | None:
        leaving, size = self.generations.take_leaving()
        return self.sealed.manifest_file.begin_removal(leaving, partial(self.generations.freed, size))

    def compact(self, compaction: Compaction | None = None) -> None:
        self._jobs.settle()
        self.seal()
        job = self.begin_compaction(compaction or Compaction(), alone=True)
        if job is not None:
            job.finish()

    def seal(self) -> None:
        """Flush, and put everything that is in memory into a segment."""
        self._jobs.settle()
        if self.generations.growing_bytes:
            self.rotate_soon = True
            self.flush()
        while self.generations.next_to_seal is not None:
            job = self._begin_seal()
            if job is None:
                break
            job.finish()

    def maintained(self, job: BaseJob, *, failed: bool = False) -> None:
        """A job has ended."""
        if job is self._jobs.merging:
            self._jobs.merging = None
        else:
            self._jobs.sealing = None
            self._jobs.seal_failed = failed
            self.forget_memory(self.generations.room_bytes)
