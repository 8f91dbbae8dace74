"""Both pumps under one interface, so every test of the reader runs on both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace

PATIENCE_S = 60.0


class AsyncAsSync:
    """The asyncio source, driven from a test that is not asynchronous; waits end with an error."""

    def __init__(self, where: str, **options: Any) -> None:
        self._source = tailrace.connect(where, **options)
        self._loop = asyncio.new_event_loop()

    def _run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await work

        return self._loop.run_until_complete(bounded())

    def __enter__(self) -> AsyncAsSync:
        try:
            self._run(self._source.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._source.close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _iterate(self, generator: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._run(generator.__anext__())
                except StopAsyncIteration:
                    return
        finally:
            # Garbage is collected at any moment; while a loop runs, ours can only close the reading later.
            if not self._loop.is_closed() and not in_a_loop():
                self._run(generator.aclose())

    def idle(self, seconds: float) -> None:
        """The application does something else for a while, but lets the loop run."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._source, name)
        if name in ("changes", "batches", "portions"):
            return lambda *args, **kwargs: self._iterate(attribute(*args, **kwargs))
        if asyncio.iscoroutinefunction(attribute):
            return lambda *args, **kwargs: self._run(attribute(*args, **kwargs))
        return attribute


def in_a_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Blocking:
    """The blocking source, whose waits also end."""

    def __init__(self, where: str, **options: Any) -> None:
        self._source = tailrace.connect_sync(where, **options)
        wait = self._source._await

        def bounded(work: Any) -> Any:
            async def limited() -> Any:
                async with asyncio.timeout(PATIENCE_S):
                    return await work

            return wait(limited())

        self._source._await = bounded  # type: ignore[method-assign]

    def __enter__(self) -> Any:
        self._source.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def idle(self, seconds: float) -> None:
        import time

        time.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


@pytest.fixture(params=[AsyncAsSync, Blocking], ids=["asyncio", "blocking"])
def connect(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make a source of either kind; all are closed at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda where, **options: stack.enter_context(request.param(where, **options))
