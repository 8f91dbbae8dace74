"""Checks of DCP requests beyond their layouts: those for every request, and those of a replica.

Rules: docs/spec/dcp.md#connection, docs/spec/dcp.md#errors-by-message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import MalformedMessage
from ...wire.codes import DcpOpcode, Feature, RequestFrameId, Status, SystemEventId
from ...wire.dcp import DcpDeletion, DcpMutation, DcpOsoSnapshot, DcpSystemEvent
from ...wire.dcp_replication import DcpAbort, DcpCacheTransfer, DcpCacheTransferEnd, DcpCommit, DcpPrepare
from ...wire.fields import decode_frame_infos
from ...wire.header import Frame
from ...wire.message import Message

if TYPE_CHECKING:
    from ..handler import Host

__all__ = ["SYNC_WRITES", "UNASKED", "check_change", "check_request", "seqno_of", "stream_id_of"]

_SIZES: dict[int, int] = {RequestFrameId.BARRIER: 0, RequestFrameId.DCP_STREAM_ID: 2}
_EVENTS = frozenset(
    {
        SystemEventId.COLLECTION_BEGIN,
        SystemEventId.COLLECTION_END,
        SystemEventId.SCOPE_CREATED,
        SystemEventId.SCOPE_DROPPED,
        SystemEventId.COLLECTION_MODIFIED,
    }
)

SYNC_WRITES: tuple[type[Message], ...] = (DcpPrepare, DcpCommit, DcpAbort)

UNASKED: Mapping[type[Message], Status | None] = {
    DcpPrepare: Status.NOT_SUPPORTED,
    DcpCommit: Status.KEY_ENOENT,  # of what was never prepared
    DcpAbort: Status.KEY_ENOENT,
    DcpOsoSnapshot: Status.NOT_SUPPORTED,
    DcpCacheTransfer: Status.ENOMEM,  # which stops it
    DcpCacheTransferEnd: None,
}
"""What a producer sends only on request, and how a replica refuses it on an open stream."""


def check_request(frame: Frame, host: Host, *, is_open: bool) -> int | None:
    """The stream id of a request, see `stream_id_of`.

    `MalformedMessage` if the connection is not ready for the request, or does not go with DCP.
    """
    if not is_open and frame.opcode != DcpOpcode.OPEN:
        raise MalformedMessage("there is no DCP command before Open")
    if frame.opcode == DcpOpcode.FLUSH:
        raise MalformedMessage("no DCP server has this command", Status.NOT_SUPPORTED)
    if Feature.UNORDERED_EXECUTION in host.features:
        raise MalformedMessage("DCP needs its commands in order", Status.NOT_SUPPORTED)
    return stream_id_of(frame)


def stream_id_of(frame: Frame) -> int | None:
    """The stream id in the framing extras of a request, None if there is none.

    Nothing else in them has a meaning here.
    """
    stream_id = None
    if frame.framing:
        for info in decode_frame_infos(frame.framing):
            if info.id not in _SIZES:
                raise MalformedMessage(f"frame info {info.id} is not known here", Status.UNKNOWN_FRAME_INFO)
            if len(info.data) != _SIZES[info.id]:
                raise MalformedMessage(f"frame info {info.id} with {len(info.data)} bytes")
            if info.id == RequestFrameId.DCP_STREAM_ID:
                stream_id = int.from_bytes(info.data, "big")
    return stream_id


def seqno_of(message: Any) -> int:
    """The seqno of a change in its vbucket."""
    match message:
        case DcpCommit():
            return message.commit_seqno
        case DcpAbort():
            return message.abort_seqno
    seqno: int = message.by_seqno
    return seqno


def check_change(message: Message) -> None:
    """Raise `MalformedMessage` for a change in a form that a node has not asked for and can't store."""
    if isinstance(message, DcpMutation | DcpDeletion):
        if message.nmeta:
            raise MalformedMessage("extended metadata was not asked for")
    elif isinstance(message, DcpSystemEvent) and message.event not in _EVENTS:
        raise MalformedMessage(f"system event {message.event} in version {message.version}")
