"""What of a bucket is in memory until it is sealed, and what is sealed: generations, segments, and the jobs
that make one of the other.

A generation is everything between two rotations of the log. It is sealed into a segment on another thread,
and stays in memory after that for as long as the room for checkpoints allows, because streams read from
memory first. One generation is sealed at a time; at the same time some segments may be merged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..files import Files
from .base import Compaction, Job, StoreSettings
from .compaction import Generation, MergeJob, SealJob, choose_merge, count_droppable, plan_compaction
from .journal import BaseJob, CommitJob, HybridClock, Journal
from .log import LoggedColumns, log_number
from .manifest_file import ManifestFile, spliced
from .merging import Losses
from .segment import Segment

if TYPE_CHECKING:
    from .checkpoint import Tail
    from .vbucket import EngineVBucket

__all__ = ["SealedStore"]


_WORTH_SEALING_BYTES = 4 << 20
"""Less may stay in memory, and in its log, while nobody writes."""


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
        self.directory = directory
        self.files = files
        self.settings = settings
        self.clock = clock
        self.now_s = clock.now_s
        self.vbuckets: list[EngineVBucket | None] = []
        self.memory_bytes = 0  # of frames in tails
        self.segments: list[Segment] = []  # oldest first
        self.epoch = 0  # rises whenever `segments` or a clip changes
        self.generations: list[Generation] = []  # complete ones whose changes are in memory, oldest first
        self._forgotten: list[list[tuple[int, Tail]]] = []  # left memory, and wait for `begin_removal`
        # Half of the room for checkpoints: one generation grows, the one before serves slower streams.
        self.generation_bytes = int(settings.memory_quota * settings.checkpoint_share) // 2
        self._complete_bytes = 0  # of all `generations`
        self.logged: list[LoggedColumns] = []  # of the batches since the last complete generation
        self.journal = Journal(files, directory, rng)
        self.manifest_file = ManifestFile(files, directory)
        self.next_segment = 1
        self.last_change = clock.monotonic()  # when changes were last committed
        self.rotate_soon = False
        self.untaken_losses: dict[int, Losses] = {}
        """Of a merge that the manifest file knows and the vbuckets don't yet."""
        self._commit: CommitJob | None = None
        self._sealing: SealJob | None = None
        self._merging: MergeJob | None = None
        self._closed = False
        self._droppable = (-1, 0)  # since which epoch, and how many

    def flush(self) -> None:
        """Commit everything that is queued; a bucket knows how."""
        raise NotImplementedError

    @property
    def vbucket_count(self) -> int:
        return len(self.vbuckets)

    def __iter__(self) -> Iterator[EngineVBucket]:
        return (vbucket for vbucket in self.vbuckets if vbucket is not None)

    def _settle(self, *, cancel: bool = True) -> None:
        """Nothing is under way on other threads afterwards. Merging that nobody asked for is broken off."""
        if self._commit is not None:
            self._commit.settle()
        if self._merging is not None and cancel:
            self._merging.cancel()
        for job in (self._sealing, self._merging):
            if job is not None:
                job.settle()

    # Generations: what is in memory until it is sealed.

    def growing_bytes(self) -> int:
        return self.memory_bytes - self._complete_bytes

    @property
    def flush_due(self) -> bool:
        return self.memory_bytes - self._complete_bytes >= self.generation_bytes

    def _rotate(self, job: CommitJob) -> None:
        """Everything up to the batch that was just committed is a complete generation."""
        assert job.rotate is not None
        self.rotate_soon = False
        generation = Generation(job.rotate, self.journal.number, self.journal.next_batch)
        generation.bytes = job.growing_bytes
        for vbucket in self:
            tail = vbucket.rotate(generation)
            if tail is not None:
                generation.tails.append((vbucket.id, tail))
        generation.logged, self.logged = self.logged, []
        self.generations.append(generation)
        self._complete_bytes += generation.bytes
        self.journal.rotate()

    def _recount(self) -> None:
        """After changes left memory in the middle."""
        self.logged = []
        for generation in self.generations:
            generation.bytes = 0
            generation.tails, generation.logged = [], []
        self.memory_bytes = 0
        for vbucket in self:
            for tail in vbucket._old:
                size = sum(map(len, tail.frames()))
                self.memory_bytes += size
                if tail.generation is not None:
                    tail.generation.bytes += size
                    tail.generation.tails.append((vbucket.id, tail))
            self.memory_bytes += sum(map(len, vbucket._tail.frames()))
        self._complete_bytes = sum(generation.bytes for generation in self.generations)

    def _trim_memory(self) -> None:
        """Sealed generations leave memory, the oldest first, as far as the room for checkpoints asks for
        it.
        """
        self.forget_memory(int(self.settings.memory_quota * self.settings.checkpoint_share))

    def forget_memory(self, room: int = 0) -> None:
        """Sealed changes leave memory, the oldest first, until no more than this is left."""
        while self.generations and self.generations[0].sealed and self.memory_bytes > room:
            generation = self.generations.pop(0)
            for vbucket in self:
                vbucket.forget_tail(generation)
            # They name each other: without this the frames would stay until the collector looks for circles,
            # which a node has it do next to never.
            forgotten, generation.tails = generation.tails, []
            if self.manifest_file.removes_later:
                self._forgotten.append(forgotten)
            self.memory_bytes -= generation.bytes
            self._complete_bytes -= generation.bytes

    def rest(self) -> None:
        """Nobody writes: what is in memory only for the sake of speed leaves it."""
        if self._closed or self.memory_bytes == 0:
            return
        if self.growing_bytes() >= _WORTH_SEALING_BYTES:
            self.rotate_soon = True
        self.forget_memory()

    # Maintenance.

    @property
    def droppable(self) -> int:
        """About how many frames a merge of everything would drop; asked for after each commit."""
        if self._droppable[0] != self.epoch:
            self._droppable = self.epoch, count_droppable(self)
        return self._droppable[1]

    def begin_maintenance(self) -> Job | None:
        if self._closed:
            return None
        if self._sealing is None:
            generation = next((g for g in self.generations if not g.sealed), None)
            if generation is not None:
                self._sealing = SealJob(self, generation)
                return self._sealing
        if self._merging is None and (plan := choose_merge(self)) is not None:
            self._merging = MergeJob(self, plan)
            return self._merging
        return None

    def begin_compaction(self, compaction: Compaction, *, alone: bool = False) -> Job | None:
        if self._merging is not None:
            return None
        self._merging = MergeJob(self, plan_compaction(self, compaction), asked=True, alone=alone)
        return self._merging

    def remove_later(self) -> None:
        self.manifest_file.removes_later = True

    def begin_removal(self) -> Job | None:
        forgotten, self._forgotten = self._forgotten, []
        return self.manifest_file.begin_removal(forgotten)

    def compact(self, compaction: Compaction | None = None) -> None:
        self._settle()
        self.seal()
        job = self.begin_compaction(compaction or Compaction(), alone=True)
        if job is not None:
            job.finish()

    def seal(self) -> None:
        """Flush, and put everything that is in memory into a segment."""
        self._settle()
        if self.growing_bytes():
            self.rotate_soon = True
            self.flush()
        while any(not generation.sealed for generation in self.generations):
            job = self.begin_maintenance()
            if job is None:
                break
            job.finish()

    def maintained(self, job: BaseJob) -> None:
        """A job has come to its end."""
        if job is self._merging:
            self._merging = None
        else:
            self._sealing = None
            self._trim_memory()

    def replace_segments(self, merged: list[Segment], new: Segment | None, *, drop: bool) -> None:
        """A new segment has what is in others, or in their stead; or what was in memory."""
        self.segments = spliced(self.segments, merged, new, drop=drop)
        self.epoch += 1
        self.manifest_file.retire(segment.path for segment in merged if drop)

    def remove_logs(self, up_to: int) -> None:
        """Logs whose changes are sealed."""
        numbers = ((name, log_number(name)) for name in self.files.names(self.directory))
        self.manifest_file.retire(
            f"{self.directory}/{name}" for name, number in numbers if number is not None and number <= up_to
        )
