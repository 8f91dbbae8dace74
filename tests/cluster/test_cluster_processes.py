"""Clusters of real processes: coordinator here, nodes in processes of their own, clients in threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.processes import (
    KEYS,
    PATIENCE_S,
    Reader,
    Writer,
    actives,
    cluster,
    documents,
    kept_ports,
    replicated,
    until,
    url,
)
from tailrace.client.kv import KvClient
from tailrace.cluster.service import DOOR_FILE, call
from tailrace.errors import ConnectError, TailraceError

pytestmark = pytest.mark.xdist_group("cluster")


def test_a_planned_move_loses_nothing_and_rolls_nobody_back(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", 2) as made:
        where = url(made)
        writer, reader = Writer(where), Reader(where)
        writer.start()
        reader.start()
        try:
            until(lambda: len(writer.acknowledged) == 40, "nothing is written")
            before = list(made.chains)
            assert made.add() == "n3"
            for _ in made.rebalance():
                time.sleep(0.02)
            assert {chain[0] for chain in made.chains} == {"n1", "n2", "n3"}
            assert made.chains != before
            acknowledged = writer.finish()
            expected = {key.encode(): str(number).encode() for key, number in acknowledged.items()}
            assert documents(where, KEYS) == expected
            until(lambda: reader.state() == expected or reader.errors, "the reader did not follow")
            assert not reader.errors
            assert reader.rollbacks == []
            assert all(len(holders) == 1 for holders in actives(made).values())
            until(lambda: replicated(made), "the new copies are not complete")
        finally:
            writer._stop_it.set()
            reader.finish()


def test_failover_promotes_replicas_and_readers_roll_back_what_was_lost(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", 3) as made:
        where = url(made)
        with KvClient(where, timeout_s=PATIENCE_S) as client:
            for number in range(200):
                client.set(f"key-{number % 40}", b"kept-%d" % number)
        until(lambda: replicated(made), "the copies are not complete")
        kept = documents(where, KEYS)
        reader = Reader(where)
        reader.start()
        try:
            until(lambda: reader.state() == kept, "the reader has not caught up")
            for name in ("n1", "n2", "n3"):
                made.members[name].report([])  # from now on nobody receives anything
            with KvClient(where, timeout_s=PATIENCE_S) as client:
                for key in KEYS:
                    client.set(key, b"lost?")
            until(lambda: set(reader.state().values()) == {b"lost?"}, "the reader has not caught up")
            of_n2 = {number for number, chain in enumerate(made.chains) if chain[0] == "n2"}
            pid = made.members["n2"].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            outcome = made.failover("n2")
            assert outcome == {"node": "n2", "promoted": len(of_n2), "lost": []}
            after = documents(where, KEYS)
            lost = {key for key, value in after.items() if value != b"lost?"}
            assert lost, "some vbucket of n2 had a key"
            assert all(after[key] == kept[key] for key in lost)
            until(lambda: reader.state() == after or reader.errors, "the reader did not roll back")
            assert not reader.errors
            assert {vbucket for vbucket, _ in reader.rollbacks} <= of_n2
            assert reader.rollbacks
            assert all(len(holders) == 1 for holders in actives(made).values())

            # the node comes back with its own history, and gives it up
            made.add("n2")
            for _ in made.rebalance():
                time.sleep(0.02)
            until(lambda: replicated(made), "the copies are not complete")
            assert documents(where, KEYS) == after
            assert all(len(holders) == 1 for holders in actives(made).values())
        finally:
            reader.finish()


def test_a_silent_node_is_failed_over_if_most_answer(tmp_path: Path) -> None:
    with cluster(tmp_path / "c", 3) as made:
        made.auto_failover_s = 3
        with KvClient(url(made), timeout_s=PATIENCE_S) as client:
            for key in KEYS:
                client.set(key, b"1")
        until(lambda: replicated(made), "the copies are not complete")
        assert made.watch() is None
        pid = made.members["n3"].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it does not answer, but might at any time
        assert until(made.watch, "nothing was failed over") == "n3"
        assert not made.members["n3"].is_running
        assert all(len(holders) == 1 for holders in actives(made).values())
        assert len(documents(url(made), KEYS)) == 40

        # two are left: one of them is not a majority
        pid = made.members["n2"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            assert made.watch() is None
        with pytest.raises(TailraceError, match="no other copy"):
            made.failover("n2")


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_takeover_that_is_interrupted_is_undone(tmp_path: Path, victim: str) -> None:
    with cluster(tmp_path / "c", 2) as made:
        with KvClient(url(made), timeout_s=PATIENCE_S) as client:
            for number in range(2000):
                client.set(f"key-{number % 40}", b"v%d" % number)
        until(lambda: replicated(made), "the copies are not complete")
        expected = documents(url(made), KEYS)
        takeovers = {number: ("n1", "n2") for number, chain in enumerate(made.chains) if chain[0] == "n1"}
        steps = made._take_over(takeovers)
        next(steps)
        dead = "n1" if victim == "source" else "n2"
        made.members[dead].kill()
        with pytest.raises(TailraceError):
            for _ in steps:
                time.sleep(0.02)
            made.rebalance().__next__()
        made.failover(dead)
        assert all(len(holders) == 1 for holders in actives(made).values())
        assert documents(url(made), KEYS) == expected
        made.add(dead)
        for _ in made.rebalance():
            time.sleep(0.02)
        assert documents(url(made), KEYS) == expected
        assert sorted({chain[0] for chain in made.chains}) == ["n1", "n2"]


@pytest.fixture
def two_ports() -> Iterator[int]:
    with kept_ports(2) as ports:
        yield ports[0]


def test_the_command_line(tmp_path: Path, two_ports: int) -> None:
    directory = tmp_path / "cli"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tailrace", "cluster", *arguments, "--dir", str(directory)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert run("status").returncode == 3
    try:
        few = ("--nodes", "2", "--replicas", "3")
        started = run("start", *few, "--vbuckets", "4", "--port", str(two_ports), "--json")
        assert started.returncode == 0, started.stderr
        assert (
            "2 nodes can keep 1 of 3 replicas; run 'tailrace cluster add' and 'rebalance'" in started.stderr
        )
        answer = json.loads(started.stdout)
        assert [node["state"] for node in answer["nodes"]] == ["up", "up"]
        again = run("start")
        assert (again.returncode, again.stderr.count("\n")) == (1, 1), again.stderr
        assert "is running; see" in again.stderr
        with KvClient(answer["url"], timeout_s=PATIENCE_S) as client:
            client.set("a", b"1")
        table = run("status")
        assert "n2" in table.stdout
        unknown = run("failover", "n9")
        assert unknown.returncode == 2 and "which has n1, n2" in unknown.stderr
        removed = run("remove", "n2", "--json")
        assert removed.returncode == 0, removed.stderr
        assert [node["state"] for node in json.loads(removed.stdout)["nodes"]] == ["up", "out"]
        assert run("stop").returncode == 0
        assert run("status").returncode == 3
        restarted = run("start", "--nodes", "7", "--vbuckets", "4", "--json")
        assert json.loads(restarted.stdout)["nodes"][0]["items"] == 1
        assert "already exists: --nodes stays 2\n" in restarted.stderr
        with KvClient(answer["url"].replace(f",127.0.0.1:{answer['nodes'][1]['port']}", "")) as client:
            stored = client.get("a")
            assert stored is not None and stored.value == b"1"
    finally:
        run("stop")


@pytest.mark.parametrize("door", ['{"port":1,"token":"x"}', "[]", "{}", "no JSON", '{"port":-5,"token":""}'])
def test_a_coordinator_that_was_killed(tmp_path: Path, door: str) -> None:
    """The door that it left behind leads nowhere, or is damaged: one line says what to do."""
    (tmp_path / DOOR_FILE).write_text(door)
    with pytest.raises(ConnectError, match=r"can't be reached .*'tailrace cluster start'"):
        call(tmp_path, "status")
