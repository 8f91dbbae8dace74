"""The dashboard at ``/`` and the JSON API: ``GET /api/stats`` is the snapshot of `stats` as one object.

The management paths (`server.management`) are here too. One request a connection. The page is one file
without anything from elsewhere.

Errors have one shape, ``{"error": TEXT}``. Where users are configured it wants one of them (Basic).
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import Callable, Coroutine
from typing import Any

from ..server import stats
from ..server.management import (
    HttpContent,
    HttpRequest,
    HttpRequestBuffer,
    respond_to,
    serve_management,
)
from ..server.node import Node

__all__ = ["respond", "serve_http"]

_TIMEOUT_S = 10.0
_READ_BYTES = 64 << 10


def _dashboard(_node: Node) -> HttpContent:
    page = importlib.resources.files(__package__).joinpath("dashboard.html")
    return HttpContent("text/html; charset=utf-8", page.read_bytes())


ROUTES: dict[str, Callable[[Node], HttpContent]] = {
    "/": _dashboard,
    "/api/stats": lambda node: HttpContent.of_json(stats.snapshot(node)),
}


def _serve(node: Node, request: HttpRequest) -> HttpContent | None:
    route = ROUTES.get(request.path)
    if route is None:
        content = serve_management(node, request)
        hint = f"there is nothing here; try {' '.join(ROUTES)}"
        return content or HttpContent.of_json({"error": hint}, 404)
    if request.method != "GET":
        return HttpContent.of_json({"error": "only GET"}, 405)
    return route(node)


def serve_http(
    node: Node,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    """What `asyncio.start_server` calls for each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = HttpRequestBuffer()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not request.add(data := await reader.read(_READ_BYTES)):
                    if not data:
                        return  # it is gone
                writer.write(request.answer(node, _serve))
                await writer.drain()
        except (TimeoutError, OSError):
            pass  # a peer that is too slow or gone gets nothing
        finally:
            writer.close()

    return handle


def respond(node: Node, head: bytes, body: bytes = b"") -> bytes:
    """The whole response to a request."""
    return respond_to(node, head, body, _serve)
