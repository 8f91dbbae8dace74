"""Sub-document commands: one path or several paths inside a JSON document.

Rules: docs/spec/servers.md#sub-document-requests.
"""

from __future__ import annotations

import struct
from typing import ClassVar

from ..errors import MalformedMessage
from .codes import Datatype, Op, Status
from .kv import MutationResponse
from .layout import NO_EXTRAS, layout
from .message import Message, Part, message

JSON = int(Datatype.JSON)


@message
class SubdocResponse(MutationResponse):
    """The result of a sub-document command; a multi command's is a list of records.

    0xcc (some paths failed) and 0xcd (the document is deleted) are answers of the same shape.
    """

    OK = frozenset(
        {
            Status.SUCCESS,
            Status.SUBDOC_MULTI_PATH_FAILURE,
            Status.SUBDOC_SUCCESS_DELETED,
            Status.SUBDOC_MULTI_PATH_FAILURE_DELETED,
        }
    )
    VALUE = Part.OPTIONAL
    DATATYPES = JSON


_PATH = layout("""
    H path_length   bytes of the path, at the start of the value
    B subdoc_flags  1 create the parents, 4 xattr, 0x10 expand macros
""")
_PATH_EXPIRY = _PATH + layout("I expiry  of the document")
_DOC_FLAGS = layout(
    "B doc_flags  1 upsert, 2 add, 4 also if it is deleted, 8 create as deleted, 0x10 revive, 0x20 replica"
)


@message
class SubdocGet(Message):
    """Reads one path of a JSON document."""

    OPCODE = Op.SUBDOC_GET
    LAYOUTS = (_PATH, _PATH + _DOC_FLAGS)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    RESPONSE = SubdocResponse

    path_length: int = 0
    subdoc_flags: int = 0
    doc_flags: int | None = None

    @property
    def path(self) -> bytes:
        """The path."""
        return self.value[: self.path_length]

    def check_fields(self) -> None:
        _check_path(self.name(), self.path_length, self.value)


@message
class SubdocExists(SubdocGet):
    """Asks whether a path is there."""

    OPCODE = Op.SUBDOC_EXISTS


@message
class SubdocGetCount(SubdocGet):
    """Counts the elements at a path."""

    OPCODE = Op.SUBDOC_GET_COUNT


@message
class SubdocDictUpsert(Message):
    """Writes one path of a JSON document."""

    OPCODE = Op.SUBDOC_DICT_UPSERT
    LAYOUTS = (_PATH, _PATH + _DOC_FLAGS, _PATH_EXPIRY, _PATH_EXPIRY + _DOC_FLAGS)
    KEY = Part.REQUIRED
    VALUE = Part.OPTIONAL
    DATATYPES = JSON
    RESPONSE = SubdocResponse

    path_length: int = 0
    subdoc_flags: int = 0
    expiry: int | None = None
    doc_flags: int | None = None

    @property
    def path(self) -> bytes:
        """The path."""
        return self.value[: self.path_length]

    @property
    def fragment(self) -> bytes:
        """What to write there."""
        return self.value[self.path_length :]

    def check_fields(self) -> None:
        _check_path(self.name(), self.path_length, self.value)


@message
class SubdocDictAdd(SubdocDictUpsert):
    """Writes a path that must not be there."""

    OPCODE = Op.SUBDOC_DICT_ADD


@message
class SubdocReplace(SubdocDictUpsert):
    """Writes a path that must be there."""

    OPCODE = Op.SUBDOC_REPLACE


@message
class SubdocDelete(SubdocDictUpsert):
    """Deletes a path."""

    OPCODE = Op.SUBDOC_DELETE


@message
class SubdocArrayPushLast(SubdocDictUpsert):
    """Adds to the end of an array."""

    OPCODE = Op.SUBDOC_ARRAY_PUSH_LAST


@message
class SubdocArrayPushFirst(SubdocDictUpsert):
    """Adds to the start of an array."""

    OPCODE = Op.SUBDOC_ARRAY_PUSH_FIRST


@message
class SubdocArrayInsert(SubdocDictUpsert):
    """Adds in the middle of an array."""

    OPCODE = Op.SUBDOC_ARRAY_INSERT


@message
class SubdocArrayAddUnique(SubdocDictUpsert):
    """Adds a value to an array that does not hold it yet."""

    OPCODE = Op.SUBDOC_ARRAY_ADD_UNIQUE


@message
class SubdocCounter(SubdocDictUpsert):
    """Adds to a number inside the document."""

    OPCODE = Op.SUBDOC_COUNTER


@message
class SubdocReplaceBodyWithXattr(SubdocDictUpsert):
    """Makes an xattr, or a part of one, the document's body; there is no value."""

    OPCODE = Op.SUBDOC_REPLACE_BODY_WITH_XATTR


SUBDOC_LOOKUP_SPEC = struct.Struct(">BBH")  # opcode, flags, length of the path that follows
SUBDOC_MUTATION_SPEC = struct.Struct(">BBHI")  # the same, and the length of the value that follows the path
SUBDOC_LOOKUP_RESULT = struct.Struct(">HI")  # status, and length of the value that follows
SUBDOC_MUTATION_RESULT = struct.Struct(">BHI")  # which path, status, and length of the value that follows
SUBDOC_MUTATION_FAILURE = struct.Struct(">BH")  # which path, and why


@message
class SubdocMultiLookup(Message):
    """Reads several paths: u8 opcode, u8 flags, u16 path length, path each."""

    OPCODE = Op.SUBDOC_MULTI_LOOKUP
    LAYOUTS = (NO_EXTRAS, _DOC_FLAGS)
    KEY = Part.REQUIRED
    VALUE = Part.REQUIRED
    RESPONSE = SubdocResponse
    MAX_PATHS: ClassVar[int] = 16

    doc_flags: int | None = None

    def specs(self) -> list[tuple[int, int, bytes]]:
        """Opcode, flags and path of each."""
        paths, at, data = [], 0, self.value
        while at < len(data):
            if at + SUBDOC_LOOKUP_SPEC.size > len(data):
                raise MalformedMessage("subdoc multi lookup: a path is cut off")
            opcode, flags, length = SUBDOC_LOOKUP_SPEC.unpack_from(data, at)
            at += SUBDOC_LOOKUP_SPEC.size + length
            if at > len(data):
                raise MalformedMessage("subdoc multi lookup: a path is cut off")
            paths.append((opcode, flags, data[at - length : at]))
        if len(paths) > self.MAX_PATHS:
            raise MalformedMessage(
                f"subdoc multi lookup: up to {self.MAX_PATHS} paths", Status.SUBDOC_INVALID_COMBO
            )
        return paths

    def check_fields(self) -> None:
        self.specs()


@message
class SubdocMultiMutation(Message):
    """Writes several paths: u8 opcode, u8 flags, u16 path length, u32 value length, path, value each."""

    OPCODE = Op.SUBDOC_MULTI_MUTATION
    LAYOUTS = (
        NO_EXTRAS,
        _DOC_FLAGS,
        layout("I expiry  of the document"),
        layout("I expiry  of the document") + _DOC_FLAGS,
    )
    KEY = Part.REQUIRED
    VALUE = Part.REQUIRED
    DATATYPES = JSON
    RESPONSE = SubdocResponse
    MAX_PATHS: ClassVar[int] = 16

    expiry: int | None = None
    doc_flags: int | None = None

    def specs(self) -> list[tuple[int, int, bytes, bytes]]:
        """Opcode, flags, path and value of each."""
        changes, at, data = [], 0, self.value
        while at < len(data):
            if at + SUBDOC_MUTATION_SPEC.size > len(data):
                raise MalformedMessage("subdoc multi mutation: a path is cut off")
            opcode, flags, path_length, length = SUBDOC_MUTATION_SPEC.unpack_from(data, at)
            path_at = at + SUBDOC_MUTATION_SPEC.size
            value_at = path_at + path_length
            at = value_at + length
            if at > len(data):
                raise MalformedMessage("subdoc multi mutation: a path is cut off")
            changes.append((opcode, flags, data[path_at:value_at], data[value_at:at]))
        if len(changes) > self.MAX_PATHS:
            raise MalformedMessage(
                f"subdoc multi mutation: up to {self.MAX_PATHS} paths", Status.SUBDOC_INVALID_COMBO
            )
        return changes

    def check_fields(self) -> None:
        self.specs()


def _check_path(what: str, length: int, value: bytes) -> None:
    if length > len(value):
        raise MalformedMessage(f"{what}: the path is longer than the value")
