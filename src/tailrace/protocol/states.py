"""Every state of the sans-IO machines, and every transition between them, as data.

Rules of this file:

* A machine is an enum of states, an enum of inputs (what happened, in the past tense) and one table from
  (state, input) to the next state.
* What is not in a table can't happen. If it does, it is our own mistake: `LocalProtocolError`.
* No code: `Machine` is all there is, and what a transition *does* stands where the input is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from ..errors import LocalProtocolError

__all__ = [
    "CONNECTION_TRANSITIONS",
    "STREAM_TRANSITIONS",
    "ConnectionInput",
    "ConnectionState",
    "Machine",
    "StreamInput",
    "StreamState",
]

S = TypeVar("S", bound=Enum)
I = TypeVar("I", bound=Enum)  # noqa: E741


class Machine(Generic[S, I]):
    """A state that only moves along its table."""

    __slots__ = ("_transitions", "state")

    def __init__(self, transitions: Mapping[tuple[S, I], S], start: S) -> None:
        self._transitions = transitions
        self.state = start

    def feed(self, happened: I) -> S:
        """Move on; the new state."""
        try:
            self.state = self._transitions[self.state, happened]
        except KeyError:
            raise LocalProtocolError(f"{happened.value} can't happen while {self.state.value}") from None
        return self.state


# A DCP connection, seen by the producer.


class ConnectionState(Enum):
    """Where a producer's connection stands."""

    NEW = "new"
    """No Open has been accepted yet."""
    OPEN = "open"
    CLOSED = "closed"
    """It is gone, or about to be: nothing is streamed any more."""


class ConnectionInput(Enum):
    """What happens to a producer's connection."""

    OPENED = "opened"
    CLOSED = "closed"


CONNECTION_TRANSITIONS: Mapping[tuple[ConnectionState, ConnectionInput], ConnectionState] = {
    (ConnectionState.NEW, ConnectionInput.OPENED): ConnectionState.OPEN,
    (ConnectionState.NEW, ConnectionInput.CLOSED): ConnectionState.CLOSED,
    (ConnectionState.OPEN, ConnectionInput.CLOSED): ConnectionState.CLOSED,
    (ConnectionState.CLOSED, ConnectionInput.CLOSED): ConnectionState.CLOSED,
}


# A producer's stream: docs/spec/dcp.md#states-of-a-stream


class StreamState(Enum):
    """Where a producer's stream takes its changes from."""

    PENDING = "pending"
    """Accepted, nothing read yet."""
    BACKFILLING = "backfilling"
    """Changes come from disk, or it is not known yet that they need not."""
    IN_MEMORY = "in-memory"
    """The stream has caught up and follows the changes as they are made."""
    TAKEOVER_SEND = "takeover-send"
    """Like in-memory, but the consumer acknowledges each snapshot."""
    TAKEOVER_WAIT = "takeover-wait"
    """The consumer has been told a new vbucket state and has not answered."""
    DEAD = "dead"
    """Over; perhaps a Stream End has still to be sent."""


class StreamInput(Enum):
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
