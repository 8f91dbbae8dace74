"""The four dialects as tables, and which one a connection speaks.

Opcodes collide between the dialects, so a frame is named by (dialect, direction, magic, opcode), in UPR draft
A also by byte 5. All dialects share the key-value commands; each table adds its own messages on top of them.

Rules: docs/dialects.md#which-dialect-a-connection-speaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType

from ..errors import MalformedMessage
from . import admin, dcp, dcp_replication, kv, subdoc, tap, upr
from .codes import (
    CHANGE_STREAM_OPCODES,
    DcpOpcode,
    Magic,
    Op,
    OpenFlag,
    TapOpcode,
    UprAOpcode,
    UprARequestType,
    UprAResponseType,
    UprBOpcode,
)
from .header import Frame
from .message import Direction, Message, Response, Unknown

__all__ = ["DCP", "DIALECTS", "KV", "TAP", "UPR_A", "UPR_B", "Dialect", "Role", "bind", "opens_upr_a"]


@dataclass(frozen=True)
class Dialect:
    """A dialect's tables, which say which message a frame is."""

    name: str
    messages: tuple[type[Message], ...]
    """The dialect's own messages, without the key-value commands."""
    _requests: Mapping[tuple[Direction, int], type[Message]]
    _responses: Mapping[tuple[Direction, int], type[Response]]
    _server_requests: Mapping[int, type[Message]]
    _server_responses: Mapping[int, type[Response]]

    def find(self, frame: Frame, direction: Direction) -> type[Message]:
        """The class of the message in a frame; `Unknown` if no table names it."""
        if self is UPR_A and (shape := _find_upr_a(frame, direction)) is not None:
            return shape
        if frame.magic in (Magic.REQUEST, Magic.FLEX_REQUEST):
            return self._requests.get((direction, frame.opcode), Unknown)
        if frame.magic == Magic.SERVER_REQUEST:
            return self._server_requests.get(frame.opcode, Unknown)
        if frame.magic == Magic.SERVER_RESPONSE:
            return self._server_responses.get(frame.opcode, Unknown)
        return self._responses.get((direction, frame.opcode), Unknown)

    def decode(self, frame: Frame, direction: Direction) -> Message:
        """The message in a frame, checked; `MalformedMessage` if it is not what its opcode requires."""
        return self.find(frame, direction).decode(frame)


def _messages_of(*modules: ModuleType) -> tuple[type[Message], ...]:
    """Every message that the modules declare, without answers, in the order of declaration."""
    return tuple(
        declared
        for module in modules
        for declared in vars(module).values()
        if isinstance(declared, type)
        and issubclass(declared, Message)
        and not issubclass(declared, Response)
        and declared.__module__ == module.__name__
        and not declared.__name__.startswith("_")
    )


KV_MESSAGES = _messages_of(kv, admin, subdoc)
DCP_MESSAGES = tuple(sorted(_messages_of(dcp, dcp_replication), key=lambda shape: shape.OPCODE))


def _dialect(name: str, messages: Iterable[type[Message]], *, by_opcode: bool = True) -> Dialect:
    own = tuple(messages)
    requests: dict[tuple[Direction, int], type[Message]] = {}
    responses: dict[tuple[Direction, int], type[Response]] = {}
    server_requests: dict[int, type[Message]] = {}
    server_responses: dict[int, type[Response]] = {}
    for shape in (*KV_MESSAGES, *(own if by_opcode else ())):
        if shape.MAGIC == Magic.SERVER_REQUEST:
            server_requests[shape.OPCODE] = shape
            if shape.RESPONSE is not None:
                server_responses[shape.OPCODE] = shape.RESPONSE
        elif shape.MAGIC == Magic.REQUEST:
            for direction in Direction if shape.DIRECTION is None else (shape.DIRECTION,):
                requests[direction, shape.OPCODE] = shape
                if shape.RESPONSE is not None:
                    responses[direction.opposite, shape.OPCODE] = shape.RESPONSE
    return Dialect(name, own, requests, responses, server_requests, server_responses)


KV = _dialect("kv", ())
TAP = _dialect("tap", tap.TAP_MESSAGES)
UPR_A = _dialect("upr-a", upr.UPR_A_MESSAGES, by_opcode=False)
UPR_B = _dialect("upr-b", upr.UPR_B_MESSAGES)
DCP = _dialect("dcp", DCP_MESSAGES)

DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (DCP, UPR_A, UPR_B, TAP, KV)}

_UPR_A_TABLE = {
    (shape.DIRECTION, shape.OPCODE, shape.TYPE): shape
    for shape in upr.UPR_A_MESSAGES
    if shape.OPCODE != UprAOpcode.RESPONSE
}
_UPR_A_RESPONSES: dict[int, type[Message]] = {
    UprAResponseType.OK: upr.UprAOk,
    UprAResponseType.NOT_MY_VBUCKET: upr.UprANotMyVBucket,
    UprAResponseType.ROLLBACK: upr.UprARollback,
}


def _find_upr_a(frame: Frame, direction: Direction) -> type[Message] | None:
    """The draft A message in a frame, or None where the frame is a key-value command or an answer to one."""
    if direction is Direction.TO_PRODUCER:
        return _UPR_A_TABLE.get((direction, frame.opcode, frame.datatype)) if opens_upr_a(frame) else None
    if frame.opcode == UprAOpcode.RESPONSE:
        # types 1 and 2 with a body are the failover log (erratum A7)
        if frame.body and frame.datatype in (UprAResponseType.OK, UprAResponseType.NOT_MY_VBUCKET):
            return upr.UprAFailoverLog
        return _UPR_A_RESPONSES.get(frame.datatype)
    return _UPR_A_TABLE.get((direction, frame.opcode, frame.datatype))


class Role(Enum):
    """What the server is on a connection that has been bound to a dialect."""

    PRODUCER = "producer"
    REPLICA = "replica"


_unpack_open_flags = dcp.DcpOpen.LAYOUTS[0].only("flags").struct.unpack
_NEVER_FIRST = range(DcpOpcode.CLOSE_STREAM, CHANGE_STREAM_OPCODES.stop)
"""Opcodes that bind no connection in any dialect, and come by the thousand."""


def bind(frame: Frame, *, first: bool = True) -> tuple[Dialect, Role] | None:
    """The dialect that a request binds its connection to, and the server's role in it.

    None for ordinary commands, which bind nothing. A change-stream command that can't come first raises
    `MalformedMessage` (the answer is 0x04, the connection stays unbound), or gives None if it is not the
    ``first``. The conditions never overlap.
    """
    opcode, extras = frame.opcode, frame.extras_length
    if not first and opcode in _NEVER_FIRST:
        return None
    if frame.magic not in (Magic.REQUEST, Magic.FLEX_REQUEST):
        return None
    if frame.magic == Magic.REQUEST:
        if opcode == TapOpcode.CONNECT and extras in (0, 4):
            return TAP, Role.PRODUCER
        if TapOpcode.MUTATION <= opcode <= TapOpcode.CHECKPOINT_END and extras in (8, 16):
            return TAP, Role.REPLICA
        if opens_upr_a(frame):
            return UPR_A, Role.PRODUCER
        if opcode == UprBOpcode.STREAM_REQUEST and extras == 40:
            return UPR_B, Role.PRODUCER
        if opcode == UprBOpcode.FAILOVER_LOG_REQUEST and not frame.body:
            return UPR_B, Role.PRODUCER
    if opcode == DcpOpcode.OPEN and extras == 8 and frame.key_length:
        is_producer = bool(_unpack_open_flags(frame.extras)[0] & OpenFlag.PRODUCER)
        return DCP, Role.PRODUCER if is_producer else Role.REPLICA
    if first and (opcode in CHANGE_STREAM_OPCODES or TapOpcode.CONNECT <= opcode <= TapOpcode.CHECKPOINT_END):
        raise MalformedMessage(f"opcode 0x{opcode:02x} can't be the first of a change stream")
    return None


def opens_upr_a(frame: Frame) -> bool:
    """Whether a request with the opcode of SET is one of draft A's; SET itself has 8 bytes of extras."""
    if frame.opcode != Op.SET or frame.magic != Magic.REQUEST:
        return False
    if frame.datatype == UprARequestType.STREAM_REQUEST:
        return frame.extras_length in (32, 40)
    return frame.datatype == UprARequestType.FAILOVER_LOG_REQUEST and not frame.body
