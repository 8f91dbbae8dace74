"""What is served over HTTP, the same for a node, a reader and a mirror:

    /           the page                      /api/stats   its figures as one JSON object
    /metrics    for Prometheus                /healthz     200 while the process answers
    /readyz     200 if it does its work, 503 and why if not
    /api/past   what the charts of the page draw, for an hour

One request per connection. Errors have one shape, ``{"error": TEXT}``. If users are configured, all but
``/healthz`` and ``/readyz`` need a login (Basic). The page loads nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from ..clock import SYSTEM
from ..server.http import (
    LAST_CHUNK,
    STREAM_POLL_S,
    STREAM_UNREAD_BYTES,
    HttpAnswer,
    HttpContent,
    HttpRequest,
    HttpRequestBuffer,
    HttpService,
    HttpStream,
    HttpStreaming,
    http_error,
    response,
    stream_head,
)
from .figures import FigureSheet

__all__ = [
    "HandleConnection",
    "Route",
    "connection_handler",
    "exposition",
    "is_open",
    "json_in_steps",
    "json_pieces",
    "page_routes",
    "routed",
    "stepwise",
]

_TIMEOUT_S = 30.0
_READ_BYTES = 64 << 10
_MAX_CONNECTIONS = 200
_TURN_S = 0.002
"""How long a step of an answer may hold up the loop of a node."""

HandleConnection: TypeAlias = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]
]
T = TypeVar("T")
Route: TypeAlias = Callable[[HttpRequest], HttpAnswer]

_OPEN = frozenset({"/healthz", "/readyz"})


def is_open(path: str) -> bool:
    """Whether a path needs no login: process supervisors have none, and these paths reveal little."""
    return path in _OPEN


def connection_handler(service: HttpService) -> HandleConnection:
    """What `asyncio.start_server` calls for each connection."""

    connections: dict[asyncio.Task[None], None] = {}  # in the order in which they came

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= _MAX_CONNECTIONS:
            next(iter(connections)).cancel()  # the oldest: silent peers must not keep others out
        task = asyncio.current_task()
        assert task is not None
        connections[task] = None
        buffer = HttpRequestBuffer()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while not buffer.add(data := await reader.read(_READ_BYTES)):
                    if not data:
                        return  # it is gone
                request = buffer.understood(service)
                if request is None:
                    return
                stream = await _respond(request, service, writer)
            if stream is not None:
                await _stream(stream, reader, writer)
        except (TimeoutError, OSError):
            pass  # a peer that is too slow or gone gets nothing
        finally:
            del connections[task]
            writer.close()

    return handle


async def _respond(
    request: HttpRequest | HttpContent, service: HttpService, writer: asyncio.StreamWriter
) -> HttpStream | None:
    """Write the response, or for a stream its head; the stream that follows, if any."""
    stream = None
    if isinstance(request, HttpContent):
        writer.write(response(request))
    elif isinstance(answer := service.serve(request), HttpStream):
        writer.write(stream_head())
        stream = answer if request.with_body else None
    else:
        content = await answer if isinstance(answer, Awaitable) else answer
        writer.write(response(content, with_body=request.with_body))
    await writer.drain()
    return stream


async def _stream(stream: HttpStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write an endless answer while the peer takes it."""
    streaming, transport = HttpStreaming(stream), writer.transport
    while (part := streaming.next_part(SYSTEM.monotonic())) is not None:
        is_behind = transport.get_write_buffer_size() > STREAM_UNREAD_BYTES
        if transport.is_closing() or reader.at_eof() or is_behind:
            return
        writer.write(part)
        await asyncio.sleep(STREAM_POLL_S)
    writer.write(LAST_CHUNK)


def routed(routes: Mapping[str, Route], request: HttpRequest) -> HttpAnswer:
    """The answer to a request for one of the routes, which take only GET; None for other paths."""
    route = routes.get(request.path)
    if route is None:
        return None
    return route(request) if request.method == "GET" else http_error(405, "only GET")


_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def page(name: str) -> HttpContent:
    """A page of the package, or a part of one."""
    place = importlib.resources.files(__package__).joinpath(name)
    try:
        content = place.read_bytes()
    except FileNotFoundError:  # see hatch_build.py
        return http_error(404, "this source tree has no chart library: pip install -e . puts it there")
    return HttpContent(f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8", content)


_CHARTS = ("vendor/uPlot.iife.js", "vendor/uPlot.min.css")


def page_routes(name: str, script: str) -> dict[str, Route]:
    """The routes of a page at ``/`` and all its files."""
    parts = {"/": name, **{f"/{part}": part for part in ("page.css", "page.js", script, *_CHARTS)}}
    return {path: lambda _request, part=part: page(part) for path, part in parts.items()}  # type: ignore[misc]


# for Prometheus


_process = CollectorRegistry()
ProcessCollector(registry=_process)


def exposition_text(sheet: FigureSheet) -> bytes:
    """Figures as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(sheet)
    return generate_latest(registry)


def exposition(sheet: FigureSheet) -> HttpContent:
    """The answer with figures, and with those of the process."""
    return HttpContent(CONTENT_TYPE_PLAIN_0_0_4, exposition_text(sheet) + generate_latest(_process))


def json_pieces(value: Any, depth: int) -> Iterator[str]:
    """A value as JSON, in pieces that each take little time: down to this depth members come one by one. The
    encoder of the standard library would make the whole text in one call, while nothing else runs.
    """
    if depth and isinstance(value, dict) and value:
        for at, (name, member) in enumerate(value.items()):
            yield f"{'{' if at == 0 else ', '}{json.dumps(name)}: "
            yield from json_pieces(member, depth - 1)
        yield "}"
    elif depth and isinstance(value, list) and value:
        for at, member in enumerate(value):
            yield "[" if at == 0 else ", "
            yield from json_pieces(member, depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


_DEPTH = 4


async def json_in_steps(steps: Iterator[Any]) -> HttpContent:
    """The JSON of an object that may be large: others get turns while it is gathered and encoded."""
    whole = await stepwise(steps)
    pieces: list[str] = []

    def write() -> Iterator[None]:
        for piece in json_pieces(whole, _DEPTH):
            pieces.append(piece)
            yield

    await stepwise(write())
    return HttpContent("application/json", "".join([*pieces, "\n"]).encode())


async def stepwise(steps: Iterator[T]) -> T:
    """The result of the last step; the loop gets a turn whenever the steps have taken some time."""
    whole = next(steps)
    ends = SYSTEM.monotonic() + _TURN_S
    for sheet in steps:
        whole = sheet
        if SYSTEM.monotonic() >= ends:
            await asyncio.sleep(0)
            ends = SYSTEM.monotonic() + _TURN_S
    return whole
