"""Events as JSON lines: the one place that knows the format of `tail --json` and `dump`.

64-bit ids and CAS are strings, seqnos are integers. A key or value that is not UTF-8 comes as ``key_base64``
or ``value_base64``. A JSON document is put into the line as it is, so its numbers keep every digit.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..wire.codes import Datatype
from ..wire.fields import is_json
from .events import (
    Aborted,
    Change,
    Committed,
    Deletion,
    Event,
    Expiration,
    Flush,
    Mutation,
    Prepared,
    Rollback,
    SeqnoAdvanced,
    Snapshot,
    StreamEnd,
    SystemEvent,
)
from .kv import Document, Meta, Stored

__all__ = ["change_as_json", "document_as_json", "json_line", "key_member", "value_member"]

_LINE_BREAKS = str.maketrans("\r\n", "  ")
_text = json.JSONEncoder(ensure_ascii=False).encode


CollectionNames = Mapping[int, tuple[str, str]]
"""Scope and name of collections, by id."""


def json_line(
    event: Event, names: CollectionNames = MappingProxyType({}), *, no_value: bool = False
) -> bytes:
    """An event as one line, line feed included; ``names`` are those of its collections, as far as known.

    ``no_value``: values were not requested and are left out; an empty one would look like a document's.
    """
    return (_object(event, names, no_value=no_value) + "\n").encode()


def _object(event: Event, names: CollectionNames, *, no_value: bool) -> str:
    match event:
        case Mutation():
            value = "" if no_value else f"{value_member(event.value, event.datatype)},"
            return (
                f'{{"op":"mutation",{_change(event)},{value}'
                f'"flags":{event.flags},"expiry":{event.expiry},"datatype":"{_type_name(event.datatype)}",'
                f"{_snapshot(event.snapshot)}{_more(event, names)}}}"
            )
        case Deletion() | Expiration():
            op = "deletion" if isinstance(event, Deletion) else "expiration"
            return (
                f'{{"op":"{op}",{_change(event)},"flags":0,"expiry":0,"datatype":"raw",'
                f'"delete_time":{event.delete_time},{_snapshot(event.snapshot)}{_more(event, names)}}}'
            )
        case Prepared():
            value = "" if no_value or event.deleted else f"{value_member(event.value, event.datatype)},"
            return (
                f'{{"op":"prepare",{_change(event)},{value}'
                f'"flags":{event.flags},"expiry":{event.expiry},"datatype":"{_type_name(event.datatype)}",'
                f'"deleted":{_text(event.deleted)},"level":"{event.level}",'
                f"{_snapshot(event.snapshot)}{_more(event, names)}}}"
            )
        case Committed() | Aborted():
            op = "commit" if isinstance(event, Committed) else "abort"
            return (
                f'{{"op":"{op}","vbucket":{event.vbucket},"vb_uuid":"{event.vb_uuid}","seqno":{event.seqno},'
                f'"prepared_seqno":{event.prepared_seqno},{key_member(event.key)},'
                f"{_snapshot(event.snapshot)}{_collection(event.collection_id, names)}}}"
            )
        case Snapshot():
            return (
                f'{{"op":"snapshot","vbucket":{event.vbucket},"vb_uuid":"{event.vb_uuid}",'
                f'"start":{event.start},"end":{event.end},"source":"{event.source}"'
                + (',"history":true}' if event.history else "}")
            )
        case Rollback():
            return (
                f'{{"op":"rollback","vbucket":{event.vbucket},"vb_uuid":"{event.vb_uuid}",'
                f'"seqno":{event.seqno}}}'
            )
        case Flush():
            return f'{{"op":"flush","vbucket":{event.vbucket}}}'
        case SystemEvent():
            return _system(event)
        case SeqnoAdvanced():
            return (
                f'{{"op":"seqno_advanced","vbucket":{event.vbucket},"vb_uuid":"{event.vb_uuid}",'
                f'"seqno":{event.seqno},{_snapshot(event.snapshot)}}}'
            )
        case StreamEnd():
            return f'{{"op":"end","vbucket":{event.vbucket},"reason":{_text(event.reason)}}}'


def _change(event: Change | Prepared) -> str:
    return (
        f'"vbucket":{event.vbucket},"vb_uuid":"{event.vb_uuid}","seqno":{event.seqno},"rev":{event.rev},'
        f'"cas":"{event.cas}",{key_member(event.key)}'
    )


def _snapshot(snapshot: tuple[int, int]) -> str:
    return f'"snapshot":[{snapshot[0]},{snapshot[1]}]'


def _more(event: Change | Prepared, names: CollectionNames) -> str:
    """Members that most changes don't have."""
    xattrs = f',"xattrs":{_text(event.xattrs)}' if event.xattrs else ""
    return _collection(event.collection_id, names) + xattrs


def _collection(collection_id: int, names: CollectionNames) -> str:
    collection = f',"collection_id":{collection_id}' if collection_id else ""
    if collection and collection_id in names:
        scope, name = names[collection_id]
        collection += f',"scope":{_text(scope)},"collection":{_text(name)}'
    return collection


def _system(event: SystemEvent) -> str:
    members: dict[str, Any] = {
        "op": "system",
        "event": event.event,
        "vbucket": event.vbucket,
        "vb_uuid": str(event.vb_uuid),
        "seqno": event.seqno,
        "name": event.name,
        "manifest_uid": f"{event.manifest_uid:x}",
        "scope_id": event.scope_id,
    }
    if event.collection_id is not None:
        members["collection_id"] = event.collection_id
    if event.max_ttl is not None:
        members["max_ttl"] = event.max_ttl
    if event.history is not None:
        members["history"] = event.history
    members["snapshot"] = list(event.snapshot)
    return json.dumps(members, ensure_ascii=False, separators=(",", ":"))


def key_member(key: bytes) -> str:
    """``"key":"…"`` or ``"key_base64":"…"``."""
    return _text_member("key", key)


def value_member(value: bytes, datatype: int) -> str:
    """``"value":…``: a JSON document as it is, text as a string, anything else as base64."""
    if datatype & Datatype.JSON and is_json(value):  # the datatype may lie
        # a line break can only stand between tokens
        return f'"value":{value.decode().translate(_LINE_BREAKS).strip()}'
    return _text_member("value", value)


def document_as_json(key: bytes, document: Document, meta: Meta | None, vbucket: int) -> str:
    """The line of `get --json`."""
    rev, expiry = (meta.rev, meta.expiry) if meta is not None else (0, 0)
    return (
        f'{{{key_member(key)},"vbucket":{vbucket},"rev":{rev},"cas":"{document.cas}",'
        f"{value_member(document.value, document.datatype)},"
        f'"flags":{document.flags},"expiry":{expiry},"datatype":"{_type_name(document.datatype)}"}}'
    )


def change_as_json(key: bytes, change: Stored) -> str:
    """The line of `set --json` and `delete --json`."""
    return (
        f'{{{key_member(key)},"vbucket":{change.vbucket},"vb_uuid":"{change.vb_uuid}",'
        f'"seqno":{change.seqno},"cas":"{change.cas}"}}'
    )


def _text_member(name: str, data: bytes) -> str:
    try:
        return f'"{name}":{_text(data.decode())}'
    except UnicodeDecodeError:
        return f'"{name}_base64":"{base64.b64encode(data).decode()}"'


def _type_name(datatype: int) -> str:
    return "json" if datatype & Datatype.JSON else "raw"
