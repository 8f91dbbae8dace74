"""A bucket as the node serves it: the store's bucket, its work in the background, and who watches it.

The work in the background is group commits, maintenance, compactions that were asked for, and the expiry
pager. The store hands out jobs; `run_job` decides where they run: in a thread of a real node, inline in a
simulation. Everything here runs on the owner's thread.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from ..clock import Clock
from ..errors import StoreError
from ..protocol.tap.clients import TapClients
from ..store.base import Bucket, Compaction, Job
from ..store.collections import Manifest
from ..wire.codes import VBucketState
from .durability import CopyTracker
from .settings import Settings
from .stats import Histogram
from .topology import ServedMap

__all__ = ["RunJob", "ServedBucket", "run_inline"]

log = logging.getLogger("tailrace.server")

RunJob: TypeAlias = Callable[[Job, Callable[[], None]], None]
"""Run a job, here or elsewhere, then call back on the owner's thread."""

Done: TypeAlias = Callable[[StoreError | None], None]

_RETRY_S = 1.0
"""Between two tries while the disk refuses; the queue grows meanwhile, up to the quota."""

_CACHE_ENTRY_BYTES = 400
"""About what a cached answer takes beside its value: key, heads, their places in tuple and dict."""

_MIN_MAINTENANCE_S = 1.0
"""Between two looks for maintenance that no job has led to."""

_REST_S = 10.0
"""Without a commit, before changes that are on disk leave memory."""

_MAX_SEALING = 16
_PAGER_BATCH = 1_000


def run_inline(job: Job, done: Callable[[], None]) -> None:
    """Run a job at once: for simulations and tests."""
    job.run()
    done()


class ServedBucket:
    """One bucket of the node."""

    def __init__(self, store: Bucket, settings: Settings, clock: Clock, run_job: RunJob) -> None:
        self.store = store
        self.name = store.name
        self.tap = TapClients(store, settings.max_tap_clients)
        self.map: ServedMap | None = None
        """As the coordinator set it; None: the node makes its own."""
        self.plain = True
        """The default collection is there and has no maximum expiry."""
        self.xattrs_seen = any(one.high_seqno for one in store)
        """A document may have xattrs, which a plain set must keep; unknown of what was there before us."""
        self.held_vbuckets: set[int] = set()
        """Being taken over by another node: writes wait."""
        self.durability = CopyTracker()
        self.receiving: dict[int, object] = {}
        """Which connection receives a vbucket from its active."""
        self.flush_times = Histogram()
        self.flush_failures = 0
        self.max_json_check = settings.max_json_check
        self.largest_answer = 1
        """What the largest of the ready-made answers in the store's cache may have, in bytes."""
        self._cached_bytes = 0
        self._settings = settings
        self._clock = clock
        self._run_job = run_job
        self._watchers: dict[int, list[Callable[[], None]]] = {}
        self._waiting: dict[int, dict[Callable[[], None], None]] = {}
        self._flushing: Job | None = None
        self._disk_refuses = False
        self._maintaining: set[Job] = set()
        self._maintenance_failed = False
        self._removing: set[Job] = set()
        store.remove_later()
        self._flush_at = clock.monotonic() + settings.flush_interval
        self.flush_wanted = False
        """Somebody waits for the disk: `settle` at the end of this batch of requests."""
        self._waiting_flush: list[Done] = []  # for the next flush to begin
        self._compactions: deque[tuple[Compaction, Done]] = deque()
        self._sealing = 0  # jobs of maintenance that the first of them has waited for
        self._exclusive: deque[Callable[[], None]] = deque()
        self._pager_at = clock.monotonic() + settings.expiry_pager_interval
        self._maintenance_s = max(settings.quiet_time, _MIN_MAINTENANCE_S)
        self._maintain_at = clock.monotonic() + self._maintenance_s
        self._pager: Iterator[None] | None = None

        self.manifest_changed()

    # collections

    def manifest_changed(self) -> None:
        """Look up again what every request asks for."""
        self.manifest = Manifest.parse(json.dumps(self.store.manifest).encode())
        self._max_ttls_s = {
            one.uid: one.max_ttl or 0 for scope in self.manifest.scopes for one in scope.collections
        }
        self.plain = self._max_ttls_s.get(0) == 0

    def has_collection(self, collection: int) -> bool:
        """Whether the manifest has a collection of this id."""
        return collection in self._max_ttls_s

    def max_ttl_s(self, collection: int) -> int:
        """The longest that a document of the collection may live; 0: for ever."""
        return self._max_ttls_s.get(collection, 0)

    def may_cache(self, size: int) -> bool:
        """Whether an answer of this size may be kept; when there are too many all are forgotten."""
        held, limit = size + _CACHE_ENTRY_BYTES, self._settings.answer_cache
        if held * 16 > limit:
            return False
        self._cached_bytes += held
        if self._cached_bytes > limit:
            self.store.cache.clear()
            self._cached_bytes, self.largest_answer = held, 1
        self.largest_answer = max(self.largest_answer, size)
        return True

    def memory_is_short(self) -> bool:
        """Changes wait for the disk up to the quota: no time to begin something large."""
        return self.store.memory_bytes >= self._settings.memory_quota

    @property
    def busy(self) -> bool:
        """A job is under way that may change the store."""
        return self._flushing is not None or bool(self._maintaining)

    @property
    def has_jobs(self) -> bool:
        """A job is under way, of whatever kind."""
        return self.busy or bool(self._removing)

    # readers

    def watch(self, vbucket: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever the history, state or existence of a vbucket changed; returns what ends it."""
        watchers = self._watchers.setdefault(vbucket, [])
        watchers.append(callback)
        if len(watchers) == 1:
            self._attach(vbucket)
        return partial(self._unwatch, vbucket, callback)

    def _unwatch(self, vbucket: int, callback: Callable[[], None]) -> None:
        watchers, waiting = self._watchers.get(vbucket, []), self._waiting.get(vbucket, {})
        if callback in watchers:
            watchers.remove(callback)
            waiting.pop(callback, None)
            if not watchers:
                del self._watchers[vbucket]
            if not waiting:
                self._waiting.pop(vbucket, None)
            self._attach(vbucket)

    def await_append(self, vbucket: int, callback: Callable[[], None]) -> None:
        """Call one that watches a vbucket once more, after its next change. Whoever has enough to do does not
        wait for that, and then writers pay nothing for him.
        """
        waiting = self._waiting.setdefault(vbucket, {})
        waiting[callback] = None
        if len(waiting) == 1:
            self._attach(vbucket)

    def _attach(self, vbucket: int) -> None:
        """Give the store's vbucket our callbacks, or take them away; it may be a new vbucket."""
        found = self.store.vbuckets[vbucket] if vbucket < len(self.store.vbuckets) else None
        if found is not None:
            found.on_change(partial(self._changed, vbucket) if vbucket in self._watchers else None)
            found.on_append(partial(self._appended, vbucket) if vbucket in self._waiting else None)

    def _changed(self, vbucket: int) -> None:
        for callback in tuple(self._watchers.get(vbucket, ())):
            callback()

    def _appended(self, vbucket: int) -> None:
        waiting = self._waiting.pop(vbucket)
        self._attach(vbucket)
        for callback in waiting:
            callback()

    def vbucket_changed(self, vbucket: int) -> None:
        """A vbucket was created, deleted or changed its state: its readers look again."""
        self.durability.vbucket_changed(vbucket)
        self._attach(vbucket)
        self._changed(vbucket)

    # work in the background

    def next_timer(self) -> float:
        """When `handle_timer` has something to do."""
        return min(self._flush_at, self._pager_at, self._maintain_at)

    def handle_timer(self, now: float) -> None:
        """Begin what is due."""
        if now >= self._flush_at:
            self._flush_at = now + self._settings.flush_interval
            self._begin_flush()
        if now >= self._pager_at:
            self._page(now)
        if now >= self._maintain_at:
            # Jobs lead to maintenance, but nobody who stops writing makes any: what is due because it is
            # quiet, or was tried and failed, is found here.
            self._maintain_at = now + self._maintenance_s
            if now - self.store.last_change >= _REST_S:
                self._rest()
            self._advance()

    def _rest(self) -> None:
        """Nobody writes: the memory that only makes streams faster goes back."""
        self.store.rest()
        self._remove_files()
        if self.store.rotate_soon:
            self._begin_flush()

    def settle(self) -> None:
        """The end of a batch of requests: one commit for all that asked for one, or because there is so much
        to write that it would fill the memory before the interval is over.
        """
        if self.flush_wanted or (not self._disk_refuses and self.store.flush_due):
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
            self._compactions.append((compaction, done))
            self._advance()

        self.store.rotate_soon = True
        self.after_flush(flushed)

    def exclusively(self, action: Callable[[], None]) -> None:
        """Call when no job is under way (at once if there is none): rollbacks and what else rewrites
        history.
        """
        self._exclusive.append(action)
        self._advance()

    def _begin_flush(self) -> None:
        if self._flushing is not None or self._exclusive:
            return  # what is wanted now is taken up when the job under way is finished
        self.flush_wanted = False
        waiting, self._waiting_flush = self._waiting_flush, []
        job = self.store.begin_flush()
        if job is None:
            for done in waiting:
                done(None)
            return
        self._flushing = job
        started = self._clock.monotonic()
        self._run_job(job, partial(self._flushed, job, waiting, started))

    def _flushed(self, job: Job, waiting: list[Done], started: float) -> None:
        self._flushing = None
        failure: StoreError | None = None
        try:
            job.finish()
        except StoreError as error:
            failure = error
            self._disk_refuses = True
            self.flush_failures += 1
            log.error("bucket %s: changes could not be written and are kept in memory: %s", self.name, error)
            self._flush_at = self._clock.monotonic() + max(_RETRY_S, self._settings.flush_interval)
            self.flush_wanted = False
        else:
            self._disk_refuses = False
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
        self._maintenance_failed = False
        while not self._exclusive and not self._maintenance_failed:
            found = self._next_job()
            if found is None:
                return
            job, done = found
            self._maintaining.add(job)
            self._run_job(job, partial(self._maintained, job, done))

    def _next_job(self) -> tuple[Job, Done | None] | None:
        """What can be begun now: a segment is sealed while others are merged, so it may be the second job."""
        # A compaction sees only what is sealed, so the maintenance that is due comes first; but not for ever,
        # because writers make more of it all the time.
        if not self._compactions or self._sealing < _MAX_SEALING:
            job = self.store.begin_maintenance()
            if job is not None:
                self._sealing += bool(self._compactions)
                return job, None
        while self._compactions and not self._maintaining:
            self._sealing = 0
            compaction, done = self._compactions.popleft()
            job = self.store.begin_compaction(compaction)
            if job is not None:
                return job, done
            done(None)
        return None

    def _maintained(self, job: Job, done: Done | None) -> None:
        self._maintaining.discard(job)
        failure: StoreError | None = None
        try:
            job.finish()
        except StoreError as error:
            failure = error
            self._maintenance_failed = True  # not at once again, wherever the job ran
            log.error("bucket %s: maintenance failed and will be tried again: %s", self.name, error)
        self._remove_files()
        if done is not None:
            done(failure)
        if failure is None or self._exclusive or self._compactions:
            self._advance()
        if self.flush_wanted or self._waiting_flush:
            self._begin_flush()

    def _remove_files(self) -> None:
        """Not on the owner's thread: removing a log of 64 MiB took 20 ms."""
        job = self.store.begin_removal()
        if job is not None:
            self._removing.add(job)
            self._run_job(job, partial(self._removed, job))

    def _removed(self, job: Job) -> None:
        job.finish()
        self._removing.discard(job)

    def _page(self, now: float) -> None:
        """A slice of the expiry pager: many expired documents must not stop the node."""
        if self._pager is None:
            self._pager = self._paging()
        if next(self._pager, self) is self:
            self._pager = None
            self._pager_at = now + self._settings.expiry_pager_interval

    def _paging(self) -> Iterator[None]:
        for vbucket in list(self.store):
            while vbucket.state == VBucketState.ACTIVE and vbucket.expire_due(_PAGER_BATCH) == _PAGER_BATCH:
                yield
            if vbucket.id % 16 == 15:
                yield
