"""Three processes share a bucket; one is killed, one is stopped and wakes up too late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from tailrace.client.groups.member import GroupMember
from tailrace.client.groups.stores import open_group_store
from tailrace.errors import UsageError

VBUCKETS = 16
TIMEOUT_S = 1.5
PATIENCE_S = 120.0


class Tail:
    """A `tailrace tail --group`, and what it wrote."""

    def __init__(self, url: str, groups: Path, out: Path) -> None:
        command = [sys.executable, "-m", "tailrace", "tail", url, "--json", "--changes-only"]
        command += ["--group", "billing", "--group-store", str(groups), "--group-timeout", f"{TIMEOUT_S}s"]
        self.out = out
        with out.open("wb") as file, out.with_suffix(".err").open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=file, stderr=errors)

    def changes(self) -> list[tuple[int, int, str]]:
        """Vbucket, seqno and key of each change; a line that was cut off does not count."""
        lines = self.out.read_bytes().rpartition(b"\n")[0].splitlines()
        return [(row["vbucket"], row["seqno"], row["key"]) for row in map(json.loads, lines)]


@pytest.fixture
def node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def observer(groups: Path) -> GroupMember:
    store = open_group_store(groups, "billing", "default")
    return GroupMember(store, bucket="default", vbucket_count=VBUCKETS, name="observer")


def test_one_is_killed_and_one_sleeps(node: Any, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    tails = [Tail(node.url, groups, tmp_path / f"{name}.jsonl") for name in ("killed", "asleep", "left")]
    killed, asleep, left = tails
    watcher = observer(groups)
    written: set[str] = set()

    def write(count: int) -> None:
        for _ in range(count):
            written.add(key := f"k{len(written)}")
            node.set(key, {"n": len(written)})

    def owners() -> dict[int, str]:
        return dict(watcher._read()[1].owners)

    def is_shared_by(count: int) -> bool:
        return len(owners()) == VBUCKETS and len(set(owners().values())) == count

    def seen(*some: Tail) -> set[str]:
        return {key for tail in some for _, _, key in tail.changes()}

    try:
        until(lambda: is_shared_by(3))
        write(300)
        until(lambda: seen(*tails) == written)
        write(200)  # some of it is on its way
        killed.process.kill()
        killed.process.wait()
        os.kill(asleep.process.pid, signal.SIGSTOP)
        saved = {v: held.position.seqno for v, held in watcher.load(range(VBUCKETS)).items()}
        first = {tail: tail.changes() for tail in (killed, asleep)}
        write(100)
        until(lambda: is_shared_by(1))
        until(lambda: seen(*tails) == written)
        write(100)
        os.kill(asleep.process.pid, signal.SIGCONT)
        assert asleep.process.wait(PATIENCE_S) == 1
        told = asleep.out.with_suffix(".err").read_text()
        assert told.startswith("tailrace: error: the group has given up this reader")
        until(lambda: seen(*tails) == written)
        # what came twice was handed out by one of these two, and not saved
        handed_out = set(first[killed]) | set(asleep.changes())
        twice = set(left.changes()) & handed_out
        assert all(seqno > saved.get(vbucket, 0) for vbucket, seqno, _ in twice)
        every = left.changes() + killed.changes() + asleep.changes()
        assert len(every) - len(set(every)) == len(twice)
        left.process.terminate()
        assert left.process.wait(PATIENCE_S) == 0
        # it has left: nobody waits for it
        assert not watcher._read()[1].members
    finally:
        for tail in tails:
            if tail.process.poll() is None:
                tail.process.kill()
                tail.process.wait()


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_vbuckets_are_handed_over_at_snapshot_ends(
    request: pytest.FixtureRequest, node: Any, tmp_path: Path, kind: str
) -> None:
    """In one process, with the blocking source: a second reader gets its half, and nothing comes twice."""
    where = tmp_path if kind == "directory" else request.getfixturevalue("redis")
    options: Any = {"group": "pair", "group_store": where, "group_timeout_s": 2.0}
    seen: list[tuple[int, int]] = []
    for number in range(100):
        node.set(f"a{number}", {"n": number})
    with (
        tailrace.connect_sync(node.url, **options) as first,
        tailrace.connect_sync(node.url, **options) as second,
    ):
        changes = [source.batches() for source in (first, second)]

        def read(batches: Any) -> None:
            batch = next(batches)
            seen.extend(zip(batch["vbucket"].to_pylist(), batch["seqno"].to_pylist(), strict=True))

        while len(seen) < 100:
            read(changes[0])
        assert first.assigned == set(range(VBUCKETS))
        with pytest.raises(UsageError, match="reads for ever"):
            next(second.changes(end="now"))
        # the first one hands over only when it is asked for more
        done = threading.Thread(target=read, args=(changes[0],))
        done.start()
        began = threading.Thread(target=read, args=(changes[1],))
        began.start()
        until(lambda: len(second.assigned) == len(first.assigned) == VBUCKETS // 2)
        for number in range(100):
            node.set(f"b{number}", {"n": number})
        done.join()
        began.join()
        while len(seen) < 200:
            for source, batches in zip((first, second), changes, strict=True):
                mine = {(v, s) for v, s in seen if v in source.assigned}
                if len(mine) < sum(node.high_seqno(v) for v in source.assigned):
                    read(batches)
        assert first.stats()["group"]["members"] == 2
        for batches in changes:
            batches.close()
    assert len(seen) == len(set(seen)) == 200


def test_now_is_when_the_group_began(node: Any, tmp_path: Path) -> None:
    """Not when a member that took a vbucket over began: what came in between would never be read."""
    options: Any = {"group": "late", "group_store": tmp_path, "group_timeout_s": 2.0}

    def next_key(number: int) -> bytes:
        with tailrace.connect_sync(node.url, autosave=False, **options) as source:
            events = source.changes(start="now")
            if number:
                keys = (event.key for event in events if isinstance(event, tailrace.Mutation))
                return next(keys)
            waiting = threading.Thread(target=lambda: next(events, None))
            waiting.start()
            watcher = open_group_store(tmp_path, "late", "default")
            until(lambda: len(watcher.names()) > 0)
            node.set("first", {})
            waiting.join()
            events.close()
            return b""

    node.set("before", {})
    next_key(0)
    # the first reader has saved nothing of what it was given
    assert next_key(1) == b"first"


def test_a_fixed_share_needs_no_store(node: Any) -> None:
    for number in range(60):
        node.set(f"k{number}", {})
    shares = []
    for slot in range(3):
        with tailrace.connect_sync(node.url, group_slot=f"{slot}/3") as source:
            changes = [c for c in source.changes(end="now") if isinstance(c, tailrace.Mutation)]
            shares.append({change.key for change in changes})
            with pytest.raises(UsageError, match="leave out vbuckets"):
                next(source.changes(vbuckets=[1]))
    assert sum(map(len, shares)) == len(set.union(*shares)) == 60
    for wrong, text in (
        ({"group": "billing"}, "needs group_store"),
        ({"group_store": "/tmp"}, "name the group with group"),
        ({"group": "a/b", "group_store": "/tmp"}, "is not a name of a group"),
        ({"group": "g", "group_store": "/tmp", "state": "s.json"}, "leave out state"),
        ({"group_slot": "3/3"}, "counted from 0"),
        ({"group": "g", "group_store": "/tmp", "dialect": "tap"}, "tap has no group_store"),
    ):
        with pytest.raises(UsageError, match=text):
            tailrace.connect_sync(node.url, **wrong)  # type: ignore[arg-type]
