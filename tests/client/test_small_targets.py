"""Targets that ask for time: what is reported as written is there, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tailrace
import tailrace.testing
from tailrace.client.kv import KvClient
from tailrace.client.load import MadeUp
from tailrace.client.replicate import Replicator
from tailrace.testing.running import RunningNode

DOCS, SIZE = 6000, 1000
PLAN = MadeUp(DOCS, SIZE, deletes=0.1, seed=4)
SMALL = {"memory_quota": 1 << 20}


@pytest.fixture
def small() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=4, settings=SMALL) as node:
        yield node


def held(url: str) -> set[bytes]:
    """The keys that a node holds."""
    keys = set()
    with tailrace.connect_sync(url, no_value=True) as source:
        for event in source.changes(end="now"):
            if isinstance(event, tailrace.Mutation):
                keys.add(event.key)
            elif isinstance(event, tailrace.Deletion):
                keys.discard(event.key)
    return keys


def wanted() -> set[bytes]:
    deleted = set(PLAN.deleted.tolist())
    return {PLAN.key(number) for number in range(DOCS) if number not in deleted}


def test_load_counts_what_the_node_took(small: RunningNode) -> None:
    arguments = [small.url, "--docs", DOCS, "--size", SIZE, "--deletes", "0.1", "--seed", 4, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "load", *map(str, arguments)], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["writes"] == PLAN.writes
    assert held(small.url) == wanted()


def test_a_document_that_is_written_twice_ends_as_it_was_written_last(small: RunningNode) -> None:
    """The first of the two may be refused while the second is taken: it must not be done after it."""
    filler = "x" * SIZE
    lines = "".join(
        json.dumps({"key": f"k{number % 1000}", "value": {"n": number, "filler": filler}}) + "\n"
        for number in range(4000)
    )
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "load", small.url, "--from", "-", "--json"],
        input=lines.encode(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["writes"] == 4000
    with KvClient(small.url) as client:
        for number in range(3000, 4000):
            document = client.get(f"k{number % 1000}")
            assert document is not None
            assert json.loads(document.value)["n"] == number


def test_replicate_saves_no_position_behind_which_something_is_missing(
    small: RunningNode, tmp_path: Path
) -> None:
    state = tmp_path / "positions.json"
    with tailrace.testing.node(vbuckets=4) as origin:
        with KvClient(origin.url) as client:
            batches = PLAN.batches(4, collections=True, json_type=True, most=1000)
            assert sum(result.taken for result in client.write_many(batches)) == PLAN.writes
        with Replicator(origin.url, small.url, state=state) as replicator:
            sum(replicator.run(end="now"))
            assert replicator.done.changes >= len(wanted())
        assert held(small.url) == held(origin.url) == wanted()
        saved = json.loads(state.read_text())
        with KvClient(origin.url) as client:
            high = client.high_seqnos()
    assert {int(number): position["seqno"] for number, position in saved["vbuckets"].items()} == high
