"""A bucket as the node serves it: the store's bucket, its work in the background, and its watchers."""

from __future__ import annotations

import json

from ..clock import Clock
from ..protocol.tap.clients import TapClients
from ..store.base import Bucket
from ..store.collections import Manifest
from .background import BackgroundWork, RunJob, run_inline
from .durability import DurableWrites
from .events import EventLog
from .former_actives import FormerActives
from .range_scans import RangeScans
from .served_map import ServedMap
from .settings import Settings
from .watchers import Watchers

__all__ = ["RunJob", "ServedBucket", "run_inline"]

_CACHE_ENTRY_BYTES = 400
"""About what a cached answer takes beside its value: key, heads, their places in tuple and dict."""


class ServedBucket:
    """One bucket of the node; everything here runs on the owner's thread."""

    def __init__(
        self, store: Bucket, settings: Settings, clock: Clock, run_job: RunJob, events: EventLog
    ) -> None:
        self.store = store
        self.name = store.name
        self.work = BackgroundWork(store, settings, clock, run_job, events)
        self.failovers = 0
        """VBuckets that began a new branch since the start."""
        self.lost_changes = 0
        """Changes that were lost with that."""
        self.watchers = Watchers(store)
        self.collections = ServedCollections(store)
        self.answers = AnswerCache(store, settings.answer_cache)
        self.tap = TapClients(store, settings.max_tap_clients)
        self.durability = DurableWrites(store, self.work)
        self.former_actives = FormerActives(store, clock, settings.former_active_silence)
        self.range_scans = RangeScans(settings.max_range_scans, settings.range_scan_lifetime)
        self.map: ServedMap | None = None
        """As the coordinator set it; None: the node makes its own."""
        self.xattrs_seen = any(vbucket.high_seqno for vbucket in store)
        """Documents may have xattrs, which a plain set must keep; True if there were changes at the start."""
        self.held_vbuckets: set[int] = set()
        """Being taken over by another node: writes are refused for now."""
        self.receiving: dict[int, object] = {}
        """Which connection receives a vbucket from its active."""
        self.max_json_check = settings.max_json_check
        self._memory_quota = settings.memory_quota

    def memory_is_short(self) -> bool:
        """Whether the changes in memory have reached the quota."""
        return self.store.memory_bytes >= self._memory_quota

    def backfills_wait(self) -> bool:
        """Whether backfills should wait to begin: the disk is behind and will soon catch up. They don't wait
        for a disk that accepts nothing at all: readers might wait for ever.

        Rule: docs/spec/dcp.md#stream-request-16.
        """
        return self.memory_is_short() and self.store.persistence and not self.work.disk_refuses

    def vbucket_changed(self, vbucket: int) -> None:
        """A vbucket was created, deleted or changed its state."""
        self.durability.vbucket_changed(vbucket)
        self.former_actives.vbucket_changed(vbucket)
        self.range_scans.vbucket_changed(vbucket)
        self.watchers.changed(vbucket)


class ServedCollections:
    """A bucket's manifest, and what every request asks of it."""

    def __init__(self, store: Bucket) -> None:
        self._store = store
        self.reload()

    def reload(self) -> None:
        """Take over the store's manifest, which is another one."""
        self.manifest = Manifest.parse(json.dumps(self._store.manifest).encode())
        self._max_ttls_s = {
            collection.uid: collection.max_ttl or 0
            for scope in self.manifest.scopes
            for collection in scope.collections
        }
        self.is_plain = self._max_ttls_s.get(0) == 0
        """The default collection is there and has no maximum expiry."""

    def __contains__(self, collection: int) -> bool:
        return collection in self._max_ttls_s

    def max_ttl_s(self, collection: int) -> int:
        """The longest that a document of the collection may live; 0: for ever."""
        return self._max_ttls_s.get(collection, 0)


class AnswerCache:
    """Which ready-made answers to gets may be kept; the store has them, by key."""

    def __init__(self, store: Bucket, limit_bytes: int) -> None:
        self.largest = 1
        """No answer is larger than this, in bytes."""
        self._store = store
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def may_keep(self, size: int) -> bool:
        """Whether an answer of this size may be kept; when there are too many all are forgotten."""
        held = size + _CACHE_ENTRY_BYTES
        if held * 16 > self._limit_bytes:
            return False
        self._bytes += held
        if self._bytes > self._limit_bytes:
            self._store.cache.clear()
            self._bytes, self.largest = held, 1
        self.largest = max(self.largest, size)
        return True
