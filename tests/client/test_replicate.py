"""Replication between real nodes: the documents are equal to the last bit of their metadata."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from client.fake_server import Connection, FakeServer, accepted, marker, mutation
from tailrace import Deletion, Expiration, Mutation, TapSettings
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.client.replicate import Replicated, Replicator
from tailrace.errors import UsageError
from tailrace.model import MAX_CAS, MAX_REV
from tailrace.protocol.script import ask
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import Datatype, Magic, Status
from tailrace.wire.dcp import DcpStreamEnd
from tailrace.wire.fields import join_xattrs
from tailrace.wire.header import Frame
from tailrace.wire.kv import DelWithMeta, SetWithMeta

VBUCKETS = 4
DIALECTS = ["dcp", "upr-a", "upr-b", "tap"]


@pytest.fixture
def nodes() -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(tailrace.testing.node(vbuckets=VBUCKETS)) for _ in range(3)]


def test_a_target_that_gets_values_compressed(nodes: list[RunningNode]) -> None:
    source, target, _ = nodes
    for number in range(20):
        source.set(f"k{number}", {"text": "x" * number * 100})
    source.delete("k3")
    with Replicator(source.url, f"{target.url}?compression=true") as replicator:
        list(replicator.run(end="now"))
    assert documents(target, deleted=True) == documents(source, deleted=True)
    with KvClient(target.url) as client:
        metas = [client.get_meta(f"k{number}") for number in (1, 19)]
    assert all(meta is not None and meta.datatype & Datatype.SNAPPY for meta in metas)


def documents(node: RunningNode, *, deleted: bool = False) -> dict[tuple[str, bytes], Any]:
    """All documents with everything that they consist of, and if asked, the tombstones too."""
    documents = {}
    with tailrace.connect_sync(node.url, include_xattrs=True) as source:
        names = {}
        with KvClient(node.url) as client:
            for scope in client.manifest()["scopes"]:
                for collection in scope["collections"]:
                    names[int(collection["uid"], 16)] = f"{scope['name']}.{collection['name']}"
        for event in source.changes(end="now"):
            about: tuple[object, ...]
            if isinstance(event, Mutation):
                about = (event.value, event.flags, event.expiry, event.datatype, json.dumps(event.xattrs))
            elif isinstance(event, Deletion | Expiration):
                about = (type(event).__name__, json.dumps(event.xattrs))
            else:
                continue
            key = (names[event.collection_id], event.key)
            documents[key] = (*about, event.rev, event.cas)
            if isinstance(event, Deletion | Expiration) and not deleted:
                del documents[key]
    return documents


def replicate(source: RunningNode, target: RunningNode, **options: Any) -> Replicated:
    with Replicator(source.url, target.url, **options) as replicator:
        for _ in replicator.run(end="now"):
            pass
        return replicator.done


def write(node: RunningNode, seed: int, count: int = 300) -> None:
    rng = random.Random(seed)
    for number in range(count):
        key = f"key-{rng.randrange(80)}"
        if rng.random() < 0.2:
            with contextlib.suppress(tailrace.errors.TailraceError):
                node.delete(key)
        elif rng.random() < 0.2:
            node.set(key, bytes([rng.randrange(256) for _ in range(5)]))
        else:
            node.set(key, {"n": number}, expiry=int(time.time()) + 5000 if rng.random() < 0.2 else 0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_that_is_there_then_changes(nodes: list[RunningNode], dialect: str) -> None:
    source, target, _ = nodes
    write(source, 1)
    assert replicate(source, target, dialect=dialect).changes > 0
    assert documents(target, deleted=True) == documents(source, deleted=True)
    write(source, 2)  # with deletions of what the target has
    replicate(source, target, dialect=dialect)
    assert documents(target, deleted=True) == documents(source, deleted=True)


@contextlib.contextmanager
def running(source: RunningNode, target: RunningNode, **options: Any) -> Iterator[Replicator]:
    """A replication without an end, in the background."""
    with Replicator(source.url, target.url, **options) as replicator:

        def drain() -> None:
            with contextlib.suppress(UsageError):  # that it was closed
                for _ in replicator.run():
                    pass

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        yield replicator
        replicator._source.close()
        thread.join(60)
        assert not thread.is_alive()


def wait_until_equal(source: RunningNode, target: RunningNode, *, deleted: bool = False) -> None:
    deadline = time.monotonic() + 60
    while documents(target, deleted=deleted) != documents(source, deleted=deleted):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_goes_on_while_it_is_written_to(nodes: list[RunningNode], dialect: str) -> None:
    source, target, _ = nodes
    write(source, 3)
    with running(source, target, dialect=dialect):
        write(source, 4)
        wait_until_equal(source, target)
        source.drop_connections()
        write(source, 5)
        wait_until_equal(source, target)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_taken_back_or_flushed_while_it_replicates(nodes: list[RunningNode], dialect: str) -> None:
    source, target, _ = nodes
    write(source, 5)
    with running(source, target, dialect=dialect):
        wait_until_equal(source, target)
        source.rewind(1, source.high_seqno(1) // 2)
        write(source, 6, 50)
        wait_until_equal(source, target)
        source.flush()
        write(source, 7, 50)
        wait_until_equal(source, target)


def test_a_tap_reader_with_a_name_goes_on_where_it_was(nodes: list[RunningNode]) -> None:
    source, target, _ = nodes
    write(source, 5)
    named = {"dialect": "tap", "tap_settings": TapSettings(name="copy", registered=True)}
    with running(source, target, **named):
        wait_until_equal(source, target)
    source.restart()
    write(source, 6, 30)
    with running(source, target, **named) as replicator:
        wait_until_equal(source, target)
        # not everything again: what was acknowledged stays so
        assert replicator.done.changes < 200 and replicator.done.rollbacks == 0
    with pytest.raises(UsageError, match="it has no end"):
        replicate(source, target, **named)
    with pytest.raises(UsageError, match="it has no end"):
        TapSettings(name="copy", deletions=True)


@pytest.mark.parametrize("dialect", ["dcp", "upr-a", "upr-b"])
@pytest.mark.parametrize("vbuckets", [VBUCKETS, 16])
def test_changes_that_are_taken_back_leave_the_target(
    nodes: list[RunningNode], tmp_path: Path, vbuckets: int, dialect: str
) -> None:
    source = nodes[0]
    with tailrace.testing.node(vbuckets=vbuckets) as target:
        write(source, 5)
        before = documents(source)
        points = {vbucket: source.high_seqno(vbucket) for vbucket in range(VBUCKETS)}
        state = tmp_path / "positions.json"
        write(source, 6)
        source.set("only for a while", 1)
        replicate(source, target, state=state, dialect=dialect)
        assert documents(target) == documents(source) != before
        for vbucket, seqno in points.items():
            source.rewind(vbucket, seqno)
        assert documents(source) == before
        done = replicate(source, target, state=state, dialect=dialect)
        assert done.rollbacks == VBUCKETS
        assert documents(target) == before
        write(source, 7)
        replicate(source, target, state=state, dialect=dialect)
        assert documents(target) == documents(source)


def test_a_rollback_leaves_collections_alone_that_only_the_target_has(
    nodes: list[RunningNode], tmp_path: Path
) -> None:
    source, target, _ = nodes
    with KvClient(target.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["mine.notes"], ()))
        for number in range(20):
            client.set(f"note-{number}", b"1", collection="mine.notes")
    state = tmp_path / "positions.json"
    for number in range(20):
        source.set(f"note-{number}", number)
    replicate(source, target, state=state)
    source.rewind(range(VBUCKETS), 0)
    assert replicate(source, target, state=state).rollbacks
    assert {path for path, _ in documents(target)} == {"mine.notes"}
    assert len(documents(target)) == 20 and not documents(source)


def test_a_vbucket_of_any_size_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is forced on the target; its values must not be in memory together."""
    size, count = 1 << 20, 48
    held = []
    request = Replicator._request

    def watched(self: Replicator, *given: Any, **fields: Any) -> SetWithMeta:
        if len(held) % 8 == 0:
            held.append(sum(len(there.value) for there in gc.get_objects() if isinstance(there, Mutation)))
        else:
            held.append(0)
        return request(self, *given, **fields)

    state = tmp_path / "positions.json"
    with contextlib.ExitStack() as stack:
        source, target, another = (stack.enter_context(tailrace.testing.node(vbuckets=1)) for _ in range(3))
        source.set_many({f"k{number}": b"x" * size for number in range(count)})
        source.set("lost", 1)
        replicate(source, target, state=state)
        source.rewind(0, count)
        monkeypatch.setattr(Replicator, "_request", watched)
        assert replicate(source, another, state=state).rollbacks == 1
        assert documents(another) == documents(source)
        assert len(documents(source)) == count
    assert len(held) >= count
    assert max(held) < count * size // 3


def test_changes_that_are_taken_back_while_a_vbucket_is_compared() -> None:
    """The documents below them are not sent again, and must not be taken for deleted at the source."""
    before, after = 0xAAAA, 0xBBBB
    has_failed_over = False

    def stream(connection: Connection, request: Any) -> None:
        nonlocal has_failed_over
        log = [(after, 3), (before, 0)] if has_failed_over else [(before, 0)]
        if request.start_seqno > 3:
            value = (3).to_bytes(8, "big")
            refused = Frame(
                Magic.RESPONSE, request.OPCODE, vbucket=Status.ROLLBACK, opaque=request.opaque, body=value
            )
            connection.send(refused.encode())
            return
        parts = [accepted(request, log)]
        if not request.start_seqno:
            parts += [marker(request, 0, 3)]
            parts += [mutation(request, seqno, key=b"\0k%d" % seqno) for seqno in (1, 2, 3)]
        if has_failed_over:
            parts += [marker(request, 3, 5), mutation(request, 5, key=b"\0new")]
            parts += [DcpStreamEnd(opaque=request.opaque, vbucket=0).encode()]
        else:
            parts += [marker(request, 3, 5), mutation(request, 4, key=b"\0lost")]
        connection.send(*parts)
        if not has_failed_over:
            has_failed_over = True
            connection.close()

    with FakeServer(stream, vbuckets=1) as server:
        server.high_seqnos = {0: 5}
        replicator = Replicator(server.url, server.url, retry_for_s=5)
        newest = dict(replicator._newest(server.url, [0], dialect="dcp"))
    assert has_failed_over
    assert {place.key for place in newest} == {b"k1", b"k2", b"k3", b"new"}


def test_it_resumes_from_its_state(nodes: list[RunningNode], tmp_path: Path) -> None:
    source, target, _ = nodes
    write(source, 8)
    state = tmp_path / "positions.json"
    replicate(source, target, state=state)
    assert replicate(source, target, state=state).changes == 0
    source.set("one more", 1)
    assert replicate(source, target, state=state).changes == 1


def with_the_highest_rev(client: KvClient, key: str) -> None:
    request = SetWithMeta(key=b"\0" + key.encode(), value=b"1", rev_seqno=MAX_REV, meta_cas=MAX_CAS)
    request.vbucket = client.vbucket_of(key)
    client._on(request.vbucket, lambda: ask(request, "set with meta"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_document_that_counted_on_from_the_highest_rev(nodes: list[RunningNode], dialect: str) -> None:
    """A target that does not take the rev of one document must not end the replication of all others."""
    source, target, _ = nodes
    with KvClient(source.url) as client:
        for key in ("poisoned", "gone"):
            with_the_highest_rev(client, key)
    replicate(source, target, dialect=dialect)
    source.set("poisoned", 2)
    source.delete("gone")
    source.set("other", 3)
    for _ in range(2):
        replicate(source, target, dialect=dialect)
        assert (target.get("poisoned"), target.get("gone"), target.get("other")) == (2, None, 3)
    source.set("poisoned", 4)
    replicate(source, target, dialect=dialect)
    assert target.get("poisoned") == 4


def test_what_the_target_has_newer_stays(nodes: list[RunningNode]) -> None:
    source, target, _ = nodes
    source.set("both", "old")
    for number in range(3):
        target.set("both", number)
    replicate(source, target)
    assert target.get("both") == 2


def test_collections_come_and_go(nodes: list[RunningNode]) -> None:
    source, target, _ = nodes
    with KvClient(source.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.orders", "shop.carts"], ()))
        client.set("o1", b"1", collection="shop.orders")
        client.set("c1", b"2", collection="shop.carts")
        client.set("d1", b"3")
        replicate(source, target)
        assert documents(target) == documents(source)
        assert {path for path, _ in documents(target)} == {"shop.orders", "shop.carts", "_default._default"}
        with running(source, target):
            client.set("d2", b"3")  # a collection dropped while no replication runs would stay
            wait_until_equal(source, target)
            client.set_manifest(with_changes(client.manifest(), ["shop.new"], ["shop.carts"]))
            client.set("o2", b"4", collection="shop.orders")
            client.set("n1", b"5", collection="shop.new")
            wait_until_equal(source, target)
    assert {path for path, _ in documents(target)} == {"shop.orders", "shop.new", "_default._default"}


def test_a_change_whose_collection_is_gone_by_now_is_passed_over(
    nodes: list[RunningNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, _ = nodes
    with KvClient(source.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.carts"], ()))
        client.set("c1", b"1", collection="shop.carts")
        client.set("d1", b"2")
        with Replicator(source.url, target.url) as replicator:
            # The collection is gone when its name is asked for, and its changes are on the way.
            empty = with_changes(replicator._origin.manifest(), (), ["shop.carts"])
            monkeypatch.setattr(replicator._origin, "manifest", lambda: empty)
            assert sum(replicator.run(end="now")) == 1
    assert {path for path, _ in documents(target)} == {"_default._default"}


@pytest.mark.parametrize("dialect", ["upr-a", "upr-b", "tap"])
def test_older_dialects_have_the_default_collection(nodes: list[RunningNode], dialect: str) -> None:
    source, target, _ = nodes
    with KvClient(source.url) as client:
        client.set_manifest(with_changes(client.manifest(), ["shop.carts"], ()))
        client.set("c1", b"1", collection="shop.carts")
        client.set("d1", b"2")
    assert replicate(source, target, dialect=dialect).changes == 1
    assert set(documents(target)) == {("_default._default", b"d1")}
    with KvClient(target.url) as client:
        assert [scope["name"] for scope in client.manifest()["scopes"]] == ["_default"]


@pytest.mark.parametrize("dialect", ["dcp", "upr-b", "tap"])
def test_xattrs_come_along(nodes: list[RunningNode], dialect: str) -> None:
    source, target, _ = nodes
    source.set("plain", {"a": 1})
    value = join_xattrs({"_sync": b'{"rev":"1-a"}', "note": b'"x"'}, b'{"b":2}')
    request = SetWithMeta(
        key=b"\0with", value=value, datatype=Datatype.JSON | Datatype.XATTR, rev_seqno=3, meta_cas=1 << 60
    )
    with KvClient(source.url) as client:
        request.vbucket = client.vbucket_of("with")
        client._on(request.vbucket, lambda: ask(request, "set with meta"))
        tombstone = DelWithMeta(
            key=b"\0gone",
            value=join_xattrs({"_sync": b'{"rev":"2-b"}'}, b""),
            datatype=Datatype.XATTR,
            rev_seqno=4,
            meta_cas=1 << 60,
            vbucket=client.vbucket_of("gone"),
        )
        client._on(tombstone.vbucket, lambda: ask(tombstone, "del with meta"))
    replicate(source, target, dialect=dialect)
    assert documents(target) == documents(source)
    assert "1-a" in documents(target)["_default._default", b"with"][4]
    if dialect == "dcp":
        assert documents(target, deleted=True) == documents(source, deleted=True)
        assert "2-b" in documents(target, deleted=True)["_default._default", b"gone"][1]


def seqnos(nodes: list[RunningNode]) -> list[list[int]]:
    return [[node.high_seqno(vbucket) for vbucket in range(VBUCKETS)] for node in nodes]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_ring_ends_equal_and_silent(nodes: list[RunningNode], dialect: str) -> None:
    for number, node in enumerate(nodes):
        write(node, 10 + number, 100)
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    with contextlib.ExitStack() as stack:
        for source, target in ring:
            stack.enter_context(running(source, target, dialect=dialect))
        for number, node in enumerate(nodes):
            write(node, 20 + number, 30)
        for source, target in [*ring, *ring]:  # what came last may have gone only half way round
            wait_until_equal(source, target, deleted=True)
    # Once more round the ring, and nothing is added.
    before = seqnos(nodes)
    for source, target in ring:
        replicate(source, target, dialect=dialect)
    assert seqnos(nodes) == before
    assert documents(nodes[0]) == documents(nodes[1]) == documents(nodes[2])


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_command(nodes: list[RunningNode], dialect: str) -> None:
    source, target, _ = nodes
    write(source, 20)
    command = [sys.executable, "-m", "tailrace", "replicate", source.url]
    done = run(*command, target.url, "--to", "now", "--dialect", dialect)
    assert (done.returncode, done.stdout) == (0, "") and "changes, 0 vbuckets" in done.stderr
    assert documents(target) == documents(source)
    done = run(*command, "couchbase://127.0.0.1:1")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
