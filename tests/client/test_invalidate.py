"""Cache invalidation with a real Redis and a real memcached: in the end no cached value is stale."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from ports import ReservedPort
from tailrace.cli.main import main
from tailrace.client.invalidate import cache_at, follow
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.errors import ConnectError, UsageError
from tailrace.testing.running import RunningNode

VBUCKETS = 4
KEYS = [b"key-%d" % number for number in range(200)]


class Peer:
    """A cache process, and the simplest client for it."""

    def __init__(self, kind: str, directory: Path, port: int) -> None:
        self.kind, self.directory, self.port = kind, directory, port
        self.url = f"{kind}://127.0.0.1:{self.port}"
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        program = {"redis": "redis-server", "memcached": "memcached"}[self.kind]
        if shutil.which(program) is None:
            if os.environ.get("CI"):
                pytest.fail(f"{program} is not installed, and CI must test with it")
            pytest.skip(f"{program} is not installed (Debian: apt-get install {program})")
        port = str(self.port)
        command = [program, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(self.directory)]
        if self.kind == "memcached":
            command = [program, "-U", "0", "-l", "127.0.0.1", "-p", port, "-u", "nobody"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(3_000):
            assert self.process.poll() is None, f"{program} did not start"
            with contextlib.suppress(OSError):
                self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=20)
                self.file = self.socket.makefile("rb")
                return
            time.sleep(0.02)
        pytest.fail(f"{program} did not start")

    def stop(self) -> None:
        self.file.close()
        self.socket.close()
        self.process.terminate()
        self.process.wait()

    def set(self, key: bytes, value: bytes) -> None:
        with self.lock:
            if self.kind == "redis":
                words = (b"SET", key, value)
                self.socket.sendall(b"*3\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words))
            else:
                self.socket.sendall(b"set %b 0 0 %d\r\n%b\r\n" % (key, len(value), value))
            assert self.file.readline() in (b"+OK\r\n", b"STORED\r\n")

    def get(self, key: bytes) -> bytes | None:
        with self.lock:
            if self.kind == "redis":
                self.socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                size = int(self.file.readline()[1:])
                return None if size < 0 else self.file.read(size + 2)[:-2]
            self.socket.sendall(b"get %b\r\n" % key)
            line = self.file.readline()
            if line == b"END\r\n":
                return None
            value = self.file.read(int(line.split()[3]) + 2)[:-2]
            assert self.file.readline() == b"END\r\n"
            return value

    def delete(self, key: bytes) -> None:
        with self.lock:
            if self.kind == "redis":
                self.socket.sendall(b"*2\r\n$3\r\nDEL\r\n$%d\r\n%b\r\n" % (len(key), key))
            else:
                self.socket.sendall(b"delete %b\r\n" % key)
            self.file.readline()


@pytest.fixture(params=["redis", "memcached"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    with ReservedPort() as port:
        peer = Peer(request.param, tmp_path, port)
        yield peer
        peer.stop()


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running


def value_of(node: RunningNode, key: bytes) -> bytes | None:
    value = node.get(key)
    return None if value is None else struct.pack(">Q", value)


def fill(node: RunningNode, cache: Peer, keys: list[bytes] = KEYS, prefix: bytes = b"") -> None:
    """What an application does after a miss; it looks again, as the document may have changed meanwhile."""
    for key in keys:
        value = value_of(node, key)
        if value is not None:
            cache.set(prefix + key, value)
            if value_of(node, key) != value:
                cache.delete(prefix + key)


def stale(node: RunningNode, cache: Peer, prefix: bytes = b"") -> list[bytes]:
    cached = {key: cache.get(prefix + key) for key in KEYS}
    return [key for key, value in cached.items() if value is not None and value != value_of(node, key)]


def drain(node: RunningNode, cache: Peer, tmp_path: Path, **options: Any) -> int:
    made = cache_at(cache.url, prefix=options.pop("prefix", ""), retry_for_s=60)
    return asyncio.run(follow(node.url, made, end="now", state=tmp_path / "state.json", **options))


def test_nothing_old_is_left_after_load(node: RunningNode, cache: Peer, tmp_path: Path) -> None:
    rng = random.Random(5)
    for key in KEYS:
        node.set(key, 0)
    made = cache_at(cache.url, retry_for_s=60)
    loop = asyncio.new_event_loop()
    work = loop.create_task(follow(node.url, made, state=tmp_path / "state.json"))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([work])))
    thread.start()
    filling = threading.Event()

    def fill_on() -> None:
        while not filling.is_set():
            fill(node, cache, rng.sample(KEYS, 20))

    filler = threading.Thread(target=fill_on)
    filler.start()
    try:
        for number in range(1, 3_000):
            key = rng.choice(KEYS)
            if rng.random() < 0.9:
                node.set(key, number)
            elif node.get(key) is not None:
                node.delete(key)
    finally:
        filling.set()
        filler.join()
        loop.call_soon_threadsafe(work.cancel)
        thread.join()
        loop.close()
    drain(node, cache, tmp_path)
    assert stale(node, cache) == []
    # the cache does work: what was not changed since stays
    fill(node, cache)
    assert drain(node, cache, tmp_path) == 0
    assert all(cache.get(key) == value_of(node, key) for key in KEYS)
    node.set(KEYS[0], 9_999)
    assert drain(node, cache, tmp_path) == 1
    assert cache.get(KEYS[0]) is None
    assert cache.get(KEYS[1]) == value_of(node, KEYS[1])


@pytest.mark.parametrize("prefix", ["", "doc*:"])
def test_a_rollback_and_a_flush_invalidate(
    node: RunningNode, cache: Peer, tmp_path: Path, prefix: str
) -> None:
    for number, key in enumerate(KEYS):
        node.set(key, number)
    drain(node, cache, tmp_path, prefix=prefix)
    for number, key in enumerate(KEYS):
        node.set(key, 1_000 + number)
    drain(node, cache, tmp_path, prefix=prefix)
    fill(node, cache, prefix=prefix.encode())
    cache.set(b"other", b"1")
    for vbucket in range(VBUCKETS):
        node.rewind(vbucket, node.high_seqno(vbucket) - 5)
    assert stale(node, cache, prefix.encode())
    drain(node, cache, tmp_path, prefix=prefix)
    assert stale(node, cache, prefix.encode()) == []
    # Redis can select by prefix
    assert cache.get(b"other") == (b"1" if prefix and cache.kind == "redis" else None)
    fill(node, cache, prefix=prefix.encode())
    node.flush()
    drain(node, cache, tmp_path, prefix=prefix)
    assert {cache.get(prefix.encode() + key) for key in KEYS} == {None}


def test_a_dropped_collection_leaves_the_cache(node: RunningNode, cache: Peer, tmp_path: Path) -> None:
    with KvClient(node.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.carts"], ()))
        client.set("c1", b"1", collection="shop.carts")
        client.set("d1", b"1")
        drain(node, cache, tmp_path, prefix="p:")
        for key in (b"p:c1", b"p:d1", b"other"):
            cache.set(key, b"1")
        client.set_manifest(with_changes(client.manifest(), (), ["shop.carts"]))
    drain(node, cache, tmp_path, prefix="p:")
    # nothing says which keys the collection had
    assert cache.get(b"p:c1") is None and cache.get(b"p:d1") is None
    assert cache.get(b"other") == (b"1" if cache.kind == "redis" else None)


async def gone(cache: Peer, key: bytes) -> None:
    while cache.get(key) is not None:  # noqa: ASYNC110 - the cache sends no notice
        await asyncio.sleep(0.01)


def test_a_rollback_of_what_is_remembered_removes_just_that(node: RunningNode, cache: Peer) -> None:
    async def live() -> None:
        made = cache_at(cache.url, retry_for_s=60)
        task = asyncio.create_task(follow(node.url, made))
        try:
            cache.set(KEYS[0], b"x")
            node.set(KEYS[0], 1)
            await gone(cache, KEYS[0])
            vbucket = node.vbucket_of(KEYS[0])
            before = node.high_seqno(vbucket)
            cache.set(KEYS[0], b"y")
            node.set(KEYS[0], 2)
            await gone(cache, KEYS[0])
            cache.set(KEYS[0], struct.pack(">Q", 2))
            cache.set(b"bystander", b"1")
            node.rewind(vbucket, before)
            await gone(cache, KEYS[0])
            assert cache.get(b"bystander") == b"1"
        finally:
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(asyncio.wait_for(live(), 60))


def test_a_cache_that_comes_back_and_one_that_does_not(
    node: RunningNode, cache: Peer, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    node.set(KEYS[0], 1)
    cache.stop()
    timer = threading.Timer(0.5, cache.start)
    timer.start()
    assert drain(node, cache, tmp_path) == 1
    timer.join()
    with ReservedPort() as port, pytest.raises(ConnectError, match="can't be reached"):
        nobody = cache_at(f"redis://127.0.0.1:{port}", retry_for_s=0.2)
        asyncio.run(follow(node.url, nobody, end="now"))
    for where in ("redis:6379", "http://x", "redis://x:port"):
        with pytest.raises(UsageError):
            cache_at(where)
    cache.set(KEYS[0], b"old")
    assert main(["invalidate", node.url, cache.url, "--to", "now"]) == 0
    assert b"1 changes invalidated" in capfdbinary.readouterr().err
    assert cache.get(KEYS[0]) is None
