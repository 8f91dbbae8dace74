"""A vbucket moves to the reader of a TAP stream (docs/spec/tap.md#takeover).

    sending      all documents and all changes, as on any stream
    giving up    almost everything has arrived: the vbuckets are dead here, so nothing more is written;
                 waits until that is on disk, since after a crash they must not be active again
    finishing    the rest is sent and acknowledged
    activating   the reader is told to make them active; when it has answered, the stream is over

There are never two active ones: here they are dead, durably, before the reader hears of it. If writers are
faster than the stream, they are asked to wait after ``takeover_max_time``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ...units import shown_ranges
from ...wire.codes import VBucketState
from ..states import TAP_TAKEOVER_TRANSITIONS, Machine, TapTakeoverInput, TapTakeoverState

if TYPE_CHECKING:
    from ...store.base import Bucket
    from ..handler import Host

__all__ = ["TapTakeover"]

UNACKED_BEFORE_GIVING_UP = 10


class TapTakeover:
    """The takeover of the vbuckets of one connection."""

    def __init__(self, host: Host, now: float, moved: Callable[[str | None], None]) -> None:
        """``moved`` is called when it has advanced by itself, or with the reason why it can't."""
        self._machine = Machine(TAP_TAKEOVER_TRANSITIONS, TapTakeoverState.SENDING)
        self.given_up: frozenset[int] = frozenset()
        self._host = host
        self._moved = moved
        self._hold_at = now + host.settings.takeover_max_time
        self._held: set[int] = set()

    @property
    def state(self) -> TapTakeoverState:
        return self._machine.state

    @property
    def is_closed(self) -> bool:
        return self._machine.state is TapTakeoverState.CLOSED

    @property
    def is_final(self) -> bool:
        """Whether the vbuckets are dead here: what is left must get through without waiting."""
        return self.state in (TapTakeoverState.FINISHING, TapTakeoverState.ACTIVATING)

    @property
    def is_over(self) -> bool:
        """Whether only the answers to the last messages are missing."""
        return self.state is TapTakeoverState.ACTIVATING

    def advance(self, vbuckets: list[int], unacked: int) -> list[int]:
        """Take the next step, when nothing waits to be sent and ``unacked`` messages are unanswered.

        Returns the vbuckets that the reader is to make active now.
        """
        if self.state is TapTakeoverState.SENDING and unacked < UNACKED_BEFORE_GIVING_UP:
            self._machine.feed(TapTakeoverInput.ALMOST_SENT)
            self.given_up = frozenset(vbuckets)
            self._host.rewrite(partial(self._give_up, vbuckets), self._are_dead)
        elif self.state is TapTakeoverState.FINISHING and not unacked:
            if not self._are_all_dead():
                self._moved("the takeover was called off: a vbucket is not dead any more")
                return []
            self._machine.feed(TapTakeoverInput.ALL_ARRIVED)
            return sorted(self.given_up)
        return []

    def _give_up(self, vbuckets: list[int], bucket: Bucket) -> list[int]:
        if self.is_closed:  # while this had to wait: the takeover's controller has moved on
            return []
        for number in vbuckets:
            bucket.set_state(number, VBucketState.DEAD)
        return vbuckets

    def _are_all_dead(self) -> bool:
        vbuckets = [self._host.bucket.vbuckets[number] for number in self.given_up]
        return all(vbucket is not None and vbucket.state == VBucketState.DEAD for vbucket in vbuckets)

    def _are_dead(self, failed: str | None) -> None:
        if not self.is_closed:
            self._release()
            if failed is None:
                self._machine.feed(TapTakeoverInput.GIVEN_UP)
                self._record("dead here")
            self._moved(failed)

    def all_answered(self) -> None:
        """The reader has answered the last messages."""
        self._record("active there")

    def _record(self, step: str) -> None:
        vbuckets = shown_ranges(self.given_up)
        self._host.record("takeover", level=logging.INFO, vbuckets=vbuckets, step=step)

    def next_timer(self) -> float | None:
        return self._hold_at if self.state is TapTakeoverState.SENDING and not self._held else None

    def handle_timer(self, now: float, vbuckets: list[int]) -> None:
        """Ask writers to wait, if their time is up."""
        if self.state is TapTakeoverState.SENDING and now >= self._hold_at and not self._held:
            self._held = set(vbuckets)
            for number in self._held:
                self._host.hold_writes(number, hold=True)
            self._hold_at = now + self._host.settings.takeover_max_time

    def close(self) -> None:
        """The connection is gone; states stay as they are, for the takeover's controller to decide."""
        self._machine.feed(TapTakeoverInput.CLOSED)
        self._release()

    def _release(self) -> None:
        for number in self._held:
            self._host.hold_writes(number, hold=False)
        self._held = set()
