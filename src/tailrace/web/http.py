"""The dashboard at ``/`` and the JSON API: ``GET /api/stats`` is the snapshot of `stats` as one object.

Read-only, one request a connection. The page is one file without anything from elsewhere.

Errors have one shape, ``{"error": TEXT}``. Where users are configured it wants one of them (Basic).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib.resources
import json
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from ..server import stats
from ..server.node import Node

__all__ = ["respond", "serve_http"]

_TIMEOUT_S = 10.0
# The page brings all that it needs, and nothing that a peer has sent can make it fetch more.
_POLICY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


class Content(NamedTuple):
    """What is at a path."""

    kind: str
    body: bytes


def _json(content: dict[str, Any]) -> Content:
    return Content("application/json", json.dumps(content).encode() + b"\n")


def _dashboard(_node: Node) -> Content:
    page = importlib.resources.files(__package__).joinpath("dashboard.html")
    return Content("text/html; charset=utf-8", page.read_bytes())


ROUTES: dict[str, Callable[[Node], Content]] = {
    "/": _dashboard,
    "/api/stats": lambda node: _json(stats.snapshot(node)),
}


def serve_http(
    node: Node,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    """What `asyncio.start_server` calls for each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(respond(node, head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # a peer that is too slow, too long or gone gets nothing
        finally:
            writer.close()

    return handle


def respond(node: Node, head: bytes) -> bytes:
    """The whole response to a request's head."""
    request, _, rest = head.decode("latin-1").partition("\r\n")
    words = request.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _response(400, _json({"error": "this is no HTTP request"}))
    method, target, _ = words
    if not _may_read(node, rest):
        return _response(401, _json({"error": "log in with Basic authentication"}))
    route = ROUTES.get(target.partition("?")[0])
    if route is None:
        return _response(404, _json({"error": f"there is nothing here; try {' '.join(ROUTES)}"}))
    if method not in ("GET", "HEAD"):
        return _response(405, _json({"error": "only GET"}))
    return _response(200, route(node), with_body=method == "GET")


def _may_read(node: Node, headers: str) -> bool:
    if not node.needs_login:
        return True
    for line in headers.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "authorization":
            scheme, _, encoded = value.strip().partition(" ")
            try:
                text = base64.b64decode(encoded, validate=True).decode()
            except (binascii.Error, ValueError):
                return False
            user, _, password = text.partition(":")
            return scheme.lower() == "basic" and node.users.check_password(user, password)
    return False


def _response(status: int, content: Content, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"Content-Type: {content.kind}\r\n"
        f"Content-Length: {len(content.body)}\r\n"
        "Cache-Control: no-store\r\n"
        f"Content-Security-Policy: {_POLICY}\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        + ('WWW-Authenticate: Basic realm="tailrace"\r\n' if status == 401 else "")
        + "Connection: close\r\n\r\n"
    )
    return head.encode() + (content.body if with_body else b"")
