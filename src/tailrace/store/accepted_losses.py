"""Going on without files that were lost: only if the operator says so.

A loss of what was persisted is an error that names the file. With ``tailrace serve --accept-loss`` a start
goes on with the rest: each loss is a warning, files that can't be used are set aside under another name, and
every active vbucket begins a new branch, so that readers that have seen what is lost roll back.
"""

from __future__ import annotations

import logging

from ..errors import StoreCorrupt
from ..files import Files

__all__ = ["LOST", "LossPolicy", "lost", "set_aside"]

LOST = "lost-"
"""The prefix of the names of files that were set aside."""

_log = logging.getLogger(__name__)


def lost(what: str) -> StoreCorrupt:
    """The error for a loss that a start can accept, if told to."""
    return StoreCorrupt(
        f"{what}: restore it from a copy, or go on without what it held (tailrace serve --accept-loss)"
    )


class LossPolicy:
    """Whether a start continues without what is lost, and what it found to be lost."""

    def __init__(self, *, accept: bool) -> None:
        self.accept = accept
        self.losses: list[StoreCorrupt] = []

    def report(self, loss: StoreCorrupt) -> None:
        """Raise the loss, or continue without what is lost."""
        if not self.accept:
            raise loss
        self.losses.append(loss)
        _log.warning("accepted loss: %s", str(loss).partition(": restore")[0])


def set_aside(files: Files, directory: str, names: list[str]) -> None:
    """Rename files so that no start looks at them."""
    for name in names:
        files.rename(f"{directory}/{name}", f"{directory}/{LOST}{name}")
    if names:
        files.sync_directory(directory)
