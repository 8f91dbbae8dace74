"""Where the files of a spool are: a folder that all executors see, or a prefix of an object store.

A folder carries a lock, by which the next query finds what a killed one left. An object store has no locks:
there a small object is rewritten every hour, and a spool without a file from the last day was left behind.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import pyarrow as pa

from ...clock import SYSTEM, Clock
from ...errors import SpoolError, StorageError, reason_of
from ...files import scratch_folder, write_scratch
from ...paths import location
from ...rng import unique_name
from .scratch import Scratch

if TYPE_CHECKING:
    from ...table.store import TableStore

__all__ = ["FolderPlace", "SpoolPlace", "StorePlace", "open_place", "spooled_rows"]

_KIND = "spool"
_LEASE = ".tailrace-lease"
_RENEWED_S = 3600.0
_LEFT_S = 24 * 3600.0
"""A spool on an object store that was not renewed for this long was left behind."""


class SpoolPlace(Protocol):
    """Where a spool writes, and what its readers need to find the files."""

    @property
    def store(self) -> TableStore | None:
        """The store that executors read from; None if files are named by their path."""
        ...

    def write(self, batches: Sequence[pa.RecordBatch]) -> tuple[str, int]:
        """Write these rows to a new file; its name and its size."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; a missing one is not an error."""
        ...

    def renew(self) -> None:
        """Mark the place as still in use; called now and then."""
        ...

    def remove(self) -> None:
        """Delete it with all that is in it."""
        ...


class FolderPlace:
    """A folder, and the lock that goes with it."""

    store = None

    def __init__(self, folder: Path, scratch: Scratch | None = None) -> None:
        self._folder = folder
        self._scratch = scratch
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, batches: Sequence[pa.RecordBatch]) -> tuple[str, int]:
        path = self._folder / f"{unique_name()}.arrow"
        try:
            return str(path), write_scratch(path, partial(_write_batches, batches))
        except OSError as error:
            raise SpoolError(
                f"the spool in {str(self._folder)!r} can't be written: {reason_of(error)}; make room, "
                "or set spoolDir to another folder"
            ) from None

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            Path(name).unlink(missing_ok=True)

    def renew(self) -> None:
        """The lock is held as long as the process lives."""

    def remove(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()


class StorePlace:
    """A prefix of an object store."""

    def __init__(self, uri: str, options: Mapping[str, str], clock: Clock = SYSTEM) -> None:
        from ...table.store import TableStore

        self._clock = clock
        around = TableStore(uri, options)
        _remove_left(around, clock)
        self._store = TableStore(f"{around.uri}/{_KIND}-{unique_name()}", options)
        self._renewed = -_RENEWED_S
        self.renew()
        atexit.register(self.remove)

    @property
    def store(self) -> TableStore:
        return self._store

    def write(self, batches: Sequence[pa.RecordBatch]) -> tuple[str, int]:
        name = f"{unique_name()}.arrow"
        with self._store.create(name) as file:
            _write_batches(batches, file)  # type: ignore[arg-type]
            return name, file.tell()

    def delete(self, names: Iterable[str]) -> None:
        with suppress(StorageError):  # what stays is deleted with the place
            self._store.delete(names)

    def renew(self) -> None:
        now = self._clock.monotonic()
        if now - self._renewed >= _RENEWED_S:
            self._store.put(_LEASE, b"")
            self._renewed = now

    def remove(self) -> None:
        atexit.unregister(self.remove)
        with suppress(StorageError):  # the next query finds it
            self._store.delete(file.path for file in self._store.list())


def open_place(where: str | None, options: Mapping[str, str]) -> SpoolPlace:
    """A place of this process's own below ``where``; None is a folder among the system's temporary files."""
    place = None if where is None else location(where, "spoolDir")
    if place is not None and not place.is_local:
        return StorePlace(place.text, options)
    folder = None if place is None else place.path
    try:
        scratch = Scratch(folder, _KIND)
    except OSError as error:
        raise SpoolError(
            f"the spool in {str(folder or scratch_folder())!r} can't be made: {reason_of(error)}; "
            "set spoolDir to a folder that can be written"
        ) from None
    return FolderPlace(scratch.path, scratch)


def spooled_rows(store: TableStore | None, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a file, on an executor."""
    try:
        source = pa.memory_map(name) if store is None else store.open(name)
    except FileNotFoundError:
        place = name if store is None else f"{store.uri}/{name}"
        raise SpoolError(
            f"the file {place} of the spool is gone, or this executor does not see its folder: set "
            "spoolDir to one that all executors share and nobody cleans, and start again"
        ) from None
    with source, pa.ipc.open_stream(source) as reader:
        yield from reader


def _remove_left(around: TableStore, clock: Clock) -> None:
    """Delete what killed queries left."""
    spools: dict[str, list[str]] = {}
    newest: dict[str, int] = {}
    for file in around.list():
        folder, slash, _ = file.path.partition("/")
        if slash and folder.startswith(f"{_KIND}-"):
            spools.setdefault(folder, []).append(file.path)
            newest[folder] = max(newest.get(folder, 0), file.modified_ms)
    now_ms = clock.time_ns() // 1_000_000
    for folder, paths in spools.items():
        is_ours = f"{folder}/{_LEASE}" in paths  # a place may be any prefix of the user's
        if is_ours and now_ms - newest[folder] > _LEFT_S * 1000:
            around.delete(paths)


def _write_batches(batches: Sequence[pa.RecordBatch], file: BinaryIO) -> None:
    with pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
