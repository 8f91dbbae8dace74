"""System events as servers send them now: FlatBuffers, with what was modified."""

from __future__ import annotations

import json
import struct
from typing import Any

import tailrace.testing
from client.fake_server import FakeServer, accepted, marker
from tailrace.client.events import SystemEvent
from tailrace.client.jsonlines import json_line
from tailrace.client.kv import KvClient
from tailrace.connstr import parse
from tailrace.wire.codes import ControlKey, DcpOpcode, Status
from tailrace.wire.dcp import DcpStreamEnd, DcpSystemEvent
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
