"""Recordings: the bytes of a reader's connections, unchanged, in a file.

    TAILRACE RECORDING 1\\n
    {"bucket": …, "vbuckets": …, "collections": …}\\n
    pieces: u64 nanoseconds since the start, u16 connection, u8 1 if we sent it, u32 length, whole frames

A recording keeps a stream as it was on the wire, for bug reports and benchmarks. `Recording` takes it apart
again: for every stream request, its answer and all that followed, byte for byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .. import paths
from ..clock import SYSTEM, Clock
from ..errors import MalformedMessage, ProtocolError, StoreError, UsageError, reason_of
from ..wire import dcp
from ..wire.codes import DcpOpcode, Magic, Status
from ..wire.framing import Framer
from ..wire.header import Frame
from ..wire.message import Message

__all__ = ["Exchange", "Recorder", "Recording", "seqno_of"]

MAGIC = b"TAILRACE RECORDING 1\n"
_PIECE = struct.Struct(">QHBI")
_MAX_HEADER = 16 << 20
_MAX_PIECE = 64 << 20
_RESPONSES = (Magic.RESPONSE, Magic.FLEX_RESPONSE)
_WITH_SEQNO = frozenset(
    {
        DcpOpcode.MUTATION,
        DcpOpcode.DELETION,
        DcpOpcode.EXPIRATION,
        DcpOpcode.SYSTEM_EVENT,
        DcpOpcode.SEQNO_ADVANCED,
    }
)


# the seqno comes first in the extras of all of them
_unpack_seqno = dcp.MUTATION.until("rev_seqno").struct.unpack_from
_SEQNO_SIZE = 8
_CHECKED: dict[int, type[Message]] = {
    DcpOpcode.SNAPSHOT_MARKER: dcp.DcpSnapshotMarker,
    DcpOpcode.STREAM_END: dcp.DcpStreamEnd,
}


def seqno_of(frame: Frame) -> int | None:
    """The seqno of a change, system event or seqno advanced; None for every other frame."""
    if not frame.is_request or frame.opcode not in _WITH_SEQNO:
        return None
    (seqno,) = _unpack_seqno(frame.extras)
    return int(seqno)


class Recorder:
    """Writes a recording to anything that has ``write``; pass it to a source as ``on_wire``."""

    def __init__(self, sink: Any, clock: Clock = SYSTEM) -> None:
        self.bytes = 0
        self._sink = sink
        self._clock = clock
        self._begin = clock.monotonic()
        self._begun = False

    def begin(self, about: dict[str, Any]) -> None:
        """Write the header."""
        self._begun = True
        self._write(MAGIC + json.dumps(about, separators=(",", ":")).encode() + b"\n")

    def __call__(self, connection: int, sent: bool, data: bytes | memoryview) -> None:
        """Record frames that went over a connection; before `begin` they are ignored."""
        if not self._begun:
            return
        elapsed_ns = int((self._clock.monotonic() - self._begin) * 1e9)
        self._write(_PIECE.pack(elapsed_ns, connection & 0xFFFF, sent, len(data)))
        self._write(bytes(data))
        self.bytes += len(data)

    def _write(self, data: bytes) -> None:
        try:
            self._sink.write(data)
        except OSError as error:  # as it is, it would look like an error of the connection
            where = "" if error.filename is None else f" {error.filename!r}"
            raise StoreError(f"the recording{where} can't be written: {reason_of(error)}") from error


@dataclass(slots=True)
class Exchange:
    """A stream request, its answer, and everything that the stream brought."""

    request: Frame
    frames: list[Frame]

    @property
    def is_accepted(self) -> bool:
        """Whether the request was answered with a stream."""
        return bool(self.frames) and not self.frames[0].is_request and not self.frames[0].status

    @property
    def rollback_seqno(self) -> int | None:
        """Where the answer sent the reader back to; None if it did not."""
        if not self.frames or self.frames[0].is_request or self.frames[0].status != Status.ROLLBACK:
            return None
        return dcp.DcpStreamRequestResponse.decode(self.frames[0]).rollback_seqno

    @property
    def last_seqno(self) -> int | None:
        """The last seqno that the stream brought; None if it brought none."""
        seqnos = (seqno_of(frame) for frame in reversed(self.frames))
        return next((seqno for seqno in seqnos if seqno is not None), None)


class Recording:
    """A recording that was read; any other file is a `UsageError`."""

    def __init__(self, path: str | Path) -> None:
        self.path = paths.file(path, "the recording", must_exist=True)
        self.exchanges: dict[int, list[Exchange]] = {}
        """By vbucket, in the order of the requests."""
        with self.path.open("rb") as file:
            self.about = self._header(file)
            count = self.about.get("vbuckets")
            if type(count) is not int or not 1 <= count <= 1024:
                raise self._broken("its header does not say how many vbuckets there are")
            self.vbucket_count = count
            self._read(file)

    def replayable(self, vbucket: int) -> list[Exchange]:
        """The exchanges of a vbucket up to the last one with a stream. If the recording stopped after its
        reader was sent back, it has nothing of the branch that the reader would have gone to.
        """
        exchanges = self.exchanges.get(vbucket, [])
        accepted = [number for number, exchange in enumerate(exchanges) if exchange.is_accepted]
        return exchanges[: accepted[-1] + 1] if accepted else []

    def high_seqno(self, vbucket: int) -> int:
        """The seqno of a vbucket when the recording stopped, on the branch that it had then."""
        exchanges = self.replayable(vbucket)
        if not exchanges:
            return 0
        # a stream that brought nothing ends where it began
        return exchanges[-1].last_seqno or dcp.DcpStreamRequest.decode(exchanges[-1].request).start_seqno

    def failover_log(self, vbucket: int) -> bytes | None:
        """The last failover log that was recorded, as it went over the wire."""
        exchanges = self.replayable(vbucket)
        return exchanges[-1].frames[0].value if exchanges else None

    def _header(self, file: IO[bytes]) -> dict[str, Any]:
        if file.read(len(MAGIC)) != MAGIC:
            raise self._broken("it does not begin as one")
        try:
            about = json.loads(file.readline(_MAX_HEADER))
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict):
            raise self._broken("its header is not JSON")
        return about

    def _read(self, file: IO[bytes]) -> None:
        streams: dict[tuple[int, int], Exchange] = {}
        for connection, sent, data in self._pieces(file):
            framer = Framer()
            framer.feed(data)
            try:
                for frame in framer.frames():
                    where = connection, frame.opaque
                    if sent and frame.opcode == DcpOpcode.STREAM_REQUEST:
                        dcp.DcpStreamRequest.decode(frame)
                        streams[where] = Exchange(frame, [])
                        self.exchanges.setdefault(frame.vbucket, []).append(streams[where])
                    elif not sent and where in streams and _belongs(frame):
                        _check(frame)
                        streams[where].frames.append(frame)
            except ProtocolError as error:
                raise self._broken(f"it holds bytes that are not frames ({error})") from None

    def _pieces(self, file: IO[bytes]) -> Iterator[tuple[int, bool, bytes]]:
        """All pieces but one cut off at the end, which the recorder was writing when it was stopped."""
        while len(header := file.read(_PIECE.size)) == _PIECE.size:
            _, connection, sent, size = _PIECE.unpack(header)
            if size > _MAX_PIECE or sent > 1:
                raise self._broken("a piece of it has an impossible header")
            data = file.read(size)
            if len(data) == size:
                yield connection, bool(sent), data

    def _broken(self, why: str) -> UsageError:
        return UsageError(f"{str(self.path)!r} is not a recording: {why}")


def _check(frame: Frame) -> None:
    """Raise `ProtocolError` if something that a replay needs is missing."""
    if frame.is_request and frame.opcode in _CHECKED:
        _CHECKED[frame.opcode].decode(frame)
    elif frame.is_request and frame.opcode in _WITH_SEQNO and len(frame.extras) < _SEQNO_SIZE:
        raise MalformedMessage(f"a change has {len(frame.extras)} bytes of extras, and no seqno")


def _belongs(frame: Frame) -> bool:
    """Whether a frame from the server is part of a stream: its answer, or a message of it."""
    if frame.magic in _RESPONSES:
        return frame.opcode == DcpOpcode.STREAM_REQUEST
    return frame.is_request and frame.opcode != DcpOpcode.NOOP
