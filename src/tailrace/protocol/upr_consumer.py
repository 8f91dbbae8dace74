"""The consumer's side of a UPR connection, draft A or B: see `old_consumer`.

Two things are to be made up for. A snapshot has a start and an end message and no range, so its changes are
held back until the end or a limit comes; beyond the limit they are passed on as part of a snapshot that goes
at least to the next change, so that the position counts as inside of it until the real end is there. And what
was received of a snapshot that broke off is taken back, as the drafts' rule has it: the server is asked for
what follows the last whole one, which may be told differently by then.

The branch of a stream is asked for together with it, before: a log that is older than the stream may at worst
lead to a rollback that was not necessary, a newer one could hide one.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import ConnectError, MalformedMessage, RemoteProtocolError
from ..model import MAX_U64
from ..wire.codes import Datatype, Status, StreamEndStatus, UprBStreamEnd
from ..wire.dcp import DcpDeletion, DcpExpiration, DcpFailoverLogResponse, DcpMutation
from ..wire.dialect import UPR_A, UPR_B, Dialect
from ..wire.fields import decode_failover_log, is_json
from ..wire.header import Frame
from ..wire.message import Direction, Message
from ..wire.upr import (
    UprADeletion,
    UprAExpiration,
    UprAFailoverLog,
    UprAFailoverLogRequest,
    UprAFlush,
    UprAMutation,
    UprANotMyVBucket,
    UprAOk,
    UprARollback,
    UprASnapshotEnd,
    UprASnapshotStart,
    UprAStreamBegin,
    UprAStreamEndOk,
    UprAStreamEndStateChanged,
    UprAStreamRequest,
    UprBDeletion,
    UprBExpiration,
    UprBFailoverLogRequest,
    UprBFlush,
    UprBMutation,
    UprBSetVBucketState,
    UprBSnapshotEnd,
    UprBSnapshotStart,
    UprBStreamEndMessage,
    UprBStreamRequest,
    UprBStreamRequestResponse,
    UprBStreamStart,
)
from .chunk import Stream
from .dcp_consumer import ConsumerSettings
from .handshake import Introduction
from .old_consumer import OldConsumer

__all__ = ["UprAConsumer", "UprBConsumer", "UprConsumer"]

HELD_BYTES = 1 << 20
"""What is held back of one snapshot; a limit for each stream."""
WAITING_BYTES = 8 << 20
"""What may come of a stream before the server has said which branch it is on."""


@dataclass(slots=True, eq=False)
class _Upr:
    """One stream on this connection."""

    opaque: int
    stream: Stream
    exact: int
    """The last seqno of the last whole snapshot."""
    log: bytes | None = None
    is_accepted: bool = False
    is_told: bool = False
    """The answer to the request was passed on."""
    held: list[bytes] = field(default_factory=list)
    """Changes of the open snapshot; the last of them stands at ``seqno``."""
    held_bytes: int = 0
    seqno: int = 0
    waiting: list[Frame] = field(default_factory=list)
    """What came before it is known on which branch it is."""
    waiting_bytes: int = 0


class UprConsumer(OldConsumer):
    """What the drafts have in common."""

    DIALECT: ClassVar[Dialect]

    def __init__(
        self, introduction: Introduction, settings: ConsumerSettings, *, rng: random.Random, now: float
    ) -> None:
        self._open: dict[int, _Upr] = {}
        self._log_of: dict[int, int] = {}
        """Opaques of requests for a log, and of the stream that it is for."""
        super().__init__(introduction, settings, rng=rng, now=now)

    # requests

    def open_stream(
        self, stream: Stream, *, end_seqno: int = MAX_U64, flags: int = 0, value: bytes = b""
    ) -> None:
        opaque = self._register(stream)
        position = stream.position
        if position.is_partial:
            self._say_rollback(opaque, position.exact_at)
            self._pass_on()
            return
        one = self._open[opaque] = _Upr(opaque, stream, position.seqno, seqno=position.seqno)
        self._ask_for_log(one)
        branches = () if stream.log is None else stream.log.entries
        self._send(
            self._request(
                one,
                start_seqno=position.seqno,
                end_seqno=max(end_seqno, position.seqno),
                vb_uuid=position.vb_uuid,
                high_seqno=next((e.seqno for e in branches if e.vb_uuid == position.vb_uuid), 0),
            ).encode()
        )

    def _ask_for_log(self, one: _Upr) -> None:
        number = self._new_opaque()
        self._log_of[number] = one.opaque
        self._send(self._log_request(one.stream.vbucket, number).encode())

    @abstractmethod
    def _request(self, one: _Upr, **extras: Any) -> Message: ...

    @abstractmethod
    def _log_request(self, vbucket: int, opaque: int) -> Message: ...

    # what comes

    def _translate(self, frame: Frame) -> None:
        if frame.opaque in self._log_of:
            one = self._open.get(self._log_of.pop(frame.opaque))
            if one is not None and one.opaque in self._streams:
                self._got_log(one, self._log(frame))
            return
        one = self._open.get(frame.opaque)
        if one is None:
            raise RemoteProtocolError(
                f"a message with opaque 0x{frame.opaque:x}, which no stream of ours has"
            )
        if frame.opaque in self._retired:
            return
        if one.is_accepted and one.log is None:
            one.waiting.append(frame)
            one.waiting_bytes += frame.size
            if one.waiting_bytes > WAITING_BYTES:
                raise RemoteProtocolError(
                    f"the server does not say on which branch vbucket {one.stream.vbucket} is"
                )
            return
        self._take_frame(one, frame)

    def _take_frame(self, one: _Upr, frame: Frame) -> None:
        message = self.DIALECT.decode(frame, Direction.TO_CONSUMER)
        if one.is_accepted:
            self._message(one, message)
        else:
            self._answer_came(one, message)

    @abstractmethod
    def _log(self, frame: Frame) -> bytes | int:
        """The failover log in an answer, or the status instead of it."""

    @abstractmethod
    def _answer_came(self, one: _Upr, message: Message) -> None: ...

    @abstractmethod
    def _message(self, one: _Upr, message: Message) -> None: ...

    def _got_log(self, one: _Upr, log: bytes | int) -> None:
        if isinstance(log, int):
            if one.is_accepted:
                raise ConnectError(f"vbucket {one.stream.vbucket} went away while its stream was opened")
            return  # the answer to the request says the same
        if one.is_told and decode_failover_log(log)[0][1]:
            # it was asked for because of a flush, which makes a branch at 0
            raise ConnectError(f"vbucket {one.stream.vbucket} was taken back while it was flushed")
        one.log = log
        if one.is_accepted:
            self._tell_opened(one, log)

    def _accepted(self, one: _Upr) -> None:
        one.is_accepted = True
        if one.log is not None:
            self._tell_opened(one, one.log)

    def _tell_opened(self, one: _Upr, log: bytes) -> None:
        one.is_told = True
        self._say_opened(one.opaque, log)
        waiting, one.waiting, one.waiting_bytes = one.waiting, [], 0
        for index, frame in enumerate(waiting):
            if one.log is None:  # a flush was among them
                one.waiting = waiting[index:]
                one.waiting_bytes = sum(left.size for left in one.waiting)
                return
            self._take_frame(one, frame)

    def _refused(self, one: _Upr, status: int, value: bytes = b"") -> None:
        del self._open[one.opaque]
        self._say_refused(one.opaque, status, value)

    # changes

    def _mutation(self, one: _Upr, message: UprAMutation | UprBMutation, datatype: int) -> None:
        made = DcpMutation(
            by_seqno=message.by_seqno,
            rev_seqno=message.rev_seqno,
            flags=message.flags,
            expiry=message.expiry,
            lock_time=message.lock_time,
            cas=message.cas,
            key=message.key,
            value=message.value,
            datatype=datatype,
            opaque=one.opaque,
            vbucket=message.vbucket,
        )
        self._change(one, message.by_seqno, made.encode())

    def _removal(
        self,
        one: _Upr,
        message: UprADeletion | UprAExpiration | UprBDeletion | UprBExpiration,
        made: type[DcpDeletion | DcpExpiration],
    ) -> None:
        """When it happened, the drafts don't tell."""
        removal = made(
            by_seqno=message.by_seqno,
            rev_seqno=message.rev_seqno,
            cas=message.cas,
            key=message.key,
            opaque=one.opaque,
            vbucket=message.vbucket,
        )
        self._change(one, message.by_seqno, removal.encode())

    def _change(self, one: _Upr, seqno: int, change: bytes) -> None:
        if seqno == MAX_U64:
            raise MalformedMessage(f"a change has seqno {seqno}")
        if seqno <= one.seqno:
            raise MalformedMessage(f"item {seqno} follows item {one.seqno}", Status.ERANGE)
        if one.held_bytes > HELD_BYTES:
            # the snapshot goes on: all that is held but this one is told, as far as it is known to go
            self._say_marker(one.opaque, one.stream, one.exact + 1, seqno, is_disk=False)
            self._made += b"".join(one.held)
            one.held.clear()
            one.held_bytes = 0
        one.held.append(change)
        one.held_bytes += len(change)
        one.seqno = seqno

    # snapshots

    def _snapshot_ended(self, one: _Upr) -> None:
        if one.held:
            self._say_marker(one.opaque, one.stream, one.exact + 1, one.seqno, is_disk=False)
            self._made += b"".join(one.held)
            one.held.clear()
            one.held_bytes = 0
        one.exact = one.seqno

    def _flushed(self, one: _Upr) -> None:
        """All is gone, what is held too; the stream goes on with a new branch from 0."""
        one.held.clear()
        one.held_bytes = one.exact = one.seqno = 0
        self._say_flush(one.opaque, one.stream)
        one.log = None
        self._ask_for_log(one)

    def _ended(self, one: _Upr, status: int) -> None:
        if status == StreamEndStatus.OK:
            self._snapshot_ended(one)  # nothing more comes, so it is whole
        del self._open[one.opaque]
        self._say_end(one.opaque, one.stream, status)


class UprAConsumer(UprConsumer):
    """Draft A: one response for everything that is not OK and no rollback; no datatypes."""

    DIALECT = UPR_A

    def _request(self, one: _Upr, **extras: Any) -> Message:
        return UprAStreamRequest(opaque=one.opaque, vbucket=one.stream.vbucket, **extras)

    def _log_request(self, vbucket: int, opaque: int) -> Message:
        return UprAFailoverLogRequest(vbucket=vbucket, opaque=opaque)

    def _log(self, frame: Frame) -> bytes | int:
        message = UPR_A.decode(frame, Direction.TO_CONSUMER)
        return message.value if isinstance(message, UprAFailoverLog) else int(Status.NOT_MY_VBUCKET)

    def _answer_came(self, one: _Upr, message: Message) -> None:
        match message:
            case UprAOk():
                self._accepted(one)
            case UprARollback():
                self._refused(one, Status.ROLLBACK, message.value)
            case UprANotMyVBucket():
                self._refused(one, Status.NOT_MY_VBUCKET)
            case _:
                raise RemoteProtocolError(f"{message.name()} answers a stream request")

    def _message(self, one: _Upr, message: Message) -> None:
        match message:
            case UprAMutation():
                # the dialect has no datatypes; servers find out in the same way for plain writers
                self._mutation(one, message, int(Datatype.JSON) if is_json(message.value) else 0)
            case UprADeletion():
                self._removal(one, message, DcpDeletion)
            case UprAExpiration():
                self._removal(one, message, DcpExpiration)
            case UprASnapshotEnd():
                self._snapshot_ended(one)
            case UprAFlush():
                self._flushed(one)
            case UprAStreamEndOk():
                self._ended(one, StreamEndStatus.OK)
            case UprAStreamEndStateChanged():
                self._ended(one, StreamEndStatus.STATE_CHANGED)
            case UprAStreamBegin() | UprASnapshotStart():
                pass
            case _:
                raise RemoteProtocolError(f"{message.name()} in a stream")


class UprBConsumer(UprConsumer):
    """Draft B: answers have a status, and an unknown branch may be one of them."""

    DIALECT = UPR_B

    def _request(self, one: _Upr, **extras: Any) -> Message:
        return UprBStreamRequest(opaque=one.opaque, vbucket=one.stream.vbucket, **extras)

    def _log_request(self, vbucket: int, opaque: int) -> Message:
        return UprBFailoverLogRequest(vbucket=vbucket, opaque=opaque)

    def _log(self, frame: Frame) -> bytes | int:
        if frame.status != Status.SUCCESS:
            return frame.status
        return DcpFailoverLogResponse.decode(frame).value

    def _answer_came(self, one: _Upr, message: Message) -> None:
        if not isinstance(message, UprBStreamRequestResponse):
            raise RemoteProtocolError(f"{message.name()} answers a stream request")
        if message.status == Status.SUCCESS:
            self._accepted(one)
        elif message.status == Status.KEY_ENOENT:  # the branch is unknown: nothing of it can be kept
            del self._open[one.opaque]
            self._say_rollback(one.opaque, 0)
        else:
            self._refused(one, message.status, message.value)

    def _message(self, one: _Upr, message: Message) -> None:
        match message:
            case UprBMutation():
                self._mutation(one, message, message.datatype)
            case UprBDeletion():
                self._removal(one, message, DcpDeletion)
            case UprBExpiration():
                self._removal(one, message, DcpExpiration)
            case UprBSnapshotEnd():
                self._snapshot_ended(one)
            case UprBFlush():
                self._flushed(one)
            case UprBStreamEndMessage():
                is_ok = message.flag == UprBStreamEnd.OK
                self._ended(one, StreamEndStatus.OK if is_ok else StreamEndStatus.STATE_CHANGED)
            case UprBStreamStart() | UprBSnapshotStart() | UprBSetVBucketState():
                pass
            case _:
                raise RemoteProtocolError(f"{message.name()} in a stream")
