"""How a message is declared: a layout, which of key and value it has, and its own checks.

A message class is its own documentation. Each layout line names a field of the extras and its struct code;
the order gives the field's place. Encoder, decoder, validator and the docs pages are all made from them:

    @message
    class SeqnoAdvanced(Message):
        '''The stream has passed this seqno; the change there is not for this reader.'''

        OPCODE = DcpOpcode.SEQNO_ADVANCED
        LAYOUTS = (layout("Q by_seqno  position that the stream has reached"),)

        by_seqno: int

A message with several layouts (a deletion is 18 or 21 bytes) declares the fields that may be missing as
``int | None``; None means that the layout without them is sent. Unknown flags and values are kept as they
came.

``super()`` always gets its arguments: a dataclass with slots is a new class, and the short form looks up the
old one.
"""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

from ..errors import LocalProtocolError, MalformedMessage
from .codes import Datatype, Magic, Status
from .header import Frame
from .layout import NO_EXTRAS, Layout

__all__ = [
    "DOCUMENT",
    "MAX_KEY",
    "Direction",
    "Message",
    "Part",
    "Response",
    "Unknown",
    "message",
]

MAX_KEY = 251
"""The longest key field of a document, its collection prefix included: docs/spec/header.md#limits."""

DOCUMENT = int(Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR)
"""The datatype bits that a document may have."""


class Part(enum.Enum):
    """Whether a message has a key, a value or a CAS."""

    FORBIDDEN = "must not"
    OPTIONAL = "may"
    REQUIRED = "must"


_FORBIDDEN, _REQUIRED = Part.FORBIDDEN, Part.REQUIRED


class Direction(enum.Enum):
    """Who a message goes to: the producer, or the receiver (a reader or a replica).

    On a key-value connection the server counts as the producer. The values are what `tailrace decode` has
    always printed; scripts compare them, so they keep the protocol's own word for a receiver.
    """

    TO_PRODUCER = "to-producer"
    TO_RECEIVER = "to-consumer"

    @property
    def opposite(self) -> Direction:
        """The other direction."""
        return Direction.TO_RECEIVER if self is Direction.TO_PRODUCER else Direction.TO_PRODUCER


T = TypeVar("T", bound="Message")


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Make a message class from a declaration.

    Where possible, `Message` has what dataclasses would generate for each of two hundred classes: generated
    code is compiled whenever a process starts.
    """
    made = dataclass(slots=True, kw_only=True, eq=False, repr=False)(cls)
    names = {declared.name for declared in fields(made)}
    for shape in made.LAYOUTS:
        unknown = set(shape.names) - names
        assert not unknown, f"{cls.__name__}: layout fields without a declaration: {unknown}"
    made._EXTRAS = tuple(dict.fromkeys(name for shape in made.LAYOUTS for name in shape.names))
    made._PACKINGS = {}
    return made


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Message:
    """The base of all messages: the header's fields, key and value.

    ``framing`` holds the framing extras as they came; with any, or with ``flexible``, the frame is sent with
    a flexible magic.
    """

    OPCODE: ClassVar[int]
    MAGIC: ClassVar[Magic] = Magic.REQUEST
    LAYOUTS: ClassVar[tuple[Layout, ...]] = (NO_EXTRAS,)
    KEY: ClassVar[Part] = Part.FORBIDDEN
    VALUE: ClassVar[Part] = Part.FORBIDDEN
    CAS: ClassVar[Part] = Part.OPTIONAL
    """A forbidden CAS must be 0."""
    DATATYPES: ClassVar[int] = 0
    DIRECTION: ClassVar[Direction | None] = Direction.TO_PRODUCER
    RESPONSE: ClassVar[type[Response] | None] = None
    REPLY: ClassVar[str] = "always"
    _EXTRAS: ClassVar[tuple[str, ...]] = ()
    """The fields of the extras in all layouts."""
    _PACKINGS: ClassVar[dict[tuple[bool, ...], tuple[Callable[..., bytes], tuple[int, ...]]]] = {}
    """How to pack the extras, by which fields are absent: millions of messages share a few cases."""

    vbucket: int = 0
    opaque: int = 0
    cas: int = 0
    datatype: int = 0
    framing: bytes = b""
    flexible: bool = False
    key: bytes = b""
    value: bytes = b""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        members = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{type(self).__name__}({', '.join(members)})"

    @classmethod
    def name(cls) -> str:
        """The message's name as people read it: ``DcpSnapshotMarker`` is "dcp snapshot marker"."""
        return _readable(cls.__name__)

    # decoding

    @classmethod
    def decode(cls, frame: Frame) -> Self:
        """The message in a frame; `MalformedMessage` if the frame is not what this message requires."""
        frame = cls.as_meant(frame)
        made = cls(**cls._header_fields(frame), **cls._body_fields(frame))
        made.check()
        return made

    @classmethod
    def as_meant(cls, frame: Frame) -> Frame:
        """The frame itself, or a corrected one where peers are known to write it wrong."""
        return frame

    @classmethod
    def _header_fields(cls, frame: Frame) -> dict[str, Any]:
        return {
            "vbucket": frame.vbucket,
            "opaque": frame.opaque,
            "cas": frame.cas,
            "datatype": frame.datatype,
            "framing": frame.framing,
            "flexible": frame.magic in (Magic.FLEX_REQUEST, Magic.FLEX_RESPONSE),
        }

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        """Key, value and the fields of the extras, by name."""
        body_fields = cls._unpack_extras(frame.extras)
        body_fields["key"] = frame.key
        body_fields["value"] = frame.value
        return body_fields

    @classmethod
    def _unpack_extras(cls, extras: bytes) -> dict[str, Any]:
        for shape in cls.LAYOUTS:
            if shape.size == len(extras):
                return dict(zip(shape.names, shape.struct.unpack(extras), strict=True))
        sizes = " or ".join(str(shape.size) for shape in cls.LAYOUTS)
        raise MalformedMessage(f"{cls.name()}: extras must have {sizes} bytes, not {len(extras)}")

    # encoding

    def encode(self) -> bytes:
        """The whole frame as bytes; `LocalProtocolError` if the message breaks its own rules."""
        return self.to_frame().encode()

    def to_frame(self) -> Frame:
        """The message as a frame."""
        try:
            self.check()
        except MalformedMessage as error:
            raise LocalProtocolError(str(error)) from None
        try:
            extras_length, body = self._body()
        except struct.error as error:
            raise LocalProtocolError(f"{self.name()}: a field does not fit: {error}") from None
        flexible = self.flexible or bool(self.framing)
        return Frame(
            magic=_FLEXIBLE_OF[self.MAGIC] if flexible else self.MAGIC,
            opcode=self._opcode(),
            key_length=len(self.key),
            extras_length=extras_length,
            datatype=self._byte_5(),
            vbucket=self._bytes_6_7(),
            opaque=self.opaque,
            cas=self.cas,
            framing=self.framing,
            body=body,
        )

    def _opcode(self) -> int:
        return self.OPCODE

    def _byte_5(self) -> int:
        return self.datatype

    def _bytes_6_7(self) -> int:
        return self.vbucket

    def _body(self) -> tuple[int, bytes]:
        """Length of the extras, and the body."""
        extras = self._pack_extras()
        return len(extras), extras + self.key + self.value

    def _pack_extras(self) -> bytes:
        """The extras in the longest layout whose fields are all set."""
        if len(self.LAYOUTS) == 1:
            (shape,) = self.LAYOUTS
            values = [getattr(self, name) for name in shape.names]
            if None not in values:
                return shape.struct.pack(*values)
        values = [getattr(self, name) for name in self._EXTRAS]
        absent = tuple([value is None for value in values])
        packing = self._PACKINGS.get(absent)
        if packing is None:
            packing = self._PACKINGS[absent] = self._packing(absent)
        pack, places = packing
        return pack(*[values[place] for place in places])

    @classmethod
    def _packing(cls, absent: tuple[bool, ...]) -> tuple[Callable[..., bytes], tuple[int, ...]]:
        """How to pack the fields of the extras that are not absent, and where in `_EXTRAS` they are."""
        given = {name for name, is_absent in zip(cls._EXTRAS, absent, strict=True) if not is_absent}
        fitting = [shape for shape in cls.LAYOUTS if given.issuperset(shape.names)]
        best = max(fitting, key=lambda shape: shape.size, default=None)
        if best is None or given.difference(best.names):
            raise LocalProtocolError(f"{cls.name()}: no layout has exactly the fields that are set")
        return best.struct.pack, tuple(cls._EXTRAS.index(name) for name in best.names)

    # validation

    def check(self) -> None:
        """Raise `MalformedMessage` if a part is missing, forbidden or invalid."""
        if self.KEY is (_FORBIDDEN if self.key else _REQUIRED):
            self._refuse_part("key", self.key)
        if self.VALUE is (_FORBIDDEN if self.value else _REQUIRED):
            self._refuse_part("value", self.value)
        if self.CAS is (_FORBIDDEN if self.cas else _REQUIRED):
            self._refuse_part("CAS", self.cas)
        if len(self.key) > MAX_KEY:
            raise MalformedMessage(f"{self.name()}: a key has up to {MAX_KEY} bytes, not {len(self.key)}")
        if self.datatype and self.datatype & ~self.DATATYPES:
            raise MalformedMessage(f"{self.name()}: datatype 0x{self.datatype:02x} is not allowed here")
        self.check_fields()

    def check_fields(self) -> None:
        """The message's own rules, beyond the presence of its parts."""

    def _refuse_part(self, what: str, present: bytes | int) -> NoReturn:
        if present:
            raise MalformedMessage(f"{self.name()}: it must not have a {what}")
        raise MalformedMessage(f"{self.name()}: the {what} is missing")

    # reading

    def fields_by_name(self) -> dict[str, Any]:
        """The fields beyond header, key and value, in layout order, as people and docs show them."""
        common = {field.name for field in fields(Message)} | {"opcode", "status"}
        if not getattr(self, "extras", b""):
            common.add("extras")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in common}


@message
class Response(Message):
    """An answer without a body. Also what every error looks like: no extras, no key, an optional text."""

    MAGIC = Magic.RESPONSE
    DIRECTION = Direction.TO_RECEIVER
    VALUE = Part.FORBIDDEN
    DATATYPES = DOCUMENT
    OK: ClassVar[frozenset[int]] = frozenset({Status.SUCCESS})
    """Statuses whose answers have the declared shape; others are kept as they came."""

    opcode: int
    status: int = 0
    extras: bytes = b""
    """Set only in an answer without the declared shape."""

    @classmethod
    def _header_fields(cls, frame: Frame) -> dict[str, Any]:
        header = super(Response, cls)._header_fields(frame)
        del header["vbucket"]
        return {**header, "opcode": frame.opcode, "status": frame.status}

    @classmethod
    def _body_fields(cls, frame: Frame) -> dict[str, Any]:
        if frame.status in cls.OK:
            return super(Response, cls)._body_fields(frame)
        # the declared fields are not there; those without a default are zero
        absent = {
            declared.name: 0 if declared.default is MISSING else declared.default
            for declared in fields(cls)
            if declared.name in {name for layout_ in cls.LAYOUTS for name in layout_.names}
        }
        extras, value = frame.extras, frame.value
        if frame.status == Status.ROLLBACK:  # the seqno is the value; the extras are accepted too (B1)
            extras, value = b"", extras + value
        return {**absent, "extras": extras, "key": frame.key, "value": value}

    def _opcode(self) -> int:
        return self.opcode

    def _bytes_6_7(self) -> int:
        return self.status

    def _body(self) -> tuple[int, bytes]:
        if self.status in self.OK:
            return super(Response, self)._body()
        return len(self.extras), self.extras + self.key + self.value

    def check(self) -> None:
        if self.status in self.OK:
            super(Response, self).check()
            if self.extras:
                raise MalformedMessage(f"{self.name()}: its extras are its fields")


@message
class Unknown(Message):
    """A frame that no table names; it is kept as it came."""

    KEY = Part.OPTIONAL
    VALUE = Part.OPTIONAL
    DATATYPES = 0xFF

    magic: int
    opcode: int
    extras: bytes = b""

    @classmethod
    def _header_fields(cls, frame: Frame) -> dict[str, Any]:
        header = super(Unknown, cls)._header_fields(frame)
        return {**header, "magic": frame.magic, "opcode": frame.opcode}

    @classmethod
    def _unpack_extras(cls, extras: bytes) -> dict[str, Any]:
        return {"extras": extras}

    def check(self) -> None:
        """Accept anything: an unknown frame has no rules."""

    def to_frame(self) -> Frame:
        return Frame(
            self.magic,
            self.opcode,
            len(self.key),
            len(self.extras),
            self.datatype,
            self.vbucket,
            self.opaque,
            self.cas,
            self.framing,
            self.extras + self.key + self.value,
        )


_FLEXIBLE_OF = {Magic.REQUEST: Magic.FLEX_REQUEST, Magic.RESPONSE: Magic.FLEX_RESPONSE}


@cache
def _readable(name: str) -> str:
    words = name.replace("VBucket", "Vbucket")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", words).lower()
