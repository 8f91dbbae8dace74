"""Virtual xattrs, which describe a document, and macros, which write such facts into a real xattr.

Rules: docs/spec/servers.md#virtual-xattrs-and-macros.
"""

from __future__ import annotations

import json
import re

from ...store.base import VBucket
from ...store.format import StoredDocument
from ...wire.codes import Datatype

__all__ = ["MACROS", "crc32c", "document_facts", "document_macro", "expand", "virtual_xattrs"]

_CAS = '"${Mutation.CAS}"'
_SEQNO = '"${Mutation.seqno}"'
_CRC32C = '"${Mutation.value_crc32c}"'
MACROS = frozenset({_CAS, _SEQNO, _CRC32C})
_DOCUMENT_MACRO = re.compile(r'"\$\{\$document(?:\.([^}"]+))?\}"')


def document_facts(vbucket: VBucket, document: StoredDocument | None, body: bytes) -> dict[str, object]:
    """The members of ``$document``; for a document that does not exist yet, whatever can be 0 is."""
    cas, seqno, rev, expiry, flags = 0, 0, 0, 0, 0
    if document is not None:
        cas, seqno, rev = document.cas, document.seqno, document.rev
        expiry, flags = document.expiry, document.flags
    return {
        "CAS": f"0x{cas:016x}",
        "vbucket_uuid": f"0x{vbucket.uuid:016x}",
        "seqno": f"0x{seqno:016x}",
        "revid": str(rev),
        "exptime": expiry,
        "flags": flags,
        "value_bytes": len(body),
        "value_crc32c": f"0x{crc32c(body):08x}",
        "datatype": _datatype_names(0 if document is None else document.datatype),
        "deleted": document is not None and document.deleted,
        "last_modified": str(cas // 1_000_000_000),
    }


def document_macro(text: str) -> str | None:
    """The member that ``"${$document.NAME}"`` asks for, "" for all of them; None for any other text."""
    match = _DOCUMENT_MACRO.fullmatch(text)
    return None if match is None else match[1] or ""


def virtual_xattrs(  # noqa: PLR0917 - the document, taken apart
    name: str, vbucket: VBucket, document: StoredDocument, xattrs: dict[str, bytes], body: bytes, now_s: int
) -> str | None:
    """An object with the virtual xattr of this name as its only member; None if there is none."""
    if name == "$document":
        content: object = document_facts(vbucket, document, body)
    elif name == "$vbucket":
        content = {"HLC": {"now": str(now_s), "mode": "real"}}
    elif name == "$XTOC":
        content = list(xattrs)
    else:
        return None
    return json.dumps({name: content})


def _datatype_names(datatype: int) -> list[str]:
    names = [
        name
        for bit, name in ((Datatype.JSON, "json"), (Datatype.SNAPPY, "snappy"), (Datatype.XATTR, "xattr"))
        if datatype & bit
    ]
    return names or ["raw"]


def expand(xattrs: dict[str, bytes], vbucket: VBucket, body: bytes, cas: int) -> None:
    """Replace the macros with the facts of the write that comes next."""
    facts = {
        _CAS: f'"0x{cas.to_bytes(8, "little").hex()}"',  # the only one in this byte order
        _SEQNO: f'"0x{vbucket.high_seqno + 1:016x}"',
        _CRC32C: f'"0x{crc32c(body):08x}"',
    }
    for name, text in xattrs.items():
        for macro, fact in facts.items():
            text = text.replace(macro.encode(), fact.encode())
        xattrs[name] = text


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC32C_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The Castagnoli CRC, which the standard library does not have."""
    crc = 0xFFFF_FFFF
    table = _CRC32C_TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF
