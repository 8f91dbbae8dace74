"""Which connections a reader keeps."""

from __future__ import annotations

import json
import random

import pytest

from tailrace.client.cluster_map import ClusterMap
from tailrace.client.nodes import Nodes
from tailrace.connstr import Address, ConnectionString
from tailrace.errors import ConnectError
from tailrace.protocol.dcp.reader import ReaderSettings
from tailrace.protocol.dcp.reader_stream import ReaderStream

OLD, NEW = Address("127.0.0.1", 1), Address("127.0.0.1", 2)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(
        ConnectionString((OLD,)),
        ReaderSettings("test"),
        agent="test",
        allow_plain=False,
        retry_for_s=60.0,
        rng=random.Random(1),
    )


def test_a_connection_with_a_stream_on_it_is_kept_until_the_stream_ends(nodes: Nodes) -> None:
    """The map may be ahead: the end of the stream, or the answer to its request, is still on its way."""
    assert nodes.to_connect(0.0) == [OLD]
    link = nodes.connected(OLD, 0.0)
    nodes.map = ClusterMap(1, 1, (OLD, NEW), (0,))
    nodes.need([0])
    link.open_stream(ReaderStream(0))
    assert nodes.to_disconnect() == []
    nodes.map = ClusterMap(1, 2, (OLD, NEW), (1,))
    nodes.need([0])
    assert nodes.to_disconnect() == []
    link.close_stream(0)
    assert nodes.to_disconnect() == [OLD]


def test_nodes_that_have_left_are_forgotten(nodes: Nodes) -> None:
    """A cluster can move for as long as it likes."""
    for revision in range(1, 200):
        servers = [f"10.0.0.{revision}:1", "10.1.0.0:1"]
        config = {"rev": revision, "vBucketServerMap": {"serverList": servers, "vBucketMap": [[0], [1]]}}
        assert nodes.apply(json.dumps(config).encode(), OLD)
        nodes.need([0, 1])
        assert len(nodes.to_connect(0.0)) == (2 if revision == 1 else 1)
        nodes.lost(Address(f"10.0.0.{revision}", 1), ConnectError("gone"), 0.0)
    assert len(nodes.all()) == 2
    assert len(nodes._nodes) <= 3


def test_a_node_that_is_away_is_not_given_up_while_the_application_computes(nodes: Nodes) -> None:
    """It may block the event loop that would dial the node again."""
    nodes.map = ClusterMap(1, 1, (OLD,), (0,))
    nodes.need([0])
    assert nodes.to_connect(0.0) == [OLD]
    nodes.lost(OLD, ConnectError("gone"), 0.0)
    nodes.patience.handed_over(10.0)
    nodes.check(1_000.0)
    assert nodes.next_timer(1_000.0) == 1_000.0, "to call it, and not to give it up"
    nodes.patience.came_back(1_000.0)
    nodes.check(1_049.0)
    with pytest.raises(ConnectError, match="could not be reached for 60 s"):
        nodes.check(1_050.0)
