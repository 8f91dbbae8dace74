"""The official SDK, in a child process, against a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace.testing
from server.serverkit import Wire
from tailrace.wire import admin

pytest.importorskip("couchbase")

MANIFEST = {
    "uid": "1",
    "scopes": [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {"name": "shop", "uid": "8", "collections": [{"name": "items", "uid": "8"}]},
    ],
}
PARTS = ["documents", "expiry", "locks", "counters", "paths", "durability", "collections"]
PARTS += ["management", "transactions"]


def run_sdk(*arguments: str) -> list[str]:
    script = Path(__file__).with_name("sdk_session.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: list[str] = json.loads(done.stdout)
    return answer


def make_collections(port: int) -> None:
    with Wire(port) as wire:
        wire.ok(admin.SetCollectionsManifest(value=json.dumps(MANIFEST).encode()))


def test_without_users() -> None:
    with tailrace.testing.node(vbuckets=64) as node:
        make_collections(node.port)
        assert run_sdk(f"{node.host}:{node.port}") == PARTS


def test_with_a_user_on_disk(tmp_path: Path) -> None:
    with tailrace.testing.node(vbuckets=64, users={"ada": "geheim,=ß"}, data=tmp_path / "data") as node:
        node.call(lambda inner: inner.buckets["default"].store.set_manifest(json.dumps(MANIFEST).encode()))
        node.call(lambda inner: inner.buckets["default"].collections.reload())
        assert run_sdk(f"{node.host}:{node.port}", "ada", "geheim,=ß") == PARTS
