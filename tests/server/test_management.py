"""Management over HTTP, beside the binary protocol: what SDKs ask for, and the words that they look for."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

import pytest

from server.serverkit import Bench, Wire, ask, http_answer
from tailrace.server.http import HttpRequestBuffer, HttpStream, HttpStreaming
from tailrace.server.management import management_service
from tailrace.server.node import Node
from tailrace.server.served_map import NodeAddress, bucket_map
from tailrace.testing.running import RunningNode
from tailrace.wire import admin, kv
from tailrace.wire.codes import Feature, Status, VBucketState


def call(node: Node, method: str, path: str, *headers: str, **form: str) -> tuple[int, Any]:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    whole = http_answer(management_service(node), head, urlencode(form).encode())
    answer, _, body = whole.partition(b"\r\n\r\n")
    text = body.decode()
    return int(answer.split()[1]), json.loads(text) if text.startswith(("{", "[", '"')) else text


def scopes_of(node: Node) -> dict[str, list[str]]:
    _, manifest = call(node, "GET", "/pools/default/buckets/default/scopes")
    return {scope["name"]: [c["name"] for c in scope["collections"]] for scope in manifest["scopes"]}


def test_the_config_of_a_bucket_is_that_of_the_binary_protocol() -> None:
    bench = Bench()
    status, config = call(bench.node, "GET", "/pools/default/b/default")
    assert status == 200
    assert config == json.loads(ask(bench, bench.session(), admin.GetClusterConfig())[0].value)
    assert call(bench.node, "GET", "/pools/default/b/other") == (404, "Bucket not found")
    _, services = call(bench.node, "GET", "/pools/default/nodeServices")
    assert services["nodesExt"] == config["nodesExt"]


def test_pools_and_buckets() -> None:
    node = Bench(buckets=("default", "a%b")).node
    assert call(node, "GET", "/pools")[1]["pools"][0]["name"] == "default"
    _, cluster = call(node, "GET", "/pools/default")
    assert [member["thisNode"] for member in cluster["nodes"]] == [True]
    assert [bucket["name"] for bucket in call(node, "GET", "/pools/default/buckets")[1]] == ["default", "a%b"]
    _, bucket = call(node, "GET", "/pools/default/buckets/a%25b")
    assert (bucket["name"], bucket["bucketType"], bucket["replicaNumber"]) == ("a%b", "membase", 0)
    assert call(node, "GET", "/pools/default/buckets/none") == (404, "Requested resource not found.\r\n")
    assert call(node, "POST", "/pools")[0] == 405
    assert call(node, "GET", "/settings")[0] == 404


def test_scopes_and_collections_are_made_and_dropped() -> None:
    bench = Bench()
    node, base = bench.node, "/pools/default/buckets/default/scopes"
    assert scopes_of(node) == {"_default": ["_default"]}
    assert call(node, "POST", base, name="shop") == (200, {"uid": "1"})
    assert call(node, "POST", f"{base}/shop/collections", name="orders", maxTTL="60") == (200, {"uid": "2"})
    assert scopes_of(node) == {"_default": ["_default"], "shop": ["orders"]}
    _, manifest = call(node, "GET", base)
    (orders,) = manifest["scopes"][1]["collections"]
    assert (orders["maxTTL"], orders["history"]) == (60, False)
    session = bench.session()
    ask(bench, session, admin.Hello(value=int(Feature.COLLECTIONS).to_bytes(2, "big")))
    key = bytes([int(orders["uid"], 16)]) + b"k"
    (written,) = ask(bench, session, kv.Set(key=key, value=b"{}"))
    assert written.status == Status.SUCCESS, "it can be used at once"
    assert call(node, "POST", f"{base}/@ensureManifest/2")[0] == 200
    assert call(node, "POST", f"{base}/@ensureManifest/ff")[0] == 503
    assert call(node, "DELETE", f"{base}/shop/collections/orders") == (200, {"uid": "3"})
    assert call(node, "DELETE", f"{base}/shop") == (200, {"uid": "4"})
    assert scopes_of(node) == {"_default": ["_default"]}
    call(node, "POST", base, name="shop")
    _, again = call(node, "GET", base)
    assert int(again["scopes"][1]["uid"], 16) > int(orders["uid"], 16), "ids do not come back"


def test_a_node_with_a_change_history_says_of_which_collections() -> None:
    bench = Bench(history_retention_bytes=1 << 20)
    node, base = bench.node, "/pools/default/buckets/default/scopes"
    for name, form in (("all", {"history": "true"}), ("few", {"history": "false"}), ("unsaid", {})):
        assert call(node, "POST", f"{base}/_default/collections", name=name, **form)[0] == 200
    assert call(node, "POST", f"{base}/_default/collections", name="odd", history="x")[0] == 400
    _, manifest = call(node, "GET", base)
    said = {collection["name"]: collection["history"] for collection in manifest["scopes"][0]["collections"]}
    assert said == {"_default": True, "all": True, "few": False, "unsaid": True}
    capabilities = call(node, "GET", "/pools/default/b/default")[1]["bucketCapabilities"]
    assert "nonDedupedHistory" in capabilities
    assert (
        "nonDedupedHistory"
        not in call(Bench().node, "GET", "/pools/default/b/default")[1]["bucketCapabilities"]
    )


def test_collections_are_modified() -> None:
    node, base = Bench(history_retention_bytes=1 << 20).node, "/pools/default/buckets/default/scopes"
    call(node, "POST", f"{base}/_default/collections", name="orders", maxTTL="60", history="false")

    def orders() -> tuple[int, bool]:
        collection = call(node, "GET", base)[1]["scopes"][0]["collections"][1]
        return collection["maxTTL"], collection["history"]

    assert orders() == (60, False)
    for form, expected in (
        ({"history": "true"}, (60, True)),
        ({"maxTTL": "90"}, (90, True)),
        ({"maxTTL": "-1", "history": "false"}, (-1, False)),
        ({"maxTTL": "0"}, (0, False)),
    ):
        assert call(node, "PATCH", f"{base}/_default/collections/orders", **form)[0] == 200
        assert orders() == expected
    assert call(node, "PATCH", f"{base}/_default/collections/orders", maxTTL="x")[0] == 400
    assert call(node, "PATCH", f"{base}/_default/collections/none", maxTTL="1")[0] == 404
    assert orders() == (0, False)


@pytest.mark.parametrize(
    ("method", "path", "form", "status", "text"),
    [
        ("POST", "", {"name": "there"}, 400, "Scope with name 'there' already exists"),
        ("POST", "", {"name": "_own"}, 400, "must not begin with _"),
        ("POST", "", {"name": "a.b"}, 400, "Can only contain"),
        ("POST", "", {}, 400, "name must be given"),
        ("POST", "/there/collections", {}, 400, "name must be given"),
        ("DELETE", "/none", {}, 404, "Scope with name 'none' is not found"),
        ("DELETE", "/_default", {}, 400, "Deleting _default scope is not allowed"),
        ("POST", "/none/collections", {"name": "c"}, 404, "Scope with name 'none' is not found"),
        ("POST", "/there/collections", {"name": "c"}, 400, "Collection with name 'c' in"),
        ("POST", "/there/collections", {"name": "d", "maxTTL": "x"}, 400, "maxTTL"),
        ("POST", "/there/collections", {"name": "d", "history": "true"}, 400, "history"),
        ("DELETE", "/there/collections/none", {}, 404, "Collection with name 'none' is not found"),
    ],
)  # fmt: skip
def test_refusals_have_the_words_that_sdks_look_for(
    method: str, path: str, form: dict[str, str], status: int, text: str
) -> None:
    node, base = Bench().node, "/pools/default/buckets/default/scopes"
    call(node, "POST", base, name="there")
    call(node, "POST", f"{base}/there/collections", name="c")
    before = call(node, "GET", base)
    answered, content = call(node, method, base + path, **form)
    assert answered == status
    assert text in content["errors"]["_"]
    assert call(node, "GET", base) == before


def test_a_node_of_several_does_not_change_its_collections_alone() -> None:
    node = Bench().node
    addresses = [NodeAddress(port=1, host="a"), NodeAddress(port=2, host="b")]
    node.set_map("default", bucket_map("default", addresses, [[0]] * 4, rev=9, this_node=0))
    assert call(node, "POST", "/pools/default/buckets/default/scopes", name="shop")[0] == 503
    assert scopes_of(node) == {"_default": ["_default"]}


def test_who_asks() -> None:
    assert call(Bench().node, "GET", "/whoami")[1]["id"] == "Administrator"
    node = Bench(users={"ada": "secret"}).node
    assert call(node, "GET", "/whoami")[0] == 401
    assert call(node, "GET", "/nothing")[0] == 401
    login = "Authorization: Basic " + base64.b64encode(b"ada:secret").decode()
    assert call(node, "GET", "/whoami", login)[1]["id"] == "ada"


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_a_request_comes_in_pieces(piece_bytes: int) -> None:
    node = Bench().node
    request = b"POST /pools/default/buckets/default/scopes HTTP/1.1\r\nContent-Length: 9\r\n\r\nname=shop"
    buffer = HttpRequestBuffer()
    pieces = [request[at : at + piece_bytes] for at in range(0, len(request), piece_bytes)]
    assert [buffer.add(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    answer = buffer.answer(management_service(node))
    assert isinstance(answer, bytes) and answer.startswith(b"HTTP/1.1 200 ")
    assert "shop" in scopes_of(node)


@pytest.mark.parametrize("behind", [b"GET /pools HTTP/1.1\r\n\r\n", b"x" * 100_000])
def test_what_comes_behind_a_request_is_not_its_body(behind: bytes) -> None:
    node = Bench().node
    request = b"POST /pools/default/buckets/default/scopes HTTP/1.1\r\nContent-Length: 9\r\n\r\nname=shop"
    buffer = HttpRequestBuffer()
    assert buffer.add(request + behind)
    answer = buffer.answer(management_service(node))
    assert isinstance(answer, bytes) and answer.startswith(b"HTTP/1.1 200 ")
    assert "shop" in scopes_of(node)


def test_a_form_with_too_many_fields_is_refused() -> None:
    form = {f"field{number}": "1" for number in range(100)}
    assert call(Bench().node, "POST", "/pools/default/buckets/default/scopes", **form)[0] == 400


def test_a_node_that_waits_for_its_map_does_not_change_its_collections() -> None:
    """It may be one of several."""
    node = Bench().node
    node.fenced = True
    assert call(node, "POST", "/pools/default/buckets/default/scopes", name="shop")[0] == 503
    assert scopes_of(node) == {"_default": ["_default"]}


def test_a_request_without_end_gets_nothing() -> None:
    buffer = HttpRequestBuffer()
    assert buffer.add(b"GET /" + b"x" * 10_000)
    assert buffer.answer(management_service(Bench().node)) == b""


def test_on_the_node_s_own_port(shared_node: Any) -> None:
    address = f"http://127.0.0.1:{shared_node.port}"
    with urllib.request.urlopen(f"{address}/pools/default/b/default", timeout=60) as response:
        config = json.load(response)
    assert config["nodesExt"][0]["services"]["mgmt"] == shared_node.port
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/nothing", timeout=60)
    with Wire(shared_node.port) as wire:
        wire.ok(admin.Noop())


class ConfigStream:
    """A client of the endpoints that never end."""

    def __init__(self, port: int, path: str, method: str = "GET") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request(method, path)
        self.answer = self._connection.getresponse()
        self._text = b""

    def next(self) -> Any:
        """The next config; None at the end."""
        while b"\n\n\n\n" not in self._text:
            piece = self.answer.read1(65_536)
            if not piece:
                return None
            self._text += piece
        text, _, self._text = self._text.partition(b"\n\n\n\n")
        return json.loads(text) if text else ""

    def close(self) -> None:
        self._connection.close()


def test_configs_are_streamed() -> None:
    """At once, whenever they change, and with signs of life."""
    with RunningNode(2) as node, Wire(node.port) as wire:
        port = node.port
        stream = ConfigStream(port, "/pools/default/bs/default")
        first = stream.next()
        assert first == json.loads(wire.ok(admin.GetClusterConfig()).value)
        node.set_vbucket_state(1, VBucketState.REPLICA)
        second = stream.next()
        assert second["rev"] > first["rev"] and second["vBucketServerMap"]["vBucketMap"][1][0] == -1
        stream.close()
        beating = ConfigStream(port, "/pools/default/nodeServicesStreaming?heartbeat=1")
        assert beating.next()["nodesExt"] and beating.next() == ""
        beating.close()
        assert ConfigStream(port, "/pools/default/bs/none").answer.status == 404
        assert ConfigStream(port, "/pools/default/bs/default?heartbeat=x").answer.status == 400
        only_head = ConfigStream(port, "/pools/default/bs/default", "HEAD")
        assert only_head.answer.status == 200 and not only_head.answer.read()
        other = ConfigStream(port, "/poolsStreaming/default")
        assert other.next()["name"] == "default"
        other.close()


def test_a_stream_ends_with_its_bucket() -> None:
    node = Bench(buckets=("default", "short")).node
    buffer = HttpRequestBuffer()
    assert buffer.add(b"GET /pools/default/bs/short HTTP/1.1\r\n\r\n")
    answer = buffer.answer(management_service(node))
    assert isinstance(answer, HttpStream)
    streaming = HttpStreaming(answer)
    part = streaming.next_part(0.0)
    assert part is not None and part.endswith(b"\r\n4\r\n\n\n\n\n\r\n")
    assert streaming.next_part(100.0) == b"", "nothing new"
    del node.buckets["short"]
    assert streaming.next_part(101.0) is None
