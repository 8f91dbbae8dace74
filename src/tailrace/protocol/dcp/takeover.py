"""A vbucket moves to the replica of a DCP stream (docs/spec/dcp.md#takeover), the producer's half.

    takeover-send    all changes so far; each snapshot from memory is acknowledged
    takeover-wait    the replica was told a state, pending at first, and has not answered
    takeover-send    the vbucket is dead here, so nothing more is written; when that is on disk, and the rest
                     has arrived, the replica is told to become active
    takeover-wait    when it has answered, the stream is over

These are states of the stream; the takeover has its own (both in `states`). There are never two active ones:
ours is dead, durably, before the replica hears that it is active. If writers are faster than the stream, they
are asked to wait after ``takeover_max_time``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...wire.codes import MarkerFlag, VBucketState
from ..states import DCP_TAKEOVER_TRANSITIONS, DcpTakeoverInput, DcpTakeoverState, Machine

if TYPE_CHECKING:
    from ...store.base import Bucket
    from ..handler import Host
    from .watched_vbucket import WatchedVBucket

__all__ = ["DcpTakeover"]

_log = logging.getLogger(__name__)


def _ignore(_: str | None) -> None:
    """Stands in for the callback of a stream that is over."""


class DcpTakeover:
    """The takeover of one stream's vbucket."""

    __slots__ = (
        "_has_asked_for_acks",
        "_host",
        "_machine",
        "_moved",
        "_since",
        "_unacknowledged",
        "_watched",
        "holds_writes",
    )

    def __init__(self, host: Host, watched: WatchedVBucket, moved: Callable[[str | None], None]) -> None:
        """``moved`` is called when it has advanced by itself, or with the reason why it can't."""
        self.holds_writes = False
        """The front end refuses writes until this takeover is over."""
        self._host = host
        self._watched = watched
        self._moved = moved
        self._since: float | None = None
        self._has_asked_for_acks = False
        self._unacknowledged = 0
        self._machine = Machine(DCP_TAKEOVER_TRANSITIONS, DcpTakeoverState.SENDING)

    # Markers.

    def marker_flags(self) -> int:
        """Extra flags of the next marker: the replica answers it when its snapshot has arrived."""
        flags = int(MarkerFlag.ACK)
        if not self._has_asked_for_acks:
            flags |= MarkerFlag.CHECKPOINT
            self._has_asked_for_acks = True
        self._unacknowledged += 1
        return flags

    def marker_acknowledged(self) -> bool:
        """The replica has received a whole snapshot; return whether an answer was due."""
        if not self._unacknowledged:
            return False
        self._unacknowledged -= 1
        return True

    # States.

    @property
    def next_state(self) -> VBucketState:
        """The state that the replica is told next."""
        is_finishing = self._machine.state is DcpTakeoverState.FINISHING
        return VBucketState.ACTIVE if is_finishing else VBucketState.PENDING

    @property
    def may_tell_state(self) -> bool:
        """Whether everything has arrived, and our vbucket's state allows telling the replica the next."""
        return self._machine.state is not DcpTakeoverState.GIVING_UP and not self._unacknowledged

    def state_answered(self) -> bool:
        """The replica's vbucket has taken the state that it was told; return whether it was the last step."""
        if self._machine.state is DcpTakeoverState.FINISHING:
            self._log_step("active there")
            return True
        self._machine.feed(DcpTakeoverInput.IS_PENDING)
        self._log_step("pending there")
        self._host.rewrite(self._give_up, self._given_up)
        return False

    def _give_up(self, bucket: Bucket) -> list[int]:
        """The vbucket is dead here from now on; what was written before is still sent."""
        if self._machine.state is DcpTakeoverState.CLOSED:
            return []
        self._watched.state = VBucketState.DEAD  # our own change, which the stream survives
        number = self._watched.vbucket.id
        bucket.set_state(number, VBucketState.DEAD)
        return [number]

    def _given_up(self, failed: str | None) -> None:
        """The dead state of the vbucket is on disk, or could not be written.

        Until it is, nobody else may be told to be active, because a crash would bring ours back.
        """
        if failed is not None:
            number = self._watched.vbucket.id
            _log.error("vbucket %d: its takeover ends, the disk refuses: %s", number, failed)
        elif self._machine.state is not DcpTakeoverState.CLOSED:
            self._machine.feed(DcpTakeoverInput.GIVEN_UP)
            self._log_step("dead here")
        self._moved(failed)

    def _log_step(self, step: str) -> None:
        number = self._watched.vbucket.id
        self._host.record("takeover", level=logging.INFO, vbucket=number, step=step)

    # Time.

    def next_timer(self, now: float) -> float | None:
        """When to ask writers to wait."""
        if self.holds_writes:
            return None
        return now if self._since is None else self._since + self._host.settings.takeover_max_time

    def handle_timer(self, now: float) -> None:
        """If it takes too long, have the front end hold back writes."""
        if self._since is None:
            self._since = now
        elif not self.holds_writes and now >= self._since + self._host.settings.takeover_max_time:
            self.holds_writes = True
            self._host.hold_writes(self._watched.vbucket.id, hold=True)

    def close(self) -> None:
        """The stream is over, and hears nothing more."""
        self._machine.feed(DcpTakeoverInput.CLOSED)
        self._moved = _ignore
        if self.holds_writes:
            self.holds_writes = False
            self._host.hold_writes(self._watched.vbucket.id, hold=False)
