"""Range scans: make one, take the next documents, end it.

Rules: docs/spec/servers.md#range-scans.
"""

from __future__ import annotations

import math

from ...errors import MalformedMessage
from ...store.base import VBucket
from ...store.format import StoredDocument
from ...wire import kv
from ...wire.codes import Datatype, Feature, Status
from ...wire.fields import decode_leb128, encode_leb128, join_xattrs
from ..call import Call, Refused, Reply, command, encode_response
from ..document_values import split_document
from ..range_scans import RangeScan, ScanRequest

_MOST_BYTES = 1 << 20
"""In one answer, whatever the client allows: others wait for the loop."""
_MOST_ITEMS = 2_000


@command(kv.RangeScanCreate)
def create(call: Call[kv.RangeScanCreate]) -> Reply:
    """Answered at once, or when what it needs is on disk."""
    if call.request.datatype & ~call.session.datatypes:
        raise MalformedMessage(f"datatype 0x{call.request.datatype:02x} was not negotiated")
    wanted = ScanRequest.parse(call.request.value)
    if wanted.include_xattrs and Feature.RANGE_SCAN_INCLUDE_XATTR not in call.session.features:
        raise MalformedMessage("xattrs were not negotiated for range scans")
    vbucket = _checked(call, wanted)
    if vbucket.persisted_seqno >= wanted.seqno:
        return _new_scan(call, vbucket, wanted)
    if not wanted.timeout_ms:
        raise Refused(Status.ETMPFAIL, f"seqno {wanted.seqno} is not on disk yet")
    pending = call.defer(wanted.timeout_ms / 1000)

    def persisted(ok: bool) -> None:
        if pending.is_over:
            return
        try:
            if not ok:
                raise Refused(Status.VB_UUID_NOT_EQUAL, "that seqno was rolled back")
            pending.succeed(_new_scan(call, _checked(call, wanted), wanted))  # much may be different by now
        except Refused as refusal:
            pending.fail(refusal.status, refusal.context)

    call.wait_for_disk(vbucket, wanted.seqno, persisted, pending)
    return pending


def _checked(call: Call[kv.RangeScanCreate], wanted: ScanRequest) -> VBucket:
    """The vbucket, if it and the collection can be scanned now."""
    vbucket = call.vbucket()
    if wanted.collection and not call.session.granted.prefixed_keys:
        raise MalformedMessage("a collection is named, but collections were not negotiated")
    call.check_collection(wanted.collection)
    call.bucket.range_scans.make_room(call.node.clock.monotonic())
    if wanted.vb_uuid is not None and wanted.vb_uuid != vbucket.uuid:
        raise Refused(Status.VB_UUID_NOT_EQUAL, f"the vbucket is on branch {vbucket.uuid}")
    return vbucket


def _new_scan(call: Call[kv.RangeScanCreate], vbucket: VBucket, wanted: ScanRequest) -> bytes:
    now = call.node.clock.monotonic()  # it may have waited for longer than a scan lives
    return call.success(value=call.bucket.range_scans.make(vbucket, wanted, call.session, now))


@command(kv.RangeScanContinue)
def go_on(call: Call[kv.RangeScanContinue]) -> Reply:
    """The next documents; perhaps none, if many are gone."""
    request, scans = call.request, call.bucket.range_scans
    vbucket = call.vbucket()
    scan = scans.find(request.scan_id, vbucket.id, call.now)
    if scan.request.collection not in call.bucket.collections:
        scans.end(request.scan_id)
        raise call.unknown(Status.UNKNOWN_COLLECTION)
    scan.session = call.session
    most_items = min(request.max_items or _MOST_ITEMS, _MOST_ITEMS)
    most_bytes = min(request.max_bytes or _MOST_BYTES, _MOST_BYTES)
    clock = call.node.clock
    ends_at = clock.monotonic() + request.max_ms / 1000 if request.max_ms else math.inf
    out = bytearray()
    count = looked_at = 0
    while scan.keys and count < most_items and looked_at < _MOST_ITEMS and len(out) < most_bytes:
        if looked_at and clock.monotonic() >= ends_at:
            break
        looked_at += 1
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
    head = kv.RANGE_SCAN_ITEM.pack(
        document.flags, document.expiry, document.seqno, document.cas, datatype & call.session.datatypes
    )
    return b"".join((head, named, encode_leb128(len(value)), value))
