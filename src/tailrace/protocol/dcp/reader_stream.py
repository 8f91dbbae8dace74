"""A reader's stream of one vbucket, and what it receives between the changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ...history import FailoverLog
from ...model import Position, SnapshotRange
from ...wire.dcp import DcpSeqnoAdvanced, DcpSystemEvent
from ...wire.dcp_replication import DcpAbort, DcpCommit, DcpPrepare
from ..states import READER_STREAM_TRANSITIONS, Machine, ReaderStreamInput, ReaderStreamState

__all__ = [
    "Carried",
    "MarkerReceived",
    "OsoReceived",
    "PlacedEvent",
    "ReaderStream",
    "RequestRefused",
    "SnapshotRun",
    "StreamEnded",
    "StreamEvent",
    "StreamOpened",
    "VBucketFlushed",
]


@dataclass(slots=True, eq=False)
class ReaderStream:
    """Where a reader stands in one vbucket; it outlives the connections that carry it."""

    vbucket: int
    position: Position = Position.BEGINNING
    marker: SnapshotRange | None = None
    """The snapshot that is being received, on the connection that the stream is open on."""
    log: FailoverLog | None = None
    """What the server said last; replaced by every accepted request."""
    purge_seqno: int = 0
    """The newest purge that the server reported; 0 is none. Forgotten when the reader goes back."""
    undo_to: int | None = None
    """A rollback that the application has not been told about yet."""
    answer_at: int | None = None
    """The marker wants an answer when the change with this seqno has come."""
    oso_high: int | None = None
    """The highest seqno of the out of order snapshot that is being received; None outside one."""
    machine: Machine[ReaderStreamState, ReaderStreamInput] = field(
        default_factory=lambda: Machine(READER_STREAM_TRANSITIONS, ReaderStreamState.CLOSED)
    )

    @property
    def is_open(self) -> bool:
        """Whether the server has accepted it and not ended it."""
        return self.machine.state is ReaderStreamState.OPEN

    def asked(self) -> None:
        """It was requested, on whichever connection: what an earlier one had begun no longer counts."""
        self.machine.feed(ReaderStreamInput.ASKED)
        self.marker = None
        if self.oso_high is not None:
            # docs/spec/dcp.md#oso-resume: what has come of it is not a state to resume from
            before = self.position.seqno
            self.undo_to = before if self.undo_to is None else min(before, self.undo_to)
            self.oso_high = None

    def given_up(self) -> None:
        """The reader gave it up, or the connection that carried it is gone."""
        self.machine.feed(ReaderStreamInput.GIVEN_UP)


# what comes between the changes


class StreamOpened(NamedTuple):
    """The server accepted a stream request."""

    stream: ReaderStream
    position: Position
    """Where the following changes go on."""
    rolled_back_to: int | None
    """The application must undo what it has above this; None if nothing was lost."""


class RequestRefused(NamedTuple):
    """The server refused a stream request."""

    stream: ReaderStream
    status: int
    value: bytes


class MarkerReceived(NamedTuple):
    """A snapshot begins."""

    stream: ReaderStream
    start: int
    end: int
    flags: int


class StreamEnded(NamedTuple):
    """The server ended a stream."""

    stream: ReaderStream
    status: int


class VBucketFlushed(NamedTuple):
    """All of a vbucket is gone; the stream reopens by itself. DCP has no such message."""

    stream: ReaderStream


class Carried(NamedTuple):
    """A message with a place in the history that does not change a document.

    It is a system event, a seqno that advanced, or a step of a durable write.
    """

    stream: ReaderStream
    message: DcpSystemEvent | DcpSeqnoAdvanced | DcpPrepare | DcpCommit | DcpAbort
    run: SnapshotRun


class OsoReceived(NamedTuple):
    """An out of order snapshot is complete."""

    stream: ReaderStream
    position: Position


StreamEvent: TypeAlias = (
    StreamOpened | RequestRefused | MarkerReceived | StreamEnded | VBucketFlushed | Carried | OsoReceived
)


class PlacedEvent(NamedTuple):
    """Something that happened between two changes."""

    row: int
    """How many of the delivery's rows come before it."""
    event: StreamEvent


class SnapshotRun(NamedTuple):
    """Changes of one stream between two of its control frames."""

    stream: ReaderStream
    base: Position
    """Where the reader stood before the first of them."""
    snapshot: SnapshotRange
    """Complete at its end, which may be later than its marker says (`Position.snapshot_of`)."""
    log: FailoverLog
    is_oso: bool = False
    """They come in any order, so there is no place among them to resume from."""

    def position_at(self, seqno: int) -> Position:
        """The position after one of them."""
        return self.base if self.is_oso else self.base.received(self.snapshot, seqno)
