"""One stream of a DCP producer: from a vbucket's snapshots to the messages of a consumer.

The stream pulls. Nothing is read from the store before there is room to send it, so a consumer that does not
read costs one chunk and nothing more. `send_into` goes round:

    messages wait (marker, end ...)?    send them, as far as the window allows
    frames of a batch wait?             send as many
    a snapshot is open?                 read the next chunk of it and shape it into a batch
    otherwise                           ask the vbucket for the next snapshot, or wait for a change

Where the changes come from, memory or disk, is the vbucket's decision for each snapshot; the states of
docs/spec/dcp.md#states-of-a-stream follow from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...errors import LocalProtocolError, TailraceError
from ...frames import CHUNK_BYTES, seqnos_at
from ...wire.codes import AddStreamFlag, MarkerFlag, OsoFlag, StreamEndStatus, VBucketState
from ..backfill_slots import BackfillSlots
from ..states import STREAM_TRANSITIONS, Machine, StreamInput, StreamState
from ..stream_filter import StreamFilter
from .controls import ConnectionOptions, Oso
from .shaping import ShapedFrames, Shaper
from .stream_messages import StreamMessages
from .stream_request import Accepted

if TYPE_CHECKING:
    from ...store.base import Bucket, Snapshot
    from ..handler import Host

__all__ = ["ProducerStream"]

SKIPPED_BEFORE_ADVANCE = 10_000
"""Changes of a backfill that the filter drops in a row before the consumer is told how far it is."""

_TAKE_OVER = int(AddStreamFlag.TAKE_OVER)  # plain, as in `controls`
_DISK_ONLY = int(AddStreamFlag.DISK_ONLY)
_DEAD = StreamState.DEAD
_MEMORY, _DISK, _CHECKPOINT = int(MarkerFlag.MEMORY), int(MarkerFlag.DISK), int(MarkerFlag.CHECKPOINT)

_log = logging.getLogger(__name__)


class ProducerStream:
    """A stream that was accepted; its owner serves it until it `is_finished`."""

    def __init__(
        self,
        accepted: Accepted,
        options: ConnectionOptions,
        host: Host,
        slots: BackfillSlots,
        on_ready: Callable[[ProducerStream], None],
    ) -> None:
        self.vbucket = accepted.vbucket.id
        self.stream_id = accepted.stream_id
        self.opaque = accepted.opaque
        self.position = accepted.start_seqno  # end of the last snapshot that was taken whole
        self.sent_bytes = 0
        self.sent_messages = 0
        self.is_ready = False
        self._is_parked = False
        self.takeover_since: float | None = None
        self._accepted = accepted
        self._options = options
        self._window = options.window
        self._host = host
        self._slots = slots
        self._on_ready = on_ready
        self._machine = Machine(STREAM_TRANSITIONS, StreamState.PENDING)
        self._says = StreamMessages(options, self.vbucket, accepted.opaque, accepted.stream_id)
        self._shaper = Shaper(options, accepted.filter, accepted.opaque, accepted.stream_id)
        self._filter = accepted.filter
        # Legacy streams of a bucket with collections look through each snapshot before they announce it.
        self._looks_ahead = self._filter.is_legacy and int(host.bucket.manifest["uid"], 16) > 0

        self._messages: deque[bytes] = deque()
        self._batch: ShapedFrames | None = None
        self._batch_at = 0
        self._end_after_batch: StreamEndStatus | None = None

        self._snapshot: Snapshot | None = None
        self._preview: Snapshot | None = None
        self._preview_filter = StreamFilter.of_old_clients()
        self._announced_end = self.position
        self._marker_end = 0
        self._marker_due = False
        self._is_first_marker = True
        self._is_oso = False
        self._oso_begun = False
        self._skips_deletes = False
        self._skipped = 0
        self._last_sent_seqno = self.position

        self._has_asked_for_acks = False
        self._unacknowledged_markers = 0
        self._next_state = VBucketState.PENDING
        self._is_given_up = True  # no, while that is under way
        self._holds_writes = False

        vbucket = accepted.vbucket
        self._vbuckets = host.bucket.vbuckets
        self._known = vbucket, vbucket.state, vbucket.failover_log
        self._high_seqno = vbucket.high_seqno
        self._unwatch = host.watch(self.vbucket, self.changed)

    # What the owner asks.

    @property
    def state(self) -> StreamState:
        return self._machine.state

    @property
    def is_takeover(self) -> bool:
        return bool(self._accepted.flags & _TAKE_OVER)

    @property
    def holds_writes(self) -> bool:
        """The front end refuses writes until this takeover is over."""
        return self._holds_writes

    @property
    def collections(self) -> frozenset[int] | None:
        """Which collections it streams; None: all."""
        return self._filter.collections

    @property
    def is_live(self) -> bool:
        return self._machine.state is not _DEAD

    @property
    def is_finished(self) -> bool:
        """Over, and everything said: the owner forgets it."""
        return self._machine.state is _DEAD and not self._messages

    @property
    def is_inside_memory(self) -> bool:
        """It has begun to send a snapshot that holds on to memory: better finish that before another."""
        return self._snapshot is not None and self._snapshot.in_memory

    def stats(self) -> dict[str, int | str]:
        """Figures for the statistics."""
        return {
            "state": self.state.value,
            "opaque": self.opaque,
            "start_seqno": self._accepted.start_seqno,
            "end_seqno": self._accepted.end_seqno,
            "last_sent_seqno": self._last_sent_seqno,
            "last_sent_snap_end_seqno": self._announced_end,
            "flags": self._accepted.flags,
            "sent_bytes": self.sent_bytes,
            "sent_messages": self.sent_messages,
        }

    # What happens to it.

    def set_ready(self) -> None:
        """There is something to do."""
        if not self.is_ready:
            self.is_ready = True
            self._is_parked = False
            self._on_ready(self)

    def changed(self) -> None:
        """The vbucket has something newer, or is not what it was."""
        vbucket, state, log = self._known
        high_seqno = vbucket.high_seqno
        is_same = (
            high_seqno >= self._high_seqno
            and vbucket.state == state
            and (vbucket.failover_log is log or vbucket.failover_log == log)
            and self._vbuckets[self.vbucket] is vbucket
        )
        self._high_seqno = high_seqno
        if not is_same:
            self.end(StreamEndStatus.STATE_CHANGED)
        elif not self.is_ready and not self._is_parked:
            self.set_ready()

    def _await_append(self) -> None:
        """There is nothing to do before the vbucket has something newer. Only then does a write call us: it
        costs nothing for readers who are behind.
        """
        if self.is_live:
            self._host.await_append(self.vbucket, self.changed)

    def marker_acknowledged(self) -> None:
        """The consumer has received a whole snapshot whose marker asked for an answer."""
        if self._unacknowledged_markers:
            self._unacknowledged_markers -= 1
            self.set_ready()

    def state_answered(self) -> None:
        """The consumer's vbucket has the state that it was told to have."""
        if self.state is not StreamState.TAKEOVER_WAIT:
            return
        self._machine.feed(StreamInput.STATE_ANSWERED)
        if self._next_state == VBucketState.ACTIVE:
            self.end(StreamEndStatus.OK)
        else:
            self._next_state = VBucketState.ACTIVE
            self._is_given_up = False
            self._host.rewrite(self._give_up, self._given_up)
        self.set_ready()

    def _give_up(self, bucket: Bucket) -> list[int]:
        """The vbucket is dead here from now on; what was written before is still sent."""
        if not self.is_live:
            return []
        vbucket, _, log = self._known
        self._known = vbucket, VBucketState.DEAD, log  # our own change, which the stream survives
        bucket.set_state(self.vbucket, VBucketState.DEAD)
        return [self.vbucket]

    def _given_up(self, failed: str | None) -> None:
        """It is on disk that the vbucket is dead, or could not be written: until then nobody else may be told
        to be active, because a crash would bring ours back.
        """
        if failed is not None:
            _log.error("vbucket %d: its takeover ends, the disk refuses: %s", self.vbucket, failed)
            self.end(StreamEndStatus.STATE_CHANGED)
        self._is_given_up = True
        self.set_ready()

    def hold_writes(self) -> None:
        """The takeover takes too long: the front end must not add to it."""
        if not self._holds_writes:
            self._holds_writes = True
            self._host.hold_writes(self.vbucket, hold=True)

    def end(self, status: StreamEndStatus, *, tell: bool = True) -> None:
        """The stream is over; what was read and not sent is dropped."""
        if self.state is StreamState.DEAD:
            return
        self._machine.feed(StreamInput.ENDED)
        self._unwatch()
        self._close_snapshots()
        self._slots.release(self)
        self._batch = None
        self._messages.clear()
        if self._holds_writes:
            self._holds_writes = False
            self._host.hold_writes(self.vbucket, hold=False)
        if tell:
            self._messages.append(self._says.end(status))
            self.set_ready()

    # Sending.

    def send_into(self, out: list[bytes | memoryview], budget: int) -> int:
        """Put messages into ``out`` until about ``budget`` bytes of work are done, the window is full, or
        there is nothing for now (then it is no longer ready). A batch is not split for the budget, only
        for the window. The work that was done: bytes sent, or read and found to be not for this stream.
        """
        window, messages = self._window, self._messages
        work = 0
        while work < budget and (room := window.room) > 0:
            if messages:
                message = messages.popleft()
                size = len(message)
                out.append(message)
                window.sent(size)
                self.sent_messages += 1
                self.sent_bytes += size
                work += size
            elif self._batch is not None:
                work += self._send_batch(self._batch, out, room)
            else:
                read = self._load()
                if read is None:
                    self.is_ready = False
                    if not self._is_parked:
                        self._await_append()
                    break
                if self._batch is None:
                    work += read
        if self.is_finished:
            self.is_ready = False
        return max(work, 1)

    def _send_batch(self, batch: ShapedFrames, out: list[bytes | memoryview], room: int) -> int:
        """Those frames of the batch go that begin within ``room`` bytes."""
        data, offsets, at = batch.data, batch.offsets, self._batch_at
        start, end = offsets.item(at), len(data)
        stop = count = len(offsets)
        if end - start > room:
            stop = int(np.searchsorted(offsets, start + room))
            if stop < count:
                end = offsets.item(stop)
        out.append(data.data[start:end])
        if stop == count:
            self._batch = None
            self._last_sent_seqno = batch.last_seqno
        self._batch_at = stop
        size = end - start
        self._window.sent(size)
        self.sent_messages += stop - at
        self.sent_bytes += size
        return size

    def _load(self) -> int | None:
        """Find what to send next: how many bytes were read for it, or None if there is nothing for now."""
        if not self.is_live:
            return None
        if self._end_after_batch is not None:
            self.end(self._end_after_batch)
            return 0
        try:
            if self._preview is not None:
                return self._read_preview(self._preview)
            if self._snapshot is not None:
                return self._read(self._snapshot)
            return self._next_snapshot()
        except TailraceError as error:
            # A file that can't be read, or a value that is not what its datatype says.
            _log.error("vbucket %d: a backfill failed: %s", self.vbucket, error)
            self.end(StreamEndStatus.BACKFILL_FAIL)
            return 0

    # Snapshots.

    def _next_snapshot(self) -> int | None:
        accepted, vbucket = self._accepted, self._accepted.vbucket
        self.changed()  # what it may read from now on is what a later look is compared with
        if not self.is_live:
            return 0
        if self.position >= accepted.end_seqno and self.position >= self._announced_end:
            self.end(StreamEndStatus.OK)
            return 0
        if self.state is StreamState.TAKEOVER_WAIT:
            return None
        if self.state is StreamState.PENDING:
            self._machine.feed(StreamInput.STARTED)
        if self.state is StreamState.BACKFILLING and not self._take_slot():
            return None
        disk_only = bool(accepted.flags & _DISK_ONLY) and self.position < accepted.end_seqno
        snapshot = vbucket.snapshot_after(self.position, memory=not disk_only)
        if snapshot is None:
            return self._caught_up()
        if snapshot.end <= self.position:
            raise LocalProtocolError(
                f"after seqno {self.position} comes a snapshot that ends at {snapshot.end}"
            )
        if snapshot.in_memory:
            self._enter_memory()
        elif not self._enter_backfill(snapshot):
            snapshot.close()
            return 0 if not self.is_live else None
        if not self._begin(snapshot):
            snapshot.close()
            return None
        if self._looks_ahead:
            self._preview = vbucket.snapshot_after(self.position, memory=not disk_only)
            self._preview_filter = StreamFilter.of_old_clients()
            self._marker_end = 0
        return 0

    def _enter_memory(self) -> None:
        self._slots.release(self)
        if self.state is StreamState.BACKFILLING:
            self._machine.feed(StreamInput.TAKEOVER_BEGAN if self.is_takeover else StreamInput.CAUGHT_UP)

    def _enter_backfill(self, snapshot: Snapshot) -> bool:
        """Whether a backfill may begin; if not, the stream waits for a slot or is over."""
        if not self._accepted.survives_purge(snapshot.start):
            self.end(StreamEndStatus.STATE_CHANGED)
            return False
        if self.state is StreamState.IN_MEMORY:
            self._machine.feed(StreamInput.CURSOR_DROPPED)
            return self._take_slot()
        return True

    def _take_slot(self) -> bool:
        """Whether there is a slot; if not, the stream is woken when there is one, and not before."""
        self._is_parked = not self._slots.take(self)
        return not self._is_parked

    def _caught_up(self) -> int | None:
        """Nothing is newer than the position."""
        self._enter_memory()
        if self._accepted.flags & _DISK_ONLY and self.position >= self._announced_end:
            self.end(StreamEndStatus.OK)
            return 0
        may_go_on = self._is_given_up and not self._unacknowledged_markers
        if self.state is StreamState.TAKEOVER_SEND and may_go_on:
            self._messages.append(self._says.set_state(self._next_state))
            self._machine.feed(StreamInput.STATE_SENT)
            return 0
        return None

    def _begin(self, snapshot: Snapshot) -> bool:
        """Take a snapshot up, with a marker unless it goes on with what the last one announced; False if it
        has to wait.

        A replica may be in the middle of receiving a snapshot. What is here of it is announced with the end
        of the whole, and the rest follows later without a marker: nobody may take a part for a state that
        the vbucket had. If nothing of it is here yet, it may never come: what is here is whole.
        """
        end = snapshot.end
        vbucket = self._accepted.vbucket
        received = vbucket.received
        if vbucket.state == VBucketState.REPLICA and received.start < end < received.end:
            if self._looks_ahead:
                return False
            end = received.end
        self._snapshot = snapshot
        self._skipped = 0
        self._marker_due = end > self._announced_end
        if self._marker_due:
            self._announced_end = self._marker_end = end
        is_initial_backfill = not snapshot.in_memory and snapshot.start == 1
        self._skips_deletes = self._options.skip_deletes and is_initial_backfill
        self._is_oso = (
            self._options.oso is not Oso.OFF and is_initial_backfill and self._filter.is_one_collection
        )
        self._oso_begun = False
        return True

    def _read_preview(self, preview: Snapshot) -> int:
        """Look through a snapshot for the last change that is for this stream: its marker must end there.

        Without collections there is no other message that could end it.
        """
        chunk = preview.read(CHUNK_BYTES)
        if chunk is not None:
            wanted = self._preview_filter.wanted(chunk)
            if wanted is None:
                self._marker_end = chunk.last_seqno
            elif wanted.any():
                last = np.flatnonzero(wanted)[-1:]
                self._marker_end = int(seqnos_at(chunk.data, chunk.offsets[last])[0])
            return len(chunk.data)
        preview.close()
        self._preview = None
        if not self._marker_end and not self._preview_filter.is_empty and self._snapshot is not None:
            self.position = self._snapshot.end
            self._close_snapshots()
        return 0

    def _read(self, snapshot: Snapshot) -> int:
        """Make a batch of the snapshot's next chunk."""
        chunk = snapshot.read(CHUNK_BYTES)
        if chunk is None:
            self._finish(snapshot)
            return 0
        batch = self._shaper.shape(chunk, skip_deletes=self._skips_deletes)
        if batch is not None:
            self._announce(snapshot, batch.first_seqno)
            self._batch, self._batch_at = batch, 0
            self._skipped = 0
        else:
            self._skipped += len(chunk.offsets)
            if self._skipped >= SKIPPED_BEFORE_ADVANCE and not snapshot.in_memory and not self._is_oso:
                self._advance(snapshot, chunk.last_seqno)
        if self._filter.is_empty:
            self._end_after_batch = StreamEndStatus.FILTER_EMPTY
        return len(chunk.data)

    def _finish(self, snapshot: Snapshot) -> None:
        """A snapshot has been read whole."""
        self.position = snapshot.end
        self._snapshot = None
        snapshot.close()
        if self._oso_begun:
            if self._options.oso is Oso.WITH_SEQNO_ADVANCED and self._last_sent_seqno != snapshot.end:
                self._messages.append(self._says.seqno_advanced(snapshot.end))
            self._messages.append(self._says.oso(OsoFlag.END))
            self._last_sent_seqno = snapshot.end
        elif not self._filter.is_legacy and self.position >= self._announced_end:
            self._is_oso = False
            self._advance(snapshot, self._announced_end)

    def _advance(self, snapshot: Snapshot, seqno: int) -> None:
        """Tell the consumer how far it is, although the change there was not for it."""
        if seqno > self._last_sent_seqno:
            self._announce(snapshot, seqno)
            self._messages.append(self._says.seqno_advanced(seqno))
            self._last_sent_seqno = seqno
            self._skipped = 0

    def _announce(self, snapshot: Snapshot, first_seqno: int) -> None:
        """Send the snapshot's marker before the first message with a seqno in it."""
        if not self._marker_due:
            return
        self._marker_due = False
        if self._is_oso:
            self._oso_begun = True
            self._messages.append(self._says.oso(OsoFlag.START))
            return
        purge_seqno = self._accepted.vbucket.purge_seqno
        # What a replica has received from a disk may all be in its memory, and lacks purged deletions, too.
        as_memory = snapshot.in_memory and self.position >= purge_seqno
        flags = _MEMORY if as_memory else _DISK
        start = snapshot.start
        if snapshot.checkpoint or not as_memory:
            flags |= _CHECKPOINT
        else:
            start = first_seqno
        if self.state is StreamState.TAKEOVER_SEND:
            flags |= MarkerFlag.ACK
            if not self._has_asked_for_acks:
                flags |= MarkerFlag.CHECKPOINT
                self._has_asked_for_acks = True
            self._unacknowledged_markers += 1
        if self._is_first_marker:
            start = min(start, self._accepted.snapshot_start)
            self._is_first_marker = False
        received = self._accepted.vbucket.received
        if snapshot.end < self._marker_end and snapshot.start <= received.start:
            # Keys that came before the replica's open snapshot may come again in its rest.
            flags |= MarkerFlag.MAY_CONTAIN_DUPLICATES
        self._messages.append(self._says.marker(start, self._marker_end, flags, purge_seqno))

    def _close_snapshots(self) -> None:
        for snapshot in (self._snapshot, self._preview):
            if snapshot is not None:
                snapshot.close()
        self._snapshot = self._preview = None
