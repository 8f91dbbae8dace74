"""Three nodes of which one is gone but not failed over: readers go on with the vbuckets of the others, say
which node they wait for, and go on with all vbuckets when that node, or another one, has them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cluster.follow import FeedReader, chains, given, mirroring, write
from cluster.processes import KEYS, PATIENCE_S, Reader, cluster, documents, replicated, until, url
from tailrace.client.survey import AwayNodes
from tailrace.cluster.coordinator import Coordinator
from tailrace.errors import ConnectError
from tailrace.spark.rounds.bucket_watch import UnaskedVBuckets

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(UnaskedVBuckets, "SAY_AFTER_S", 0.0)
    with cluster(tmp_path / "c", 3) as made:
        write(made, b"1")
        until(lambda: replicated(made), "the copies are not complete")
        yield made


def send(made: Coordinator, name: str, number: signal.Signals) -> None:
    pid = made.members[name].pid
    assert pid is not None
    os.kill(pid, number)
    if number == signal.SIGKILL:
        until(lambda: not made.members[name].is_running, "it is not dead")


@contextmanager
def stopped(made: Coordinator, name: str) -> Iterator[None]:
    """A node that does nothing for a while."""
    send(made, name, signal.SIGSTOP)
    try:
        yield
    finally:
        send(made, name, signal.SIGCONT)


def of_node(made: Coordinator, name: str) -> tuple[list[str], list[str]]:
    """The keys that a node has, and the others."""
    actives = {key: chain[0] for key, chain in chains(made).items()}
    return [key for key in KEYS if actives[key] == name], [key for key in KEYS if actives[key] != name]


def encoded(keys: list[str]) -> set[bytes]:
    return {key.encode() for key in keys}


@pytest.mark.parametrize("way_out", ["it comes back", "it is failed over"])
def test_the_others_go_on(made: Coordinator, tmp_path: Path, way_out: str) -> None:
    where = url(made)
    gone, there = of_node(made, "n2")
    first = documents(where, KEYS)
    reader, feed = Reader(where), FeedReader(given(where))
    with closing(feed.feed), mirroring(where, tmp_path / "table") as (mirrored, handle):
        reader.start()
        feed.start()
        until(lambda: mirrored.rows() == reader.state() == feed.state == first, "they have not caught up")
        send(made, "n2", signal.SIGKILL)
        write(made, b"2", there)
        until(lambda: mirrored.values(encoded(there)) == {b"2"}, "the mirror waits as a whole")
        assert mirrored.values(encoded(gone)) == {b"1"}
        until(
            lambda: mirrored.has_said(f"127.0.0.1:{made.members['n2'].port}", "vbuckets: "),
            "nobody says for whom it waits",
        )
        until(lambda: "waiting for nodes" in handle.status["message"], "the handle does not say it")
        until(lambda: {reader.state()[key] for key in encoded(there)} == {b"2"}, "the reader waits, too")
        until(lambda: {feed.state[key] for key in encoded(there)} == {b"2"}, "the source waits, too")
        assert feed.feed.latest_positions().keys() == set(range(8)), "Spark asks for the lag every batch"
        if way_out == "it comes back":
            made.add("n2")
        else:
            made.failover("n2")
        made.settle()
        write(made, b"3")
        last = dict.fromkeys(encoded(KEYS), b"3")
        until(lambda: mirrored.rows() == reader.state() == feed.state == last, "they don't go on with all")
        assert (handle.exception(), reader.errors) == (None, [])
        reader.finish()


def test_a_mirror_that_runs_once_does_not_end_without_the_vbuckets_of_a_node(
    made: Coordinator, tmp_path: Path
) -> None:
    where = url(made)
    _, there = of_node(made, "n2")
    send(made, "n2", signal.SIGKILL)
    with mirroring(where, tmp_path / "table", once=True) as (mirrored, handle):
        until(lambda: mirrored.rows().keys() == encoded(there), "it does not begin with what is there")
        until(lambda: mirrored.has_said(f"127.0.0.1:{made.members['n2'].port}"), "nobody says why")
        assert handle.isActive
        made.add("n2")
        made.settle()
        assert handle.awaitTermination(PATIENCE_S), "it does not end"
        assert mirrored.rows() == documents(where, KEYS)


@pytest.mark.parametrize("once", [False, True])
def test_a_node_that_stays_away_ends_the_mirror(made: Coordinator, tmp_path: Path, once: bool) -> None:
    where = url(made)
    send(made, "n2", signal.SIGKILL)
    with mirroring(where, tmp_path / "table", once=once, retryFor="2") as (mirrored, handle):
        with pytest.raises(ConnectError, match=r"vbucket \d can't be read for 2 s: 127\.0\.0\.1:"):
            handle.awaitTermination(PATIENCE_S)
        assert not mirrored.has_said("is repeated"), "it has tried for long enough"
        assert mirrored.rows(), "what can be read is there"


def test_a_node_that_stands_still_holds_nobody_up(
    made: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwayNodes, "PATIENCE_S", 0.5)
    where = url(made)
    _, there = of_node(made, "n2")
    with mirroring(where, tmp_path / "table") as (mirrored, handle):
        until(lambda: len(mirrored.rows()) == len(KEYS), "it has not caught up")
        with stopped(made, "n2"):
            write(made, b"2", there)
            until(lambda: mirrored.values(encoded(there)) == {b"2"}, "the mirror waits as a whole")
            until(lambda: mirrored.has_said("does not answer"), "nobody says why")
        write(made, b"3")
        until(lambda: mirrored.values(encoded(KEYS)) == {b"3"}, "it does not go on with all")
        assert handle.exception() is None
