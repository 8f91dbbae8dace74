"""Streams of UPR, draft A or B, rewritten as DCP: for our reader and for a node that keeps a replica.

Two things have to be made up for. A snapshot has a start and an end message and no range, so its changes are
held back until the end or a limit comes; beyond the limit they are passed on as part of a snapshot that goes
at least to the next change, so the position counts as inside it until the real end comes. And what was
received of a snapshot that broke off is taken back, as the drafts require: the server is asked for what
follows the last complete one, and may answer differently by then.

The failover log of a stream is asked for just before the stream: for a reader a log that is older than the
stream may at worst lead to an unnecessary rollback, while a newer one could hide a rollback. A replica passes
the log on to its own readers, and so asks again after the stream request. Only if nothing has changed in
between does the log belong to the stream; until that is known no snapshot is at its end.

Rules: docs/spec/upr.md#consistency.
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
"""How much of one snapshot is held back; a limit for each stream."""
ALL_HELD_BYTES = 64 << 20
"""How much of all snapshots of a connection is held back."""
WAITING_BYTES = 32 << 20
"""How much may come for a connection's streams before the server has said which branch they are on."""

_FRAME_BYTES = 256
"""What a waiting frame takes up in addition to its own bytes."""


@dataclass(slots=True, eq=False)
class _UprStream:
    """One stream on this connection."""

    opaque: int
    vbucket: int
    exact: int
    """The last seqno of the last complete snapshot."""
    is_certain: bool
    """Whether the log is known to be that of the stream."""
    log: bytes | None = None
    log_before: bytes | None = None
    """The one before the last flush."""
    machine: Machine[UprStreamState, UprStreamInput] = field(
        default_factory=lambda: Machine(UPR_STREAM_TRANSITIONS, UprStreamState.ASKED)
    )
    held: list[bytes] = field(default_factory=list)
    """Changes of the open snapshot; the last of them is at ``seqno``."""
    held_bytes: int = 0
    seqno: int = 0
    is_whole: bool = True
    """Whether all of the snapshot has come."""
    waiting: list[Frame] = field(default_factory=list)
    """Frames that came before their branch is known."""

    @property
    def is_accepted(self) -> bool:
        return self.machine.state not in (UprStreamState.ASKED, UprStreamState.LOG_KNOWN)

    @property
    def is_open(self) -> bool:
        return self.machine.state is UprStreamState.OPEN


def _is_of_flush(log: bytes, before: bytes | None) -> bool:
    """Whether the newest branch of a log is the one that a flush began.

    A flush makes a branch at 0, so all others must be known from before.
    """
    newest, *others = decode_failover_log(log)
    known_branches = set() if before is None else {vb_uuid for vb_uuid, _ in decode_failover_log(before)}
    return not newest[1] and all(vb_uuid in known_branches for vb_uuid, _ in others)


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
        """``made`` gets the messages in DCP, ``send`` what is to be sent in the draft.

        The producer's operators recognise the streams by ``group``.
        """
        self._made = made
        self._send = send
        self._new_opaque = new_opaque
        self._group = group.encode()
        self._for_replica = for_replica
        self._open: dict[int, _UprStream] = {}
        self._log_of: dict[int, _UprStream] = {}
        """Opaques of requests for a log, and the stream that each is for."""
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
        stream = self._open[opaque] = _UprStream(opaque, vbucket, start, not self._for_replica, seqno=start)
        self._ask_for_log(stream)
        branches = () if log is None else log.entries
        self._send(
            self._request(
                stream,
                start_seqno=start,
                end_seqno=max(end_seqno, start),
                vb_uuid=position.vb_uuid,
                high_seqno=next((e.seqno for e in branches if e.vb_uuid == position.vb_uuid), 0),
            ).encode()
        )
        if not stream.is_certain:
            self._ask_for_log(stream)

    def _ask_for_log(self, stream: _UprStream) -> None:
        number = self._new_opaque()
        self._log_of[number] = stream
        self._send(self._log_request(stream.vbucket, number).encode())

    @abstractmethod
    def _request(self, stream: _UprStream, **extras: Any) -> Message: ...

    @abstractmethod
    def _log_request(self, vbucket: int, opaque: int) -> Message: ...

    def forget(self, opaque: int) -> None:
        """Forget a stream; nothing more is passed on of it."""
        stream = self._open.pop(opaque, None)
        if stream is not None:
            self._held_bytes -= stream.held_bytes
            self._waiting_bytes -= sum(map(_cost, stream.waiting))

    # what comes

    def receive(self, frame: Frame) -> None:
        """A message of the draft."""
        if frame.opaque in self._log_of:
            stream = self._log_of.pop(frame.opaque)
            if self._open.get(stream.opaque) is stream:
                self._got_log(stream, self._log(frame))
            return
        open_stream = self._open.get(frame.opaque)
        if open_stream is None:
            raise RemoteProtocolError(
                f"a message with opaque 0x{frame.opaque:x}, which no stream of ours has"
            )
        if open_stream.is_accepted and not open_stream.is_open:
            open_stream.waiting.append(frame)
            self._waiting_bytes += _cost(frame)
            if self._waiting_bytes > WAITING_BYTES:
                raise RemoteProtocolError(
                    f"the server does not say on which branch vbucket {open_stream.vbucket} is"
                )
            return
        self._take_frame(open_stream, frame)

    def _take_frame(self, stream: _UprStream, frame: Frame) -> None:
        message = self.DIALECT.decode(frame, Direction.TO_RECEIVER)
        if stream.is_accepted:
            self._message(stream, message)
        else:
            self._answer_came(stream, message)

    @abstractmethod
    def _log(self, frame: Frame) -> bytes | int:
        """The failover log in an answer, or the status if there is none."""

    @abstractmethod
    def _answer_came(self, stream: _UprStream, message: Message) -> None: ...

    @abstractmethod
    def _message(self, stream: _UprStream, message: Message) -> None: ...

    def _got_log(self, stream: _UprStream, log: bytes | int) -> None:
        if isinstance(log, int):
            if stream.is_accepted:
                raise ConnectError(f"vbucket {stream.vbucket} went away while its stream was opened")
            return  # the answer to the request says the same
        if stream.log is not None:
            if log != stream.log:
                raise ConnectError(f"vbucket {stream.vbucket} got another branch while its stream was opened")
            stream.is_certain = True
            if stream.is_whole:
                self._pass_snapshot_on(stream)
            return
        if stream.machine.state is UprStreamState.AWAITING_BRANCH and not _is_of_flush(
            log, stream.log_before
        ):
            raise ConnectError(f"vbucket {stream.vbucket} was taken back while it was flushed")
        stream.log = log
        if stream.machine.feed(UprStreamInput.LOG_CAME) is UprStreamState.OPEN:
            self._tell_opened(stream, log)

    def _accepted(self, stream: _UprStream) -> None:
        if stream.machine.feed(UprStreamInput.ACCEPTED) is UprStreamState.OPEN:
            assert stream.log is not None
            self._tell_opened(stream, stream.log)

    def _tell_opened(self, stream: _UprStream, log: bytes) -> None:
        self._say_opened(stream.opaque, log)
        waiting, stream.waiting = stream.waiting, []
        for index, frame in enumerate(waiting):
            if not stream.is_open:  # a flush was among them
                stream.waiting = waiting[index:]
                return
            self._waiting_bytes -= _cost(frame)
            self._take_frame(stream, frame)

    def _refused(self, stream: _UprStream, status: int, value: bytes = b"") -> None:
        self.forget(stream.opaque)
        self._say_answer(stream.opaque, status, value)

    # changes

    def _mutation(self, stream: _UprStream, message: UprAMutation | UprBMutation, datatype: int) -> None:
        mutation = DcpMutation(
            by_seqno=message.by_seqno,
            rev_seqno=message.rev_seqno,
            flags=message.flags,
            expiry=message.expiry,
            lock_time=message.lock_time,
            cas=message.cas,
            key=message.key,
            value=message.value,
            datatype=datatype,
            opaque=stream.opaque,
            vbucket=message.vbucket,
        )
        self._change(stream, message.by_seqno, mutation.encode())

    def _removal(
        self,
        stream: _UprStream,
        message: UprADeletion | UprAExpiration | UprBDeletion | UprBExpiration,
        removal_class: type[DcpDeletion | DcpExpiration],
    ) -> None:
        """Pass on a deletion or expiration; the drafts don't say when it happened."""
        removal = removal_class(
            by_seqno=message.by_seqno,
            rev_seqno=message.rev_seqno,
            cas=message.cas,
            key=message.key,
            opaque=stream.opaque,
            vbucket=message.vbucket,
        )
        self._change(stream, message.by_seqno, removal.encode())

    def _change(self, stream: _UprStream, seqno: int, change: bytes) -> None:
        if seqno == MAX_U64:
            raise MalformedMessage(f"a change has seqno {seqno}")
        if seqno <= stream.seqno:
            raise MalformedMessage(f"item {seqno} follows item {stream.seqno}", Status.ERANGE)
        if stream.held and (stream.held_bytes > HELD_BYTES or self._held_bytes > ALL_HELD_BYTES):
            # the snapshot goes on, up to this change at least: pass on what is held
            self._pass_on(stream, seqno)
        stream.held.append(change)
        stream.held_bytes += len(change)
        self._held_bytes += len(change)
        stream.seqno = seqno
        stream.is_whole = False

    # snapshots

    def _snapshot_ended(self, stream: _UprStream) -> None:
        stream.is_whole = True
        if stream.is_certain:
            self._pass_snapshot_on(stream)

    def _pass_snapshot_on(self, stream: _UprStream) -> None:
        if stream.held:
            self._pass_on(stream, stream.seqno)
        stream.exact = stream.seqno

    def _pass_on(self, stream: _UprStream, end: int) -> None:
        """Pass on what is held, as part of a snapshot that goes up to ``end``.

        The drafts don't say where it comes from; a replica has to know what may be a backfill, which lacks
        purged deletions.
        """
        is_disk = self._for_replica and not stream.exact
        self._say_marker(stream.opaque, stream.vbucket, stream.exact + 1, end, is_disk=is_disk)
        self._made += b"".join(stream.held)
        self._drop_held(stream)

    def _drop_held(self, stream: _UprStream) -> None:
        self._held_bytes -= stream.held_bytes
        stream.held_bytes = 0
        stream.held.clear()

    def _flushed(self, stream: _UprStream) -> None:
        """Everything is gone, what is held too; the stream goes on with a new branch from 0."""
        self._drop_held(stream)
        stream.exact = stream.seqno = 0
        self._say_flush(stream.opaque, stream.vbucket)
        stream.log, stream.log_before = None, stream.log
        stream.machine.feed(UprStreamInput.FLUSHED)
        self._ask_for_log(stream)

    def _ended(self, stream: _UprStream, status: int) -> None:
        if status == StreamEndStatus.OK:
            self._snapshot_ended(stream)  # nothing more comes, so it is complete
        self.forget(stream.opaque)
        self._say_end(stream.opaque, stream.vbucket, status)

    def _has_state(self, stream: _UprStream, state: int) -> None:
        """The producer says which state the vbucket has from now on; a reader ignores that."""
        if not self._for_replica:
            return
        if stream.held or stream.exact < stream.seqno:
            raise RemoteProtocolError(f"vbucket {stream.vbucket} is handed over in the middle of a snapshot")
        try:
            name = UprBVBucketState(state).name
        except ValueError:
            raise MalformedMessage(f"a vbucket has no state {state}") from None
        # by name: the numbers of pending and replica are swapped in this draft (B5)
        self._say(DcpSetVBucketState(state=VBucketState[name], vbucket=stream.vbucket, opaque=stream.opaque))


class UprATranslation(UprTranslation):
    """Draft A: one response for everything that is neither OK nor a rollback; no datatypes."""

    DIALECT = UPR_A

    def _request(self, stream: _UprStream, **extras: Any) -> Message:
        return UprAStreamRequest(opaque=stream.opaque, vbucket=stream.vbucket, key=self._group, **extras)

    def _log_request(self, vbucket: int, opaque: int) -> Message:
        return UprAFailoverLogRequest(vbucket=vbucket, opaque=opaque)

    def _log(self, frame: Frame) -> bytes | int:
        match UPR_A.decode(frame, Direction.TO_RECEIVER):
            case UprAFailoverLog() as message:
                return message.value
            case UprAOk():  # no entry (A8): a branch without a vb_uuid
                return encode_failover_log([(0, 0)])
            case _:
                return int(Status.NOT_MY_VBUCKET)

    def _answer_came(self, stream: _UprStream, message: Message) -> None:
        match message:
            case UprAOk():
                self._accepted(stream)
            case UprARollback():
                self._refused(stream, Status.ROLLBACK, message.value)
            case UprANotMyVBucket():
                self._refused(stream, Status.NOT_MY_VBUCKET)
            case _:
                raise RemoteProtocolError(f"{message.name()} answers a stream request")

    def _message(self, stream: _UprStream, message: Message) -> None:
        match message:
            case UprAMutation():
                # the draft has no datatypes; servers find them out the same way for plain writers
                self._mutation(stream, message, int(Datatype.JSON) if is_json(message.value) else 0)
            case UprADeletion():
                self._removal(stream, message, DcpDeletion)
            case UprAExpiration():
                self._removal(stream, message, DcpExpiration)
            case UprASnapshotEnd():
                self._snapshot_ended(stream)
            case UprAFlush():
                self._flushed(stream)
            case UprAStreamEndOk():
                self._ended(stream, StreamEndStatus.OK)
            case UprAStreamEndStateChanged():
                self._ended(stream, StreamEndStatus.STATE_CHANGED)
            case UprAStreamBegin() | UprASnapshotStart():
                pass
            case _:
                raise RemoteProtocolError(f"{message.name()} in a stream")


class UprBTranslation(UprTranslation):
    """Draft B: answers have a status, and an unknown branch may be one of them."""

    DIALECT = UPR_B

    def _request(self, stream: _UprStream, **extras: Any) -> Message:
        return UprBStreamRequest(opaque=stream.opaque, vbucket=stream.vbucket, key=self._group, **extras)

    def _log_request(self, vbucket: int, opaque: int) -> Message:
        return UprBFailoverLogRequest(vbucket=vbucket, opaque=opaque)

    def _log(self, frame: Frame) -> bytes | int:
        if frame.status != Status.SUCCESS:
            return frame.status
        return DcpFailoverLogResponse.decode(frame).value

    def _answer_came(self, stream: _UprStream, message: Message) -> None:
        if not isinstance(message, UprBStreamRequestResponse):
            raise RemoteProtocolError(f"{message.name()} answers a stream request")
        if message.status == Status.SUCCESS:
            self._accepted(stream)
        elif message.status == Status.KEY_ENOENT:  # the branch is unknown: nothing of it can be kept
            self.forget(stream.opaque)
            self._say_rollback(stream.opaque, 0)
        else:
            self._refused(stream, message.status, message.value)

    def _message(self, stream: _UprStream, message: Message) -> None:
        match message:
            case UprBMutation():
                self._mutation(stream, message, message.datatype)
            case UprBDeletion():
                self._removal(stream, message, DcpDeletion)
            case UprBExpiration():
                self._removal(stream, message, DcpExpiration)
            case UprBSnapshotEnd():
                self._snapshot_ended(stream)
            case UprBFlush():
                self._flushed(stream)
            case UprBStreamEndMessage():
                is_ok = message.flag == UprBStreamEnd.OK
                self._ended(stream, StreamEndStatus.OK if is_ok else StreamEndStatus.STATE_CHANGED)
            case UprBSetVBucketState():
                self._has_state(stream, message.state)
            case UprBStreamStart() | UprBSnapshotStart():
                pass
            case _:
                raise RemoteProtocolError(f"{message.name()} in a stream")


def _cost(frame: Frame) -> int:
    return frame.size + _FRAME_BYTES
