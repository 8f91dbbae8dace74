"""A question to all nodes of a bucket: which were asked, which have answered, and when to give up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

from ..connstr import Address
from ..errors import ConnectError
from ..protocol.dcp.reader import DcpReader
from ..protocol.script import Script
from .nodes import KnownNode, Nodes

__all__ = ["AwayNodes", "Survey", "SurveyPatience"]

T = TypeVar("T")


class AwayNodes:
    """Nodes that can't be asked now: not connected, or the last question went unanswered for too long."""

    PATIENCE_S = 10.0
    """How long a connected node may be busy."""

    def __init__(self) -> None:
        self._late: dict[Address, DcpReader | None] = {}

    def __contains__(self, node: KnownNode) -> bool:
        if not node.is_ready:
            return node.troubled_since is not None or node.address in self._late
        return self._late.get(node.address) is node.link

    def add(self, node: KnownNode) -> None:
        """A node did not answer in time."""
        self._late[node.address] = node.link if node.is_ready else None

    def answered(self, address: Address) -> None:
        """A node has answered, in time or late."""
        self._late.pop(address, None)

    def is_late(self, node: KnownNode) -> bool:
        """Whether a node is connected but does not answer."""
        return node.is_ready and node in self


class SurveyPatience:
    """How long one question waits for the nodes that can be asked; ``wake_in`` has it checked again."""

    def __init__(self, away: AwayNodes, wake_in: Callable[[float], object]) -> None:
        self._away = away
        self._wake_in = wake_in
        self._until: float | None = None

    def is_over(self, silent: Iterable[KnownNode], now: float) -> bool:
        """Whether none of the nodes that have not answered is still waited for."""
        waited_for = [node for node in silent if node not in self._away]
        if self._until is None:
            self._until = now + self._away.PATIENCE_S
            if waited_for:
                self._wake_in(self._away.PATIENCE_S + 0.1)
        if now >= self._until:
            for node in waited_for:
                self._away.add(node)
            return True
        return not waited_for


class Survey(Generic[T]):
    """One conversation with every node. ``wake_in`` calls `is_answered` again after so many seconds.

    With ``away``, nodes that can't be asked, or take too long to answer, are left out.
    """

    def __init__(
        self,
        nodes: Nodes,
        script_for: Callable[[Address], Script[T]],
        *,
        retry_for_s: float,
        wake_in: Callable[[float], object],
        away: AwayNodes | None = None,
    ) -> None:
        self.answers: dict[Address, T] = {}
        self._nodes = nodes
        self._script_for = script_for
        self._retry_for_s = retry_for_s
        self._wake_in = wake_in
        self._away = away
        self._patience = None if away is None else SurveyPatience(away, wake_in)
        self._asked: dict[Address, DcpReader] = {}
        self._lost_at: float | None = None

    def is_answered(
        self, homes: set[Address | None], unheeded: Sequence[Exception | None], now: float
    ) -> bool:
        """Ask the nodes not asked yet, or whose connection was lost since; return whether all have answered.

        ``unheeded`` has the errors of lost connections whose last changes have not been taken yet.
        """
        if unheeded and self._away is None:
            # a new connection is made only when the application has taken what the lost one brought
            self._lose_patience(now, f"{unheeded[0]}; take the changes that it brought, then ask again")
        for node in self._nodes.ready():
            address, link = node.address, node.link
            if address in self.answers or link is None or self._asked.get(address) is link:
                continue
            if self._away is not None and node in self._away:
                continue  # it has a question already
            if address in self._asked and self._away is None:
                self._lose_patience(now, f"{address} loses the connection at every question")
            self._asked[address] = link
            link.ask(self._script_for(address), partial(self._answered, address), now)
        left = {address for address, link in self._nodes.links() if self._asked.get(address) is link}
        missing = (left | homes) - self.answers.keys()
        if self._patience is None:
            return not missing
        return self._patience.is_over([node for node in self._nodes.all() if node.address in missing], now)

    def _answered(self, address: Address, answer: T) -> None:
        self.answers[address] = answer
        if self._away is not None:
            self._away.answered(address)

    def _lose_patience(self, now: float, reason: str) -> None:
        if self._lost_at is None:
            self._lost_at = now
            self._wake_in(self._retry_for_s + 0.1)
        elif now - self._lost_at >= self._retry_for_s:
            raise ConnectError(reason)
