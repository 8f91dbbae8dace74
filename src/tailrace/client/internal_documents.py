"""What a server keeps in a bucket for itself: left out of a reading unless asked for.

Rules: docs/spec/servers.md#left-out-unless-asked-for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..columns.scanner import ScannedFrames

__all__ = ["InternalDocuments", "is_system_scope"]

_TRANSACTION_KEY = b"_txn:"
_TRANSACTION = np.frombuffer(_TRANSACTION_KEY, dtype=np.uint8)


def is_system_scope(name: str) -> bool:
    """Whether a scope belongs to the server; user scopes can't have such names."""
    return name[:1] in ("_", "%") and name != "_default"


class InternalDocuments:
    """What is left out of one reading."""

    def __init__(self, *, system: bool, transactions: bool) -> None:
        self.system = system
        self.transactions = transactions
        self._collections: set[int] = set()

    def learn(self, collection_id: int, scope: str) -> None:
        """A collection has a name now. Ids never come back, so nothing is forgotten."""
        if self.system and is_system_scope(scope):
            self._collections.add(collection_id)

    def hides_scope(self, name: str) -> bool:
        """Whether events about a scope are left out."""
        return self.system and is_system_scope(name)

    def hides_document(self, collection_id: int, key: bytes) -> bool:
        """Whether events about a document are left out."""
        return collection_id in self._collections or (self.transactions and key.startswith(_TRANSACTION_KEY))

    def rows(self, frames: ScannedFrames) -> NDArray[np.bool_] | None:
        """Which rows of received frames are left out; None if no row is."""
        hidden = _transaction_records(frames) if self.transactions else None
        if self._collections and frames.collection.any():
            system = np.isin(frames.collection, np.fromiter(self._collections, np.uint32))
            if system.any():
                hidden = system if hidden is None else hidden | system
        return hidden


def _transaction_records(frames: ScannedFrames) -> NDArray[np.bool_] | None:
    """Rows whose key begins with ``_txn:``, in whichever collection."""
    # an empty key may be at the very end of the data
    first = frames.data.take(frames.key_start, mode="clip")
    candidates = np.flatnonzero(first == _TRANSACTION[0])
    starts = frames.key_start[candidates]
    is_long = frames.value_start[candidates] - starts >= len(_TRANSACTION)
    candidates, starts = candidates[is_long], starts[is_long]
    if not len(candidates):
        return None
    begins = frames.data[starts[:, None] + np.arange(len(_TRANSACTION))]
    hidden = np.zeros(len(frames), dtype=bool)
    hidden[candidates[(begins == _TRANSACTION).all(axis=1)]] = True
    return hidden if hidden.any() else None
