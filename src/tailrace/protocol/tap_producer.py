"""TAP, the producer's half: one stream of many vbuckets on one connection (tap.md).

    connect        find or make the reader's state, and a cursor for each vbucket that it gets
    controls       messages that are no changes; with acks nothing overtakes them
    cursors        stand in a line when they have something; each is served to the end of a snapshot
    caught up      nothing is left: a dump ends, a takeover takes its next step

The session pulls, so nothing is read before there is room for it. One snapshot is open at a time, and it is
let go of when the reader stalls: a cursor can always be taken up again from the store.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import MalformedMessage, TailraceError
from ..history import upr_rollback_seqno
from ..wire.codes import Op, Status, TapConnectFlag, TapFlag, TapOpaque, TapOpcode, VBucketState, status_name
from ..wire.header import Frame
from ..wire.message import Message, Response
from ..wire.tap import (
    TAP_TTL,
    TapCheckpointEnd,
    TapCheckpointStart,
    TapConnect,
    TapConnectOptions,
    TapFlush,
    TapNoop,
    TapOpaqueMessage,
    TapVBucketSet,
)
from .handler import Host
from .stream import CHUNK_BYTES
from .stream_filter import StreamFilter, StreamValue
from .tap_acks import AckLog, wire_number, wire_numbers
from .tap_clients import Control, TapClient, TapCursor
from .tap_items import TapBatch, TapShaper
from .tap_takeover import Takeover

if TYPE_CHECKING:
    from ..store.base import Snapshot, VBucket

__all__ = ["MAX_NAME_BYTES", "TapProducer"]

MAX_NAME_BYTES = 200
SAVE_INTERVAL_S = 10.0
"""Between two notes of where a registered reader is; after a crash it gets again what came since."""

_BACK_OFF = (Status.ENOMEM, Status.ETMPFAIL)
_EMPTY_IT = ("opaque", int(TapOpaque.INITIAL_VBUCKET_STREAM))
_NO_META = bytes(8)
"""The highest rev of a deletion, which the form of real servers has room for; readers make no use of it."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Work:
    """A snapshot that is being sent."""

    cursor: TapCursor
    snapshot: Snapshot | None  # None: read to its end
    end: int
    limit: int | None
    batch: TapBatch | None = None
    at: int = 0
    ahead: TapBatch | None = None  # with acks: the last item must be known when it goes


class TapProducer:
    """The producer's half of a TAP connection; a `protocol.handler.Handler`."""

    is_open = True  # a connect that is refused closes the connection
    is_busy = False

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        self.close_requested: str | None = None
        self._host = host
        self._wake = wake
        self._now = now
        self._flags = 0
        self._client = TapClient("")
        self._acks = AckLog(self._client, enabled=False)
        self._shaper = TapShaper(frozenset(), 0, host.tap.hops.ttls)
        self._listed: frozenset[int] | None = None
        self._checkpoints: dict[int, int] = {}
        self._closed_only = False
        self._backfills = True
        self._takeover: Takeover | None = None
        self._answers: deque[bytes] = deque()
        self._controls: deque[Control] = deque()
        self._gate = 0
        self._ready: deque[TapCursor] = deque()
        self._is_ready: set[TapCursor] = set()
        self._waiting: set[TapCursor] = set()  # for acknowledgements
        self._work: _Work | None = None
        self._unwatch: list[Callable[[], None]] = []
        self._is_sending = False
        self._told_open_checkpoint = False
        self._suspended_until: float | None = None
        self._full_since: float | None = None
        self._sent_at = self._progress_at = self._saved_at = now
        self._figures = dict.fromkeys(("sent_bytes", "items", "noops", "nacks", "backfills", "flushes"), 0)

    # The handler's interface.

    def receive_frame(self, frame: Frame, now: float) -> None:
        self._now = now
        if self.close_requested is not None:
            return
        if not frame.is_request:
            self._receive_answer(frame)
        elif frame.opcode == TapOpcode.CONNECT and not self._client.name:
            self._connect(frame)
        else:
            self._refuse(frame, Status.EINVAL, f"opcode 0x{frame.opcode:02x} came to a TAP producer")

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = list(self._answers)
        self._answers.clear()
        if max_bytes > 0 and self._client.name and self.close_requested is None:
            self._now = self._host.clock.monotonic()
            self._is_sending = True
            try:
                self._serve(out, max_bytes)
            except TailraceError as error:
                _log.error("%s: a backfill failed: %s", self._host.peer, error)
                self.close_requested = "the store could not be read"
            self._is_sending = False
            if out:
                self._sent_at = self._progress_at = self._now
            elif self._may_send() and (self._work is not None or self._ready) and not self._is_gated:
                self._wake()  # all that was read was not for this reader; there is more to look through
        self._figures["sent_bytes"] += sum(map(len, out))
        return out

    def next_timer(self) -> float | None:
        if not self._client.name:
            return None
        settings = self._host.settings
        timers: list[float] = [self._sent_at + settings.tap_noop_interval]
        if self._suspended_until is not None:
            timers.append(self._suspended_until)
        if self._full_since is not None:
            timers.append(self._full_since + settings.tap_ack_grace)
        if self._work is not None and settings.slow_backfill_timeout:
            timers.append(self._progress_at + settings.slow_backfill_timeout)
        if self._client.is_registered:
            timers.append(self._saved_at + SAVE_INTERVAL_S)
        if self._takeover is not None and (timer := self._takeover.next_timer()) is not None:
            timers.append(timer)
        return min(timers)

    def handle_timer(self, now: float) -> None:
        self._now = now
        if not self._client.name or self.close_requested is not None:
            return
        settings = self._host.settings
        if self._full_since is not None and now >= self._full_since + settings.tap_ack_grace:
            self._disconnect("the window is full and nothing was acknowledged for too long")
            return
        if self._suspended_until is not None and now >= self._suspended_until:
            self._suspended_until = None
            self._wake()
        if now >= self._sent_at + settings.tap_noop_interval:
            self._answers.append(TapNoop().encode())
            self._figures["noops"] += 1
            self._sent_at = now
            self._wake()
        stalled_s = settings.slow_backfill_timeout
        if self._work is not None and stalled_s and now >= self._progress_at + stalled_s:
            self._drop_work()  # it holds on to memory or files, and nobody reads
            self._progress_at = now
        if self._client.is_registered and now >= self._saved_at + SAVE_INTERVAL_S:
            self._saved_at = now
            self._host.tap.save(self._client)
        if self._takeover is not None:
            self._takeover.handle_timer(now, self._served_vbuckets())

    def stats(self) -> Mapping[str, int | str]:
        return {
            **self._client.stats(),
            **self._figures,
            "supports_ack": str(self._acks.enabled).lower(),
            "unacked": self._acks.unacked,
            "ack_log_size": len(self._acks),
            "ack_window_full": str(self._full_since is not None).lower(),
            "suspended": str(self._suspended_until is not None).lower(),
            "pending_vbuckets": len(self._is_ready) + len(self._waiting),
            "backfill_completed": str(
                all(one.backfill_end is None for one in self._client.cursors.values())
            ).lower(),
            "takeover": "" if self._takeover is None else self._takeover.phase.value,
        }

    def close(self, reason: str) -> None:
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch.clear()
        self._drop_work()
        if self._takeover is not None:
            self._takeover.close()
        if self._client.producer is self:
            self._give_back([*self._acks.go_back(), *self._controls])
            self._host.tap.disconnected(self._client, self._now, self._host.settings.tap_keepalive)
        self._ready.clear()
        self._controls.clear()

    def _give_back(self, unsent: list[Control]) -> None:
        """What the next connection has to say in place of this one; greetings are made anew."""
        for control in reversed(unsent):
            cursor = self._client.cursors.get(control.vbucket)
            if control.kind == "flush":
                self._client.owes_flush = True
            elif control == (*_EMPTY_IT, control.vbucket) and cursor is not None:
                cursor.controls.appendleft(control)

    # Connecting.

    def _connect(self, frame: Frame) -> None:
        host, clients = self._host, self._host.tap
        try:
            request = TapConnect.decode(frame)
            options = request.options()
            StreamFilter.make(StreamValue(), host.bucket.manifest, collections=False)
        except MalformedMessage as error:
            flags = int.from_bytes(frame.extras, "big")
            silent = flags & TapConnectFlag.BACKFILL and len(frame.value) < 8
            self._refuse(frame, None if silent else error.status, str(error))
            return
        if len(request.key) > MAX_NAME_BYTES:
            self._refuse(frame, Status.EINVAL, f"a name has up to {MAX_NAME_BYTES} bytes")
            return
        if not host.may_stream(frozenset({0})):
            self._refuse(frame, Status.EACCESS, "the user may not read change streams")
            return
        name = request.key.decode("utf-8", "backslashreplace") or clients.new_name()
        host.claim_name(name.encode())
        client = clients.find_or_make(name, self._now)
        if client is None:
            self._refuse(frame, Status.NOT_SUPPORTED, "there are too many TAP readers")
            return
        self._begin(client, request.flags or 0, options)

    def _begin(self, client: TapClient, flags: int, options: TapConnectOptions) -> None:
        host = self._host
        vbuckets = range(len(host.bucket.vbuckets))
        self._flags, self._client = flags, client
        if client.cursors:
            client.reconnects += 1
        client.flags, client.producer = flags, self
        self._acks = AckLog(client, enabled=bool(flags & TapConnectFlag.SUPPORT_ACK))
        self._shaper = TapShaper(host.features, flags, host.tap.hops.ttls)
        self._listed = frozenset(options.vbuckets) & {*vbuckets} if options.vbuckets else None
        self._checkpoints = dict(options.checkpoints or ())
        self._closed_only = bool(options.closed_checkpoints_only)
        date = options.backfill_date
        if date is not None and date != client.date and client.cursors:
            client.cursors.clear()  # another date than before: begin again
        client.date = client.date if date is None else date
        self._backfills = client.date <= host.clock.time_ns() // 1_000_000_000
        if flags & TapConnectFlag.SUPPORT_ACK:
            self._controls.append(Control("opaque", TapOpaque.ENABLE_AUTO_NACK))
        if flags & TapConnectFlag.CHECKPOINT:
            self._controls.append(Control("opaque", TapOpaque.ENABLE_CHECKPOINT_SYNC))
        if client.owes_flush:
            client.owes_flush = False
            self._controls.append(Control("flush", host.bucket.flushes))
        if flags & TapConnectFlag.TAKEOVER_VBUCKETS:
            self._takeover = Takeover(host, self._now, self._takeover_moved)
        if self._listed is not None:
            client.cursors = {at: one for at, one in client.cursors.items() if at in self._listed}
        numbers = vbuckets if self._listed is None else sorted(self._listed)
        taken = [cursor for at in numbers if (cursor := self._take_up(at)) is not None]
        if self._takeover is not None:
            for cursor in taken:
                self._controls.append(Control("state", VBucketState.PENDING, cursor.vbucket))
        for cursor in taken:  # all of them are told before the first item
            self._controls += cursor.controls
            cursor.controls.clear()
            self._set_ready(cursor)
        for at in numbers:
            self._unwatch.append(host.watch(at, partial(self._changed, at)))
        host.tap.save(client)
        self._wake()

    def _take_up(self, number: int) -> TapCursor | None:
        """The cursor of a vbucket, a new one at the place where this reader begins; None if the vbucket is
        not to be served now.
        """
        vbucket = self._served(number)
        if vbucket is None:
            return None
        cursor = self._client.cursors.get(number)
        if cursor is not None:
            self._look_at_history(cursor, vbucket)
            return cursor
        cursor = TapCursor(number, vbucket.uuid, flushes=self._host.bucket.flushes)
        self._client.cursors[number] = cursor
        closed = self._checkpoints.get(number)
        start = None if closed is None else vbucket.checkpoint_start(closed + 1)
        if start is not None:
            cursor.restart(vbucket.uuid, position=start)
        elif self._backfills or closed is not None:
            self._start_over(cursor, vbucket)
        else:
            cursor.restart(vbucket.uuid, position=vbucket.high_seqno)
        return cursor

    def _start_over(self, cursor: TapCursor, vbucket: VBucket) -> None:
        """The reader gets the vbucket from the beginning, and is told to empty it first."""
        self._drop_work(cursor)
        cursor.restart(vbucket.uuid, backfill_end=vbucket.high_seqno)
        cursor.flushes = self._host.bucket.flushes
        cursor.controls.append(Control("opaque", TapOpaque.INITIAL_VBUCKET_STREAM, cursor.vbucket))
        self._figures["backfills"] += 1

    def change_filter(self, wanted: list[tuple[int, int]]) -> None:
        """Another list of vbuckets, with the last checkpoint that the reader has closed of each; told on the
        stream when it is in force.
        """
        client = self._client
        vbuckets = range(len(self._host.bucket.vbuckets))
        listed = frozenset(number for number, _ in wanted if number in vbuckets)
        for unwatch in self._unwatch:
            unwatch()
        for number in set(client.cursors) - listed:
            cursor = client.cursors.pop(number)
            self._drop_work(cursor)
            cursor.epoch += 1
            self._waiting.discard(cursor)
            if cursor in self._is_ready:
                self._is_ready.remove(cursor)
                self._ready.remove(cursor)
        self._listed = listed
        self._checkpoints = dict(wanted)
        for number in sorted(listed):
            is_new = number not in client.cursors
            cursor_or_none = self._take_up(number)
            if cursor_or_none is not None:
                if is_new and self._takeover is not None:
                    state = Control("state", VBucketState.PENDING, number)
                    cursor_or_none.controls.appendleft(state)
                self._set_ready(cursor_or_none)
        self._unwatch = [self._host.watch(at, partial(self._changed, at)) for at in sorted(listed)]
        self._controls.append(Control("opaque", TapOpaque.START_ONLINEUPDATE))  # 4: the change is complete
        self._host.tap.save(client)
        self._wake()

    # What happens to vbuckets.

    def _served(self, number: int) -> VBucket | None:
        """A vbucket that this reader gets now."""
        vbucket = self._host.bucket.vbuckets[number]
        if vbucket is None:
            return None
        if vbucket.state == VBucketState.ACTIVE or (
            vbucket.state == VBucketState.REPLICA and self._listed is not None and self._takeover is None
        ):
            return vbucket
        return vbucket if self._takeover is not None and number in self._takeover.given_up else None

    def _changed(self, number: int) -> None:
        if self._flags & TapConnectFlag.DUMP:
            return  # what exists is what existed when it began
        cursor = self._take_up(number)
        if cursor is not None:
            self._set_ready(cursor)

    def _look_at_history(self, cursor: TapCursor, vbucket: VBucket) -> None:
        """Whether the cursor is still at a place of the vbucket's history; if not, it begins again."""
        if cursor.vb_uuid == vbucket.uuid and cursor.position <= vbucket.high_seqno:
            return
        flushes = self._host.bucket.flushes
        if cursor.flushes != flushes and vbucket.failover_log.newest.seqno == 0:
            self._drop_work(cursor)
            cursor.restart(vbucket.uuid)
            cursor.flushes = flushes
            if not any(one.kind == "flush" for one in self._controls):
                self._controls.append(Control("flush", flushes))
        elif self._is_lost(cursor, vbucket):
            self._client.dropped_cursors += 1
            self._start_over(cursor, vbucket)
        else:
            cursor.vb_uuid = vbucket.uuid

    @staticmethod
    def _is_lost(cursor: TapCursor, vbucket: VBucket) -> bool:
        """The history after the cursor can't be told: it is another one, or deletions are forgotten."""
        return None is not upr_rollback_seqno(
            cursor.position,
            cursor.vb_uuid,
            vbucket.failover_log,
            high_seqno=vbucket.high_seqno,
            purge_seqno=vbucket.purge_seqno,
        )

    # Answers of the reader.

    def _receive_answer(self, frame: Frame) -> None:
        if not self._acks.enabled or frame.opcode == Op.NOOP:
            return
        number, status = self._acks.find(frame.opaque), frame.status
        if number is None:
            _log.info("%s: an answer to message %d, which waits for none", self._host.peer, frame.opaque)
            return
        self._full_since = None
        if status == Status.SUCCESS:
            self._acks.acknowledge(number)
        elif status in _BACK_OFF:
            self._figures["nacks"] += 1
            self._acks.acknowledge(number - 1)
            self._controls.extendleft(reversed(self._acks.go_back()))
            self._gate = 0
            for cursor in self._client.cursors.values():
                self._set_ready(cursor)
            self._drop_work()
            if self._takeover is None or not self._takeover.is_final:
                self._suspended_until = self._now + self._host.settings.tap_backoff
        else:
            self._disconnect(f"message {frame.opaque} was answered with {status_name(status)}")
            return
        for cursor in list(self._waiting):
            self._set_ready(cursor)
        self._wake()

    # Sending.

    def _may_send(self) -> bool:
        """Whether the reader takes more now."""
        if self._suspended_until is not None:
            return False
        return not self._acks.enabled or self._room() > 0

    def _room(self) -> int:
        settings = self._host.settings
        return int(settings.tap_ack_interval * settings.tap_ack_window) - self._acks.unacked

    @property
    def _is_gated(self) -> bool:
        return self._acks.enabled and self._acks.acked < self._gate

    def _serve(self, out: list[bytes | memoryview], budget: int) -> None:
        while budget > 0 and self.close_requested is None:
            if not self._may_send():
                if self._acks.enabled and self._full_since is None and self._room() <= 0:
                    self._full_since = self._now
                return
            if self._controls:
                self._gate = self._say(self._controls.popleft(), None, out)
            elif self._is_gated:
                return
            elif self._work is not None:
                budget -= self._serve_work(self._work, out, budget)
            elif self._ready:
                cursor = self._ready.popleft()
                self._is_ready.remove(cursor)
                self._serve_cursor(cursor, out)
            elif not self._caught_up():
                return

    def _serve_cursor(self, cursor: TapCursor, out: list[bytes | memoryview]) -> None:
        """One step of a vbucket: a control, a wait, the end of its backfill, or its next snapshot."""
        if cursor.controls:
            cursor.gate = self._say(cursor.controls.popleft(), cursor, out)
            self._set_ready(cursor)
            return
        if self._acks.enabled and self._acks.acked < cursor.gate:
            self._waiting.add(cursor)
            return
        vbucket = self._served(cursor.vbucket)
        if vbucket is None or (cursor.backfill_end is None and self._flags & TapConnectFlag.DUMP):
            return
        if cursor.backfill_end is not None and cursor.position >= cursor.backfill_end:
            if cursor.outstanding:
                self._waiting.add(cursor)
                return
            cursor.backfill_end = None
            cursor.controls.append(Control("opaque", TapOpaque.CLOSE_BACKFILL, cursor.vbucket))
            self._set_ready(cursor)
            return
        self._next_snapshot(cursor, vbucket)

    def _next_snapshot(self, cursor: TapCursor, vbucket: VBucket) -> None:
        limit = vbucket.checkpoint_start(vbucket.checkpoint_id) if self._closed_only else None
        if limit is not None and cursor.position >= limit and cursor.backfill_end is None:
            snapshot = None
        else:
            snapshot = vbucket.snapshot_after(cursor.position)
        if snapshot is None:
            if cursor.backfill_end is not None:  # less than there was when it began
                cursor.backfill_end = cursor.position
                self._set_ready(cursor)
            elif 0 < cursor.checkpoint_id < vbucket.checkpoint_id:
                self._change_checkpoint(cursor, 0)
            return
        if not snapshot.in_memory and 0 < cursor.position < vbucket.purge_seqno:
            snapshot.close()
            self._client.dropped_cursors += 1
            self._start_over(cursor, vbucket)
            self._set_ready(cursor)
            return
        if (
            self._flags & TapConnectFlag.CHECKPOINT
            and snapshot.in_memory
            and cursor.backfill_end is None
            and snapshot.checkpoint_id != cursor.checkpoint_id
        ):
            checkpoint_id = snapshot.checkpoint_id
            snapshot.close()
            self._change_checkpoint(cursor, checkpoint_id)
            return
        self._told_open_checkpoint = False
        if cursor.backfill_end is not None:
            limit = None  # a backfill is never cut: what it leaves out would be missing
        end = snapshot.end if limit is None else min(snapshot.end, limit)
        self._work = _Work(cursor, snapshot, end, limit)

    def _change_checkpoint(self, cursor: TapCursor, checkpoint_id: int) -> None:
        """Close the reader's checkpoint, when all its items have arrived, and open another (0: none yet)."""
        if cursor.outstanding:
            self._waiting.add(cursor)
            return
        if cursor.checkpoint_id:
            cursor.controls.append(Control("end", cursor.checkpoint_id, cursor.vbucket))
        if checkpoint_id:
            cursor.controls.append(Control("start", checkpoint_id, cursor.vbucket))
        cursor.checkpoint_id = checkpoint_id
        self._set_ready(cursor)

    def _serve_work(self, work: _Work, out: list[bytes | memoryview], budget: int) -> int:
        """Send or read a part of the open snapshot; the bytes of work that it was."""
        if work.batch is not None and (
            work.ahead is not None or work.snapshot is None or not self._acks.enabled
        ):
            return self._send_items(work, work.batch, out, budget)
        if work.snapshot is None:
            self._work = None
            work.cursor.position = max(work.cursor.position, work.end)
            self._set_ready(work.cursor)
            return 1
        chunk = work.snapshot.read(CHUNK_BYTES)
        if chunk is None:
            work.snapshot.close()
            work.snapshot = None
            return 1
        now_s = self._host.clock.time_ns() // 1_000_000_000
        batch = self._shaper.shape(work.cursor.vbucket, chunk, now_s, work.limit)
        if work.batch is None:
            work.batch, work.at = batch, 0
        else:
            work.ahead = batch
        return len(chunk.data) if batch is None else 1

    def _send_items(self, work: _Work, batch: TapBatch, out: list[bytes | memoryview], budget: int) -> int:
        """Send those messages of a batch that begin within the budget and fit into the window."""
        cursor, start = work.cursor, work.at
        first_byte = int(batch.offsets[start])
        stop = int(np.searchsorted(batch.offsets, first_byte + budget))
        if self._acks.enabled:
            stop = min(stop, start + self._room())
        seqnos = batch.seqnos[start:stop]
        number = self._acks.add_items(cursor, seqnos)
        batch.number(start, stop, wire_numbers(number, stop - start))
        is_last = stop == len(batch.offsets) and work.ahead is None and work.snapshot is None
        if self._acks.enabled:
            places = np.arange(start, stop)
            wanted = (places - start + number) % self._host.settings.tap_ack_interval == 0
            wanted[-1] |= is_last
            batch.ask_for_acks(places[wanted])
        end_byte = batch.end_of(stop)
        out.append(batch.data[first_byte:end_byte].data)
        cursor.position = int(seqnos[-1])
        if not self._acks.enabled:
            cursor.acked = cursor.position
        self._figures["items"] += stop - start
        if stop == len(batch.offsets):
            work.batch, work.at, work.ahead = work.ahead, 0, None
        else:
            work.at = stop
        return end_byte - first_byte

    def _say(self, control: Control, cursor: TapCursor | None, out: list[bytes | memoryview]) -> int:
        """Send a message that is no item; its number."""
        ttl = TAP_TTL
        if control.kind == "flush":
            ttl = self._host.tap.hops.flush_ttl(control.number)
            self._after_flush()
            if not ttl:
                return 0  # it has come far enough
            self._figures["flushes"] += 1
        number = self._acks.add_control(control, cursor)
        message = self._message(control)
        message.opaque = wire_number(number)
        message.vbucket = control.vbucket
        message.ttl = ttl
        message.tap_flags = TapFlag.ACK if self._acks.enabled else 0
        out.append(message.encode())
        return number

    def _message(
        self, control: Control
    ) -> TapOpaqueMessage | TapVBucketSet | TapFlush | TapCheckpointStart | TapCheckpointEnd:
        if control.kind == "opaque":
            return TapOpaqueMessage(code=control.number)
        if control.kind == "state":
            return TapVBucketSet(state=control.number)
        if control.kind == "flush":
            return TapFlush()
        if self._host.settings.tap_seed_checkpoints:
            shape = TapCheckpointStart if control.kind == "start" else TapCheckpointEnd
            return shape(checkpoint_id=control.number)
        if control.kind == "start":
            return TapCheckpointStart.server_form(control.number, private=_NO_META)
        return TapCheckpointEnd.server_form(control.number)

    def _after_flush(self) -> None:
        """The reader drops everything, also what this node did not flush: that it gets again."""
        flushes = self._host.bucket.flushes
        for cursor in self._client.cursors.values():
            vbucket = self._served(cursor.vbucket)
            if cursor.flushes != flushes and vbucket is not None:
                self._start_over(cursor, vbucket)
                self._set_ready(cursor)

    def _caught_up(self) -> bool:
        """Nothing is left to be sent for now: whether there is something after all."""
        if self._flags & TapConnectFlag.DUMP:
            if not self._waiting and not self._acks.unacked:
                self._complete("the dump is complete")
            return False
        if self._takeover is not None:
            return self._advance_takeover(self._takeover)
        if self._closed_only and not self._told_open_checkpoint and not self._waiting:
            self._told_open_checkpoint = True
            self._controls.append(Control("opaque", TapOpaque.OPEN_CHECKPOINT))
            return True
        return False

    # Takeover.

    def _advance_takeover(self, takeover: Takeover) -> bool:
        cursors = [self._client.cursors[number] for number in self._served_vbuckets()]
        if any(one.backfill_end is not None or one.controls for one in cursors):
            return False
        if takeover.is_over:
            if not self._acks.unacked:
                self._complete("the takeover is complete")
            return False
        states = takeover.advance([one.vbucket for one in cursors], self._acks.unacked)
        self._controls += [Control("state", VBucketState.ACTIVE, number) for number in states]
        return takeover.is_over

    def _served_vbuckets(self) -> list[int]:
        return [number for number in self._client.cursors if self._served(number) is not None]

    def _takeover_moved(self, failed: str | None) -> None:
        if failed is not None:
            self._disconnect(failed)
        for cursor in self._client.cursors.values():
            self._set_ready(cursor)
        self._wake()

    # Odds and ends.

    def _set_ready(self, cursor: TapCursor) -> None:
        self._waiting.discard(cursor)
        if cursor not in self._is_ready and (self._work is None or self._work.cursor is not cursor):
            self._is_ready.add(cursor)
            self._ready.append(cursor)
        if not self._is_sending:
            self._wake()

    def _drop_work(self, cursor: TapCursor | None = None) -> None:
        """Let go of the open snapshot (of a cursor); what was not sent of it is read again."""
        work = self._work
        if work is None or (cursor is not None and work.cursor is not cursor):
            return
        self._work = None
        if work.snapshot is not None:
            work.snapshot.close()
        self._set_ready(work.cursor)

    def _complete(self, reason: str) -> None:
        self._client.is_complete = True
        self.close_requested = reason

    def _refuse(self, frame: Frame, status: int | None, reason: str) -> None:
        if status is not None:
            answer: Message = Response(opcode=frame.opcode, opaque=frame.opaque, status=status)
            self._answers.append(answer.encode())
        self._disconnect(reason)

    def _disconnect(self, reason: str) -> None:
        if self.close_requested is None:
            _log.warning("%s: disconnecting: %s", self._host.peer, reason)
            self.close_requested = reason
            self._wake()
