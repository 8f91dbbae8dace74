"""Which rows of the table a round replaces: looked up in the indexes of files, without reading rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from pyroaring import BitMap

from .contract import DataFile
from .hashing import Hashes, KeyHash
from .index import Rows, open_index
from .store import TableStore

__all__ = ["DocumentHashes", "find_rows", "rows_of_vbuckets"]


class DocumentHashes:
    """Documents by h1 and h2, in ascending order of h1."""

    __slots__ = ("h1", "h2")

    def __init__(self, h1: Hashes, h2: Hashes) -> None:
        self.h1 = h1
        self.h2 = h2

    def between(self, low: int, high: int) -> DocumentHashes:
        """The documents whose h1 is in a range, both ends included."""
        first = int(np.searchsorted(self.h1, np.uint64(low), side="left"))
        last = int(np.searchsorted(self.h1, np.uint64(high), side="right"))
        return DocumentHashes(self.h1[first:last], self.h2[first:last])

    def __len__(self) -> int:
        return len(self.h1)


def find_rows(
    store: TableStore, files: Iterable[DataFile], key_hash: KeyHash, documents: DocumentHashes
) -> Iterator[tuple[DataFile, Rows]]:
    """The rows of these documents, file by file, including rows that are masked already."""
    for file in files:
        near = documents.between(file.low, file.high)
        if not len(near):
            continue
        rows = open_index(store, file, key_hash).find(near.h1, near.h2)
        if len(rows):
            yield file, rows


def rows_of_vbuckets(
    store: TableStore, files: Sequence[DataFile], key_hash: KeyHash, vbuckets: Iterable[int]
) -> Mapping[str, BitMap]:
    """All rows that files have of these vbuckets, by path."""
    wanted = sorted(vbuckets)
    masks: dict[str, BitMap] = {}
    for file in files:
        index = None
        for vbucket in wanted:
            if not file.low >> 48 <= vbucket <= file.high >> 48:
                continue
            index = index or open_index(store, file, key_hash)
            rows = index.of_vbucket(vbucket)
            if len(rows):
                masks.setdefault(file.path, BitMap()).update(rows)
    return masks
