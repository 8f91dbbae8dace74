"""Batches of ready-made requests, as `pipeline.Pipeline` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..wire.header import HEADER_LAYOUT
from ..wire.layout import numpy_code
from ..wire.message import Message
from .pipeline import Indices, WriteBatch

__all__ = ["BATCH_BYTES", "BATCH_REQUESTS", "FrameBatch", "RowsBatch", "batched"]

BATCH_BYTES = 1 << 20
BATCH_REQUESTS = 4_096
_OPCODE_AT = HEADER_LAYOUT.at("opcode")
_OPAQUE = HEADER_LAYOUT.field("opaque")


class RowsBatch:
    """Requests of one length, one per row, for numbered documents."""

    def __init__(self, rows: NDArray[np.uint8], vbuckets: Sequence[int], documents: NDArray[np.intp]) -> None:
        self.rows = rows
        self.vbuckets = vbuckets
        self.documents = documents
        """In ascending order, each once."""

    @property
    def opcodes(self) -> Sequence[int]:
        column: list[int] = self.rows[:, _OPCODE_AT].tolist()
        return column

    def stamp(self, first_opaque: int) -> None:
        count = len(self.rows)
        self.rows[:, _OPAQUE.place] = _octets(np.arange(first_opaque, first_opaque + count))

    def select(self, indices: Indices | None) -> bytes | memoryview:
        if indices is None:
            return memoryview(self.rows.data).cast("B")
        chosen: bytes = self.rows[indices].tobytes()
        return chosen

    def shares_key_with(self, other: WriteBatch) -> bool:
        if not isinstance(other, RowsBatch):
            return True  # it may
        ours, theirs = self.documents, other.documents
        if not len(ours) or not len(theirs) or ours[-1] < theirs[0] or theirs[-1] < ours[0]:
            return False
        return bool(np.intersect1d(ours, theirs, assume_unique=True).size)


class FrameBatch:
    """Requests of any length, each with a key of its own."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.vbuckets: list[int] = []
        self.opcodes: list[int] = []
        self.keys: set[bytes] = set()
        self.size_bytes = 0
        self._first_opaque = 0

    def add(self, request: Message) -> None:
        """Add a request; its key must not be in the batch yet."""
        frame = request.encode()
        self.frames.append(frame)
        self.vbuckets.append(request.vbucket)
        self.opcodes.append(frame[_OPCODE_AT])
        self.keys.add(request.key)
        self.size_bytes += len(frame)

    def stamp(self, first_opaque: int) -> None:
        self._first_opaque = first_opaque

    def select(self, indices: Indices | None) -> bytes | memoryview:
        chosen = np.arange(len(self.frames)) if indices is None else indices
        frames = [self.frames[index] for index in chosen.tolist()]
        data = bytearray().join(frames)
        ends = np.cumsum(np.fromiter(map(len, frames), dtype=np.intp, count=len(frames)))
        starts = np.concatenate(([0], ends[:-1])).astype(np.intp)
        places = (starts + _OPAQUE.offset)[:, None] + np.arange(_OPAQUE.size)
        np.frombuffer(data, dtype=np.uint8)[places] = _octets(self._first_opaque + chosen)
        return memoryview(data)

    def shares_key_with(self, other: WriteBatch) -> bool:
        return not isinstance(other, FrameBatch) or not self.keys.isdisjoint(other.keys)


def _octets(opaques: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Opaques as they are written in headers, one per row."""
    return opaques.astype(numpy_code(_OPAQUE)).view(np.uint8).reshape(-1, _OPAQUE.size)


def batched(requests: Iterable[Message], most: int = BATCH_REQUESTS) -> Iterator[FrameBatch]:
    """Requests in batches of a bounded size; one whose key is already in the batch begins the next."""
    batch = FrameBatch()
    for request in requests:
        if request.key in batch.keys:
            yield batch
            batch = FrameBatch()
        batch.add(request)
        if len(batch.frames) >= min(most, BATCH_REQUESTS) or batch.size_bytes >= BATCH_BYTES:
            yield batch
            batch = FrameBatch()
    if batch.frames:
        yield batch
