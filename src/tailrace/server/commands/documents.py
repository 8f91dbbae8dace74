"""Documents: get, set and their relatives, counters, append, touch, locks.

A request's own contents are checked before the vbucket: its value, then its key, as real servers do.

Rules: docs/spec/header.md#document-commands, docs/spec/header.md#order-of-checks.
"""

from __future__ import annotations

from typing import cast

from ...errors import MalformedMessage
from ...large_bytes import LARGE_BYTES
from ...model import MAX_U64
from ...store.base import VBucket
from ...store.format import StoredDocument, counted, datatype_of
from ...wire import kv
from ...wire.codes import Datatype, Op, Status
from ...wire.fields import join_xattrs
from ...wire.message import Message
from ..call import Call, Refused, Reply, command, encode_response
from ..document_values import checked_value, split_document

__all__ = ["LOCKED_CAS", "document_answer", "incoming", "kept_xattrs"]

LOCKED_CAS = MAX_U64
"""The CAS of a locked document, as a reader sees it."""

DEFAULT_LOCK_S = 15
MAX_LOCK_S = 30
_NO_CREATION = 0xFFFF_FFFF
_NOT_PLAIN = int(Datatype.SNAPPY | Datatype.XATTR)


def find_to_send(vbucket: VBucket, key: bytes) -> StoredDocument:
    """The live document, for an answer; 0x01 if there is none. A large value is not cut out: that would copy
    it again.
    """
    frame = vbucket.get(key)
    if frame is None:
        raise Refused(Status.KEY_ENOENT)
    is_left_alone = len(frame) >= LARGE_BYTES and not datatype_of(frame) & _NOT_PLAIN
    return StoredDocument.of(cast("bytes", memoryview(frame)) if is_left_alone else frame)


def incoming(call: Call[Message]) -> tuple[bytes, int]:
    """A request's value and datatype, checked: bits negotiated, inflatable, xattrs sound, JSON or not."""
    request = call.request
    if request.datatype & ~call.session.datatypes:
        raise MalformedMessage(f"datatype 0x{request.datatype:02x} was not negotiated")
    value, datatype = checked_value(request.value, request.datatype, call.node.settings)
    if datatype & Datatype.XATTR:
        call.bucket.xattrs_seen = True
    return value, datatype


def kept_xattrs(
    call: Call[Message], vbucket: VBucket, key: bytes, value: bytes, datatype: int
) -> tuple[bytes, int]:
    """A new value with the xattrs of the document that it replaces, unless it brings its own."""
    if datatype & Datatype.XATTR or not call.bucket.xattrs_seen:
        return value, datatype
    frame = vbucket.get(key)
    if frame is None or not datatype_of(frame) & Datatype.XATTR:
        return value, datatype
    limit = call.node.settings.max_inflated
    old = StoredDocument.of(frame)
    xattrs, _, _ = split_document(old.value, old.datatype, limit)
    _, body, body_datatype = split_document(value, datatype, limit)
    return join_xattrs(xattrs, body), body_datatype | Datatype.XATTR


def document_answer(
    call: Call[Message], document: StoredDocument, cas: int, key: bytes = b"", *, with_xattrs: bool = False
) -> bytes:
    """A document as the peer may see it: without xattrs, and inflated if it does not know snappy."""
    value, datatype = document.value, document.datatype
    session = call.session
    hidden = datatype & Datatype.XATTR and not with_xattrs
    if hidden or datatype & Datatype.SNAPPY & ~session.datatypes:
        xattrs, body, datatype = split_document(value, datatype, call.node.settings.max_inflated)
        value = body
        if with_xattrs and xattrs:
            value, datatype = join_xattrs(xattrs, body), datatype | Datatype.XATTR
    request = call.request
    return encode_response(
        request.OPCODE,
        request.opaque,
        cas=cas,
        extras=document.flags.to_bytes(4, "big"),
        key=key,
        value=value,
        datatype=datatype & session.datatypes,
    )


@command(kv.Get, kv.GetQ, kv.GetK, kv.GetKQ)
def get(call: Call[kv.Get]) -> Reply:
    key, vbucket = call.key(), call.vbucket()
    call.node.counters.cmd_get += 1
    document = find_to_send(vbucket, key)
    call.node.counters.get_hits += 1
    cas = LOCKED_CAS if vbucket.is_locked(key) else document.cas
    with_key = call.request.OPCODE in (Op.GETK, Op.GETKQ)
    return document_answer(call, document, cas, call.request.key if with_key else b"")


@command(kv.GetReplica)
def get_replica(call: Call[kv.GetReplica]) -> Reply:
    """The document as it is here, perhaps older than on the active. Only the active has locks."""
    key, vbucket = call.key(), call.replica()
    call.node.counters.cmd_get += 1
    document = find_to_send(vbucket, key)
    call.node.counters.get_hits += 1
    return document_answer(call, document, document.cas)


@command(kv.Set, kv.SetQ, kv.Add, kv.AddQ, kv.Replace, kv.ReplaceQ, writes=True)
def store(call: Call[kv.Set]) -> Reply:
    request = call.request
    value, datatype = incoming(call)
    key, vbucket = call.key(), call.vbucket()
    expiry = call.expiry(request.expiry)
    if call.preserve_ttl and (frame := vbucket.get(key)) is not None:
        expiry = StoredDocument.of(frame).expiry
    call.node.counters.cmd_set += 1
    if request.OPCODE in (Op.ADD, Op.ADDQ):
        written = vbucket.add(key, value, request.flags, expiry, datatype)
    else:
        value, datatype = kept_xattrs(call, vbucket, key, value, datatype)
        write = vbucket.set if request.OPCODE in (Op.SET, Op.SETQ) else vbucket.replace
        written = write(key, value, request.flags, expiry, datatype, request.cas)
    return call.written(vbucket, written)


@command(kv.Delete, kv.DeleteQ, writes=True)
def delete(call: Call[kv.Delete]) -> Reply:
    """A peer that did not ask for uuid and seqno gets CAS 0: docs/spec/bootstrap.md#cas-of-a-delete."""
    key, vbucket = call.key(), call.vbucket()
    return call.written(vbucket, vbucket.delete(key, call.request.cas), with_cas=False)


@command(kv.Increment, kv.IncrementQ, kv.Decrement, kv.DecrementQ, writes=True)
def count(call: Call[kv.Increment]) -> Reply:
    request, key, vbucket = call.request, call.key(), call.vbucket()
    delta = request.delta if request.OPCODE in (Op.INCREMENT, Op.INCREMENTQ) else -request.delta
    frame = vbucket.get(key)
    if frame is not None and datatype_of(frame) & _NOT_PLAIN:
        old = StoredDocument.of(frame)
        xattrs, body, datatype = split_document(old.value, old.datatype, call.node.settings.max_inflated)
        number = counted(body, delta)
        value = b"%d" % number
        if xattrs:
            value, datatype = join_xattrs(xattrs, value), datatype | Datatype.XATTR
        written = vbucket.replace(key, value, old.flags, old.expiry, datatype)
        return call.written(vbucket, written, number.to_bytes(8, "big"))
    creates = request.expiry != _NO_CREATION
    number, written = vbucket.counter(
        key,
        delta,
        request.initial if creates else None,
        call.expiry(request.expiry) if creates else 0,
    )
    return call.written(vbucket, written, number.to_bytes(8, "big"))


@command(kv.Append, kv.AppendQ, kv.Prepend, kv.PrependQ, writes=True)
def append(call: Call[kv.Append]) -> Reply:
    """The whole new value is checked again: JSON with something appended is not JSON."""
    request, settings = call.request, call.node.settings
    value, datatype = incoming(call)
    if datatype & Datatype.XATTR:
        raise MalformedMessage("xattrs can't be appended")
    key, vbucket = call.key(), call.vbucket()
    _, more, _ = split_document(value, datatype, settings.max_inflated)
    frame = vbucket.get(key)
    if frame is None:
        raise Refused(Status.NOT_STORED)
    old = StoredDocument.of(frame)
    xattrs, body, _ = split_document(old.value, old.datatype, settings.max_inflated)
    body = body + more if request.OPCODE in (Op.APPEND, Op.APPENDQ) else more + body
    whole = join_xattrs(xattrs, body) if xattrs else body
    whole, datatype = checked_value(whole, Datatype.XATTR if xattrs else 0, settings)
    written = vbucket.replace(key, whole, old.flags, old.expiry, datatype, request.cas)
    return call.written(vbucket, written)


@command(kv.Touch, kv.Gat, kv.GatQ, writes=True)
def touch(call: Call[kv.Touch]) -> Reply:
    key, vbucket = call.key(), call.vbucket()
    frame, written = vbucket.touch(key, call.expiry(call.request.expiry))
    if call.request.OPCODE == Op.TOUCH:
        return call.success(cas=written.cas)
    return document_answer(call, StoredDocument.of(frame), written.cas)


@command(kv.GetLocked)
def get_locked(call: Call[kv.GetLocked]) -> Reply:
    key, vbucket = call.key(), call.vbucket()
    lock_s = call.request.lock_s or 0
    if not 0 < lock_s <= MAX_LOCK_S:
        lock_s = DEFAULT_LOCK_S
    frame, cas = vbucket.get_locked(key, lock_s)
    call.bucket.store.cache.pop(key, None)  # while it is locked, readers see another CAS
    return document_answer(call, StoredDocument.of(frame), cas)


@command(kv.UnlockKey)
def unlock(call: Call[kv.UnlockKey]) -> Reply:
    key, vbucket = call.key(), call.vbucket()
    vbucket.unlock(key, call.request.cas)
    return call.success()
