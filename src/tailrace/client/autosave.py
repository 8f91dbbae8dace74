"""When the positions of a source are saved: when there is time, and otherwise every second."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from .progress import SavedPosition
from .state_store import StateStore

__all__ = ["Autosave"]

_AUTOSAVE_S = 1.0


class Autosave:
    """The state of a source, loaded and saved in another thread. Without a store nothing is kept."""

    def __init__(self, store: StateStore | None, *, is_automatic: bool) -> None:
        self._store = store
        self._is_automatic = is_automatic
        self._saved_at = 0.0
        self._loaded: Mapping[int, SavedPosition] = {}
        self._last_saved: Mapping[int, SavedPosition] = {}
        self._has_more = False

    async def load(self, bucket_uuid: str) -> Mapping[int, SavedPosition]:
        """What an earlier run saved."""
        if self._store is None:
            return {}
        if hasattr(self._store, "bucket_uuid"):
            self._store.bucket_uuid = bucket_uuid
        self._loaded = await asyncio.get_running_loop().run_in_executor(None, self._store.load)
        return self._loaded

    def moved(self) -> None:
        """Note that the application has more than what is saved."""
        self._has_more = True

    @property
    def is_wanted(self) -> bool:
        """Whether there is something to save automatically."""
        return self._store is not None and self._has_more and self._is_automatic

    def is_overdue(self, now: float) -> bool:
        """Whether nothing was saved for a while."""
        return now - self._saved_at >= _AUTOSAVE_S

    async def save(self, positions: Mapping[int, SavedPosition], now: float) -> None:
        """Save positions, unless no snapshot has become whole since the last time; raise if that fails."""
        if self._store is None:
            return
        self._has_more = False
        self._saved_at = now
        if all(self._last_saved.get(vbucket) is position for vbucket, position in positions.items()):
            return
        await self._write(self._store, positions)

    async def save_starts(self, starts: Mapping[int, SavedPosition]) -> None:
        """Save where vbuckets that start "now" begin, together with what is saved already.

        This needs no request and happens before anything is handed out: after a kill, the next run would
        otherwise start at a later "now" and miss what came in between.
        """
        if starts and self._store is not None:
            await self._write(self._store, {**(self._last_saved or self._loaded), **starts})

    async def _write(self, store: StateStore, positions: Mapping[int, SavedPosition]) -> None:
        saving = asyncio.get_running_loop().run_in_executor(None, store.save, positions)
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await asyncio.wait([saving])  # the next reader must not run into an unfinished save
            raise
        self._last_saved = positions
