"""Bugs that clusters have, planted into this one by one: the simulation must catch each.

Each is a change of the product's code for the time of a ``with``; nothing of this is in the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cluster.sim_nodes import SimulatedMember
from tailrace.cluster import coordinator
from tailrace.cluster.coordinator import Coordinator
from tailrace.server.durability import Durability
from tailrace.store.bucket import Bucket as StoreBucket
from tailrace.store.documents import VBucket
from tailrace.wire.codes import VBucketState


@dataclass(frozen=True)
class Bug:
    """What is wrong, and how it is made so."""

    name: str
    about: str
    plant: Callable[[], AbstractContextManager[Any]]


def _branches_at_the_last_seqno() -> AbstractContextManager[Any]:
    def promote(self: StoreBucket, vbucket: Any) -> None:
        log = vbucket.failover_log
        vbucket.failover_log = self.branched(log, vbucket.high_seqno, self.new_uuid(log))

    return mock.patch.object(StoreBucket, "_promote", promote)


def _keeps_its_own_log() -> AbstractContextManager[Any]:
    def set_failover_log(self: VBucket, log: Any) -> None:
        if not self.high_seqno:
            self.failover_log = log

    return mock.patch.object(VBucket, "set_failover_log", set_failover_log)


def _activates_too_early() -> AbstractContextManager[Any]:
    original = StoreBucket.set_state

    def set_state(self: StoreBucket, vbucket: int, state: int, **options: Any) -> Any:
        if options.get("takeover") and state == VBucketState.PENDING:
            state = VBucketState.ACTIVE
        return original(self, vbucket, state, **options)

    return mock.patch.object(StoreBucket, "set_state", set_state)


def _answers_without_a_majority() -> AbstractContextManager[Any]:
    return mock.patch.object(Durability, "_is_true", lambda self, vbucket, waiter: True)


def _counts_memory_as_disk() -> AbstractContextManager[Any]:
    original = Durability.reached

    def reached(self: Durability, vbucket: int, name: str, seqno: int, *, on_disk: bool) -> None:
        original(self, vbucket, name, seqno, on_disk=True)

    return mock.patch.object(Durability, "reached", reached)


@contextmanager
def _fails_over_without_ending() -> Iterator[None]:
    with (
        mock.patch.object(SimulatedMember, "kill", lambda self: None),
        mock.patch.object(Coordinator, "_nobody_else_has", lambda self, number, name, reports: True),
    ):
        yield


def _promotes_the_first() -> AbstractContextManager[Any]:
    original = coordinator.without

    def without(chains: Any, dead: str, best: Any) -> Any:
        return original(chains, dead, lambda number, left: left[-1])

    return mock.patch.object(coordinator, "without", without)


BUGS = (
    Bug(
        "branch at the last seqno",
        "A promotion begins its branch at the last change instead of the last complete snapshot.",
        _branches_at_the_last_seqno,
    ),
    Bug(
        "failover log not replaced",
        "A replica keeps its own log when a stream begins.",
        _keeps_its_own_log,
    ),
    Bug(
        "active before the source is dead",
        "The taker becomes active when it is told to be pending.",
        _activates_too_early,
    ),
    Bug(
        "durable without a majority",
        "A durable write is answered when the active has it.",
        _answers_without_a_majority,
    ),
    Bug(
        "memory counted as disk",
        "What a replica has in memory is counted as persisted.",
        _counts_memory_as_disk,
    ),
    Bug(
        "failed over and still alive",
        "A failover promotes replicas without making sure that nobody else has the vbucket as active.",
        _fails_over_without_ending,
    ),
    Bug(
        "any copy promoted",
        "A failover promotes some copy, not the one with the most.",
        _promotes_the_first,
    ),
)
