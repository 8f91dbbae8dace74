"""Virtual xattrs, which tell about a document, and macros, which write such facts into a real one.

Rules: docs/spec/servers.md#virtual-xattrs-and-macros.
"""

from __future__ import annotations

import json

from ...store.base import VBucket
from ...store.format import StoredDocument
from ...wire.codes import Datatype

__all__ = ["MACROS", "crc32c", "expand", "virtual_xattrs"]

_CAS = '"${Mutation.CAS}"'
_SEQNO = '"${Mutation.seqno}"'
_CRC32C = '"${Mutation.value_crc32c}"'
MACROS = frozenset({_CAS, _SEQNO, _CRC32C})


def virtual_xattrs(
    name: str, vbucket: VBucket, document: StoredDocument, xattrs: dict[str, bytes], body: bytes
) -> str | None:
    """An object with the virtual xattr of this name as its only member; None if there is none."""
    if name == "$document":
        content: object = {
            "CAS": f"0x{document.cas:016x}",
            "vbucket_uuid": f"0x{vbucket.uuid:016x}",
            "seqno": f"0x{document.seqno:016x}",
            "revid": str(document.rev),
            "exptime": document.expiry,
            "flags": document.flags,
            "value_bytes": len(body),
            "value_crc32c": f"0x{crc32c(body):08x}",
            "datatype": _datatype_names(document.datatype),
            "deleted": document.deleted,
            "last_modified": str(document.cas // 1_000_000_000),
        }
    elif name == "$vbucket":
        content = {"HLC": {"now": str(document.cas // 1_000_000_000), "mode": "real"}}
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
    """Put the facts of the write that comes next in the place of the macros."""
    facts = {
        _CAS: f'"0x{cas.to_bytes(8, "little").hex()}"',  # in this byte order, alone of all
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
