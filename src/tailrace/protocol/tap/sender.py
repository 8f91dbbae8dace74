"""TAP, what a producer sends: controls, the changes of many vbuckets, and how they are numbered.

    controls       messages that are not changes; with acks nothing overtakes them
    cursors        stand in line when they have something; each is served to the end of a snapshot
    caught up      nothing is left for now: the owner may have something

The session pulls, so nothing is read before there is room for it. One snapshot is open at a time, and it is
dropped when the reader stalls: a cursor can always resume from the store.

Rules: docs/spec/tap.md#order-of-messages, docs/spec/tap.md#sequence-number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...frames import CHUNK_BYTES
from ...wire.codes import TapConnectFlag, TapFlag, TapOpaque, VBucketState
from ...wire.tap import (
    TAP_TTL,
    TapCheckpointEnd,
    TapCheckpointStart,
    TapFlush,
    TapOpaqueMessage,
    TapVBucketSet,
)
from ..handler import HandlerBase, Host
from .acks import AckLog, wire_number, wire_numbers
from .clients import TapClient, TapControl, TapCursor
from .items import TapBatch, TapShaper
from .takeover import TapTakeover
from .turns import CursorTurns
from .window import TapWindow

if TYPE_CHECKING:
    from ...store.base import VBucket, VBucketSnapshot

__all__ = ["TapSender", "TapWanted"]


@dataclass(slots=True)
class TapWanted:
    """What a reader asked for when it connected."""

    flags: int = 0
    vbuckets: frozenset[int] | None = None
    """None: all that are active here."""
    checkpoints: dict[int, int] = field(default_factory=dict)
    """The last checkpoint that the reader has closed, by vbucket."""
    closed_only: bool = False
    """Only changes of closed checkpoints."""
    backfills: bool = True
    """Whether what was there before is sent too."""


@dataclass(slots=True)
class _OpenSnapshot:
    """A snapshot that is being sent."""

    cursor: TapCursor
    snapshot: VBucketSnapshot | None  # None: read to its end
    end: int
    limit: int | None
    batch: TapBatch | None = None
    at: int = 0
    ahead: TapBatch | None = None  # with acks: the last item must be known as the last when it is sent


class TapSender(HandlerBase):
    """The sending part of a TAP producer."""

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        super().__init__(host)
        self._wake = wake
        self._now = now
        self._wanted = TapWanted()
        self._client = TapClient("")
        self._acks = AckLog(self._client, enabled=False)
        self._shaper = TapShaper(frozenset(), 0, host.tap.hops.ttls)
        self._takeover: TapTakeover | None = None
        self._controls: deque[TapControl] = deque()
        self._window = TapWindow(self._acks, host.settings)
        self._turns = CursorTurns()
        self._work: _OpenSnapshot | None = None
        self._is_sending = False
        self._told_open_checkpoint = False
        self._figures = dict.fromkeys(("sent_bytes", "items", "noops", "nacks", "backfills", "flushes"), 0)

    def _caught_up(self) -> bool:
        """Called when nothing is left to send for now; returns whether it found something after all."""
        raise NotImplementedError

    # In turn.

    def _serve(self, out: list[bytes | memoryview], budget: int) -> None:
        while budget > 0 and self.close_requested is None:
            if not self._window.is_open:
                self._window.found_closed(self._now)
                return
            if self._controls:
                self._window.gate(self._say(self._controls.popleft(), None, out))
            elif self._window.is_gated:
                return
            elif self._work is not None:
                budget -= self._serve_work(self._work, out, budget)
            elif self._turns:
                self._serve_cursor(self._turns.next(), out)
            elif not self._caught_up():
                return

    def _serve_cursor(self, cursor: TapCursor, out: list[bytes | memoryview]) -> None:
        """One step of a vbucket: a control, a wait, the end of its backfill, or its next snapshot."""
        if cursor.controls:
            cursor.gate = self._say(cursor.controls.pop(0), cursor, out)
            self._set_ready(cursor)
            return
        if self._acks.enabled and self._acks.acked < cursor.gate:
            self._turns.waiting.add(cursor)
            return
        vbucket = self._served(cursor.vbucket)
        if vbucket is None or (cursor.backfill_end is None and self._wanted.flags & TapConnectFlag.DUMP):
            return
        if cursor.backfill_end is not None and cursor.position >= cursor.backfill_end:
            if cursor.outstanding:
                self._turns.waiting.add(cursor)
                return
            cursor.backfill_end = None
            cursor.controls.append(TapControl("opaque", TapOpaque.CLOSE_BACKFILL, cursor.vbucket))
            self._set_ready(cursor)
            return
        self._next_snapshot(cursor, vbucket)

    def _next_snapshot(self, cursor: TapCursor, vbucket: VBucket) -> None:
        limit = vbucket.checkpoint_start(vbucket.checkpoint_id) if self._wanted.closed_only else None
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
            self._wanted.flags & TapConnectFlag.CHECKPOINT
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
        self._work = _OpenSnapshot(cursor, snapshot, end, limit)

    def _change_checkpoint(self, cursor: TapCursor, checkpoint_id: int) -> None:
        """Close the reader's checkpoint, when all its items have arrived, and open another (0: none yet)."""
        if cursor.outstanding:
            self._turns.waiting.add(cursor)
            return
        if cursor.checkpoint_id:
            cursor.controls.append(TapControl("end", cursor.checkpoint_id, cursor.vbucket))
        if checkpoint_id:
            cursor.controls.append(TapControl("start", checkpoint_id, cursor.vbucket))
        cursor.checkpoint_id = checkpoint_id
        self._set_ready(cursor)

    def _serve_work(self, work: _OpenSnapshot, out: list[bytes | memoryview], budget: int) -> int:
        """Send or read a part of the open snapshot; returns the work that it was, in bytes."""
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

    def _send_items(
        self, work: _OpenSnapshot, batch: TapBatch, out: list[bytes | memoryview], budget: int
    ) -> int:
        """Send those messages of a batch that begin within the budget and fit into the window."""
        cursor, start = work.cursor, work.at
        first_byte = int(batch.offsets[start])
        stop = int(np.searchsorted(batch.offsets, first_byte + budget))
        if self._acks.enabled:
            stop = min(stop, start + self._window.room)
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

    # Messages that are not items.

    def _say(self, control: TapControl, cursor: TapCursor | None, out: list[bytes | memoryview]) -> int:
        """Send a message that is not an item; returns its number."""
        ttl = TAP_TTL
        if control.kind == "flush":
            ttl = self._host.tap.hops.flush_ttl(control.number)
            self._after_flush()
            if not ttl:
                return 0  # its TTL is used up
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
        self, control: TapControl
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
            vbucket = self._host.bucket.vbuckets[control.vbucket]
            # the form of real servers has the highest rev of a deletion; readers make no use of it
            rev = 0 if vbucket is None else vbucket.deleted_rev
            return TapCheckpointStart.server_form(control.number, private=rev.to_bytes(8, "big"))
        return TapCheckpointEnd.server_form(control.number)

    def _after_flush(self) -> None:
        """The reader drops everything, and gets again what this node did not flush."""
        flushes = self._host.bucket.flushes
        for cursor in self._client.cursors.values():
            vbucket = self._served(cursor.vbucket)
            if cursor.flushes != flushes and vbucket is not None:
                self._start_over(cursor, vbucket)
                self._set_ready(cursor)

    # Cursors.

    def _served(self, number: int) -> VBucket | None:
        """A vbucket that this reader gets now.

        One that was the active a moment ago is not served: the reader may not have the new map yet.
        """
        vbucket = self._host.bucket.vbuckets[number]
        if vbucket is None:
            return None
        if vbucket.state == VBucketState.ACTIVE or (
            vbucket.state == VBucketState.REPLICA
            and self._wanted.vbuckets is not None
            and self._takeover is None
            and not self._host.is_former_active(number)
        ):
            return vbucket
        return vbucket if self._takeover is not None and number in self._takeover.given_up else None

    def _start_over(self, cursor: TapCursor, vbucket: VBucket) -> None:
        """The reader gets the vbucket from the beginning, and is told to empty it first."""
        self._drop_work(cursor)
        cursor.restart(vbucket.uuid, backfill_end=vbucket.high_seqno)
        cursor.flushes = self._host.bucket.flushes
        cursor.controls.append(TapControl("opaque", TapOpaque.INITIAL_VBUCKET_STREAM, cursor.vbucket))
        self._figures["backfills"] += 1

    def _set_ready(self, cursor: TapCursor) -> None:
        self._turns.waiting.discard(cursor)
        if self._work is None or self._work.cursor is not cursor:
            self._turns.add(cursor)
        if not self._is_sending:
            self._wake()

    def _drop_work(self, cursor: TapCursor | None = None) -> None:
        """Close the open snapshot (of a cursor); what was not sent of it will be read again."""
        work = self._work
        if work is None or (cursor is not None and work.cursor is not cursor):
            return
        self._work = None
        if work.snapshot is not None:
            work.snapshot.close()
        self._set_ready(work.cursor)
