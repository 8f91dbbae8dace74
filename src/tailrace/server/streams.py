"""Which machine serves which dialect, and what a session gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeAlias

from ..clock import Clock
from ..errors import MalformedMessage, StoreError
from ..protocol.dcp.producer import DcpProducer
from ..protocol.dcp.replica import DcpReplica
from ..protocol.handler import Handler, Host
from ..protocol.tap.clients import TapClients
from ..protocol.tap.producer import TapProducer
from ..protocol.tap.replica import TapReplica
from ..protocol.upr.producer import UprAProducer, UprBProducer
from ..store.base import Bucket
from ..store.format import StoredDocument, canonical
from ..wire.codes import CHANGE_STREAM_OPCODES, Datatype, DcpOpcode, Op, Status, TapOpcode
from ..wire.dcp import DcpMutation
from ..wire.dcp_replication import DcpCommit
from ..wire.dialect import DCP, TAP, UPR_A, UPR_B, Dialect, Role, opens_upr_a
from ..wire.fields import checked_key, join_xattrs
from .document_values import MAX_SYSTEM_XATTRS, checked_value, split_document, system_xattrs
from .settings import Settings

if TYPE_CHECKING:
    from ..store.base import VBucket
    from ..wire.header import Frame
    from .bucket import ServedBucket
    from .session import Session
    from .upstream import Upstream

__all__ = ["FACTORIES", "StreamHost", "is_in_dialect", "is_stream_frame", "may_overtake", "open_handler"]

_TAP_OPCODES = range(TapOpcode.CONNECT, TapOpcode.CHECKPOINT_END + 1)
_SEQNO = DcpMutation.LAYOUTS[0].field("by_seqno").place

Factory: TypeAlias = Callable[[Host, Callable[[], None], float], Handler]

FACTORIES: dict[tuple[str, Role], Factory] = {
    (DCP.name, Role.PRODUCER): DcpProducer,
    (DCP.name, Role.REPLICA): DcpReplica,
    (UPR_A.name, Role.PRODUCER): UprAProducer,
    (UPR_B.name, Role.PRODUCER): UprBProducer,
    (TAP.name, Role.PRODUCER): TapProducer,
    (TAP.name, Role.REPLICA): TapReplica,
}
"""By the dialect's name and the server's role in it."""


def open_handler(
    host: Host, dialect: Dialect, role: Role, wake: Callable[[], None], now: float
) -> Handler | None:
    """A machine for a connection that has just been bound; None if that is not served."""
    factory = FACTORIES.get((dialect.name, role))
    return None if factory is None else factory(host, wake, now)


def is_stream_frame(frame: Frame, dialect: Dialect | None) -> bool:
    """Whether a frame is for the change stream of a connection that speaks ``dialect``, or begins one."""
    opcode = frame.opcode
    if opcode in CHANGE_STREAM_OPCODES or opcode in _TAP_OPCODES:
        return True
    return (dialect is UPR_A and 1 <= opcode <= 5) or opens_upr_a(frame)


def is_in_dialect(frame: Frame, dialect: Dialect) -> bool:
    """Whether a frame of a change stream belongs to the dialect that its connection speaks."""
    if dialect is UPR_A:
        return frame.opcode == Op.SET and frame.extras_length != 8
    return (frame.opcode in _TAP_OPCODES) == (dialect is TAP)


def may_overtake(frame: Frame, dialect: Dialect | None) -> bool:
    """Whether a request need not wait for the one before it: an ack has no answer, and a no-op only asks
    whether we are alive.
    """
    if dialect is not DCP:
        return False
    is_ack = frame.opcode == DcpOpcode.BUFFER_ACK and frame.extras_length == len(frame.body) == 4
    return is_ack or frame.opcode == DcpOpcode.NOOP


class StreamHost:
    """A connection's side towards its handler; see `protocol.handler.Host`."""

    def __init__(self, session: Session | Upstream, bucket: ServedBucket) -> None:
        self._session = session
        self._bucket = bucket

    @property
    def bucket(self) -> Bucket:
        return self._bucket.store

    @property
    def features(self) -> frozenset[int]:
        return self._session.features

    @property
    def peer(self) -> str:
        return self._session.peer

    @property
    def clock(self) -> Clock:
        return self._session.node.clock

    @property
    def settings(self) -> Settings:
        return self._session.node.settings

    def record(self, event: str, *, level: int, **facts: int | str) -> None:
        self._session.node.events.record(event, level=level, peer=self.peer, **facts)

    def watch(self, vbucket: int, callback: Callable[[], None]) -> Callable[[], None]:
        self._bucket.former_actives.stream_opened(vbucket)
        return self._bucket.watchers.watch(vbucket, callback)

    def await_append(self, vbucket: int, callback: Callable[[], None]) -> None:
        self._bucket.watchers.await_append(vbucket, callback)

    def claim_name(self, name: bytes) -> None:
        self._session.claim_name(name)

    def not_my_vbucket(self) -> tuple[bytes, int]:
        return self._session.not_my_vbucket()

    def hold_writes(self, vbucket: int, *, hold: bool) -> None:
        (self._bucket.held_vbuckets.add if hold else self._bucket.held_vbuckets.discard)(vbucket)

    @property
    def tap(self) -> TapClients:
        return self._bucket.tap

    @property
    def datatypes(self) -> int:
        return self._session.datatypes

    def checked_value(self, value: bytes, datatype: int) -> tuple[bytes, int]:
        if 0 not in self._bucket.collections:
            raise MalformedMessage("the default collection was dropped", Status.UNKNOWN_COLLECTION)
        if datatype & Datatype.XATTR:
            self._bucket.xattrs_seen = True
        return checked_value(value, datatype, self._session.node.settings)

    def rewrite(self, act: Callable[[Bucket], Collection[int]], done: Callable[[str | None], None]) -> None:
        bucket, node = self._bucket, self._session.node

        def run() -> None:
            states = {vbucket.id: vbucket.state for vbucket in bucket.store}
            try:
                with node.watching_history(bucket, states, "rollback", peer=self.peer):
                    changed = act(bucket.store)
            except StoreError as error:
                done(str(error))
                return
            for number in changed:
                changed_vbucket = bucket.store.vbuckets[number]
                if changed_vbucket is not None and states.get(number) == changed_vbucket.state:
                    bucket.vbucket_changed(number)
                else:
                    node.vbucket_changed(bucket, number)
            bucket.work.after_flush(lambda error: done(None if error is None else str(error)))

        bucket.work.exclusively(run)

    @property
    def own_name(self) -> str:
        address = self._session.node.address
        return self._bucket.durability.copies.own_name or f"127.0.0.1:{address.port}"

    def replica_reached(self, vbucket: int, name: str, seqno: int) -> None:
        self._bucket.durability.reached(vbucket, name, seqno)

    def replica_gone(self, name: str) -> None:
        self._bucket.durability.copies.gone(name)

    def claim_vbucket(self, vbucket: int, by: object) -> bool:
        if vbucket in self._bucket.receiving:
            return False
        self._bucket.receiving[vbucket] = by
        return True

    def release_vbucket(self, vbucket: int, by: object) -> None:
        if self._bucket.receiving.get(vbucket) is by:
            del self._bucket.receiving[vbucket]

    def receive_change(self, vbucket: VBucket, frame: Frame, *, collections: bool) -> None:
        if frame.datatype & ~self._session.datatypes:
            raise MalformedMessage(f"datatype 0x{frame.datatype:02x} was not negotiated")
        if frame.opcode != DcpOpcode.SYSTEM_EVENT:
            checked_key(frame.key, collections=collections)
        if frame.datatype & Datatype.XATTR:
            self._bucket.xattrs_seen = True
        if frame.opcode == DcpOpcode.MUTATION and not frame.cas:
            # A live document needs a CAS for comparisons. Every replica makes the same one.
            frame.cas = int.from_bytes(frame.body[_SEQNO], "big")
        node = self._session.node
        now_s = node.clock.time_ns() // 1_000_000_000
        if frame.opcode == DcpOpcode.COMMIT:
            commit = DcpCommit.decode(frame)
            key = commit.key if collections else b"\0" + commit.key
            vbucket.receive(vbucket.commit_for(key, commit.prepared_seqno, commit.commit_seqno))
            return
        change = canonical(frame.encode(), collections=collections, delete_time=now_s)
        if frame.datatype & ~Datatype.JSON:
            # A value that is not what its datatype says would end every stream that has to convert it.
            value, limit = StoredDocument.of(change).value, node.settings.max_inflated
            xattrs, _, _ = split_document(value, frame.datatype, limit)
            if xattrs and len(join_xattrs(system_xattrs(xattrs), b"")) > MAX_SYSTEM_XATTRS:
                raise MalformedMessage("its system xattrs are too large", Status.E2BIG)
        vbucket.receive(change)

    def memory_is_short(self) -> bool:
        return self._bucket.memory_is_short()

    def backfills_wait(self) -> bool:
        return self._bucket.backfills_wait()

    def is_former_active(self, vbucket: int) -> bool:
        return self._bucket.former_actives.is_silent(vbucket)

    def disk_used_share(self) -> float:
        return self._session.node.disk_used_share()
