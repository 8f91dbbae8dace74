"""What a reader asks a node apart from its streams: seqnos of vbuckets, their branches, what is on disk.

Rules: docs/spec/servers.md#observe-seqno.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import MalformedMessage, RemoteProtocolError, UsageError
from ..history import FailoverLog
from ..model import MAX_SEQNO
from ..protocol.script import Script
from ..wire.admin import (
    AllVbSeqnosResponse,
    GetAllVbSeqnos,
    GetFailoverLog,
    ObserveSeqno,
    ObserveSeqnoResponse,
)
from ..wire.codes import Status, VBucketState
from ..wire.message import Response

__all__ = [
    "failover_logs",
    "high_seqnos",
    "persisted_seqno",
    "persisted_seqnos",
    "seqnos_and_logs",
    "seqnos_of",
]


def high_seqnos() -> Script[dict[int, int]]:
    """The high seqnos of all active vbuckets of a node."""
    (answer,) = yield [_active_seqnos()]
    return _seqnos(answer)


def failover_logs(vbuckets: Sequence[int]) -> Script[dict[int, FailoverLog]]:
    """The failover logs of those vbuckets that the node has."""
    answers = yield [GetFailoverLog(vbucket=vbucket) for vbucket in vbuckets]
    return _logs(vbuckets, answers)


def seqnos_and_logs(vbuckets: Sequence[int]) -> Script[tuple[dict[int, int], dict[int, FailoverLog]]]:
    """High seqnos of all active vbuckets of a node, and the failover logs of some."""
    seqnos, *logs = yield [_active_seqnos(), *(GetFailoverLog(vbucket=vbucket) for vbucket in vbuckets)]
    return _seqnos(seqnos), _logs(vbuckets, logs)


def persisted_seqno(vbucket: int, vb_uuid: int) -> Script[int | None]:
    """Up to which seqno a branch is on disk; None if the vbucket has left it, 0 if that is not known now."""
    (answer,) = yield [_observe(vbucket, vb_uuid)]
    return _persisted(answer)


def _persisted(answer: ObserveSeqnoResponse) -> int | None:
    if answer.status == Status.SUCCESS:
        return None if answer.old_branch is not None else answer.persisted_seqno
    return None if answer.status == Status.KEY_ENOENT else 0


def persisted_seqnos(branches: Mapping[int, int]) -> Script[dict[int, int]]:
    """By vbucket, up to which seqno its branch is on disk; 0 if the node does not know the branch."""
    answers = yield [_observe(vbucket, vb_uuid) for vbucket, vb_uuid in branches.items()]
    return {vbucket: _persisted(answer) or 0 for vbucket, answer in zip(branches, answers, strict=True)}


def _observe(vbucket: int, vb_uuid: int) -> ObserveSeqno:
    return ObserveSeqno(vbucket=vbucket, value=vb_uuid.to_bytes(8, "big"))


def _active_seqnos() -> GetAllVbSeqnos:
    return GetAllVbSeqnos(state=VBucketState.ACTIVE)


def _seqnos(answer: AllVbSeqnosResponse) -> dict[int, int]:
    return seqnos_of(answer) if answer.status == Status.SUCCESS else {}


def seqnos_of(answer: AllVbSeqnosResponse) -> dict[int, int]:
    """The seqnos of an answer; an impossibly high one is an error of the server."""
    seqnos = answer.seqnos
    if seqnos and (highest := max(seqnos.values())) > MAX_SEQNO:
        raise RemoteProtocolError(f"a high seqno of {highest} is beyond all seqnos")
    return seqnos


def _logs(vbuckets: Sequence[int], answers: Sequence[Response]) -> dict[int, FailoverLog]:
    try:
        return {
            vbucket: FailoverLog.from_bytes(answer.value)
            for vbucket, answer in zip(vbuckets, answers, strict=True)
            if answer.status == Status.SUCCESS
        }
    except UsageError as error:
        raise MalformedMessage(str(error)) from None
