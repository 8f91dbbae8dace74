"""The error map: what each status means, for clients that ask instead of knowing.

Clients decide by the attributes whether to try again, so they matter more than the texts. Versions 1 and 2
have the same shape; version 2 has more attributes.

Rules: docs/spec/header.md#connection-commands, docs/spec/header.md#status-codes.
"""

from __future__ import annotations

import json
from functools import cache

from ..wire.codes import Status

__all__ = ["error_map"]

REVISION = 1

_V2_ATTRIBUTES = frozenset({"rate-limit", "success", "item-deleted"})

# name: description, attributes
_ERRORS: dict[Status, tuple[str, str]] = {
    Status.SUCCESS: ("Success", "success"),
    Status.KEY_ENOENT: ("Not found", "item-only"),
    Status.KEY_EEXISTS: ("The document exists, or its CAS is different", "item-only"),
    Status.E2BIG: ("The value is too large", "item-only invalid-input"),
    Status.EINVAL: ("The request is malformed", "internal invalid-input"),
    Status.NOT_STORED: ("The document was not stored", "item-only"),
    Status.DELTA_BADVAL: ("The document is not a number", "item-only invalid-input"),
    Status.NOT_MY_VBUCKET: ("The vbucket is not on this node", "fetch-config invalid-input"),
    Status.NO_BUCKET: ("No bucket is selected", "conn-state-invalidated"),
    Status.LOCKED: ("The document is locked", "item-locked item-only retry-now"),
    Status.DCP_STREAM_NOT_FOUND: ("There is no such stream", "dcp conn-state-invalidated"),
    Status.OPAQUE_NO_MATCH: ("The opaque is not that of the stream", "dcp conn-state-invalidated"),
    Status.WOULD_THROTTLE: ("The request would be throttled", "temp retry-later"),
    Status.CONFIG_ONLY: ("The bucket has only a configuration", "conn-state-invalidated"),
    Status.NOT_LOCKED: ("The document is not locked", "item-only"),
    Status.CAS_VALUE_INVALID: ("The CAS is invalid", "item-only invalid-input"),
    Status.AUTH_STALE: ("Log in again", "conn-state-invalidated auth"),
    Status.AUTH_ERROR: ("The login failed", "conn-state-invalidated auth"),
    Status.AUTH_CONTINUE: ("The login continues", "special-handling"),
    Status.ERANGE: ("A value is out of range", "invalid-input"),
    Status.ROLLBACK: ("The consumer must roll back", "dcp conn-state-invalidated"),
    Status.EACCESS: ("Not allowed", "support auth"),
    Status.NOT_INITIALIZED: ("The node is starting", "temp retry-later"),
    Status.EXPIRY_OVERFLOW: ("The expiry is too large", "invalid-input"),
    Status.LOCK_EXPIRY_OVERFLOW: ("The lock time is too large", "invalid-input"),
    Status.RATE_LIMITED_MAX_CONNECTIONS: ("Too many connections", "rate-limit"),
    Status.RATE_LIMITED_MAX_COMMANDS: ("Too many commands", "rate-limit"),
    Status.BUCKET_PAUSED: ("The bucket is paused", "temp retry-later"),
    Status.CANCELLED: ("The command was cancelled", "internal"),
    Status.UNKNOWN_FRAME_INFO: ("A frame info is unknown", "support invalid-input"),
    Status.UNKNOWN_COMMAND: ("The command is unknown", "support invalid-input"),
    Status.ENOMEM: ("Out of memory", "temp retry-later"),
    Status.NOT_SUPPORTED: ("Not supported", "support"),
    Status.EINTERNAL: ("The server failed", "internal conn-state-invalidated"),
    Status.EBUSY: ("The server is busy", "temp retry-later"),
    Status.ETMPFAIL: ("A temporary failure", "temp retry-later"),
    Status.XATTR_EINVAL: ("The xattrs are malformed", "item-only invalid-input"),
    Status.UNKNOWN_COLLECTION: ("There is no such collection", "item-only"),
    Status.CANNOT_APPLY_MANIFEST: ("The manifest does not follow the one that is here", "invalid-input"),
    Status.UNKNOWN_SCOPE: ("There is no such scope", "item-only"),
    Status.DCP_STREAMID_INVALID: ("The stream id is missing or not allowed", "dcp"),
    Status.DURABILITY_INVALID_LEVEL: ("There is no such durability level", "item-only invalid-input"),
    Status.DURABILITY_IMPOSSIBLE: ("The durability can't be reached", "item-only"),
    Status.SYNC_WRITE_IN_PROGRESS: (
        "A durable write is in progress",
        "item-only sync-write-in-progress retry-later",
    ),
    Status.SYNC_WRITE_AMBIGUOUS: (
        "The durable write may or may not be done",
        "item-only sync-write-ambiguous",
    ),
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: (
        "A durable write is being committed again",
        "item-only sync-write-in-progress retry-later",
    ),
    Status.RANGE_SCAN_CANCELLED: ("The range scan was cancelled", "item-only"),
    Status.RANGE_SCAN_MORE: ("The range scan has more", "success"),
    Status.RANGE_SCAN_COMPLETE: ("The range scan is finished", "success"),
    Status.VB_UUID_NOT_EQUAL: ("The vbucket is on another branch", "item-only"),
    Status.SUBDOC_PATH_ENOENT: ("There is no such path", "subdoc item-only"),
    Status.SUBDOC_PATH_MISMATCH: ("The path does not fit the document", "subdoc item-only"),
    Status.SUBDOC_PATH_EINVAL: ("The path is malformed", "subdoc item-only invalid-input"),
    Status.SUBDOC_PATH_E2BIG: ("The path is too deep", "subdoc item-only invalid-input"),
    Status.SUBDOC_DOC_E2DEEP: ("The document is too deep", "subdoc item-only"),
    Status.SUBDOC_VALUE_CANTINSERT: ("The value does not fit there", "subdoc item-only invalid-input"),
    Status.SUBDOC_DOC_NOT_JSON: ("The document is not JSON", "subdoc item-only"),
    Status.SUBDOC_NUM_ERANGE: ("The number is out of range", "subdoc item-only"),
    Status.SUBDOC_DELTA_EINVAL: ("The delta is not a number that fits", "subdoc item-only invalid-input"),
    Status.SUBDOC_PATH_EEXISTS: ("The path already exists", "subdoc item-only"),
    Status.SUBDOC_VALUE_E2DEEP: ("The value is too deep", "subdoc item-only invalid-input"),
    Status.SUBDOC_INVALID_COMBO: ("These paths can't go together", "subdoc invalid-input"),
    Status.SUBDOC_MULTI_PATH_FAILURE: ("Some paths failed", "subdoc special-handling"),
    Status.SUBDOC_SUCCESS_DELETED: ("Done, on a deleted document", "subdoc success item-deleted"),
    Status.SUBDOC_XATTR_INVALID_FLAG_COMBO: ("These flags can't go together", "subdoc invalid-input"),
    Status.SUBDOC_XATTR_INVALID_KEY_COMBO: ("These xattrs can't go together", "subdoc invalid-input"),
    Status.SUBDOC_XATTR_UNKNOWN_MACRO: ("There is no such macro", "subdoc invalid-input"),
    Status.SUBDOC_XATTR_UNKNOWN_VATTR: ("There is no such virtual xattr", "subdoc invalid-input"),
    Status.SUBDOC_XATTR_CANT_MODIFY_VATTR: ("A virtual xattr can't be written", "subdoc invalid-input"),
    Status.SUBDOC_MULTI_PATH_FAILURE_DELETED: (
        "Some paths failed, on a deleted document",
        "subdoc special-handling item-deleted",
    ),
    Status.SUBDOC_INVALID_XATTR_ORDER: ("Xattr paths come before all others", "subdoc invalid-input"),
    Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO: (
        "There is no such member of $document",
        "subdoc invalid-input",
    ),
    Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS: ("The document is not deleted", "subdoc item-only"),
    Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE: ("A deleted document has no body", "subdoc item-only"),
}


@cache
def error_map(version: int) -> bytes | None:
    """The map in the highest version that both sides know; None below 1."""
    if version < 1:
        return None
    version = min(version, 2)
    errors = {}
    for status, (about, attributes) in _ERRORS.items():
        words = attributes.split()
        if version == 1:
            words = [word for word in words if word not in _V2_ATTRIBUTES]
        errors[f"{status:x}"] = {"name": status.name, "desc": about, "attrs": words}
    content = {"version": version, "revision": REVISION, "errors": errors}
    return json.dumps(content, separators=(",", ":")).encode()
