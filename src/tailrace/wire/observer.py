"""Finds out the dialect and direction of frames that come without a connection.

On a connection both are known: `bind` names the dialect of the first request, and sides don't change. Bytes
from a file may begin anywhere, so every reading that the tables allow is tried: one that decodes beats one
that doesn't, and of the rest the likeliest is taken, with a note if the same bytes are a message of another
dialect too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import FramingError, MalformedMessage
from .codes import Magic, Op, Status, UprAOpcode
from .describe import Description, describe
from .dialect import DCP, KV, TAP, UPR_A, UPR_B, Dialect, Role, bind
from .drawn_packets import mend, tolerated
from .header import HEADER_SIZE, MAX_FRAME, Frame, frame_size
from .message import Direction, Response, Unknown

__all__ = ["Observer", "Tape", "frame_start", "is_whole", "read"]

_ORDER = (KV, DCP, UPR_B, TAP, UPR_A)
"""Which dialect is taken first if the bytes leave a choice."""

_SERVER_DIRECTIONS = {
    int(Magic.SERVER_REQUEST): Direction.TO_RECEIVER,
    int(Magic.SERVER_RESPONSE): Direction.TO_PRODUCER,
}

_COMMON_ANSWERS = frozenset(
    {
        Status.SUCCESS,
        Status.KEY_ENOENT,
        Status.KEY_EEXISTS,
        Status.E2BIG,
        Status.EINVAL,
        Status.NOT_STORED,
        Status.DELTA_BADVAL,
        Status.NOT_MY_VBUCKET,
        Status.NO_BUCKET,
        Status.LOCKED,
        Status.AUTH_ERROR,
        Status.EACCESS,
        Status.UNKNOWN_COMMAND,
        Status.ENOMEM,
        Status.NOT_SUPPORTED,
        Status.EINTERNAL,
        Status.EBUSY,
        Status.ETMPFAIL,
        Status.UNKNOWN_COLLECTION,
    }
)
"""The usual answers to a write; draft A has vbucket ids in their place."""


class Observer:
    """Names the frames of one conversation, in the order in which they were sent.

    A given ``dialect`` or ``direction`` is taken as certain; what is not given is found out. The dialect that
    the first request binds, or that alone has one of the messages, is preferred from then on.
    """

    def __init__(self, dialect: Dialect | None = None, direction: Direction | None = None) -> None:
        self.dialect = dialect
        self._direction = direction
        self._bound: Dialect | None = None
        self._server_is_replica = False

    def see(self, frame: Frame, *, from_client: bool | None = None, offset: int = 0) -> Description:
        """Name the next frame; ``from_client`` says which side sent it, if that is known."""
        readings = self._readings(frame, from_client)
        best = readings[0]
        best.offset = offset
        rest = dict.fromkeys(
            f"{other.name} ({other.table})"
            for other in readings[1:]
            if other.message is not None and self._rank(other) == self._rank(best) and other.name != best.name
        )
        if rest and best.message is not None:
            best.notes.append(
                f"ambiguous: the same bytes are {' and '.join(rest)}, say which --dialect it is"
            )
        if best.message is not None:
            best.notes += tolerated(frame, best.dialect, best.direction)
            if not rest and self._is_proof(best):
                self._bound = best.dialect
        return best

    def _is_proof(self, description: Description) -> bool:
        """Whether a message that no other dialect has settles the dialect of the conversation.

        One without extras does not: a write's answer with an odd status looks like a draft A message.
        """
        return (
            self._bound is None
            and description.table != KV.name
            and description.frame.extras_length > 0
            and not issubclass(description.kind, Response)
        )

    def _readings(self, frame: Frame, from_client: bool | None) -> list[Description]:
        """All readings of a frame, the best one first."""
        if bound := self._bind(frame, from_client):
            return [bound]
        directions = self._directions(frame, from_client)
        readings = self._readings_in(frame, directions)
        if readings[0].kind is Unknown and self._direction is None and len(directions) == 1:
            # the sender is known, but not whether the client opened the server as a replica
            others = self._readings_in(frame, (directions[0].opposite,))
            if others[0].message is not None and others[0].kind is not Unknown:
                others[0].notes.append("it goes in the unusual direction")
                return others
        return readings

    def _readings_in(self, frame: Frame, directions: tuple[Direction, ...]) -> list[Description]:
        preferred = self.dialect or self._bound
        if preferred is not None:
            known = self._try((preferred,), frame, directions)
            if self.dialect or known[0].message is not None:
                return known
        readings = self._try(_ORDER, frame, directions)
        if preferred is not None and readings[0].message is not None:
            readings[0].notes.append(f"not {preferred.name}, which the bytes before it are")
            return readings[:1]
        return readings

    def _try(
        self, dialects: tuple[Dialect, ...], frame: Frame, directions: tuple[Direction, ...]
    ) -> list[Description]:
        readings = [describe(frame, dialect, direction) for dialect in dialects for direction in directions]
        return sorted(readings, key=self._rank, reverse=True)  # stable: `_ORDER` decides between equals

    def _rank(self, description: Description) -> tuple[int, int, bool]:
        """How good a reading is: known at all, well-formed, likely, and of the dialect that is known."""
        known = self.dialect or self._bound
        return *_rank(description), known is not None and description.table == known.name

    def _directions(self, frame: Frame, from_client: bool | None) -> tuple[Direction, ...]:
        """The directions that are possible, the likelier one first."""
        if self._direction is not None:
            return (self._direction,)
        if frame.magic in _SERVER_DIRECTIONS:
            return (_SERVER_DIRECTIONS[frame.magic],)
        if from_client is None:
            first = Direction.TO_PRODUCER if frame.is_request else Direction.TO_RECEIVER
            return first, first.opposite
        usual = Direction.TO_PRODUCER if from_client else Direction.TO_RECEIVER
        # a client may open the server as a replica and push to it; other commands go the usual way
        return (usual.opposite, usual) if self._server_is_replica else (usual,)

    def _bind(self, frame: Frame, from_client: bool | None) -> Description | None:
        """The frame as the first request of a dialect, which the client sends; None if it is not one."""
        if self.dialect is not None or self._bound is not None or from_client is False:
            return None
        try:
            bound = bind(frame)
        except MalformedMessage:
            return None
        if bound is None:
            return None
        dialect, role = bound
        pushes = dialect is TAP and role is Role.REPLICA
        direction = Direction.TO_RECEIVER if pushes else Direction.TO_PRODUCER
        description = describe(frame, dialect, direction)
        if self._direction not in (None, direction) or description.message is None:
            return None
        self._bound = dialect
        self._server_is_replica = role is Role.REPLICA
        return description


def _rank(description: Description) -> tuple[int, int]:
    """How good a reading is: known at all, well-formed, likely."""
    if description.kind is Unknown:
        return 0, 0
    return (2 if description.message is not None else 1), int(_is_likely(description))


def _is_likely(description: Description) -> bool:
    """Whether a well-formed reading is also one that somebody would send."""
    frame, kind = description.frame, description.kind
    if kind in UPR_A.messages:
        if frame.cas and not frame.key_length:
            return False  # only documents have a CAS there
        return frame.magic == Magic.RESPONSE or description.direction is Direction.TO_PRODUCER
    if not issubclass(kind, Response) or not description.has_status:
        return True
    if frame.status == Status.ROLLBACK:
        return hasattr(kind, "rollback_seqno")
    if frame.status != Status.SUCCESS and (frame.extras_length or frame.key_length):
        return False  # an error has nothing but a text
    if description.table == KV.name and UprAOpcode.RESPONSE <= frame.opcode <= UprAOpcode.STREAM_END:
        return _answers_a_write(frame)
    return True


def _answers_a_write(frame: Frame) -> bool:
    """Whether a response with an opcode of draft A answers an ADD, REPLACE, DELETE or INCREMENT."""
    if frame.status not in _COMMON_ANSWERS or (frame.datatype and not frame.body):
        return False
    if frame.status == Status.SUCCESS:
        return bool(frame.cas)
    return frame.opcode != Op.INCREMENT or not frame.datatype or bool(frame.body)


# whole buffers


def read(
    data: bytes, observer: Observer, *, from_client: bool | None = None, limit: int = MAX_FRAME
) -> Iterator[Description]:
    """The frames in a buffer; a `FramingError` after the last one reports bytes that are not a frame.

    A packet at the end that is one of the documents' own drawings is read as meant, see `drawn_packets`.
    """
    at = last = 0
    pending: Description | None = None
    while at < len(data):
        problem = _problem(data, at, limit)
        if problem is None:
            if pending is not None:
                yield pending
            size = frame_size(data, at, limit)
            pending = observer.see(Frame.parse(data, at), from_client=from_client, offset=at)
            last, at = at, at + size
            continue
        # the rest may be a drawing, or together with the frame before it
        for start, before in ((last, None), (at, pending)) if pending else ((at, None),):
            mended = mend(data[start:], observer.dialect)
            if mended is not None:
                if before is not None:
                    yield before
                yield describe(mended.frame, mended.dialect, mended.direction, mended.notes, offset=start)
                return
        if pending is not None:
            yield pending
        raise FramingError(problem)
    if pending is not None:
        yield pending


def is_whole(data: bytes) -> bool:
    """Whether a buffer consists of whole frames or is one of the documents' own drawings."""
    at = 0
    while at < len(data) and _problem(data, at, MAX_FRAME) is None:
        at += frame_size(data, at)
    return at == len(data) or mend(data) is not None


class Tape:
    """One direction of a recorded conversation: its bytes come in pieces, and some may be missing.

    After a gap, or if the recording begins in the middle, the next frame is searched for; it gets a note
    about what was skipped.
    """

    def __init__(self, observer: Observer, *, from_client: bool | None, from_start: bool) -> None:
        self._observer = observer
        self._from_client = from_client
        self._buffer = bytearray()
        self._from_start = from_start
        self._in_step = from_start
        self._search_at = HEADER_SIZE
        self._skipped = 0
        self._offset = 0
        self.frames = 0
        """How many frames have been read."""
        self.problems: list[str] = []
        """What was wrong with bytes that are not a frame; only the first few cases."""

    @property
    def buffered(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Description]:
        """The frames that these bytes complete."""
        self._buffer += data
        while self._in_step or self._find_step():
            if len(self._buffer) < HEADER_SIZE:
                return
            try:
                size = frame_size(self._buffer)
            except FramingError as error:
                self._complain(f"no frame at offset {self._offset}: {error}")
                # a stream that doesn't even begin with a frame is not one of ours
                self._lose_step(1 if self.frames or not self._from_start else len(self._buffer))
                continue
            if len(self._buffer) < size:
                return
            yield self._take(size)

    def gap(self, size: int) -> None:
        """Skip bytes that were not recorded; the frame that they belong to is lost."""
        self._complain(f"{size} bytes behind offset {self._offset + len(self._buffer)} were not recorded")
        self._offset += size
        self._lose_step(len(self._buffer))

    def finish(self) -> Iterator[Description]:
        """End the recording; what is left is not a whole frame."""
        if not self._in_step:
            self._search_at = 0
            yield from self.feed(b"")
        if self._buffer:
            self._complain(f"the last {len(self._buffer)} bytes are not a whole frame")

    def _take(self, size: int) -> Description:
        description = self._observer.see(
            Frame.parse(self._buffer), from_client=self._from_client, offset=self._offset
        )
        if self._skipped:
            description.notes.append(
                f"{self._skipped} bytes before it were passed over, no frame begins there"
            )
            self._skipped = 0
        self._drop(size)
        self.frames += 1
        return description

    def _find_step(self) -> bool:
        """Search for the next frame, but not at every call, to take linear time in all."""
        if len(self._buffer) < self._search_at:
            return False
        start = frame_start(bytes(self._buffer))
        if start is None:
            self._search_at = 2 * len(self._buffer) + HEADER_SIZE
            excess = len(self._buffer) - _SEARCHED
            if excess > 0:
                self._skipped += excess
                self._drop(excess)
                self._search_at = 2 * _SEARCHED
            return False
        self._skipped += start
        self._drop(start)
        self._in_step = True
        return True

    def _complain(self, what: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(what)

    def _lose_step(self, dropped: int) -> None:
        self._skipped += dropped
        self._drop(dropped)
        self._in_step = False
        self._search_at = HEADER_SIZE

    def _drop(self, size: int) -> None:
        del self._buffer[:size]
        self._offset += size


_MAX_PROBLEMS = 5
_SEARCHED = 1 << 20
"""How many bytes are kept while no frame is found in them."""


def frame_start(data: bytes, at: int = 0, *, limit: int = MAX_FRAME) -> int | None:
    """Where the next frame begins in bytes that may start inside one; None if none is found.

    A place counts if three frames in a row start there, or fewer that end where the bytes end.
    """
    for candidate in _MAGIC_BYTES.finditer(data, at):
        start = candidate.start()
        end, frames = start, 0
        while frames < 3 and len(data) - end >= HEADER_SIZE:
            try:
                end += frame_size(data, end, limit)
            except FramingError:
                break
            if end > len(data):
                break
            frames += 1
        if frames == 3 or (frames and end == len(data)):
            return start
    return None


_MAGIC_BYTES = re.compile(b"[" + b"".join(re.escape(bytes([magic])) for magic in Magic) + b"]")


def _problem(data: bytes, at: int, limit: int) -> str | None:
    """Why no frame starts at a place, or None if one does."""
    there = len(data) - at
    try:
        # a header that is cut off is judged by its first byte alone
        size = (
            frame_size(data, at, limit) if there >= HEADER_SIZE else frame_size(_padded(data, at), 0, limit)
        )
    except FramingError as error:
        return f"{there} bytes at offset {at} are not a frame: {error}"
    if there < HEADER_SIZE:
        return f"{there} bytes at offset {at} are the start of a header, {HEADER_SIZE - there} are missing"
    if size > there:
        return f"the frame at offset {at} needs {size} bytes, {size - there} are missing"
    return None


def _padded(data: bytes, at: int) -> bytes:
    return data[at : at + 1] + bytes(HEADER_SIZE - 1)
