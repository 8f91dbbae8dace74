"""TAP with the node as replica: a peer pushes changes, and they are stored as they were made elsewhere.

A change with its rev and CAS is stored if it wins over what is here, as with the commands that carry
metadata. A version that is here already loses, so a change that goes round a ring ends where it began, and
what is sent twice is stored once. The TTL that it came with is remembered, see `clients.TapHops`.

A peer that begins a vbucket from the start empties a replica or pending one. An active vbucket is never
emptied by that: it has its own documents, and in a ring every node is active.

Rules: docs/spec/tap.md#a-node-that-receives.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...errors import DocumentRefused, MalformedMessage
from ...wire.codes import Status, TapFlag, TapOpaque, TapOpcode, VBucketState
from ...wire.dcp import MUTATION
from ...wire.dialect import TAP
from ...wire.fields import checked_key
from ...wire.header import HEADER_LAYOUT, Frame
from ...wire.message import Direction, Message
from ...wire.tap import (
    TAP_FLAGS,
    TapAck,
    TapCheckpointEnd,
    TapCheckpointStart,
    TapDelete,
    TapFlush,
    TapMutation,
    TapOpaqueMessage,
    TapVBucketSet,
)
from ..handler import HandlerBase, HandlerSummary, Host
from ..rewriting import Rewriting

if TYPE_CHECKING:
    from ...store.base import Bucket, VBucket

__all__ = ["TapReplica"]

_REV = (HEADER_LAYOUT + MUTATION).field("rev_seqno").place  # of a stored frame, whatever change it is
_PREFIX = b"\0"
_TTL_AT = TapDelete.LAYOUTS[0].at("ttl")
_FATAL = frozenset({TapOpcode.VBUCKET_SET, TapOpcode.CHECKPOINT_START, TapOpcode.CHECKPOINT_END})
"""A peer that gets these wrong is disconnected."""

_FIGURES = {
    TapOpcode.MUTATION: "num_mutation",
    TapOpcode.DELETE: "num_delete",
    TapOpcode.FLUSH: "num_flush",
    TapOpcode.OPAQUE: "num_opaque",
    TapOpcode.VBUCKET_SET: "num_vbucket_set",
    TapOpcode.CHECKPOINT_START: "num_checkpoint_start",
    TapOpcode.CHECKPOINT_END: "num_checkpoint_end",
}

_log = logging.getLogger(__name__)


class TapReplica(HandlerBase):
    """The replica's half of a TAP connection; a `protocol.handler.Handler`."""

    is_open = True

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        super().__init__(host)
        self._rewriting = Rewriting(host, wake)
        self._answers: deque[bytes] = deque()
        self._backfilling: set[int] = set()
        self._figures = dict.fromkeys((*_FIGURES.values(), "num_outdated", "num_errors"), 0)

    # The handler's interface.

    @property
    def is_busy(self) -> bool:
        return self._rewriting.is_running

    def receive_frame(self, frame: Frame, now: float) -> None:
        if self.close_requested is not None:
            return
        if not frame.is_request or frame.opcode == TapOpcode.CONNECT:
            if frame.is_request:
                self._answer(frame, Status.EINVAL)
            self._disconnect(f"opcode 0x{frame.opcode:02x} came to a TAP replica")
            return
        try:
            if len(frame.extras) > _TTL_AT and not frame.extras[_TTL_AT]:
                raise DocumentRefused(Status.EINVAL, "its TTL is used up")
            self._figures[_FIGURES[TapOpcode(frame.opcode)]] += 1
            self._apply(frame, TAP.decode(frame, Direction.TO_RECEIVER))
        except (MalformedMessage, DocumentRefused) as error:
            self._failed(frame, error)

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = list(self._answers)
        self._answers.clear()
        return out

    def next_timer(self) -> float | None:
        return None

    def handle_timer(self, now: float) -> None:
        """There are no timers."""

    def stats(self) -> Mapping[str, int | str]:
        return {"type": "consumer", **self._figures, "backfilling_vbuckets": len(self._backfilling)}

    def summary(self) -> HandlerSummary:
        return HandlerSummary("replica", len(self._backfilling))

    def close(self, reason: str) -> None:
        self._rewriting.cancel()
        self._answers.clear()

    # Messages.

    def _apply(self, frame: Frame, message: Message) -> None:
        """Do what a message says, and answer it if it asks for that; what takes time is answered later."""
        if isinstance(message, TapMutation):
            self._store(message)
        elif isinstance(message, TapDelete):
            self._delete(message)
        elif isinstance(message, TapOpaqueMessage):
            vbucket = self._obey(message)
            if vbucket is not None:
                self._rewrite(frame, partial(_empty, vbucket.id))
                return
        elif isinstance(message, TapCheckpointStart | TapCheckpointEnd):
            self._mark_checkpoint(message)
        elif isinstance(message, TapVBucketSet):
            if message.vbucket >= len(self._host.bucket.vbuckets):
                raise DocumentRefused(Status.NOT_MY_VBUCKET, f"there is no vbucket {message.vbucket}")
            self._rewrite(frame, partial(_set_state, message.vbucket, message.state))
            return
        elif isinstance(message, TapFlush) and any(
            living.item_count or living.tombstone_count for living in self._living()
        ):
            self._rewrite(frame, partial(self._flush, message.ttl))
            return
        self._succeeded(frame)

    def _living(self) -> list[VBucket]:
        vbuckets = self._host.bucket.vbuckets
        return [vbucket for vbucket in vbuckets if vbucket is not None and vbucket.state != VBucketState.DEAD]

    def _vbucket(self, number: int) -> VBucket:
        """A vbucket that takes changes."""
        vbuckets = self._host.bucket.vbuckets
        vbucket = vbuckets[number] if number < len(vbuckets) else None
        if vbucket is None or vbucket.state == VBucketState.DEAD:
            raise DocumentRefused(Status.NOT_MY_VBUCKET, f"vbucket {number} is not here")
        return vbucket

    def _store(self, message: TapMutation) -> None:
        vbucket, key = self._vbucket(message.vbucket), _key(message)
        if message.tap_flags & TapFlag.NO_VALUE:
            raise MalformedMessage("a document without its value can't be stored")
        if message.datatype & ~self._host.datatypes:
            raise MalformedMessage(f"datatype 0x{message.datatype:02x} was not negotiated")
        value, datatype = self._host.checked_value(message.value, message.datatype)
        rev, resolve = message.rev_seqno, True
        if rev is None:  # from before there were revs: the last to come is the newest
            rev, resolve = _next_rev(vbucket, key), False
        try:
            written = vbucket.set_with_meta(
                key,
                value,
                message.item_flags,
                message.item_expiry,
                rev,
                message.cas,
                datatype,
                resolve=resolve,
            )
        except DocumentRefused as refused:
            self._lost(refused)
        else:
            self._host.tap.hops.received(vbucket.id, written.seqno, message.ttl)

    def _delete(self, message: TapDelete) -> None:
        vbucket, key = self._vbucket(message.vbucket), _key(message)
        rev, resolve = message.rev_seqno, True
        if rev is None:
            if vbucket.get(key) is None:
                return  # deleting what is not there is a success
            rev, resolve = _next_rev(vbucket, key), False
        try:
            written = vbucket.delete_with_meta(key, 0, 0, rev, message.cas, resolve=resolve)
        except DocumentRefused as refused:
            self._lost(refused)
        else:
            self._host.tap.hops.received(vbucket.id, written.seqno, message.ttl)

    def _lost(self, refused: DocumentRefused) -> None:
        """Not a failure if the version lost: what is here is the same or newer."""
        if refused.status == Status.LOCKED:
            raise DocumentRefused(Status.ETMPFAIL, "the document is locked")
        if refused.status != Status.KEY_EEXISTS:
            raise refused
        self._figures["num_outdated"] += 1

    def _obey(self, message: TapOpaqueMessage) -> VBucket | None:
        """Take note of a control code; returns a vbucket that has to be emptied."""
        if message.code == TapOpaque.INITIAL_VBUCKET_STREAM:
            vbucket = self._vbucket(message.vbucket)
            self._backfilling.add(vbucket.id)
            if vbucket.high_seqno and vbucket.state != VBucketState.ACTIVE:
                return vbucket
        elif message.code == TapOpaque.CLOSE_BACKFILL:
            self._backfilling.discard(message.vbucket)
        else:
            # Greetings, codes of another dialect of TAP and unknown ones have no effect here.
            _log.debug("%s: TAP opaque %d", self._host.peer, message.code)
        return None

    def _mark_checkpoint(self, message: TapCheckpointStart | TapCheckpointEnd) -> None:
        vbucket = self._vbucket(message.vbucket)
        if isinstance(message, TapCheckpointStart):
            if message.checkpoint_id:
                self._backfilling.discard(vbucket.id)
        elif vbucket.state != VBucketState.ACTIVE:
            vbucket.close_checkpoint()  # ours ends where the peer's does; each has its own numbers

    # What takes time.

    def _rewrite(self, frame: Frame, act: Callable[[Bucket], list[int]]) -> None:
        """Change vbuckets; when that is on disk, it is answered."""

        def done(failed: str | None) -> None:
            if failed is None:
                self._succeeded(frame)
            else:
                self._failed(frame, DocumentRefused(Status.ETMPFAIL, failed))

        self._rewriting.begin(act, done)

    def _flush(self, ttl: int, bucket: Bucket) -> list[int]:
        bucket.flush_all(everything=True)
        self._host.tap.hops.flushed(bucket.flushes, ttl)
        return [vbucket.id for vbucket in bucket]

    # Answers.

    def _succeeded(self, frame: Frame) -> None:
        if int.from_bytes(frame.extras[TAP_FLAGS], "big") & TapFlag.ACK:
            self._answer(frame, Status.SUCCESS)

    def _failed(self, frame: Frame, error: MalformedMessage | DocumentRefused) -> None:
        _log.info("%s: refused TAP opcode 0x%02x: %s", self._host.peer, frame.opcode, error)
        is_malformed = isinstance(error, MalformedMessage)
        if is_malformed and frame.opcode == TapOpcode.OPAQUE:
            self._succeeded(frame)  # a control message of an unknown shape is not for us
            return
        self._figures["num_errors"] += 1
        self._answer(frame, error.status, str(error).encode())
        if is_malformed and frame.opcode in _FATAL:
            self._disconnect(str(error))

    def _answer(self, frame: Frame, status: int, text: bytes = b"") -> None:
        answer = TapAck(opcode=frame.opcode, opaque=frame.opaque, status=status, value=text)
        self._answers.append(answer.encode())


def _key(message: Message) -> bytes:
    checked_key(message.key, collections=False)
    return _PREFIX + message.key


def _next_rev(vbucket: VBucket, key: bytes) -> int:
    frame = vbucket.get_any(key)
    return 1 if frame is None else int.from_bytes(frame[_REV], "big") + 1


def _empty(number: int, bucket: Bucket) -> list[int]:
    bucket.rollback({number: 0}, branch=True)
    return [number]


def _set_state(number: int, state: int, bucket: Bucket) -> list[int]:
    bucket.set_state(number, state)
    return [number]
