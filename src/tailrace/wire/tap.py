"""TAP: connect, seven producer messages and their acks.

TAP puts an engine-private section between extras and key that the extras length does not cover:

    header 24 | extras | engine private (its length is in extras bytes 0-1) | key | value

The rules are docs/spec/tap.md#frame and those below it. The ids in the comments (T4, T5 ...) are those of the
errata table of `docs/dialects.md`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ..errors import LocalProtocolError, MalformedMessage
from .codes import Op, TapConnectFlag, TapFlag, TapOpcode, VBucketState
from .header import Frame
from .layout import NO_EXTRAS, Layout, layout
from .message import DOCUMENT, Direction, Message, Part, Response, message

__all__ = [
    "TAP_MESSAGES",
    "TAP_TTL",
    "TapAck",
    "TapCheckpointEnd",
    "TapCheckpointStart",
    "TapConnect",
    "TapConnectOptions",
    "TapDelete",
    "TapFlush",
    "TapMutation",
    "TapNoop",
    "TapOpaqueMessage",
    "TapVBucketSet",
]

TAP_TTL = 255
"""What a producer sends; each relay subtracts one."""

_COMMON = layout("""
    H private_length  bytes of the engine-private section after the extras
    H tap_flags       see TapFlag
    B ttl             hops left; 0 is refused
    3s reserved       0
""")
_WITH_ITEM = _COMMON + layout("""
    I item_flags      chosen by the writer, opaque to us
    I item_expiry     unix seconds; 0 is never
""")
TAP_FLAGS = _COMMON.field("tap_flags").place
_DATE = struct.Struct(">Q")
_COUNT = struct.Struct(">H")
_CODE = struct.Struct(">I")
_CHECKPOINT = struct.Struct(">HQ")
_ID = struct.Struct(">Q")


@message
class TapAck(Response):
    """The receiver's answer to a producer message: its opcode and opaque, a status, an optional text."""

    DIRECTION = Direction.TO_PRODUCER
    KEY = Part.OPTIONAL  # one reader puts a random text there
    VALUE = Part.OPTIONAL


@dataclass(slots=True)
class TapConnectOptions:
    """The values that come with the flags of a connect."""

    backfill_date: int | None = None
    vbuckets: list[int] | None = None
    checkpoints: list[tuple[int, int]] | None = None
    closed_checkpoints_only: bool | None = None
    trailing: bytes = field(default=b"", repr=False)
    """Bytes after the last value, which have no known meaning."""


@message
class TapConnect(Message):
    """Opens a TAP stream. The name may be empty; values are in the body, lowest flag first."""

    OPCODE = TapOpcode.CONNECT
    LAYOUTS = (NO_EXTRAS, layout("I flags  see TapConnectFlag; missing is 0"))
    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL
    RESPONSE = Response
    REPLY = "only on error"

    flags: int | None = None

    @classmethod
    def with_options(cls, name: bytes, flags: int, options: TapConnectOptions | None = None) -> Self:
        """A connect for these flags; each flag that wants a value must have it in the options."""
        options = options or TapConnectOptions()
        value = b""
        if flags & TapConnectFlag.BACKFILL:
            if options.backfill_date is None:
                raise LocalProtocolError("tap connect: BACKFILL needs a date")
            value += _DATE.pack(options.backfill_date)
        if flags & TapConnectFlag.LIST_VBUCKETS:
            vbuckets = options.vbuckets or []
            value += _COUNT.pack(len(vbuckets)) + b"".join(map(_COUNT.pack, vbuckets))
        if flags & TapConnectFlag.CHECKPOINT:
            checkpoints = options.checkpoints or []
            value += _COUNT.pack(len(checkpoints)) + b"".join(
                _CHECKPOINT.pack(*checkpoint) for checkpoint in checkpoints
            )
        if flags & TapConnectFlag.REGISTERED_CLIENT and options.closed_checkpoints_only is not None:
            value += bytes([options.closed_checkpoints_only])
        return cls(flags=flags, key=name, value=value + options.trailing)

    def options(self) -> TapConnectOptions:
        """The values that the flags carry; unknown flags carry none."""
        flags = self.flags or 0
        data, at = self.value, 0
        options = TapConnectOptions()

        def take(shape: struct.Struct, what: str) -> tuple[int, ...]:
            nonlocal at
            if at + shape.size > len(data):
                raise MalformedMessage(f"tap connect: the value for {what} is missing", 0x83)
            at += shape.size
            return shape.unpack_from(data, at - shape.size)

        if flags & TapConnectFlag.BACKFILL:
            (options.backfill_date,) = take(_DATE, "BACKFILL")
        if flags & TapConnectFlag.LIST_VBUCKETS:
            (count,) = take(_COUNT, "LIST_VBUCKETS")
            options.vbuckets = [take(_COUNT, "LIST_VBUCKETS")[0] for _ in range(count)]
        if flags & TapConnectFlag.CHECKPOINT:
            count = take(_COUNT, "CHECKPOINT")[0] if at < len(data) else 0
            options.checkpoints = []
            for _ in range(count):
                vbucket, checkpoint_id = take(_CHECKPOINT, "CHECKPOINT")
                options.checkpoints.append((vbucket, checkpoint_id))
        if flags & TapConnectFlag.REGISTERED_CLIENT and at < len(data):
            options.closed_checkpoints_only = bool(data[at])
            at += 1
        options.trailing = data[at:]
        return options

    def check_fields(self) -> None:
        self.options()


@message
class _TapPush(Message):
    """A producer message: common extras, then the engine-private section."""

    LAYOUTS: ClassVar[tuple[Layout, ...]] = (_COMMON,)
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = TapAck
    REPLY = "with the ack flag, or on error"

    tap_flags: int = 0
    ttl: int = TAP_TTL
    reserved: bytes = b"\0\0\0"
    private_length: int = field(default=0, compare=False, repr=False)
    """As received; when sent, it follows from the engine-private section."""

    @property
    def wants_ack(self) -> bool:
        """Whether the producer waits for an answer."""
        return bool(self.tap_flags & TapFlag.ACK)

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        body = cls._unpack_extras(frame.extras)
        rest = frame.body[frame.extras_length :]
        length = body["private_length"]
        if length + frame.key_length > len(rest):
            raise MalformedMessage(f"{cls.name()}: engine private and key are longer than the body")
        private, rest = rest[:length], rest[length:]
        body["key"], body["value"] = rest[: frame.key_length], rest[frame.key_length :]
        body.update(cls._unpack_private(private))
        return body

    @classmethod
    def _unpack_private(cls, private: bytes) -> dict[str, Any]:
        return {}

    def _pack_private(self) -> bytes:
        return b""

    def _body(self) -> tuple[int, bytes]:
        private = self._pack_private()
        self.private_length = len(private)
        extras = self._pack_extras()
        return len(extras), extras + private + self.key + self.value


@message
class _TapItem(_TapPush):
    """Mutation and delete may carry the document's metadata in the engine-private section."""

    KEY = Part.REQUIRED

    private: bytes = b""

    @property
    def rev_seqno(self) -> int | None:
        """How many times the document has changed, if the producer says so."""
        return _ID.unpack_from(self.private)[0] if len(self.private) >= _ID.size else None

    @classmethod
    def _unpack_private(cls, private: bytes) -> dict[str, Any]:
        return {"private": private}

    def _pack_private(self) -> bytes:
        return self.private


@message
class TapMutation(_TapItem):
    """A document was created or changed. Engine private: u64 rev seqno, then perhaps u8 nru."""

    OPCODE = TapOpcode.MUTATION
    LAYOUTS = (_WITH_ITEM,)
    VALUE = Part.OPTIONAL
    DATATYPES = DOCUMENT

    item_flags: int = 0
    item_expiry: int = 0

    @property
    def nru(self) -> int | None:
        """The cache hint, if there is one."""
        return self.private[8] if len(self.private) == 9 else None


@message
class TapDelete(_TapItem):
    """A document was deleted. Engine private: u64 rev seqno, directly after the 8-byte extras (T3)."""

    OPCODE = TapOpcode.DELETE


@message
class TapFlush(_TapPush):
    """Drop all data."""

    OPCODE = TapOpcode.FLUSH


@message
class TapOpaqueMessage(_TapPush):
    """A control code; unknown codes are ignored (T13)."""

    OPCODE = TapOpcode.OPAQUE

    code: int

    @classmethod
    def _unpack_private(cls, private: bytes) -> dict[str, Any]:
        if len(private) != _CODE.size:
            raise MalformedMessage(f"tap opaque message: a control code has 4 bytes, not {len(private)}")
        return {"code": _CODE.unpack(private)[0]}

    def _pack_private(self) -> bytes:
        return _CODE.pack(self.code)


@message
class TapVBucketSet(_TapPush):
    """Takeover: the replica's vbucket changes its state."""

    OPCODE = TapOpcode.VBUCKET_SET

    state: int

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        # the seed's breakdown gives engine private length 0 although the state follows (T4)
        body = super(TapVBucketSet, cls)._body_fields(frame)
        if body["private_length"] == 0 and not frame.key_length and len(body["value"]) == _CODE.size:
            body["state"] = _CODE.unpack(body["value"])[0]
            body["value"] = b""
        elif "state" not in body:
            raise MalformedMessage("tap vbucket set: the state is missing")
        return body

    @classmethod
    def _unpack_private(cls, private: bytes) -> dict[str, Any]:
        if not private:
            return {}
        if len(private) != _CODE.size:
            raise MalformedMessage(f"tap vbucket set: a state has 4 bytes, not {len(private)}")
        return {"state": _CODE.unpack(private)[0]}

    def _pack_private(self) -> bytes:
        return _CODE.pack(self.state)

    def check_fields(self) -> None:
        if self.state not in VBucketState.__members__.values():
            raise MalformedMessage(f"tap vbucket set: there is no state {self.state}")


@message
class _TapCheckpoint(_TapPush):
    """A checkpoint in the seed's form, with the id as engine private, or in that of real servers, with a key.

    The real form is sent to peers that asked for checkpoints; a ``key`` means that form. On receipt the id is
    the value of the real form, or the 8 bytes after the extras of the seed's, whatever the private length
    says (T5).
    """

    LAYOUTS: ClassVar[tuple[Layout, ...]] = (_COMMON, _WITH_ITEM)
    KEY = Part.OPTIONAL
    SERVER_KEY: ClassVar[bytes]

    checkpoint_id: int
    item_flags: int | None = None
    item_expiry: int | None = None
    private: bytes = b""

    @classmethod
    def server_form(cls, checkpoint_id: int, *, private: bytes = b"", **header: Any) -> Self:
        """The form that real servers send."""
        return cls(
            checkpoint_id=checkpoint_id,
            item_flags=0,
            item_expiry=0,
            private=private,
            key=cls.SERVER_KEY,
            **header,
        )

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        if frame.extras_length == _WITH_ITEM.size:
            body = super(_TapCheckpoint, cls)._body_fields(frame)
            data, body["value"] = body["value"], b""
        else:
            body = cls._unpack_extras(frame.extras)
            data = frame.body[frame.extras_length :]
        if len(data) != _ID.size:
            raise MalformedMessage(f"{cls.name()}: a checkpoint id has 8 bytes, not {len(data)}")
        return {**body, "checkpoint_id": _ID.unpack(data)[0]}

    @classmethod
    def _unpack_private(cls, private: bytes) -> dict[str, Any]:
        return {"private": private}

    def _body(self) -> tuple[int, bytes]:
        checkpoint_id = _ID.pack(self.checkpoint_id)
        server_form = self.item_flags is not None
        private = self.private if server_form else checkpoint_id
        self.private_length = len(private)
        extras = self._pack_extras()
        return len(extras), extras + private + self.key + (checkpoint_id if server_form else b"")

    def check_fields(self) -> None:
        if bool(self.key) != (self.item_flags is not None):
            raise MalformedMessage(f"{self.name()}: a key goes with 16 bytes of extras")


@message
class TapCheckpointStart(_TapCheckpoint):
    """A checkpoint opens; its items follow."""

    OPCODE = TapOpcode.CHECKPOINT_START
    SERVER_KEY = b"checkpoint_start"


@message
class TapCheckpointEnd(_TapCheckpoint):
    """The checkpoint is complete."""

    OPCODE = TapOpcode.CHECKPOINT_END
    SERVER_KEY = b"checkpoint_end"


@message
class TapNoop(Message):
    """Keeps a silent stream alive; opaque 0, outside the ack sequence."""

    OPCODE = Op.NOOP
    DIRECTION = Direction.TO_RECEIVER
    RESPONSE = TapAck
    REPLY = "optional"


TAP_MESSAGES: tuple[type[Message], ...] = (
    TapConnect,
    TapMutation,
    TapDelete,
    TapFlush,
    TapOpaqueMessage,
    TapVBucketSet,
    TapCheckpointStart,
    TapCheckpointEnd,
    TapNoop,
)
