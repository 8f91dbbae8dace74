"""A question to all nodes of a bucket: which were asked, which have answered, and when to give up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from ..connstr import Address
from ..errors import ConnectError
from ..protocol.dcp.reader import DcpReader
from ..protocol.script import Script
from .nodes import Nodes

__all__ = ["Survey"]

T = TypeVar("T")


class Survey(Generic[T]):
    """One conversation with every node. ``wake_in`` calls `is_answered` again after so many seconds."""

    def __init__(
        self,
        nodes: Nodes,
        script_for: Callable[[Address], Script[T]],
        *,
        retry_for_s: float,
        wake_in: Callable[[float], object],
    ) -> None:
        self.answers: dict[Address, T] = {}
        self._nodes = nodes
        self._script_for = script_for
        self._retry_for_s = retry_for_s
        self._wake_in = wake_in
        self._asked: dict[Address, DcpReader] = {}
        self._lost_at: float | None = None

    def is_answered(
        self, homes: set[Address | None], unheeded: Sequence[Exception | None], now: float
    ) -> bool:
        """Ask the nodes that were not asked yet, or lost their connection over it; whether all have answered.

        ``unheeded`` says why connections were lost whose last changes nobody has taken yet.
        """
        if unheeded:
            # the next connection is made only when the application has taken what the lost one brought
            self._lose_patience(now, f"{unheeded[0]}; take the changes that it brought, then ask again")
        for node in self._nodes.ready():
            address, link = node.address, node.link
            if address in self.answers or link is None or self._asked.get(address) is link:
                continue
            if address in self._asked:
                self._lose_patience(now, f"{address} loses the connection over a question time and again")
            self._asked[address] = link
            link.ask(self._script_for(address), partial(self.answers.__setitem__, address), now)
        left = {address for address, link in self._nodes.links() if self._asked.get(address) is link}
        return left | homes <= self.answers.keys()

    def _lose_patience(self, now: float, reason: str) -> None:
        if self._lost_at is None:
            self._lost_at = now
            self._wake_in(self._retry_for_s + 0.1)
        elif now - self._lost_at >= self._retry_for_s:
            raise ConnectError(reason)
