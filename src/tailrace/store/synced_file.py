"""The SYNCED file of a bucket: how far its newest log was durable, noted outside that log.

A log says how much of the one before it counts, but nothing says that about the newest: if it is gone,
emptied or restored from an old copy, what is left looks like a store that was stopped earlier. So a mark is
written after each commit. It is appended without a sync, which costs microseconds, and it may be lost in a
power cut; what it says was durable before it was written, so it never claims too much. At a clean stop it is
synced.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from ..files import File, Files
from .format import MARK, MARK_MAGIC, is_sound_to_end, with_crc_at_end

__all__ = ["SYNCED", "Mark", "SyncedFile"]

SYNCED = "SYNCED"


class Mark(NamedTuple):
    """The durable end of a bucket's logs."""

    log: int
    valid_bytes: int
    next_batch: int


class SyncedFile:
    """The marks of one bucket. Each new log replaces the file, so that it stays smaller than the log."""

    def __init__(self, files: Files, directory: str) -> None:
        self.path = f"{directory}/{SYNCED}"
        self.is_written = False
        """Whether a mark of this run is durable."""
        self._files = files
        self._directory = directory
        self._file: File | None = None

    def read(self) -> Mark | None:
        """The last mark that can be read, None if there is none; FileNotFoundError if there is no file.

        After a power cut any of the marks may be missing or garbage.
        """
        file = self._files.open(self.path)
        data = file.read(file.size, 0)
        file.close()
        marks = [_decode(data[at : at + MARK.size]) for at in range(0, len(data), MARK.size)]
        return max(
            (mark for mark in marks if mark is not None), key=lambda mark: mark.next_batch, default=None
        )

    def write(self, mark: Mark) -> None:
        """Note what has just become durable. After an OSError the marks before it still hold, and the next
        one begins a new file.
        """
        try:
            if self._file is None:
                self._file = self._replace(mark)
                self.is_written = True
            else:
                self._file.append([_encode(mark)])
        except OSError:
            self.close()

    def close(self, *, sync: bool = False) -> None:
        """The next mark begins a new file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                if sync:
                    file.sync()
            file.close()

    def _replace(self, mark: Mark) -> File:
        """As `files.replace_file`, but the file stays open: the next marks are appended."""
        beside = self.path + ".new"
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(beside)
        file = self._files.create(beside)
        try:
            file.append([_encode(mark)])
            file.sync()
            self._files.rename(beside, self.path)
            self._files.sync_directory(self._directory)
        except OSError:
            file.close()
            raise
        return file


def _encode(mark: Mark) -> bytes:
    return with_crc_at_end(MARK.pack(MARK_MAGIC, *mark, 0))


def _decode(data: bytes) -> Mark | None:
    if len(data) != MARK.size:
        return None
    magic, log, valid_bytes, next_batch, _ = MARK.unpack(data)
    if magic != MARK_MAGIC or not is_sound_to_end(data):
        return None
    return Mark(log, valid_bytes, next_batch)
