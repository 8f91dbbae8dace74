"""A vbucket that a node receives: one stream of a `DcpReplica`, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import DocumentRefused
from ...history import FailoverLog, Retreat, retreat
from ...model import MAX_U64, Position
from ...wire.codes import Status
from ...wire.dcp import DcpStreamRequest
from ...wire.dcp_replication import DcpSeqnoAcknowledged
from ..states import REPLICA_STREAM_TRANSITIONS, Machine, ReplicaStreamInput, ReplicaStreamState

if TYPE_CHECKING:
    from ...store.base import VBucket

__all__ = ["ReplicaStream"]


@dataclass(slots=True)
class ReplicaStream:
    """A vbucket that is being received."""

    vbucket: VBucket
    opaque: int
    flags: int
    done: Callable[[int, int], None]
    """Called once with the status of the stream request and the opaque."""
    machine: Machine[ReplicaStreamState, ReplicaStreamInput] = field(
        default_factory=lambda: Machine(REPLICA_STREAM_TRANSITIONS, ReplicaStreamState.WAITING)
    )
    sent: Position = Position.BEGINNING
    marker_start: int = 0
    marker_end: int = 0
    ack_at: int = 0
    """The seqno after which the marker must be answered; 0: it need not be."""
    waits_for_disk: bool = False
    on_disk: int = 0
    """The end of the last snapshot that was waited for and is on disk."""
    acknowledged: int = 0
    """The last prepare that was acknowledged to the active."""

    @property
    def state(self) -> ReplicaStreamState:
        return self.machine.state

    def standing(self) -> Position:
        """Where the vbucket stands, as a stream request puts it."""
        vbucket = self.vbucket
        high = vbucket.high_seqno
        if not high:
            return Position.BEGINNING
        if vbucket.complete_seqno == high:
            return Position.at(vbucket.uuid, high)
        return Position(vbucket.uuid, high, vbucket.received.start, vbucket.received.end)

    def check_seqno(self, seqno: int, least: int) -> None:
        """`DocumentRefused` unless a seqno may come now, from the least one to the end of the snapshot."""
        if not least <= seqno <= self.marker_end:
            raise DocumentRefused(
                Status.ERANGE, f"seqno {seqno}, from {least} to {self.marker_end} was to come"
            )

    # durable writes

    def tell_prepared(self, tell: Callable[[DcpSeqnoAcknowledged], None]) -> None:
        """Tell the active which durable writes are as safe here as they must be, now and once on disk.

        The rule is docs/spec/servers.md#sync-writes.
        """
        vbucket = self.vbucket
        undecided = vbucket.undecided
        if not undecided:
            return
        complete = vbucket.complete_seqno
        prepared = vbucket.prepared_up_to(complete, self.on_disk)
        if prepared > self.acknowledged:
            self.acknowledged = prepared
            tell(DcpSeqnoAcknowledged(prepared_seqno=prepared, vbucket=vbucket.id))
        if self.waits_for_disk or not any(prepared < each.seqno <= complete for each in undecided):
            return
        self.waits_for_disk = True

        def persisted(ok: bool) -> None:
            self.waits_for_disk = False
            if ok:
                self.on_disk = complete
                self.tell_prepared(tell)

        # up to the end of its snapshot: a promotion takes a part of one back
        vbucket.when_persisted(complete, persisted)

    # asking for it

    def ask_from(self, position: Position | None) -> None:
        """Ask from where the vbucket stands, or under an older name of the same place."""
        self.machine.feed(ReplicaStreamInput.ASKED)
        self.sent = self.standing() if position is None else position

    def request(self) -> DcpStreamRequest:
        """The stream request to send."""
        return DcpStreamRequest(
            opaque=self.opaque,
            vbucket=self.vbucket.id,
            flags=self.flags,
            start_seqno=self.sent.seqno,
            end_seqno=MAX_U64,
            vb_uuid=self.sent.vb_uuid,
            snapshot_start=self.sent.snapshot_start,
            snapshot_end=self.sent.snapshot_end,
        )

    def accepted(self, log: FailoverLog) -> None:
        """The producer accepted the request; take over the active's branches."""
        vbucket = self.vbucket
        self.acknowledged = self.on_disk = 0
        vbucket.set_failover_log(log)
        if vbucket.complete_seqno == vbucket.high_seqno < vbucket.received.end:
            # A snapshot was announced on another connection, and nothing of it came: this active may not have
            # it, and our readers must not wait for it.
            vbucket.drop_snapshot()
        self.machine.feed(ReplicaStreamInput.ACCEPTED)

    def way_back(self, seqno: int) -> Retreat:
        """The way back to a state that the vbucket really had: the active's history differs above a seqno."""
        return retreat(
            self.sent,
            seqno,
            log=self.vbucket.failover_log,
            exact_points=[self.vbucket.exact_seqno(min(seqno, self.sent.seqno - 1))],
            only_points=True,
        )
