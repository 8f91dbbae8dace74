"""The segments of a bucket, and the manifest file that says which of them count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from ..files import File, Files
from .log import log_number
from .manifest_file import ManifestFile, spliced
from .merging import Losses
from .segment import Segment, segment_name

__all__ = ["SealedSegments"]


class SealedSegments:
    """Sealed files of frames, oldest first."""

    def __init__(self, files: Files, directory: str) -> None:
        self.files = files
        self.directory = directory
        self.segments: list[Segment] = []
        self.epoch = 0  # rises whenever `segments` or a clip changes
        self.manifest_file = ManifestFile(files, directory)
        self.next_number = 1
        self.is_incomplete = False  # a segment was lost, and what is left is not yet rewritten
        self.untaken_losses: dict[int, Losses] = {}
        """Of a merge that the manifest file knows about and the vbuckets don't yet."""
        self.retained = 0
        """Superseded frames that the last merge of everything left."""
        self._droppable = (-1, 0)  # the epoch when they were counted, and how many

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def frames(self) -> int:
        return sum(segment.frames for segment in self.segments)

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(segment.size for segment in self.segments)

    def take_number(self) -> int:
        """The number of a new segment."""
        self.next_number += 1
        return self.next_number - 1

    def write(self, number: int, write: Callable[[File], None]) -> Segment:
        """A new segment file, whole and durable, and open for reading."""
        path = f"{self.directory}/{segment_name(number)}"
        file = self.files.create(path)
        try:
            write(file)
        finally:
            file.close()
        self.files.sync_directory(self.directory)
        return Segment(self.files, path)

    def remove(self, number: int) -> None:
        """A segment file that never counted, if it is there."""
        with contextlib.suppress(OSError):
            self.files.unlink(f"{self.directory}/{segment_name(number)}")

    def replace(self, merged: list[Segment], new: Segment | None, *, drop: bool) -> None:
        """Put a new segment behind those that were merged into it, or with ``drop`` in their place; without
        any merged, behind all.
        """
        self.segments = spliced(self.segments, merged, new, drop=drop)
        self.epoch += 1
        self.manifest_file.retire(segment.path for segment in merged if drop)

    def remove_logs(self, up_to: int) -> None:
        """Remove the logs up to this number: their changes are sealed."""
        numbers = ((name, log_number(name)) for name in self.files.names(self.directory))
        self.manifest_file.retire(
            f"{self.directory}/{name}" for name, number in numbers if number is not None and number <= up_to
        )

    # Rollbacks.

    def clip(self, vbucket: int, seqno: int) -> None:
        """What the segments have of a vbucket counts only up to a seqno."""
        for segment in self.segments:
            segment.clip(vbucket, seqno)
        self.epoch += 1

    def clips(self) -> list[dict[int, int]]:
        """The clips as they are now, for `set_clips`."""
        return [dict(segment.clips) for segment in self.segments]

    def set_clips(self, clips: list[dict[int, int]]) -> None:
        for segment, old_clips in zip(self.segments, clips, strict=True):
            segment.set_clips(old_clips)
        self.epoch += 1

    # Merging.

    @property
    def superseded(self) -> int:
        """How many frames have a newer one of their key, itself in a segment."""
        return sum(int(segment.directory["pairs"].sum()) for segment in self.segments)

    def droppable(self, vbucket_count: int, history_changes: int) -> int:
        """About how many frames a merge of everything would drop: superseded ones beyond the history, and
        clipped ones. Called after each commit.
        """
        if self._droppable[0] != self.epoch:
            self._droppable = self.epoch, self._count_droppable(vbucket_count, history_changes)
        return self._droppable[1]

    def note_retained(self, vbucket_count: int, history_changes: int) -> None:
        """Everything was merged: what is superseded and still here is retained."""
        self.retained = self.droppable(vbucket_count, history_changes)

    def _count_droppable(self, vbucket_count: int, history_changes: int) -> int:
        pairs = np.zeros(vbucket_count, np.int64)
        clipped = 0
        for segment in self.segments:
            np.add.at(pairs, segment.directory["vbucket"], segment.directory["pairs"].astype(np.int64))
            for vbucket in segment.clips:
                piece = segment.piece(vbucket)
                rows = segment.directory["vbucket"] == vbucket
                clipped += int(segment.directory["count"][rows].sum()) - (piece.count if piece else 0)
        return int(np.maximum(pairs - history_changes, 0).sum()) + clipped
