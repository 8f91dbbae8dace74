"""Bugs that clusters have, planted into this one by one: the simulation must catch each.

Each is a change of the product's code for the time of a ``with``; nothing of this is in the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from campaigns.bug import Bug
from cluster.sim_nodes import SimulatedMember
from tailrace.client.progress import Progress
from tailrace.cluster import coordinator
from tailrace.cluster.coordinator import Coordinator
from tailrace.model import Position, SnapshotRange
from tailrace.protocol.dcp.producer_stream import ProducerStream
from tailrace.protocol.dcp.replica_stream import ReplicaStream
from tailrace.server.durability import CopyTracker
from tailrace.store.base import ReceivedRange
from tailrace.store.bucket import EngineBucket
from tailrace.store.received_history import ReceivedHistory
from tailrace.store.received_snapshots import ReceivedSnapshots
from tailrace.store.vbucket import EngineVBucket
from tailrace.store.vbucket_history import History
from tailrace.wire.codes import VBucketState


def _branches_at_the_last_seqno() -> AbstractContextManager[Any]:
    def promote(self: EngineBucket, vbucket: Any) -> None:
        log = vbucket.failover_log
        vbucket.failover_log = self.branched(log, vbucket.high_seqno, self.new_uuid(log))

    return mock.patch.object(EngineBucket, "_promote", promote)


def _takes_a_part_for_the_whole() -> AbstractContextManager[Any]:
    return mock.patch.object(History, "complete_seqno", property(lambda self: self.high_seqno))


def _streams_a_part() -> AbstractContextManager[Any]:
    original = ProducerStream._begin

    def begin(self: ProducerStream, snapshot: Any) -> bool:
        vbucket = self._accepted.vbucket
        state, vbucket.state = vbucket.state, VBucketState.ACTIVE
        try:
            return original(self, snapshot)
        finally:
            vbucket.state = state

    return mock.patch.object(ProducerStream, "_begin", begin)


def _a_copy_forgets_its_snapshot() -> AbstractContextManager[Any]:
    def standing(self: ReplicaStream) -> Position:
        high = self.vbucket.high_seqno
        return Position.at(self.vbucket.uuid, high) if high else Position.BEGINNING

    return mock.patch.object(ReplicaStream, "standing", standing)


def _a_reader_forgets_its_snapshot() -> AbstractContextManager[Any]:
    def request_range(self: Position, marker: Any = None) -> SnapshotRange:
        return SnapshotRange(self.seqno, self.seqno)

    return mock.patch.object(Position, "request_range", request_range)


def _a_copy_trusts_the_second_marker() -> AbstractContextManager[Any]:
    original = ReceivedHistory.begin_snapshot

    def begin_snapshot(self: ReceivedHistory, start: int, end: int, *given: Any, **more: Any) -> None:
        original(self, start, end, *given, **more)
        self._received.newest = ReceivedRange(self._received.newest.start, end)

    return mock.patch.object(ReceivedHistory, "begin_snapshot", begin_snapshot)


def _a_reader_trusts_the_second_marker() -> AbstractContextManager[Any]:
    return mock.patch.object(Position, "snapshot_of", lambda self, marker: marker)


def _saves_inside_a_snapshot() -> AbstractContextManager[Any]:
    original = Progress.delivered_up_to

    def delivered_up_to(self: Progress, position: Position) -> None:
        original(self, position if not position.seqno else Position.at(position.vb_uuid, position.seqno))

    return mock.patch.object(Progress, "delivered_up_to", delivered_up_to)


def _forgets_what_was_folded() -> AbstractContextManager[Any]:
    def around(self: ReceivedSnapshots, seqno: int) -> ReceivedRange:
        return ReceivedRange(seqno, seqno)

    return mock.patch.object(ReceivedSnapshots, "around", around)


def _keeps_its_own_log() -> AbstractContextManager[Any]:
    def set_failover_log(self: EngineVBucket, log: Any) -> None:
        if not self.high_seqno:
            self.failover_log = log

    return mock.patch.object(EngineVBucket, "set_failover_log", set_failover_log)


def _activates_too_early() -> AbstractContextManager[Any]:
    original = EngineBucket.set_state

    def set_state(self: EngineBucket, vbucket: int, state: int, **options: Any) -> Any:
        if options.get("takeover") and state == VBucketState.PENDING:
            state = VBucketState.ACTIVE
        return original(self, vbucket, state, **options)

    return mock.patch.object(EngineBucket, "set_state", set_state)


def _answers_without_a_majority() -> AbstractContextManager[Any]:
    return mock.patch.object(CopyTracker, "has_majority", lambda self, vbucket, seqno: True)


def _counts_memory_as_disk() -> AbstractContextManager[Any]:
    original = EngineVBucket.prepared_up_to

    def prepared_up_to(self: EngineVBucket, in_memory: int, on_disk: int) -> int:
        return original(self, in_memory, in_memory)

    return mock.patch.object(EngineVBucket, "prepared_up_to", prepared_up_to)


@contextmanager
def _fails_over_without_ending() -> Iterator[None]:
    with (
        mock.patch.object(SimulatedMember, "kill", lambda self: None),
        mock.patch.object(Coordinator, "_nobody_else_has", lambda self, number, name, reports: True),
    ):
        yield


def _promotes_the_first() -> AbstractContextManager[Any]:
    original = coordinator.without  # type: ignore[attr-defined]

    def without(chains: Any, dead: str, best: Any) -> Any:
        return original(chains, dead, lambda number, left: left[-1])

    return mock.patch.object(coordinator, "without", without)


BUGS = (
    Bug(
        "failover entry at the high seqno instead of the snapshot's end",
        "A promotion begins its branch at the last change instead of the last complete snapshot.",
        _branches_at_the_last_seqno,
        3,
    ),
    Bug(
        "a part taken for the whole",
        "A replica takes what it has of a snapshot for all of it.",
        _takes_a_part_for_the_whole,
        0,
    ),
    Bug(
        "a part streamed as the whole",
        "A replica streams what it has of a snapshot as a snapshot by itself.",
        _streams_a_part,
        9,
    ),
    Bug(
        "a copy forgets its snapshot",
        "A replica that resumes inside a snapshot asks for the next change and does not tell which snapshot.",
        _a_copy_forgets_its_snapshot,
        17,
    ),
    Bug(
        "a reader forgets its snapshot",
        "A reader that resumes inside a snapshot does the same.",
        _a_reader_forgets_its_snapshot,
        0,
    ),
    Bug(
        "a copy trusts the second marker",
        "A snapshot that is resumed is announced with an earlier end, and a replica takes that for its end.",
        _a_copy_trusts_the_second_marker,
        263,
    ),
    Bug(
        "a reader trusts the second marker",
        "A reader does the same, and publishes it.",
        _a_reader_trusts_the_second_marker,
        22,
    ),
    Bug(
        "saved inside a snapshot",
        "A reader saves a position inside a snapshot as one where it is whole.",
        _saves_inside_a_snapshot,
        31,
    ),
    Bug(
        "folded changes forgotten",
        "A copy that received a snapshot with gaps ends its own snapshots inside it.",
        _forgets_what_was_folded,
        4,
    ),
    Bug(
        "failover log not replaced",
        "A replica keeps its own log when a stream begins.",
        _keeps_its_own_log,
        0,
    ),
    Bug(
        "active before the source is dead",
        "The taker becomes active when it is told to be pending.",
        _activates_too_early,
        0,
    ),
    Bug(
        "durable without a majority",
        "A durable write is answered when the active has it.",
        _answers_without_a_majority,
        3,
    ),
    Bug(
        "memory counted as disk",
        "What a replica has in memory is counted as persisted.",
        _counts_memory_as_disk,
        200,
    ),
    Bug(
        "failed over and still alive",
        "A failover promotes replicas without making sure that nobody else has the vbucket as active.",
        _fails_over_without_ending,
        2,
    ),
    Bug(
        "any copy promoted",
        "A failover promotes some copy, not the one with the most.",
        _promotes_the_first,
        557,
    ),
)
