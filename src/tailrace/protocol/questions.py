"""Questions that a client asks over a connection alongside its streams: scripts, several at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..errors import ConnectError, RemoteProtocolError
from ..wire.header import Frame
from .script import Script, ScriptRunner

__all__ = ["ANSWER_S", "NO_SCRIPT_OPAQUE", "Patience", "Questions"]

ANSWER_S = 30.0
"""How long a server that is alive may take to answer a question."""

T = TypeVar("T")

_SCRIPT_OPAQUES = 0x1_0000
_MAX_SCRIPTS = 0x7F00
NO_SCRIPT_OPAQUE = _SCRIPT_OPAQUES - 1
"""For a request that is not answered: no script's opaques get that far."""


class Patience:
    """How long we wait for servers.

    Time while the application has a portion does not count: the answer may come after what it has not taken
    yet, and an application that computes may block the event loop.
    """

    __slots__ = ("_handed_over_at", "held_up_s")

    def __init__(self) -> None:
        self.held_up_s = 0.0
        self._handed_over_at: float | None = None

    @property
    def is_with_application(self) -> bool:
        """Whether the application has a portion now."""
        return self._handed_over_at is not None

    def handed_over(self, now: float) -> None:
        """The application got a portion."""
        self._handed_over_at = now

    def passed(self, now: float) -> None:
        """Count the time up to now."""
        if self._handed_over_at is not None:
            self.held_up_s += now - self._handed_over_at
            self._handed_over_at = now

    def came_back(self, now: float) -> None:
        """The application wants the next portion."""
        self.passed(now)
        self._handed_over_at = None

    def waited(self, now: float) -> float:
        """The time by a clock that stands still while the application has a portion."""
        self.passed(now)
        return now - self.held_up_s


class _Question(NamedTuple):
    """A script whose answers are still coming."""

    runner: ScriptRunner[Any]
    then: Callable[[Any], None]
    asked_at: float
    """By the clock of our patience."""


class Questions:
    """The scripts of one connection. Each has its own opaques, all below those of streams."""

    __slots__ = ("_next", "_patience", "_running", "_send")

    def __init__(self, send: Callable[[bytes], None], patience: Patience) -> None:
        self._send = send
        self._patience = patience
        self._running: dict[int, _Question] = {}
        self._next = 0

    def ask(self, script: Script[T], then: Callable[[T], None], now: float | None) -> None:
        """Run a script; ``then`` gets its result. Without a time its answer is never overdue."""
        if len(self._running) >= _MAX_SCRIPTS:
            raise RemoteProtocolError(f"{len(self._running)} questions are not answered")
        number = self._next
        while number in self._running:
            number = (number + 1) % _MAX_SCRIPTS
        self._next = (number + 1) % _MAX_SCRIPTS
        runner = ScriptRunner(script, number * _SCRIPT_OPAQUES)
        asked_at = math.inf if now is None else self._patience.waited(now)
        self._running[number] = _Question(runner, then, asked_at)
        self._send(runner.start())
        self._finish(number)

    def answered(self, frame: Frame) -> None:
        """An answer came."""
        number = frame.opaque // _SCRIPT_OPAQUES
        question = self._running.get(number)
        if question is None or not question.runner.expects(frame):
            raise RemoteProtocolError(f"an answer with opaque {frame.opaque}, which no request has")
        self._send(question.runner.receive(frame))
        self._finish(number)

    def _finish(self, number: int) -> None:
        question = self._running[number]
        if question.runner.done:
            del self._running[number]
            question.then(question.runner.result)

    def due(self) -> list[float]:
        """When each question is overdue; none are while the application holds us up."""
        patience = self._patience
        if patience.is_with_application:
            return []
        return [question.asked_at + ANSWER_S + patience.held_up_s for question in self._running.values()]

    def check(self, now: float) -> None:
        """Raise `ConnectError` if a question has not been answered for too long."""
        waited = self._patience.waited(now)
        for question in self._running.values():
            waited_s = waited - question.asked_at
            if waited_s >= ANSWER_S:
                raise ConnectError(f"{question.runner.waits_for} is not answered for {waited_s:.0f} s")

    @property
    def waits_for(self) -> str:
        """What is not answered yet, for people; empty if nothing."""
        return ", ".join(question.runner.waits_for for question in self._running.values())
