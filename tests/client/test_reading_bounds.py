"""What a reading may be limited to: without vbuckets it ends at once, with an unknown one it is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tailrace.testing
from tailrace import Position
from tailrace.errors import UsageError
from tailrace.testing.running import RunningNode


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4) as running:
        running.set("k", 1)
        yield running


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "bounds",
    [{"end": {}}, {"vbuckets": []}, {"vbuckets": [], "end": "now"}, {"vbuckets": [1], "end": {2: 1}}],
)
def test_a_reading_of_no_vbucket_is_done_at_once(
    node: RunningNode, connect: Callable[..., Any], bounds: dict[str, Any]
) -> None:
    # the high seqnos of an empty bucket as the end must not hang
    source = connect(node.url)
    assert list(source.changes(**bounds)) == []
    assert list(source.changes(end="now"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "bounds", [{"vbuckets": [7]}, {"end": {0: 1, 7: 1}}, {"start": {7: Position.BEGINNING}}]
)
def test_a_vbucket_that_is_not_there_is_named(
    node: RunningNode, connect: Callable[..., Any], bounds: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="there is no vbucket 7, the last is 3"):
        list(connect(node.url).changes(**{"end": "now", **bounds}))
