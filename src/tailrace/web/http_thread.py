"""HTTP for a command that has no node of its own, served by a thread with a loop."""

from __future__ import annotations

import asyncio
import hmac
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..server.aio import listen
from ..server.http import (
    HttpAnswer,
    HttpContent,
    HttpRequest,
    HttpService,
    basic_login,
    http_error,
    is_address,
)
from .chart_samples import ChartSample, ChartSamples
from .figures import FigureSheet
from .http import Route, connection_handler, exposition, is_open, page_routes, routed

__all__ = ["HttpFigures", "HttpOptions", "HttpThread"]

_STOP_S = 5.0


@dataclass(frozen=True)
class HttpOptions:
    """Where to listen, and who may read."""

    port: int
    host: str = "127.0.0.1"
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class HttpFigures:
    """What a command shows; all functions are called on one thread, and may wait for the command."""

    page: str
    """Its name: ``mirror`` is ``mirror.html`` with ``mirror.js``."""
    stats: Callable[[], Any]
    metrics: Callable[[bool], FigureSheet]
    """Called with True for figures of every vbucket, too."""
    why_not_ready: Callable[[], str]
    """Empty if it is ready."""
    sample: Callable[[], ChartSample] = dict
    """What the charts of the page draw."""
    samples: ChartSamples = field(default_factory=ChartSamples)
    """Keeps the samples."""


class HttpThread:
    """Serves from ``with`` to the end of its block."""

    def __init__(self, options: HttpOptions, figures: HttpFigures) -> None:
        self._options = options
        self._users = dict(options.users)
        self._figures = figures
        self._sockets = listen(options.host, options.port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-http", daemon=True)
        self._worker = ThreadPoolExecutor(1, "tailrace-figures")
        self._routes: dict[str, Route] = {
            **page_routes(f"{figures.page}.html", f"{figures.page}.js"),
            "/api/stats": self._on_thread(lambda _request: HttpContent.of_json(figures.stats())),
            "/api/past": figures.samples.serve,
            "/metrics": self._on_thread(
                lambda request: exposition(
                    figures.metrics(request.query.get("vbuckets", "") not in ("", "0"))
                )
            ),
            "/healthz": lambda _request: HttpContent("text/plain", b"ok\n"),
            "/readyz": self._on_thread(self._ready),
        }

    def replace(self, users: Mapping[str, str], certificate: tuple[Path, Path] | None) -> None:
        """Let only these users in from now on, and use this certificate; called on any thread."""
        context = self._options.tls

        def act() -> None:
            self._users = dict(users)
            if context is not None and certificate is not None:
                context.load_cert_chain(*certificate)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(act)

    def _on_thread(self, answer: Callable[[HttpRequest], HttpContent]) -> Route:
        """A route that may take a while without holding up the loop; one thread, so one at a time."""

        def route(request: HttpRequest) -> Awaitable[HttpContent]:
            return asyncio.get_running_loop().run_in_executor(self._worker, answer, request)

        return route

    def __enter__(self) -> HttpThread:
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._is_started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        loop, users = self._loop, self._options.users
        assert loop is not None
        handle = connection_handler(
            HttpService(self._serve, self._login, is_open, lambda host: bool(users) or is_address(host))
        )
        servers = [
            loop.run_until_complete(
                asyncio.start_server(handle, sock=listener, limit=8 << 10, ssl=self._options.tls)
            )
            for listener in self._sockets
        ]
        sampling = loop.create_task(self._figures.samples.keep(self._sample))
        self._is_started.set()
        try:
            loop.run_forever()
            sampling.cancel()
            for server in servers:
                server.close()
            loop.run_until_complete(_cancel_the_rest())
        finally:
            loop.close()

    async def _sample(self) -> ChartSample:
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._figures.sample)

    def _login(self, authorization: str) -> str | None:
        users = self._users
        if not users:
            return ""

        def check(user: str, password: str) -> bool:
            wanted = users.get(user, "")
            return hmac.compare_digest(wanted.encode(), password.encode()) and bool(wanted)

        return basic_login(check, authorization)

    def _serve(self, request: HttpRequest) -> HttpAnswer:
        answer = routed(self._routes, request)
        if answer is not None:
            return answer
        return http_error(404, f"there is nothing here; try {' '.join(self._routes)}")

    def _ready(self, _request: HttpRequest) -> HttpContent:
        why_not = self._figures.why_not_ready()
        return HttpContent("text/plain", f"{why_not or 'ok'}\n".encode(), 503 if why_not else 200)


async def _cancel_the_rest() -> None:
    """Cancel the connections that are still being answered."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
