"""The fault kit over HTTP: readers see what it did, and nobody without the token may use it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tailrace
from server.serverkit import Bench, Wire, http_answer
from tailrace.server.fault_server import FaultServer
from tailrace.server.http import HttpRequest
from tailrace.web import node_service
from tailrace.web.faults import FaultKit
from tailrace.wire import kv

TOKEN = "letmein"


class FaultyNode:
    """A node in a process of its own, with a fault kit."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self.port: int = ready["port"]
        self.base = f"http://127.0.0.1:{ready['web_port']}"
        self.url = f"couchbase://127.0.0.1:{self.port}/default"

    def ask(self, path: str, body: str | None = None, token: str = TOKEN) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"{self.base}{path}",
            data=None if body is None else body.encode(),
            headers={"Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyNode]:
    folder = tmp_path_factory.mktemp("faults")
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "4"]
    command += ["--http-port", "0", "--fault-token", TOKEN, "--ready-file", str(ready)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    ) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.02)
            yield FaultyNode(json.loads(ready.read_text()))
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_a_reader_rolls_back_after_a_rewind_and_sees_a_failover(node: FaultyNode) -> None:
    with Wire(node.port) as wire, tailrace.connect_sync(node.url) as source:
        for number in range(3):
            wire.ok(kv.Set(key=b"k", value=b"%d" % number, vbucket=1))
        changes = (change for change in source.changes() if change.vbucket == 1)  # others have tests as well
        assert next(change for change in changes if isinstance(change, tailrace.Mutation)).seqno == 3
        assert node.ask("/faults/rewind", '{"vbucket": 1, "lose": 1}') == (200, {"1": 2})
        assert any(isinstance(change, tailrace.Rollback) for change in changes)
        logs = source.failover_logs([1])
        status, ends = node.ask("/faults/failover?vbucket=1", "")
        assert (status, ends) == (200, {"1": 2}), "nothing is lost"
        assert len(source.failover_logs([1])[1].entries) == len(logs[1].entries) + 1
    assert node.ask("/faults/rewind", "vbucket=1&to_seqno=99")[0] == 409


def test_on_a_full_disk_changes_stay_in_memory_until_it_ends(node: FaultyNode) -> None:
    with Wire(node.port) as wire:
        assert node.ask("/faults/disk-full", "{}")[1]["disk_full"] == ["default"]
        wire.ok(kv.Set(key=b"full", value=b"1", vbucket=2))
        while not any(event["event"] == "flush_failed" for event in node.ask("/api/events")[1]["events"]):
            time.sleep(0.05)
        assert node.ask("/faults/disk-full", '{"on": false}')[1]["disk_full"] == []
        while True:
            text = urllib.request.urlopen(f"{node.base}/metrics", timeout=60).read().decode()
            if 'tailrace_bucket_flush_queue_changes{bucket="default"} 0.0' in text:
                break
            time.sleep(0.05)
        failures = re.search(r"^tailrace_bucket_flush_failures_total\{.*\} (.+)$", text, re.M)
        assert failures is not None and float(failures[1]) > 0
        kinds = [event["event"] for event in node.ask("/api/events")[1]["events"]]
        assert kinds.count("flush_failed") == 1, "it is tried every second, and that is no news"
        assert kinds.count("flush_recovered") == 1


def test_delays_and_broken_connections(node: FaultyNode) -> None:
    assert node.ask("/faults/delay", '{"ms": 1, "for_s": 60}') == (200, {"delay_ms": 1, "disk_full": []})
    with Wire(node.port) as wire:
        for number in range(20):  # in order
            assert wire.ok(kv.Set(key=b"d%d" % number, value=b"1", vbucket=0))
        assert node.ask("/faults/delay", '{"ms": 0}')[1]["delay_ms"] == 0
        assert wire.ok(kv.Get(key=b"d3", vbucket=0)).value == b"1"
        assert node.ask("/faults/drop", "{}") == (200, {"dropped": 0}), "it has no stream"
        assert node.ask("/faults/drop", '{"all": true}')[1]["dropped"] >= 1
        assert wire.is_closed()


def test_a_purge_raises_the_purge_seqno(node: FaultyNode) -> None:
    with Wire(node.port) as wire:
        wire.ok(kv.Set(key=b"gone", value=b"1", vbucket=3))
        wire.ok(kv.Delete(key=b"gone", vbucket=3))
        wire.ok(kv.Set(key=b"stays", value=b"1", vbucket=3))
    status, purged = node.ask("/faults/purge", '{"vbucket": "3"}')
    assert status == 200 and purged["3"] >= 2


@pytest.mark.parametrize(
    ("path", "body", "token", "status"),
    [
        ("/faults/rewind", '{"vbucket": 0, "lose": 1}', "guess", 403),
        ("/faults/rewind", '{"vbucket": 0, "lose": 1}', "", 403),
        ("/faults", None, "guess", 403),
        ("/faults", None, TOKEN, 200),
        ("/faults/rewind", None, TOKEN, 405),
        ("/faults/nothing", "{}", TOKEN, 404),
        ("/faults/rewind", "{}", TOKEN, 400),
        ("/faults/rewind", '{"vbucket": 0, "lose": 1, "to_seqno": 2}', TOKEN, 400),
        ("/faults/rewind", '{"vbucket": 0, "lsoe": 1}', TOKEN, 400),
        ("/faults/rewind", '{"vbucket": 77, "lose": 1}', TOKEN, 400),
        ("/faults/rewind", "{not json", TOKEN, 400),
        ("/faults/delay", '{"ms": -1}', TOKEN, 400),
        ("/faults/drop", '{"all": "maybe"}', TOKEN, 400),
    ],
)
def test_what_is_refused(node: FaultyNode, path: str, body: str | None, token: str, status: int) -> None:
    code, answer = node.ask(path, body, token)
    assert code == status
    assert code == 200 or list(answer) == ["error"]


def test_faults_are_events(node: FaultyNode) -> None:
    node.ask("/faults/drop", '{"name": "nobody"}')
    with urllib.request.urlopen(f"{node.base}/api/events", timeout=60) as answer:
        events = json.load(answer)["events"]
    assert events[-1]["text"] == "fault kind=drop name=nobody"
    assert TOKEN not in json.dumps(events)


def test_without_a_token_there_is_no_kit() -> None:
    answer = http_answer(node_service(Bench().node), ["POST /faults/rewind HTTP/1.1"], b"{}")
    assert answer.startswith(b"HTTP/1.1 404") and b"--fault-token" in answer


class Kit:
    """A fault kit without sockets."""

    def __init__(self) -> None:
        self.bench = Bench(buckets=("one", "two"))
        self.server = SimpleNamespace(node=self.bench.node, delay_s=0.0, connections=[])
        self._kit = FaultKit(cast(FaultServer, self.server), TOKEN)

    async def ask(self, path: str, **fields: Any) -> int:
        body = json.dumps(fields).encode()
        content = await self._kit.serve(HttpRequest("POST", path, "", {}, {}, body, f"Bearer {TOKEN}"))
        return content.status


def test_what_is_refused_has_not_begun() -> None:
    async def run() -> None:
        kit = Kit()
        assert await kit.ask("/faults/delay", ms=5, for_s="soon") == 400
        assert await kit.ask("/faults/disk-full", bucket="one", for_s=-1) == 400
        assert kit.server.delay_s == 0
        assert not kit.bench.node.buckets["one"].work.disk_is_full

    asyncio.run(run())


def test_every_disk_is_free_again_in_its_time() -> None:
    async def run() -> None:
        kit = Kit()
        for name in ("one", "two"):
            assert await kit.ask("/faults/disk-full", bucket=name, for_s=0) == 200
        await asyncio.sleep(0.01)
        assert not any(bucket.work.disk_is_full for bucket in kit.bench.node.buckets.values())

    asyncio.run(run())


def test_who_does_not_wait_for_a_fault_leaves_the_node_whole() -> None:
    async def run() -> None:
        kit = Kit()
        bench = kit.bench
        bench.node.buckets["one"].store.vbuckets[0].set(b"\0k", b"v")  # type: ignore[union-attr]
        waiting = [
            asyncio.create_task(kit.ask("/faults/purge", bucket="one", vbucket="all")),
            asyncio.create_task(kit.ask("/faults/rewind", bucket="one", vbucket=0, to_seqno=0)),
        ]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        bench.run_jobs()
        assert await kit.ask("/faults/failover", bucket="one", vbucket=0) == 200

    asyncio.run(run())
