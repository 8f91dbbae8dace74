"""One connection: bytes in, bytes out, no sockets.

    receive_data(data, now)      what came; answers are ready when it returns, or come later
    data_to_send(max_bytes)      what is to be sent, pulled while the transport has room
    next_timer(), handle_timer(now)
    closed, close_reason         send what is left, then close

Requests are answered in their order. An answer that takes time (the disk, a compaction) keeps its place in a
queue, and the answers behind it wait there, unless the peer takes them in any order; nothing else waits. A
change stream's answers are not in that queue, so beside one the requests themselves wait. A peer that has too
many unfinished commands, or does not read its answers, is not read from (`wants_data`), nor one that has sent
more than fits its turn (`has_backlog`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import DocumentRefused, FramingError, MalformedMessage, StoreError
from ..protocol.extended_errors import status_for_peer
from ..protocol.handler import Handler
from ..protocol.sasl import SaslServer
from ..wire.codes import Datatype, Feature, Magic, Op, Status
from ..wire.dialect import DCP, Dialect, Role, bind
from ..wire.header import HEADER_SIZE, Frame, check_magic, frame_size
from ..wire.message import Message
from . import commands, fastpath
from .answers import AnswerQueue
from .call import COMMANDS, Call, Pending, Refused, encode_response
from .features import GrantedFeatures
from .inbox import Inbox, room_before
from .login import Login
from .slow_commands import note_answer
from .streams import StreamHost, is_in_dialect, is_stream_frame, may_overtake, open_handler
from .turn import TURN_S

if TYPE_CHECKING:
    from .bucket import ServedBucket
    from .node import Node

__all__ = ["Session"]

log = logging.getLogger("tailrace.server")

assert commands  # imported for the table that it fills

_BEFORE_LOGIN = frozenset({Op.HELLO, Op.SASL_LIST_MECHS, Op.SASL_AUTH, Op.SASL_STEP, Op.GET_ERROR_MAP})
_RESPONSES = (Magic.RESPONSE, Magic.FLEX_RESPONSE)


def _nothing() -> None:
    """What `wake` is until somebody sets it."""


class Session:
    """One connection of a node."""

    def __init__(self, node: Node, peer: str, now: float, *, tls: bool = False) -> None:
        self.node = node
        self.peer = peer
        self.tls = tls
        self.wake: Callable[[], None] = _nothing
        """Called when there is something to send without a call of `receive_data` or `handle_timer`."""
        self.closed = False
        self.close_reason: str | None = None
        self.name = ""
        """What the client calls itself."""
        self.stream_name = ""
        """What the change stream on it is called."""
        self.login = Login(SaslServer(node.users, node.rng), now, needed=node.needs_login)
        self.bucket: ServedBucket | None = node.buckets.get("default")
        self.bucket_selected = False
        self.granted = GrantedFeatures()
        self.known_map: tuple[int, int] | None = None
        """Version of the cluster map that the peer got last."""
        self.handler: Handler | None = None
        self.dialect: Dialect | None = None
        self.role: Role | None = None
        """The node's role on a connection that is bound to a dialect."""

        self._inbox = Inbox()
        self._answers = AnswerQueue()
        self._finishing: str | None = None
        self._last_frame_at = self.opened_at = now

    @property
    def authenticated(self) -> bool:
        """Whether the peer may send more than a greeting."""
        return self.login.authenticated

    @property
    def features(self) -> frozenset[int]:
        """What HELLO granted."""
        return self.granted.codes

    @property
    def datatypes(self) -> int:
        """The datatype bits that the peer may use and see."""
        return self.granted.datatypes

    # receiving

    def exchange(self, data: bytes, now: float) -> bytes:
        """Like `receive_data`, but answers that are ready at once are returned if nothing waits before them,
        which is so for most reads of most connections.
        """
        bucket = self.bucket
        if not (
            self._inbox.has_parts
            or self._inbox.held
            or self._answers.ready
            or self._answers.waiting
            or bucket is None
            or self.handler is not None
            or self.closed
            or self._finishing is not None
            or not self.login.authenticated
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
        inbox = self._inbox
        if inbox.has_parts:
            inbox.add(data)
            if inbox.has_request and self._takes_requests():
                self._take_bytes(now)
        else:
            self._process(data, now)

    def _take_bytes(self, now: float) -> None:
        """Process the bytes that wait."""
        if self._inbox.has_large:
            frame, data = self._inbox.take_large(self._room_for)
            self._last_frame_at = now
            self._receive_frame(frame, now)
        else:
            data = self._inbox.take()
        self._process(data, now)

    def _room_for(self, front: Frame, value_bytes: int) -> int:
        if self.handler is not None or value_bytes <= self.node.settings.max_json_check:
            return 0
        return room_before(front, prefixed_keys=self.granted.prefixed_keys)

    @property
    def room(self) -> int:
        """How many bytes of answers may still be queued; if it is 0 or less, the next request waits."""
        return self.node.settings.max_output - self._answers.size

    @property
    def queued_bytes(self) -> int:
        """Bytes of answers that `data_to_send` has not returned yet."""
        return self._answers.size

    @property
    def unprocessed_bytes(self) -> int:
        """Bytes of requests that can't be processed yet, with the overhead of keeping them in pieces."""
        return self._inbox.size

    @property
    def wants_data(self) -> bool:
        """Whether to read from the peer."""
        return self._takes_requests() and not self.has_backlog

    def _takes_requests(self) -> bool:
        return not (self.closed or self._held_up() or self._inbox.held_bytes >= self.node.settings.max_output)

    @property
    def has_backlog(self) -> bool:
        """Whether requests have come that wait only for the connection's next turn."""
        if self._has_free_requests:
            return not self._held_up()
        return self._inbox.has_request and self._takes_requests()

    @property
    def _has_free_requests(self) -> bool:
        """Whether the requests that were held may go on."""
        return bool(self._inbox.held) and not self._answers.unfinished

    def _held_up(self) -> bool:
        settings, answers = self.node.settings, self._answers
        return (
            answers.size >= settings.max_output
            or answers.unfinished >= settings.max_in_flight
            or self._finishing is not None
            or (self.handler is not None and self.handler.is_busy)
        )

    def _process(self, data: bytes, now: float) -> None:
        at, end = 0, len(data)
        need, limit = HEADER_SIZE, self._max_frame
        monotonic = self.node.clock.monotonic
        turn_ends = monotonic() + TURN_S
        try:
            while self._takes_requests():
                # not beside a change stream, whose answers must be fetched first
                if (
                    self.bucket is not None
                    and self.login.authenticated
                    and self.handler is None
                    and not self._inbox.held
                    and not self.node.fenced
                ):
                    before = at
                    at, answers = fastpath.run(self, self.bucket, data, at)
                    if answers:
                        self.send_answer(answers)
                    # A turn processes one request at least: a slow one would be as slow in the next turn.
                    if at > before and monotonic() >= turn_ends:
                        break
                if at < end:
                    check_magic(data[at])  # a client that speaks text may never send a whole header
                if end - at < HEADER_SIZE or self.room <= 0:
                    break
                need = frame_size(data, at, limit)
                if end - at < need:
                    break
                frame = Frame.parse(data, at)
                at += need
                need = HEADER_SIZE
                self._receive_frame(frame, now)
                limit = self._max_frame  # it may have been a login
                if monotonic() >= turn_ends:
                    break
        except FramingError as error:
            self.close(str(error))
        if at:
            self._last_frame_at = now
        if not self.closed:
            self._inbox.keep(data[at:] if at else data, need, self._room_for)
        if self.bucket is not None:
            self.bucket.work.settle()

    def _receive_frame(self, frame: Frame, now: float) -> None:
        self.node.counters.cmd_total += 1
        if frame.magic in _RESPONSES:
            if self.handler is None:
                self.close("a response came, but there was no request")
            else:
                self.handler.receive_frame(frame, now)
                self._after_handler()
        elif frame.magic == Magic.SERVER_REQUEST:
            self.close("only the server sends magic 0x82")
        elif frame.magic != Magic.SERVER_RESPONSE:  # answers to our notifications are ignored
            self._receive_request(frame, now)

    def _receive_request(self, frame: Frame, now: float) -> None:
        held = self._inbox.held
        waits = (self._answers.unfinished or held) and (
            self.handler is not None or held or is_stream_frame(frame, self.dialect)
        )
        if waits and not may_overtake(frame, self.dialect):
            # its answer would not be in our queue, and would overtake that of the unfinished one
            self._inbox.hold(frame)
        else:
            self._take_request(frame, now)

    def _take_held(self, now: float) -> None:
        """Process the requests that waited, up to the next one that takes time."""
        monotonic = self.node.clock.monotonic
        turn_ends = monotonic() + TURN_S
        inbox, answers = self._inbox, self._answers
        while inbox.held and not (answers.unfinished or self.closed or self._held_up()):
            self._take_request(inbox.release(), now)
            if monotonic() >= turn_ends:
                break
        if self.bucket is not None:
            self.bucket.work.settle()

    def _take_request(self, frame: Frame, now: float) -> None:
        opcode = frame.opcode
        if not self.login.authenticated and opcode not in _BEFORE_LOGIN:
            self._refuse(frame, Refused(Status.EACCESS, "log in first"))
        elif is_stream_frame(frame, self.dialect):
            self._receive_stream_frame(frame, now)
        elif (command := COMMANDS.get(opcode)) is None:
            self._refuse(frame, Refused(Status.UNKNOWN_COMMAND))
        else:
            if self.handler is not None:
                self._pull(0)  # the handler's answers to what came before go first
            request: Message | Frame = frame
            try:
                request = command.message.decode(frame)
                call = Call(self, command, request, now)
                if call.is_barrier:
                    self._answers.add_barrier()
                if command.needs_bucket and self.bucket is None:
                    raise Refused(Status.NO_BUCKET, "select a bucket first")
                reply = call.run()
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
                    self._answers.add_pending(reply, is_barrier=call.is_barrier)
                else:
                    note_answer(call, reply)
                    if reply is not None and not command.silent_success:
                        self.send_answer(reply)
                self._maybe_finish()

    # change streams

    def _receive_stream_frame(self, frame: Frame, now: float) -> None:
        try:
            binding = bind(frame, first=self.dialect is None)
        except MalformedMessage as error:
            self._refuse(frame, Refused(error.status, str(error)))
            return
        if self.dialect is None:
            assert binding is not None
            if self.bucket is None:
                self._refuse(frame, Refused(Status.NO_BUCKET, "select a bucket first"))
                return
            if self.node.fenced:
                self._refuse(frame, Refused(Status.ETMPFAIL, "the node waits for its cluster map"))
                return
            dialect, role = binding
            if dialect is DCP:
                self.granted = GrantedFeatures(tuple(self.features), is_dcp=True)
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
        elif (binding is not None and binding[0] is not self.dialect) or not is_in_dialect(
            frame, self.dialect
        ):
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
            self._answers.add_first(bytes(part))

    # answers

    def send_answer(self, answer: bytes) -> None:
        """Queue an answer, or several in one, behind those before it."""
        self._answers.add(answer)

    def answered(self) -> None:
        """A pending answer has come."""
        self._answers.advance()
        self._maybe_finish()
        self.wake()

    def _maybe_finish(self) -> None:
        if self._finishing is not None and not self._answers.unfinished:
            self.close(self._finishing)

    def refusal(
        self, request: Message | Frame, error: Refused | DocumentRefused | MalformedMessage
    ) -> bytes | None:
        """The answer to a request that is refused; None if there is none: a quiet miss, or a peer that would
        not understand it and is disconnected.
        """
        opcode = request.opcode if isinstance(request, Frame) else request.OPCODE
        command = COMMANDS.get(opcode)
        if error.status == Status.KEY_ENOENT and command is not None and command.silent_miss:
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
        """Value and datatype of a 0x07 answer: a config, or nothing."""
        if self.bucket is None:
            return b"", 0
        current = self.node.map_of(self.bucket)
        if not current.is_known(self.known_map):
            self.known_map = current.version
        elif Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP in self.features:
            return b"", 0
        return current.shown_to(self.granted)

    def not_my_vbucket_refusal(self) -> Refused:
        """0x07 with the cluster map."""
        value, datatype = self.not_my_vbucket()
        return Refused(Status.NOT_MY_VBUCKET, "", value, datatype)

    def push(self, message: bytes) -> None:
        """Send a message that nobody asked for."""
        if not self.closed:
            self._answers.add_first(message)
            self.wake()

    # what HELLO, login and bucket selection change

    def set_features(self, granted: list[int]) -> None:
        """Grant these and no others from now on."""
        self.granted = GrantedFeatures(granted, is_dcp=self.dialect is DCP)
        self._answers.is_ordered = Feature.UNORDERED_EXECUTION not in self.granted.codes

    @property
    def _max_frame(self) -> int:
        settings = self.node.settings
        return settings.max_frame if self.login.authenticated else settings.max_frame_before_login

    def login_begun(self) -> None:
        """A login needs another step."""
        self.login.begin(self.node.clock.monotonic())

    def login_done(self, *, ok: bool) -> None:
        """A login ended; a peer that fails too often is disconnected after its answer."""
        if ok:
            self.login.succeed()
            return
        self.login.fail(self.node.clock.monotonic())
        self.node.counters.auth_errors += 1
        self.node.events.record("login_refused", peer=self.peer, user=self.login.sasl.claimed)
        if self.login.failures >= self.node.settings.max_logins:
            self.finish("too many failed logins")

    @property
    def unfinished(self) -> int:
        """Commands whose answers are not there yet."""
        return self._answers.unfinished

    # sending

    def data_to_send(self, max_bytes: int = 256 << 10, now: float | None = None) -> list[bytes | memoryview]:
        """What is to be sent next: all answers that are ready, then the change stream's, to about
        ``max_bytes``.

        Sending makes room: requests that were held up are processed.
        """
        out: list[bytes | memoryview] = []
        size = 0
        if not self._answers.ready and self.has_backlog:
            self._go_on(self.node.clock.monotonic() if now is None else now)
        if self._answers.ready:
            ready, size = self._answers.take()
            out += ready
        if self.handler is not None and size < max_bytes and not self.closed:
            parts = self.handler.data_to_send(max_bytes - size)
            out += parts
            size += sum(map(len, parts))
            if self.handler.close_requested is not None and not parts:
                self.close(self.handler.close_requested)
        self.node.counters.bytes_written += size
        return out

    def _go_on(self, now: float) -> None:
        """The next turn for what has come, held requests first."""
        if self._has_free_requests:
            self._take_held(now)
        else:
            self._take_bytes(now)

    @property
    def has_more(self) -> bool:
        """Whether it makes sense to ask for data again."""
        return self.handler is not None or bool(self._answers.ready) or self.has_backlog

    # time

    def next_timer(self) -> float | None:
        """When `handle_timer` wants to be called."""
        timers = [pending.deadline for pending in self._answers.pending()]
        settings = self.node.settings
        if not self.authenticated:
            timers.append(self.login.missing_since + settings.auth_timeout)
        elif settings.idle_timeout and self.handler is None:
            timers.append(self._last_frame_at + settings.idle_timeout)
        if self.handler is not None and (timer := self.handler.next_timer()) is not None:
            timers.append(timer)
        return min(timers) if timers else None

    def handle_timer(self, now: float) -> None:
        """Time has passed: give up what took too long."""
        if self.closed:
            return
        for pending in list(self._answers.pending()):
            if pending.deadline <= now:
                pending.fail(pending.on_timeout, "it took too long")
        settings = self.node.settings
        if not self.authenticated:
            if now >= self.login.missing_since + settings.auth_timeout:
                self.close("no login in time")
        elif (
            settings.idle_timeout
            and self.handler is None
            and not self._answers.unfinished
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
        self._answers.ready.clear()
        self.node.forget(self)

    def _let_go(self, reason: str) -> None:
        self._answers.cancel()
        self._inbox.clear()
        if self.handler is not None:
            handler, self.handler = self.handler, None
            handler.close(reason)
