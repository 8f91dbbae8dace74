"""Changes on their way to the disk, and how much room there is for more of them."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DocumentRefused
from ..model import MAX_U64
from ..wire.codes import Status
from .base import StoreSettings
from .format import seqno_of, vbucket_of
from .journal import HybridClock

__all__ = ["WriteQueue"]


class WriteQueue:
    """All that a write needs beside its vbucket; the vbuckets of a bucket share it."""

    __slots__ = (
        "clock",
        "expirations",
        "frames",
        "max_value",
        "memory_bytes",
        "memory_limit",
        "notes",
        "refusals",
    )

    def __init__(self, settings: StoreSettings, clock: HybridClock) -> None:
        self.clock = clock
        self.frames: list[bytes] = []  # that are not on disk, in the order of their making
        self.notes: list[int] = []  # ... and their notes
        self.memory_bytes = 0  # of all frames in memory, those on disk too
        self.memory_limit = settings.memory_quota
        self.max_value = settings.max_value
        self.refusals = 0  # writes that `full` refused
        self.expirations = 0  # documents that were found expired

    def __bool__(self) -> bool:
        return bool(self.frames)

    def full(self) -> DocumentRefused:
        """The refusal of a write while more is in memory than the limit allows."""
        self.refusals += 1
        return DocumentRefused(Status.ETMPFAIL, "the disk is behind: memory_quota is used up")

    def take(self) -> tuple[list[bytes], list[int]]:
        """All of it, for a commit."""
        taken = self.frames, self.notes
        self.frames, self.notes = [], []
        return taken

    def give_back(self, frames: list[bytes], notes: list[int]) -> None:
        """A commit failed: these are the first again."""
        self.frames = frames + self.frames
        self.notes = notes + self.notes

    def forget_after(self, seqnos: Mapping[int, int]) -> None:
        """Vbuckets were rolled back to these seqnos; what came after them was never written."""
        left = [
            (frame, note)
            for frame, note in zip(self.frames, self.notes, strict=True)
            if seqno_of(frame) <= seqnos.get(vbucket_of(frame), MAX_U64)
        ]
        self.frames = [frame for frame, _ in left]
        self.notes = [note for _, note in left]
