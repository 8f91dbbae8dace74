"""java-dcp-client and gocbcore read a node, as they read any server, and end with what it has."""

from __future__ import annotations

import pytest

import tailrace.testing
from client.application import server_state
from interop.foreign_reader import ForeignReader
from tailrace.testing.running import RunningNode

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("readers"), pytest.mark.timeout(900)]

KEYS = [f"doc-{number}".encode() for number in range(300)]


def write(node: RunningNode, round_: int, keys: list[bytes] = KEYS, size: int = 0) -> None:
    for number, key in enumerate(keys):
        if round_ and number % 7 == round_ % 7:
            node.delete(key)
        else:
            node.set(key, {"round": round_, "number": number, "filling": "x" * size})


def until_equal(reader: ForeignReader, node: RunningNode) -> None:
    """The reader has exactly what the node has: keys, seqnos and values."""
    truth = server_state(node, KEYS)
    reader.until(lambda: reader.state() == truth, "it does not get what the node has")


def test_everything_that_is_there_and_comes(peer: list[str]) -> None:
    with tailrace.testing.node(vbuckets=64) as node:
        write(node, 0, size=20_000)  # more than a window of a mebibyte
        with ForeignReader(peer, node.port) as reader:
            until_equal(reader, node)
            assert reader.words["connected"] == 1
            for round_ in range(1, 4):
                write(node, round_)
                until_equal(reader, node)
            assert reader.words["mutation"] >= len(KEYS)
            assert reader.words["deletion"] > 0
            assert reader.rollbacks == []


def test_a_rollback(peer: list[str]) -> None:
    with tailrace.testing.node(vbuckets=8) as node, ForeignReader(peer, node.port) as reader:
        for round_ in range(3):
            write(node, round_)
            until_equal(reader, node)  # each version, so that it can go back to any of them
        lost = {vbucket: node.high_seqno(vbucket) - 10 for vbucket in (1, 4, 6)}
        for vbucket, seqno in lost.items():
            node.rewind(vbucket=vbucket, to_seqno=seqno)
        reader.until(lambda: len(reader.rollbacks) >= len(lost), "nobody tells it of the rollback")
        assert dict(reader.rollbacks) == lost
        until_equal(reader, node)
        write(node, 3)
        until_equal(reader, node)


def test_connections_that_are_cut(peer: list[str]) -> None:
    with tailrace.testing.node(vbuckets=8) as node, ForeignReader(peer, node.port) as reader:
        write(node, 0)
        until_equal(reader, node)
        node.drop_connections()
        write(node, 1)
        until_equal(reader, node)
