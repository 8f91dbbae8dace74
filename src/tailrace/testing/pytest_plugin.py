"""The pytest plugin: a fixture ``tailrace_node``. It loads nothing before the fixture is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .running import RunningNode


@pytest.fixture
def tailrace_node() -> Iterator[RunningNode]:
    """A node with 16 vbuckets in memory, of its own for each test."""
    from . import node

    with node() as running:
        yield running
