"""The tables of the server's machines: nothing in them is unreachable, nothing is missing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest

from tailrace.server import states

TABLES: dict[str, Mapping[tuple[Enum, Enum], Enum]] = {
    name: table for name, table in vars(states).items() if name.endswith("_TRANSITIONS")
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_and_every_input_happens(name: str) -> None:
    table = TABLES[name]
    states, inputs = map(type, next(iter(table)))
    assert issubclass(states, Enum) and issubclass(inputs, Enum)
    assert {next(iter(states)), *table.values()} == {*states}
    assert {given for _, given in table} == {*inputs}
