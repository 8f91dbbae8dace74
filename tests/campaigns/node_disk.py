"""The node on its disk: power cuts, disks that fail or are full, and the bugs that stores have there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from campaigns.bug import Bug, Tally
from store.power_cuts import run_until_cut, run_with_errors
from tailrace.store import bucket as store_bucket
from tailrace.store import log as store_log
from tailrace.store import recovery
from tailrace.store.bucket import EngineBucket
from tailrace.store.format import BATCH
from tailrace.store.log import LogBatch, LogWriter

__all__ = ["BUGS", "play_disk"]


def play_disk(seed: int) -> Tally:
    """One schedule: power goes at some call that writes, or calls fail until it goes."""
    if seed % 3:
        run_until_cut(seed)
        return Tally(schedules=1, kills=3)
    return Tally(schedules=1, kills=2, faults=run_with_errors(seed))


def _committing(sync: Callable[[LogWriter], None], *, first: bool = False) -> AbstractContextManager[Any]:
    """A log writer that goes about its sync in another way."""

    def commit(self: LogWriter, batch: LogBatch) -> None:
        if first:
            sync(self)
        for parts in batch.encode(self.next_batch, self._salt):
            self._file.append(parts)
        if not first:
            sync(self)
        self.valid_bytes = self._file.size
        self.next_batch += 1

    return mock.patch.object(LogWriter, "commit", commit)


def _acknowledged_before_the_sync() -> AbstractContextManager[Any]:
    return _committing(lambda writer: writer._file.sync(), first=True)


def _sync_error_ignored() -> AbstractContextManager[Any]:
    def sync(writer: LogWriter) -> None:
        try:
            writer._file.sync()
        except OSError:
            return

    return _committing(sync)


def _second_sync_counts() -> AbstractContextManager[Any]:
    def sync(writer: LogWriter) -> None:
        try:
            writer._file.sync()
        except OSError:
            writer._file.sync()

    return _committing(sync)


def _no_checksum_of_the_tail() -> AbstractContextManager[Any]:
    original = store_log._decode

    def decode(data: bytes, at: int, end: int, salt: int) -> LogBatch | None:
        batch = original(data, at, end, salt)
        if batch is not None:
            return batch
        body = zlib.crc32(data[at + BATCH.size : end], salt)
        *fields, _ = BATCH.unpack_from(data, at)
        believed = data[:at] + BATCH.pack(*fields, body) + data[at + BATCH.size :]
        return original(believed, at, end, salt)

    return mock.patch.object(store_log, "_decode", decode)


def _clean_marker_not_cleared() -> AbstractContextManager[Any]:
    original = EngineBucket._commit_now

    def commit_now(self: EngineBucket, meta: dict[str, Any], **how: Any) -> None:
        if meta != {"clean": False} or not self.sealed.manifest_file.base:
            original(self, meta, **how)

    return mock.patch.object(EngineBucket, "_commit_now", commit_now)


def _uuid_kept_after_a_kill() -> AbstractContextManager[Any]:
    def recover(*given: Any, **how: Any) -> bool:
        recovery.recover(*given, **how)
        return True

    return mock.patch.object(store_bucket, "recover", recover)


def _bugs() -> Iterator[Bug]:
    yield Bug(
        "ack before fsync",
        "A change counts as persisted when it is written; the sync comes with the next batch.",
        _acknowledged_before_the_sync,
    )
    yield Bug("fsync error ignored", "A sync that failed is taken for one that did not.", _sync_error_ignored)
    yield Bug(
        "a second fsync counts as success",
        "A sync that failed is tried again; it succeeds, and the kernel has forgotten the bytes.",
        _second_sync_counts,
    )
    yield Bug(
        "no CRC on the tail", "The last batch of a log is trusted as it is.", _no_checksum_of_the_tail, 214
    )
    yield Bug(
        "clean marker not cleared at start",
        "A run that ends badly before its first flush looks like the clean stop before it.",
        _clean_marker_not_cleared,
    )
    yield Bug(
        "uuid not renewed after a kill",
        "A node that lost changes goes on with the vb_uuid under which they were seen.",
        _uuid_kept_after_a_kill,
    )


BUGS = tuple(_bugs())
