"""Every version of a document, over real sockets: to a reader, to a replica, and into the change log."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace import Mutation, Snapshot
from tailrace.client.jsonlines import json_line
from tailrace.client.kv import KvClient
from tailrace.connstr import parse
from tailrace.errors import UsageError
from tailrace.spark.rounds.connections import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table
from tailrace.wire.codes import VBucketState

KEYS = [f"k{number}" for number in range(5)]


def running(**settings: Any) -> Any:
    return tailrace.testing.node(vbuckets=2, settings={"history_retention_bytes": "64m", **settings})


@pytest.fixture
def node() -> Iterator[Any]:
    with running() as made:
        yield made
    close_idle_sources()


def write(node: Any, count: int, *, vbucket: int = 0) -> None:
    for number in range(count):
        node.set(KEYS[number % len(KEYS)], {"n": number}, vbucket=vbucket)


def seqnos(events: list[Any], vbucket: int = 0) -> list[int]:
    return [event.seqno for event in events if isinstance(event, Mutation) and event.vbucket == vbucket]


def test_all_of_them_to_who_asks(node: Any, connect: Any) -> None:
    write(node, 60)
    node.persist()
    events = list(connect(node.url, every_version=True).changes(end="now"))
    assert seqnos(events) == list(range(1, 61))
    (snapshot,) = (event for event in events if isinstance(event, Snapshot))
    assert snapshot.history and json.loads(json_line(snapshot))["history"] is True
    plain = list(connect(node.url).changes(end="now"))
    assert len(seqnos(plain)) == len(KEYS)
    assert not any(event.history for event in plain if isinstance(event, Snapshot))


def test_two_markers_with_one_range(connect: Any) -> None:
    """The part that is not all there any more comes first, each key once, and does not end the snapshot."""
    with running(history_retention_bytes="8k", history_changes=0, memory_quota="1m") as node:
        write(node, 400)
        node.persist()
        node.compact()
        node.restart()  # nothing is in memory
        write(node, 3)
        source = connect(node.url, every_version=True)
        events = list(source.changes(end="now"))
        first, second, *_ = [event for event in events if isinstance(event, Snapshot)]
        assert (first.start, first.end, first.history) == (0, second.end, False)
        assert (second.start, second.end, second.history) == (first.start, first.end, True)
        start = next(event.seqno for event in events[events.index(second) :] if isinstance(event, Mutation))
        got = seqnos(events)
        assert start > 100 and [seqno for seqno in got if seqno >= start] == list(range(start, 404))
        assert len(got) <= 404 - start + len(KEYS)
        # a reader that stopped in the middle goes on there
        taken = []
        reader = connect(node.url, every_version=True)
        with contextlib.closing(reader.changes()) as changes:
            for event in changes:
                taken += [event] if isinstance(event, Mutation) else []
                if taken and taken[-1].seqno == start + 20:
                    break
            position = reader.positions()
        more = list(connect(node.url, every_version=True).changes(position, end="now"))
        assert seqnos(taken) + seqnos(more) == got


def test_a_replica_that_takes_over_has_them_too(node: Any, connect: Any) -> None:
    with running() as other:
        write(node, 30)
        other.replicate([0], node)
        write(node, 30)
        while other.high_seqno(0) < 60:
            time.sleep(0.01)
        other.replicate([0], None)
        other.set_vbucket_state(0, VBucketState.ACTIVE)
        assert seqnos(list(connect(other.url, every_version=True).changes(end="now"))) == list(range(1, 61))


@pytest.mark.parametrize("dialect", ["upr-a", "upr-b", "tap"])
def test_the_older_dialects_know_nothing_of_it(dialect: str) -> None:
    with pytest.raises(UsageError, match="every_version"):
        tailrace.connect("couchbase://127.0.0.1", dialect=dialect, every_version=True)


def history_of(client: Any, name: str, *, history: bool) -> None:
    """Change whether a collection keeps its history."""
    manifest = client.manifest()
    manifest["uid"] = f"{int(manifest['uid'], 16) + 1:x}"
    for collection in manifest["scopes"][0]["collections"]:
        if collection["name"] == name:
            collection["history"] = history
    client.set_manifest(manifest)


def test_the_change_log_has_every_version(node: Any, tmp_path: Path) -> None:
    """Also of a collection whose versions were folded in the middle; the table is the same either way."""

    def mirrored() -> None:
        mirror = build_mirror(
            LocalJobs(),
            node.url,
            tmp_path / "table",
            changes=tmp_path / "log",
            once=True,
            in_background=False,
            options={"everyVersion": "true"},
        )
        mirror.prepare()
        mirror.run()

    def logged() -> list[int]:
        rows = (
            tailrace.read_table(tmp_path / "log", columns=["vbucket", "seqno", "op"]).to_arrow().to_pylist()
        )
        return sorted(row["seqno"] for row in rows if row["vbucket"] == 0 and row["op"] == "mutation")

    write(node, 100)
    mirrored()
    assert logged() == list(range(1, 101))
    write(node, 50)
    mirrored()
    assert logged() == list(range(1, 151))
    with KvClient(parse(node.url)) as client:
        history_of(client, "_default", history=False)
        folded = node.high_seqno(0)
        write(node, 50)
        mirrored()
        newest = list(range(folded + 46, folded + 51))
        assert [seqno for seqno in logged() if seqno > folded] == newest
        history_of(client, "_default", history=True)
        again = node.high_seqno(0)
        write(node, 50)
        mirrored()
    assert [seqno for seqno in logged() if seqno > again] == list(range(again + 1, again + 51))
    verdict = verify_table(LocalJobs(), source_options(node.url), open_table(tmp_path / "table"))
    assert verdict.equal and verdict.documents == len(KEYS)
