"""Going on without files that were lost: only where somebody has said so.

What was persisted and is not there any more is an error that names the file. Whoever would rather go on with
the rest says so (``tailrace serve --accept-loss``); then each loss is a warning, files that can't be used are
set aside under another name, and every active vbucket begins a new branch, so that readers which have seen
what is lost roll back.
"""

from __future__ import annotations

import logging

from ..errors import StoreCorrupt
from ..files import Files

__all__ = ["LOST", "LossPolicy", "lost", "set_aside"]

LOST = "lost-"
"""How the names of files begin that were set aside."""

_log = logging.getLogger(__name__)


def lost(what: str) -> StoreCorrupt:
    """The error for a file that a start can do without, if it is told to."""
    return StoreCorrupt(
        f"{what}: restore it from a copy, or go on without what it held (tailrace serve --accept-loss)"
    )


class LossPolicy:
    """Whether a start goes on without what is lost, and what it found to be lost."""

    def __init__(self, *, accept: bool) -> None:
        self.accept = accept
        self.losses: list[StoreCorrupt] = []

    def report(self, loss: StoreCorrupt) -> None:
        """Raise the loss, or go on without what is lost."""
        if not self.accept:
            raise loss
        self.losses.append(loss)
        _log.warning("accepted loss: %s", str(loss).partition(": restore")[0])


def set_aside(files: Files, directory: str, names: list[str]) -> None:
    """Keep files under names that no start looks at."""
    for name in names:
        files.rename(f"{directory}/{name}", f"{directory}/{LOST}{name}")
    if names:
        files.sync_directory(directory)
