"""A reader of an older dialect: messages are translated into DCP, and the rest is DCP's reader.

TAP and both drafts of UPR report the same things as DCP: changes, snapshots, ends. So a connection that
speaks one of them translates each message as it comes, and everything after that, from the scanner to the
policy that resumes and rolls back, is shared with DCP. It goes message by message, and so is a good deal
slower than DCP, which replaced these dialects.

They lack three things of DCP. The server sends no noops, so a silent server is asked for a sign of life;
there is no window, so the transport holds the server up; and a stream can only be closed with its connection,
which `is_spent` from then on.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import ClassVar

from ...wire.admin import Noop
from ...wire.codes import DcpOpcode, Feature, Magic
from ...wire.framing import Framer
from ...wire.header import MAX_FRAME, Frame
from ..handshake import READER_FEATURES, HandshakeResult, Introduction, handshake
from ..questions import Patience
from ..script import Script
from .liveness import silence_limit_s
from .reader import MAX_FRAME_BEFORE_OPEN, DcpReader, Granted, ReaderSettings
from .reader_streams import FIRST_STREAM_OPAQUE
from .translation import DcpTranslation

__all__ = ["TranslatingReader", "older_features"]

_RAW_BYTES = 256 << 10
_EXTRAS_GROWTH = 64
"""A change is a little longer in DCP than in the older dialects."""


def older_features(*, xattrs: bool) -> tuple[int, ...]:
    """What HELLO asks for: no collections, which these dialects don't have."""
    left_out = {Feature.COLLECTIONS} if xattrs else {Feature.COLLECTIONS, Feature.XATTR}
    return tuple(feature for feature in READER_FEATURES if feature not in left_out)


class TranslatingReader(DcpTranslation, DcpReader):
    """One connection to one node that speaks TAP or UPR."""

    ORDERED: ClassVar[frozenset[int]] = DcpReader.ORDERED | {DcpOpcode.FLUSH}

    def __init__(
        self,
        introduction: Introduction,
        settings: ReaderSettings,
        *,
        rng: random.Random,
        now: float,
        patience: Patience | None = None,
    ) -> None:
        self._raw = Framer(MAX_FRAME_BEFORE_OPEN)
        self._room = memoryview(bytearray(_RAW_BYTES))
        self._made = bytearray()
        super().__init__(introduction, settings, rng=rng, now=now, patience=patience)

    def _opening(self, introduction: Introduction, rng: random.Random) -> Script[Granted]:
        agreed: HandshakeResult = yield from handshake(introduction, rng)
        return Granted(agreed, noop=False)

    def _opened(self, granted: Granted) -> None:
        super()._opened(granted)
        self._raw.limit = MAX_FRAME - _EXTRAS_GROWTH

    # bytes in

    def get_buffer(self) -> memoryview:
        return self._room

    def buffer_updated(self, count: int) -> None:
        self._grew = True
        self.received_bytes += count
        self._raw.feed(self._room[:count])

    @property
    def is_full(self) -> bool:
        return self._raw.buffered >= _RAW_BYTES

    def process(self, now: float) -> None:
        if not self._grew:
            return
        self._grew = False
        self._silence.heard(now)
        for frame in self._raw.frames():
            if self._is_answer(frame):
                self._made += frame.encode()
            else:
                self._translate(frame)
            if len(self._made) >= _RAW_BYTES or self.granted is None:
                self._pass_on()
        self._pass_on()

    @staticmethod
    def _is_answer(frame: Frame) -> bool:
        """Whether it has nothing to do with streams."""
        if frame.magic == Magic.SERVER_REQUEST:
            return True
        return frame.magic == Magic.RESPONSE and frame.opaque < FIRST_STREAM_OPAQUE

    def _pass_on(self) -> None:
        """Pass on what was translated, as if a DCP server had sent it."""
        left = memoryview(bytes(self._made))
        self._made.clear()
        while left:
            room = self._buffer.get_buffer()
            count = min(len(room), len(left))
            room[:count] = left[:count]
            self._buffer.buffer_updated(count)
            left = left[count:]
            if self._buffer.is_full or not left:
                self._scan()

    # translation

    @abstractmethod
    def _translate(self, frame: Frame) -> None:
        """Translate a message of the dialect into DCP, see `DcpTranslation`."""

    # what these dialects lack

    def close_stream(self, vbucket: int) -> None:
        if self._streams.retire(vbucket) is not None:
            self.is_spent = True

    def acknowledge(self, count: int) -> None:
        self._window.processed(count)
        self._window.take(self._silence.last_heard)

    def next_timer(self) -> float | None:
        limit_s = self._silence_s
        # no sign of life is asked for before the connection is open, nor while it is not read
        is_asked = self.granted is not None and limit_s is not None
        silent = self._silence.next_timer(limit_s, self.settings.noop_interval_s if is_asked else None)
        return min((timer for timer in (silent, *self._questions.due()) if timer is not None), default=None)

    def handle_timer(self, now: float) -> None:
        self._questions.check(now)
        limit_s = self._silence_s
        self._check_silence(now, limit_s)
        is_asked = self.granted is not None and limit_s is not None
        if is_asked and self._silence.must_ask(now, self.settings.noop_interval_s):
            # whatever comes is a sign of life, so this answer itself is never overdue
            self.ask(_sign_of_life(), self._heard, None)

    @property
    def _silence_s(self) -> float | None:
        return None if self.is_swamped else silence_limit_s(self.settings.noop_interval_s)

    def _heard(self, _: None) -> None:
        self._silence.answered()


def _sign_of_life() -> Script[None]:
    yield [Noop()]
