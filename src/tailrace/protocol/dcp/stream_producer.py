"""What the producers of DCP and of both UPR drafts share: answers, and many streams on one connection.

Answers are never counted or held back (docs/spec/dcp.md#flow-control-3); stream messages go through the
window of the connection, which only DCP has: without one, the limit is what the transport takes.

Streams that have something to send stand in line, are served one chunk each, and go to the end again, so a
thousand of them move at the same pace. Two things change that order: a backfill waits for a slot (see
`backfill_slots`), and a stream that is in the middle of a snapshot from memory stays in front until that is
sent, since it holds on to the memory. Then it goes to the end of the line too: a vbucket that is written fast
always has another snapshot.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ...frames import CHUNK_BYTES
from ...wire.codes import Magic, Status, StreamEndStatus
from ...wire.header import HEADER, Frame
from ..extended_errors import status_for_peer
from ..handler import HandlerBase, HandlerSummary, Host
from ..states import CONNECTION_TRANSITIONS, ConnectionInput, ConnectionState, Machine
from .backfill_slots import BackfillSlots
from .controls import ConnectionOptions
from .producer_stream import ProducerStream

__all__ = ["StreamProducer"]

_DISK_IS_SHORT = 0.9
_JOINED_BYTES = 64 << 10
_RESPONSE = int(Magic.RESPONSE)


class StreamProducer(HandlerBase):
    """A connection with streams, of any dialect; a part of a `protocol.handler.Handler`."""

    is_busy = False

    def __init__(self, host: Host, wake: Callable[[], None], now: float, options: ConnectionOptions) -> None:
        super().__init__(host)
        self._wake = wake
        self._now = now
        self._machine = Machine(CONNECTION_TRANSITIONS, ConnectionState.NEW)
        self._options = options
        self._window = options.window
        self._slots = BackfillSlots(max(1, host.settings.backfill_buffer // CHUNK_BYTES))
        self._answers: deque[bytes] = deque()
        self._streams: dict[tuple[int, int], ProducerStream] = {}
        self._takeovers: list[ProducerStream] = []
        self._ready: deque[ProducerStream] = deque()
        self._is_sending = False
        self._sent_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the connection belongs to this producer, if only to be closed; before, it is unbound."""
        return self._machine.state is not ConnectionState.NEW

    def data_to_send(self, max_bytes: int) -> list[bytes | memoryview]:
        out: list[bytes | memoryview] = list(self._answers)
        self._answers.clear()
        if self.close_requested is None and max_bytes > 0:
            self._serve(out, max_bytes)
        size = sum(map(len, out))
        self._sent_bytes += size
        # Small messages are cheaper to send as one.
        return [b"".join(out)] if len(out) > 1 and size <= _JOINED_BYTES else out

    def summary(self) -> HandlerSummary:
        window = self._window
        return HandlerSummary(
            "producer",
            len(self._streams),
            sum(stream.lag_changes for stream in self._streams.values()),
            window.outstanding,
            window.size,
            len(self._slots),
            self._sent_bytes,
            "" if window.room > 0 else "its window is full",
        )

    def close(self, reason: str) -> None:
        self._machine.feed(ConnectionInput.CLOSED)
        for stream in self._streams.values():
            stream.end(StreamEndStatus.DISCONNECTED, tell=False)
        self._streams.clear()
        self._takeovers.clear()
        self._ready.clear()
        self._answers.clear()

    # Answers.

    def _answer(
        self, frame: Frame, status: int = Status.SUCCESS, value: bytes = b"", *, json: bool = False
    ) -> None:
        """An answer to a request, with what was asked for or why it is refused."""
        shown_status = status_for_peer(status, frame.opcode, self._host.features) if status else status
        if shown_status is None:
            self._disconnect(f"status 0x{status:02x} for a peer without extended errors")
            return
        header = HEADER.pack(_RESPONSE, frame.opcode, 0, 0, json, shown_status, len(value), frame.opaque, 0)
        self._answers.append(header + value)

    def _not_my_vbucket(self, frame: Frame) -> None:
        value, datatype = self._host.not_my_vbucket()
        self._answer(frame, Status.NOT_MY_VBUCKET, value, json=bool(datatype))

    def _log_rollback(self, vbucket: int, seqno: int) -> None:
        self._host.record("reader_must_roll_back", level=logging.INFO, vbucket=vbucket, to_seqno=seqno)

    def _disconnecting(self) -> None:
        self._machine.feed(ConnectionInput.CLOSED)

    # Streams.

    def _serve(self, out: list[bytes | memoryview], budget: int) -> None:
        """Let the streams in turn put what they have into ``out``, up to the budget."""
        ready, window = self._ready, self._window
        had = len(out)
        self._is_sending = True
        while budget > 0 and ready and window.room > 0:
            stream = ready.popleft()
            budget -= stream.send_into(out, budget)
            if not stream.is_ready:
                if stream.is_finished:
                    self._forget((stream.vbucket, stream.stream_id))
            elif stream.is_inside_memory:
                ready.appendleft(stream)
            else:
                ready.append(stream)
        self._is_sending = False
        if len(out) == had and ready and window.room > 0:
            # Nothing that was read was for its stream; there is more to look through.
            self._wake()

    def _stream_ready(self, stream: ProducerStream) -> None:
        self._ready.append(stream)
        if not self._is_sending:
            self._wake()

    def _forget(self, key: tuple[int, int]) -> None:
        """A stream is over; what it still had to send is not sent."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        if stream.is_ready:
            self._ready.remove(stream)
        if stream.takeover is not None:
            self._takeovers.remove(stream)

    def _next_backfill_timer(self) -> float | None:
        timeout_s = self._host.settings.slow_backfill_timeout
        return self._slots.next_timer(self._now, timeout_s) if timeout_s else None

    def _look_for_stalled_backfills(self, now: float) -> None:
        timeout_s = self._host.settings.slow_backfill_timeout
        if not timeout_s:
            return
        stalled = self._slots.stalled(now, timeout_s)
        if stalled and self._host.disk_used_share() > _DISK_IS_SHORT:
            for stream in stalled:
                assert isinstance(stream, ProducerStream)
                stream.end(StreamEndStatus.SLOW)
