"""System events as servers send them now: FlatBuffers, including modifications."""

from __future__ import annotations

import json
import struct
import time
import urllib.request
from typing import Any
from urllib.parse import urlencode

import tailrace
import tailrace.testing
from client.fake_server import FakeServer, accepted, marker
from server.serverkit import Bench, ask, take
from tailrace.client.events import SystemEvent
from tailrace.client.jsonlines import json_line
from tailrace.client.kv import KvClient
from tailrace.client.manifest import with_changes
from tailrace.connstr import parse
from tailrace.wire.admin import Hello
from tailrace.wire.codes import ControlKey, DcpOpcode, Feature, OpenFlag, Status, VBucketState
from tailrace.wire.dcp import DcpControl, DcpOpen, DcpStreamEnd, DcpStreamRequest, DcpSystemEvent
from tailrace.wire.message import Response
from wire.test_flatbuffer import EXAMPLE


def events(source: Any) -> list[SystemEvent]:
    return [event for event in source.changes(end="now") if isinstance(event, SystemEvent)]


def test_a_collection_is_modified(connect: Any) -> None:
    def serve(connection: Any, request: Any) -> None:
        fields = {"opaque": request.opaque, "vbucket": request.vbucket}
        modified = DcpSystemEvent(
            by_seqno=2, event=5, version=2, key=b"mycollection", value=EXAMPLE, **fields
        )
        connection.send(
            accepted(request), marker(request, 1, 2), modified.encode(), DcpStreamEnd(**fields).encode()
        )

    with FakeServer(serve) as server:
        server.high_seqnos = {0: 2}
        (event,) = events(connect(server.url))
        asked = [frame.key for frame in server.requests if frame.opcode == DcpOpcode.CONTROL]
    assert ControlKey.FLATBUFFERS_SYSTEM_EVENTS in asked
    assert (event.event, event.name, event.manifest_uid) == ("collection_modified", "mycollection", 2)
    assert (event.scope_id, event.collection_id, event.max_ttl, event.history) == (9, 8, 72_000, True)
    assert json.loads(json_line(event))["history"] is True


def test_a_server_that_has_only_the_older_form(connect: Any) -> None:
    def control(_: Any, frame: Any) -> bytes:
        refused = frame.key == ControlKey.FLATBUFFERS_SYSTEM_EVENTS
        status = Status.EINVAL if refused else Status.SUCCESS
        return Response(opcode=DcpOpcode.CONTROL, opaque=frame.opaque, status=status).encode()

    def serve(connection: Any, request: Any) -> None:
        fields = {"opaque": request.opaque, "vbucket": request.vbucket}
        value = struct.pack(">QIII", 2, 9, 8, 60)
        begun = DcpSystemEvent(by_seqno=1, event=0, version=1, key=b"c", value=value, **fields)
        connection.send(
            accepted(request), marker(request, 1, 1), begun.encode(), DcpStreamEnd(**fields).encode()
        )

    with FakeServer(serve) as server:
        server.high_seqnos = {0: 1}
        server.answers[DcpOpcode.CONTROL] = control
        (event,) = events(connect(server.url))
    assert (event.event, event.collection_id, event.max_ttl, event.history) == (
        "collection_created",
        8,
        60,
        None,
    )


def test_what_our_node_sends(connect: Any) -> None:
    with tailrace.testing.node(vbuckets=1) as node, KvClient(parse(node.url)) as client:
        manifest = client.manifest()
        manifest["uid"] = "1"
        orders = {"name": "orders", "uid": "9", "maxTTL": 3600}
        manifest["scopes"].append({"name": "shop", "uid": "8", "collections": [orders]})
        client.set_manifest(manifest)
        scope, collection = events(connect(node.url))
    assert (scope.event, scope.name, scope.scope_id, scope.collection_id) == (
        "scope_created",
        "shop",
        8,
        None,
    )
    assert (collection.event, collection.name, collection.max_ttl) == ("collection_created", "orders", 3600)
    assert (collection.scope_id, collection.collection_id, collection.manifest_uid) == (8, 9, 1)


def patched(node: Any, path: str, **form: str) -> int:
    url = f"http://127.0.0.1:{node.port}/pools/default/buckets/default/scopes/{path}"
    request = urllib.request.Request(url, urlencode(form).encode(), method="PATCH")
    with urllib.request.urlopen(request) as answer:
        return int(answer.status)


def modifications(source: Any) -> list[tuple[Any, ...]]:
    return [(event.event, event.name, event.max_ttl, event.history) for event in events(source)]


def test_our_node_tells_what_is_modified(connect: Any) -> None:
    """Over HTTP as in Couchbase; to readers that take FlatBuffers, to replicas, and to no others."""
    settings = {"history_retention_bytes": "1g"}
    with (
        tailrace.testing.node(vbuckets=1, settings=settings) as node,
        tailrace.testing.node(vbuckets=1, settings=settings) as other,
        KvClient(parse(node.url)) as client,
        KvClient(parse(other.url)) as others,
    ):
        client.set_manifest(with_changes(client.manifest(), ["shop.orders"]))
        assert patched(node, "shop/collections/orders", maxTTL="3600", history="false") == 200
        assert patched(node, "_default/collections/_default", maxTTL="60") == 200
        told = modifications(connect(node.url))
        assert told == [
            ("scope_created", "shop", None, None),
            ("collection_created", "orders", None, True),
            ("collection_modified", "orders", 3600, False),
            ("collection_modified", "_default", 60, True),
        ]
        other.replicate([0], node)
        while other.high_seqno(0) < node.high_seqno(0):
            time.sleep(0.01)
        other.replicate([0], None)
        others.set_manifest(client.manifest())
        other.set_vbucket_state(0, VBucketState.ACTIVE)
        assert modifications(connect(other.url)) == told
        client.set_manifest(with_changes(client.manifest(), drop=["shop.orders"]))
        node.persist()
        last = [event.event for event in events(connect(node.url))]
        assert last == ["scope_created", "collection_modified", "collection_dropped"], "and no more of orders"


def test_who_reads_integers_is_told_nothing_of_it() -> None:
    bench = Bench()
    store = bench.node.buckets["default"].store
    store.set_manifest(json.dumps(with_changes(dict(store.manifest), ["_default.orders"])).encode())
    modified = with_changes(dict(store.manifest), modify=["_default.orders"], properties={"maxTTL": 9})
    store.set_manifest(json.dumps(modified).encode())
    vbucket = store.vbuckets[0]
    assert vbucket.high_seqno == 2
    session = bench.session()
    features = b"".join(int(feature).to_bytes(2, "big") for feature in (Feature.COLLECTIONS, Feature.XERROR))
    frames = ask(
        bench,
        session,
        Hello(value=features),
        DcpOpen(flags=OpenFlag.PRODUCER, key=b"reader"),
        DcpControl(key=ControlKey.ENABLE_NOOP, value=b"true"),
        DcpStreamRequest(end_seqno=(1 << 64) - 1, vbucket=0, opaque=7),
    )
    bench.advance(0.1)
    frames += take(session)
    got = [(frame.opcode, frame.extras[:8]) for frame in frames if frame.opaque == 7][1:]
    opcodes = [opcode for opcode, _ in got]
    assert opcodes == [DcpOpcode.SNAPSHOT_MARKER, DcpOpcode.SYSTEM_EVENT, DcpOpcode.SEQNO_ADVANCED]
    assert got[-1][1] == (2).to_bytes(8, "big")


def test_a_source_that_was_open_before_a_collection_began() -> None:
    """A second reading that begins after the collection's first event knows its name."""
    with tailrace.testing.node(vbuckets=2) as node, KvClient(parse(node.url)) as client:
        node.set("a", 1)
        with tailrace.connect_sync(node.url) as source:
            assert [batch.num_rows for batch in source.batches(end="now")] == [1]
            client.set_manifest(with_changes(client.manifest(), ["shop.orders"], []))
            with tailrace.connect_sync(node.url) as other:
                list(other.batches(end="now"))
                stands = other.positions()
            client.set("o", {"n": 1}, collection="shop.orders")
            (batch,) = source.batches(start=stands, end="now")
            names = batch.select(["key", "scope", "collection"]).to_pylist()
    assert names == [{"key": b"o", "scope": "shop", "collection": "orders"}]
