"""The blocking pump of a `Pipeline`: its requests go to the nodes that have their vbuckets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from time import sleep

from ..clock import Clock
from ..errors import ConnectError
from .kv_connection import KvConnection, wait
from .kv_nodes import KvNodes
from .pipeline import BatchResult, Pipeline, WriteBatch

__all__ = ["BulkWriter"]


class BulkWriter:
    """Writes batches of requests; to be used once."""

    def __init__(
        self, nodes: KvNodes, *, patience_s: float, timeout_s: float, clock: Clock, rng: random.Random
    ) -> None:
        self._nodes = nodes
        self._timeout_s = timeout_s
        self._clock = clock
        self._pipeline: Pipeline[KvConnection] = Pipeline(rng=rng, patience_s=patience_s)
        self._heard_at: dict[KvConnection, float] = {}
        """When a connection that owes answers last did something."""

    def write(self, batches: Iterable[WriteBatch]) -> Iterator[BatchResult]:
        """Yield what became of each batch as it is finished."""
        pipeline = self._pipeline
        try:
            for batch in batches:
                while not pipeline.has_room_for(batch):
                    yield from self._turn()
                pipeline.add(batch)
                yield from self._turn(may_wait=False)
                while self._has_to_hurry:  # the next batch may take long to make
                    yield from self._turn()
            while not pipeline.is_empty:
                yield from self._turn()
        finally:
            if not pipeline.is_empty:
                self._nodes.close()  # late answers would be mistaken for those of other requests

    @property
    def _has_to_hurry(self) -> bool:
        """Whether something is still to be sent, or sent again."""
        return self._pipeline.next_timer() is not None or any(
            connection.waits_to_send for connection in self._heard_at
        )

    def _turn(self, *, may_wait: bool = True) -> list[BatchResult]:
        """Send what is due, wait for an event, take the answers; return the batches that this finished."""
        pipeline = self._pipeline
        for connection, data in pipeline.to_send(self._clock.monotonic(), self._route()):
            self._heard_at.setdefault(connection, self._clock.monotonic())
            try:
                connection.queue(data)
            except ConnectError as error:
                self._lost(connection, error)
        self._receive(may_wait=may_wait)
        if pipeline.is_misled:
            pipeline.is_misled = False
            self._nodes.refresh()
        return pipeline.finished()

    def _route(self) -> Callable[[int], KvConnection | None]:
        """A function that finds the connection to a vbucket's node."""
        nodes = self._nodes
        if nodes.is_alone:
            connection = nodes.anywhere()
            return lambda _: connection

        def owner(vbucket: int) -> KvConnection | None:
            address = nodes.map.node_of(vbucket)
            try:
                return None if address is None else nodes.connection(address)
            except ConnectError:
                return None

        return owner

    def _receive(self, *, may_wait: bool) -> None:
        pipeline = self._pipeline
        due = [connection for connection in self._heard_at if pipeline.is_due(connection)]
        if sum(map(self._take, due)):  # they came while a script was running
            return
        now = self._clock.monotonic()
        timer = pipeline.next_timer()
        wait_s = self._timeout_s if timer is None else max(0.0, timer - now)
        if not due and may_wait and timer is not None:
            sleep(wait_s)
        ready = wait(due, wait_s if may_wait else 0.0) if due else []
        now = self._clock.monotonic()
        for connection in due:
            try:
                if connection in ready and connection.exchange():
                    self._heard_at[connection] = now
                self._take(connection)
                if now - self._heard_at[connection] >= self._timeout_s:
                    raise ConnectError(f"{connection.address} does not answer")
            except ConnectError as error:
                self._lost(connection, error)
        # a connection that owes nothing is timed from its next request
        self._heard_at = {
            connection: at for connection, at in self._heard_at.items() if pipeline.is_due(connection)
        }

    def _take(self, connection: KvConnection) -> int:
        """Take the answers that have come; return how many parts they came in."""
        parts = connection.take_answers()
        for answers in parts:
            self._pipeline.receive(connection, answers, self._clock.monotonic())
        return len(parts)

    def _lost(self, connection: KvConnection, error: ConnectError) -> None:
        """Drop a connection; another node, if there is one, may have its vbuckets by now."""
        connection.close()
        self._heard_at.pop(connection, None)
        if self._nodes.is_alone:
            raise error
        self._pipeline.lost(connection, self._clock.monotonic())
        self._pipeline.is_misled = True
