"""Who is called when a vbucket changes: the streams that read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..store.base import Bucket

__all__ = ["Watchers"]


class Watchers:
    """The callbacks of one bucket's vbuckets."""

    def __init__(self, store: Bucket) -> None:
        self._store = store
        self._watchers: dict[int, list[Callable[[], None]]] = {}
        self._waiting: dict[int, dict[Callable[[], None], None]] = {}

    def changed(self, vbucket: int) -> None:
        """A vbucket was created, deleted or changed its state: its readers look again."""
        self._attach(vbucket)
        self._changed(vbucket)

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
        """Call one that watches a vbucket once more, after its next change. A stream that has enough to do
        does not ask for that, and then writers pay nothing for it.
        """
        waiting = self._waiting.setdefault(vbucket, {})
        waiting[callback] = None
        if len(waiting) == 1:
            self._attach(vbucket)

    def _attach(self, vbucket: int) -> None:
        """Give the store's vbucket our callbacks, or take them away; it may be a new vbucket."""
        vbuckets = self._store.vbuckets
        stored = vbuckets[vbucket] if vbucket < len(vbuckets) else None
        if stored is not None:
            stored.on_change(partial(self._changed, vbucket) if vbucket in self._watchers else None)
            stored.on_append(partial(self._appended, vbucket) if vbucket in self._waiting else None)

    def _changed(self, vbucket: int) -> None:
        for callback in tuple(self._watchers.get(vbucket, ())):
            callback()

    def _appended(self, vbucket: int) -> None:
        waiting = self._waiting.pop(vbucket)
        self._attach(vbucket)
        for callback in waiting:
            callback()
