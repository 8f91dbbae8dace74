from __future__ import annotations

from collections.abc import Iterator

import pytest

import tailrace.testing
from tailrace.testing.running import RunningNode


@pytest.fixture
def node() -> Iterator[RunningNode]:
    """A node with few vbuckets that answers immediately and waits for nothing."""
    with tailrace.testing.node(vbuckets=16) as node:
        yield node
