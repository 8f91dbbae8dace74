"""A vbucket that a node receives: one stream of a `DcpReplica`, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ..model import Position

if TYPE_CHECKING:
    from ..store.base import VBucket

__all__ = ["PassiveStream", "StreamPhase"]


class StreamPhase(Enum):
    """Where a passive stream stands."""

    WAITING = "waiting"
    """For the connection's own controls to be answered."""
    REQUESTED = "requested"
    ROLLING_BACK = "rolling back"
    OPEN = "open"


@dataclass(slots=True)
class PassiveStream:
    """A vbucket that is being received."""

    vbucket: VBucket
    opaque: int
    flags: int
    done: Callable[[int, int], None]
    """Called once with the status of the stream request and the opaque."""
    phase: StreamPhase = StreamPhase.WAITING
    sent: Position = Position.BEGINNING
    marker_end: int = 0
    ack_at: int = 0
    """The seqno after which the marker is to be answered; 0: it is not."""
    waits_for_disk: bool = False

    def standing(self) -> Position:
        """Where the vbucket stands, as a stream request says it."""
        vbucket = self.vbucket
        high = vbucket.high_seqno
        if not high:
            return Position.BEGINNING
        if vbucket.complete_seqno == high:
            return Position.at(vbucket.uuid, high)
        return Position(vbucket.uuid, high, vbucket.received.start, vbucket.received.end)
