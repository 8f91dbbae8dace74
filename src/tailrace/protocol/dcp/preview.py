"""Reads a snapshot before it is announced, to find the last change that is for this stream.

A stream without collections, of a bucket that has some or that has durable writes, sends only a part of each
snapshot. Its marker must end at a change that is sent, since no other message could end the snapshot:
docs/spec/servers.md#sync-writes-visible-end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...frames import CHUNK_BYTES, seqnos_at
from ..stream_filter import StreamFilter

if TYPE_CHECKING:
    from ...store.base import VBucketSnapshot

__all__ = ["Preview"]


class Preview:
    """A second reading of a snapshot, ahead of the one that is sent."""

    __slots__ = ("_filter", "_snapshot", "last_seqno")

    def __init__(self, snapshot: VBucketSnapshot, *, shows_unseen: bool = False) -> None:
        self.last_seqno = 0
        """The seqno of the last change that is for the stream; 0: none so far."""
        self._snapshot = snapshot
        self._filter = StreamFilter.of_old_clients()
        self._filter.shows_unseen = shows_unseen

    def read(self) -> int | None:
        """Look through the next chunk; returns its size, or None at the end."""
        chunk = self._snapshot.read(CHUNK_BYTES)
        if chunk is None:
            return None
        wanted = self._filter.wanted(chunk)
        if wanted is None:
            self.last_seqno = chunk.last_seqno
        elif wanted.any():
            last = np.flatnonzero(wanted)[-1:]
            self.last_seqno = int(seqnos_at(chunk.data, chunk.offsets[last])[0])
        return len(chunk.data)

    @property
    def is_for_nobody(self) -> bool:
        """Whether nothing of the snapshot is for the stream, which goes on after it."""
        return not self.last_seqno and not self._filter.is_empty

    def close(self) -> None:
        self._snapshot.close()
