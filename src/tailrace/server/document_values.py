"""What a value is: JSON or not, compressed or not, with xattrs or without.

The server does not trust a client that says "JSON": it looks, as real servers do, so that the bit on a
stored document can be trusted by everybody who reads it.

Rules: docs/spec/header.md#datatype, docs/spec/header.md#xattr-section.
"""

from __future__ import annotations

from .. import snappy
from ..errors import MalformedMessage
from ..wire.codes import Datatype, Status
from ..wire.fields import is_json, join_xattrs, split_xattrs
from .settings import Settings

__all__ = [
    "MAX_SYSTEM_XATTRS",
    "checked_value",
    "inflate",
    "split_document",
    "system_xattrs",
    "tombstone_value",
]

_SYSTEM_XATTR = "_"
_MAX_XATTR_NAME = 15
MAX_SYSTEM_XATTRS = 1 << 20
"""Bytes of a document's system xattrs, which may come on top of the largest value."""


def inflate(value: bytes, datatype: int, limit: int) -> tuple[bytes, int]:
    """A value without compression, and its datatype without that bit."""
    if not datatype & Datatype.SNAPPY:
        return value, datatype
    return snappy.inflate(value, limit), datatype & ~Datatype.SNAPPY


def split_document(value: bytes, datatype: int, limit: int) -> tuple[dict[str, bytes], bytes, int]:
    """Xattrs, body and the body's datatype of a stored value."""
    value, datatype = inflate(value, datatype, limit)
    if not datatype & Datatype.XATTR:
        return {}, value, datatype
    xattrs, body = split_xattrs(value)
    return xattrs, body, datatype & ~Datatype.XATTR


def too_large(size: int, settings: Settings) -> str:
    """Why a value is refused, in words."""
    return f"a value of {size} bytes is too large: the limit is {settings.max_value} (setting max_value)"


def checked_value(value: bytes, datatype: int, settings: Settings) -> tuple[bytes, int]:
    """A value that a client sends, and its true datatype; refused if it is not what its datatype says."""
    plain, kind = inflate(value, datatype, settings.max_inflated)
    body = plain
    if kind & Datatype.XATTR:
        xattrs, body = split_xattrs(plain)
        for name in xattrs:
            if len(name.encode()) > _MAX_XATTR_NAME:
                raise MalformedMessage("an xattr's name is too long", Status.XATTR_EINVAL)
    if len(body) > settings.max_value:
        raise MalformedMessage(too_large(len(body), settings), Status.E2BIG)
    if len(body) <= settings.max_json_check:
        is_document = is_json(body)
        datatype = datatype | Datatype.JSON if is_document else datatype & ~Datatype.JSON
    return value, int(datatype)


def system_xattrs(xattrs: dict[str, bytes]) -> dict[str, bytes]:
    """The xattrs that outlive their document."""
    return {name: text for name, text in xattrs.items() if name.startswith(_SYSTEM_XATTR)}


def tombstone_value(value: bytes, datatype: int) -> tuple[bytes, int]:
    """What a deletion keeps of a value with xattrs: the system ones."""
    try:
        xattrs, _, _ = split_document(value, datatype, 30 << 20)
    except MalformedMessage:
        return b"", 0
    kept = system_xattrs(xattrs)
    return (join_xattrs(kept, b""), int(Datatype.XATTR)) if kept else (b"", 0)
