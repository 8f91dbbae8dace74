"""Reads packets that the protocol documents draw but no socket can carry.

Some drawings contradict their own length fields (errata A1, A2, A4, A6, A10 to A13, B2, D2, T5, T6, T8 and
T10 of `docs/dialects.md`). On a connection the header decides, and such bytes are an error. Here the whole
packet is given, so its size and the documented places of the fields decide, and a note names the erratum. A
packet that can be carried, but is not what the resolution of an erratum requires, gets a note too. Only
`tailrace decode` uses this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..errors import MalformedMessage
from .codes import (
    DcpOpcode,
    Magic,
    Status,
    TapOpaque,
    TapOpcode,
    UprAMessageType,
    UprAOpcode,
    UprARequestType,
    UprAResponseType,
    UprBOpcode,
)
from .dialect import DCP, TAP, UPR_A, UPR_B, Dialect
from .fields import decode_failover_log
from .header import HEADER, HEADER_SIZE, Frame
from .message import Direction
from .tap import TapConnect

__all__ = ["Mended", "erratum", "mend", "tolerated"]

_TO_PRODUCER, _TO_RECEIVER = Direction.TO_PRODUCER, Direction.TO_RECEIVER


def erratum(name: str, what: str) -> str:
    """A note that names an erratum."""
    return f"erratum {name}: {what}"


@dataclass(frozen=True, slots=True)
class Mended:
    """A packet with its lengths corrected."""

    frame: Frame
    dialect: Dialect
    direction: Direction
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Drawing:
    """One drawn packet whose lengths are wrong: how to recognise it, and what is right."""

    errata: Mapping[str, str]
    """The wrong length, by erratum: ``extras``, ``body``, ``lengths`` (both) or ``private``."""
    dialect: Dialect
    direction: Direction
    magic: Magic
    opcode: int
    announced_extras: int
    fits: Callable[[int, int], bool]
    """Whether (bytes of body that the header announces, bytes that are there) are those of the drawing."""
    extras: int
    subtype: int | None = None
    padding: int = 0
    """Zero bytes that the drawing leaves out at its end."""

    def matches(self, frame: Frame, announced: int) -> bool:
        """Whether a packet is this one."""
        return (
            frame.magic == self.magic
            and frame.opcode == self.opcode
            and frame.extras_length == self.announced_extras
            and (self.subtype is None or frame.datatype == self.subtype)
            and self.fits(announced, len(frame.body))
        )

    def notes(self, announced: int, there: int) -> tuple[str, ...]:
        """What is wrong, by erratum."""
        extras = f"{self.announced_extras} bytes of extras are announced, {self.extras} are there"
        body = f"{announced} bytes of body are announced, {there} are there"
        if self.padding:
            body += f", the last {self.padding} are taken as 0"
        texts = {
            "extras": extras,
            "body": body,
            "lengths": f"{extras}; {body}",
            "private": "engine private is given as 4, but the checkpoint id has 8 bytes",
        }
        return tuple(erratum(name, texts[wrong]) for name, wrong in self.errata.items())


def _eight_missing(announced: int, there: int) -> bool:
    return announced == there + 8


_DRAWINGS = (
    _Drawing(
        {"A1": "extras", "A2": "body"},
        UPR_A,
        _TO_PRODUCER,
        Magic.REQUEST,
        UprAOpcode.REQUEST,
        40,
        _eight_missing,
        32,
        UprARequestType.STREAM_REQUEST,
    ),
    _Drawing(
        {"A4": "body"},
        UPR_A,
        _TO_RECEIVER,
        Magic.RESPONSE,
        UprAOpcode.RESPONSE,
        0,
        lambda announced, there: announced == 0 and there == 8,
        0,
        UprAResponseType.ROLLBACK,
    ),
    _Drawing(
        {"A6": "body"},
        UPR_A,
        _TO_RECEIVER,
        Magic.RESPONSE,
        UprAOpcode.RESPONSE,
        0,
        lambda announced, there: announced == 0 and there > 0 and there % 16 == 0,
        0,
        UprAResponseType.NOT_MY_VBUCKET,
    ),
    *(
        _Drawing(
            errata,
            UPR_A,
            _TO_RECEIVER,
            Magic.RESPONSE,
            UprAOpcode.STREAM_MESSAGE,
            36,
            _eight_missing,
            28,
            subtype,
        )
        for errata, subtype in (
            ({"A10": "extras", "A11": "body"}, UprAMessageType.MUTATION),
            ({"A12": "lengths"}, UprAMessageType.DELETION),
            ({"A13": "lengths"}, UprAMessageType.EXPIRATION),
        )
    ),
    _Drawing(
        {"B2": "body"},
        UPR_B,
        _TO_RECEIVER,
        Magic.REQUEST,
        UprBOpcode.MUTATION,
        28,
        lambda announced, there: announced == there + 1,
        28,
    ),
    _Drawing(
        {"D2": "body"},
        DCP,
        _TO_PRODUCER,
        Magic.REQUEST,
        DcpOpcode.STREAM_REQUEST,
        48,
        lambda announced, there: announced == 48 and there == 40,
        48,
        padding=8,
    ),
    *(
        _Drawing(
            errata,
            TAP,
            _TO_RECEIVER,
            Magic.REQUEST,
            opcode,
            8,
            lambda announced, there: announced == 12 and there == 16,
            8,
        )
        for errata, opcode in (
            ({"T5": "private", "T6": "body"}, TapOpcode.CHECKPOINT_START),
            ({"T8": "body", "T10": "private"}, TapOpcode.CHECKPOINT_END),
        )
    ),
)


def mend(packet: bytes, dialect: Dialect | None = None) -> Mended | None:
    """The message in a packet whose lengths are wrong in a known way; None for any other packet."""
    if len(packet) < HEADER_SIZE:
        return None
    magic, opcode, key_length, extras_length, datatype, vbucket, announced, opaque, cas = HEADER.unpack_from(
        packet
    )
    body = packet[HEADER_SIZE:]
    frame = Frame(magic, opcode, key_length, extras_length, datatype, vbucket, opaque, cas, body=body)
    for drawing in _DRAWINGS:
        if dialect not in (None, drawing.dialect) or not drawing.matches(frame, announced):
            continue
        frame.extras_length = drawing.extras
        frame.body = body + bytes(drawing.padding)
        try:
            drawing.dialect.decode(frame, drawing.direction)
        except MalformedMessage:
            return None
        return Mended(frame, drawing.dialect, drawing.direction, drawing.notes(announced, len(body)))
    return None


_ONLINE_UPDATES: Mapping[int, str] = {
    TapOpaque.START_ONLINEUPDATE: "servers say with code 4 that the change of a vbucket filter is complete",
    TapOpaque.STOP_ONLINEUPDATE: "no server knows code 5",
    TapOpaque.REVERT_ONLINEUPDATE: "no server knows code 6",
}
_CHECKPOINTS = {int(TapOpcode.CHECKPOINT_START): "T5", int(TapOpcode.CHECKPOINT_END): "T10"}


def tolerated(frame: Frame, dialect: Dialect, direction: Direction) -> list[str]:
    """Notes on a frame that can be carried and is accepted, though it is not what we would send."""
    if dialect is UPR_A:
        return _tolerated_upr_a(frame, direction)
    if dialect is TAP:
        return _tolerated_tap(frame, direction)
    notes: list[str] = []
    if direction is not _TO_RECEIVER or frame.magic not in (Magic.RESPONSE, Magic.FLEX_RESPONSE):
        return notes
    opcode, status = frame.opcode, frame.status
    if dialect is UPR_B:
        if status == Status.ROLLBACK and frame.extras_length == 8:
            notes.append(erratum("B1", "the rollback seqno is in the extras"))
        if status == Status.KEY_ENOENT and opcode == UprBOpcode.STREAM_REQUEST:
            notes.append(erratum("B10", "the vbucket UUID is unknown; a rollback to 0 says so too"))
        if status == Status.SUCCESS and opcode == UprBOpcode.FAILOVER_LOG_REQUEST and _rises(frame.value):
            notes.append(erratum("B7", _UNORDERED))
    elif dialect is DCP and opcode in (DcpOpcode.STREAM_REQUEST, DcpOpcode.GET_FAILOVER_LOG):
        if status == Status.MANIFEST_IS_AHEAD:
            notes.append(erratum("D5", "no server has sent this status since 2021, try again later"))
        if status == Status.SUCCESS and _rises(frame.value):
            notes.append(erratum("D7", _UNORDERED))
    return notes


_UNORDERED = "the failover log is not in order, newest first"


def _rises(log: bytes) -> bool:
    """Whether a seqno of a failover log is above that of the newer entry before it."""
    seqnos = [seqno for _, seqno in decode_failover_log(log)]
    return any(older > newer for newer, older in pairwise(seqnos))


def _tolerated_upr_a(frame: Frame, direction: Direction) -> list[str]:
    opcode, extras = frame.opcode, frame.extras_length
    skipped = "the last 8 bytes of the extras are skipped"
    if direction is _TO_PRODUCER:
        return [erratum("A1", skipped)] if opcode == UprAOpcode.REQUEST and extras == 40 else []
    notes = []
    if opcode == UprAOpcode.STREAM_MESSAGE and extras == 36:
        notes.append(erratum("A10", skipped))
    if opcode == UprAOpcode.RESPONSE:
        if extras == 8:
            notes.append(erratum("A4", "the rollback seqno is in the extras"))
        if frame.datatype == UprAResponseType.OK and frame.body:
            notes.append(erratum("A7", "a failover log of type 1, the document's own has type 2"))
    if frame.magic == Magic.REQUEST and opcode <= UprAOpcode.STREAM_END:
        notes.append(erratum("A20", "a producer's messages have magic 0x81 in draft A"))
    return notes


def _tolerated_tap(frame: Frame, direction: Direction) -> list[str]:
    opcode, notes = frame.opcode, list[str]()
    if frame.magic != Magic.REQUEST:
        return notes
    if direction is _TO_PRODUCER and opcode == TapOpcode.CONNECT:
        if TapConnect.decode(frame).options().closed_checkpoints_only is not None:
            notes.append(erratum("T19", "a registered client has a byte of its own, which servers read"))
    elif direction is _TO_RECEIVER and frame.extras_length == 8:
        private = int.from_bytes(frame.extras[:2], "big")
        if opcode == TapOpcode.VBUCKET_SET and private == 0 and len(frame.value) == 4:
            notes.append(erratum("T4", "engine private is given as 0, but the state follows"))
        checkpoint = _CHECKPOINTS.get(opcode)
        if checkpoint and private != 8 and len(frame.value) == 8:
            notes.append(erratum(checkpoint, f"engine private is given as {private}, but the id has 8 bytes"))
        if opcode == TapOpcode.OPAQUE:
            code = int.from_bytes(frame.value[:4], "big")
            if code not in TapOpaque.__members__.values():
                notes.append(erratum("T13", f"control code {code:#x} is none of the list, it is ignored"))
            elif code in _ONLINE_UPDATES:
                notes.append(erratum("T15", _ONLINE_UPDATES[code]))
    return notes
