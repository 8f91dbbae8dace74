"""Every state with every input: what the tables allow, and that nothing else happens."""

from __future__ import annotations

import pytest

from tailrace.errors import LocalProtocolError
from tailrace.protocol.states import (
    CONNECTION_TRANSITIONS,
    STREAM_TRANSITIONS,
    ConnectionInput,
    ConnectionState,
    Machine,
    StreamInput,
    StreamState,
)

# docs/spec/dcp.md#states-of-a-stream, as it stands there.
LEAVES_TO = {
    "pending": {"backfilling", "dead"},
    "backfilling": {"in-memory", "takeover-send", "dead"},
    "in-memory": {"backfilling", "dead"},
    "takeover-send": {"takeover-wait", "dead"},
    "takeover-wait": {"takeover-send", "dead"},
    "dead": {"dead"},
}


def test_stream_table_is_the_documents() -> None:
    found: dict[str, set[str]] = {state.value: set() for state in StreamState}
    for (state, _), target in STREAM_TRANSITIONS.items():
        found[state.value].add(target.value)
    assert found == LEAVES_TO


@pytest.mark.parametrize("state", StreamState)
@pytest.mark.parametrize("happened", StreamInput)
def test_stream(state: StreamState, happened: StreamInput) -> None:
    machine = Machine(STREAM_TRANSITIONS, state)
    target = STREAM_TRANSITIONS.get((state, happened))
    if target is None:
        with pytest.raises(LocalProtocolError, match=state.value):
            machine.feed(happened)
        assert machine.state is state
    else:
        assert machine.feed(happened) is machine.state is target


@pytest.mark.parametrize("state", ConnectionState)
@pytest.mark.parametrize("happened", ConnectionInput)
def test_connection(state: ConnectionState, happened: ConnectionInput) -> None:
    machine = Machine(CONNECTION_TRANSITIONS, state)
    if happened is ConnectionInput.CLOSED:
        assert machine.feed(happened) is ConnectionState.CLOSED
    elif state is ConnectionState.NEW:
        assert machine.feed(happened) is ConnectionState.OPEN
    else:
        with pytest.raises(LocalProtocolError):
            machine.feed(happened)
