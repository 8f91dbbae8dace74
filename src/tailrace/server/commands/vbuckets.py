"""VBuckets, seqnos and persistence.

Rules: docs/spec/header.md#vbucket-commands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ...errors import MalformedMessage, StoreError
from ...store.base import Compaction, VBucket
from ...store.format import StoredDocument
from ...wire import admin
from ...wire.codes import Datatype, Feature, Status, VBucketState
from ...wire.fields import encode_failover_log
from ..call import Call, Refused, Reply, command
from ..replication import parse_orders

_ALIVE = (VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.PENDING)

_NOT_PERSISTED, _PERSISTED, _NOT_FOUND, _DELETED = 0x00, 0x01, 0x80, 0x81


@command(admin.SetVBucket)
def set_vbucket(call: Call[admin.SetVBucket]) -> Reply:
    """Creates a vbucket or changes its state; that is on disk when it is answered: a caller that learns that
    a vbucket is dead here makes it active elsewhere.
    """
    request, bucket = call.request, call.bucket
    if request.vbucket >= bucket.store.vbucket_count:
        raise Refused(Status.ERANGE, f"the bucket has {bucket.store.vbucket_count} vbuckets")
    extra = _json_object(request.value) if request.value else None
    pending = call.defer(call.node.settings.persist_timeout)

    def act() -> None:
        try:
            with call.node.watching_history(bucket, [request.vbucket], "failover", why="promoted"):
                bucket.store.set_state(request.vbucket, request.state, extra=extra)
        except StoreError as error:
            pending.fail(getattr(error, "status", Status.EINTERNAL), str(error))
            return
        call.node.vbucket_changed(bucket, request.vbucket)
        bucket.work.after_flush(pending.settle)

    bucket.work.exclusively(act)
    return pending


def _json_object(text: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedMessage("the value is not JSON") from None
    if not isinstance(content, dict):
        raise MalformedMessage("the value is not a JSON object")
    return content


@command(admin.GetVBucket)
def get_vbucket(call: Call[admin.GetVBucket]) -> Reply:
    return call.success(value=int(call.any_vbucket().state).to_bytes(4, "big"))


@command(admin.DelVBucket)
def delete_vbucket(call: Call[admin.DelVBucket]) -> Reply:
    """Deletes a dead vbucket; it is gone when this is answered, with or without ``async=0``."""
    bucket, at = call.bucket, call.request.vbucket
    if call.any_vbucket().state != VBucketState.DEAD:
        raise MalformedMessage("a vbucket must be dead before it is deleted")
    pending = call.defer(call.node.settings.persist_timeout)

    def act() -> None:
        try:
            bucket.store.delete_vbucket(at)
        except StoreError as error:
            pending.fail(getattr(error, "status", Status.EINTERNAL), str(error))
            return
        call.node.vbucket_changed(bucket, at)
        pending.succeed(call.success())

    bucket.work.exclusively(act)
    return pending


@command(admin.GetAllVbSeqnos)
def get_all_vb_seqnos(call: Call[admin.GetAllVbSeqnos]) -> Reply:
    """For an active vbucket the high seqno, for others the end of the snapshot that they are receiving; for
    one collection the last seqno in it. A peer without collections sees only the default one. A peer that
    gets no prepares does not see their seqnos: it would wait for them for ever.
    """
    request, has_collections = call.request, Feature.COLLECTIONS in call.session.features
    hears_of_prepares = has_collections and Feature.SYNC_REPLICATION in call.session.features
    if request.state is None:
        states: tuple[int, ...] = (VBucketState.ACTIVE,)  # what older readers mean
    else:
        states = (request.state,) if request.state else _ALIVE
    if request.collection_id is not None:
        if not has_collections:
            raise MalformedMessage("a collection is named, but collections were not negotiated")
        call.check_collection(request.collection_id)
    is_plain = has_collections or not call.bucket.collections.manifest.uid

    def seqno(vbucket: VBucket) -> int:
        if request.collection_id is not None or not is_plain:
            return vbucket.collection_high_seqno([request.collection_id or 0])
        if not hears_of_prepares and vbucket.high_seqno >= vbucket.received.end:
            return vbucket.visible_seqno
        return max(vbucket.high_seqno, vbucket.received.end)  # one that was active has received nothing

    vbuckets = [vbucket for vbucket in call.bucket.store if vbucket.state in states]
    return call.success(
        value=b"".join(admin.VB_SEQNO.pack(vbucket.id, seqno(vbucket)) for vbucket in vbuckets)
    )


@command(admin.GetFailoverLog)
def get_failover_log(call: Call[admin.GetFailoverLog]) -> Reply:
    vbucket = call.any_vbucket()
    if vbucket.state == VBucketState.DEAD:
        raise call.session.not_my_vbucket_refusal()
    entries = [(entry.vb_uuid, entry.seqno) for entry in vbucket.failover_log.entries]
    return call.success(value=encode_failover_log(entries))


@command(admin.ObserveSeqno)
def observe_seqno(call: Call[admin.ObserveSeqno]) -> Reply:
    vbucket = call.any_vbucket()
    if vbucket.state == VBucketState.DEAD:
        raise call.session.not_my_vbucket_refusal()
    uuid = call.request.vb_uuid
    # The caller wants to know what no failover takes back, and a promotion takes back a snapshot that is not
    # complete on disk: docs/spec/servers.md#observe-seqno-of-a-part.
    fields = (vbucket.id, vbucket.uuid, vbucket.persisted_snapshot.start, vbucket.high_seqno)
    entries = vbucket.failover_log.entries
    if uuid == entries[0].vb_uuid:
        return call.success(value=admin.OBSERVE_SEQNO_SAME.pack(0, *fields))
    for newer, older in pairwise(entries):
        if older.vb_uuid == uuid:
            # that history ended where the next branch began
            return call.success(value=admin.OBSERVE_SEQNO_FAILED_OVER.pack(1, *fields, uuid, newer.seqno))
    raise Refused(Status.KEY_ENOENT, "the vbucket has no such branch")


@command(admin.Observe)
def observe(call: Call[admin.Observe]) -> Reply:
    """Whether documents are on disk; a deletion that is not yet there is "logically deleted"."""
    out = bytearray()
    for vbucket_id, raw_key in call.request.records():
        vbucket = call.any_vbucket(vbucket_id)
        if vbucket.state not in (VBucketState.ACTIVE, VBucketState.REPLICA):
            raise call.session.not_my_vbucket_refusal()
        key = call.stored_key(raw_key)
        vbucket.get(key)  # what has expired becomes a tombstone first
        frame = vbucket.get_any(key)
        state, cas = _NOT_FOUND, 0
        if frame is not None:
            document = StoredDocument.of(frame)
            persisted = document.seqno <= vbucket.persisted_seqno
            cas = document.cas
            if document.deleted:
                state = _NOT_FOUND if persisted else _DELETED
            else:
                state = _PERSISTED if persisted else _NOT_PERSISTED
        out += (
            admin.OBSERVED_KEY.pack(vbucket_id, len(raw_key))
            + raw_key
            + admin.OBSERVED_STATE.pack(state, cas)
        )
    return call.success(value=bytes(out))


@command(admin.SeqnoPersistence)
def seqno_persistence(call: Call[admin.SeqnoPersistence]) -> Reply:
    """Answered when everything up to the seqno is on disk."""
    vbucket, seqno = call.any_vbucket(), call.request.seqno
    if vbucket.state == VBucketState.DEAD:
        raise call.session.not_my_vbucket_refusal()
    if vbucket.persisted_seqno >= seqno:
        return call.success()
    pending = call.defer(call.node.settings.persist_timeout)

    def persisted(ok: bool) -> None:
        if ok:
            pending.succeed(call.success())
        else:
            pending.fail(Status.ETMPFAIL, "that seqno was rolled back")

    call.wait_for_disk(vbucket, seqno, persisted, pending)
    return pending


@command(admin.StopPersistence)
def stop_persistence(call: Call[admin.StopPersistence]) -> Reply:
    """From now on nothing is written to disk: a kill loses it."""
    call.bucket.store.persistence = False
    return call.success()


@command(admin.StartPersistence)
def start_persistence(call: Call[admin.StartPersistence]) -> Reply:
    call.bucket.store.persistence = True
    call.bucket.work.flush_wanted = True
    return call.success()


@command(admin.Compact)
def compact(call: Call[admin.Compact]) -> Reply:
    """Answered when it is done."""
    request = call.request
    vbucket = call.any_vbucket()
    pending = call.defer(call.node.settings.compact_timeout)

    compaction = Compaction(
        vbuckets=[vbucket.id],
        purge_before_time_s=request.purge_before_s,
        purge_before_seqno=request.purge_before_seqno,
        drop_tombstones=bool(request.drop_deletes),
    )
    call.bucket.work.compact(compaction, pending.settle)
    return pending


@command(admin.LastClosedCheckpoint)
def last_closed_checkpoint(call: Call[admin.LastClosedCheckpoint]) -> Reply:
    """Obsolete, and cheap to answer."""
    return call.success(value=(call.any_vbucket().checkpoint_id - 1).to_bytes(8, "big"))


@command(admin.Replicate)
def replicate(call: Call[admin.Replicate]) -> Reply:
    """Sets which vbuckets this node receives from others; answers the state of all."""
    bucket, node = call.bucket, call.node
    replication = node.replication[bucket.name]
    if call.request.value:
        orders = parse_orders(_json_object(call.request.value), bucket.store.vbucket_count)
        replication.order(orders, call.now)
    body = json.dumps({"vbuckets": replication.status()}, separators=(",", ":")).encode()
    return call.success(value=body, datatype=Datatype.JSON & call.session.datatypes)
