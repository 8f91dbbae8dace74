"""What a peer that has not asked for extended errors (HELLO, XERROR) sees instead of them.

Rules: docs/spec/header.md#error-bodies.
"""

from __future__ import annotations

from ..wire.codes import Feature, Op, Status

__all__ = ["status_for_peer"]

_WITHOUT_XERROR = {
    Status.LOCKED: Status.KEY_EEXISTS,
    Status.CAS_VALUE_INVALID: Status.KEY_EEXISTS,
    Status.NOT_LOCKED: Status.ETMPFAIL,
    Status.SYNC_WRITE_IN_PROGRESS: Status.ETMPFAIL,
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS: Status.ETMPFAIL,
    Status.CONFIG_ONLY: Status.NOT_SUPPORTED,
    Status.UNKNOWN_COLLECTION: Status.EINVAL,
    Status.UNKNOWN_SCOPE: Status.EINVAL,
}
_LOCK_COMMANDS = (Op.GET_LOCKED, Op.UNLOCK_KEY)
_DISCONNECTS = frozenset(
    {
        Status.EACCESS,
        Status.NO_BUCKET,
        Status.AUTH_STALE,
        Status.DCP_STREAMID_INVALID,
        Status.DURABILITY_INVALID_LEVEL,
        Status.DURABILITY_IMPOSSIBLE,
        Status.SYNC_WRITE_AMBIGUOUS,
    }
)


def status_for_peer(status: int, opcode: int, features: frozenset[int]) -> int | None:
    """The status that a peer gets; None: it gets no answer, and the connection is closed."""
    if Feature.XERROR in features:
        return status
    if status in _DISCONNECTS:
        return None
    if status == Status.LOCKED and opcode in _LOCK_COMMANDS:
        return Status.ETMPFAIL
    if status in (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE) and Feature.COLLECTIONS in features:
        return status
    return _WITHOUT_XERROR.get(Status(status), status) if status in Status.__members__.values() else status
