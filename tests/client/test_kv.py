"""The key-value client and its commands against a real node."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tailrace.testing
from client.fake_server import FakeServer
from ports import ReservedPort
from tailrace.cli.main import main
from tailrace.client.kv import KvClient
from tailrace.client.load import MadeUp, from_json_lines
from tailrace.client.manifest import collection_ids, with_changes
from tailrace.clock import ManualClock
from tailrace.errors import ConnectError, InputError, LoginError, StatusError, UsageError
from tailrace.testing.running import RunningNode
from tailrace.wire.codes import Datatype, Op, Status
from tailrace.wire.header import Frame
from tailrace.wire.message import Response


class HurryingClock(ManualClock):
    """A clock on which four seconds pass whenever somebody looks at it."""

    def monotonic(self) -> float:
        self.advance(4.0)
        return super().monotonic()


def ignore(*_: object) -> None:
    """A server without streams."""


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningNode]:
    with tailrace.testing.node(vbuckets=16) as node:
        yield node


@pytest.fixture
def node(shared: RunningNode) -> RunningNode:
    shared.flush()
    return shared


@pytest.fixture
def client(node: RunningNode) -> Iterator[KvClient]:
    with KvClient(node.url) as client:
        yield client


def test_values_are_compressed_if_the_connection_string_says_so(node: RunningNode, client: KvClient) -> None:
    """They come back as they were, also to a client that does not ask for it."""
    values = {"long": b'{"text":"' + b"a" * 1000 + b'"}', "short": b'{"n":1}', "random": bytes(range(256))}
    with KvClient(f"{node.url}?compression=true") as packing:
        for key, value in values.items():
            packing.set(key, value)
    kept = {}
    for key, value in values.items():
        document, meta = client.get(key), client.get_meta(key)
        assert document is not None and meta is not None
        assert document.value == value and not document.datatype & Datatype.SNAPPY
        kept[key] = bool(meta.datatype & Datatype.SNAPPY)
    assert kept == {"long": True, "short": False, "random": False}


def test_documents_come_back_as_they_were_stored(client: KvClient) -> None:
    stored = client.set("user::1", {"name": "Ada"}, flags=7)
    assert stored.vbucket == client.vbucket_of("user::1")
    assert stored.seqno > 0 and stored.vb_uuid > 0
    document = client.get("user::1")
    assert document is not None
    assert (json.loads(document.value), document.flags, document.cas) == ({"name": "Ada"}, 7, stored.cas)
    assert document.datatype == Datatype.JSON
    client.set(b"\xff\x00", b"\x00\x01raw")
    assert client.get(b"\xff\x00").value == b"\x00\x01raw"
    assert client.get("nobody") is None


def test_delete_and_cas(client: KvClient) -> None:
    stored = client.set("k", b"1")
    with pytest.raises(StatusError) as error:
        client.set("k", b"2", cas=stored.cas + 1)
    assert error.value.status == Status.KEY_EEXISTS
    gone = client.delete("k")
    assert gone is not None and gone.seqno > stored.seqno
    assert client.delete("k") is None
    meta = client.get_meta("k")
    assert meta is not None and meta.deleted


def test_bucket_figures(client: KvClient, node: RunningNode) -> None:
    stored = client.set("k", b"1")
    client.wait_persisted(stored.vbucket, stored.seqno)
    assert client.high_seqnos()[stored.vbucket] == stored.seqno
    assert client.failover_log(stored.vbucket).newest.vb_uuid == stored.vb_uuid
    stats = client.stats(f"vbucket-seqno {stored.vbucket}")
    assert stats[f"vb_{stored.vbucket}:high_seqno"] == str(stored.seqno)
    with pytest.raises(StatusError):
        client.stats("no such group")


def test_rewind_forgets(client: KvClient) -> None:
    first = client.set("k", b"1")
    second = client.set("k", b"2")
    assert client.rewind([first.vbucket], to_seqno=first.seqno) == {first.vbucket: first.seqno}
    assert client.get("k").value == b"1"
    log = client.failover_log(first.vbucket)
    assert log.newest.seqno == first.seqno and log.newest.vb_uuid != second.vb_uuid
    with pytest.raises(UsageError):
        client.rewind([99], to_seqno=0)
    with pytest.raises(UsageError):
        client.rewind(None)


def test_collections(node: RunningNode) -> None:
    with KvClient(node.url) as client:
        before = client.manifest()
        client.set_manifest(with_changes(before, ["shop.orders", "shop.customers"], []))
        client.set("k", b"in orders", collection="shop.orders")
        client.set("k", b"in default")
        assert client.get("k", collection="shop.orders").value == b"in orders"
        assert client.get("k", collection="shop.customers") is None
        assert client.get("k").value == b"in default"
        with pytest.raises(StatusError) as error:
            client.get("k", collection="shop.nothing")
        assert error.value.status == Status.UNKNOWN_COLLECTION
        client.set_manifest(with_changes(client.manifest(), [], ["shop"]))
        with pytest.raises(StatusError):
            client.collection_id("shop.orders")


def test_ids_of_collections_do_not_come_back() -> None:
    """A client that still has the old one's id would write into the new one."""
    default = {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}
    manifest = with_changes({"uid": "0", "scopes": [default]}, ["s.a", "s.b", "s.c", "t.d", "u.e"], [])
    ids = set(collection_ids(manifest).values()) - {0}
    manifest = with_changes(manifest, [], ["s", "t", "u"])
    for number in range(8):
        manifest = with_changes(manifest, [f"v.c{number}"], [])
    assert ids.isdisjoint(collection_ids(manifest).values())


@pytest.mark.parametrize("size", [0, 1, 2, 10, 29, 30, 256])
def test_made_up_documents(client: KvClient, node: RunningNode, size: int) -> None:
    plan = MadeUp(500, size, deletes=0.1, expiry=0.2, expires_at_s=4_000_000_000, seed=3)
    done = list(client.write_many(plan.batches(16, collections=True, json_type=True, most=100)))
    assert sum(written.taken for written in done) == plan.writes
    assert max(written.answered for written in done) <= 100
    deleted = set(plan.deleted.tolist())
    assert 20 < len(deleted) < 90
    values, expiring = set(), 0
    for number in range(500):
        document = client.get(plan.key(number))
        assert (document is None) == (number in deleted)
        if document is not None:
            assert len(document.value) == size
            values.add(document.value)
            if size:
                json.loads(document.value)
            expiring += client.get_meta(plan.key(number)).expiry == 4_000_000_000
    assert 60 < expiring < 140
    assert size < 30 or len(values) == 500 - len(deleted)


def test_json_lines(client: KvClient) -> None:
    lines = [
        b'{"key":"a","value":{"n":1.10},"flags":3}\n',
        b"\n",
        b'{"op":"mutation","key_base64":"/w==","value_base64":"AAE=","vbucket":3}\n',
        b'{"op":"snapshot","vbucket":3}\n',
        b'{"key":"b","value":"text"}\n',
        b'{"op":"deletion","key":"b"}\n',
        b'{"op":"expiration","key":"never there"}\n',
    ]
    made = from_json_lines(lines, 16, collections=True, json_type=True, most=2)
    assert [sum(column) for column in zip(*client.write_many(made), strict=True)] == [4, 1]
    document = client.get("a")
    assert document is not None and document[:2] == (b'{"n":1.10}', 3)
    assert client.get(b"\xff").value == b"\x00\x01"
    assert client.get("b") is None


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"value":1}',
        b'{"key":1,"value":1}',
        b'{"key":"","value":1}',
        b'{"key":"k"}',
        b'{"key":"k","value":1,"flags":-1}',
        b'{"key":"k","value":{"n":NaN}}',
        b'{"key":"k","value":1,"scope":"shop","collection":"orders"}',
        b'{"key":"k","value":1,"collection_id":8}',
        b'{"key":"k","value_base64":"!"}',
        b'{"key":"k","value":1,"xattrs":[]}',
        b'{"key":"k","value":1,"xattrs":{"":1}}',
        b'{"key":"k","value":1,"xattrs":{"a\\u0000":1}}',
        b'{"key":"k","value":1,"xattrs":{"a":1e400}}',
        b'{"key":"' + b"k" * 300 + b'","value":1}',
        b"[" * 100_000,
    ],
)
def test_a_line_that_can_not_be_loaded_is_named(line: bytes) -> None:
    good = b'{"key":"k","value":1}'
    with pytest.raises(InputError, match="line 2 can't be loaded: it"):
        list(from_json_lines([good, line], 16, collections=True, json_type=True, xattrs=True, most=10))


def test_xattrs_are_not_left_out_where_the_server_takes_none() -> None:
    lines = [b'{"key":"k","value":1,"xattrs":{}}', b'{"key":"k","value":1,"xattrs":{"a":1}}']
    with pytest.raises(InputError, match="line 2 can't be loaded: it has xattrs"):
        list(from_json_lines(lines, 16, collections=True, json_type=True, most=10))


def test_login_is_by_scram_and_errors_are_clear() -> None:
    with tailrace.testing.node(users={"ada": "secret"}) as node:
        where = node.url.replace("couchbase://", "couchbase://{}@")
        with KvClient(where.format("ada:secret")) as client:
            client.set("k", b"v")
        for url, words in (
            (where.format("ada:wrong"), "refuses the login"),
            (where.format("bob:secret"), "refuses the login"),
            (node.url, "no bucket 'default', or requires a login"),
            (where.format("ada:secret") + "x", "no bucket"),
        ):
            with pytest.raises(LoginError, match=words):
                KvClient(url)
    with pytest.raises(ConnectError, match="can't connect"):
        KvClient(node.url)


def test_the_connection_string_says_how_long_connecting_may_take() -> None:
    """Otherwise the client would wait for an hour, as it does for answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"couchbases://127.0.0.1:{silent.getsockname()[1]}?tls_verify=none&kv_connect_timeout=100ms"
        with pytest.raises(ConnectError, match="no TLS connection"):
            KvClient(url, timeout_s=3600.0)


def refused_map(_: FakeServer, frame: Frame) -> bytes:
    return Response(opcode=frame.opcode, opaque=frame.opaque, status=Status.KEY_ENOENT).encode()


def test_seeds_are_tried_one_after_the_other() -> None:
    """One is away, one has no map yet and says of no vbucket that it has it."""
    with ReservedPort() as away, FakeServer(ignore) as young, FakeServer(ignore) as server:
        young.answers[Op.GET_CLUSTER_CONFIG] = refused_map
        young.high_seqnos = {}
        seeds = f"couchbase://127.0.0.1:{away},127.0.0.1:{young.port}"
        with KvClient(f"{seeds},127.0.0.1:{server.port}/default") as client:
            assert client.vbucket_count == 1
            assert client.set("k", 1).vbucket == 0
        no_map = f"127.0.0.1:{young.port} has no cluster map yet"
        with pytest.raises(ConnectError, match=rf"^can't connect to 127.0.0.1:{away}: .*; {no_map}$"):
            KvClient(f"{seeds}/default")
        assert [frame.opcode for frame in young.requests].count(Op.SET) == 0


def test_a_client_follows_its_vbuckets() -> None:
    """Two nodes go; the third one's map says so, after a moment in which it gave none."""
    first, second, third = servers = [FakeServer(ignore, vbuckets=2) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            server.nodes, server.owners = servers, [[0], [1]]
            stack.enter_context(server)
        client = stack.enter_context(KvClient(first.url))
        assert client.high_seqnos() == {0: 0, 1: 0}  # with a connection to each node
        first.stop()
        second.stop()
        left = [refused_map, refused_map]
        third.answers[Op.GET_CLUSTER_CONFIG] = lambda server, frame: (
            left.pop()(server, frame) if left else server.answer(frame)
        )
        third.owners, third.revision = [[2], [-1]], 2
        keys = {client.vbucket_of(key): key for key in ("k0", "k1", "k2", "k3")}
        client.set(keys[0], 1)
        assert not left and Op.SET in [frame.opcode for frame in third.requests]
        assert client.manifest() == {"uid": "0", "scopes": []}
        left = [refused_map]
        third.owners, third.revision = [[2], [2]], 3
        client.set(keys[1], 1)  # no node had it
        assert not left


def test_an_operation_finds_the_new_node_after_one_that_did_not() -> None:
    """A node goes, and until an operation's time is up no other has its vbuckets."""
    first, second = servers = [FakeServer(ignore, vbuckets=1) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for server in servers:
            server.nodes = servers
            stack.enter_context(server)
        client = stack.enter_context(KvClient(first.url, clock=HurryingClock()))
        client.set("k", 1)
        first.stop()
        with pytest.raises(ConnectError):
            client.set("k", 2)
        second.owners, second.revision = [[1]], 2
        client.set("k", 3)
        assert [frame.value for frame in second.requests if frame.opcode == Op.SET] == [b"3"]


@pytest.mark.parametrize(
    "ask",
    [KvClient.stats, KvClient.high_seqnos, KvClient.manifest, KvClient.flush],
    ids=lambda method: method.__name__,
)
def test_a_question_to_a_node_that_was_away_makes_a_new_connection(ask: Callable[[KvClient], object]) -> None:
    with tailrace.testing.node(vbuckets=2) as node, KvClient(node.url) as client:
        ask(client)
        node.restart()
        with pytest.raises(ConnectError):
            ask(client)
        ask(client)


def test_a_bucket_that_is_not_there(node: RunningNode) -> None:
    with pytest.raises(LoginError, match="no bucket 'nobody'"):
        KvClient(node.url.replace("/default", "/nobody"))


@pytest.mark.parametrize("size", [(20 << 20) + 1, 35 << 20])
def test_a_value_that_is_too_large(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The first is refused, the second does not even fit into a frame."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes(size))))
    code, out, err = run(capfdbinary, "set", node.url, "large")
    assert (code, out) == (1, b"")
    assert err.startswith(b"tailrace: error: ") and err.count(b"\n") == 1
    assert b"%d bytes" % size in err and b"--set max_value" in err
    if size <= 30 << 20:
        assert b"the limit is 20971520" in err


def test_a_file_that_can_t_be_loaded(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    for data, words in (
        (b'{"key":"a","value":1}\n{bad\n', b"line 2 can't be loaded: it is not JSON"),
        ('{"key":"a","value":1}\n'.encode("utf-16"), b"line 1 can't be loaded: it is not UTF-8"),
        ('{"key":"a","value":1}\n'.encode("utf-16-le"), b"line 1 can't be loaded: it is not JSON"),
    ):
        source = tmp_path / "documents.jsonl"
        source.write_bytes(data)
        code, out, err = run(capfdbinary, "load", node.url, "--from", str(source))
        assert (code, out) == (1, b"")
        assert words in err and err.count(b"\n") == 1
    source.write_bytes(b'\xef\xbb\xbf{"key":"marked","value":1}\n')
    assert run(capfdbinary, "load", node.url, "--from", str(source))[0] == 0
    assert node.get("marked") == 1


def run(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, bytes, bytes]:
    code = main(list(arguments))
    out, err = capfdbinary.readouterr()
    return code, out, err


def test_a_key_that_is_not_utf_8(node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Its bytes are those of the argument, and JSON has them as base64, as everywhere."""
    url, key = node.url, b"caf\xe9"
    given = os.fsdecode(key)
    for command in ("get", "delete"):
        code, out, err = run(capfdbinary, command, url, given)
        assert (code, out) == (1, b"")
        assert err == b"tailrace: error: there is no document 'caf\\\\xe9', check the key and the bucket\n"
    stored = json.loads(run(capfdbinary, "set", url, given, "1", "--json")[1])
    assert stored["vbucket"] == node.vbucket_of(key)
    assert base64.b64decode(stored["key_base64"]) == key and "key" not in stored
    assert run(capfdbinary, "get", url, given) == (0, b"1", b"")
    shown = json.loads(run(capfdbinary, "get", url, given, "--json")[1])
    assert (shown["key_base64"], shown["cas"]) == (stored["key_base64"], stored["cas"])
    gone = json.loads(run(capfdbinary, "delete", url, given, "--json")[1])
    assert (gone["key_base64"], gone["seqno"]) == (stored["key_base64"], stored["seqno"] + 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", "{url}", "k", "--collection", "a.\udcff"],
        ["stats", "{url}", "\udcff"],
        ["get", "{url}\udcff", "k"],
    ],
)
def test_arguments_that_are_not_text(
    node: RunningNode, capfdbinary: pytest.CaptureFixture[bytes], arguments: list[str]
) -> None:
    code, out, err = run(capfdbinary, *(word.format(url=node.url) for word in arguments))
    assert (code, out) == (2, b"")
    assert err.startswith(b"tailrace: error: ") and err.count(b"\n") == 1 and b"bug" not in err


def test_commands(
    node: RunningNode,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    url = node.url
    code, out, _ = run(capfdbinary, "set", url, "user::1", '{"name":"Ada"}', "--json")
    assert code == 0
    stored = json.loads(out)
    assert stored["vbucket"] == node.vbucket_of("user::1")
    assert run(capfdbinary, "get", url, "user::1") == (0, b'{"name":"Ada"}', b"")
    shown = json.loads(run(capfdbinary, "get", url, "user::1", "--json")[1])
    assert shown["value"] == {"name": "Ada"} and shown["cas"] == stored["cas"] and shown["datatype"] == "json"

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x00\n")))
    assert run(capfdbinary, "set", url, "raw", "--flags", "5", "--expiry", "1h")[0] == 0
    assert run(capfdbinary, "get", url, "raw")[1] == b"\xff\x00\n"
    shown = json.loads(run(capfdbinary, "get", url, "raw", "--json")[1])
    assert shown["value_base64"] == "/wAK" and shown["flags"] == 5 and shown["expiry"] > 0

    assert run(capfdbinary, "delete", url, "raw")[0] == 0
    for command in ("get", "delete"):
        code, out, err = run(capfdbinary, command, url, "raw")
        assert (code, out) == (1, b"") and err.startswith(b"tailrace: error: there is no document 'raw'")

    source = tmp_path / "documents.jsonl"
    source.write_bytes(b'{"key":"a","value":1}\n{"key":"b","value":2}\n')
    assert json.loads(run(capfdbinary, "load", url, "--from", str(source), "--json")[1])["writes"] == 2
    assert (
        json.loads(run(capfdbinary, "load", url, "--docs", "50", "--rate", "1000", "--json")[1])["writes"]
        == 50
    )

    stats = json.loads(run(capfdbinary, "stats", url, "vbucket-seqno", "--json")[1])
    vbucket = str(stored["vbucket"])
    high = int(stats[f"vb_{vbucket}:high_seqno"])
    assert b"high_seqno" in run(capfdbinary, "stats", url, "vbucket-seqno")[1]
    assert run(capfdbinary, "stats", url, "nothing like it")[0] == 1

    code, out, _ = run(
        capfdbinary, "rewind", url, "--vbucket", vbucket, "--to-seqno", str(high - 1), "--json"
    )
    assert json.loads(out) == {vbucket: high - 1}
    code, out, _ = run(capfdbinary, "rewind", url, "--vbucket", "all", "--lose", "1", "--json")
    assert len(json.loads(out)) == 16 and json.loads(out)[vbucket] == high - 2
    code, _, err = run(capfdbinary, "rewind", url, "--vbucket", vbucket, "--to-seqno", "99999")
    assert code == 1 and err.startswith(b"tailrace: error:")
    assert run(capfdbinary, "rewind", url, "--vbucket", "0")[0] == 2
    assert run(capfdbinary, "rewind", url, "--vbucket", "77", "--to-seqno", "0")[0] == 2

    assert b"shop.orders" in run(capfdbinary, "collections", url, "--create", "shop.orders")[1]
    assert run(capfdbinary, "set", url, "o", "1", "--collection", "shop.orders")[0] == 0
    assert run(capfdbinary, "get", url, "o", "--collection", "shop.orders")[1] == b"1"
    code, _, err = run(capfdbinary, "collections", url, "--create", "shop.orders")
    assert (code, err) == (1, b"tailrace: error: the collection 'shop.orders' already exists\n")
    assert b"shop.orders" not in run(capfdbinary, "collections", url, "--drop", "shop.orders")[1]
    # the command line is right, and what it asks for is not there: as with a document
    assert run(capfdbinary, "collections", url, "--drop", "shop.orders")[0] == 1
    assert run(capfdbinary, "collections", url, "--drop", "nowhere")[0] == 1
    assert run(capfdbinary, "collections", url, "--create", "orders")[0] == 2
    run(capfdbinary, "collections", url, "--create", "shop.orders", "--max-ttl", "60")
    modified = run(
        capfdbinary, "collections", url, "--modify", "shop.orders", "--max-ttl", "90", "--no-history"
    )
    assert b"expires after 90 s, no history)" in modified[1]
    assert (
        b"expires"
        not in run(capfdbinary, "collections", url, "--modify", "shop.orders", "--max-ttl", "default")[1]
    )
    assert run(capfdbinary, "collections", url, "--modify", "shop.none", "--max-ttl", "0")[0] == 1
    for wrong in (
        ["--modify", "shop.orders"],
        ["--max-ttl", "9"],
        ["--modify", "shop.orders", "--max-ttl", "x"],
    ):
        assert run(capfdbinary, "collections", url, *wrong)[0] == 2
    assert run(capfdbinary, "get", "couchbase://127.0.0.1:1", "k")[0] == 3
    assert run(capfdbinary, "get", url.replace("default", "other"), "k")[0] == 3
    run(capfdbinary, "collections", url, "--drop", "shop")
