"""A connection that the node makes itself, to another node whose changes it replicates; no sockets.

To the pump it looks like a `Session`: bytes in, bytes out, timers. It introduces itself, logs in, opens the
other node as producer, and then hands over to a `DcpReplica`, or its counterpart in the source's dialect.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from ..errors import StatusError, TailraceError
from ..protocol.dcp.replica import OPEN_FLAGS, DcpReplica
from ..protocol.handshake import REPLICA_FEATURES, Credentials, Introduction, handshake
from ..protocol.script import Script, ScriptRunner, ask
from ..protocol.states import Machine
from ..protocol.upr.replica import UprAReplica, UprBReplica
from ..units import host_and_port
from ..wire.codes import Datatype, Feature, Magic
from ..wire.dcp import DcpOpen
from ..wire.dialect import DCP, UPR_A, UPR_B
from ..wire.framing import Framer
from ..wire.header import Frame
from .features import datatypes
from .states import UPSTREAM_TRANSITIONS, UpstreamInput, UpstreamState
from .streams import StreamHost
from .turn import TURN_S

if TYPE_CHECKING:
    from .bucket import ServedBucket
    from .node import Node

__all__ = ["DIALECTS", "ReplicationSource", "SourceTls", "Upstream"]

log = logging.getLogger("tailrace.server")

Replica: TypeAlias = Callable[[StreamHost, Callable[[], None], float], DcpReplica]

DIALECTS: Mapping[str, Replica] = {
    DCP.name: partial(DcpReplica, dialled=True),
    UPR_A.name: UprAReplica,
    UPR_B.name: UprBReplica,
}
"""The dialects in which a node can ask another one for changes; in TAP the other one pushes."""

_OLD_FEATURES = tuple(feature for feature in REPLICA_FEATURES if feature != Feature.COLLECTIONS)


@dataclass(frozen=True, slots=True)
class SourceTls:
    """Whom a node trusts when it connects to another one by TLS."""

    ca: str | None = field(default=None, repr=False)
    """Certificates in PEM form; None: the system's authorities."""
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """The settings as Python's ssl module wants them; `ssl.SSLError` if there is no certificate."""
        context = ssl.create_default_context(cadata=self.ca)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True)
class ReplicationSource:
    """Where a bucket's changes come from."""

    host: str
    port: int
    credentials: Credentials | None = field(default=None, repr=False)
    dialect: str = DCP.name
    """One of `DIALECTS`."""
    tls: SourceTls | None = None

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


class Upstream:
    """One connection to one node, for one bucket."""

    unfinished = 0

    def __init__(self, node: Node, bucket: ServedBucket, source: ReplicationSource, now: float) -> None:
        self.node = node
        self.source = source
        self.peer = str(source)
        self.wake: Callable[[], None] = lambda: None
        self.on_open: Callable[[], None] = lambda: None
        """Called when streams can be asked for."""
        self.on_closed: Callable[[str], None] = lambda why: None
        self.handler: DcpReplica | None = None
        self.features: frozenset[int] = frozenset()
        self._machine = Machine(UPSTREAM_TRANSITIONS, UpstreamState.INTRODUCING)
        self._out_of_turn = False  # frames may have come that wait for the next turn
        self._bucket = bucket
        self._deadline = now + node.settings.auth_timeout
        self._out: list[bytes | memoryview] = []
        self._framer = Framer(node.settings.max_frame)
        self._runner: ScriptRunner[frozenset[int]] = ScriptRunner(self._introduce())
        self._out.append(self._runner.start())

    def _introduce(self) -> Script[frozenset[int]]:
        name = f"tailrace-replication:{self.node.address.port}->{self.source.port}:{self._bucket.name}"
        is_dcp = self.source.dialect == DCP.name
        introduction = Introduction(
            agent="tailrace replication",
            bucket=self._bucket.name,
            credentials=self.source.credentials,
            features=REPLICA_FEATURES if is_dcp else _OLD_FEATURES,
            allow_plain=self.source.tls is not None,
        )
        session = yield from handshake(introduction, self.node.rng)
        if is_dcp:
            yield from ask(DcpOpen(key=name.encode(), flags=int(OPEN_FLAGS)), "dcp open")
        return session.features

    @property
    def closed(self) -> bool:
        return self._machine.state is UpstreamState.CLOSED

    # what the handler's host asks

    @property
    def datatypes(self) -> int:
        return datatypes(self.features) | Datatype.JSON

    def claim_name(self, name: bytes) -> None:
        """Do nothing: the peer names no stream on a connection that we made."""

    def not_my_vbucket(self) -> tuple[bytes, int]:
        return b"", 0

    # receiving

    def exchange(self, data: bytes, now: float) -> bytes:
        """Take bytes from the other node; answers come by `data_to_send`."""
        if not self.closed:
            self._framer.feed(data)
            self._process(now)
        return b""

    def _process(self, now: float) -> None:
        monotonic = self.node.clock.monotonic
        turn_ends = monotonic() + TURN_S
        self._out_of_turn = False
        try:
            while self._takes_frames() and (frame := self._framer.maybe_frame()) is not None:
                self._receive_frame(frame, now)
                if monotonic() >= turn_ends:
                    self._out_of_turn = True
                    break
        except TailraceError as error:
            self.close(str(error))

    def _receive_frame(self, frame: Frame, now: float) -> None:
        if self.handler is not None:
            self.handler.receive_frame(frame, now)
            self._after_handler()
            return
        runner = self._runner
        if frame.magic == Magic.SERVER_REQUEST:
            return
        if not runner.expects(frame):
            raise StatusError(frame.status, "an answer to no request", b"")
        self._out.append(runner.receive(frame))
        if runner.done:
            self._machine.feed(UpstreamInput.INTRODUCED)
            self.features = runner.result or frozenset()
            host = StreamHost(self, self._bucket)
            self.handler = DIALECTS[self.source.dialect](host, self._woken, now)
            self.on_open()

    def _after_handler(self) -> None:
        if self.handler is not None and self.handler.close_requested is not None:
            self.close(self.handler.close_requested)

    def _woken(self) -> None:
        """The handler has something to send, or takes frames again."""
        self.wake()

    @property
    def wants_data(self) -> bool:
        return self._takes_frames() and not self._out_of_turn

    def _takes_frames(self) -> bool:
        return not self.closed and (self.handler is None or not self.handler.is_busy)

    @property
    def has_backlog(self) -> bool:
        """Whether frames may have come that only wait for the connection's next turn."""
        return self._out_of_turn and self._takes_frames()

    # sending

    def data_to_send(self, max_bytes: int = 256 << 10) -> list[bytes | memoryview]:
        """What is to be sent; also processes frames that were held up."""
        self._process(self.node.clock.monotonic())
        out, self._out = self._out, []
        if self.handler is not None:
            out += self.handler.data_to_send(max_bytes)
            self._after_handler()
        return out

    @property
    def has_more(self) -> bool:
        return self.handler is not None or self.has_backlog

    # time

    def next_timer(self) -> float | None:
        if self.handler is None:
            return self._deadline
        return self.handler.next_timer()

    def handle_timer(self, now: float) -> None:
        if self.handler is None:
            if now >= self._deadline:
                self.close("no answer in time")
            return
        self.handler.handle_timer(now)
        self._after_handler()

    # the end

    def close(self, reason: str) -> None:
        """End the connection, which is of no more use."""
        if self.closed:
            return
        self._machine.feed(UpstreamInput.CLOSED)
        self._framer.take_rest()
        self._out = []
        if self.handler is not None:
            handler, self.handler = self.handler, None
            handler.close(reason)
        log.debug("%s: replication ends: %s", self.peer, reason)
        self.on_closed(reason)
        self.wake()

    def connection_lost(self) -> None:
        """The transport is gone."""
        self.close("the connection was lost")
