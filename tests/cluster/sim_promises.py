"""What the simulated cluster has promised to its client: every write that was answered as done is there,
unless something happened that may take it back.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.sim_client import Ack, Client
from cluster.sim_network import Network
from cluster.sim_truth import Wrong
from tailrace.store.format import cas_of
from tailrace.store.vbucket_history import History
from tailrace.wire.codes import DurabilityLevel


class Promises:
    """Answered writes that must not be lost."""

    def __init__(self, client: Client, network: Network, note: Callable[[str], None]) -> None:
        self._client = client
        self._network = network
        self._note = note
        self._acks: list[Ack] = []
        self._fresh: Ack | None = None
        client.on_ack = self._acknowledged

    def _acknowledged(self, ack: Ack) -> None:
        self._note(f"{ack.by} answers {ack.key!r} at {ack.seqno} of {ack.vb_uuid:#x}")
        self._acks.append(ack)
        if ack.level is not None:
            self._fresh = ack

    def take_fresh(self) -> Ack | None:
        """A durable write that was answered since the last time."""
        ack, self._fresh = self._fresh, None
        return ack

    def node_lost(self, name: str, *, only_memory: bool, vbuckets: set[int] | None = None) -> None:
        """Drop promises that may be lost with a node: what it alone, or two lost nodes together, answered
        for.

        ``vbuckets``: those that others go on with.
        """
        for ack in self._all():
            if ack.level is None:
                ack.is_void |= ack.by == name if vbuckets is None else ack.vbucket in vbuckets
            else:
                if not only_memory or ack.level != DurabilityLevel.PERSIST_TO_MAJORITY:
                    ack.failures.add(name)
                ack.is_void |= len(ack.failures) > 1
        self._acks = [ack for ack in self._acks if not ack.is_void]

    def rewound(self, vbucket: int, seqno: int, answered: list[Ack]) -> None:
        """An operator has taken back what came after a seqno, including ``answered`` writes whose answers
        come late.
        """
        for ack in answered:
            ack.is_void |= ack.vbucket == vbucket
        self._acks = [ack for ack in self._acks if ack.vbucket != vbucket or ack.seqno <= seqno]

    def all_are_back(self) -> None:
        """Every copy is equal again: from now on one node may be lost."""
        for ack in self._all():
            ack.failures.clear()

    def _all(self) -> list[Ack]:
        return [*self._acks, *self._client.answered(self._network.wires)]

    def check(self, active: History) -> None:
        """Check that the active has everything that was promised of its vbucket."""
        for ack in self._acks:
            if ack.vbucket != active.id:
                continue
            if ack.level is not None:
                self._check_durable(ack, active)
                continue
            branch = active.failover_log.branch_of(ack.seqno)
            if ack.seqno > active.high_seqno or branch not in (ack.vb_uuid, 0):
                raise self._lost(ack, active)

    def _check_durable(self, ack: Ack, active: History) -> None:
        """A new active may have committed it once more, with another seqno, or be about to."""
        frame = active.get_any(ack.key)  # type: ignore[attr-defined]
        newest = 0 if frame is None else cas_of(frame)
        prepared = [prepare.seqno for prepare in active.undecided if prepare.key == ack.key]  # type: ignore[attr-defined]
        for seqno in prepared:
            frame = active.frame_at(seqno)
            assert frame is not None
            newest = max(newest, cas_of(frame))
        if not newest and active.purge_seqno and self._client.last_ends.get(ack.key, 0) >= ack.number:
            return  # it was, or a later write deleted it, and the tombstone is forgotten
        if newest < ack.cas:
            raise self._lost(ack, active)

    @staticmethod
    def _lost(ack: Ack, active: History) -> Wrong:
        level = "answered" if ack.level is None else f"answered as {ack.level.name}"
        return Wrong(
            f"{ack.key!r} at {ack.seqno} of {ack.vb_uuid:#x} in vbucket {ack.vbucket} was {level} by "
            f"{ack.by} and is lost; the active has {active.high_seqno} of {active.failover_log.to_json()}"
        )
