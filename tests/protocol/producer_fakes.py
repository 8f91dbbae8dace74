"""A vbucket that a test can look through, a host, and a reader that checks every rule of a stream.

The fake vbucket keeps its whole history; the test tells it what is still in memory, what is on disk, and
where checkpoints begin, to force each path through a producer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tailrace.clock import ManualClock
from tailrace.frames import Chunk, Trait
from tailrace.history import FailoverLog
from tailrace.model import Position, SnapshotRange
from tailrace.protocol.dcp.producer import DcpProducer
from tailrace.wire.codes import (
    AddStreamFlag,
    Datatype,
    DcpOpcode,
    Feature,
    MarkerFlag,
    OpenFlag,
    OsoFlag,
    Status,
    StreamEndStatus,
    SystemEventId,
    VBucketState,
)
from tailrace.wire.dcp import (
    DcpBufferAck,
    DcpCloseStream,
    DcpControl,
    DcpDeletion,
    DcpExpiration,
    DcpMutation,
    DcpNoop,
    DcpOpen,
    DcpOsoSnapshot,
    DcpSeqnoAdvanced,
    DcpSnapshotMarker,
    DcpStreamEnd,
    DcpStreamRequest,
    DcpSystemEvent,
)
from tailrace.wire.dialect import DCP
from tailrace.wire.fields import encode_leb128
from tailrace.wire.framing import Framer
from tailrace.wire.header import Frame
from tailrace.wire.message import Direction, Message

COLLECTIONS = frozenset({int(Feature.COLLECTIONS), int(Feature.SNAPPY), int(Feature.XERROR)})
PRODUCER = int(OpenFlag.PRODUCER)
FULL = int(OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETE_TIMES)
UUID = 0xABCD
FOREVER = 2**64 - 1


@dataclass(slots=True)
class Change:
    """One change of a fake vbucket."""

    seqno: int
    key: bytes  # what makes two changes the same document; has the collection prefix
    frame: bytes
    traits: int


class FakeSnapshot:
    def __init__(
        self, changes: list[Change], start: int, *, in_memory: bool, checkpoint: bool, number: int
    ) -> None:
        newest = {change.key: change for change in changes}
        self._changes = sorted(newest.values(), key=lambda change: change.seqno)
        self.start = start
        self.end = changes[-1].seqno
        self.in_memory = in_memory
        self.checkpoint = checkpoint
        self.checkpoint_id = number
        self.history_start = 0
        self.is_closed = False

    def read(self, max_bytes: int = 256 << 10) -> Chunk | None:
        assert not self.is_closed
        if not self._changes:
            return None
        taken, size = [], 0
        while self._changes and (not taken or size + len(self._changes[0].frame) <= max_bytes):
            taken.append(self._changes.pop(0))
            size += len(taken[-1].frame)
        lengths = np.array([len(change.frame) for change in taken], np.int64)
        traits = 0
        for change in taken:
            traits |= change.traits
        return Chunk(
            np.frombuffer(bytearray().join(change.frame for change in taken), np.uint8),
            np.cumsum(lengths) - lengths,
            taken[-1].seqno,
            traits,
        )

    def close(self) -> None:
        self.is_closed = True


class FakeVBucket:
    """The part of `store.base.VBucket` that a producer uses."""

    def __init__(self, number: int = 0, state: int = VBucketState.ACTIVE) -> None:
        self.id = number
        self.state = state
        self.failover_log = FailoverLog.new(UUID)
        self.purge_seqno = 0
        self.changes: list[Change] = []
        self.memory_after = 0  # changes above this are in memory
        self.disk_up_to = 0  # changes up to this are in sealed segments
        self.checkpoints = [0]
        self._received: SnapshotRange | None = None
        self.snapshots: list[FakeSnapshot] = []
        self.watchers: list[Callable[[], None]] = []
        self.waiting: dict[Callable[[], None], None] = {}
        self.fails_with: Exception | None = None
        self.high_seqno = 0
        self.has_unseen = False
        self.undecided: list[Any] = []

    @property
    def visible_seqno(self) -> int:
        return self.high_seqno

    @property
    def uuid(self) -> int:
        return self.failover_log.newest.vb_uuid

    @property
    def persisted_seqno(self) -> int:
        return self.disk_up_to

    @property
    def received(self) -> SnapshotRange:
        return self._received or SnapshotRange(self.high_seqno, self.high_seqno)

    @received.setter
    def received(self, value: SnapshotRange) -> None:
        self._received = value

    @property
    def complete_seqno(self) -> int:
        received = self.received
        return self.high_seqno if self.high_seqno >= received.end else received.start

    def notify(self) -> None:
        for watcher in list(self.watchers):
            watcher()

    # making changes

    def _add(self, key: bytes, message: Message, traits: int) -> int:
        message.vbucket = self.id
        self.high_seqno = message.by_seqno  # type: ignore[attr-defined]
        if key[0] and not traits & Trait.SYSTEM_EVENT:
            traits |= Trait.COLLECTION
        self.changes.append(Change(self.high_seqno, key, message.encode(), traits))
        waiting, self.waiting = self.waiting, {}
        for callback in waiting:
            callback()
        return self.high_seqno

    def set(
        self,
        key: bytes,
        value: bytes = b"v",
        *,
        collection: int = 0,
        datatype: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> int:
        full = encode_leb128(collection) + key
        traits = (Trait.XATTR if datatype & Datatype.XATTR else 0) | (
            Trait.SNAPPY if datatype & Datatype.SNAPPY else 0
        )
        message = DcpMutation(
            by_seqno=self.high_seqno + 1,
            rev_seqno=1,
            key=full,
            value=value,
            datatype=datatype,
            flags=flags,
            expiry=expiry,
            cas=self.high_seqno + 1000,
        )
        return self._add(full, message, traits)

    def delete(
        self,
        key: bytes,
        *,
        collection: int = 0,
        value: bytes = b"",
        datatype: int = 0,
        expired: bool = False,
        delete_time: int = 77,
    ) -> int:
        full = encode_leb128(collection) + key
        common: dict[str, Any] = {
            "by_seqno": self.high_seqno + 1,
            "rev_seqno": 2,
            "key": full,
            "value": value,
            "datatype": datatype,
            "cas": self.high_seqno + 1000,
            "delete_time": delete_time,
        }
        traits = (Trait.XATTR if datatype & Datatype.XATTR else 0) | (
            Trait.SNAPPY if datatype & Datatype.SNAPPY else 0
        )
        if expired:
            return self._add(full, DcpExpiration(**common), traits | Trait.EXPIRATION)
        return self._add(full, DcpDeletion(**common, unused=0), traits | Trait.DELETION)

    def event(
        self,
        event: SystemEventId,
        *,
        uid: int = 1,
        scope: int = 0,
        collection: int | None = None,
        name: bytes = b"",
        max_ttl: int | None = None,
    ) -> int:
        value = uid.to_bytes(8, "big") + scope.to_bytes(4, "big")
        if collection is not None:
            value += collection.to_bytes(4, "big")
        if max_ttl is not None:
            value += max_ttl.to_bytes(4, "big")
        message = DcpSystemEvent(
            by_seqno=self.high_seqno + 1,
            event=event,
            version=int(max_ttl is not None),
            key=name,
            value=value,
        )
        subject = b"\x01" + (b"s" if collection is None else b"c") + value[8:16]
        return self._add(subject, message, Trait.SYSTEM_EVENT)

    def close_checkpoint(self) -> None:
        if self.high_seqno > self.checkpoints[-1]:
            self.checkpoints.append(self.high_seqno)

    def to_disk(self, *, keep_memory: bool = False) -> None:
        """Seal everything and (unless kept) drop it from memory."""
        self.disk_up_to = self.high_seqno
        if not keep_memory:
            self.memory_after = self.high_seqno

    def rollback(self, seqno: int, uuid: int) -> None:
        self.changes = [change for change in self.changes if change.seqno <= seqno]
        self.high_seqno = seqno
        self.disk_up_to = min(self.disk_up_to, seqno)
        self.memory_after = min(self.memory_after, seqno)
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint < seqno] or [0]
        self.failover_log = self.failover_log.branched_at(seqno, uuid)
        self.notify()

    # the contract

    def snapshot_after(
        self, after_seqno: int, *, memory: bool = True, history: bool = False
    ) -> FakeSnapshot | None:
        if self.fails_with is not None:
            raise self.fails_with
        newer = [change for change in self.changes if change.seqno > after_seqno]
        if not memory:
            newer = [change for change in newer if change.seqno <= self.disk_up_to]
        if not newer:
            return None
        in_memory = memory and after_seqno >= self.memory_after
        checkpoint, number = False, 0
        if in_memory:
            number = sum(start <= after_seqno for start in self.checkpoints)
            end = self.checkpoints[number] if number < len(self.checkpoints) else self.high_seqno
            checkpoint = self.checkpoints[number - 1] == after_seqno
        else:
            end = max(self.disk_up_to, newer[0].seqno)
        part = [change for change in newer if change.seqno <= end]
        snapshot = FakeSnapshot(
            part, after_seqno + 1, in_memory=in_memory, checkpoint=checkpoint, number=number
        )
        self.snapshots.append(snapshot)
        return snapshot

    def collection_high_seqno(self, collections: Iterable[int]) -> int:
        prefixes = tuple(encode_leb128(collection) for collection in collections)
        return max((c.seqno for c in self.changes if c.key.startswith(prefixes)), default=0)


class FakeBucket:
    name = "default"

    def __init__(self, vbuckets: int = 4) -> None:
        self.vbuckets: list[FakeVBucket | None] = [FakeVBucket(number) for number in range(vbuckets)]
        self.manifest: dict[str, Any] = {
            "uid": "0",
            "scopes": [{"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}],
        }

    def use_collections(self) -> None:
        """Collections 8 and 9 in the default scope, 0x80 and 0x81 in scope a."""
        self.manifest = {
            "uid": "a",
            "scopes": [
                {
                    "name": "_default",
                    "uid": "0",
                    "collections": [
                        {"name": "_default", "uid": "0"},
                        {"name": "one", "uid": "8"},
                        {"name": "two", "uid": "9"},
                    ],
                },
                {
                    "name": "s",
                    "uid": "a",
                    "collections": [{"name": "x", "uid": "80"}, {"name": "y", "uid": "81"}],
                },
            ],
        }

    def set_state(self, vbucket: int, state: int, **_: Any) -> None:
        fake = self.vbuckets[vbucket]
        assert fake is not None
        fake.state = state
        fake.notify()

    def delete(self, vbucket: int) -> None:
        fake = self.vbuckets[vbucket]
        assert fake is not None
        self.vbuckets[vbucket] = None
        fake.notify()


class FakeHost:
    """What a connection gives its handler."""

    peer = "127.0.0.1:1"

    def __init__(self, bucket: FakeBucket, features: frozenset[int]) -> None:
        self.bucket = bucket
        self.features = features
        self.clock = ManualClock()
        self.settings = SimpleNamespace(
            idle_timeout=360.0,
            slow_backfill_timeout=720.0,
            backfill_buffer=8 << 20,
            takeover_max_time=60.0,
        )
        self.names: list[bytes] = []
        self.held: set[int] = set()
        self.former_actives: set[int] = set()
        self.memory_short = False
        self.disk_share = 0.1
        self.rewrites: list[tuple[Callable[[Any], Any], Callable[[str | None], None]]] | None = None
        """Not None: kept here for the test, instead of being done at once."""
        self.reached: list[tuple[int, str, int]] = []
        self.replicas_gone: list[str] = []
        self.events: list[dict[str, Any]] = []
        """What was told to the operator."""

    def record(self, event: str, *, level: int, **facts: Any) -> None:
        assert level in (logging.INFO, logging.WARNING)
        self.events.append({"event": event, **facts})

    def replica_reached(self, vbucket: int, name: str, seqno: int) -> None:
        self.reached.append((vbucket, name, seqno))

    def replica_gone(self, name: str) -> None:
        self.replicas_gone.append(name)

    def watch(self, vbucket: int, callback: Callable[[], None]) -> Callable[[], None]:
        fake = self.bucket.vbuckets[vbucket]
        assert fake is not None
        fake.watchers.append(callback)

        def unwatch() -> None:
            fake.watchers.remove(callback)
            fake.waiting.pop(callback, None)

        return unwatch

    def await_append(self, vbucket: int, callback: Callable[[], None]) -> None:
        fake = self.bucket.vbuckets[vbucket]
        assert fake is not None
        fake.waiting[callback] = None

    def claim_name(self, name: bytes) -> None:
        self.names.append(name)

    def not_my_vbucket(self) -> tuple[bytes, int]:
        return b"", 0

    def hold_writes(self, vbucket: int, *, hold: bool) -> None:
        (self.held.add if hold else self.held.discard)(vbucket)

    def rewrite(self, act: Callable[[Any], Any], done: Callable[[str | None], None]) -> None:
        if self.rewrites is not None:
            self.rewrites.append((act, done))
            return
        act(self.bucket)
        done(None)

    def memory_is_short(self) -> bool:
        return self.memory_short

    def backfills_wait(self) -> bool:
        return self.memory_short

    def is_former_active(self, vbucket: int) -> bool:
        return vbucket in self.former_actives

    def disk_used_share(self) -> float:
        return self.disk_share


def steps(**table: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    """Long scripts of a model's methods and their arguments; ``more_x`` is x once more.

    A rule-based state machine turns most of its rules off in most of its runs, but an interesting run here
    needs a change, a stream and a reader for it, in this order.
    """
    step = st.one_of(
        [st.tuples(st.just(name.removeprefix("more_")), st.fixed_dictionaries(table[name])) for name in table]
    )
    return st.lists(step, min_size=20, max_size=60)


def counted(frame: Frame) -> bool:
    """Whether flow control counts it."""
    return frame.is_request and frame.opcode != DcpOpcode.NOOP


@dataclass
class StreamModel:
    """A reader's view of one stream: it refuses whatever breaks docs/spec/dcp.md#checks-of-a-receiver."""

    last_seqno: int = 0
    position: Position = Position.BEGINNING
    marker: DcpSnapshotMarker | None = None
    seen_in_marker: int = 0
    keys: set[bytes] = field(default_factory=set)
    is_oso: bool = False
    oso_high: int = 0
    items: list[Any] = field(default_factory=list)
    markers: list[DcpSnapshotMarker] = field(default_factory=list)
    ended: int | None = None
    documents: dict[bytes, Message] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return not self.is_oso and (self.marker is None or self.last_seqno == self.marker.end)

    def receive(self, message: Message) -> None:
        assert self.ended is None, "a message after the end of the stream"
        if isinstance(message, DcpSnapshotMarker):
            assert not self.is_oso
            assert message.start <= message.end
            assert message.end > self.last_seqno, "a marker wholly in the past"
            if self.marker is not None:
                assert self.seen_in_marker, "a marker without a message with a seqno"
            self.marker, self.keys, self.seen_in_marker = message, set(), 0
            self.markers.append(message)
        elif isinstance(message, DcpOsoSnapshot):
            assert self.is_oso == (message.flags == OsoFlag.END)
            self.is_oso = not self.is_oso
            if self.is_oso:
                self.oso_high = self.last_seqno
            else:
                self.last_seqno, self.marker = self.oso_high, None
        elif isinstance(message, DcpStreamEnd):
            self.ended = message.status
        else:
            self._item(message)

    def _item(self, message: Any) -> None:
        seqno = message.by_seqno
        if self.is_oso:
            self.oso_high = max(self.oso_high, seqno)
        else:
            assert self.marker is not None, "an item before any marker"
            assert self.marker.start <= seqno <= self.marker.end, "an item outside its marker"
            assert seqno > self.last_seqno, "seqnos must rise"
            self.last_seqno = seqno
            self.position = self.position.received(SnapshotRange(self.marker.start, self.marker.end), seqno)
            self.seen_in_marker += 1
        if isinstance(message, DcpSeqnoAdvanced):
            return
        self.items.append(message)
        if isinstance(message, DcpSystemEvent):
            return
        if not self.marker or not self.marker.flags & MarkerFlag.MAY_CONTAIN_DUPLICATES:
            assert message.key not in self.keys, "a key twice in a snapshot"
        self.keys.add(message.key)
        if isinstance(message, DcpMutation):
            self.documents[message.key] = message
        else:
            self.documents.pop(message.key, None)


class FakeReader:
    """The other end of a producer: sends requests, decodes what comes, counts and checks it."""

    def __init__(
        self,
        bucket: FakeBucket | Any,
        *,
        features: frozenset[int] = COLLECTIONS,
        host: FakeHost | None = None,
    ) -> None:
        self.host = host or FakeHost(bucket, features)
        self.now = 100.0
        self.woken = 0
        self.producer = DcpProducer(self.host, self._wake, self.now)  # type: ignore[arg-type]
        self.framer = Framer()
        self.answers: list[Frame] = []
        self.noops: list[int] = []
        self.received: list[tuple[Frame, Message]] = []
        self.streams: dict[int, StreamModel] = {}
        self.window = 0
        self.outstanding = 0
        self._opaque = 0x1000

    def _wake(self) -> None:
        self.woken += 1

    def send(self, message: Message) -> None:
        self.producer.receive_frame(Frame.parse(message.encode()), self.now)

    def pull(self, max_bytes: int = 1 << 20) -> int:
        """Take what the producer has now, in one call; returns how many bytes."""
        size = 0
        for piece in self.producer.data_to_send(max_bytes):
            size += len(piece)
            self.framer.feed(piece)
        for frame in self.framer.frames():
            self._receive(frame)
        return size

    def pull_all(self, max_bytes: int = 1 << 20) -> None:
        woken = -1
        while self.pull(max_bytes) or self.woken > woken:  # it may have looked through what is not for us
            woken = self.woken

    def _receive(self, frame: Frame) -> None:
        if not frame.is_request:
            self.answers.append(frame)
            return
        message = DCP.decode(frame, Direction.TO_RECEIVER)
        if isinstance(message, DcpNoop):
            self.noops.append(frame.opaque)
            return
        if self.window:
            assert self.outstanding < self.window, "a message was sent into a full window"
        self.outstanding += frame.size
        self.received.append((frame, message))
        if frame.opaque in self.streams and frame.opcode != DcpOpcode.SET_VBUCKET_STATE:
            self.streams[frame.opaque].receive(message)

    def ack(self, size: int) -> None:
        self.outstanding = max(0, self.outstanding - size)
        self.send(DcpBufferAck(acked_bytes=size))

    def respond(self, opcode: int, opaque: int, status: int = 0) -> None:
        """Answer a message of the producer."""
        frame = Frame(0x81, opcode, vbucket=status, opaque=opaque)
        self.producer.receive_frame(frame, self.now)

    def status_of_last(self) -> int:
        self.pull(0)
        return self.answers[-1].status

    # conversations

    def open(self, flags: int = FULL, *, noop: bool = True, name: bytes = b"test:1", **controls: str) -> None:
        self.send(DcpOpen(key=name, flags=flags))
        assert self.status_of_last() == Status.SUCCESS
        if noop:
            controls = {"enable_noop": "true", **controls}
        for key, value in controls.items():
            assert self.control(key, value) == Status.SUCCESS, key

    def control(self, key: str, value: str) -> int:
        self.send(DcpControl(key=key.encode(), value=value.encode()))
        status = self.status_of_last()
        if key == "connection_buffer_size" and status == Status.SUCCESS:
            self.window = int(value)
            if not self.window:
                self.outstanding = 0
        return status

    def request(self, vbucket: int = 0, *, value: Any = None, **fields: Any) -> Frame:
        """Ask for a stream; returns the answer. An accepted stream is checked from then on."""
        self._opaque += 1
        opaque = fields.pop("opaque", self._opaque)
        body = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send(DcpStreamRequest(vbucket=vbucket, opaque=opaque, value=body, **fields))
        self.pull(0)
        answer = self.answers[-1]
        assert answer.opaque == opaque and answer.opcode == DcpOpcode.STREAM_REQUEST
        if answer.status == Status.SUCCESS:
            asked = [fields.get(name, 0) for name in ("start_seqno", "snapshot_start", "snapshot_end")]
            if fields.get("flags", 0) & AddStreamFlag.FROM_LATEST:
                asked = [self.host.bucket.vbuckets[vbucket].high_seqno] * 3
            vb_uuid = FailoverLog.from_bytes(answer.value).newest.vb_uuid
            self.streams[opaque] = StreamModel(asked[0], Position(vb_uuid, *asked))
        return answer

    def stream(self, vbucket: int = 0, **fields: Any) -> StreamModel:
        """An accepted stream, with everything that the producer sends immediately."""
        answer = self.request(vbucket, **fields)
        assert answer.status == Status.SUCCESS, hex(answer.status)
        self.pull_all()
        return self.streams[answer.opaque]

    def close_stream(self, vbucket: int = 0, framing: bytes = b"") -> int:
        self.send(DcpCloseStream(vbucket=vbucket, framing=framing))
        return self.status_of_last()


class ReaderModel:
    """A reader with a stream for each vbucket, which resumes what broke off.

    Subclasses say what the vbuckets are.
    """

    reader: FakeReader
    live: dict[int, StreamModel]
    broken: dict[int, StreamModel]

    def high_seqno(self, number: int) -> int:
        raise NotImplementedError

    def pull(self, max_bytes: int) -> None:
        raise NotImplementedError

    def forget_the_ended(self) -> None:
        raise NotImplementedError

    def request(self, number: int, share: float, bounded: bool, max_bytes: int) -> None:
        """From where the last stream of this vbucket broke off; from the beginning if that is refused."""
        before = self.broken.get(number, StreamModel())
        held = before.position
        end = held.seqno + int((self.high_seqno(number) - held.seqno) * share) if bounded else 2**64 - 1
        answer = self.reader.request(
            number,
            start_seqno=held.seqno,
            end_seqno=max(end, held.seqno),
            vb_uuid=held.vb_uuid,
            snapshot_start=held.snapshot_start,
            snapshot_end=held.snapshot_end,
        )
        if number in self.live:
            assert answer.status == Status.KEY_EEXISTS
        elif answer.status == Status.ROLLBACK:
            assert held.seqno, "there is nothing to roll back"
            self.broken.pop(number)
        else:
            assert answer.status == Status.SUCCESS
            stream = self.live[number] = self.reader.streams[answer.opaque]
            stream.documents = dict(before.documents)
            self.pull(max_bytes)

    def must_end(self, number: int) -> None:
        """The stream of a vbucket that is no longer the same: no more changes, only its end."""
        stream = self.live.pop(number, None)
        if stream is None:
            return
        self.broken[number] = stream
        items = len(stream.items)
        self.drain()
        assert len(stream.items) == items
        assert stream.ended in (StreamEndStatus.STATE_CHANGED, StreamEndStatus.OK)

    def drain(self) -> None:
        """Read everything, as fast as it comes."""
        woken = -1
        while True:
            size = self.reader.pull(700)
            if self.reader.outstanding:
                self.reader.ack(self.reader.outstanding)
            elif not size and self.reader.woken <= woken:  # it may have looked at streams that had nothing
                break
            woken = self.reader.woken
        self.forget_the_ended()

    def catch_up(self) -> None:
        """A reader that reads everything has everything."""
        self.drain()
        for number, stream in self.live.items():
            assert stream.is_complete
            assert stream.last_seqno == self.high_seqno(number)
