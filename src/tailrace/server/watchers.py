"""What is called when a vbucket changes: the streams that read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..store.base import Bucket, VBucket

__all__ = ["Watchers"]


class Watchers:
    """The callbacks of one bucket's vbuckets."""

    def __init__(self, store: Bucket) -> None:
        self._store = store
        self._watchers: dict[int, list[Callable[[], None]]] = {}
        self._waiting: dict[int, dict[Callable[[], None], None]] = {}

    def changed(self, vbucket: int) -> None:
        """A vbucket was created, deleted or changed its state: its readers look again."""
        self._attach_watchers(vbucket)
        self._attach_waiting(vbucket)
        self._changed(vbucket)

    def watch(self, vbucket: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever a vbucket's history, state or existence changes; returns what to call to end
        it.
        """
        watchers = self._watchers.setdefault(vbucket, [])
        watchers.append(callback)
        if len(watchers) == 1:
            self._attach_watchers(vbucket)
        return partial(self._unwatch, vbucket, callback)

    def _unwatch(self, vbucket: int, callback: Callable[[], None]) -> None:
        watchers, waiting = self._watchers.get(vbucket, []), self._waiting.get(vbucket, {})
        if callback in watchers:
            watchers.remove(callback)
            if not watchers:
                del self._watchers[vbucket]
                self._attach_watchers(vbucket)
            if callback in waiting:
                del waiting[callback]
                if not waiting:
                    del self._waiting[vbucket]
                    self._attach_waiting(vbucket)

    def await_append(self, vbucket: int, callback: Callable[[], None]) -> None:
        """Call a vbucket's watcher once, after the next change. A stream that has enough to do does not ask
        for that, and then writers pay nothing for it.
        """
        waiting = self._waiting.setdefault(vbucket, {})
        waiting[callback] = None
        if len(waiting) == 1:
            self._attach_waiting(vbucket)

    def _attach_watchers(self, vbucket: int) -> None:
        """Give the store's vbucket, which may be a new one, the callback of its watchers, or take it away."""
        stored = self._stored(vbucket)
        if stored is not None:
            stored.on_change(partial(self._changed, vbucket) if vbucket in self._watchers else None)

    def _attach_waiting(self, vbucket: int) -> None:
        """The same for those that wait for its next change."""
        stored = self._stored(vbucket)
        if stored is not None:
            stored.on_append(partial(self._appended, vbucket) if vbucket in self._waiting else None)

    def _stored(self, vbucket: int) -> VBucket | None:
        vbuckets = self._store.vbuckets
        return vbuckets[vbucket] if vbucket < len(vbuckets) else None

    def _changed(self, vbucket: int) -> None:
        for callback in tuple(self._watchers.get(vbucket, ())):
            callback()

    def _appended(self, vbucket: int) -> None:
        waiting = self._waiting.pop(vbucket)
        self._attach_waiting(vbucket)
        for callback in waiting:
            callback()
