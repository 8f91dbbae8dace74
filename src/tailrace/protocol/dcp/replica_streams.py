"""The streams of one replica's connection: by vbucket, and by the opaque that their messages carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..handler import HandlerSummary
from .flow_control import ReceiveWindow
from .replica_stream import ReplicaStream

if TYPE_CHECKING:
    from ...store.base import VBucket

__all__ = ["ReplicaStreams"]

_FIRST_OPAQUE = 1
_MAX_CLOSED = 4096


class ReplicaStreams:
    """The streams received or asked for, and those closed here for which messages may still come."""

    __slots__ = ("_by_opaque", "_closed", "_next_opaque", "by_vbucket")

    def __init__(self) -> None:
        self.by_vbucket: dict[int, ReplicaStream] = {}
        self._by_opaque: dict[int, ReplicaStream] = {}
        self._closed: dict[int, int] = {}  # opaque and vbucket; few, the oldest are forgotten
        self._next_opaque = _FIRST_OPAQUE

    def __len__(self) -> int:
        return len(self.by_vbucket)

    def summary(self, window: ReceiveWindow) -> HandlerSummary:
        """All of them in a few figures."""
        return HandlerSummary("replica", len(self), unacknowledged_bytes=window.unacknowledged_bytes)

    def new_opaque(self) -> int:
        """An opaque that nothing else has."""
        self._next_opaque += 1
        return self._next_opaque - 1

    def add(self, vbucket: VBucket, flags: int, done: Callable[[int, int], None]) -> ReplicaStream:
        """Add a stream that is to be asked for."""
        stream = ReplicaStream(vbucket, self.new_opaque(), flags, done)
        self.by_vbucket[vbucket.id] = self._by_opaque[stream.opaque] = stream
        return stream

    def get(self, vbucket: int) -> ReplicaStream | None:
        """The stream of a vbucket."""
        return self.by_vbucket.get(vbucket)

    def with_opaque(self, opaque: int) -> ReplicaStream | None:
        """The stream that an answer is for."""
        return self._by_opaque.get(opaque)

    def has(self, stream: ReplicaStream) -> bool:
        """Whether a stream is still the one of its vbucket."""
        return self.by_vbucket.get(stream.vbucket.id) is stream

    def remove(self, vbucket: int) -> ReplicaStream:
        """The stream of a vbucket is over."""
        stream = self.by_vbucket.pop(vbucket)
        del self._by_opaque[stream.opaque]
        return stream

    # closed here: what the producer still sends for them is ignored

    def closed_here(self, stream: ReplicaStream) -> None:
        """The producer was told to close a stream."""
        self._closed[stream.opaque] = stream.vbucket.id
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def was_closed_here(self, opaque: int, vbucket: int) -> bool:
        """Whether a message is for a stream that was closed here."""
        return self._closed.get(opaque) == vbucket

    def forget_closed(self, opaque: int) -> None:
        """Nothing more will come for it."""
        self._closed.pop(opaque, None)
