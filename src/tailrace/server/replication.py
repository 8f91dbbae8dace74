"""What a node receives from other nodes: the orders that it was given, and the connections that follow.

An order says from which node a vbucket comes. It stands until it is replaced: connections that break are made
again, streams that end are asked for again. A takeover is tried once; `Replication.status` says how it ended.
Everything here runs on the owner's thread; `Node.dial` is the pump's.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import MalformedMessage
from ..protocol.handshake import Credentials
from ..protocol.states import Machine
from ..wire.codes import AddStreamFlag, Status, VBucketState, status_name
from ..wire.dialect import DCP, UPR_A
from .states import ORDER_TRANSITIONS, OrderInput, OrderState
from .upstream import DIALECTS, ReplicationSource, SourceTls, Upstream

if TYPE_CHECKING:
    from .bucket import ServedBucket
    from .node import Node

__all__ = ["MAX_SOURCES", "Replication", "parse_orders"]

log = logging.getLogger("tailrace.server")

MAX_SOURCES = 1024
_RETRY_S = 0.5
_TAKE_OVER = int(AddStreamFlag.TAKE_OVER)


@dataclass(slots=True)
class Order:
    """An order to receive a vbucket."""

    source: ReplicationSource
    flags: int
    retry_at: float = 0.0
    error: str = ""
    machine: Machine[OrderState, OrderInput] = field(
        default_factory=lambda: Machine(ORDER_TRANSITIONS, OrderState.WAITING)
    )

    @property
    def state(self) -> OrderState:
        return self.machine.state


class Replication:
    """The orders of one bucket."""

    def __init__(self, node: Node, bucket: ServedBucket) -> None:
        self._node = node
        self._bucket = bucket
        self._orders: dict[int, Order] = {}
        self._upstreams: dict[ReplicationSource, Upstream] = {}
        self._retry_at: dict[ReplicationSource, float] = {}

    # orders

    def order(self, orders: Mapping[int, tuple[ReplicationSource, int]], now: float) -> None:
        """Follow these orders and no others from now on. What is under way and still ordered goes on."""
        for number in [number for number in self._orders if number not in orders]:
            self._drop(number)
        for number, (source, flags) in orders.items():
            current = self._orders.get(number)
            if current is not None and (current.source, current.flags) == (source, flags):
                current.retry_at = 0.0
                continue
            if current is not None:
                self._drop(number)
            self._orders[number] = Order(source, flags)
        wanted = {order.source for order in self._orders.values()}
        for source in [source for source in self._upstreams if source not in wanted]:
            self._upstreams.pop(source).close("not ordered any more")
        self._retry_at = {}
        self._advance(now)

    def ordered(self) -> dict[int, tuple[ReplicationSource, int]]:
        """The current orders."""
        return {number: (order.source, order.flags) for number, order in self._orders.items()}

    def _drop(self, number: int) -> None:
        order = self._orders.pop(number)
        upstream = self._upstreams.get(order.source)
        if upstream is not None and upstream.handler is not None and upstream.handler.close_stream(number):
            upstream.wake()

    def _advance(self, now: float) -> None:
        """Make the connections and ask for the streams that are due."""
        for source in dict.fromkeys(
            order.source for order in self._orders.values() if order.state is not OrderState.OVER
        ):
            if source not in self._upstreams and self._retry_at.get(source, 0.0) <= now:
                self._connect(source, now)
        for number, order in self._orders.items():
            upstream = self._upstreams.get(order.source)
            if (
                order.state is OrderState.WAITING
                and order.retry_at <= now
                and upstream is not None
                and upstream.handler is not None
            ):
                order.machine.feed(OrderInput.STREAM_ASKED)
                upstream.handler.add_stream(number, order.flags, partial(self._answered, number, order))
                upstream.wake()

    def _connect(self, source: ReplicationSource, now: float) -> None:
        upstream = Upstream(self._node, self._bucket, source, now)
        self._upstreams[source] = upstream
        upstream.on_open = partial(self._opened, upstream)
        upstream.on_closed = partial(self._closed, upstream)
        self._node.dial(upstream)

    # what happens

    def _opened(self, upstream: Upstream) -> None:
        assert upstream.handler is not None
        upstream.handler.on_end = partial(self._ended, upstream)
        self._advance(self._node.clock.monotonic())

    def _closed(self, upstream: Upstream, why: str) -> None:
        if self._upstreams.get(upstream.source) is not upstream:
            return
        del self._upstreams[upstream.source]
        self._retry_at[upstream.source] = self._node.clock.monotonic() + _RETRY_S
        for order in self._orders.values():
            if order.source == upstream.source:
                self._failed(order, why)

    def _answered(self, number: int, order: Order, status: int, opaque: int) -> None:
        if status == Status.SUCCESS:
            order.error = ""
        elif self._orders.get(number) is order:
            self._failed(order, status_name(status))

    def _ended(self, upstream: Upstream, number: int, why: str) -> None:
        order = self._orders.get(number)
        if order is not None and order.source == upstream.source:
            self._failed(order, why)

    def _failed(self, order: Order, why: str) -> None:
        """A stream is over or could not begin; ordinary ones are tried again."""
        order.error = why
        is_takeover = order.flags & _TAKE_OVER
        order.machine.feed(OrderInput.TAKEOVER_ENDED if is_takeover else OrderInput.STREAM_LOST)
        order.retry_at = self._node.clock.monotonic() + _RETRY_S

    # time

    def next_timer(self) -> float | None:
        """When `handle_timer` has something to do."""
        times = []
        for order in self._orders.values():
            upstream = self._upstreams.get(order.source)
            if order.state is not OrderState.WAITING:
                continue
            if upstream is None:
                times.append(max(order.retry_at, self._retry_at.get(order.source, 0.0)))
            elif upstream.handler is not None:
                times.append(order.retry_at)
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        """Retry what is due."""
        self._advance(now)

    def close(self) -> None:
        """The node stops."""
        self._orders.clear()
        for upstream in list(self._upstreams.values()):
            upstream.close("the node stops")
        self._upstreams.clear()

    # figures

    def status(self) -> dict[str, Any]:
        """The state of each vbucket of the bucket."""
        rows: dict[str, Any] = {}
        for vbucket in self._bucket.store:
            row: dict[str, Any] = {
                "state": VBucketState(vbucket.state).name.lower(),
                "high_seqno": vbucket.high_seqno,
                "complete_seqno": vbucket.complete_seqno,
                "persisted_seqno": vbucket.persisted_seqno,
                "vb_uuid": str(vbucket.uuid),
                "branches": [str(entry.vb_uuid) for entry in vbucket.failover_log.entries],
                "items": vbucket.item_count,
            }
            order = self._orders.get(vbucket.id)
            if order is not None:
                row["source"] = str(order.source)
                row["dialect"] = order.source.dialect
                row["takeover"] = bool(order.flags & _TAKE_OVER)
                row["stream"] = self._stream_state(vbucket.id, order)
                if order.error:
                    row["error"] = order.error
            rows[str(vbucket.id)] = row
        return rows

    def _stream_state(self, number: int, order: Order) -> str:
        if order.state is OrderState.OVER:
            return "over"
        upstream = self._upstreams.get(order.source)
        phase = (
            None if upstream is None or upstream.handler is None else upstream.handler.vbuckets.get(number)
        )
        return "waiting" if phase is None else phase.value


def parse_orders(content: object, vbucket_count: int) -> dict[int, tuple[ReplicationSource, int]]:
    """The orders of a REPLICATE request; `MalformedMessage` says what is wrong."""
    sources = content.get("sources") if isinstance(content, dict) else None
    if not isinstance(sources, list) or len(sources) > MAX_SOURCES:
        raise MalformedMessage(f"replicate: sources is not a list of up to {MAX_SOURCES}")
    orders: dict[int, tuple[ReplicationSource, int]] = {}
    for entry in sources:
        source = _source(entry)
        for name, flags in (("vbuckets", 0), ("takeover", _TAKE_OVER)):
            numbers = entry.get(name, [])
            if not isinstance(numbers, list):
                raise MalformedMessage(f"replicate: {name} is not a list")
            for number in numbers:
                if type(number) is not int or not 0 <= number < vbucket_count:
                    raise MalformedMessage("replicate: a vbucket that the bucket does not have")
                if number in orders:
                    raise MalformedMessage(f"replicate: vbucket {number} is named twice")
                orders[number] = source, flags
    return orders


def _source(entry: object) -> ReplicationSource:
    if not isinstance(entry, dict):
        raise MalformedMessage("replicate: a source is not an object")
    host, port = entry.get("host"), entry.get("port")
    if not isinstance(host, str) or not 1 <= len(host) <= 255:
        raise MalformedMessage("replicate: a source has no host")
    if type(port) is not int or not 1 <= port <= 0xFFFF:
        raise MalformedMessage("replicate: a source has no port")
    dialect = entry.get("dialect", DCP.name)
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        raise MalformedMessage(f"replicate: a source speaks one of {', '.join(DIALECTS)}")
    if dialect == UPR_A.name and entry.get("takeover"):
        raise MalformedMessage(f"replicate: {dialect} has no message for a takeover")
    name, password = entry.get("username"), entry.get("password")
    if name is None and password is None:
        return ReplicationSource(host, port, dialect=dialect, tls=_tls(entry))
    if not isinstance(name, str) or not isinstance(password, str):
        raise MalformedMessage("replicate: username and password are strings, and go together")
    return ReplicationSource(host, port, Credentials(name, password), dialect, _tls(entry))


def _tls(entry: dict[str, Any]) -> SourceTls | None:
    given = entry.get("tls")
    if given is None:
        return None
    ca, verify = (given.get("ca"), given.get("verify", True)) if isinstance(given, dict) else (None, None)
    if not isinstance(ca, str | None) or type(verify) is not bool:
        raise MalformedMessage("replicate: tls is an object with a string ca and a boolean verify")
    tls = SourceTls(ca, verify)
    try:
        tls.context()
    except (ssl.SSLError, ValueError):
        raise MalformedMessage("replicate: ca has no certificates in PEM form") from None
    return tls


Dial = Callable[[Upstream], None]
"""Make a socket for a connection, in the pump's own time; a failure calls `Upstream.close`."""
