"""The pytest plugin: a fixture ``tailrace_node``. It imports nothing until the fixture is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .running import RunningNode


@pytest.fixture
def tailrace_node() -> Iterator[RunningNode]:
    """A node with 16 vbuckets in memory, a new one for each test."""
    from . import node

    with node() as running:
        yield running
