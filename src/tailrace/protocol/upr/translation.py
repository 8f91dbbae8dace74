"""Streams of UPR, draft A or B, said again in DCP: for our reader (`reader`) and for a node that keeps
a replica (`replica`).

Two things are to be made up for. A snapshot has a start and an end message and no range, so its changes are
held back until the end or a limit comes; beyond the limit they are passed on as part of a snapshot that goes
at least to the next change, so that the position counts as inside of it until the real end is there. And what
was received of a snapshot that broke off is taken back, as the drafts' rule has it: the server is asked for
what follows the last whole one, which may be told differently by then.

The branch of a stream is asked for together with it, before: for a reader a log that is older than the stream
may at worst lead to a rollback that was not necessary, while a newer one could hide one. A replica passes the
log on to readers of its own, and so it asks behind the stream request too. Only if nothing has changed in
between does the log belong to the stream; until that is known no snapshot is at its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import ConnectError, MalformedMessage, RemoteProtocolError
from ...history import FailoverLog
from ...model import MAX_U64, Position
from ...wire.codes import Datatype, Status, StreamEndStatus, UprBStreamEnd, UprBVBucketState, VBucketState
from ...wire.dcp import DcpDeletion, DcpExpiration, DcpFailoverLogResponse, DcpMutation, DcpSetVBucketState
from ...wire.dialect import UPR_A, UPR_B, Dialect
from ...wire.fields import decode_failover_log, encode_failover_log, is_json
from ...wire.header import Frame
from ...wire.message import Direction, Message
from ...wire.upr import (
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
from ..dcp.translation import DcpTranslation
from ..states import UPR_STREAM_TRANSITIONS, Machine, UprStreamInput, UprStreamState

__all__ = ["UprATranslation", "UprBTranslation", "UprTranslation"]

HELD_BYTES = 1 << 20
"""What is held back of one snapshot; a limit for each stream."""
ALL_HELD_BYTES = 64 << 20
"""What is held back of all snapshots of a connection."""
WAITING_BYTES = 32 << 20
"""What may come of a connection's streams before the server has said which branch they are on."""

_FRAME_BYTES = 256
"""What a frame that waits takes beside its own bytes."""


@dataclass(slots=True, eq=False)
class _Upr:
    """One stream on this connection."""

    opaque: int
    vbucket: int
    exact: int
    """The last seqno of the last whole snapshot."""
    is_certain: bool
    """The log is surely that of the stream."""
    log: bytes | None = None
    machine: Machine[UprStreamState, UprStreamInput] = field(
        default_factory=lambda: Machine(UPR_STREAM_TRANSITIONS, UprStreamState.ASKED)
    )
    held: list[bytes] = field(default_factory=list)
    """Changes of the open snapshot; the last of them stands at ``seqno``."""
    held_bytes: int = 0
    seqno: int = 0
    is_whole: bool = True
    """With what came the snapshot is at its end."""
    waiting: list[Frame] = field(default_factory=list)
    """What came before it is known on which branch it is."""

    @property
    def is_accepted(self) -> bool:
        return self.machine.state not in (UprStreamState.ASKED, UprStreamState.LOG_KNOWN)

    @property
    def is_open(self) -> bool:
        return self.machine.state is UprStreamState.OPEN


class UprTranslation(DcpTranslation, ABC):
    """What the drafts have in common."""

    DIALECT: ClassVar[Dialect]

    def __init__(
        self,
        made: bytearray,
        send: Callable[[bytes], None],
        new_opaque: Callable[[], int],
        *,
        group: str,
        for_replica: bool = False,
    ) -> None:
        """What is said in DCP goes to the end of ``made``, what is to be sent in the draft to ``send``; by
        ``group`` the producer's operators recognise the streams.
        """
        self._made = made
        self._send = send
        self._new_opaque = new_opaque
        self._group = group.encode()
        self._for_replica = for_replica
        self._open: dict[int, _Upr] = {}
        self._log_of: dict[int, _Upr] = {}
        """Opaques of requests for a log, and the stream that it is for."""
        self._held_bytes = 0
        self._waiting_bytes = 0

    # requests

    def request(
        self,
        opaque: int,
        vbucket: int,
        position: Position,
        log: FailoverLog | None,
        end_seqno: int = MAX_U64,
    ) -> None:
        """Ask for a vbucket from a position, whose branch is in ``log``."""
        if position.is_partial:
            self._say_rollback(opaque, position.exact_at)
            return
        start = position.seqno
        one = self._open[opaque] = _Upr(opaque, vbucket, start, not self._for_replica, seqno=start)
        self._ask_for_log(one)
        branches = () if log is None else log.entries
        self._send(
            self._request(
                one,
                start_seqno=start,
                end_seqno=max(end_seqno, start),
                vb_uuid=position.vb_uuid,
                high_seqno=next((e.seqno for e in branches if e.vb_uuid == position.vb_uuid), 0),
            ).encode()
        )
        if not one.is_certain:
            self._ask_for_log(one)

    def _ask_for_log(self, one: _Upr) -> None:
        number = self._new_opaque()
        self._log_of[number] = one
        self._send(self._log_request(one.vbucket, number).encode())

    @abstractmethod
    def _request(self, one: _Upr, **extras: Any) -> Message: ...

    @abstractmethod
    def _log_request(self, vbucket: int, opaque: int) -> Message: ...

    def forget(self, opaque: int) -> None:
        """Nothing is to be said of a stream any more."""
        one = self._open.pop(opaque, None)
        if one is not None:
            self._held_bytes -= one.held_bytes
            self._waiting_bytes -= sum(map(_cost, one.waiting))

    # what comes

    def receive(self, frame: Frame) -> None:
        """A message of the draft."""
        if frame.opaque in self._log_of:
            one = self._log_of.pop(frame.opaque)
            if self._open.get(one.opaque) is one:
                self._got_log(one, self._log(frame))
            return
        found = self._open.get(frame.opaque)
        if found is None:
            raise RemoteProtocolError(
                f"a message with opaque 0x{frame.opaque:x}, which no stream of ours has"
            )
        if found.is_accepted and not found.is_open:
            found.waiting.append(frame)
            self._waiting_bytes += _cost(frame)
            if self._waiting_bytes > WAITING_BYTES:
                raise RemoteProtocolError(
                    f"the server does not say on which branch vbucket {found.vbucket} is"
                )
            return
        self._take_frame(found, frame)

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
                raise ConnectError(f"vbucket {one.vbucket} went away while its stream was opened")
            return  # the answer to the request says the same
        if one.log is not None:
            if log != one.log:
                raise ConnectError(f"vbucket {one.vbucket} got another branch while its stream was opened")
            one.is_certain = True
            if one.is_whole:
                self._pass_snapshot_on(one)
            return
        if one.machine.state is UprStreamState.AWAITING_BRANCH and decode_failover_log(log)[0][1]:
            # a flush makes a branch at 0
            raise ConnectError(f"vbucket {one.vbucket} was taken back while it was flushed")
        one.log = log
        if one.machine.feed(UprStreamInput.LOG_CAME) is UprStreamState.OPEN:
            self._tell_opened(one, log)

    def _accepted(self, one: _Upr) -> None:
        if one.machine.feed(UprStreamInput.ACCEPTED) is UprStreamState.OPEN:
            assert one.log is not None
            self._tell_opened(one, one.log)

    def _tell_opened(self, one: _Upr, log: bytes) -> None:
        self._say_opened(one.opaque, log)
        waiting, one.waiting = one.waiting, []
        for index, frame in enumerate(waiting):
            if not one.is_open:  # a flush was among them
                one.waiting = waiting[index:]
                return
            self._waiting_bytes -= _cost(frame)
            self._take_frame(one, frame)

    def _refused(self, one: _Upr, status: int, value: bytes = b"") -> None:
        self.forget(one.opaque)
        self._say_answer(one.opaque, status, value)

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
        if one.held and (one.held_bytes > HELD_BYTES or self._held_bytes > ALL_HELD_BYTES):
            # the snapshot goes on: all that is held but this one is told, as far as it is known to go
            self._pass_on(one, seqno)
        one.held.append(change)
        one.held_bytes += len(change)
        self._held_bytes += len(change)
        one.seqno = seqno
        one.is_whole = False

    # snapshots

    def _snapshot_ended(self, one: _Upr) -> None:
        one.is_whole = True
        if one.is_certain:
            self._pass_snapshot_on(one)

    def _pass_snapshot_on(self, one: _Upr) -> None:
        if one.held:
            self._pass_on(one, one.seqno)
        one.exact = one.seqno

    def _pass_on(self, one: _Upr, end: int) -> None:
        """Say what is held, as part of a snapshot that goes up to ``end``. The drafts don't tell where it
        comes from; a replica has to know what may be a backfill, which lacks purged deletions.
        """
        is_disk = self._for_replica and not one.exact
        self._say_marker(one.opaque, one.vbucket, one.exact + 1, end, is_disk=is_disk)
        self._made += b"".join(one.held)
        self._drop_held(one)

    def _drop_held(self, one: _Upr) -> None:
        self._held_bytes -= one.held_bytes
        one.held_bytes = 0
        one.held.clear()

    def _flushed(self, one: _Upr) -> None:
        """All is gone, what is held too; the stream goes on with a new branch from 0."""
        self._drop_held(one)
        one.exact = one.seqno = 0
        self._say_flush(one.opaque, one.vbucket)
        one.log = None
        one.machine.feed(UprStreamInput.FLUSHED)
        self._ask_for_log(one)

    def _ended(self, one: _Upr, status: int) -> None:
        if status == StreamEndStatus.OK:
            self._snapshot_ended(one)  # nothing more comes, so it is whole
        self.forget(one.opaque)
        self._say_end(one.opaque, one.vbucket, status)

    def _has_state(self, one: _Upr, state: int) -> None:
        """The producer says which state the vbucket has from now on; a reader has no use for that."""
        if not self._for_replica:
            return
        if one.held or one.exact < one.seqno:
            raise RemoteProtocolError(f"vbucket {one.vbucket} is handed over in the middle of a snapshot")
        try:
            name = UprBVBucketState(state).name
        except ValueError:
            raise MalformedMessage(f"a vbucket has no state {state}") from None
        # by name: the numbers of pending and replica are swapped in this draft (B5)
        self._say(DcpSetVBucketState(state=VBucketState[name], vbucket=one.vbucket, opaque=one.opaque))


class UprATranslation(UprTranslation):
    """Draft A: one response for everything that is not OK and no rollback; no datatypes."""

    DIALECT = UPR_A

    def _request(self, one: _Upr, **extras: Any) -> Message:
        return UprAStreamRequest(opaque=one.opaque, vbucket=one.vbucket, key=self._group, **extras)

    def _log_request(self, vbucket: int, opaque: int) -> Message:
        return UprAFailoverLogRequest(vbucket=vbucket, opaque=opaque)

    def _log(self, frame: Frame) -> bytes | int:
        match UPR_A.decode(frame, Direction.TO_CONSUMER):
            case UprAFailoverLog() as message:
                return message.value
            case UprAOk():  # no entry (A8): a branch that has no name
                return encode_failover_log([(0, 0)])
            case _:
                return int(Status.NOT_MY_VBUCKET)

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


class UprBTranslation(UprTranslation):
    """Draft B: answers have a status, and an unknown branch may be one of them."""

    DIALECT = UPR_B

    def _request(self, one: _Upr, **extras: Any) -> Message:
        return UprBStreamRequest(opaque=one.opaque, vbucket=one.vbucket, key=self._group, **extras)

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
            self.forget(one.opaque)
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
            case UprBSetVBucketState():
                self._has_state(one, message.state)
            case UprBStreamStart() | UprBSnapshotStart():
                pass
            case _:
                raise RemoteProtocolError(f"{message.name()} in a stream")


def _cost(frame: Frame) -> int:
    return frame.size + _FRAME_BYTES
