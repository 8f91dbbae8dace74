"""The messages of one DCP stream that are not changes: markers, ends, and what comes between changes.

Rules: docs/spec/dcp.md#snapshots, docs/spec/dcp.md#stream-end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire.codes import Magic, MarkerFlag, OsoFlag, StreamEndStatus, VBucketState
from ...wire.dcp import (
    DcpOsoSnapshot,
    DcpSeqnoAdvanced,
    DcpSetVBucketState,
    DcpSnapshotMarker,
    DcpStreamEnd,
)
from ...wire.header import HEADER
from .controls import ConnectionOptions
from .shaping import stream_id_framing

if TYPE_CHECKING:
    from ...store.base import VBucket

__all__ = ["StreamMessages"]

_DISK = int(MarkerFlag.DISK)
_V2_0 = 0
_MARKER, _END = int(DcpSnapshotMarker.OPCODE), int(DcpStreamEnd.OPCODE)
_MARKER_V1, _END_EXTRAS = DcpSnapshotMarker.LAYOUTS[0].struct, DcpStreamEnd.LAYOUTS[0].struct
_REQUEST, _FLEX_REQUEST = int(Magic.REQUEST), int(Magic.FLEX_REQUEST)


class StreamMessages:
    """Makes frames with a stream's opaque, vbucket and stream id."""

    __slots__ = ("_framing", "_opaque", "_options", "_vbucket")

    def __init__(self, options: ConnectionOptions, vbucket: int, opaque: int, stream_id: int) -> None:
        self._options = options
        self._vbucket = vbucket
        self._opaque = opaque
        self._framing = stream_id_framing(stream_id)

    def _frame(self, opcode: int, extras: bytes, extras_length: int | None = None) -> bytes:
        """A message with nothing but fixed fields, like most: not worth a `Message`."""
        framing = self._framing
        header = HEADER.pack(
            _FLEX_REQUEST if framing else _REQUEST,
            opcode,
            len(framing) << 8,
            len(extras) if extras_length is None else extras_length,
            0,
            self._vbucket,
            len(framing) + len(extras),
            self._opaque,
            0,
        )
        return header + framing + extras

    def marker(self, start: int, end: int, flags: int, vbucket: VBucket) -> bytes:
        """A snapshot of a vbucket begins. For the layouts: docs/spec/dcp.md#snapshot-marker."""
        purge_seqno = vbucket.purge_seqno
        has_v2_2 = self._options.marker_v2_2 and flags & _DISK
        if not has_v2_2 and not self._options.sync_replication:
            return self._frame(_MARKER, _MARKER_V1.pack(start, end, flags))
        visible, completed, prepared = end, 0, 0
        if self._options.sync_replication:
            undecided = vbucket.undecided
            visible = min(end, vbucket.visible_seqno)
            if flags & _DISK and vbucket.has_unseen:
                completed = min([end, *(prepare.seqno - 1 for prepare in undecided[:1])])
                prepared = max([prepare.seqno for prepare in undecided if prepare.seqno <= end], default=0)
        if has_v2_2:
            body = DcpSnapshotMarker.body_v2_2(start, end, flags, visible, completed, purge_seqno, prepared)
            return self._frame(_MARKER, body, 1)
        return DcpSnapshotMarker(
            version=_V2_0,
            start=start,
            end=end,
            flags=flags,
            max_visible_seqno=visible,
            high_completed_seqno=completed,
            vbucket=self._vbucket,
            opaque=self._opaque,
            framing=self._framing,
        ).encode()

    def end(self, status: StreamEndStatus) -> bytes:
        """The stream is over. Some reasons can't be sent to every reader."""
        if status == StreamEndStatus.ROLLBACK:
            status = StreamEndStatus.STATE_CHANGED
        if status == StreamEndStatus.FILTER_EMPTY and not self._options.collections:
            status = StreamEndStatus.OK
        return self._frame(_END, _END_EXTRAS.pack(status))

    def seqno_advanced(self, seqno: int) -> bytes:
        """The stream has come this far, without a change to send."""
        return DcpSeqnoAdvanced(
            by_seqno=seqno, vbucket=self._vbucket, opaque=self._opaque, framing=self._framing
        ).encode()

    def oso(self, flag: OsoFlag) -> bytes:
        """An out of order first backfill begins or ends."""
        return DcpOsoSnapshot(
            flags=flag, vbucket=self._vbucket, opaque=self._opaque, framing=self._framing
        ).encode()

    def set_state(self, state: VBucketState) -> bytes:
        """Takeover: the replica's vbucket is to take this state. Never with a stream id."""
        return DcpSetVBucketState(state=state, vbucket=self._vbucket, opaque=self._opaque).encode()
