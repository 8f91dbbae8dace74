"""The full-text index against a real node: it ends equal to the bucket, whatever happens to either."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tantivy

import tailrace.testing
from tailrace.cli.main import main
from tailrace.client.fulltext import FullText, follow
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.errors import TailraceError, UsageError
from tailrace.testing.running import RunningNode

VBUCKETS = 4
KEYS = [f"key-{number}" for number in range(40)]
WORDS = ["engine", "river", "mill", "wheel", "sluice"]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running


def update(node: RunningNode, directory: Path) -> int:
    index = FullText(directory, bucket="default")
    try:
        return asyncio.run(follow(node.url, index, end="now"))
    finally:
        index.close()


def equal(node: RunningNode, directory: Path) -> None:
    """The index has each document of the bucket with its present words, and no other."""
    index = FullText(directory)
    held = {key: node.get(key) for key in KEYS}
    expected = {key: document for key, document in held.items() if document is not None}
    assert index.count() == len(expected)
    for word in WORDS:
        keys = {hit.key.decode() for hit in index.search(f"doc.word:{word}", limit=1_000)}
        assert keys == {key for key, document in expected.items() if document["word"] == word}
    for key, document in expected.items():
        assert [hit.key.decode() for hit in index.search(f"text:n{document['n']}", limit=5)] == [key]


def write(node: RunningNode, rng: random.Random, count: int, start: int = 0) -> None:
    for number in range(count):
        key = rng.choice(KEYS)
        if rng.random() < 0.8:
            # every version has a word that no other has
            unique = start + number
            node.set(key, {"word": rng.choice(WORDS), "n": unique, "tags": [f"n{unique}"]})
        elif node.get(key) is not None:
            node.delete(key)


@pytest.mark.parametrize("seed", range(3))
def test_the_index_ends_equal_to_the_bucket(node: RunningNode, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for turn in range(6):
        write(node, rng, 60, turn * 1_000)
        if turn in (2, 4):
            vbucket = rng.randrange(VBUCKETS)
            node.rewind(vbucket, max(0, node.high_seqno(vbucket) - rng.randrange(1, 20)))
        if turn == 3:
            node.flush()
            write(node, rng, 20, 50_000)
        update(node, tmp_path / "index")
        equal(node, tmp_path / "index")
    assert update(node, tmp_path / "index") == 0  # it goes on exactly where it was


def test_expired_documents_leave_it(node: RunningNode, tmp_path: Path) -> None:
    node.set("short", {"word": "mill"}, expiry=1)
    node.set("long", {"word": "mill"})
    node.get("short")
    update(node, tmp_path)
    assert [hit.key for hit in FullText(tmp_path).search("mill")] == [b"long"]


def test_an_indexer_that_is_killed_resumes(node: RunningNode, tmp_path: Path) -> None:
    rng = random.Random(7)
    directory = tmp_path / "index"
    for turn in range(3):
        write(node, rng, 300, turn * 1_000)
        command = [sys.executable, "-m", "tailrace", "index", node.url, str(directory)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not (directory / "meta.json").exists():
                assert process.poll() is None
                time.sleep(0.01)
            # it commits again and again while more is written, and is killed wherever it is
            write(node, rng, 200, turn * 1_000 + 500)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        vbucket = rng.randrange(VBUCKETS)
        node.rewind(vbucket, node.high_seqno(vbucket) // 2)
    update(node, directory)
    equal(node, directory)


def test_the_commands(node: RunningNode, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    node.set("user::1", {"name": "Ada Lovelace", "city": "London"})
    node.set("user::2", "no JSON, but an engine")
    assert main(["index", node.url, str(tmp_path / "index"), "--to", "now"]) == 0
    assert b"2 changes indexed" in capfdbinary.readouterr().err
    assert main(["search", str(tmp_path / "index"), "doc.name:ada", "--json"]) == 0
    hit = json.loads(capfdbinary.readouterr().out)
    assert hit["key"] == "user::1" and hit["seqno"] == 1 and hit["score"] > 0
    assert main(["search", str(tmp_path / "index"), "engine"]) == 0
    assert capfdbinary.readouterr().out.endswith(b"  user::2\n")
    assert main(["search", str(tmp_path / "index"), "nothing"]) == 1
    assert capfdbinary.readouterr() == (b"", b"")
    assert main(["search", str(tmp_path / "index"), "("]) == 2
    assert main(["search", str(tmp_path / "elsewhere"), "ada"]) == 2
    assert main(["index", node.url + "/other", str(tmp_path / "index"), "--to", "now"]) == 2
    assert capfdbinary.readouterr().err.count(b"tailrace: error: ") == 3


def test_positions_are_no_documents(node: RunningNode, tmp_path: Path) -> None:
    for number in range(3):
        node.set(f"k{number}", {"word": "mill"})
    update(node, tmp_path)
    index = FullText(tmp_path)
    assert index.count() == 3
    assert {hit.key for hit in index.search("*", limit=3)} == {b"k0", b"k1", b"k2"}
    assert len(index.search("*", limit=1)) == 1
    assert index.search("id:state") == []


def test_a_dropped_collection_leaves_it(node: RunningNode, tmp_path: Path) -> None:
    with KvClient(node.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.carts", "shop.orders"], ()))
        for collection in ("shop.carts", "shop.orders"):
            client.set("one", b'{"word":"mill"}', collection=collection)
        client.set("one", b'{"word":"mill"}')
        update(node, tmp_path)
        assert len(FullText(tmp_path).search("mill")) == 3
        client.set_manifest(with_changes(client.manifest(), ["shop.new"], ["shop.carts"]))
        client.set("two", b'{"word":"mill"}', collection="shop.new")
        update(node, tmp_path)
        kept = {
            int(collection["uid"], 16)
            for scope in client.manifest()["scopes"]
            for collection in scope["collections"]
        }
    hits = FullText(tmp_path).search("mill")
    assert len(hits) == 3 and {hit.collection_id for hit in hits} == kept


def test_an_index_of_somebody_else(tmp_path: Path) -> None:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("title")
    (tmp_path / "other").mkdir()
    tantivy.Index(builder.build(), path=str(tmp_path / "other"))
    with pytest.raises(UsageError, match="not one of a bucket"):
        FullText(tmp_path / "other")
    with pytest.raises(TailraceError):
        FullText(tmp_path / "other", bucket="default")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "meta.json").write_text("{")
    with pytest.raises(TailraceError, match="can't be read"):
        FullText(tmp_path / "broken")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    index = FullText(tmp_path, bucket="default")
    with pytest.raises(TailraceError, match="another process"):
        FullText(tmp_path, bucket="default")
    index.commit({})
    index.close()
    with pytest.raises(UsageError, match="another bucket"):
        FullText(tmp_path, bucket="beer")
