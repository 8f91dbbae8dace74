"""Our own reader in all four dialects, on a node process that is killed with ``kill -9`` in the middle.

The same operations give four equal maps, which are what the node holds.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tailrace
from ports import ReservedPort
from tailrace.client.kv import KvClient
from tailrace.connstr import parse
from tailrace.errors import TailraceError

VBUCKETS = 4
DIALECTS = ("dcp", "upr-a", "upr-b", "tap")
KEYS = 2_000


class Process:
    """`tailrace serve` on one port and directory, as often as it is started."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.url = f"couchbase://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready = self.directory / "ready.json"
        ready.unlink(missing_ok=True)
        options = ["--port", self.port, "--vbuckets", VBUCKETS, "--data", self.directory / "data"]
        command = [sys.executable, "-m", "tailrace", "serve", *options, "--ready-file", ready]
        self.process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
        while not ready.exists():
            assert self.process.poll() is None, "the node did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Follower(threading.Thread):
    """An application that does what the events tell it."""

    def __init__(self, url: str, dialect: str) -> None:
        super().__init__(daemon=True, name=f"follower-{dialect}")
        self.documents: dict[Any, Any] = {}
        self.whole: dict[int, dict[int, Any]] = {}
        """The states that a rollback may lead to, by vbucket and seqno; the newest of them."""
        self.lock = threading.Lock()
        self.error: TailraceError | None = None
        self.stops = False
        options: dict[str, Any] = (
            {} if dialect == "tap" else {"rollback_points": lambda at: list(self.whole.get(at, ()))}
        )
        self.source = tailrace.connect_sync(url, dialect=dialect, retry_for_s=120, **options)

    def run(self) -> None:
        try:
            with self.source as source:
                for event in source.changes():
                    if self.stops:
                        return
                    with self.lock:
                        self.handle(event)
        except TailraceError as error:
            if not self.stops:
                self.error = error

    def handle(self, event: Any) -> None:
        held = self.documents.setdefault(event.vbucket, {})
        whole = self.whole.setdefault(event.vbucket, {0: {}})
        match event:
            case tailrace.Mutation():
                held[event.key] = (event.value, event.cas, event.rev, event.flags, event.expiry)
            case tailrace.Deletion() | tailrace.Expiration():
                held.pop(event.key, None)
            case tailrace.Rollback():
                self.documents[event.vbucket] = dict(whole[event.seqno])
                self.whole[event.vbucket] = {at: state for at, state in whole.items() if at <= event.seqno}
            case tailrace.Flush():
                self.documents[event.vbucket], self.whole[event.vbucket] = {}, {0: {}}
        if getattr(event, "seqno", None) == getattr(event, "snapshot", (0, 0))[1]:
            self.whole[event.vbucket][event.seqno] = dict(self.documents[event.vbucket])
            while len(self.whole[event.vbucket]) > 200:
                del self.whole[event.vbucket][sorted(self.whole[event.vbucket])[1]]

    def state(self) -> Any:
        with self.lock:
            return {key: document for held in self.documents.values() for key, document in held.items()}


def operate(kv: Any, rng: Any, count: Any) -> None:
    """Sets, overwrites, deletes and expiries."""
    now_s = int(time.time())
    for _ in range(count):
        key = b"k%d" % rng.randrange(KEYS)
        what = rng.random()
        if what < 0.75:
            kv.set(key, rng.randbytes(rng.randrange(1, 200)), flags=rng.randrange(1 << 32))
        elif what < 0.85:
            kv.set(key, b"short-lived", expiry=now_s - 5 if rng.random() < 0.5 else now_s + 10_000)
            kv.get(key)  # becomes an expiration if its time is up
        else:
            kv.delete(key)


def held_by(kv: Any) -> Any:
    """What the node says that it has."""
    documents = {}
    for number in range(KEYS):
        key = b"k%d" % number
        document, meta = kv.get(key), kv.get_meta(key)
        if document is not None:
            documents[key] = (document.value, document.cas, meta.rev, document.flags, meta.expiry)
    return documents


def campaign(directory: Any, seed: Any, operations: Any, kills: Any) -> None:
    with ReservedPort() as port:
        run(Process(directory, port), random.Random(seed), operations, kills)


def run(node: Any, rng: Any, operations: Any, kills: Any) -> None:
    node.start()
    followers = [Follower(node.url, dialect) for dialect in DIALECTS]
    try:
        for follower in followers:
            follower.start()
        for _ in range(kills):
            with KvClient(parse(node.url)) as kv:
                operate(kv, rng, operations // (kills + 1))
            node.kill()
            node.start()
        with KvClient(parse(node.url)) as kv:
            operate(kv, rng, operations // (kills + 1))
            expected = held_by(kv)
        behind, since = None, time.monotonic()
        while states := [follower.state() for follower in followers if follower.state() != expected]:
            assert not [follower.error for follower in followers if follower.error], "a reader gave up"
            if states != behind:  # keep waiting while something happens
                behind, since = states, time.monotonic()
            assert time.monotonic() < since + 60, {
                follower.name: len(set(follower.state().items()) ^ set(expected.items()))
                for follower in followers
            }
            time.sleep(0.5)
    finally:
        for follower in followers:
            follower.stops = True
            with contextlib.suppress(Exception):
                follower.source.close()
        for follower in followers:
            follower.join(60)
        node.kill()


@pytest.mark.slow
def test_four_readers_and_a_real_kill(tmp_path: Path) -> None:
    campaign(tmp_path, 1, operations=3_000, kills=1)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_four_readers_of_a_hundred_thousand_operations_and_real_kills(tmp_path: Path) -> None:
    campaign(tmp_path, 2, operations=100_000, kills=3)
