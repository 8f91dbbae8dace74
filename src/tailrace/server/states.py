"""The states of what a node receives from other nodes, and every transition between them, as data.

The rules are those of `protocol/states.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocol.states import MachineEnum

__all__ = [
    "MACHINES",
    "ORDER_TRANSITIONS",
    "UPSTREAM_TRANSITIONS",
    "OrderInput",
    "OrderState",
    "UpstreamInput",
    "UpstreamState",
]


class OrderState(MachineEnum):
    """A vbucket that is to be received."""

    WAITING = "waiting"
    """For the connection, or for the next try."""
    ASKED = "asked"
    """For its stream."""
    OVER = "over"
    """A takeover, which is tried once."""


class OrderInput(MachineEnum):
    """What happens to an order."""

    STREAM_ASKED = "stream asked for"
    STREAM_LOST = "stream refused, ended, or its connection lost"
    TAKEOVER_ENDED = "takeover ended, well or not"


ORDER_TRANSITIONS: Mapping[tuple[OrderState, OrderInput], OrderState] = {
    (OrderState.WAITING, OrderInput.STREAM_ASKED): OrderState.ASKED,
    (OrderState.WAITING, OrderInput.STREAM_LOST): OrderState.WAITING,
    (OrderState.WAITING, OrderInput.TAKEOVER_ENDED): OrderState.OVER,
    (OrderState.ASKED, OrderInput.STREAM_LOST): OrderState.WAITING,
    (OrderState.ASKED, OrderInput.TAKEOVER_ENDED): OrderState.OVER,
    (OrderState.OVER, OrderInput.TAKEOVER_ENDED): OrderState.OVER,
}


class UpstreamState(MachineEnum):
    """A connection that the node makes to another one."""

    INTRODUCING = "introducing"
    """Itself: HELLO, login, bucket."""
    OPEN = "open"
    """Streams may be asked for."""
    CLOSED = "closed"


class UpstreamInput(MachineEnum):
    """What happens to such a connection."""

    INTRODUCED = "introduced"
    CLOSED = "closed"


UPSTREAM_TRANSITIONS: Mapping[tuple[UpstreamState, UpstreamInput], UpstreamState] = {
    (UpstreamState.INTRODUCING, UpstreamInput.INTRODUCED): UpstreamState.OPEN,
    (UpstreamState.INTRODUCING, UpstreamInput.CLOSED): UpstreamState.CLOSED,
    (UpstreamState.OPEN, UpstreamInput.CLOSED): UpstreamState.CLOSED,
}


MACHINES: Mapping[str, Mapping[tuple[Any, Any], Any]] = {
    "An order of a node to receive a vbucket": ORDER_TRANSITIONS,
    "A connection that a node makes to another one": UPSTREAM_TRANSITIONS,
}
"""Every table, with what it is about."""
