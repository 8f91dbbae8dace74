from __future__ import annotations

import pytest

import tailrace.testing


@pytest.fixture
def node():
    """A node with few vbuckets that answers at once and waits for nothing."""
    with tailrace.testing.node(vbuckets=16) as node:
        yield node
