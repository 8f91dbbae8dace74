"""Every version of a document, over real sockets: to a reader, to a replica, and into the change log."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace import Mutation, Snapshot
from tailrace.client.jsonlines import json_line
from tailrace.client.kv import KvClient
from tailrace.connstr import parse
from tailrace.errors import UsageError
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table
from tailrace.wire.codes import VBucketState

KEYS = [f"k{number}" for number in range(5)]


def running(path: Path | None = None, **settings: Any) -> Any:
    settings = {"history_retention_bytes": "4g", **settings}
    return tailrace.testing.node(vbuckets=2, data=path, settings=settings)


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
    """The part that is no longer complete comes first, each key once, and does not end the snapshot."""
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


@pytest.mark.parametrize(
    ("updates", "keys"), [(20_000, 100), pytest.param(1_000_000, 1_000, marks=pytest.mark.long)]
)
def test_the_change_log_has_every_version(tmp_path: Path, updates: int, keys: int) -> None:
    """Mirrored now and then while segments are merged; in the middle the collection has no history,
    for the versions that are made meanwhile. The table is the same either way.
    """
    table, log = tmp_path / "table", tmp_path / "log"

    def mirrored(node: Any) -> None:
        mirror = build_mirror(
            LocalJobs(),
            node.url,
            table,
            changes=log,
            once=True,
            in_background=False,
            options={"everyVersion": "true"},
        )
        mirror.prepare()
        mirror.run()

    rounds = updates // keys
    folded: dict[int, tuple[int, int]] = {}
    with running(path=tmp_path / "data", memory_quota="4m") as node, KvClient(parse(node.url)) as client:
        for number in range(rounds):
            if number == rounds // 2:
                history_of(client, "_default", history=False)
                before = [node.high_seqno(vbucket) for vbucket in range(2)]
            elif number == rounds // 2 + rounds // 10:
                history_of(client, "_default", history=True)
                after = [node.high_seqno(vbucket) for vbucket in range(2)]
                folded = dict(enumerate(zip(before, after, strict=True)))
            node.set_many({f"key-{key}": {"round": number} for key in range(keys)})
            if number % (rounds // 7) == 0:
                mirrored(node)
        mirrored(node)
        verdict = verify_table(LocalJobs(), source_options(node.url), open_table(table))
        assert verdict.equal and verdict.documents == keys
        rows = tailrace.read_table(log, columns=["vbucket", "seqno", "op", "key"]).to_arrow()
        made = 0
        for vbucket, (first, last) in folded.items():
            own = rows.filter((pc.field("vbucket") == vbucket) & (pc.field("op") == "mutation"))
            logged = own["seqno"].to_numpy()
            assert len(np.unique(logged)) == len(logged), "a change is in the log twice"
            every = np.arange(1, node.high_seqno(vbucket) + 1)
            events = rows.filter((pc.field("vbucket") == vbucket) & (pc.field("op") == "system"))
            kept = every[(every <= first) | (every > last)]
            kept = np.setdiff1d(kept, events["seqno"].to_numpy())
            outside = np.sort(logged[(logged <= first) | (logged > last)])
            assert outside.tolist() == kept.tolist(), "a version is missing"
            middle = logged[(logged > first) & (logged <= last)]
            assert 0 < len(middle) < last - first, "it was folded there"
            made += len(outside)
        assert made == updates - rounds // 10 * keys
