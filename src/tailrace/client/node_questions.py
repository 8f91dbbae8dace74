"""Questions that a source asks the nodes of its bucket, apart from what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from ..connstr import Address
from ..protocol.script import Script
from ..protocol.states import ReadingState
from .connections import Connections
from .copy_survey import CopiesOnDisk, CopySurvey, in_words
from .nodes import Nodes
from .resume import Reading
from .survey import AwayNodes, Survey

__all__ = ["NodeQuestions"]

T = TypeVar("T")


class NodeQuestions:
    """Has conversations with all nodes. ``turn`` lets the policy decide; ``until`` waits for a condition that
    is checked whenever something happens or ``wake`` is called.
    """

    def __init__(
        self,
        nodes: Nodes,
        connections: Connections,
        *,
        reading: Callable[[], Reading | None],
        retry_for_s: float,
        needs_replicas: bool,
        turn: Callable[[], None],
        until: Callable[[Callable[[], bool]], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._nodes = nodes
        self._connections = connections
        self._current_reading = reading
        self._retry_for_s = retry_for_s
        self._needs_replicas = needs_replicas
        self._turn, self._until, self._wake = turn, until, wake
        self._away = AwayNodes()

    async def everybody(
        self, script_for: Callable[[Address], Script[T]], *, reachable_only: bool = False
    ) -> list[T]:
        """Have a conversation with every node of the bucket, or with those that can be reached."""
        self._need_everybody()
        self._turn()
        if not reachable_only:
            await self._until(lambda: self._homes() <= {node.address for node in self._nodes.ready()})
        elif any(self._nodes.address_of(vbucket) is None for vbucket in self._needed_vbuckets()):
            self._nodes.ask_others(self._now())
        with self._alarms() as wake_in:
            survey = Survey(
                self._nodes,
                script_for,
                retry_for_s=self._retry_for_s,
                wake_in=wake_in,
                away=self._away if reachable_only else None,
            )

            def is_answered() -> bool:
                unheeded = [connection.lost for connection in self._connections.unheeded()]
                done = survey.is_answered(self._homes(), unheeded, self._now())
                self._connections.flush()
                return done

            await self._until(is_answered)
        return list(survey.answers.values())

    async def copies(self, branches: Mapping[int, int], *, patience_s: float | None) -> CopiesOnDisk:
        """Ask all copies of vbuckets up to which seqno they have a branch on disk."""
        self._nodes.refuse_ephemeral()
        self._need_everybody()
        self._turn()
        with self._alarms() as wake_in:
            survey = CopySurvey(
                self._nodes, branches, patience_s=patience_s, wake_in=wake_in, away=self._away
            )

            def is_answered() -> bool:
                done = survey.is_answered(self._now())
                self._connections.flush()
                return done

            await self._until(is_answered)
        return survey.result(self._now())

    def unreachable(self, vbuckets: Iterable[int]) -> dict[int, str]:
        """The vbuckets that no node can be asked about now, and why."""
        reasons: dict[int, str] = {}
        for vbucket in vbuckets:
            node = self._nodes.node_of(vbucket)
            if node is None:
                reasons[vbucket] = "no node has it"
            elif node in self._away:
                is_late = self._away.is_late(node)
                reasons[vbucket] = in_words(node, self._now(), is_active=True, is_late=is_late)
        return reasons

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def _alarms(self) -> Iterator[Callable[[float], None]]:
        """Give a function that wakes all waiters after so many seconds; its timers end with the context."""
        alarms: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        try:
            yield lambda seconds: alarms.append(loop.call_later(seconds, self._wake))
        finally:
            for alarm in alarms:
                alarm.cancel()

    def _reading(self) -> Reading | None:
        """What is being read now."""
        reading = self._current_reading()
        return None if reading is None or reading.is_over else reading

    def _need_everybody(self) -> None:
        """Have connections to all nodes with vbuckets, unless a reading says which it needs."""
        assert self._nodes.map is not None
        if self._reading() is None:
            every = range(self._nodes.map.vbucket_count)
            self._nodes.need(every, copies_of=every if self._needs_replicas else ())

    def _homes(self) -> set[Address | None]:
        """The nodes that have vbuckets we need."""
        return {self._nodes.address_of(vbucket) for vbucket in self._needed_vbuckets()} - {None}

    def _needed_vbuckets(self) -> Iterable[int]:
        reading = self._reading()
        if reading is None:
            return range(self._nodes.map.vbucket_count) if self._nodes.map is not None else ()
        return [vb for vb, progress in reading.progress.items() if progress.state is not ReadingState.DONE]
