"""Three nodes whose replicas stand still: who reads with ``persisted_only`` waits, says why, and goes on.

What is not on the disks of all copies can be taken back by a failover, and here it is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

import tailrace
from cluster.processes import KEYS, PATIENCE_S, RETRY_FOR_S, cluster, documents, replicated, until, url
from spark.local_jobs import LocalJobs
from table.memory_table import MemoryTable
from tailrace.client.events import Mutation, Rollback
from tailrace.client.kv import KvClient
from tailrace.cluster.coordinator import Coordinator
from tailrace.errors import UsageError
from tailrace.spark.rounds.assignment import Assignment
from tailrace.spark.rounds.connections import close_idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.spark.rounds.verdicts import HeldBack

pytestmark = pytest.mark.xdist_group("cluster")

State = dict[bytes, bytes]


class PersistedReader(threading.Thread):
    """What a reader was given, and took back."""

    def __init__(self, where: str) -> None:
        super().__init__(daemon=True)
        self.source = tailrace.connect_sync(where, persisted_only=True, retry_for_s=RETRY_FOR_S)
        self.state: State = {}
        self.rollbacks: list[Rollback] = []

    def run(self) -> None:
        with (
            suppress(UsageError),
            closing(self.source.changes()) as changes,
        ):  # it ends when the source is closed
            for event in changes:
                if isinstance(event, Mutation):
                    self.state[event.key] = event.value
                elif isinstance(event, Rollback):
                    self.rollbacks.append(event)


@contextmanager
def mirrored(where: str, directory: Path) -> Iterator[tuple[MemoryTable, list[RoundProgress], list[str]]]:
    """A table in step with the bucket, as far as that is on disk; rounds; what it says."""
    table, rounds, said = MemoryTable(directory), list[RoundProgress](), list[str]()
    given = {"connectionString": where, "bucket": "default", "persistedOnly": "true", "retryFor": "600"}
    mirror = Mirror(
        Assignment(
            LocalJobs(),
            given,
            [table],
            "default",
            on_progress=rounds.append,
            on_trouble=said.append,
            in_background=False,
        )
    )
    handle = mirror.start()
    try:
        yield table, rounds, said
        assert handle.exception() is None
    finally:
        handle.stop()
        close_idle_sources()


def rows(table: MemoryTable) -> State:
    shown = table.rows().select(["key", "value"]).to_pylist()
    return {row["key"].encode(): row["value"].encode() for row in shown}


def values(table: MemoryTable, keys: set[bytes]) -> set[bytes]:
    shown = rows(table)
    return {shown[key] for key in keys}


def write(made: Coordinator, value: bytes, keys: list[str] = KEYS) -> None:
    with KvClient(url(made), timeout_s=PATIENCE_S) as client:
        for key in keys:
            client.set(key, value)


def chains(made: Coordinator) -> dict[str, tuple[str, ...]]:
    """The nodes with a copy of each key, the active first."""
    with KvClient(url(made), timeout_s=PATIENCE_S) as client:
        return {key: tuple(name for name in made.chains[client.vbucket_of(key)] if name) for key in KEYS}


def test_replicas_that_receive_nothing_hold_changes_back_and_a_failover_takes_none_back(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c", 3) as made:
        where = url(made)
        write(made, b"kept")
        until(lambda: replicated(made), "the copies are not complete")
        kept = documents(where, KEYS)
        reader = PersistedReader(where)
        with reader.source, mirrored(where, tmp_path / "table") as (table, rounds, _):
            reader.start()
            until(lambda: reader.state == kept, "the reader has not caught up")
            until(lambda: rows(table) == kept, "the mirror has not caught up")
            for name in ("n1", "n2", "n3"):
                made.members[name].report([])  # from now on nobody receives anything
            write(made, b"lost?")
            waits = "waits until the changes are on disk everywhere"
            until(lambda: waits in reader.source.stats()["waits_for"], "the reader does not wait")
            pid = made.members["n2"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            made.failover("n2")
            assert (reader.state, rows(table)) == (kept, kept), "what was not on all disks was handed out"
            made.settle()
            after = documents(where, KEYS)
            assert b"kept" in after.values(), "the failover lost something"
            until(lambda: reader.state == after, "the reader does not go on")
            until(lambda: rows(table) == after, "the mirror does not go on")
            assert reader.rollbacks == []
            assert not any(progress.rolled_back for progress in rounds)


def test_a_replica_that_stands_still_holds_back_its_own_vbuckets_of_a_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldBack, "AFTER_S", 0.0)
    with cluster(tmp_path / "c", 3) as made:
        write(made, b"1")
        until(lambda: replicated(made), "the copies are not complete")
        where, copies = url(made), chains(made)
        held = {key.encode() for key in KEYS if "n3" in copies[key][1:]}
        with mirrored(where, tmp_path / "table") as (table, _, said):
            until(lambda: len(rows(table)) == len(KEYS), "the mirror has not caught up")
            made.members["n3"].report([])  # it receives nothing any more
            write(made, b"2")
            free = {key.encode() for key in KEYS} - held
            until(lambda: values(table, free) == {b"2"}, "others wait too")
            port = made.members["n3"].port
            until(lambda: any(f"the replica at 127.0.0.1:{port}" in text for text in said), "nobody says why")
            assert values(table, held) == {b"1"}
            made.settle()  # it is told again whom to follow
            until(lambda: rows(table) == documents(where, KEYS), "the mirror does not go on")
