"""Every state with every input: what the tables allow, and that nothing else happens."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from syntax_trees import parse
from tailrace.errors import LocalProtocolError
from tailrace.protocol import states as protocol_states
from tailrace.protocol.states import (
    OPERATION_TRANSITIONS,
    STREAM_TRANSITIONS,
    Machine,
    StreamInput,
    StreamState,
)
from tailrace.server import states as server_states

ROOT = Path(__file__).parents[2]
MODULES = (protocol_states, server_states)
MACHINES = {**protocol_states.MACHINES, **server_states.MACHINES}
SPEC = ROOT / "docs" / "spec" / "dcp.md"


def test_the_stream_of_a_producer_is_the_documents() -> None:
    section = SPEC.read_text().split("\n## States of a stream\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z-]+) \| (.*) \|$", section, re.M)
    written = {
        state: set(re.findall(r"[a-z-]+", re.sub(r"\(.*?\)", "", targets)))
        for state, targets in rows
        if state != "state"
    }
    left: dict[str, set[str]] = {state.value: set() for state in StreamState}
    for (state, _), target in STREAM_TRANSITIONS.items():
        if state is not target:
            left[state.value].add(target.value)
    assert left == written


def kinds(table: Mapping[Any, Any]) -> tuple[list[Enum], list[Enum]]:
    """All states and all inputs of a table."""
    state, happened = map(type, next(iter(table)))
    assert issubclass(state, Enum) and issubclass(happened, Enum)
    return list(state), list(happened)


CASES = [
    pytest.param(table, state, happened, id=f"{about}: {state.value}, {happened.value}")
    for about, table in MACHINES.items()
    for state in kinds(table)[0]
    for happened in kinds(table)[1]
]


@pytest.mark.parametrize(("table", "state", "happened"), CASES)
def test_every_state_with_every_input(table: Mapping[Any, Enum], state: Enum, happened: Enum) -> None:
    machine = Machine(table, state)
    target = table.get((state, happened))
    if target is None:
        with pytest.raises(LocalProtocolError, match=state.value):
            machine.feed(happened)
        assert machine.state is state
    else:
        assert machine.feed(happened) is machine.state is target


def test_every_state_can_be_reached_and_every_input_happens() -> None:
    for about, table in MACHINES.items():
        all_states, inputs = kinds(table)
        assert {all_states[0], *table.values()} == {*all_states}, about
        assert {happened for _, happened in table} == {*inputs}, about


def test_every_table_is_listed() -> None:
    for module in MODULES:
        tables = {name: table for name, table in vars(module).items() if name.endswith("_TRANSITIONS")}
        assert len(tables) == len(module.MACHINES)
        assert all(any(table is listed for listed in module.MACHINES.values()) for table in tables.values())


def test_what_happens_to_an_operation_says_where_it_stood() -> None:
    """Many operations are moved at a time, by what happened to them alone."""
    assert len({happened for _, happened in OPERATION_TRANSITIONS}) == len(OPERATION_TRANSITIONS)


def set_from_outside(code: str) -> list[int]:
    """The lines that give a machine a state, without asking its table."""
    return [
        node.lineno
        for node in ast.walk(parse(code))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == "state"
        and ast.unparse(node.value).endswith("machine")
    ]


def test_nobody_sets_the_state_of_a_machine() -> None:
    assert {
        path.name: lines
        for path in (ROOT / "src").rglob("*.py")
        if (lines := set_from_outside(path.read_text()))
    } == {}


def test_who_sets_it_is_noticed() -> None:
    assert set_from_outside("self._machine.state = DONE\nx = stream.machine.state\nself.state = 1") == [1]


def test_what_does_not_count_is_undone() -> None:
    machine = Machine(STREAM_TRANSITIONS, StreamState.PENDING)
    before = machine.state
    machine.feed(StreamInput.STARTED)
    machine.undo(before)
    assert machine.state is StreamState.PENDING
