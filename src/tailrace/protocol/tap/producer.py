"""TAP, the producer's half of a connection: connecting, acknowledgements, time and takeover.

The rules are those of docs/spec/tap.md.

`sender` decides what is sent, and in which order; `clients` keeps what outlives the connection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import MalformedMessage, TailraceError
from ...history import upr_rollback_seqno
from ...wire.codes import Op, Status, TapConnectFlag, TapOpaque, TapOpcode, VBucketState, status_name
from ...wire.header import MAX_NAME_BYTES, Frame
from ...wire.message import Message, Response
from ...wire.tap import TapConnect, TapConnectOptions, TapNoop
from ..handler import HandlerSummary, Host
from ..stream_filter import StreamFilter, StreamValue
from .acks import AckLog
from .clients import TapClient, TapControl, TapCursor
from .items import TapShaper
from .sender import TapSender, TapWanted
from .takeover import TapTakeover
from .timers import TapTimers
from .window import TapWindow

if TYPE_CHECKING:
    from ...store.base import VBucket

__all__ = ["TapProducer"]

_BACK_OFF = (Status.EBUSY, Status.ETMPFAIL)
_EMPTY_IT = ("opaque", int(TapOpaque.INITIAL_VBUCKET_STREAM))

_log = logging.getLogger(__name__)


class TapProducer(TapSender):
    """The producer's half of a TAP connection; a `protocol.handler.Handler`."""

    is_open = True  # a connect that is refused closes the connection
    is_busy = False

    def __init__(self, host: Host, wake: Callable[[], None], now: float) -> None:
        super().__init__(host, wake, now)
        self._answers: deque[bytes] = deque()
        self._watching: dict[int, tuple[Callable[[], None], Callable[[], None]]] = {}
        """By vbucket: the callback, and the function that ends the watch."""
        self._timers = TapTimers(host.settings, now)

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
                self._timers.sent(self._now)
            elif self._has_more_to_look_at:
                self._wake()  # nothing that was read was for this reader; there is more to look through
        self._figures["sent_bytes"] += sum(map(len, out))
        return out

    @property
    def _has_more_to_look_at(self) -> bool:
        """Whether the reader takes more and there is something that may be for it."""
        window = self._window
        return window.is_open and not window.is_gated and (self._work is not None or bool(self._turns))

    def next_timer(self) -> float | None:
        if not self._client.name:
            return None
        timers = self._window.timers()
        timers += self._timers.next(in_backfill=self._work is not None, registered=self._client.is_registered)
        if self._takeover is not None and (timer := self._takeover.next_timer()) is not None:
            timers.append(timer)
        return min(timers)

    def handle_timer(self, now: float) -> None:
        self._now = now
        if not self._client.name or self.close_requested is not None:
            return
        if self._window.is_stalled(now):
            self._disconnect("the window is full and nothing was acknowledged for too long")
            return
        if self._window.has_resumed(now):
            self._wake()
        if self._timers.noop_due(now):
            self._answers.append(TapNoop().encode())
            self._figures["noops"] += 1
            self._wake()
        if self._work is not None and self._timers.backfill_stalled(now):
            self._drop_work()  # it holds on to memory or files, and nobody reads
        if self._client.is_registered and self._timers.save_due(now):
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
            "ack_window_full": str(self._window.full_since is not None).lower(),
            "suspended": str(self._window.suspended_until is not None).lower(),
            "pending_vbuckets": self._turns.pending,
            "backfill_completed": str(
                all(cursor.backfill_end is None for cursor in self._client.cursors.values())
            ).lower(),
            "takeover": "" if self._takeover is None else self._takeover.state.value,
        }

    def summary(self) -> HandlerSummary:
        cursors = self._client.cursors
        lag = 0
        for cursor in cursors.values():
            vbucket = self._host.bucket.vbuckets[cursor.vbucket]
            lag += 0 if vbucket is None else max(0, vbucket.high_seqno - cursor.position)
        backfills = sum(cursor.backfill_end is not None for cursor in cursors.values())
        return HandlerSummary(
            "producer",
            len(cursors),
            lag,
            backfills=backfills,
            sent_bytes=self._figures["sent_bytes"],
            held_up=self._window.held_up,
        )

    def close(self, reason: str) -> None:
        self._unwatch()
        self._drop_work()
        if self._takeover is not None:
            self._takeover.close()
        if self._client.producer is self:
            self._give_back([*self._acks.go_back(), *self._controls])
            self._host.tap.disconnected(self._client, self._now, self._host.settings.tap_keepalive)
        self._turns.clear()
        self._controls.clear()

    def _give_back(self, unsent: list[TapControl]) -> None:
        """Keep what the next connection has to send in place of this one; greetings are not kept."""
        for control in reversed(unsent):
            cursor = self._client.cursors.get(control.vbucket)
            if control.kind == "flush":
                self._client.owes_flush = True
            elif control == (*_EMPTY_IT, control.vbucket) and cursor is not None:
                cursor.controls.insert(0, control)

    # Connecting.

    def _connect(self, frame: Frame) -> None:
        host, clients = self._host, self._host.tap
        try:
            request = TapConnect.decode(frame)
            options = request.options()
        except MalformedMessage as error:
            flags = int.from_bytes(frame.extras, "big")
            silent = flags & TapConnectFlag.BACKFILL and len(frame.value) < 8
            self._refuse(frame, None if silent else error.status, str(error))
            return
        try:
            StreamFilter.make(StreamValue(), host.bucket.manifest, collections=False)
        except MalformedMessage as error:
            self._refuse(frame, Status.NOT_SUPPORTED, str(error))
            return
        if len(request.key) > MAX_NAME_BYTES:
            self._refuse(frame, Status.EINVAL, f"a name has up to {MAX_NAME_BYTES} bytes")
            return
        if (request.flags or 0) & TapConnectFlag.TAKEOVER_VBUCKETS and _has_collections(host.bucket.manifest):
            self._refuse(frame, Status.NOT_SUPPORTED, "TAP has no collections: a takeover would lose them")
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
        self._client = client
        if client.cursors:
            client.reconnects += 1
        client.flags, client.producer = flags, self
        self._acks = AckLog(client, enabled=bool(flags & TapConnectFlag.SUPPORT_ACK))
        self._window = TapWindow(self._acks, host.settings)
        self._shaper = TapShaper(host.features, flags, host.tap.hops.ttls)
        self._wanted = wanted = TapWanted(
            flags,
            frozenset(options.vbuckets) & {*vbuckets} if options.vbuckets else None,
            dict(options.checkpoints or ()),
            bool(options.closed_checkpoints_only),
        )
        date = options.backfill_date
        if date is not None and date != client.date and client.cursors:
            client.cursors.clear()  # another date than before: docs/spec/tap.md#reconnect
        client.date = client.date if date is None else date
        wanted.backfills = client.date <= host.clock.time_ns() // 1_000_000_000
        if flags & TapConnectFlag.SUPPORT_ACK:
            self._controls.append(TapControl("opaque", TapOpaque.ENABLE_AUTO_NACK))
        if flags & TapConnectFlag.CHECKPOINT:
            self._controls.append(TapControl("opaque", TapOpaque.ENABLE_CHECKPOINT_SYNC))
        if client.owes_flush:
            client.owes_flush = False
            self._controls.append(TapControl("flush", host.bucket.flushes))
        if flags & TapConnectFlag.TAKEOVER_VBUCKETS:
            self._takeover = TapTakeover(host, self._now, self._takeover_moved)
        listed = wanted.vbuckets
        if listed is not None:
            client.cursors = {number: cursor for number, cursor in client.cursors.items() if number in listed}
        numbers = vbuckets if listed is None else sorted(listed)
        taken = [cursor for at in numbers if (cursor := self._take_up(at)) is not None]
        if self._takeover is not None:
            for cursor in taken:
                self._controls.append(TapControl("state", VBucketState.PENDING, cursor.vbucket))
        for cursor in taken:  # the controls of all go before the first item
            self._controls += cursor.controls
            cursor.controls.clear()
            self._set_ready(cursor)
        for at in numbers:
            self._watch(at)
        host.tap.save(client)
        self._wake()

    def _take_up(self, number: int) -> TapCursor | None:
        """The cursor of a vbucket; None if the vbucket is not served now.

        A new one is at the place where this reader begins.
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
        closed = self._wanted.checkpoints.get(number)
        start = None if closed is None else vbucket.checkpoint_start(closed + 1)
        if start is not None:
            cursor.restart(vbucket.uuid, position=start)
        elif self._wanted.backfills or closed is not None:
            self._start_over(cursor, vbucket)
        else:
            cursor.restart(vbucket.uuid, position=vbucket.high_seqno)
        return cursor

    def change_filter(self, wanted: list[tuple[int, int]]) -> None:
        """Change the list of vbuckets, each with the last checkpoint that the reader has closed.

        The stream says when the change is in force.
        """
        client = self._client
        vbuckets = range(len(self._host.bucket.vbuckets))
        listed = frozenset(number for number, _ in wanted if number in vbuckets)
        self._unwatch()
        for number in set(client.cursors) - listed:
            cursor = client.cursors.pop(number)
            self._drop_work(cursor)
            cursor.epoch += 1
            self._turns.forget(cursor)
        self._wanted.vbuckets, self._wanted.checkpoints = listed, dict(wanted)
        for number in sorted(listed):
            is_new = number not in client.cursors
            cursor_or_none = self._take_up(number)
            if cursor_or_none is not None:
                if is_new and self._takeover is not None:
                    state = TapControl("state", VBucketState.PENDING, number)
                    cursor_or_none.controls.insert(0, state)
                self._set_ready(cursor_or_none)
        for number in sorted(listed):
            self._watch(number)
        self._controls.append(TapControl("opaque", TapOpaque.START_ONLINEUPDATE))  # 4: the change is complete
        self._host.tap.save(client)
        self._wake()

    # What happens to vbuckets.

    def _watch(self, number: int) -> None:
        """Have `_changed` called for everything that happens to a vbucket."""
        callback = partial(self._changed, number)
        self._watching[number] = callback, self._host.watch(number, callback)
        self._host.await_append(number, callback)

    def _unwatch(self) -> None:
        for _, unwatch in self._watching.values():
            unwatch()
        self._watching.clear()

    def _changed(self, number: int) -> None:
        if self._wanted.flags & TapConnectFlag.DUMP:
            return  # a dump has what existed when it began
        if number in self._watching:
            self._host.await_append(number, self._watching[number][0])
        cursor = self._take_up(number)
        if cursor is not None:
            self._set_ready(cursor)

    def _look_at_history(self, cursor: TapCursor, vbucket: VBucket) -> None:
        """Check that the cursor is still at a place in the vbucket's history; if not, it begins again."""
        if cursor.vb_uuid == vbucket.uuid and cursor.position <= vbucket.high_seqno:
            return
        flushes = self._host.bucket.flushes
        if cursor.flushes != flushes and vbucket.failover_log.newest.seqno == 0:
            self._drop_work(cursor)
            cursor.restart(vbucket.uuid)
            cursor.flushes = flushes
            if not any(control.kind == "flush" for control in self._controls):
                self._controls.append(TapControl("flush", flushes))
        elif self._is_lost(cursor, vbucket):
            self._client.dropped_cursors += 1
            self._start_over(cursor, vbucket)
        else:
            cursor.vb_uuid = vbucket.uuid

    @staticmethod
    def _is_lost(cursor: TapCursor, vbucket: VBucket) -> bool:
        """Whether the history after the cursor can't be sent: it is another, or deletions are purged."""
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
        self._window.full_since = None
        if status == Status.SUCCESS:
            self._acks.acknowledge(number)
        elif status in _BACK_OFF:
            self._figures["nacks"] += 1
            self._acks.acknowledge(number - 1)
            self._controls.extendleft(reversed(self._acks.go_back()))
            self._window.gate(0)
            for cursor in self._client.cursors.values():
                self._set_ready(cursor)
            self._drop_work()
            if self._takeover is None or not self._takeover.is_final:
                self._window.suspend(self._now)
        else:
            self._disconnect(f"message {frame.opaque} was answered with {status_name(status)}")
            return
        for cursor in list(self._turns.waiting):
            self._set_ready(cursor)
        self._wake()

    # Nothing left.

    def _caught_up(self) -> bool:
        """Called when nothing is left to send for now; returns whether it found something after all."""
        if self._wanted.flags & TapConnectFlag.DUMP:
            if not self._turns.waiting and not self._acks.unacked:
                self._complete("the dump is complete")
            return False
        if self._takeover is not None:
            return self._advance_takeover(self._takeover)
        if self._wanted.closed_only and not self._told_open_checkpoint and not self._turns.waiting:
            self._told_open_checkpoint = True
            self._controls.append(TapControl("opaque", TapOpaque.OPEN_CHECKPOINT))
            return True
        return False

    def _advance_takeover(self, takeover: TapTakeover) -> bool:
        cursors = [self._client.cursors[number] for number in self._served_vbuckets()]
        if any(cursor.backfill_end is not None or cursor.controls for cursor in cursors):
            return False
        if takeover.is_over:
            if not self._acks.unacked:
                takeover.all_answered()
                self._complete("the takeover is complete")
            return False
        states = takeover.advance([cursor.vbucket for cursor in cursors], self._acks.unacked)
        self._controls += [TapControl("state", VBucketState.ACTIVE, number) for number in states]
        return takeover.is_over or bool(self._turns)  # the step may have been done already

    def _served_vbuckets(self) -> list[int]:
        return [number for number in self._client.cursors if self._served(number) is not None]

    def _takeover_moved(self, failed: str | None) -> None:
        if failed is not None:
            self._disconnect(failed)
        for cursor in self._client.cursors.values():
            self._set_ready(cursor)
        self._wake()

    # Helpers.

    def _complete(self, reason: str) -> None:
        self._client.is_complete = True
        self.close_requested = reason

    def _refuse(self, frame: Frame, status: int | None, reason: str) -> None:
        if status is not None:
            answer: Message = Response(opcode=frame.opcode, opaque=frame.opaque, status=status)
            self._answers.append(answer.encode())
        self._disconnect(reason)

    def _disconnecting(self) -> None:
        self._wake()


def _has_collections(manifest: Mapping[str, Any]) -> bool:
    """Whether there is any collection but the default one."""
    return any(
        collection["uid"] != "0" for scope in manifest["scopes"] for collection in scope["collections"]
    )
