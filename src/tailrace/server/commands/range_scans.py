"""Range scans: make one, take the next documents, end it.

Rules: docs/spec/servers.md#range-scans.
"""

from __future__ import annotations

import struct

from ...errors import MalformedMessage
from ...store.base import VBucket
from ...store.format import StoredDocument
from ...wire import kv
from ...wire.codes import Datatype, Feature, Status
from ...wire.fields import decode_leb128, encode_leb128, join_xattrs
from ..call import Call, Refused, Reply, command, encode_response
from ..range_scans import RangeScan, ScanRequest
from ..values import split_document

_ITEM = struct.Struct(">IIQQB")
_MOST_BYTES = 1 << 20
"""Of one answer, whatever the client allows: others wait for the loop."""
_MOST_ITEMS = 10_000


@command(kv.RangeScanCreate)
def create(call: Call[kv.RangeScanCreate]) -> Reply:
    """At once, or when what it needs is on disk."""
    if call.request.datatype & ~call.session.datatypes:
        raise MalformedMessage(f"datatype 0x{call.request.datatype:02x} was not negotiated")
    wanted = ScanRequest.parse(call.request.value)
    if wanted.include_xattrs and Feature.RANGE_SCAN_INCLUDE_XATTR not in call.session.features:
        raise MalformedMessage("xattrs were not negotiated for range scans")
    vbucket = call.vbucket()
    if wanted.collection and not call.session.granted.prefixed_keys:
        raise MalformedMessage("a collection is named, but collections were not negotiated")
    call.check_collection(wanted.collection)
    scans = call.bucket.range_scans
    scans.make_room(call.now)
    if wanted.vb_uuid is not None and wanted.vb_uuid != vbucket.uuid:
        raise Refused(Status.VB_UUID_NOT_EQUAL, f"the vbucket is on branch {vbucket.uuid}")
    if vbucket.persisted_seqno >= wanted.seqno:
        return call.success(value=scans.make(vbucket, wanted, call.session, call.now))
    if not wanted.timeout_ms:
        raise Refused(Status.ETMPFAIL, f"seqno {wanted.seqno} is not on disk yet")
    pending = call.defer(wanted.timeout_ms / 1000)

    def persisted(ok: bool) -> None:
        if pending.is_over:
            return
        try:
            if not ok:
                raise Refused(Status.VB_UUID_NOT_EQUAL, "that seqno was rolled back")
            scans.make_room(call.now)
            pending.succeed(call.success(value=scans.make(vbucket, wanted, call.session, call.now)))
        except Refused as refusal:
            pending.fail(refusal.status, refusal.context)

    call.wait_for_disk(vbucket, wanted.seqno, persisted)
    return pending


@command(kv.RangeScanContinue)
def go_on(call: Call[kv.RangeScanContinue]) -> Reply:
    """The next documents; at least one, unless that was all."""
    request, scans = call.request, call.bucket.range_scans
    vbucket = call.vbucket()
    scan = scans.find(request.scan_id, vbucket.id, call.now)
    if scan.request.collection not in call.bucket.collections:
        scans.end(request.scan_id)
        raise call.unknown(Status.UNKNOWN_COLLECTION)
    scan.session = call.session
    most_items = min(request.max_items or _MOST_ITEMS, _MOST_ITEMS)
    most_bytes = min(request.max_bytes or _MOST_BYTES, _MOST_BYTES)
    out = bytearray()
    count = 0
    while scan.keys and count < most_items and len(out) < most_bytes:
        item = _item(call, vbucket, scan, scan.keys.pop())
        if item is not None:
            out += item
            count += 1
    status = Status.RANGE_SCAN_MORE
    if not scan.keys:
        status = Status.RANGE_SCAN_COMPLETE
        scans.end(request.scan_id)
    kind = int(not scan.request.key_only).to_bytes(4, "big")
    return encode_response(request.OPCODE, request.opaque, status, extras=kind, value=bytes(out))


@command(kv.RangeScanCancel)
def cancel(call: Call[kv.RangeScanCancel]) -> Reply:
    scans = call.bucket.range_scans
    scans.find(call.request.scan_id, call.any_vbucket().id, call.now)
    scans.end(call.request.scan_id)
    return call.success()


def _item(call: Call[kv.RangeScanContinue], vbucket: VBucket, scan: RangeScan, key: bytes) -> bytes | None:
    """A key or document as it goes into an answer; None if it is gone."""
    frame = vbucket.get(key)
    if frame is None:
        return None
    plain_key = key[decode_leb128(key)[1] :]
    named = encode_leb128(len(plain_key)) + plain_key
    if scan.request.key_only:
        return named
    document = StoredDocument.of(frame)
    xattrs, value, datatype = split_document(
        document.value, document.datatype, call.node.settings.max_inflated
    )
    if xattrs and scan.request.include_xattrs:
        value, datatype = join_xattrs(xattrs, value), datatype | Datatype.XATTR
    head = _ITEM.pack(
        document.flags, document.expiry, document.seqno, document.cas, datatype & call.session.datatypes
    )
    return b"".join((head, named, encode_leb128(len(value)), value))
