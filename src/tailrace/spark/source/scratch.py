"""Directories that live as long as a process: Spark's checkpoint of a run, staged rows, the spool.

A process that is killed can't clean up, so the next one does: a directory carries a lock that its owner
holds, and the lock of a process that is gone is free. Several owners may share a place.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from ...errors import StoreLocked
from ...files import DiskFiles, remove_tree, temporary_folder, user_folder

__all__ = ["Scratch"]

_LOCK = ".tailrace-lock"
"""This file also marks a directory as ours: a place may be any directory of the user's."""


class Scratch:
    """A directory of this process's own in ``place``; None is a folder among the system's temporary files.
    Directories left there by processes that are gone are removed first.
    """

    def __init__(self, place: str | os.PathLike[str] | None, kind: str) -> None:
        where = user_folder() if place is None else Path(place)
        where.mkdir(parents=True, exist_ok=True)
        for lock in where.glob(f"{kind}-*/{_LOCK}"):
            _remove_if_left(lock.parent)
        made = temporary_folder(".new-", inside=where)
        self._held: DiskFiles | None = DiskFiles(made)
        self._held.lock(_LOCK)
        self.path = where / f"{kind}-{made.name[5:]}"  # locked first: others clean up under this name
        made.rename(self.path)
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete it with all that is in it."""
        if self._held is not None:
            atexit.unregister(self.remove)
            remove_tree(self.path)
            self._held.unlock()
            self._held = None


def _remove_if_left(directory: Path) -> None:
    files = DiskFiles(directory)
    try:
        files.lock(_LOCK)
    except (StoreLocked, OSError):
        return
    remove_tree(directory)
    files.unlock()
