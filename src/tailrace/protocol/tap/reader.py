"""The reader's side of a TAP connection: see `dcp.translating_reader`.

TAP has neither seqnos nor branches. A change's seqno is its place among the changes of its vbucket that this
reader was given, on branch 0, and all that comes in one go is a snapshot. What a reader can't resume by its
position, TAP resumes by the reader's name: the server remembers how far it was acknowledged, and a change is
acknowledged when the application has it. If the server doesn't remember, it begins again and says so for each
vbucket; the application hears that all of the vbucket is gone (`Flush`), and gets what there is.

A TAP connection has all its vbuckets from one request. It is sent when the last stream has been asked for; if
more come later, a new connection is made.

Rules: docs/spec/tap.md#connect, docs/spec/tap.md#reconnect, docs/spec/tap.md#acknowledgements.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import ConnectError, MalformedMessage, RemoteProtocolError, StatusError, UsageError
from ...history import FailoverLog
from ...model import MAX_U64, check_u64
from ...wire.codes import Magic, Op, Status, StreamEndStatus, TapConnectFlag, TapFlag, TapOpaque, TapOpcode
from ...wire.dcp import DcpDeletion, DcpMutation
from ...wire.dialect import TAP
from ...wire.header import MAX_NAME_BYTES, Frame
from ...wire.message import Direction
from ...wire.tap import (
    TapAck,
    TapCheckpointEnd,
    TapCheckpointStart,
    TapConnect,
    TapConnectOptions,
    TapDelete,
    TapFlush,
    TapMutation,
    TapOpaqueMessage,
    TapVBucketSet,
)
from ..dcp.delivery import ChangeDelivery, ReceivedChunk
from ..dcp.reader import ReaderSettings
from ..dcp.reader_stream import ReaderStream
from ..dcp.translating_reader import TranslatingReader
from ..handshake import Introduction
from ..questions import Patience

__all__ = ["TapReader", "TapSettings"]

_BRANCH = 0
_LOG = FailoverLog.of([(_BRANCH, 0)]).to_bytes()
_RUN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TapSettings:
    """The settings that only TAP has."""

    name: str = ""
    """The server recognises the reader by it; empty: a unique one."""
    registered: bool = False
    """The server remembers the reader, until it is told to forget it (`deregister`)."""
    acks: bool = True
    """Tell the server what the application has; otherwise it only remembers what it has sent."""
    backfill_date: int | None = None
    """Unix seconds: only changes since then, as far as the server can tell; None is everything."""
    deletions: bool = False
    """A reading that ends now includes deletions. A dump has none, so the reader connects as if to stay,
    without a name so that everything comes, and stops when the server says that the backfill is over.
    """

    def __post_init__(self) -> None:
        if len(str(self.name).encode()) > MAX_NAME_BYTES:  # `SourceOptions` checks types
            raise UsageError(f"the name of a TAP reader has up to {MAX_NAME_BYTES} bytes")
        if self.deletions and (self.name or self.registered):
            raise UsageError("a TAP reader with a name gets what changed since: it has no end")
        if self.backfill_date is not None:
            check_u64(self.backfill_date, "backfill_date")


@dataclass(slots=True, eq=False)
class _ReadVBucket:
    """One vbucket on this connection."""

    opaque: int
    stream: ReaderStream
    ends: bool
    """Whether only what exists now is wanted."""
    seqno: int
    is_again: bool
    """Whether it was read before, on another connection."""
    in_backfill: bool = False


@dataclass(slots=True, eq=False)
class _Run:
    """Changes of one vbucket that came in a row."""

    of: _ReadVBucket | None = None
    first: int = 0
    made: list[bytes] = field(default_factory=list)
    size_bytes: int = 0


class _OwedAcks:
    """Acknowledgements that wait until the application has used all that came before them."""

    def __init__(self) -> None:
        self._made = bytearray()
        self._unused: deque[tuple[ReceivedChunk, bytes]] = deque()
        """Chunks that the application has not used yet, and the acks to send when it has."""

    def add(self, ack: TapAck) -> None:
        """Add an acknowledgement of a message that has just come."""
        self._made += ack.encode()

    def due(self) -> bytes:
        """What can be sent now, if no chunk is unused; otherwise the acks wait for the last chunk."""
        acks = bytes(self._made)
        self._made.clear()
        if not acks or not self._unused:
            return acks
        chunk, before = self._unused.pop()
        self._unused.append((chunk, before + acks))
        return b""

    def wait_for(self, chunks: Iterable[ReceivedChunk]) -> None:
        """Have acknowledgements wait for these chunks, which the application gets."""
        self._unused += ((chunk, b"") for chunk in chunks)

    def used(self, chunk: ReceivedChunk) -> bytes:
        """The application has used a chunk and all before it; returns what can be sent now."""
        due = b""
        while self._unused:
            earlier, acks = self._unused.popleft()
            due += acks
            if earlier is chunk:
                break
        return due


class _Subscription:
    """What one connection reads: its vbuckets, all named by one request."""

    def __init__(self, tap: TapSettings, settings: ReaderSettings) -> None:
        self.vbuckets: dict[int, _ReadVBucket] = {}
        self.is_requested = False
        self.is_late = False
        """Whether a vbucket was added after the request."""
        self._tap = tap
        self._settings = settings

    def add(self, reading: _ReadVBucket) -> None:
        self.vbuckets[reading.stream.vbucket] = reading
        self.is_late |= self.is_requested

    @property
    def is_dump(self) -> bool:
        return not self._tap.deletions and any(reading.ends for reading in self.vbuckets.values())

    def request(self) -> TapConnect:
        flags = TapConnectFlag.LIST_VBUCKETS | TapConnectFlag.FIX_FLAG_BYTEORDER
        options = TapConnectOptions(vbuckets=sorted(self.vbuckets))
        if self.is_dump:
            flags |= TapConnectFlag.DUMP
        # only the first time: a server that has forgotten the reader must send everything
        if not any(reading.is_again for reading in self.vbuckets.values()):
            if any(reading.seqno for reading in self.vbuckets.values()):
                options.backfill_date = MAX_U64  # from now on
            else:
                options.backfill_date = self._tap.backfill_date
        if options.backfill_date is not None:
            flags |= TapConnectFlag.BACKFILL
        if self._tap.acks:
            flags |= TapConnectFlag.SUPPORT_ACK
        if self._tap.registered:
            flags |= TapConnectFlag.REGISTERED_CLIENT
        if self._settings.no_value:
            flags |= TapConnectFlag.KEYS_ONLY
        name = self._tap.name or self._settings.name
        return TapConnect.with_options(name.encode(), int(flags), options)

    def end_of_dump(self) -> list[_ReadVBucket]:
        """The vbuckets that are finished because the server has closed the connection.

        Some servers say nothing of a vbucket without documents.
        """
        left = list(self.vbuckets.values())
        is_complete = all(reading.ends and not reading.in_backfill for reading in left)
        return left if self.is_requested and self.is_dump and is_complete else []


class TapReader(TranslatingReader):
    """One connection to one node."""

    HAS_SEQNOS = False
    ONE_REQUEST = True

    def __init__(
        self,
        introduction: Introduction,
        settings: ReaderSettings,
        *,
        tap: TapSettings,
        rng: random.Random,
        now: float,
        patience: Patience | None = None,
    ) -> None:
        self._subscription = _Subscription(tap, settings)
        self._run = _Run()
        self._acks = _OwedAcks()
        super().__init__(introduction, settings, rng=rng, now=now, patience=patience)

    # connecting

    def open_stream(
        self, stream: ReaderStream, *, end_seqno: int = MAX_U64, flags: int = 0, value: bytes = b""
    ) -> None:
        opaque = self._streams.add(stream)
        self._subscription.add(
            _ReadVBucket(
                opaque,
                stream,
                ends=end_seqno != MAX_U64,
                seqno=stream.position.seqno,
                is_again=stream.log is not None and stream.log.newest.vb_uuid == _BRANCH,
            )
        )
        self._say_opened(opaque, _LOG)
        self._pass_on()

    def data_to_send(self) -> bytes:
        subscription = self._subscription
        if subscription.vbuckets and not subscription.is_requested:
            subscription.is_requested = self.is_spent = True
            self._send(subscription.request().encode())
        return super().data_to_send()

    def next_timer(self) -> float | None:
        return 0.0 if self._subscription.is_late else super().next_timer()

    def handle_timer(self, now: float) -> None:
        if self._subscription.is_late:
            raise ConnectError("there are more vbuckets to be read from this node: connecting again")
        super().handle_timer(now)

    # what comes

    def process(self, now: float) -> None:
        super().process(now)
        self._send(self._acks.due())

    def _pass_on(self) -> None:
        self._end_run()
        super()._pass_on()

    def _translate(self, frame: Frame) -> None:
        if frame.magic == Magic.RESPONSE:
            if frame.opcode == TapOpcode.CONNECT:
                raise StatusError(frame.status, "tap connect", frame.value)
            raise RemoteProtocolError(f"an answer with opaque {frame.opaque}, which no request has")
        if frame.opcode == Op.NOOP:
            return  # its arrival is enough
        try:
            message = TAP.decode(frame, Direction.TO_RECEIVER)
        except MalformedMessage:
            if frame.opcode != TapOpcode.OPAQUE:
                raise
            return  # a control message of another shape is not for us
        if isinstance(message, TapMutation | TapDelete | TapFlush) and not message.ttl:
            self._send(TapAck(opcode=frame.opcode, opaque=frame.opaque, status=Status.EINVAL).encode())
            return
        reading = self._subscription.vbuckets.get(frame.vbucket)
        match message:
            case TapMutation() | TapDelete():
                if reading is None:
                    raise RemoteProtocolError(f"a change of vbucket {frame.vbucket}, which is not read here")
                if reading.stream.vbucket in self._streams:
                    self._change(reading, message)
            case TapFlush():
                for started in self._subscription.vbuckets.values():
                    self._start_over(started)
            case TapOpaqueMessage() if reading is not None:
                self._take_control(reading, message.code)
            case TapOpaqueMessage() | TapVBucketSet() | TapCheckpointStart() | TapCheckpointEnd():
                pass  # nothing that a reader acts on
            case _:
                raise RemoteProtocolError(f"{message.name()} came, which was not asked for")
        if message.wants_ack:
            self._acks.add(TapAck(opcode=frame.opcode, opaque=frame.opaque))

    def _take_control(self, reading: _ReadVBucket, code: int) -> None:
        if code == TapOpaque.INITIAL_VBUCKET_STREAM:
            self._start_over(reading)
            reading.in_backfill = True
        elif code == TapOpaque.CLOSE_BACKFILL:
            reading.in_backfill = False
            if reading.ends:
                self._end(reading)

    def _change(self, reading: _ReadVBucket, message: TapMutation | TapDelete) -> None:
        run = self._run
        if run.of is not reading or run.size_bytes > _RUN_BYTES:
            self._end_run()
            run = self._run = _Run(reading, reading.seqno + 1)
        reading.seqno += 1
        if isinstance(message, TapMutation):
            change: DcpMutation | DcpDeletion = DcpMutation(
                by_seqno=reading.seqno,
                rev_seqno=message.rev_seqno or 0,
                flags=message.item_flags,
                expiry=message.item_expiry,
                cas=message.cas,
                key=message.key,
                value=message.value,
                # a value that was left out has no datatype
                datatype=0 if message.tap_flags & TapFlag.NO_VALUE else message.datatype,
                opaque=reading.opaque,
                vbucket=message.vbucket,
            )
        else:
            change = DcpDeletion(
                by_seqno=reading.seqno,
                rev_seqno=message.rev_seqno or 0,
                cas=message.cas,
                key=message.key,
                opaque=reading.opaque,
                vbucket=message.vbucket,
            )
        made = change.encode()
        run.made.append(made)
        run.size_bytes += len(made)

    def _end_run(self) -> None:
        run, self._run = self._run, _Run()
        if run.of is not None:
            self._say_marker(
                run.of.opaque, run.of.stream.vbucket, run.first, run.of.seqno, is_disk=run.of.in_backfill
            )
            self._made += b"".join(run.made)

    def _start_over(self, reading: _ReadVBucket) -> None:
        """Everything of a vbucket comes again, or nothing is left of it."""
        self._end_run()
        if reading.seqno and reading.stream.vbucket in self._streams:
            reading.seqno = 0
            self._say_flush(reading.opaque, reading.stream.vbucket)
            self._say_opened(reading.opaque, _LOG)

    def _end(self, reading: _ReadVBucket) -> None:
        self._end_run()
        del self._subscription.vbuckets[reading.stream.vbucket]
        self._say_end(reading.opaque, reading.stream.vbucket, StreamEndStatus.OK)

    def close_received(self) -> None:
        """The connection is closed, perhaps at the end of a dump."""
        ended = self._subscription.end_of_dump()
        for reading in ended:
            self._end(reading)
        if ended:
            self._pass_on()

    # acknowledgements

    def _scan(self) -> None:
        count = len(self._chunks)
        super()._scan()
        self._acks.wait_for(list(self._chunks)[count:])

    def release(self, delivery: ChangeDelivery) -> None:
        super().release(delivery)
        self._send(self._acks.used(delivery.chunk))
