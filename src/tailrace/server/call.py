"""A command under way: what its function gets, what that gives back, and the table that finds it.

The function takes a `Call`; it returns the answer's bytes, or a `Pending` that is answered later, or
None if there is no answer. It refuses by raising `Refused`, `DocumentRefused` (the store) or
`MalformedMessage` (the wire). Whether a quiet command answers is decided in one place, from what its message
declares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from ..errors import MalformedMessage, StoreError, TailraceError
from ..large_bytes import LARGE_BYTES, join_large
from ..store.base import VBucket, Written
from ..wire.codes import Datatype, Feature, Magic, RequestFrameId, Status, VBucketState
from ..wire.fields import Durability, checked_key, decode_frame_infos
from ..wire.header import HEADER
from ..wire.kv import MutationResponse
from ..wire.message import Message
from .slow_commands import note_answer

if TYPE_CHECKING:
    from .bucket import ServedBucket
    from .node import Node
    from .session import Session

__all__ = ["COMMANDS", "Call", "Command", "Pending", "Refused", "Reply", "command", "encode_response"]

_THIRTY_DAYS_S = 30 * 24 * 3600
_RESPONSE_MAGIC = int(Magic.RESPONSE)


class Refused(TailraceError):
    """A request is refused with this status. The context is for people; a value is sent in its place."""

    def __init__(self, status: int, context: str = "", value: bytes = b"", datatype: int = 0) -> None:
        super().__init__(status, context, value, datatype)
        self.status = status
        self.context = context
        self.value = value
        self.datatype = datatype


def encode_response(  # noqa: PLR0917 - the header's fields, in order
    opcode: int,
    opaque: int,
    status: int = 0,
    cas: int = 0,
    extras: bytes = b"",
    key: bytes = b"",
    value: bytes = b"",
    datatype: int = 0,
) -> bytes:
    """A response as bytes."""
    total = len(extras) + len(key) + len(value)
    header = HEADER.pack(_RESPONSE_MAGIC, opcode, len(key), len(extras), datatype, status, total, opaque, cas)
    if total >= LARGE_BYTES:
        return join_large(header, extras, key, value)
    return b"".join((header, extras, key, value))


class Pending:
    """An answer that is not there yet. It keeps its place: answers go out in the order of the requests."""

    __slots__ = ("_call", "answer", "cancelled", "deadline", "on_timeout")

    def __init__(self, call: Call[Any], deadline: float, on_timeout: int) -> None:
        self._call = call
        self.answer: bytes | None = None
        self.cancelled = False
        self.deadline = deadline
        self.on_timeout = on_timeout

    @property
    def is_over(self) -> bool:
        """Whether it was answered, or nobody waits any more."""
        return self.answer is not None or self.cancelled

    def succeed(self, answer: bytes) -> None:
        """Give the answer; b"" if the command stays silent on success."""
        if self.answer is None and not self.cancelled:
            self.answer = b"" if self._call.command.silent_success else answer
            note_answer(self._call, self.answer)
            self._call.session.answered()

    def settle(self, error: StoreError | None) -> None:
        """The store has done what the command asked for, or could not."""
        if error is None:
            self.succeed(self._call.success())
        else:
            self.fail(Status.ETMPFAIL, str(error))

    def fail(self, status: int, context: str = "") -> None:
        """Refuse the command, which could not be done."""
        if self.answer is None and not self.cancelled:
            self.answer = self._call.session.refusal(self._call.request, Refused(status, context)) or b""
            note_answer(self._call, self.answer)
            self._call.session.answered()


Reply: TypeAlias = "bytes | Pending | None"
M_co = TypeVar("M_co", bound=Message, covariant=True)


class Command(NamedTuple):
    """A row of the table: the message, what runs it, and how it behaves."""

    message: type[Message]
    run: Callable[[Call[Any]], Reply]
    needs_bucket: bool
    writes: bool

    @property
    def silent_success(self) -> bool:
        """Whether success is not answered."""
        return self.message.REPLY in ("only on error", "never")

    @property
    def silent_miss(self) -> bool:
        """Whether "no such document" is not answered."""
        return self.message.REPLY == "only on a hit or an error"


COMMANDS: dict[int, Command] = {}
"""By opcode."""


def command(
    *messages: type[Message], needs_bucket: bool = True, writes: bool = False
) -> Callable[[Callable[[Call[M_co]], Reply]], Callable[[Call[M_co]], Reply]]:
    """Register the function for messages; ``writes`` marks those that a vbucket's takeover holds up."""

    def register(run: Callable[[Call[M_co]], Reply]) -> Callable[[Call[M_co]], Reply]:
        for message in messages:
            assert message.OPCODE not in COMMANDS, message
            COMMANDS[message.OPCODE] = Command(message, run, needs_bucket, writes)
        return run

    return register


class Call(Generic[M_co]):
    """One request and what belongs to it."""

    __slots__ = (
        "collection",
        "command",
        "durability",
        "is_barrier",
        "now",
        "preparing",
        "preserve_ttl",
        "request",
        "session",
    )

    def __init__(self, session: Session, command: Command, request: M_co, now: float) -> None:
        self.session = session
        self.command = command
        self.request = request
        self.now = now
        self.durability: Durability | None = None
        self.preparing: VBucket | None = None
        """The vbucket where the command's writes are only prepared, until it has run."""
        self.is_barrier = False
        self.preserve_ttl = False
        self.collection = 0
        if request.framing:
            self._read_framing(request.framing)

    def _read_framing(self, framing: bytes) -> None:
        for info in decode_frame_infos(framing):
            if info.id == RequestFrameId.DURABILITY:
                response = self.command.message.RESPONSE
                if response is None or not issubclass(response, MutationResponse):
                    raise MalformedMessage("a durability makes no sense for this command")
                if self.durability is not None:
                    raise MalformedMessage("a request has one durability")
                self.durability = Durability.decode(info)
            elif info.id == RequestFrameId.PRESERVE_TTL:
                if info.data:
                    raise MalformedMessage("preserve ttl has no data")
                self.preserve_ttl = True
            elif info.id == RequestFrameId.BARRIER:
                if info.data:
                    raise MalformedMessage("a barrier has no data")
                self.is_barrier = True
            elif info.id in (RequestFrameId.IMPERSONATE, RequestFrameId.EXTRA_PRIVILEGE):
                raise Refused(Status.EACCESS, "acting for another user is not supported")
            else:
                raise Refused(Status.UNKNOWN_FRAME_INFO, f"frame info {info.id} is not known")

    @property
    def node(self) -> Node:
        return self.session.node

    @property
    def bucket(self) -> ServedBucket:
        """The connection's bucket; the command table makes sure that there is one."""
        assert self.session.bucket is not None
        return self.session.bucket

    # what the request is about

    def any_vbucket(self, vbucket: int | None = None) -> VBucket:
        """The request's vbucket in any state; 0x07 if this node has none with that id."""
        at = self.request.vbucket if vbucket is None else vbucket
        vbuckets = self.bucket.store.vbuckets
        stored = vbuckets[at] if at < len(vbuckets) else None
        if stored is None:
            raise self.session.not_my_vbucket_refusal()
        return stored

    def vbucket(self) -> VBucket:
        """The request's vbucket, active; 0x07 otherwise."""
        if self.node.fenced:
            raise Refused(Status.ETMPFAIL, "the node waits for its cluster map")
        vbucket = self.any_vbucket()
        if vbucket.state != VBucketState.ACTIVE:
            raise self.session.not_my_vbucket_refusal()
        copies = self.bucket.durability.copies
        if self.durability is not None and not copies.is_possible(vbucket.id):
            raise Refused(Status.DURABILITY_IMPOSSIBLE, "too few nodes have a copy of this vbucket")
        if self.command.writes and vbucket.id in self.bucket.held_vbuckets:
            raise Refused(Status.ETMPFAIL, "the vbucket is being taken over")
        if self.durability is not None and self.command.writes:
            self.preparing = vbucket
            vbucket.begin_durable(self.durability.level)
        return vbucket

    def run(self) -> Reply:
        """Run the command; its answer may come later."""
        try:
            return self.command.run(self)
        finally:
            if self.preparing is not None:
                self.preparing.end_durable()

    def replica(self) -> VBucket:
        """The request's vbucket, which must be a replica here; 0x07 otherwise."""
        if self.node.fenced:
            raise Refused(Status.ETMPFAIL, "the node waits for its cluster map")
        vbucket = self.any_vbucket()
        if vbucket.state != VBucketState.REPLICA:
            raise self.session.not_my_vbucket_refusal()
        return vbucket

    def key(self) -> bytes:
        """The document's key with its collection prefix; the collection exists."""
        return self.stored_key(self.request.key)

    def stored_key(self, key: bytes) -> bytes:
        """The store's form of a document's key that the peer sent; its collection exists."""
        collections = self.session.granted.prefixed_keys
        self.collection = checked_key(key, collections=collections)
        self.check_collection(self.collection)
        return key if collections else b"\0" + key

    def check_collection(self, collection: int) -> None:
        """0x88 if there is no such collection."""
        if collection not in self.bucket.collections:
            raise self.unknown(Status.UNKNOWN_COLLECTION)

    def unknown(self, status: int) -> Refused:
        """0x88 or 0x8c with the manifest that says so."""
        body = json.dumps({"manifest_uid": f"{self.bucket.collections.manifest.uid:x}"}).encode()
        return Refused(status, value=body, datatype=Datatype.JSON)

    def expiry(self, expiry: int) -> int:
        """Absolute unix seconds from what a client sends, within what the collection allows."""
        now_s = self.node.clock.time_ns() // 1_000_000_000
        if 0 < expiry <= _THIRTY_DAYS_S:
            expiry += now_s
        max_ttl_s = self.bucket.collections.max_ttl_s(self.collection)
        if max_ttl_s and not (0 < expiry <= now_s + max_ttl_s):
            expiry = now_s + max_ttl_s
        return expiry

    # answers

    def success(
        self, *, cas: int = 0, extras: bytes = b"", key: bytes = b"", value: bytes = b"", datatype: int = 0
    ) -> bytes:
        """A success as bytes."""
        request = self.request
        return encode_response(request.OPCODE, request.opaque, 0, cas, extras, key, value, datatype)

    def written(
        self,
        vbucket: VBucket,
        written: Written,
        value: bytes = b"",
        status: int = 0,
        *,
        with_cas: bool = True,
    ) -> Reply:
        """The answer to a write: at once, or when it is as durable as the request asks for."""
        request = self.request

        def answer(written: Written) -> bytes:
            extras = b""
            if Feature.MUTATION_SEQNO in self.session.features:
                extras = vbucket.uuid.to_bytes(8, "big") + written.seqno.to_bytes(8, "big")
            cas = written.cas if with_cas or extras else 0
            return encode_response(request.OPCODE, request.opaque, status, cas, extras, b"", value)

        if self.durability is None:
            return answer(written)
        timeout_ms = self.durability.timeout_ms
        timeout_s = self.node.settings.persist_timeout if timeout_ms is None else timeout_ms / 1000
        pending = self.defer(timeout_s, Status.SYNC_WRITE_AMBIGUOUS)

        def decided(committed: Written | None) -> None:
            if committed is not None:
                pending.succeed(answer(committed))
            else:
                why = "the write was given up or rolled back, or the vbucket moved"
                pending.fail(Status.SYNC_WRITE_AMBIGUOUS, why)

        self.bucket.durability.prepared(vbucket, written.seqno, pending.deadline, decided)
        return pending

    def wait_for_disk(
        self, vbucket: VBucket, seqno: int, persisted: Callable[[bool], None], pending: Pending
    ) -> None:
        """Call back when a seqno is on disk, and have it get there soon."""
        vbucket.when_persisted(seqno, persisted, lambda: pending.is_over)
        self.bucket.work.flush_wanted = True

    def defer(self, timeout_s: float, on_timeout: int = Status.ETMPFAIL) -> Pending:
        """An answer that comes later; after the timeout it is this status."""
        return Pending(self, self.now + timeout_s, on_timeout)
