"""Every state of the sans-IO machines, and every transition between them, as data.

Rules of this file:

* A machine is an enum of states, an enum of inputs (what happened, in the past tense) and one table from
  (state, input) to the next state.
* What is not in a table can't happen. If it does, it is our own mistake: `LocalProtocolError`. What a peer
  can do at the wrong time is checked before the machine gets it, and is a protocol error.
* No code but `Machine`: what a transition *does* is where the input is fed.
* `MACHINES` lists them all, for the docs (`docs/protocol/states.md` is drawn from it) and for the tests. What
  a node receives from other nodes has its tables in `server/states.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

from ..errors import LocalProtocolError

__all__ = [
    "CONNECTION_TRANSITIONS",
    "DCP_TAKEOVER_TRANSITIONS",
    "MACHINES",
    "OPERATION_TRANSITIONS",
    "READER_STREAM_TRANSITIONS",
    "READING_TRANSITIONS",
    "REPLICA_STREAM_TRANSITIONS",
    "STREAM_TRANSITIONS",
    "TAP_TAKEOVER_TRANSITIONS",
    "UPR_STREAM_TRANSITIONS",
    "ConnectionInput",
    "ConnectionState",
    "DcpTakeoverInput",
    "DcpTakeoverState",
    "Machine",
    "MachineEnum",
    "OperationInput",
    "OperationState",
    "ReaderStreamInput",
    "ReaderStreamState",
    "ReadingInput",
    "ReadingState",
    "ReplicaStreamInput",
    "ReplicaStreamState",
    "StreamInput",
    "StreamState",
    "TapTakeoverInput",
    "TapTakeoverState",
    "UprStreamInput",
    "UprStreamState",
]


class MachineEnum(Enum):
    """States or inputs of a machine.

    Hashed by identity, which is faster than by name: reading a thousand vbuckets takes six thousand
    transitions before the first change.
    """

    __hash__ = object.__hash__


S = TypeVar("S", bound=Enum)
I = TypeVar("I", bound=Enum)  # noqa: E741


class Machine(Generic[S, I]):
    """A state that only moves along its table."""

    __slots__ = ("_transitions", "state")

    def __init__(self, transitions: Mapping[tuple[S, I], S], start: S) -> None:
        self._transitions = transitions
        self.state = start

    def feed(self, happened: I) -> S:
        """Move on and return the new state."""
        try:
            self.state = self._transitions[self.state, happened]
        except KeyError:
            raise LocalProtocolError(f"{happened.value} can't happen while {self.state.value}") from None
        return self.state

    def undo(self, state: S) -> None:
        """Go back to an earlier state: what has happened since does not count."""
        self.state = state


# A connection of a node, as producer (all streams) or as replica (DCP and UPR).


class ConnectionState(MachineEnum):
    """Where a node's connection stands."""

    NEW = "new"
    """No Open has been accepted yet."""
    OPEN = "open"
    CLOSED = "closed"
    """It is gone, or about to be: nothing is streamed any more."""


class ConnectionInput(MachineEnum):
    """What happens to a node's connection."""

    OPENED = "opened"
    CLOSED = "closed"


CONNECTION_TRANSITIONS: Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState] = {
    (ConnectionState.NEW, ConnectionInput.OPENED): ConnectionState.OPEN,
    (ConnectionState.NEW, ConnectionInput.CLOSED): ConnectionState.CLOSED,
    (ConnectionState.OPEN, ConnectionInput.CLOSED): ConnectionState.CLOSED,
    (ConnectionState.CLOSED, ConnectionInput.CLOSED): ConnectionState.CLOSED,
}


# A producer's stream: docs/spec/dcp.md#states-of-a-stream


class StreamState(MachineEnum):
    """Where a producer's stream takes its changes from."""

    PENDING = "pending"
    """Accepted, nothing read yet."""
    BACKFILLING = "backfilling"
    """Changes come from disk, or may have to."""
    IN_MEMORY = "in-memory"
    """The stream has caught up and follows the changes as they are made."""
    TAKEOVER_SEND = "takeover-send"
    """Like in-memory, but the replica acknowledges each snapshot."""
    TAKEOVER_WAIT = "takeover-wait"
    """The replica has been told a new vbucket state and has not answered."""
    DEAD = "dead"
    """Over; a Stream End may still have to be sent."""


class StreamInput(MachineEnum):
    """What happens to a producer's stream."""

    STARTED = "started"
    CAUGHT_UP = "caught up"
    CURSOR_DROPPED = "cursor dropped"
    """The changes that the stream needs next are no longer in memory."""
    TAKEOVER_BEGAN = "takeover began"
    STATE_SENT = "state sent"
    STATE_ANSWERED = "state answered"
    ENDED = "ended"


STREAM_TRANSITIONS: Mapping[tuple[StreamState, StreamInput], StreamState] = {
    (StreamState.PENDING, StreamInput.STARTED): StreamState.BACKFILLING,
    (StreamState.BACKFILLING, StreamInput.CAUGHT_UP): StreamState.IN_MEMORY,
    (StreamState.BACKFILLING, StreamInput.TAKEOVER_BEGAN): StreamState.TAKEOVER_SEND,
    (StreamState.IN_MEMORY, StreamInput.CURSOR_DROPPED): StreamState.BACKFILLING,
    (StreamState.TAKEOVER_SEND, StreamInput.STATE_SENT): StreamState.TAKEOVER_WAIT,
    (StreamState.TAKEOVER_WAIT, StreamInput.STATE_ANSWERED): StreamState.TAKEOVER_SEND,
    **{(state, StreamInput.ENDED): StreamState.DEAD for state in StreamState},
}


# A stream of a reader. It outlives the connections that carry it, and is not told when one is lost: it only
# sees the next request.


class ReaderStreamState(MachineEnum):
    """Where a reader's stream stands."""

    CLOSED = "closed"
    """Not asked for, refused, ended, or given up by the reader."""
    REQUESTED = "requested"
    """Asked for and not answered; or the server has emptied the vbucket and has not sent the new branch."""
    OPEN = "open"


class ReaderStreamInput(MachineEnum):
    """What happens to a reader's stream."""

    ASKED = "asked for"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FLUSHED = "flushed"
    """TAP and UPR: all of the vbucket is gone, and the stream goes on with a new branch."""
    ENDED = "ended"
    GIVEN_UP = "given up"
    """By the reader: it closed the stream, or its connection is gone."""


READER_STREAM_TRANSITIONS: Mapping[tuple[ReaderStreamState, ReaderStreamInput], ReaderStreamState] = {
    **{(state, ReaderStreamInput.ASKED): ReaderStreamState.REQUESTED for state in ReaderStreamState},
    (ReaderStreamState.REQUESTED, ReaderStreamInput.ACCEPTED): ReaderStreamState.OPEN,
    (ReaderStreamState.REQUESTED, ReaderStreamInput.REFUSED): ReaderStreamState.CLOSED,
    (ReaderStreamState.OPEN, ReaderStreamInput.FLUSHED): ReaderStreamState.REQUESTED,
    (ReaderStreamState.OPEN, ReaderStreamInput.ENDED): ReaderStreamState.CLOSED,
    **{(state, ReaderStreamInput.GIVEN_UP): ReaderStreamState.CLOSED for state in ReaderStreamState},
}


# A stream of a replica: one vbucket that a node receives by DCP or UPR.


class ReplicaStreamState(MachineEnum):
    """Where a replica's stream stands."""

    WAITING = "waiting"
    """For the connection's own controls to be answered."""
    REQUESTED = "requested"
    ROLLING_BACK = "rolling back"
    OPEN = "open"
    CLOSED = "closed"


class ReplicaStreamInput(MachineEnum):
    """What happens to a replica's stream."""

    ASKED = "asked for"
    """The first time; again from an earlier place after a rollback, or under an older name of the same place;
    and in UPR for the new branch after a flush."""
    ACCEPTED = "accepted"
    ROLLBACK_BEGAN = "rollback began"
    """The active has another history, or in UPR no longer any: the vbucket goes back."""
    CLOSED = "closed"


REPLICA_STREAM_TRANSITIONS: Mapping[tuple[ReplicaStreamState, ReplicaStreamInput], ReplicaStreamState] = {
    (ReplicaStreamState.WAITING, ReplicaStreamInput.ASKED): ReplicaStreamState.REQUESTED,
    (ReplicaStreamState.REQUESTED, ReplicaStreamInput.ASKED): ReplicaStreamState.REQUESTED,
    (ReplicaStreamState.REQUESTED, ReplicaStreamInput.ACCEPTED): ReplicaStreamState.OPEN,
    (ReplicaStreamState.REQUESTED, ReplicaStreamInput.ROLLBACK_BEGAN): ReplicaStreamState.ROLLING_BACK,
    (ReplicaStreamState.OPEN, ReplicaStreamInput.ROLLBACK_BEGAN): ReplicaStreamState.ROLLING_BACK,
    (ReplicaStreamState.ROLLING_BACK, ReplicaStreamInput.ASKED): ReplicaStreamState.REQUESTED,
    **{
        (state, ReplicaStreamInput.CLOSED): ReplicaStreamState.CLOSED
        for state in ReplicaStreamState
        if state is not ReplicaStreamState.CLOSED
    },
}


# A stream of UPR while it is translated: the drafts say separately that a stream begins and on which branch.


class UprStreamState(MachineEnum):
    """Where the translation of a UPR stream into DCP stands."""

    ASKED = "asked for"
    """Neither the answer nor the failover log has come."""
    LOG_KNOWN = "log known"
    AWAITING_LOG = "awaiting log"
    """Accepted; messages wait until the log is known."""
    OPEN = "open"
    """Messages are translated into DCP."""
    AWAITING_BRANCH = "awaiting branch"
    """Flushed: messages wait for the log of the new branch."""


class UprStreamInput(MachineEnum):
    """What happens to a stream of UPR."""

    ACCEPTED = "accepted"
    LOG_CAME = "log came"
    FLUSHED = "flushed"


UPR_STREAM_TRANSITIONS: Mapping[tuple[UprStreamState, UprStreamInput], UprStreamState] = {
    (UprStreamState.ASKED, UprStreamInput.LOG_CAME): UprStreamState.LOG_KNOWN,
    (UprStreamState.ASKED, UprStreamInput.ACCEPTED): UprStreamState.AWAITING_LOG,
    (UprStreamState.LOG_KNOWN, UprStreamInput.ACCEPTED): UprStreamState.OPEN,
    (UprStreamState.AWAITING_LOG, UprStreamInput.LOG_CAME): UprStreamState.OPEN,
    (UprStreamState.OPEN, UprStreamInput.FLUSHED): UprStreamState.AWAITING_BRANCH,
    (UprStreamState.AWAITING_BRANCH, UprStreamInput.LOG_CAME): UprStreamState.OPEN,
}


# A takeover by DCP: docs/spec/dcp.md#takeover. What the stream waits for meanwhile is the stream's own state.


class DcpTakeoverState(MachineEnum):
    """The stages of a takeover."""

    SENDING = "sending"
    """Everything so far is sent; then the replica is told to become pending."""
    GIVING_UP = "giving up"
    """The vbucket becomes dead here; waits until that is on disk."""
    FINISHING = "finishing"
    """The rest is sent; then the replica is told to become active."""
    CLOSED = "closed"


class DcpTakeoverInput(MachineEnum):
    """What happens to a takeover."""

    IS_PENDING = "pending there"
    GIVEN_UP = "dead on disk"
    CLOSED = "closed"


DCP_TAKEOVER_TRANSITIONS: Mapping[tuple[DcpTakeoverState, DcpTakeoverInput], DcpTakeoverState] = {
    (DcpTakeoverState.SENDING, DcpTakeoverInput.IS_PENDING): DcpTakeoverState.GIVING_UP,
    (DcpTakeoverState.GIVING_UP, DcpTakeoverInput.GIVEN_UP): DcpTakeoverState.FINISHING,
    **{(state, DcpTakeoverInput.CLOSED): DcpTakeoverState.CLOSED for state in DcpTakeoverState},
}


# A takeover by TAP: docs/spec/tap.md#takeover


class TapTakeoverState(MachineEnum):
    """The stages of a takeover."""

    SENDING = "sending"
    """All documents and all changes are sent, as on any stream."""
    GIVING_UP = "giving up"
    """The vbuckets become dead here; waits until that is on disk."""
    FINISHING = "finishing"
    """The rest is sent and acknowledged."""
    ACTIVATING = "activating"
    """The reader was told to make them active."""
    CLOSED = "closed"


class TapTakeoverInput(MachineEnum):
    """What happens to a takeover."""

    ALMOST_SENT = "almost all arrived"
    GIVEN_UP = "dead on disk"
    ALL_ARRIVED = "all arrived"
    CLOSED = "closed"


TAP_TAKEOVER_TRANSITIONS: Mapping[tuple[TapTakeoverState, TapTakeoverInput], TapTakeoverState] = {
    (TapTakeoverState.SENDING, TapTakeoverInput.ALMOST_SENT): TapTakeoverState.GIVING_UP,
    (TapTakeoverState.GIVING_UP, TapTakeoverInput.GIVEN_UP): TapTakeoverState.FINISHING,
    (TapTakeoverState.FINISHING, TapTakeoverInput.ALL_ARRIVED): TapTakeoverState.ACTIVATING,
    **{(state, TapTakeoverInput.CLOSED): TapTakeoverState.CLOSED for state in TapTakeoverState},
}


# A vbucket of a reading client, over all its streams and connections.


class ReadingState(MachineEnum):
    """Where a vbucket that a client reads stands."""

    UNRESOLVED = "waits for the server's seqnos"
    READY = "waits for a connection to its node"
    REQUESTED = "waits for an answer to its stream request"
    OPEN = "open"
    WAITING = "waits for its next attempt"
    PAUSED = "paused"
    DONE = "done"


class ReadingInput(MachineEnum):
    """What happens to a vbucket that a client reads."""

    SEQNOS_WANTED = "seqnos wanted"
    """It is to be asked for, but the server must first say where it starts or ends."""
    STREAM_WANTED = "stream wanted"
    """It is to be asked for."""
    REQUESTED = "requested"
    OPENED = "opened"
    FAILED = "failed"
    """Refused, lost or nowhere to be found: another attempt comes later."""
    PAUSED = "paused"
    """The application stopped it."""
    ENDED = "ended"
    """The stream came to its end."""


READING_TRANSITIONS: Mapping[tuple[ReadingState, ReadingInput], ReadingState] = {
    **{(state, ReadingInput.SEQNOS_WANTED): ReadingState.UNRESOLVED for state in ReadingState},
    **{(state, ReadingInput.STREAM_WANTED): ReadingState.READY for state in ReadingState},
    (ReadingState.READY, ReadingInput.REQUESTED): ReadingState.REQUESTED,
    (ReadingState.REQUESTED, ReadingInput.OPENED): ReadingState.OPEN,
    (ReadingState.OPEN, ReadingInput.OPENED): ReadingState.OPEN,  # the older dialects repeat a log
    (ReadingState.OPEN, ReadingInput.ENDED): ReadingState.DONE,
    (ReadingState.UNRESOLVED, ReadingInput.FAILED): ReadingState.WAITING,
    (ReadingState.READY, ReadingInput.FAILED): ReadingState.WAITING,
    (ReadingState.REQUESTED, ReadingInput.FAILED): ReadingState.WAITING,
    (ReadingState.OPEN, ReadingInput.FAILED): ReadingState.WAITING,
    **{
        (state, ReadingInput.PAUSED): ReadingState.PAUSED
        for state in ReadingState
        if state is not ReadingState.DONE
    },
}


# An operation in a pipeline. There are thousands in a batch, so `client/pipeline.py` keeps their states in an
# array, and moves many at a time along this table.


class OperationState(MachineEnum):
    """Where an operation in a pipeline stands."""

    WAITING = "waiting"
    """To be sent: not sent yet, or not done when it was."""
    IN_FLIGHT = "in flight"
    DONE = "done"


class OperationInput(MachineEnum):
    """What happens to an operation in a pipeline. Each can happen in one state only."""

    SENT = "sent"
    CAME_BACK = "came back"
    """Its connection is lost, or the answer asks for another attempt."""
    ANSWERED = "answered"


OPERATION_TRANSITIONS: Mapping[tuple[OperationState, OperationInput], OperationState] = {
    (OperationState.WAITING, OperationInput.SENT): OperationState.IN_FLIGHT,
    (OperationState.IN_FLIGHT, OperationInput.CAME_BACK): OperationState.WAITING,
    (OperationState.IN_FLIGHT, OperationInput.ANSWERED): OperationState.DONE,
}


MACHINES: Mapping[str, Mapping[tuple[Any, Any], Any]] = {
    "A connection of a node": CONNECTION_TRANSITIONS,
    "A stream of a producer": STREAM_TRANSITIONS,
    "A stream of a reader": READER_STREAM_TRANSITIONS,
    "A stream of a replica": REPLICA_STREAM_TRANSITIONS,
    "A stream of UPR, translated": UPR_STREAM_TRANSITIONS,
    "A takeover by DCP": DCP_TAKEOVER_TRANSITIONS,
    "A takeover by TAP": TAP_TAKEOVER_TRANSITIONS,
    "A vbucket of a reading client": READING_TRANSITIONS,
    "An operation in a pipeline": OPERATION_TRANSITIONS,
}
"""Every table, with what it is about."""
