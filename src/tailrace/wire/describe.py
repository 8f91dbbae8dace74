"""Any frame as readable text and as a JSON object, with names beside the numbers.

What a message says comes from its declaration: the fields of its extras, and its public properties, which
read its value. The JSON object has

    dialect, direction, magic, opcode, name, vbucket or status, opaque, cas, datatype (draft A: subtype),
    frame_info, extras{…}, key, value_length, value{…}, notes

``value`` is there only if the value is understood; documents are not shown. 64-bit ids and CAS are strings,
seqnos are integers, ``x_name`` or ``x_names`` says what the number ``x`` means.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from enum import IntEnum, IntFlag
from typing import Any

from ..errors import MalformedMessage
from . import admin, codes, dcp, dcp_replication, kv, tap, upr
from .codes import Datatype, Magic, Op, Status, status_name
from .dialect import KV, UPR_A, Dialect
from .fields import Durability, FrameInfo, decode_duration_us, decode_frame_infos
from .header import Frame
from .message import Direction, Message, Response, Unknown

__all__ = ["Description", "describe"]

_MAX_SHOWN = 64
"""Bytes of a key or value that the text shows."""

_MEANINGS: Mapping[type[Message], Mapping[str, type[IntEnum] | type[IntFlag]]] = {
    dcp.DcpOpen: {"flags": codes.OpenFlag},
    dcp.DcpAddStream: {"flags": codes.AddStreamFlag},
    dcp.DcpStreamRequest: {"flags": codes.AddStreamFlag},
    dcp.DcpStreamEnd: {"status": codes.StreamEndStatus},
    dcp.DcpSnapshotMarker: {"flags": codes.MarkerFlag},
    dcp.DcpSetVBucketState: {"state": codes.VBucketState},
    dcp.DcpSystemEvent: {"event": codes.SystemEventId},
    dcp_replication.DcpPrepare: {"durability": codes.DurabilityLevel},
    dcp.DcpOsoSnapshot: {"flags": codes.OsoFlag},
    tap.TapConnect: {"flags": codes.TapConnectFlag},
    tap.TapMutation: {"tap_flags": codes.TapFlag},
    tap.TapDelete: {"tap_flags": codes.TapFlag},
    tap.TapFlush: {"tap_flags": codes.TapFlag},
    tap.TapOpaqueMessage: {"tap_flags": codes.TapFlag, "code": codes.TapOpaque},
    tap.TapVBucketSet: {"tap_flags": codes.TapFlag, "state": codes.VBucketState},
    tap.TapCheckpointStart: {"tap_flags": codes.TapFlag},
    tap.TapCheckpointEnd: {"tap_flags": codes.TapFlag},
    upr.UprBStreamEndMessage: {"flag": codes.UprBStreamEnd},
    upr.UprBSetVBucketState: {"state": codes.UprBVBucketState},
    admin.SetVBucket: {"state": codes.VBucketState},
    admin.GetAllVbSeqnos: {"state": codes.VBucketState},
    admin.VBucketStateResponse: {"state": codes.VBucketState},
    admin.Hello: {"features": codes.Feature},
    admin.HelloResponse: {"features": codes.Feature},
    kv.SetWithMeta: {"options": codes.WithMetaOption},
    kv.GetMetaResponse: {"stored_datatype": Datatype},
}
"""The enum that names the numbers of a field; a subclass of a message here shares its names."""

_IDS = frozenset({"cas", "meta_cas", "vb_uuid", "current_vb_uuid", "manifest_uid", "checkpoint_id"})
"""64-bit numbers that are only ever compared: strings, because many JSON readers have no such integers."""

_TIMES = frozenset({"expiry", "item_expiry", "delete_time", "purge_before_s"})

_FILLERS = frozenset({"reserved", "unused", "padding"})
"""Fields that should be 0; text shows them only if they are not."""

_RELATIVE_S = 30 * 24 * 3600
"""An expiry up to here is a number of seconds from now in a write command, not a date."""

_LAST_TIME_S = 253_402_300_799
"""The end of the year 9999, the last that `datetime` has; a 64-bit field can go beyond it."""

_DURATIONS = (codes.ResponseFrameId.SERVER_DURATION, codes.ResponseFrameId.THROTTLE_DURATION)

_NOT_SAID = frozenset({"document", "fragment", "wants_ack"})
"""Properties that repeat the value or a flag."""

_SECRET = frozenset({Op.SASL_AUTH, Op.SASL_STEP})
"""Requests whose value is a password or a proof of one."""


@dataclass(slots=True)
class Description:
    """A frame that has been named."""

    frame: Frame
    dialect: Dialect
    direction: Direction
    kind: type[Message]
    message: Message | None
    """None if the frame is not what its opcode requires; a note says why."""
    notes: list[str] = field(default_factory=list)
    offset: int = 0
    """Where the frame begins in its stream of bytes."""

    @property
    def name(self) -> str:
        """The message's name; an answer has that of its request."""
        if self.kind is Unknown:
            return f"unknown 0x{self.frame.opcode:02x}"
        if issubclass(self.kind, Response):
            return f"{_request_of(self).name()} response"
        return self.kind.name()

    @property
    def table(self) -> str:
        """The name of the dialect whose table has the message; key-value commands belong to all."""
        request = _request_of(self)
        if request is Unknown or request in self.dialect.messages:
            return self.dialect.name
        return KV.name

    @property
    def has_status(self) -> bool:
        """Whether bytes 6-7 are a status; messages of draft A always have a vbucket there."""
        return not self.frame.is_request and not self._is_upr_a

    @property
    def _is_upr_a(self) -> bool:
        return self.kind in UPR_A.messages

    @property
    def key(self) -> bytes:
        """The key; TAP has it after the engine-private section."""
        return self.message.key if self.message is not None else self.frame.key

    @property
    def value_length(self) -> int:
        """Bytes after the key."""
        length = len(self.frame.value)
        message = self.message
        if isinstance(message, tap.TapCheckpointStart | tap.TapCheckpointEnd) and message.item_flags is None:
            return 0  # the seed's form: the id is engine private, whatever the private length says
        if isinstance(message, tap.TapVBucketSet):
            return 0
        return length - getattr(message, "private_length", 0)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `tailrace decode --json` promises."""
        frame = self.frame
        shown: dict[str, Any] = {
            "dialect": self.table,
            "direction": self.direction.value,
            "magic": frame.magic,
            "opcode": frame.opcode,
            "name": self.name,
        }
        if self.has_status:
            shown |= {"status": frame.status, "status_name": status_name(frame.status)}
        else:
            shown["vbucket"] = frame.vbucket
        shown |= {"opaque": frame.opaque, "cas": str(frame.cas)}
        if self._is_upr_a:
            shown["subtype"] = frame.datatype
        else:
            shown |= _number("datatype", frame.datatype, Datatype)
        if frame.framing:
            shown["frame_info"] = list(self._frame_infos())
        shown["extras"] = self._extras()
        shown |= _text("key", self.key)
        shown["value_length"] = self.value_length
        if value := self._value():
            shown["value"] = value
        shown["notes"] = list(self.notes)
        return shown

    def to_text(self) -> list[tuple[str, str]]:
        """Lines of (kind, text), the first one the header; kinds are ``head``, ``field`` and ``note``."""
        frame = self.frame
        parts = [
            self.name,
            self.direction.value,
            f"{self.table} 0x{frame.magic:02x} 0x{frame.opcode:02x}",
            f"status {status_name(frame.status)} (0x{frame.status:02x})"
            if self.has_status
            else f"vbucket {frame.vbucket}",
            f"opaque 0x{frame.opaque:08x}",
        ]
        if frame.cas:
            parts.append(f"cas {frame.cas}")
        parts.append(f"{frame.size} bytes")
        lines = [("head", "  ".join(parts))]
        rows = list(self._rows())
        width = max((len(name) for name, _ in rows), default=0)
        lines += [("field", f"{name:<{width}}  {text}") for name, text in rows]
        lines += [("note", note) for note in self.notes]
        return lines

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.frame.datatype and not self._is_upr_a:
            yield from _readable(_number("datatype", self.frame.datatype, Datatype))
        if self.frame.framing:
            for info in self._frame_infos():
                label = info.get("id_name") or f"id {info['id']}" if "id" in info else "malformed"
                yield "frame info", f"{label} {_frame_info_text(info)}".rstrip()
        yield from _readable(self._extras())
        if self.key:
            yield "key", _shown(self.key)
        yield from _readable(self._value())
        if self.value_length:
            yield "value", f"{self.value_length} bytes{self._preview()}"

    def _preview(self) -> str:
        if self.frame.opcode in _SECRET and self.frame.is_request:
            return ", not shown"
        value = self.message.value if self.message is not None else self.frame.value
        return f": {_shown(value)}" if value and not self._value() else ""

    def _frame_infos(self) -> Iterator[dict[str, Any]]:
        names: type[IntEnum] = (
            codes.RequestFrameId if self.frame.is_request else codes.ResponseFrameId  # two name spaces
        )
        try:
            infos = decode_frame_infos(self.frame.framing)
        except MalformedMessage:
            yield {"hex": self.frame.framing.hex()}  # `notes` has a note about it
            return
        for info in infos:
            shown = _number("id", info.id, names)
            if info.data:
                shown["data"] = int.from_bytes(info.data, "big") if len(info.data) <= 2 else info.data.hex()
            with suppress(MalformedMessage):  # a malformed durability or duration stays bytes
                shown |= _meant(names, info)
            yield shown

    def _extras(self) -> dict[str, Any]:
        """What the message says beyond header, key and value; raw bytes if that is unknown."""
        message = self.message
        if message is None or isinstance(message, Unknown):
            return {"hex": self.frame.extras.hex()} if self.frame.extras else {}
        if isinstance(message, Response) and message.status not in message.OK:
            return {"hex": self.frame.extras.hex()} if self.frame.extras else {}
        shown: dict[str, Any] = {}
        for name, value in message.fields_by_name().items():
            if value is None or name == "private":
                continue
            shown |= _field(type(message), name, value)
        if isinstance(message, tap.TapMutation | tap.TapDelete):
            shown |= {name: value for name, value in self._properties() if value is not None}
        return shown

    def _value(self) -> dict[str, Any]:
        """What the message reads out of its value."""
        message = self.message
        if message is None or isinstance(message, tap.TapMutation | tap.TapDelete):
            return {}
        shown: dict[str, Any] = {}
        for name, value in self._properties():
            shown |= _field(type(message), name, value)
        if isinstance(message, tap.TapConnect):
            for name, value in asdict(message.options()).items():
                if value is not None and value != b"":
                    shown |= _field(type(message), name, value)
        if isinstance(message, dcp.DcpControl):
            shown |= _text("setting", message.value)
        return shown

    def _properties(self) -> Iterator[tuple[str, Any]]:
        """Name and content of each public property of the message that has one."""
        message = self.message
        assert message is not None
        names = _property_names(type(message))
        if isinstance(message, Response) and message.status not in message.OK:
            names = (
                ("rollback_seqno",) if message.status == Status.ROLLBACK and "rollback_seqno" in names else ()
            )
        for name in names:
            try:
                value = getattr(message, name)
            except MalformedMessage:
                continue  # the answer to a stream request is a log or a seqno, never both
            if value is not None:
                yield name, value


def describe(
    frame: Frame, dialect: Dialect, direction: Direction, notes: Iterable[str] = (), *, offset: int = 0
) -> Description:
    """Name a frame. This never fails: a malformed frame gets a note that says what is wrong."""
    kind = dialect.find(frame, direction)
    message: Message | None = None
    remarks = list(notes)
    meant = kind.as_meant(frame)
    if meant is not frame:
        frame = meant
        remarks.append("the stream id is there, though the framing length is 0")
    try:
        message = kind.decode(frame)
        if frame.framing:
            decode_frame_infos(frame.framing)
    except MalformedMessage as error:
        remarks.append(f"malformed: {error}")
    return Description(frame, dialect, direction, kind, message, remarks, offset)


def _request_of(description: Description) -> type[Message]:
    """The class of a message; for an answer, the class of its request."""
    kind = description.kind
    if not issubclass(kind, Response):
        return kind
    # draft A has its own answers; a `Response` there answers a key-value command
    answered = description.frame.magic == Magic.SERVER_RESPONSE
    asked = Frame(Magic.SERVER_REQUEST if answered else Magic.REQUEST, description.frame.opcode)
    return description.dialect.find(asked, description.direction.opposite)


def _property_names(kind: type[Message]) -> tuple[str, ...]:
    """Public properties from the base class down, in the order of declaration."""
    names = [
        name
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, property) and not name.startswith("_") and name not in _NOT_SAID
    ]
    return tuple(dict.fromkeys(names))


# values for JSON


def _meaning(kind: type[Message], name: str) -> type[IntEnum] | type[IntFlag] | None:
    return next(
        (_MEANINGS[base][name] for base in kind.__mro__ if name in _MEANINGS.get(base, {})),
        None,
    )


def _field(kind: type[Message], name: str, value: Any) -> dict[str, Any]:
    """A field, with the names of its numbers."""
    meaning = _meaning(kind, name)
    if meaning is not None and isinstance(value, int):
        return _number(name, value, meaning)
    if name == "failover_log":
        return {name: [{"vb_uuid": str(vb_uuid), "seqno": seqno} for vb_uuid, seqno in value]}
    if name in ("checkpoints", "filter"):
        return {name: [{"vbucket": vbucket, "checkpoint_id": str(number)} for vbucket, number in value]}
    if name == "old_branch":
        return {name: {"vb_uuid": str(value[0]), "seqno": value[1]}}
    if name == "seqnos":
        return {name: {str(vbucket): seqno for vbucket, seqno in value.items()}}
    if meaning is not None and isinstance(value, list):
        return {name: value, f"{name}_names": [_member(meaning, code) for code in value]}
    if name in _IDS:
        return {name: str(value)}
    if isinstance(value, bytes):
        return _text(name, value) if name == "path" else {name: value.hex()}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: asdict(value)}
    return {name: value}


def _meant(names: type[IntEnum], info: FrameInfo) -> dict[str, Any]:
    """What the bytes of a frame info mean, where they are not the number itself."""
    if names is codes.RequestFrameId and info.id == codes.RequestFrameId.DURABILITY:
        durability = Durability.decode(info)
        level = _number("level", durability.level, codes.DurabilityLevel)
        return level if durability.timeout_ms is None else level | {"timeout_ms": durability.timeout_ms}
    if names is codes.ResponseFrameId and info.id in _DURATIONS:
        return {"duration_us": decode_duration_us(info)}
    return {}


def _number(name: str, value: int, meaning: type[IntEnum] | type[IntFlag]) -> dict[str, Any]:
    if issubclass(meaning, IntFlag):
        return {name: value, f"{name}_names": [flag.name for flag in meaning if flag.value & value]}
    return {name: value, f"{name}_name": _member(meaning, value)}


def _member(meaning: type[IntEnum] | type[IntFlag], value: int) -> str | None:
    try:
        return meaning(value).name
    except ValueError:
        return None


def _text(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


# values for people


def _readable(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of a JSON object, with names in brackets after their numbers."""
    for name, value in values.items():
        if name.endswith(("_name", "_names")) and name.rsplit("_", 1)[0] in values:
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for at, entry in enumerate(value):
                yield (
                    name if at == 0 else "",
                    "  ".join(f"{label} {_one_value(label, value)}" for label, value in entry.items()),
                )
            continue
        if name == "private_length" or (name in _FILLERS and not str(value).strip("0")):
            continue
        text = _one_value(name, value)
        names = values.get(f"{name}_names", values.get(f"{name}_name"))
        if names:
            text += f" ({' '.join(map(str, names)) if isinstance(names, list) else names})"
        yield name, text


def _frame_info_text(info: Mapping[str, Any]) -> str:
    if "level" in info:
        timeout = f" {info['timeout_ms']} ms" if "timeout_ms" in info else ""
        return f"{info['level_name']}{timeout}"
    if "duration_us" in info:
        return f"{info['duration_us']} us"
    return str(info.get("data", info.get("hex", "")))


def _one_value(name: str, value: Any) -> str:
    if name in _IDS and name != "cas":
        return f"{int(value):#x}"
    if isinstance(value, int) and value == 0xFFFF_FFFF_FFFF_FFFF:
        return f"{value:#x}"
    if name in _TIMES and isinstance(value, int):
        if not _RELATIVE_S < value <= _LAST_TIME_S:
            return str(value)
        return f"{value} ({_time(value)})"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, str):
        return _shown(value.encode())
    return str(value)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _shown(data: bytes) -> str:
    """Bytes on one line: text in quotes, with everything that a terminal might act on escaped."""
    more = f" … {len(data) - _MAX_SHOWN} more" if len(data) > _MAX_SHOWN else ""
    data = data[:_MAX_SHOWN]
    try:
        text = data.decode()
    except UnicodeDecodeError:
        # a character cut in half does not make a text binary
        text = data.decode(errors="ignore") if more else ""
        if len(text.encode()) < len(data) - 3 or not text:
            return f"0x{data.hex()}{more}"
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else _escaped(c) for c in text) + f'"{more}'


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode() if character != '"' else '\\"'
