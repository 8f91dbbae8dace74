"""Three nodes whose replicas stand still: readers with ``persisted_only`` wait, say why, and go on.

What is not on the disks of all copies can be taken back by a failover, and is taken back here.
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
from cluster.follow import FeedReader, Mirrored, State, chains, given, mirroring, write
from cluster.processes import KEYS, RETRY_FOR_S, cluster, documents, replicated, until, url
from tailrace.client.events import Mutation, Rollback
from tailrace.errors import UsageError
from tailrace.spark.rounds.troubled_vbuckets import HeldBack

pytestmark = pytest.mark.xdist_group("cluster")


class PersistedReader(threading.Thread):
    """What a reader was given, and took back."""

    def __init__(self, where: str) -> None:
        super().__init__(daemon=True)
        self.source = tailrace.connect_sync(where, persisted_only=True, retry_for_s=RETRY_FOR_S)
        self.state: State = {}
        self.rollbacks: list[Rollback] = []

    def run(self) -> None:
        with suppress(UsageError), closing(self.source.changes()) as changes:  # until the source is closed
            for event in changes:
                if isinstance(event, Mutation):
                    self.state[event.key] = event.value
                elif isinstance(event, Rollback):
                    self.rollbacks.append(event)


@contextmanager
def reading(where: str, directory: Path) -> Iterator[tuple[PersistedReader, FeedReader, Mirrored]]:
    """A reader, the Spark source and a mirror, all of which wait for every disk."""
    reader = PersistedReader(where)
    feed = FeedReader(given(where, persistedOnly="true"))
    with (
        closing(feed.feed),
        reader.source,
        mirroring(where, directory, persistedOnly="true") as (mirrored, _),
    ):
        reader.start()
        feed.start()
        yield reader, feed, mirrored


def test_replicas_that_receive_nothing_hold_changes_back_and_a_failover_takes_none_back(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path / "c", 3) as made:
        where = url(made)
        write(made, b"kept")
        until(lambda: replicated(made), "the copies are not complete")
        kept = documents(where, KEYS)
        with reading(where, tmp_path / "table") as (reader, feed, mirrored):
            until(lambda: reader.state == kept, "the reader has not caught up")
            until(lambda: feed.state == kept, "the source has not caught up")
            until(lambda: mirrored.rows() == kept, "the mirror has not caught up")
            for name in ("n1", "n2", "n3"):
                made.members[name].report([])  # from now on nobody receives anything
            write(made, b"lost?")
            waits = "waits until the changes are on disk everywhere"
            until(lambda: waits in reader.source.stats()["waits_for"], "the reader does not wait")
            pid = made.members["n2"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            made.failover("n2")
            handed_out = (reader.state, feed.state, mirrored.rows())
            assert handed_out == (kept, kept, kept), "what was not on all disks was handed out"
            made.settle()
            after = documents(where, KEYS)
            assert b"kept" in after.values(), "the failover lost something"
            until(lambda: reader.state == after, "the reader does not go on")
            until(lambda: feed.state == after, "the source does not go on")
            until(lambda: mirrored.rows() == after, "the mirror does not go on")
            assert (reader.rollbacks, feed.rolled_back) == ([], [])
            assert not any(progress.rolled_back for progress in mirrored.rounds)


def test_a_replica_that_stands_still_holds_back_its_own_vbuckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldBack, "AFTER_S", 0.0)
    with cluster(tmp_path / "c", 3) as made:
        write(made, b"1")
        until(lambda: replicated(made), "the copies are not complete")
        where, copies = url(made), chains(made)
        held = {key.encode() for key in KEYS if "n3" in copies[key][1:]}
        free = {key.encode() for key in KEYS} - held
        with reading(where, tmp_path / "table") as (reader, feed, mirrored):
            until(lambda: len(mirrored.rows()) == len(KEYS), "the mirror has not caught up")
            until(lambda: len(reader.state) == len(feed.state) == len(KEYS), "others have not caught up")
            made.members["n3"].report([])  # it receives nothing any more
            write(made, b"2")
            for state in (mirrored.rows, lambda: reader.state, lambda: feed.state):
                until(lambda state=state: _values(state(), free) == {b"2"}, "others wait too")  # type: ignore[misc]
            slow = f"the replica at 127.0.0.1:{made.members['n3'].port}"
            until(lambda: mirrored.has_said(slow), "nobody says why")
            until(lambda: slow in reader.source.stats()["waits_for"], "the reader does not say why")
            for handed_out in (mirrored.rows(), reader.state, feed.state):
                assert _values(handed_out, held) == {b"1"}
            made.settle()  # it is told again whom to follow
            after = documents(where, KEYS)
            until(lambda: mirrored.rows() == after, "the mirror does not go on")
            until(lambda: reader.state == feed.state == after, "the others do not go on")
            assert (reader.rollbacks, feed.rolled_back) == ([], [])


def _values(state: State, keys: set[bytes]) -> set[bytes]:
    return {state[key] for key in keys}
