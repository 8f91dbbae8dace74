"""The streams of one reader's connection, by the opaque that their messages carry."""

from __future__ import annotations

from .received_stream import Stream

__all__ = ["FIRST_STREAM_OPAQUE", "ReaderStreams"]

FIRST_STREAM_OPAQUE = 0x8000_0000
"""Below it are the opaques of questions."""
_LAST_OPAQUE = 0xFFFF_FFF0


class ReaderStreams:
    """What is requested or open, and what was given up and may still be heard of."""

    __slots__ = ("_next_opaque", "_opaque_of", "are_awaited", "are_unanswered", "by_opaque", "retired")

    def __init__(self) -> None:
        self.by_opaque: dict[int, Stream] = {}
        self.retired: set[int] = set()
        """Opaques of streams that were given up: what still comes for them is passed over."""
        self.are_awaited = False
        """None has brought a change yet."""
        self.are_unanswered = False
        """Nothing that came of them was taken yet, not even an answer."""
        self._opaque_of: dict[int, int] = {}
        self._next_opaque = FIRST_STREAM_OPAQUE

    def __contains__(self, vbucket: int) -> bool:
        return vbucket in self._opaque_of

    def opaque_of(self, vbucket: int) -> int | None:
        """The opaque of a vbucket's stream, if it has one."""
        return self._opaque_of.get(vbucket)

    def new_opaque(self) -> int:
        """One that nothing else has."""
        opaque = self._next_opaque
        self._next_opaque = opaque + 1 if opaque < _LAST_OPAQUE else FIRST_STREAM_OPAQUE
        return opaque

    def add(self, stream: Stream) -> int:
        """A stream that is being asked for; its opaque."""
        assert stream.vbucket not in self, "a stream is opened once at a time"
        opaque = self.new_opaque()
        stream.asked()
        self.by_opaque[opaque] = stream
        self._opaque_of[stream.vbucket] = opaque
        return opaque

    def retire(self, vbucket: int) -> int | None:
        """What still comes for a stream is passed over; its opaque, if there is one."""
        opaque = self._opaque_of.pop(vbucket, None)
        if opaque is not None:
            self.retired.add(opaque)
            self.by_opaque.pop(opaque).given_up()
        return opaque

    def finished(self, opaque: int) -> None:
        """An opaque means nothing any more."""
        self.retired.discard(opaque)
        stream = self.by_opaque.pop(opaque, None)
        if stream is not None:
            del self._opaque_of[stream.vbucket]
