"""A stream of UPR draft A or B: DCP's stream with the messages of a draft.

Three things are different. Snapshots have a start and an end message and no range. A FLUSH on the node is a
message, after which the stream goes on with the new branch from seqno 0; the failover log that a reader kept
then rolls it back to 0 if it comes with an older position. And a vbucket whose state changes is sent up to
its last change before the stream ends, in draft B with the new state at the end: that is how this draft,
which has no request for it, hands a vbucket over.

Rules: docs/spec/upr.md#draft-a, docs/spec/upr.md#draft-b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from ...frames import OPCODE_AT, Chunk, seqnos_at
from ...wire.codes import (
    DcpOpcode,
    StreamEndStatus,
    UprBStreamEnd,
    UprBVBucketState,
    VBucketState,
)
from ...wire.message import Message
from ...wire.upr import (
    UprADeletion,
    UprAExpiration,
    UprAFlush,
    UprAMutation,
    UprASnapshotEnd,
    UprASnapshotStart,
    UprAStreamBegin,
    UprAStreamEndOk,
    UprAStreamEndStateChanged,
    UprBDeletion,
    UprBExpiration,
    UprBFlush,
    UprBMutation,
    UprBSetVBucketState,
    UprBSnapshotEnd,
    UprBSnapshotStart,
    UprBStreamEndMessage,
    UprBStreamStart,
)
from ..dcp.backfill_slots import BackfillSlots
from ..dcp.controls import ConnectionOptions
from ..dcp.producer_stream import ProducerStream
from ..dcp.reframing import STORED_DELETION, STORED_EXPIRATION, STORED_MUTATION, Form, reframe
from ..dcp.shaping import ShapedFrames, Shaper
from ..dcp.stream_messages import StreamMessages
from ..dcp.stream_request import Accepted
from ..dcp.watched_vbucket import WatchedVBucket

if TYPE_CHECKING:
    from ...store.base import VBucket, VBucketSnapshot
    from ..handler import Host

__all__ = ["UprAMessages", "UprBMessages", "UprMessages", "UprStream"]


class UprMessages(StreamMessages):
    """The messages of one draft, for one stream.

    A stream ends with OK or, for any other reason, with state changed.
    """

    BEGIN: ClassVar[type[Message]]
    SNAPSHOT_START: ClassVar[type[Message]]
    SNAPSHOT_END: ClassVar[type[Message]]
    FLUSH: ClassVar[type[Message]]
    FORMS: ClassVar[Mapping[int, Form]]

    def __init__(self, options: ConnectionOptions, vbucket: int, opaque: int) -> None:
        super().__init__(options, vbucket, opaque, 0)
        self._is_inside = False  # whether a snapshot was begun and not ended

    def begin_snapshot(self) -> list[bytes]:
        """What to send before a change; nothing inside a snapshot."""
        if self._is_inside:
            return []
        self._is_inside = True
        return [self.say(self.SNAPSHOT_START)]

    def end_snapshot(self) -> list[bytes]:
        """What to send after the last change; nothing if no snapshot was begun."""
        if not self._is_inside:
            return []
        self._is_inside = False
        return [self.say(self.SNAPSHOT_END)]

    def say(self, message: type[Message]) -> bytes:
        """A message without a body."""
        return message(vbucket=self._vbucket, opaque=self._opaque).encode()

    def new_state(self, state: int) -> bytes | None:
        """The vbucket has another state; None if the draft can't say so."""
        return None


class UprAMessages(UprMessages):
    """Draft A: everything has the magic of a response; byte 5 says what it is."""

    BEGIN = UprAStreamBegin
    SNAPSHOT_START = UprASnapshotStart
    SNAPSHOT_END = UprASnapshotEnd
    FLUSH = UprAFlush
    FORMS: ClassVar[Mapping[int, Form]] = {
        DcpOpcode.MUTATION: Form(STORED_MUTATION, UprAMutation, constants={"datatype": UprAMutation.TYPE}),
        DcpOpcode.DELETION: Form(STORED_DELETION, UprADeletion, constants={"datatype": UprADeletion.TYPE}),
        DcpOpcode.EXPIRATION: Form(
            STORED_EXPIRATION, UprAExpiration, constants={"datatype": UprAExpiration.TYPE}
        ),
    }

    def end(self, status: StreamEndStatus) -> bytes:
        return self.say(UprAStreamEndOk if status == StreamEndStatus.OK else UprAStreamEndStateChanged)


class UprBMessages(UprMessages):
    """Draft B: one opcode per message, with other numbers than DCP's."""

    BEGIN = UprBStreamStart
    SNAPSHOT_START = UprBSnapshotStart
    SNAPSHOT_END = UprBSnapshotEnd
    FLUSH = UprBFlush
    FORMS: ClassVar[Mapping[int, Form]] = {
        DcpOpcode.MUTATION: Form(STORED_MUTATION, UprBMutation),
        DcpOpcode.DELETION: Form(STORED_DELETION, UprBDeletion),
        DcpOpcode.EXPIRATION: Form(STORED_EXPIRATION, UprBExpiration),
    }

    def end(self, status: StreamEndStatus) -> bytes:
        flag = UprBStreamEnd.OK if status == StreamEndStatus.OK else UprBStreamEnd.STATE_CHANGED
        return UprBStreamEndMessage(flag=flag, vbucket=self._vbucket, opaque=self._opaque).encode()

    def new_state(self, state: int) -> bytes | None:
        # by name: the numbers of pending and replica are swapped in this draft (B5)
        named = UprBVBucketState[VBucketState(state).name]
        return UprBSetVBucketState(state=named, vbucket=self._vbucket, opaque=self._opaque).encode()


class UprShaper(Shaper):
    """Shapes chunks into a draft's item messages."""

    __slots__ = ("_datatypes", "_forms")

    def __init__(
        self, options: ConnectionOptions, accepted: Accepted, forms: Mapping[int, Form], datatypes: int
    ) -> None:
        super().__init__(options, accepted.filter, accepted.opaque)
        self._forms = forms
        self._datatypes = datatypes

    def shape(
        self, chunk: Chunk, *, skip_deletes: bool = False, by_key: bool = False, may_commit: bool = False
    ) -> ShapedFrames | None:
        data, offsets = self.choose(chunk)
        if not len(offsets):
            return None
        edges = seqnos_at(data, offsets[[0, -1]])
        kinds = data[offsets + OPCODE_AT]
        data, offsets = reframe(
            data, offsets, kinds, self._forms, opaque=self._opaque, datatypes=self._datatypes
        )
        return ShapedFrames(data, offsets, int(edges[0]), int(edges[1]))


class UprWatchedVBucket(WatchedVBucket):
    """Two changes do not end a stream of UPR immediately: a flush, and a new state."""

    __slots__ = ("_bucket", "_flushes", "last_seqno")

    def __init__(self, vbucket: VBucket, host: Host, changed: Callable[[], None]) -> None:
        super().__init__(vbucket, host, changed)
        self.last_seqno: int | None = None
        """Set if the vbucket's state has changed: changes up to here are still sent."""
        self._bucket = host.bucket
        self._flushes = host.bucket.flushes

    def was_flushed(self) -> bool:
        """Whether the bucket was flushed since the last look; the new branch is watched from then on.

        A new state is noted.
        """
        vbucket = self.vbucket
        if self._vbuckets[vbucket.id] is not vbucket:
            return False
        if vbucket.failover_log == self.log:
            if vbucket.state != self.state:
                self.state, self.last_seqno = vbucket.state, vbucket.high_seqno
            return False
        if self._bucket.flushes == self._flushes or vbucket.failover_log.newest.seqno:
            return False
        self.log, self.high_seqno, self._flushes = vbucket.failover_log, 0, self._bucket.flushes
        return True


class UprStream(ProducerStream):
    """A stream that was accepted, in one of the drafts."""

    WATCHED = UprWatchedVBucket
    _watched: UprWatchedVBucket

    def __init__(  # noqa: PLR0917
        self,
        accepted: Accepted,
        options: ConnectionOptions,
        host: Host,
        slots: BackfillSlots,
        on_ready: Callable[[ProducerStream], None],
        messages: type[UprMessages],
        datatypes: int,
        group: bytes,
    ) -> None:
        super().__init__(accepted, options, host, slots, on_ready)
        self._says: UprMessages = messages(options, self.vbucket, self.opaque)
        self._shaper = UprShaper(options, accepted, messages.FORMS, datatypes)
        # The drafts' snapshots have no range, so none needs to end where its last message is.
        self._is_cut = False
        self._group = group
        self._queue.say(self._says.say(messages.BEGIN))

    def stats(self) -> dict[str, int | str]:
        return {**super().stats(), "group_id": self._group.decode(errors="backslashreplace")}

    # What happens to it.

    def changed(self) -> None:
        if self.is_live and self._watched.was_flushed():
            self._flush()
        super().changed()

    def _flush(self) -> None:
        """Everything is gone: say so, and begin again."""
        self._close_snapshots()
        self._slots.release(self)
        self._is_parked = False
        self._queue.drop_batch()
        self.position = self._marker.announced_end = self._queue.last_seqno = 0
        # Messages that wait to be sent stay, in order; only the items between them are gone.
        self._queue.say(self._says.say(self._says.FLUSH))
        self._end_snapshot()

    def end(self, status: StreamEndStatus, *, tell: bool = True) -> None:
        if not self.is_live:
            return
        super().end(status, tell=tell)
        if tell and self._watched.last_seqno is not None and status == StreamEndStatus.STATE_CHANGED:
            state_message = self._says.new_state(self._watched.state)
            if state_message is not None:
                self._queue.say_first(state_message)

    # Snapshots.

    def _next_snapshot(self) -> int | None:
        last_seqno = self._watched.last_seqno
        if last_seqno is not None and last_seqno <= self.position < self._accepted.end_seqno:
            self.end(StreamEndStatus.STATE_CHANGED)
            return 0
        return super()._next_snapshot()

    def _announce(self, snapshot: VBucketSnapshot, first_seqno: int) -> None:
        if self._marker.is_due:
            for message in self._says.begin_snapshot():
                self._queue.say(message)
        self._marker.is_due = False

    def _finish(self, snapshot: VBucketSnapshot) -> None:
        super()._finish(snapshot)
        if self.position >= self._marker.announced_end:
            self._end_snapshot()

    def _end_snapshot(self) -> None:
        for message in self._says.end_snapshot():
            self._queue.say(message)
