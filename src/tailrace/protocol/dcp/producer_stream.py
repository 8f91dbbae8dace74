"""One stream of a DCP producer: from a vbucket's snapshots to the messages for a reader or replica.

The stream pulls. Nothing is read from the store before there is room to send it, so a reader that does not
read costs one chunk and nothing more. `send_into` loops:

    messages or frames wait?            send them, as far as the window allows
    no snapshot is open?                ask the vbucket for the next one, or wait for a change
    a snapshot is open?                 read the next chunk of it and shape it into a batch

Where the changes come from, memory or disk, is the vbucket's decision for each snapshot; the states of
docs/spec/dcp.md#states-of-a-stream follow from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...errors import LocalProtocolError, TailraceError
from ...frames import CHUNK_BYTES
from ...wire.codes import AddStreamFlag, StreamEndStatus, VBucketState
from ..states import STREAM_TRANSITIONS, Machine, StreamInput, StreamState
from .backfill_slots import BackfillSlots
from .controls import ConnectionOptions
from .preview import Preview
from .send_queue import SendQueue
from .shaping import Shaper
from .snapshot_marker import SnapshotMarker
from .stream_messages import StreamMessages
from .stream_request import Accepted
from .takeover import DcpTakeover
from .watched_vbucket import WatchedVBucket

if TYPE_CHECKING:
    from ...store.base import VBucketSnapshot
    from ..handler import Host

__all__ = ["ProducerStream"]

SKIPPED_BEFORE_ADVANCE = 10_000
"""How many changes of a backfill the filter drops in a row before the reader is told the seqno."""

LOOK_BYTES = 16 << 10
"""Looking at a stream that has nothing costs as much as this many bytes of a backfill."""

SMALL_READ_BYTES = 64 << 10
"""Reading a small chunk costs as much as this many bytes of a large one."""

_TAKE_OVER = int(AddStreamFlag.TAKE_OVER)  # plain, as in `controls`
_DISK_ONLY = int(AddStreamFlag.DISK_ONLY)
_DEAD = StreamState.DEAD
_TAKEOVER_STATES = (StreamState.TAKEOVER_SEND, StreamState.TAKEOVER_WAIT)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _SnapshotReading:
    """The snapshot that a stream is in."""

    snapshot: VBucketSnapshot
    skips_deletes: bool
    skipped: int = 0
    """Changes in a row that were not for the stream."""


class ProducerStream:
    """A stream that was accepted; its owner serves it until it `is_finished`."""

    WATCHED: ClassVar[type[WatchedVBucket]] = WatchedVBucket

    def __init__(
        self,
        accepted: Accepted,
        options: ConnectionOptions,
        host: Host,
        slots: BackfillSlots,
        on_ready: Callable[[ProducerStream], None],
    ) -> None:
        self.position = accepted.start_seqno  # the end of the last snapshot that was read completely
        self.is_ready = False
        self._is_parked = False
        self._gives_way = False
        """It has sent a whole snapshot from memory, and there is more: other streams come first."""
        self._accepted = accepted
        self._options = options
        self._host = host
        self._slots = slots
        self._on_ready = on_ready
        self._machine = Machine(STREAM_TRANSITIONS, StreamState.PENDING)
        self._says = StreamMessages(options, self.vbucket, accepted.opaque, accepted.stream_id)
        self._shaper = Shaper(options, accepted.filter, accepted.opaque, accepted.stream_id)
        self._queue = SendQueue(options.window, self.position)
        self._ends_after_batch: StreamEndStatus | None = None
        self._reading: _SnapshotReading | None = None
        self._marker = SnapshotMarker(accepted, options)
        self._is_cut = accepted.filter.is_legacy
        """Only a change can end a snapshot."""
        self._preview: Preview | None = None
        self._watched = self.WATCHED(accepted.vbucket, host, self.changed)
        self.takeover = (
            DcpTakeover(host, self._watched, self._takeover_moved) if accepted.flags & _TAKE_OVER else None
        )
        """Set if the stream is a takeover."""

    # What the owner asks.

    @property
    def vbucket(self) -> int:
        return self._accepted.vbucket.id

    @property
    def opaque(self) -> int:
        return self._accepted.opaque

    @property
    def stream_id(self) -> int:
        return self._accepted.stream_id

    @property
    def sent_bytes(self) -> int:
        return self._queue.sent_bytes

    @property
    def state(self) -> StreamState:
        return self._machine.state

    @property
    def is_taking_over(self) -> bool:
        """Whether the backfill is over and the takeover is not."""
        return self._machine.state in _TAKEOVER_STATES

    @property
    def is_live(self) -> bool:
        return self._machine.state is not _DEAD

    @property
    def is_finished(self) -> bool:
        """Whether it is over and everything is sent: the owner forgets it then."""
        return self._machine.state is _DEAD and not self._queue.has_messages

    @property
    def is_inside_memory(self) -> bool:
        """Whether it is sending a snapshot that holds on to memory: that should be finished first."""
        return self._reading is not None and self._reading.snapshot.in_memory

    @property
    def lag_changes(self) -> int:
        """Changes that it still has to send."""
        end = min(self._watched.vbucket.high_seqno, self._accepted.end_seqno)
        return max(0, end - max(self.position, self._queue.last_seqno))

    def stats(self) -> dict[str, int | str]:
        """Figures for the statistics."""
        return {
            "state": self.state.value,
            "opaque": self.opaque,
            "start_seqno": self._accepted.start_seqno,
            "end_seqno": self._accepted.end_seqno,
            "last_sent_seqno": self._queue.last_seqno,
            "last_sent_snap_end_seqno": self._marker.announced_end,
            "flags": self._accepted.flags,
            "sent_bytes": self._queue.sent_bytes,
            "sent_messages": self._queue.sent_messages,
        }

    # What happens to it.

    def start(self) -> None:
        """It was accepted.

        With nothing to send it is not served before it has a slot for its backfill: most of a thousand
        streams wait.
        """
        if self._queue.has_messages or self._take_slot():
            self.set_ready()

    def set_ready(self) -> None:
        """There is something to do."""
        if not self.is_ready:
            self.is_ready = True
            self._is_parked = False
            self._on_ready(self)

    def changed(self) -> None:
        """The vbucket has something newer, or is no longer the same."""
        if not self._watched.is_same():
            self.end(StreamEndStatus.STATE_CHANGED)
        elif not self.is_ready and not self._is_parked:
            self.set_ready()

    def _await_append(self) -> None:
        """There is nothing to do before the vbucket has something newer.

        Only then does a write call us: it costs nothing for readers that lag.
        """
        if self.is_live:
            self._host.await_append(self.vbucket, self.changed)

    def marker_acknowledged(self) -> None:
        """The replica has received a whole snapshot whose marker asked for an answer."""
        if self.takeover is not None and self.takeover.marker_acknowledged():
            self.set_ready()

    def state_answered(self) -> None:
        """The replica's vbucket has taken the state that it was told."""
        if self.takeover is None or self.state is not StreamState.TAKEOVER_WAIT:
            return
        self._machine.feed(StreamInput.STATE_ANSWERED)
        if self.takeover.state_answered():
            self.end(StreamEndStatus.OK)
        self.set_ready()

    def _takeover_moved(self, failed: str | None) -> None:
        if failed is not None:
            self.end(StreamEndStatus.STATE_CHANGED)
        self.set_ready()

    def end(self, status: StreamEndStatus, *, tell: bool = True) -> None:
        """End the stream; what was read and not sent is dropped."""
        if self.state is StreamState.DEAD:
            return
        self._machine.feed(StreamInput.ENDED)
        self._watched.close()
        self._close_snapshots()
        self._slots.release(self)
        self._queue.clear()
        if self.takeover is not None:
            self.takeover.close()
        if tell:
            self._queue.say(self._says.end(status))
            self.set_ready()

    # Sending.

    def send_into(self, out: list[bytes | memoryview], budget: int) -> int:
        """Put messages into ``out``; returns the work that was done.

        It stops when about ``budget`` bytes of work are done, the window is full, or there is nothing for
        now (then it is no longer ready). A batch is not split for the budget, only for the window. Work is
        the bytes that were sent, or read and found not to be for this stream; at least what it costs to look
        at the stream and at each chunk that was read.
        """
        window, queue = self._options.window, self._queue
        work = reads = 0
        while work < budget and window.room > 0:
            if queue.is_empty:
                if reads * SMALL_READ_BYTES >= budget:
                    break
                read = self._load()
                if read is None:
                    self.is_ready = False
                    if not self._is_parked:
                        self._await_append()
                    break
                reads += read > 0
                if not queue.has_batch:
                    work += read
            work += queue.send_into(out)
            if self._gives_way:
                self._gives_way = False
                break
        if self.is_finished:
            self.is_ready = False
        return max(work, reads * SMALL_READ_BYTES, LOOK_BYTES)

    def _load(self) -> int | None:
        """Find what to send next; returns how many bytes were read for it, None if there is nothing now."""
        if not self.is_live:
            return None
        if self._ends_after_batch is not None:
            self.end(self._ends_after_batch)
            return 0
        try:
            if self._reading is None:
                read_bytes = self._next_snapshot()
                if self._reading is None:
                    return read_bytes
            if self._preview is not None:
                return self._read_preview(self._preview)
            return self._read(self._reading)
        except TailraceError as error:
            # A file that can't be read, or a value that is not what its datatype says.
            _log.error("vbucket %d: a backfill failed: %s", self.vbucket, error)
            self.end(StreamEndStatus.BACKFILL_FAIL)
            return 0

    # Snapshots.

    def _next_snapshot(self) -> int | None:
        accepted, vbucket = self._accepted, self._accepted.vbucket
        self.changed()  # a later look compares with the vbucket as it is now
        state = self._machine.state
        if state is _DEAD:
            return 0
        if self.position >= accepted.end_seqno and self.position >= self._marker.announced_end:
            self.end(StreamEndStatus.OK)
            return 0
        if state is StreamState.TAKEOVER_WAIT:
            return None
        if state is StreamState.PENDING:
            state = self._machine.feed(StreamInput.STARTED)
        if state is StreamState.BACKFILLING and not self._take_slot():
            return None
        disk_only = bool(accepted.flags & _DISK_ONLY) and self.position < accepted.end_seqno
        history = self._options.change_streams
        snapshot = vbucket.snapshot_after(self.position, memory=not disk_only, history=history)
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
            self._slots.release(self)  # the rest of it may never come
            return None
        if self._looks_ahead:
            again = vbucket.snapshot_after(self.position, memory=not disk_only, history=history)
            shows_unseen = accepted.filter.shows_unseen
            self._preview = None if again is None else Preview(again, shows_unseen=shows_unseen)
        return 0

    @property
    def _looks_ahead(self) -> bool:
        """Whether it looks through a snapshot before announcing it: some changes may not be for it."""
        if not self._is_cut:
            return False
        hides = not self._accepted.filter.shows_unseen and self._accepted.vbucket.has_unseen
        return hides or int(self._host.bucket.manifest["uid"], 16) > 0

    def _enter_memory(self) -> None:
        self._slots.release(self)
        if self.state is StreamState.BACKFILLING:
            self._machine.feed(StreamInput.CAUGHT_UP if self.takeover is None else StreamInput.TAKEOVER_BEGAN)

    def _enter_backfill(self, snapshot: VBucketSnapshot) -> bool:
        """Whether a backfill may begin; if not, the stream waits for a slot or is over."""
        if not self._accepted.survives_purge(snapshot.start):
            self.end(StreamEndStatus.STATE_CHANGED)
            return False
        if self.state is StreamState.IN_MEMORY:
            self._machine.feed(StreamInput.CURSOR_DROPPED)
            self._host.record(
                "slow_reader_reads_from_disk",
                level=logging.INFO,
                vbucket=self.vbucket,
                lag_changes=self.lag_changes,
            )
            return self._take_slot()
        return True

    def _take_slot(self) -> bool:
        """Whether there is a slot; if not, the stream is woken when there is one, and not before."""
        self._is_parked = not self._slots.take(self)
        return not self._is_parked

    def _caught_up(self) -> int | None:
        """Nothing is newer than the position."""
        self._enter_memory()
        if self._accepted.flags & _DISK_ONLY and self.position >= self._marker.announced_end:
            self.end(StreamEndStatus.OK)
            return 0
        takeover = self.takeover
        if takeover is not None and self.state is StreamState.TAKEOVER_SEND and takeover.may_tell_state:
            self._queue.say(self._says.set_state(takeover.next_state))
            self._machine.feed(StreamInput.STATE_SENT)
            return 0
        return None

    def _begin(self, snapshot: VBucketSnapshot) -> bool:
        """Begin a snapshot, with a marker unless it continues what the last one announced; False: not yet.

        A replica may be in the middle of receiving a snapshot. What is here of it is announced with the end
        of the whole, and the rest follows later without a marker: no reader may take a part for a state that
        the vbucket had. If nothing of it is here yet, it may never come: what is here is complete.
        """
        end = snapshot.end
        vbucket = self._accepted.vbucket
        received = vbucket.received
        if vbucket.state == VBucketState.REPLICA and received.start < end < received.end:
            if self._looks_ahead:
                return False
            end = received.end
        is_initial_backfill = not snapshot.in_memory and snapshot.start == 1
        self._reading = _SnapshotReading(snapshot, self._options.skip_deletes and is_initial_backfill)
        self._marker.begin(
            end, is_initial_backfill=is_initial_backfill, has_history=bool(snapshot.history_start)
        )
        return True

    def _read_preview(self, preview: Preview) -> int:
        """Go on looking through a snapshot that is to be announced."""
        read = preview.read()
        if read is not None:
            return read
        self._marker.end = preview.last_seqno
        if preview.is_for_nobody and self._reading is not None:
            self.position = self._reading.snapshot.end
            self._close_snapshots()
        else:
            preview.close()
            self._preview = None
        return 0

    def _read(self, reading: _SnapshotReading) -> int | None:
        """Make a batch from the snapshot's next chunk, or go on after its end."""
        snapshot = reading.snapshot
        chunk = snapshot.read(CHUNK_BYTES)
        if chunk is None:
            self._finish(snapshot)
            if snapshot.in_memory and self._watched.vbucket.high_seqno > self.position:
                self._gives_way = True
                return 0
            return self._next_snapshot() if self._queue.is_empty else 0
        batch = self._shaper.shape(
            chunk,
            skip_deletes=reading.skips_deletes,
            by_key=self._marker.is_oso,
            may_commit=snapshot.in_memory,
        )
        if batch is not None:
            self._announce(snapshot, batch.first_seqno)
            self._queue.put(batch)
            reading.skipped = 0
        else:
            reading.skipped += len(chunk.offsets)
            is_long = reading.skipped >= SKIPPED_BEFORE_ADVANCE
            if is_long and not snapshot.in_memory and not self._marker.is_oso:
                self._advance(reading, chunk.last_seqno)
        if self._accepted.filter.is_empty:
            self._ends_after_batch = StreamEndStatus.FILTER_EMPTY
        return len(chunk.data)

    def _finish(self, snapshot: VBucketSnapshot) -> None:
        """A snapshot has been read completely."""
        reading, self._reading = self._reading, None
        self.position = snapshot.end
        snapshot.close()
        closing = self._marker.finish(snapshot.end, self._queue.last_seqno, self._says)
        if closing:
            for message in closing:
                self._queue.say(message)
            self._queue.last_seqno = snapshot.end
        elif not self._accepted.filter.is_legacy and self.position >= self._marker.announced_end:
            self._marker.is_oso = False
            assert reading is not None
            self._advance(reading, self._marker.announced_end)

    def _advance(self, reading: _SnapshotReading, seqno: int) -> None:
        """Tell the reader that it has reached a seqno, although the change there was not for it."""
        if seqno > self._queue.last_seqno:
            self._announce(reading.snapshot, seqno)
            self._queue.say(self._says.seqno_advanced(seqno))
            self._queue.last_seqno = seqno
            reading.skipped = 0

    def _announce(self, snapshot: VBucketSnapshot, first_seqno: int) -> None:
        """Send the snapshot's marker before the first message with a seqno in it."""
        marker = self._marker
        if not marker.wants(snapshot, first_seqno):
            return
        extra_flags = 0
        if self.takeover is not None and self.state is StreamState.TAKEOVER_SEND and not marker.is_oso:
            extra_flags = self.takeover.marker_flags()
        self._queue.say(marker.announce(snapshot, first_seqno, self.position, self._says, extra_flags))

    def _close_snapshots(self) -> None:
        if self._reading is not None:
            self._reading.snapshot.close()
        if self._preview is not None:
            self._preview.close()
        self._reading = self._preview = None
