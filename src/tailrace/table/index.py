"""The index of a data file: h1 and h2 of each of its rows, in the order of the rows.

The arrays are in the Parquet file itself, between its last page and its footer, where no reader of Parquet
looks: they can't be lost separately from the rows, and need no object of their own. On a local disk they are
mapped; from an object store they are fetched once and kept on this machine's disk. For a file that somebody
else wrote they are computed from its keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyroaring import BitMap

from ..files import DiskFiles, atomic_write, user_folder
from .damage import damage, damage_named
from .hashing import Hashes, KeyHash, first_h1
from .rows import key_bytes, vbuckets_of

if TYPE_CHECKING:
    from .contract import DataFile
    from .store import TableStore

__all__ = ["INDEX_BYTES_PER_ROW", "FileIndex", "Rows", "open_index", "row_numbers"]

INDEX_BYTES_PER_ROW = 16
_LITTLE = np.dtype("<u8")

Rows = NDArray[np.uint32]

_KEPT_BYTES = 4 << 30
"""How much of the indexes of remote files is kept on this machine's disk."""
_KEPT_OPEN = 512


@dataclass(frozen=True)
class FileIndex:
    """h1 in ascending order, with h2; ``rows`` has the row of each, or is None if they are in row order."""

    h1: Hashes
    h2: Hashes
    rows: Rows | None = None

    def find(self, h1: Hashes, h2: Hashes) -> Rows:
        """The rows of documents; ``h1`` must be ascending. Documents that are not there are left out."""
        at = np.searchsorted(self.h1, h1)
        matches: list[NDArray[np.intp]] = []
        wanted = np.arange(len(h1))
        size = len(self.h1)
        while len(wanted):  # once, and again only for rows with the same h1 that are another document
            inside = at < size
            at, wanted = at[inside], wanted[inside]
            same = self.h1[at] == h1[wanted]
            at, wanted = at[same], wanted[same]
            right = self.h2[at] == h2[wanted]
            matches.append(at[right])
            at, wanted = at[~right] + 1, wanted[~right]
        return self._row_numbers(np.concatenate(matches) if matches else np.zeros(0, np.intp))

    def of_vbucket(self, vbucket: int) -> Rows:
        """The rows of a vbucket."""
        low, high = self.bounds(vbucket)
        return self._row_numbers(np.arange(low, high))

    def bounds(self, vbucket: int, last: int | None = None) -> tuple[int, int]:
        """Where the rows of a vbucket, or of all up to ``last``, begin and end in this order."""
        ends = [first_h1(vbucket), first_h1((vbucket if last is None else last) + 1)]
        low = int(np.searchsorted(self.h1, np.uint64(ends[0])))
        high = len(self.h1) if ends[1] >> 64 else int(np.searchsorted(self.h1, np.uint64(ends[1])))
        return low, high

    def at(self, rows: Rows) -> tuple[Hashes, Hashes]:
        """h1 and h2 of rows, ordered by h1."""
        places = rows.astype(np.intp) if self.rows is None else self._places()[rows]
        places = np.sort(places)
        return self.h1[places], self.h2[places]

    def _places(self) -> NDArray[np.intp]:
        assert self.rows is not None
        places = np.empty(len(self.rows), dtype=np.intp)
        places[self.rows] = np.arange(len(self.rows))
        return places

    def _row_numbers(self, places: NDArray[np.intp]) -> Rows:
        return places.astype(np.uint32) if self.rows is None else self.rows[places]


def row_numbers(rows: BitMap) -> Rows:
    """A bitmap as an array."""
    return np.array(rows.to_array(), dtype=np.uint32)


class _OpenIndexes:
    """Indexes that this process keeps open, by store and file; a file never changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_file: OrderedDict[tuple[str, str], FileIndex] = OrderedDict()

    def get(self, store: TableStore, file: DataFile, key_hash: KeyHash) -> FileIndex:
        place = (store.uri, file.path)
        with self._lock:
            index = self._by_file.get(place)
            if index is not None:
                self._by_file.move_to_end(place)
        if index is not None:
            _check_file(store, file)
            return index
        index = _read_index(store, file, key_hash)
        with self._lock:
            self._by_file[place] = index
            while len(self._by_file) > _KEPT_OPEN:
                self._by_file.popitem(last=False)
        return index


_open_indexes = _OpenIndexes()


def open_index(store: TableStore, file: DataFile, key_hash: KeyHash) -> FileIndex:
    """The index of a file of the table."""
    return _open_indexes.get(store, file, key_hash)


def _check_file(store: TableStore, file: DataFile) -> None:
    """Raise if a file whose index is mapped has changed: reading past the end of a truncated file kills the
    process, and masking rows of a file that is gone leaves a table that nobody can read.
    """
    local = store.local_path(file.path)
    if local is not None:
        with damage_named(file):
            size = local.stat().st_size
        if size != file.size:
            raise damage(file, f"it has {size} bytes, and not {file.size}")


def _read_index(store: TableStore, file: DataFile, key_hash: KeyHash) -> FileIndex:
    if file.index_offset is None:
        return _rebuilt(store, file, key_hash)
    local = store.local_path(file.path)
    if local is None:
        return _mapped(_kept(store, file), 0, file)
    return _mapped(local, file.index_offset, file)


def _mapped(path: Path, offset: int, file: DataFile) -> FileIndex:
    if not file.rows:
        return FileIndex(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    with damage_named(file):
        both = np.memmap(path, _LITTLE, mode="r", offset=offset, shape=(2, file.rows))
    h1, h2 = np.asarray(both[0]), np.asarray(both[1])
    if int(h1[0]) != file.low or int(h1[-1]) != file.high:
        raise damage(file, "its index is not where its tags say")
    return FileIndex(h1, h2)


def _kept(store: TableStore, file: DataFile) -> Path:
    """The index of an object, as a file of this machine; shared by all processes of this user."""
    assert file.index_offset is not None
    folder = user_folder() / "indexes"
    name = hashlib.blake2b(f"{store.uri}\0{file.path}".encode(), digest_size=20).hexdigest()
    path = folder / name
    size = file.rows * INDEX_BYTES_PER_ROW
    try:
        if path.stat().st_size == size:
            return path
    except FileNotFoundError:
        pass
    files = DiskFiles(folder)
    files.make_directory("")
    index = store.read(file.path, file.index_offset, size)
    if len(index) != size:
        raise damage(file, "it ends before its index does")
    atomic_write(path, index, private=True)
    _make_room(files)
    return path


def _make_room(files: DiskFiles) -> None:
    """Remove the oldest indexes; a process that has mapped one can still read it."""
    kept = []
    for entry in os.scandir(files.root):
        with contextlib.suppress(FileNotFoundError):  # another process makes room too
            kept.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.name))
    surplus = sum(size for _, size, _ in kept) - _KEPT_BYTES
    for _, size, name in sorted(kept):
        if surplus <= 0:
            return
        with contextlib.suppress(FileNotFoundError):
            files.unlink(name)
        surplus -= size


def _rebuilt(store: TableStore, file: DataFile, key_hash: KeyHash) -> FileIndex:
    """The index of a file that we did not write."""
    with damage_named(file):
        rows = pq.read_table(store.open(file.path), columns=["key", "key_base64", "vbucket"])
    h1, h2 = key_hash.hash(key_bytes(rows), vbuckets_of(rows))
    order = np.argsort(h1, kind="stable")
    return FileIndex(h1[order], h2[order], order.astype(np.uint32))
