"""The dead rows of a table's files, read from their vectors."""

from __future__ import annotations

from collections import OrderedDict

from pyroaring import BitMap

from ..contract import Vector
from ..store import TableStore
from .vectors import decode_inline, decode_stored, vector_path

__all__ = ["MaskCache"]


class MaskCache:
    """The dead rows of a table's vectors; the most recently used are cached."""

    def __init__(self, store: TableStore, limit_bytes: int) -> None:
        self._store = store
        self._limit = limit_bytes
        self._held: OrderedDict[Vector, BitMap] = OrderedDict()
        self._size = 0

    def rows(self, vector: Vector | None) -> BitMap:
        """A copy of the dead rows; FileNotFoundError, TableDamaged."""
        if vector is None:
            return BitMap()
        rows = self._held.get(vector)
        if rows is None:
            path = vector_path(vector)
            if path is None:
                rows = decode_inline(vector)
            else:
                rows = decode_stored(vector, self._store.read(path, vector.offset or 0, vector.size + 8))
            self.put(vector, rows)
        self._held.move_to_end(vector)
        return rows.copy()

    def put(self, vector: Vector, rows: BitMap) -> None:
        if self._held.pop(vector, None) is None:
            self._size += vector.size
        self._held[vector] = rows
        while self._size > self._limit and len(self._held) > 1:
            oldest, _ = self._held.popitem(last=False)
            self._size -= oldest.size
