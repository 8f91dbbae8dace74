"""A bucket's work in the background: group commits, maintenance, compactions that were asked for, expiry.

The store hands out jobs; `run_job` decides where they run: in a thread of a real node, inline in a
simulation. Everything here runs on the owner's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from ..clock import Clock
from ..errors import StoreError
from ..store.base import Bucket, Compaction, Job
from ..wire.codes import VBucketState
from .events import EventLog
from .settings import Settings
from .stats import Histogram

__all__ = ["BackgroundWork", "RunJob", "run_inline"]

log = logging.getLogger("tailrace.server")

RunJob: TypeAlias = Callable[[Job, Callable[[], None]], None]
"""Run a job, here or elsewhere, then call back on the owner's thread."""

Done: TypeAlias = Callable[[StoreError | None], None]

_RETRY_S = 1.0
"""Between two tries while the disk refuses; the queue grows meanwhile, up to the quota."""

_MIN_MAINTENANCE_S = 1.0
"""Between two looks for maintenance that no job has triggered."""

_REST_S = 10.0
"""Without a commit, before changes that are on disk leave memory."""

_MAX_SEALING = 16
_PAGER_BATCH = 1_000


def run_inline(job: Job, done: Callable[[], None]) -> None:
    """Run a job at once: for simulations and tests."""
    job.run()
    done()


class BackgroundWork:
    """The jobs and timers of one bucket."""

    def __init__(
        self, store: Bucket, settings: Settings, clock: Clock, run_job: RunJob, events: EventLog
    ) -> None:
        self.flush_wanted = False
        """A request waits for the disk: `settle` at the end of this batch of requests."""
        self.disk_is_full = False
        """Set by the fault kit: nothing is written."""
        self.flush_times = Histogram()
        self.flush_failures = 0
        self.back_pressure = BackPressure(store, events)
        self._events = events
        self._store = store
        self._flush_interval = settings.flush_interval
        self._clock = clock
        self._run_job = run_job
        self._flushing: Job | None = None
        self._waiting_flush: list[Done] = []  # for the next flush
        self._flush_trouble = _Trouble("flush", store.name, events)
        self._flush_at = clock.monotonic() + settings.flush_interval
        self._maintenance = _Maintenance(_Trouble("maintenance", store.name, events))
        self._maintenance_s = max(settings.quiet_time, _MIN_MAINTENANCE_S)
        self._maintain_at = clock.monotonic() + self._maintenance_s
        self._removing: set[Job] = set()
        self._exclusive: deque[Callable[[], None]] = deque()
        self._pager = _ExpiryPager(store, settings.expiry_pager_interval, clock.monotonic())
        store.remove_later()

    @property
    def disk_refuses(self) -> bool:
        """The last commit or maintenance failed: nobody knows when the disk will accept something again."""
        return self.flush_fails or self.maintenance_fails

    @property
    def flush_fails(self) -> bool:
        """The last commit failed: changes stay in memory."""
        return self._flush_trouble.is_on

    @property
    def maintenance_fails(self) -> bool:
        """The last sealing or merging failed; commits may go on meanwhile."""
        return self._maintenance.trouble.is_on

    @property
    def busy(self) -> bool:
        """A job is under way that may change the store."""
        return self._flushing is not None or bool(self._maintenance.jobs)

    @property
    def has_jobs(self) -> bool:
        """A job is under way, of any kind."""
        return self.busy or bool(self._removing)

    def next_timer(self) -> float:
        """When `handle_timer` has something to do."""
        return min(self._flush_at, self._pager.due_at, self._maintain_at)

    def handle_timer(self, now: float) -> None:
        """Begin what is due."""
        if now >= self._flush_at:
            self._flush_at = now + self._flush_interval
            self.back_pressure.look()
            self._begin_flush()
        if now >= self._pager.due_at:
            self._pager.run(now)
        if now >= self._maintain_at:
            # Jobs trigger maintenance, but without writes there are none: what is due because it is quiet, or
            # was tried and failed, is found here.
            self._maintain_at = now + self._maintenance_s
            if now - self._store.last_change >= _REST_S:
                self._use_the_quiet()
            self._advance()

    def _use_the_quiet(self) -> None:
        """Nobody writes: free the memory that only makes streams faster."""
        self._store.rest()
        self._remove_files()
        if self._store.rotate_soon:
            self._begin_flush()

    def settle(self) -> None:
        """End a batch of requests: one commit for all that asked for one, or because so much waits to be
        written that it would fill the memory before the interval is over.
        """
        if self.flush_wanted or (not self._flush_trouble.is_on and self._store.flush_due):
            self._begin_flush()

    def after_flush(self, done: Done) -> None:
        """Call back when everything that is written now has been flushed, or could not be."""
        self._waiting_flush.append(done)
        self.flush_wanted = True
        if self._flushing is None:
            self._begin_flush()

    def compact(self, compaction: Compaction, done: Done) -> None:
        """Compact in the background what is written so far; call back when it is done."""

        def flushed(error: StoreError | None) -> None:
            if error is not None:
                done(error)
                return
            self._maintenance.compactions.append((compaction, done))
            self._advance()

        self._store.rotate_soon = True
        self.after_flush(flushed)

    def exclusively(self, action: Callable[[], None]) -> None:
        """Call when no job is under way (at once if there is none): for rollbacks and all else that rewrites
        history.
        """
        self._exclusive.append(action)
        self._advance()

    def _begin_flush(self) -> None:
        if self._flushing is not None or self._exclusive:
            return  # what is wanted now begins when the job under way is finished
        self.flush_wanted = False
        waiting, self._waiting_flush = self._waiting_flush, []
        if self.disk_is_full:
            self._refuse(waiting, StoreError("no space left on the disk, says the fault kit"))
            return
        job = self._store.begin_flush()
        if job is None:
            if self._store.persistence:
                self._flush_trouble.end()  # nothing waits for the disk any more
            for done in waiting:
                done(None)
            return
        self._flushing = job
        started = self._clock.monotonic()
        self._run_job(job, partial(self._flushed, job, waiting, started))

    def _refuse(self, waiting: list[Done], error: StoreError) -> None:
        self._refused_by_disk(error)
        for done in waiting:
            done(error)

    def _refused_by_disk(self, error: StoreError) -> None:
        """Changes stay in memory, and the flush is tried again."""
        self.flush_failures += 1
        self._flush_trouble.met(error)
        self._flush_at = self._clock.monotonic() + max(_RETRY_S, self._flush_interval)
        self.flush_wanted = False

    def _flushed(self, job: Job, waiting: list[Done], started: float) -> None:
        self._flushing = None
        failure: StoreError | None = None
        try:
            job.finish()
        except StoreError as error:
            failure = error
            self._refused_by_disk(error)
        else:
            self._flush_trouble.end()
            self.flush_times.add(self._clock.monotonic() - started)
        for done in waiting:
            done(failure)
        self._advance()
        if failure is None and (self.flush_wanted or self._waiting_flush):
            self._begin_flush()

    def _advance(self) -> None:
        """A job has ended or work has come: begin what was waiting for that."""
        while self._exclusive and not self.busy:
            self._exclusive.popleft()()
        self._maintenance.failed = False
        while not self._exclusive and not self._maintenance.failed:
            next_job = self._next_job()
            if next_job is None:
                return
            job, done = next_job
            self._maintenance.jobs.add(job)
            self._run_job(job, partial(self._maintained, job, done))

    def _next_job(self) -> tuple[Job, Done | None] | None:
        """What can be begun now: a segment is sealed while others are merged, so it may be the second job."""
        # A compaction sees only what is sealed, so the maintenance that is due comes first; but not for ever,
        # because writers make more of it all the time.
        if not self._maintenance.compactions or self._maintenance.sealed < _MAX_SEALING:
            job = self._store.begin_maintenance()
            if job is not None:
                self._maintenance.sealed += bool(self._maintenance.compactions)
                return job, None
        while self._maintenance.compactions and not self._maintenance.jobs:
            self._maintenance.sealed = 0
            compaction, done = self._maintenance.compactions.popleft()
            job = self._store.begin_compaction(compaction)
            if job is not None:
                return job, done
            done(None)
        return None

    def _maintained(self, job: Job, done: Done | None) -> None:
        self._maintenance.jobs.discard(job)
        failure: StoreError | None = None
        try:
            job.finish()
        except StoreError as error:
            failure = error
            self._maintenance.failed = True  # so it is not begun again at once, wherever the job ran
            self._maintenance.trouble.met(error)
        else:
            self._maintenance.trouble.end()
        if done is not None and failure is None:
            self._events.record("compaction", level=logging.INFO, bucket=self._store.name)
        self._remove_files()
        if done is not None:
            done(failure)
        if failure is None or self._exclusive or self._maintenance.compactions:
            self._advance()
        if self.flush_wanted or self._waiting_flush:
            self._begin_flush()

    def _remove_files(self) -> None:
        """Remove files, but not on the owner's thread: a log of 64 MiB took 20 ms."""
        job = self._store.begin_removal()
        if job is not None:
            self._removing.add(job)
            self._run_job(job, partial(self._removed, job))

    def _removed(self, job: Job) -> None:
        job.finish()
        self._removing.discard(job)


class _Maintenance:
    """What is sealed and merged now, and what was asked for."""

    def __init__(self, trouble: _Trouble) -> None:
        self.trouble = trouble
        self.jobs: set[Job] = set()
        self.failed = False
        """The last job failed; it is not begun again at once."""
        self.compactions: deque[tuple[Compaction, Done]] = deque()
        self.sealed = 0
        """Jobs that the first of the compactions has waited for."""


class _Trouble:
    """The disk refuses something that is tried again and again. It is reported when that begins, when the
    reason changes, and when it is over: a line for each try would fill a disk that is full already.
    """

    def __init__(self, what: str, bucket: str, events: EventLog) -> None:
        self.is_on = False
        """The last try failed."""
        self._what = what
        self._bucket = bucket
        self._events = events
        self._reason: object = None
        self._tries = 0

    def met(self, error: StoreError) -> None:
        """A try failed."""
        # a message may name another file each time
        reason = type(error), getattr(error.__cause__, "errno", None)
        if not self.is_on or reason != self._reason:
            self._events.record(f"{self._what}_failed", level=logging.ERROR, bucket=self._bucket, error=error)
        self.is_on, self._reason = True, reason
        self._tries += 1

    def end(self) -> None:
        """A try succeeded."""
        if self.is_on:
            self.is_on = False
            self._events.record(
                f"{self._what}_recovered", level=logging.INFO, bucket=self._bucket, failed_tries=self._tries
            )
        self._tries = 0


class BackPressure:
    """Whether writes are refused because the disk is behind, checked at every flush."""

    def __init__(self, store: Bucket, events: EventLog) -> None:
        self.is_on = False
        self._store = store
        self._events = events
        self._seen = store.writes_refused

    def look(self) -> None:
        """Report when it begins, and when it ends."""
        refused = self._store.writes_refused
        is_on = refused > self._seen or (self.is_on and self._is_full())
        if is_on != self.is_on:
            self.is_on = is_on
            self._events.record(
                "back_pressure_on" if is_on else "back_pressure_off",
                bucket=self._store.name,
                memory_bytes=self._store.memory_bytes,
                writes_refused=refused,
            )
        self._seen = refused

    def _is_full(self) -> bool:
        return self._store.memory_bytes >= self._store.settings.memory_quota


class _ExpiryPager:
    """Looks for expired documents, a slice at a time: many of them must not stop the node."""

    def __init__(self, store: Bucket, interval_s: float, now: float) -> None:
        self.due_at = now + interval_s
        self._store = store
        self._interval_s = interval_s
        self._slices: Iterator[None] | None = None

    def run(self, now: float) -> None:
        """The next slice."""
        if self._slices is None:
            self._slices = self._paging()
        if next(self._slices, self) is self:
            self._slices = None
            self.due_at = now + self._interval_s

    def _paging(self) -> Iterator[None]:
        for vbucket in list(self._store):
            while vbucket.state == VBucketState.ACTIVE and vbucket.expire_due(_PAGER_BATCH) == _PAGER_BATCH:
                yield
            if vbucket.id % 16 == 15:
                yield
