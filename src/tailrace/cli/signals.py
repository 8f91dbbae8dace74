"""Signals: what stops a command, and what makes it read users and certificates again.

A command reads them again on SIGHUP if they come from files; otherwise the signal keeps its usual effect.
Windows has neither SIGHUP nor signal handlers of an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

__all__ = ["HANGUP", "STOPS", "on_hangup", "on_signal", "run_loop"]

T = TypeVar("T")

STOPS = (signal.SIGINT, signal.SIGTERM)
HANGUP: int | None = getattr(signal, "SIGHUP", None)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with a loop that can wait for plain sockets: on Windows that is not the usual one."""
    factory = asyncio.SelectorEventLoop if sys.platform == "win32" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


@contextlib.contextmanager
def on_signal(loop: asyncio.AbstractEventLoop, number: int, act: Callable[[], None]) -> Iterator[None]:
    """While the block runs, ``act`` is called on the loop when the signal comes."""
    try:
        loop.add_signal_handler(number, act)
    except NotImplementedError:  # Windows
        before = signal.signal(number, lambda _number, _frame: loop.call_soon_threadsafe(act))
        try:
            yield
        finally:
            signal.signal(number, before)
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


@contextlib.contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """While the block runs, ``act`` is called on SIGHUP; no effect without SIGHUP or off the main thread."""
    if HANGUP is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(HANGUP, lambda _number, _frame: act())
    try:
        yield
    finally:
        signal.signal(HANGUP, before)
