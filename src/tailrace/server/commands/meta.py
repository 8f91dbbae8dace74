"""Documents with the metadata that they have elsewhere.

Rules: docs/spec/header.md#with-meta-commands, docs/spec/header.md#conflict-resolution.
"""

from __future__ import annotations

from ...errors import MalformedMessage
from ...store.format import StoredDocument
from ...wire import kv
from ...wire.codes import Datatype, Op, Status, WithMetaOption
from ..call import Call, Refused, Reply, command
from ..document_values import checked_value
from .documents import LOCKED_CAS

_KNOWN_OPTIONS = int(
    WithMetaOption.FORCE_ACCEPT
    | WithMetaOption.REGENERATE_CAS
    | WithMetaOption.SKIP_CONFLICT_RESOLUTION
    | WithMetaOption.IS_EXPIRATION
)
_ADDS = (Op.ADD_WITH_META, Op.ADDQ_WITH_META)
_DELETES = (Op.DEL_WITH_META, Op.DELQ_WITH_META)


@command(kv.GetMeta, kv.GetMetaQ)
def get_meta(call: Call[kv.GetMeta]) -> Reply:
    """Answers for a tombstone too, and says so."""
    key, vbucket = call.key(), call.vbucket()
    vbucket.get(key)  # what has expired becomes a tombstone first
    frame = vbucket.get_any(key)
    if frame is None:
        raise Refused(Status.KEY_ENOENT)
    document = StoredDocument.of(frame)
    answer = kv.GetMetaResponse(
        opcode=call.request.OPCODE,
        opaque=call.request.opaque,
        cas=document.cas,
        deleted=int(document.deleted),
        flags=document.flags,
        expiry=document.expiry,
        rev_seqno=document.rev,
        stored_datatype=document.datatype if call.request.version == 2 else None,
    )
    return answer.encode()


@command(
    kv.SetWithMeta,
    kv.SetWithMetaQ,
    kv.AddWithMeta,
    kv.AddWithMetaQ,
    kv.DelWithMeta,
    kv.DelWithMetaQ,
    writes=True,
)
def store_with_meta(call: Call[kv.SetWithMeta]) -> Reply:
    request, deletes = call.request, call.request.OPCODE in _DELETES
    if request.datatype & ~call.session.datatypes:
        raise MalformedMessage(f"datatype 0x{request.datatype:02x} was not negotiated")
    if deletes and request.document and not request.datatype & Datatype.XATTR:
        raise MalformedMessage("a deletion has no body, only xattrs")
    value, datatype = checked_value(request.document, request.datatype, call.node.settings)
    key, vbucket = call.key(), call.vbucket()
    options = _options(call)
    resolve = not options & WithMetaOption.SKIP_CONFLICT_RESOLUTION
    regenerate_cas = bool(options & WithMetaOption.REGENERATE_CAS)
    if not regenerate_cas and not 0 < request.meta_cas < LOCKED_CAS:
        raise Refused(Status.KEY_EEXISTS, "the CAS to store is not a CAS")
    if datatype & Datatype.XATTR:
        call.bucket.xattrs_seen = True
    if deletes:
        written = vbucket.delete_with_meta(
            key,
            request.flags,
            request.expiry,
            request.rev_seqno,
            request.meta_cas,
            value,
            datatype & ~Datatype.JSON,
            cas=request.cas,
            resolve=resolve,
            regenerate_cas=regenerate_cas,
            expiration=bool(options & WithMetaOption.IS_EXPIRATION),
        )
        return call.written(vbucket, written)
    written = vbucket.set_with_meta(
        key,
        value,
        request.flags,
        request.expiry,
        request.rev_seqno,
        request.meta_cas,
        datatype,
        cas=request.cas,
        add=request.OPCODE in _ADDS,
        resolve=resolve,
        regenerate_cas=regenerate_cas,
    )
    return call.written(vbucket, written)


def _options(call: Call[kv.SetWithMeta]) -> int:
    options = call.request.options or 0
    if options & ~_KNOWN_OPTIONS:
        raise MalformedMessage(f"options 0x{options:x} are not known")
    if options & WithMetaOption.REGENERATE_CAS and not options & WithMetaOption.SKIP_CONFLICT_RESOLUTION:
        raise MalformedMessage("regenerating the CAS requires skipping conflict resolution")
    if options & WithMetaOption.IS_EXPIRATION and call.request.OPCODE not in _DELETES:
        raise MalformedMessage("only a deletion can be an expiration")
    by_cas = call.bucket.store.settings.last_write_wins
    forced = bool(options & WithMetaOption.FORCE_ACCEPT)
    if by_cas and not forced and not options & WithMetaOption.REGENERATE_CAS:
        raise MalformedMessage("a last-write-wins bucket needs to be forced to accept")
    if forced and not by_cas:
        raise MalformedMessage("forced acceptance is only for last-write-wins buckets")
    return options
