"""The streams of one reader's connection, by the opaque that their messages carry."""

from __future__ import annotations

from .reader_stream import ReaderStream

__all__ = ["FIRST_STREAM_OPAQUE", "ReaderStreams"]

FIRST_STREAM_OPAQUE = 0x8000_0000
"""Below it are the opaques of questions."""
_LAST_OPAQUE = 0xFFFF_FFF0


class ReaderStreams:
    """The streams that are requested or open, and those given up for which messages may still come."""

    __slots__ = ("_next_opaque", "_opaque_of", "are_awaited", "are_unanswered", "by_opaque", "retired")

    def __init__(self) -> None:
        self.by_opaque: dict[int, ReaderStream] = {}
        self.retired: set[int] = set()
        """Opaques of streams that were given up: what still comes for them is skipped."""
        self.are_awaited = False
        """Whether none has brought a change yet."""
        self.are_unanswered = False
        """Whether nothing that came for them has been taken yet, not even an answer."""
        self._opaque_of: dict[int, int] = {}
        self._next_opaque = FIRST_STREAM_OPAQUE

    def __contains__(self, vbucket: int) -> bool:
        return vbucket in self._opaque_of

    def opaque_of(self, vbucket: int) -> int | None:
        """The opaque of a vbucket's stream, if it has one."""
        return self._opaque_of.get(vbucket)

    def new_opaque(self) -> int:
        """An opaque that nothing else has."""
        opaque = self._next_opaque
        self._next_opaque = opaque + 1 if opaque < _LAST_OPAQUE else FIRST_STREAM_OPAQUE
        return opaque

    def add(self, stream: ReaderStream) -> int:
        """Add a stream that is being asked for; returns its opaque."""
        assert stream.vbucket not in self, "a stream is opened once at a time"
        opaque = self.new_opaque()
        stream.asked()
        self.by_opaque[opaque] = stream
        self._opaque_of[stream.vbucket] = opaque
        return opaque

    def retire(self, vbucket: int) -> int | None:
        """Skip what still comes for a stream; returns its opaque, if there is one."""
        opaque = self._opaque_of.pop(vbucket, None)
        if opaque is not None:
            self.retired.add(opaque)
            self.by_opaque.pop(opaque).given_up()
        return opaque

    def finished(self, opaque: int) -> None:
        """An opaque is no longer in use."""
        self.retired.discard(opaque)
        stream = self.by_opaque.pop(opaque, None)
        if stream is not None:
            del self._opaque_of[stream.vbucket]
