"""What a node shows over HTTP: the page, the JSON API, one shape of errors, and who may read."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.serverkit import Bench, ask, http_answer, take
from tailrace.errors import StoreError
from tailrace.server import stats
from tailrace.server.http import (
    HttpContent,
    HttpRequest,
    HttpRequestBuffer,
    HttpStream,
    response,
)
from tailrace.server.node import Node
from tailrace.server.served_map import AlternateAddress, NodeAddress, bucket_map
from tailrace.store.engine import Engine
from tailrace.web import connection_handler, http, node_service
from tailrace.web.http import page_routes
from tailrace.web.node_view import gather_node_view
from tailrace.wire import admin, dcp, kv


def get(node: Node, target: str, *headers: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers by their lower-case names, body."""
    request = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers, "", ""]
    return parsed(respond(node, "\r\n".join(request).encode()))


def respond(node: Node, head: bytes) -> bytes:
    service, buffer = node_service(node), HttpRequestBuffer()
    assert buffer.add(head)
    request = buffer.understood(service)
    if not isinstance(request, HttpRequest):
        return response(request)
    answer = service.serve(request)

    async def awaited() -> HttpContent:
        assert isinstance(answer, Awaitable)
        return await answer

    content = asyncio.run(awaited()) if isinstance(answer, Awaitable) else answer
    assert not isinstance(content, HttpStream)
    return response(content, with_body=request.with_body)


def parsed(response: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in fields.items()}, body


def basic(user: str, password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_the_page_is_whole() -> None:
    status, headers, body = get(Bench().node, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert int(headers["content-length"]) == len(body)
    assert b"api/stats" in body
    fetched = re.findall(rb"""(?:src|href|url\(|import)\s*[=(]?\s*["']?(?:https?:)?//""", body)
    assert fetched == [], "it brings all that it needs"
    assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize("name", ["dashboard.html", "mirror.html", "reader.html"])
def test_pages_bring_all_that_they_need_and_use_what_is_there(name: str) -> None:
    """No address of another host; every id that a script looks for is on its page."""
    html = http.page(name).body.decode()
    library, *scripts = re.findall(r'<script src="([\w./]+)">', html)
    assert scripts[0] == "page.js" and len(scripts) == 2
    assert http.page(library).status == 200, "run 'pip install -e .': the build puts the chart library there"
    assert b"Copyright (c) 2021, Leon Sorokin" in http.page(library).body
    assert set(page_routes(name, scripts[1])) >= {f"/{part}" for part in (library, *scripts)}
    texts = [html, *(http.page(part).body.decode() for part in (*scripts, "page.css"))]
    assert "//" not in "".join(texts)
    ids = set(re.findall(r'id="(\w+)"', html))
    own = texts[2]
    wanted = set(re.findall(r'(?:show|chart|events|\$)\("(\w+)"', own)) | {"verdict"}
    assert wanted <= ids
    assert set(re.findall(r"document\.forms\.(\w+)", own)) <= set(re.findall(r'<form name="(\w+)"', html))
    assert 'name="viewport"' in html and "color-scheme: light dark" in texts[-1]


def test_the_view_of_a_node_and_the_history_of_a_vbucket() -> None:
    bench = Bench(vbuckets=4)
    session = bench.session()
    for key in (b"a", b"b", b"c"):
        ask(bench, session, kv.Set(key=key, value=b"1", vbucket=2))
    ask(bench, session, admin.Rewind(mode=1, number=1, value=b"\0\2"))
    *_, view = gather_node_view(bench.node, has_faults=False)
    bucket = view["buckets"]["default"]
    assert (bucket["states"], bucket["documents"]) == ("aaaa", 2)
    assert (bucket["failovers"], bucket["lost_changes"]) == (1, 1)
    assert [event["event"] for event in view["events"]] == ["failover"]
    status, _, body = get(bench.node, "/api/vbucket?bucket=default&vbucket=2")
    branches = json.loads(body)["branches"]
    assert status == 200
    assert [(branch["begins"], branch["ends"]) for branch in branches] == [(2, 2), (0, 2)]
    for wrong in ("bucket=default&vbucket=4", "bucket=default&vbucket=x", "bucket=other&vbucket=0", ""):
        assert get(bench.node, f"/api/vbucket?{wrong}")[0] == 404


def test_the_view_says_who_is_slow_and_why() -> None:
    bench = Bench(vbuckets=1)
    writer, reader = bench.session(), bench.session()

    def why(*full: str) -> str:
        *_, view = gather_node_view(bench.node, has_faults=False, full=full)
        (stream,) = view["streams"]
        return str(stream["why"])

    ask(bench, reader, dcp.DcpOpen(key=b"slow", flags=1))
    ask(bench, reader, dcp.DcpControl(key=b"connection_buffer_size", value=b"1000"))
    ask(bench, reader, dcp.DcpStreamRequest(end_seqno=1 << 62))
    assert why() == "in step"
    assert why("127.0.0.1:9", reader.peer) == "its connection is full: the reader is slow"
    ask(bench, writer, kv.Set(key=b"k", value=b"x" * 1_000))
    ask(bench, writer, kv.Set(key=b"k2", value=b"x"))
    take(reader)
    assert why() == "its window is full: the reader is slow"


def test_the_view_says_that_the_disk_takes_nothing() -> None:
    """Until it takes changes again, or nothing waits for it any more."""
    bench = Bench(vbuckets=4)
    work = bench.node.buckets["default"].work
    for is_full in (True, False):
        work.disk_is_full = is_full
        work.after_flush(lambda _: None)
        *_, view = gather_node_view(bench.node, has_faults=False)
        assert view["buckets"]["default"]["flush_fails"] is is_full


def test_the_view_does_not_say_that_changes_stay_in_memory_when_only_maintenance_fails() -> None:
    bench = Bench(vbuckets=4)
    bench.node.buckets["default"].work._maintenance.trouble.met(StoreError("a block can't be read"))
    *_, view = gather_node_view(bench.node, has_faults=False)
    bucket = view["buckets"]["default"]
    assert (bucket["flush_fails"], bucket["maintenance_fails"]) == (False, True)
    assert [event["event"] for event in view["events"]] == ["maintenance_failed"]


def test_a_member_without_a_map_is_not_ready() -> None:
    engine = Engine()
    engine.create_bucket("default", 4)
    node = Node(engine, fenced=True)
    assert get(node, "/readyz")[::2] == (503, b"the node waits for its cluster map\n")
    node.set_map("default", bucket_map("default", [NodeAddress(port=11210)], [[0]] * 4, rev=1))
    assert get(node, "/readyz")[::2] == (200, b"ok\n")


def test_figures_as_one_object() -> None:
    bench = Bench(vbuckets=4, buckets=("default", "other"))
    session = bench.session()
    ask(bench, session, kv.Set(key=b"a", value=b"1", vbucket=2))
    status, headers, body = get(bench.node, "/api/stats?now=1")
    assert (status, headers["content-type"]) == (200, "application/json")
    figures: dict[str, Any] = json.loads(body)
    assert set(figures) == {"node", "buckets", "connections"}
    assert set(figures["buckets"]) == {"default", "other"}
    assert set(figures["buckets"]["default"]["vbuckets"]) == {"0", "1", "2", "3"}
    assert figures["buckets"]["default"]["vbuckets"]["2"]["high_seqno"] == 1
    assert [connection["stream"] for connection in figures["connections"]] == [None]


def test_large_figures_are_gathered_and_written_in_steps() -> None:
    """With 1,024 vbuckets they take 40 ms, in which the node could do nothing else if it was one step."""
    bench = Bench(vbuckets=256)
    *steps, whole = stats.snapshot(bench.node)
    assert len(steps) >= 256 and all(step is whole for step in steps)
    pieces = list(http.json_pieces(whole, 4))
    assert json.loads("".join(pieces)) == whole
    assert max(map(len, pieces)) < 2000
    assert json.loads("".join(http.json_pieces([{}, [], {"a": [1, {"b": None}]}], 2))) == [
        {},
        [],
        {"a": [1, {"b": None}]},
    ]


def test_head_has_no_body() -> None:
    node = Bench().node
    status, headers, body = get(node, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == get(node, "/")[1]["content-length"]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /nothing HTTP/1.1", 404),
        ("POST /api/stats HTTP/1.1", 405),
        ("GET /api/stats", 400),
        ("GET / HTTP/2", 400),
        ("\x80\x51 \xff", 400),
        ("", 400),
    ],
)
def test_errors_have_one_shape(request_line: str, status: int) -> None:
    code, headers, body = parsed(respond(Bench().node, f"{request_line}\r\n\r\n".encode("latin-1")))
    assert (code, headers["content-type"]) == (status, "application/json")
    assert list(json.loads(body)) == ["error"]


class TestWhereThereAreUsers:
    """They must log in; others learn only that."""

    node = Bench(users={"ada": "secret:with colon"}).node

    @pytest.mark.parametrize("target", ["/", "/api/stats", "/nothing"])
    def test_nothing_is_shown_to_others(self, target: str) -> None:
        status, headers, body = get(self.node, target)
        assert (status, list(json.loads(body))) == (401, ["error"])
        assert headers["www-authenticate"].startswith("Basic ")

    def test_a_user_reads(self) -> None:
        assert get(self.node, "/api/stats", basic("ada", "secret:with colon"))[0] == 200
        lower = basic("ada", "secret:with colon").replace("Authorization: Basic", "authorization: basic")
        assert get(self.node, "/", lower)[0] == 200

    @pytest.mark.parametrize(
        "header",
        [
            basic("ada", "wrong"),
            basic("eve", "secret:with colon"),
            "Authorization: Basic",
            "Authorization: Basic !!!",
            "Authorization: Basic " + base64.b64encode(b"\xff\xfe:x").decode(),
            basic("ada", "secret:with colon").replace("Basic", "Bearer"),
        ],
    )
    def test_a_wrong_login_reads_nothing(self, header: str) -> None:
        assert get(self.node, "/api/stats", header)[0] == 401


def test_over_a_socket_and_what_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is answered and the connection closed; one that never ends, or is too long, is closed."""
    monkeypatch.setattr(http, "_TIMEOUT_S", 0.2)

    async def talk(port: int, data: bytes, *, end: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""  # closed while we were still sending
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(connection_handler(node_service(Bench().node)), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            answer = await talk(port, b"GET / HTTP/1.1\r\n\r\n", end=False)
            assert parsed(answer)[0] == 200
            assert await talk(port, b"GET / HTTP/1.1\r\n", end=False) == b""
            assert await talk(port, b"GET / HTTP/1.1\r\n", end=True) == b""
            assert await talk(port, b"GET /" + b"x" * (1 << 17), end=False) == b""

    asyncio.run(run())


def test_a_node_that_is_asked_for_a_page(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "tailrace", "serve", "--memory", "--port", "0", "--web-port", "0"]
    command += ["--vbuckets", "2", "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path) as node:
        try:
            while not ready.exists():
                assert node.poll() is None, "the node ended before it was ready"
                time.sleep(0.02)
            port = json.loads(ready.read_text())["web_port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/stats", timeout=60) as response:
                assert set(json.load(response)["buckets"]) == {"default"}
        finally:
            node.terminate()
            assert node.wait(60) == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 200),
        (("Origin: http://127.0.0.1:8091",), 200),
        (("Origin: null", "Sec-Fetch-Site: same-origin"), 200),
        (("Origin: http://elsewhere",), 403),
        (("Origin: null",), 403),
        (("Origin: http://127.0.0.1:8091", "Sec-Fetch-Site: cross-site"), 403),
        (("Sec-Fetch-Site: same-site",), 403),
    ],
)
def test_a_page_of_somebody_else_changes_nothing(headers: tuple[str, ...], status: int) -> None:
    """A browser sends forms anywhere, and a user's login with them."""
    node = Bench().node
    head = ["POST /pools/default/buckets/default/scopes HTTP/1.1", "Host: 127.0.0.1:8091", *headers]
    answer = http_answer(node_service(node), head, b"name=new")
    assert parsed(answer)[0] == status
    assert ("new" in [scope["name"] for scope in node.buckets["default"].store.manifest["scopes"]]) == (
        status == 200
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8091", 200),
        ("127.0.0.1", 200),
        ("[::1]:8091", 200),
        ("192.0.2.7:8091", 200),
        ("node.example.com:8091", 200),
        ("evil.example.com", 403),
        ("evil.example.com:8091", 403),
        ("127.0.0.1.evil.example.com", 403),
    ],
)
def test_a_node_without_users_is_not_read_under_a_strange_name(host: str, status: int) -> None:
    """Another site's name may resolve to this machine, and browsers take its pages and ours for one site."""
    node = Bench().node
    node.address = replace(node.address, alternates=(AlternateAddress("external", "Node.example.com"),))
    for path in ("/api/events", "/pools/default/b/default"):
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nSec-Fetch-Site: same-origin\r\n\r\n"
        assert parsed(respond(node, head.encode()))[0] == status
    with_users = Bench(users={"ada": "secret"}).node
    head = f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n{basic('ada', 'secret')}\r\n\r\n"
    assert parsed(respond(with_users, head.encode()))[0] == 200


def test_configs_are_streamed_here_too() -> None:
    async def run() -> None:
        node = Bench().node
        server = await asyncio.start_server(connection_handler(node_service(node)), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /pools/default/bs/default HTTP/1.1\r\n\r\n")
        begun = await reader.readuntil(b"\n\n\n\n\r\n")
        assert b"Transfer-Encoding: chunked" in begun and b'"nodeLocator"' in begun
        bucket = node.buckets.pop("default")
        assert (await reader.read()).endswith(b"0\r\n\r\n")
        node.buckets["default"] = bucket
        writer.close()
        server.close()

    asyncio.run(run())


def test_refused_logins_push_nothing_else_out_of_the_events() -> None:
    events = Bench().node.events
    events.record("failover", vbucket=3)
    for number in range(500):
        events.record("login_refused", peer=f"10.0.0.{number % 256}")
    events.record("rollback", vbucket=3)
    kept = [event["event"] for event in events.recent]
    assert (kept[0], kept[-1], len(kept)) == ("failover", "rollback", 200)
    assert events.counts["login_refused"] == 500


def test_who_says_nothing_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 5)

    async def run() -> None:
        handle = connection_handler(node_service(Bench().node))
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for early, _ in silent[:7]:
            assert await early.read() == b""
        for connection in (writer, *(writer for _, writer in silent)):
            connection.close()
        server.close()
        await server.wait_closed()

    asyncio.run(run())
