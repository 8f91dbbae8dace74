"""A node for a whole test file, and a fresh connection and prefix for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import VBucketState

_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_node() -> Iterator[RunningNode]:
    """One node for the tests of a module; each uses keys of its own."""
    with tailrace.testing.node(vbuckets=4, buckets=["second"]) as running:
        yield running


@pytest.fixture
def wire(shared_node: RunningNode) -> Iterator[Wire]:
    with Wire(shared_node.port) as connection:
        yield connection


@pytest.fixture
def key() -> bytes:
    """A key that no other test has."""
    return b"key-%d" % next(_numbers)


@pytest.fixture
def replica() -> Iterator[RunningNode]:
    """A node with a vbucket that a stream may write to."""
    with tailrace.testing.node(vbuckets=2) as node:
        node.set_vbucket_state(0, VBucketState.REPLICA)
        yield node
