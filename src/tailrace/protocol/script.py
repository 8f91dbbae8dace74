"""Conversations: requests out, answers in, as a generator that reads from top to bottom.

A *script* yields a list of requests, which are sent together, and gets back their answers in the same order:

    hello, mechanisms = yield [Hello(...), SaslListMechs()]

It has no socket and no clock, so the handshake, the key-value client and the questions that a reader asks
alongside its streams are all scripts, run by whichever pump there is.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar

from ..errors import RemoteProtocolError, StatusError
from ..wire.codes import Op, Status
from ..wire.dialect import DCP
from ..wire.header import Frame
from ..wire.message import Direction, Message, Response

__all__ = ["MAX_STATS", "Script", "ScriptRunner", "ask", "expect"]

Result = TypeVar("Result")

Script = Generator[Sequence[Message], list[Any], Result]
"""Yields requests, gets `Response` objects (for STAT the list of all its answers), returns a result."""

MAX_STATS = 100_000
"""How many answers to one STAT we accept before we call it endless."""


def expect(response: Response, what: str) -> Response:
    """The response if it is a success, `StatusError` otherwise."""
    if response.status != Status.SUCCESS:
        raise StatusError(response.status, what, response.value)
    return response


def ask(request: Message, what: str) -> Script[Any]:
    """The script of one request that must succeed; returns its answer."""
    (response,) = yield [request]
    return expect(response, what)


class ScriptRunner(Generic[Result]):
    """Runs one script over one connection: `start`, then `receive` with every answer that it `expects`.

    ``first_opaque`` keeps its opaques apart from those of others on the connection: request ``i`` of each
    round has opaque ``first_opaque + i``.
    """

    def __init__(self, script: Script[Result], first_opaque: int = 0) -> None:
        self._script = script
        self._first_opaque = first_opaque
        self._requests: Sequence[Message] = ()
        self._answers: list[Any] = []
        self._missing = 0
        self.done = False
        self.result: Result | None = None

    def start(self) -> bytes:
        """The first requests."""
        return self._advance(None)

    @property
    def waits_for(self) -> str:
        """What has been asked and not answered yet, for people."""
        names = [
            request.name() for request, got in zip(self._requests, self._answers, strict=True) if got is None
        ]
        return ", ".join(dict.fromkeys(names))

    def expects(self, frame: Frame) -> bool:
        """Whether a response frame is an answer to this script."""
        index = frame.opaque - self._first_opaque
        return 0 <= index < len(self._requests)

    def receive(self, frame: Frame) -> bytes:
        """Take an answer; returns the next requests once all of the last ones are answered."""
        index = frame.opaque - self._first_opaque
        request = self._requests[index]
        if frame.is_request or frame.opcode != request.OPCODE:
            raise RemoteProtocolError(
                f"opcode 0x{frame.opcode:02x} is not an answer to {request.name()} (opaque {frame.opaque})"
            )
        answer = DCP.decode(frame, Direction.TO_RECEIVER)
        assert isinstance(answer, Response)
        if request.OPCODE == Op.STAT and answer.status == Status.SUCCESS:
            stats = self._answers[index] = self._answers[index] or []
            stats.append(answer)
            if len(stats) > MAX_STATS:
                raise RemoteProtocolError(f"the server sends more than {MAX_STATS} statistics")
            if answer.key:
                return b""
        elif self._answers[index] is not None:
            raise RemoteProtocolError(f"{request.name()} is answered twice")
        else:
            self._answers[index] = answer
        self._missing -= 1
        return b"" if self._missing else self._advance(self._answers)

    def _advance(self, answers: list[Any] | None) -> bytes:
        try:
            self._requests = next(self._script) if answers is None else self._script.send(answers)
        except StopIteration as stop:
            self._requests, self._answers = (), []
            self.done, self.result = True, stop.value
            return b""
        self._answers = [None] * len(self._requests)
        self._missing = len(self._requests)
        out = bytearray()
        for index, request in enumerate(self._requests):
            request.opaque = self._first_opaque + index
            out += request.encode()
        return bytes(out)
