"""What a node answers on its HTTP port: the page, and the management paths, too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..server import stats
from ..server.http import HttpAnswer, HttpContent, HttpRequest, HttpService, http_error
from ..server.management import is_host_of, login_of, serve_management
from .chart_samples import ChartSample, ChartSamples
from .faults import PREFIX as FAULTS
from .faults import FaultKit
from .http import Route, exposition, is_open, json_in_steps, page_routes, routed, stepwise
from .node_figures import gather_node_figures
from .node_view import gather_node_sample, gather_node_view, vbucket_view

if TYPE_CHECKING:
    from ..server.aio import Server
    from ..server.node import Node

__all__ = ["keep_samples", "node_service"]


async def keep_samples(node: Node, samples: ChartSamples) -> None:
    """Take samples of a node for its page until this is cancelled."""

    async def sample() -> ChartSample:
        return await stepwise(gather_node_sample(node))

    await samples.keep(sample)


def node_service(
    node: Node,
    server: Server | None = None,
    faults: FaultKit | None = None,
    samples: ChartSamples | None = None,
) -> HttpService:
    """The service of a node on its HTTP port, including the fault kit if there is one. ``samples`` is the one
    that `keep_samples` fills.
    """
    answers = _NodeAnswers(node, server, faults, ChartSamples(node.clock) if samples is None else samples)

    def needs_no_login(path: str) -> bool:
        return is_open(path) or (faults is not None and _is_fault(path))  # the kit checks its own token

    return HttpService(answers.serve, answers.login, needs_no_login, lambda host: is_host_of(node, host))


def _is_fault(path: str) -> bool:
    return path == FAULTS or path.startswith(f"{FAULTS}/")


class _NodeAnswers:
    """Answers requests by path."""

    def __init__(
        self, node: Node, server: Server | None, faults: FaultKit | None, samples: ChartSamples
    ) -> None:
        self._faults = faults
        self._node = node
        self._server = server
        self._routes: dict[str, Route] = {
            **page_routes("dashboard.html", "node.js"),
            "/api/view": self._view,
            "/api/vbucket": self._vbucket,
            "/api/past": samples.serve,
            "/api/stats": lambda _request: json_in_steps(stats.snapshot(node)),
            "/api/events": lambda _request: HttpContent.of_json({"events": list(node.events.recent)}),
            "/metrics": self._metrics,
            "/healthz": lambda _request: HttpContent("text/plain", b"ok\n"),
            "/readyz": self._ready,
        }

    def login(self, authorization: str) -> str | None:
        user = login_of(self._node, authorization)
        if user is None and authorization:
            self._node.counters.auth_errors += 1
            self._node.events.record("login_refused", peer="http")
        return user

    def serve(self, request: HttpRequest) -> HttpAnswer:
        if _is_fault(request.path):
            if self._faults is None:
                return http_error(404, "the fault kit is off: start the node with --fault-token TOKEN")
            return self._faults.serve(request)
        answer = routed(self._routes, request)
        if answer is None:
            hint = f"there is nothing here; try {' '.join(self._routes)}"
            answer = serve_management(self._node, request) or http_error(404, hint)
        return answer

    def _ready(self, _request: HttpRequest) -> HttpContent:
        if self._node.fenced:
            return HttpContent("text/plain", b"the node waits for its cluster map\n", 503)
        return HttpContent("text/plain", b"ok\n")

    def _view(self, _request: HttpRequest) -> HttpAnswer:
        server = self._server
        full = () if server is None else {connection.peer for connection in server.unread.bytes_of}
        return json_in_steps(gather_node_view(self._node, has_faults=self._faults is not None, full=full))

    def _vbucket(self, request: HttpRequest) -> HttpContent:
        bucket = self._node.buckets.get(request.query.get("bucket", ""))
        number = request.query.get("vbucket", "")
        if bucket is None:
            return http_error(404, "there is no such bucket")
        is_number = number.isascii() and number.isdigit() and len(number) < 6
        view = vbucket_view(bucket, int(number)) if is_number else None
        return http_error(404, "there is no such vbucket here") if view is None else HttpContent.of_json(view)

    async def _metrics(self, request: HttpRequest) -> HttpContent:
        server = self._server
        unread = (0, 0) if server is None else (server.unread.total, server.unprocessed.total)
        wanted = request.query.get("vbuckets", "") not in ("", "0")
        sheet = await stepwise(gather_node_figures(self._node, unread, vbuckets=wanted))
        return await asyncio.to_thread(exposition, sheet)  # 3,000 lines take a while
