"""One connection: bytes in, bytes out, no sockets.

    receive_data(data, now)      what came; answers are ready when it returns, or come later
    data_to_send(max_bytes)      what is to be sent, pulled while the transport has room
    next_timer(), handle_timer(now)
    closed, close_reason         send what is left, then close

Requests are answered in their order. An answer that takes time (the disk, a compaction) keeps its place in a
queue, and the answers behind it wait there; nothing else waits. A change stream's answers are not in that
queue, so beside one the requests wait themselves. A peer that has too many unfinished commands, or does not
read its answers, is not read any further: `wants_data` says so. Nor is one that has sent more than fits into
its turn (see `turn`): `has_backlog` says so, and `data_to_send` goes on with it.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import DocumentRefused, FramingError, MalformedMessage, StoreError
from ..protocol.extended_errors import status_for_peer
from ..protocol.handler import Handler
from ..protocol.sasl import SaslServer
from ..wire.codes import CHANGE_STREAM_OPCODES, Datatype, Feature, Magic, Op, Status, TapOpcode
from ..wire.dialect import DCP, TAP, UPR_A, Dialect, Role, bind, opens_upr_a
from ..wire.header import HEADER_SIZE, Frame, frame_size
from ..wire.message import Message
from . import commands, fastpath, negotiate
from .call import COMMANDS, Call, Pending, Refused, encode_response
from .streams import StreamHost, may_overtake, open_handler
from .turn import TURN_S

if TYPE_CHECKING:
    from .bucket import ServedBucket
    from .node import Node

__all__ = ["Session"]

log = logging.getLogger("tailrace.server")

assert commands  # imported for the table that it fills

_BEFORE_LOGIN = frozenset({Op.HELLO, Op.SASL_LIST_MECHS, Op.SASL_AUTH, Op.SASL_STEP, Op.GET_ERROR_MAP})
_TAP_OPCODES = range(TapOpcode.CONNECT, TapOpcode.CHECKPOINT_END + 1)
_RESPONSES = (Magic.RESPONSE, Magic.FLEX_RESPONSE)
_PIECE_BYTES = 64
"""About what a piece of a request takes beside its bytes: a peer may send them one by one."""

_LARGE_BYTES = 1 << 20
_FRONT_BYTES = HEADER_SIZE + 0xFF
"""Header and framing extras of any request."""


def _nothing() -> None:
    """What `wake` is before somebody wants to know."""


class Session:
    """One connection of a node."""

    def __init__(self, node: Node, peer: str, now: float, *, tls: bool = False) -> None:
        self.node = node
        self.peer = peer
        self.tls = tls
        self.wake: Callable[[], None] = _nothing
        """Called when there is something to send without `receive_data` or `handle_timer` having been."""
        self.closed = False
        self.close_reason: str | None = None
        self.name = ""
        """What the client calls itself."""
        self.stream_name = ""
        """What the change stream on it is called."""
        self.sasl = SaslServer(node.users, node.rng)
        self.authenticated = not node.needs_login
        self.failed_logins = 0
        self.bucket: ServedBucket | None = node.buckets.get("default")
        self.bucket_selected = False
        self.features: frozenset[int] = frozenset()
        self.datatypes = 0
        self.prefixed_keys = False
        self.mutation_seqno = False
        self.known_map: tuple[int, int] | None = None
        """Version of the cluster map that the peer got last."""
        self.handler: Handler | None = None
        self.dialect: Dialect | None = None
        self.role: Role | None = None
        """What the node is on a connection that is bound to a dialect."""

        self._max_output = node.settings.max_output
        self._max_in_flight = node.settings.max_in_flight
        self._limit = node.settings.max_frame if self.authenticated else node.settings.max_frame_before_login
        self._parts: list[bytes] = []  # received and not yet processed
        self._have = 0
        self._need = HEADER_SIZE
        self._ready: list[bytes] = []  # to be sent
        self._waiting: deque[bytes | Pending] = deque()  # behind the first answer that is not there yet
        self._queued = 0  # bytes in both
        self._unfinished = 0  # Pendings in _waiting
        self._finishing: str | None = None
        self._held: deque[Frame] = deque()  # behind an unfinished command, beside a change stream
        self._held_bytes = 0
        self._without_login_since = self._last_frame_at = now

    # receiving

    def exchange(self, data: bytes, now: float) -> bytes:
        """As `receive_data`, but answers that are there at once, with nothing before them, are returned and
        need not be asked for. That is what most reads of most connections come to.
        """
        bucket = self.bucket
        if not (
            self._parts
            or self._ready
            or self._waiting
            or bucket is None
            or self.handler is not None
            or self.closed
            or not self.authenticated
            or self.node.fenced
        ):
            at, answers = fastpath.run(self, bucket, data, 0)
            if at == len(data):
                self._last_frame_at = now
                counters = self.node.counters
                counters.bytes_read += at
                counters.bytes_written += len(answers)
                return answers
            if at:
                self.node.counters.bytes_read += at
                self.send_answer(answers)
                data = data[at:]
        self.receive_data(data, now)
        return b""

    def receive_data(self, data: bytes, now: float) -> None:
        """Bytes from the peer."""
        if self.closed:
            return
        self.node.counters.bytes_read += len(data)
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            is_large = self._need >= _LARGE_BYTES and len(self._parts[0]) >= _FRONT_BYTES
            if is_large and self._takes_requests():
                data = self._receive_large(now)
            else:
                data = b"".join(self._parts)
                self._parts.clear()
        self._process(data, now)

    def _receive_large(self, now: float) -> bytes:
        """Take a large request whose parts are all there; returns what came behind it.

        Only its body is joined. Joined with the header first it would be copied twice, and a copy of 20 MiB
        holds everybody up for some milliseconds.
        """
        first, last = self._parts[0], self._parts[-1]
        frame = Frame.parse(first[:_FRONT_BYTES])  # its body is cut short
        end = len(last) - (self._have - self._need)
        body: list[bytes | memoryview]
        body = [memoryview(first)[HEADER_SIZE + len(frame.framing) :], *self._parts[1:-1], last[:end]]
        self._parts.clear()
        frame.body = b"".join(body)
        body.clear()
        self._receive_frame(frame, now)
        return last[end:]

    @property
    def room(self) -> int:
        """How many bytes of answers may be queued before the next request has to wait; none or less: it
        waits.
        """
        return self._max_output - self._queued

    @property
    def queued_bytes(self) -> int:
        """Of answers that nobody has asked for with `data_to_send` yet."""
        return self._queued

    @property
    def unprocessed_bytes(self) -> int:
        """Of requests that have come and can't be processed yet, with what keeping them in pieces takes."""
        parts = self._have + _PIECE_BYTES * len(self._parts) if self._parts else 0
        return parts + self._held_bytes

    @property
    def wants_data(self) -> bool:
        """Whether the peer should be read."""
        return self._takes_requests() and not self.has_backlog

    def _takes_requests(self) -> bool:
        return not self.closed and not self._held_up() and self._held_bytes < self._max_output

    @property
    def has_backlog(self) -> bool:
        """Whether requests have come that only wait for the connection's next turn."""
        if self._held and not self._unfinished:
            return not self._held_up()
        return bool(self._parts) and self._need <= self._have and not self._held_up()

    def _held_up(self) -> bool:
        return (
            self._queued >= self._max_output
            or self._unfinished >= self._max_in_flight
            or self._finishing is not None
            or (self.handler is not None and self.handler.is_busy)
        )

    def _process(self, data: bytes, now: float) -> None:
        at, end = 0, len(data)
        need = HEADER_SIZE
        monotonic = self.node.clock.monotonic
        turn_ends = monotonic() + TURN_S
        try:
            while self._takes_requests():
                # not beside a change stream, whose answers must be asked for first
                if (
                    self.bucket is not None
                    and self.authenticated
                    and self.handler is None
                    and not self.node.fenced
                ):
                    at, answers = fastpath.run(self, self.bucket, data, at)
                    if answers:
                        self.send_answer(answers)
                    if monotonic() >= turn_ends:
                        break
                if end - at < HEADER_SIZE or self._queued >= self._max_output:
                    break
                need = frame_size(data, at, self._limit)
                if end - at < need:
                    break
                frame = Frame.parse(data, at)
                at += need
                need = HEADER_SIZE
                self._receive_frame(frame, now)
                if monotonic() >= turn_ends:
                    break
        except FramingError as error:
            self.close(str(error))
        if at:
            self._last_frame_at = now
        self._have = end - at
        if self._have and not self.closed:
            self._parts.append(data[at:] if at else data)
            self._need = need
        if self.bucket is not None:
            self.bucket.work.settle()

    def _receive_frame(self, frame: Frame, now: float) -> None:
        self.node.counters.cmd_total += 1
        if frame.magic in _RESPONSES:
            if self.handler is None:
                self.close("a response came, but nothing was asked")
            else:
                self.handler.receive_frame(frame, now)
                self._after_handler()
        elif frame.magic == Magic.SERVER_REQUEST:
            self.close("only the server sends magic 0x82")
        elif frame.magic != Magic.SERVER_RESPONSE:  # answers to our notifications are ignored
            self._receive_request(frame, now)

    def _receive_request(self, frame: Frame, now: float) -> None:
        waits = self.handler is not None and (self._unfinished or self._held)
        if waits and not may_overtake(frame, self.dialect):
            # its answer would not be in our queue, and overtake that of the unfinished command
            self._held.append(frame)
            self._held_bytes += frame.size + _PIECE_BYTES
        else:
            self._take_request(frame, now)

    def _take_held(self, now: float) -> None:
        """Take up the requests that waited, up to the next one that takes time."""
        monotonic = self.node.clock.monotonic
        turn_ends = monotonic() + TURN_S
        while self._held and not (self._unfinished or self.closed or self._held_up()):
            frame = self._held.popleft()
            self._held_bytes -= frame.size + _PIECE_BYTES
            self._take_request(frame, now)
            if monotonic() >= turn_ends:
                break
        if self.bucket is not None:
            self.bucket.work.settle()

    def _take_request(self, frame: Frame, now: float) -> None:
        opcode = frame.opcode
        if not self.authenticated and opcode not in _BEFORE_LOGIN:
            self._refuse(frame, Refused(Status.EACCESS, "log in first"))
        elif self._is_stream_frame(frame):
            self._receive_stream_frame(frame, now)
        elif (found := COMMANDS.get(opcode)) is None:
            self._refuse(frame, Refused(Status.UNKNOWN_COMMAND))
        else:
            if self.handler is not None:
                self._pull(0)  # the handler's answers to what came before go first
            request: Message | Frame = frame
            try:
                request = found.message.decode(frame)
                call = Call(self, found, request, now)
                if found.needs_bucket and self.bucket is None:
                    raise Refused(Status.NO_BUCKET, "select a bucket first")
                reply = found.run(call)
            except (Refused, DocumentRefused, MalformedMessage) as error:
                answer = self.refusal(request, error)
                if answer is not None:
                    self.send_answer(answer)
            except StoreError as error:
                log.error("%s: opcode 0x%02x failed: %s", self.peer, opcode, error)
                self._refuse(frame, Refused(Status.EINTERNAL, "the store failed, see the log"))
            except Exception:
                log.exception("%s: a bug in opcode 0x%02x", self.peer, opcode)
                self._refuse(frame, Refused(Status.EINTERNAL, "a bug, see the log"))
            else:
                if isinstance(reply, Pending):
                    self._enqueue(reply)
                elif reply is not None and not found.silent_success:
                    self.send_answer(reply)
                if self._finishing is not None and not self._waiting:
                    self.close(self._finishing)

    # change streams

    def _is_stream_frame(self, frame: Frame) -> bool:
        opcode = frame.opcode
        if opcode in CHANGE_STREAM_OPCODES or opcode in _TAP_OPCODES:
            return True
        if self.dialect is UPR_A and 1 <= opcode <= 5:
            return True
        return opens_upr_a(frame)

    def _receive_stream_frame(self, frame: Frame, now: float) -> None:
        try:
            found = bind(frame, first=self.dialect is None)
        except MalformedMessage as error:
            self._refuse(frame, Refused(error.status, str(error)))
            return
        if self.dialect is None:
            assert found is not None
            if self.bucket is None:
                self._refuse(frame, Refused(Status.NO_BUCKET, "select a bucket first"))
                return
            if self.node.fenced:
                self._refuse(frame, Refused(Status.ETMPFAIL, "the node waits for its cluster map"))
                return
            dialect, role = found
            if dialect is DCP:
                self.datatypes |= int(Datatype.JSON)
            handler = open_handler(StreamHost(self, self.bucket), dialect, role, self._wake_handler, now)
            if handler is None:
                self._refuse(
                    frame,
                    Refused(
                        Status.NOT_SUPPORTED, f"{dialect.name} with the server as {role.value} is not served"
                    ),
                )
                return
            self.dialect, self.role, self.handler = dialect, role, handler
        elif (found is not None and found[0] is not self.dialect) or not self._in_dialect(frame):
            self._refuse(frame, Refused(Status.EINVAL, f"the connection is bound to {self.dialect.name}"))
            self.close("a packet of another dialect")
            return
        assert self.handler is not None
        self.handler.receive_frame(frame, now)
        if not self.handler.is_open:
            self._pull(0)
            self.handler.close("it was not opened")
            self.handler = self.dialect = None
        self._after_handler()

    def _in_dialect(self, frame: Frame) -> bool:
        if self.dialect is UPR_A:
            return frame.opcode == Op.SET and frame.extras_length != 8
        return (frame.opcode in _TAP_OPCODES) == (self.dialect is TAP)

    def _after_handler(self) -> None:
        if self.handler is not None and self.handler.close_requested is not None:
            self._pull(self.node.settings.max_output)
            self.close(self.handler.close_requested)

    def _wake_handler(self) -> None:
        self.wake()

    def _pull(self, max_bytes: int) -> None:
        """Move what the handler has into our queue, behind what is there."""
        assert self.handler is not None
        for part in self.handler.data_to_send(max_bytes):
            self._ready.append(bytes(part))
            self._queued += len(part)

    # answers

    def send_answer(self, answer: bytes) -> None:
        """Queue an answer, or several in one, behind those before it."""
        self._queued += len(answer)
        (self._waiting if self._waiting else self._ready).append(answer)

    def _enqueue(self, pending: Pending) -> None:
        self._waiting.append(pending)
        self._unfinished += 1
        self._drain()

    def answered(self) -> None:
        """A pending answer has come."""
        self._drain()
        self.wake()

    def _drain(self) -> None:
        """Move the answers that nothing is waiting in front of."""
        waiting = self._waiting
        while waiting:
            first = waiting[0]
            if isinstance(first, Pending):
                if first.answer is None:
                    return
                self._unfinished -= 1
                self._queued += len(first.answer)
                first = first.answer
            self._ready.append(first)
            waiting.popleft()
        if self._finishing is not None:
            self.close(self._finishing)

    def refusal(
        self, request: Message | Frame, error: Refused | DocumentRefused | MalformedMessage
    ) -> bytes | None:
        """The answer to a request that is refused; None if there is none: a quiet miss, or a peer that would
        not understand it and is disconnected.
        """
        opcode = request.opcode if isinstance(request, Frame) else request.OPCODE
        found = COMMANDS.get(opcode)
        if error.status == Status.KEY_ENOENT and found is not None and found.silent_miss:
            return None
        status = status_for_peer(error.status, opcode, self.features)
        if status is None:
            self.close(f"status 0x{error.status:02x} for a peer without extended errors")
            return None
        value, datatype = b"", 0
        if isinstance(error, Refused) and error.value:
            value, datatype = error.value, error.datatype & self.datatypes
        else:
            context = error.context if isinstance(error, Refused) else str(error.what)
            if context and Feature.XERROR in self.features:
                value = json.dumps({"error": {"context": context}}).encode()
                datatype = Datatype.JSON & self.datatypes
        return encode_response(opcode, request.opaque, status, value=value, datatype=datatype)

    def _refuse(self, frame: Frame, error: Refused) -> None:
        if self.handler is not None:
            self._pull(0)  # its answers to what came before go first
        answer = self.refusal(frame, error)
        if answer is not None:
            self.send_answer(answer)

    def claim_name(self, name: bytes) -> None:
        """The change stream on this connection goes by that name."""
        assert self.bucket is not None
        self.node.claim_name(self.bucket.name, name, self)

    def not_my_vbucket(self) -> tuple[bytes, int]:
        """Value and datatype of a 0x07 answer: a whole config, or nothing."""
        if self.bucket is None:
            return b"", 0
        found = self.node.map_of(self.bucket)
        if self.known_map == found.version and Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP in self.features:
            return b"", 0
        self.known_map = found.version
        return found.text, Datatype.JSON & self.datatypes

    def not_my_vbucket_refusal(self) -> Refused:
        """0x07 with the cluster map."""
        value, datatype = self.not_my_vbucket()
        return Refused(Status.NOT_MY_VBUCKET, "", value, datatype)

    def push(self, message: bytes) -> None:
        """Send something that was not asked for."""
        if not self.closed:
            self._ready.append(message)
            self._queued += len(message)
            self.wake()

    # what HELLO, login and bucket selection change

    def set_features(self, granted: list[int]) -> None:
        """From now on these and no others."""
        self.features = frozenset(granted)
        self.datatypes = int(negotiate.datatypes(self.features))  # plain, the hot path asks for it
        if self.dialect is DCP:
            self.datatypes |= int(Datatype.JSON)
        self.prefixed_keys = Feature.COLLECTIONS in self.features
        self.mutation_seqno = Feature.MUTATION_SEQNO in self.features

    def login_begun(self) -> None:
        """A login goes on with another step; the one before it is over, where logins count."""
        self._log_out()

    def _log_out(self) -> None:
        if self.authenticated and self.node.needs_login:
            self.authenticated = False
            self._without_login_since = self.node.clock.monotonic()

    def login_done(self, *, ok: bool) -> None:
        """A login ended; a peer that fails too often is disconnected after its answer."""
        if ok:
            self.authenticated = True
            self._limit = self.node.settings.max_frame
            return
        self._log_out()  # a failed attempt takes an earlier login away
        self.failed_logins += 1
        self.node.counters.auth_errors += 1
        if self.failed_logins >= self.node.settings.max_logins:
            self.finish("too many failed logins")

    @property
    def unfinished(self) -> int:
        """Commands whose answers are not there yet."""
        return self._unfinished

    # sending

    def data_to_send(self, max_bytes: int = 256 << 10, now: float | None = None) -> list[bytes | memoryview]:
        """What is to be sent next: all answers that are ready, then the change stream's, to about
        ``max_bytes``.

        Sending makes room: requests that were held up are taken up again.
        """
        out: list[bytes | memoryview] = []
        size = 0
        if not self._ready and self.has_backlog:
            self._go_on(self.node.clock.monotonic() if now is None else now)
        if self._ready:
            out += self._ready
            size = sum(map(len, self._ready))
            self._ready.clear()
            self._queued -= size
        if self.handler is not None and size < max_bytes and not self.closed:
            parts = self.handler.data_to_send(max_bytes - size)
            out += parts
            size += sum(map(len, parts))
            if self.handler.close_requested is not None and not parts:
                self.close(self.handler.close_requested)
        self.node.counters.bytes_written += size
        return out

    def _go_on(self, now: float) -> None:
        """The next turn of what has come: first what waited behind an unfinished command."""
        if self._held:
            self._take_held(now)
        else:
            data = b"".join(self._parts)
            self._parts.clear()
            self._process(data, now)

    @property
    def has_more(self) -> bool:
        """Whether it makes sense to ask for data again."""
        return self.handler is not None or bool(self._ready) or self.has_backlog

    # time

    def next_timer(self) -> float | None:
        """When `handle_timer` wants to be called."""
        timers = [one.deadline for one in self._waiting if isinstance(one, Pending) and one.answer is None]
        settings = self.node.settings
        if not self.authenticated:
            timers.append(self._without_login_since + settings.auth_timeout)
        elif settings.idle_timeout and self.handler is None:
            timers.append(self._last_frame_at + settings.idle_timeout)
        if self.handler is not None and (timer := self.handler.next_timer()) is not None:
            timers.append(timer)
        return min(timers) if timers else None

    def handle_timer(self, now: float) -> None:
        """Time has passed: give up what took too long."""
        if self.closed:
            return
        for one in list(self._waiting):
            if isinstance(one, Pending) and one.answer is None and one.deadline <= now:
                one.fail(one.on_timeout, "it took too long")
        settings = self.node.settings
        if not self.authenticated:
            if now >= self._without_login_since + settings.auth_timeout:
                self.close("no login in time")
        elif (
            settings.idle_timeout
            and self.handler is None
            and not self._waiting
            and now >= self._last_frame_at + settings.idle_timeout
        ):
            self.close("idle for too long")
        if self.handler is not None:
            timer = self.handler.next_timer()
            if timer is not None and timer <= now:
                self.handler.handle_timer(now)
                self._after_handler()

    # the end

    def finish(self, reason: str) -> None:
        """Take no more requests; close when those under way are answered."""
        self._finishing = reason

    def close(self, reason: str) -> None:
        """Nothing more is received; what is ready may still be sent, then the connection ends."""
        if not self.closed:
            self.closed = True
            self.close_reason = reason
            log.debug("%s: closing: %s", self.peer, reason)
            self._let_go(reason)
            self.wake()

    def connection_lost(self) -> None:
        """The transport is gone."""
        if not self.closed:
            self.closed = True
            self.close_reason = "the peer closed the connection"
            self._let_go(self.close_reason)
        self._ready.clear()
        self.node.forget(self)

    def _let_go(self, reason: str) -> None:
        for one in self._waiting:
            if isinstance(one, Pending):
                one.cancelled = True
        self._waiting.clear()
        self._parts.clear()
        self._held.clear()
        self._held_bytes = 0
        if self.handler is not None:
            handler, self.handler = self.handler, None
            handler.close(reason)
