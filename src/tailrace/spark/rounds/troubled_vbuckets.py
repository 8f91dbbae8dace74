"""VBuckets that did not simply go on: refused by the bucket, unreadable for now, or to be read anew."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from ...client.copy_survey import counted
from ...errors import OutOfReach
from ...model import Position
from .task import TaskAnswer

__all__ = ["HeldBack", "TroubledVBuckets"]


_HELD_S = 1.0
"""How long to leave a vbucket alone after a task found that some copy does not have it on disk."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """A vbucket that could not be read."""

    since: float
    """When it began to fail, or was last held back."""
    until: float


class TroubledVBuckets:
    """The vbuckets of a mirror that the next plan treats specially."""

    def __init__(
        self,
        start_over: Iterable[int] = (),
        *,
        retry_for_s: float,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.anew = set(start_over)
        """They are read again from the beginning, whatever the tables hold of them."""
        self.is_repair = bool(self.anew)
        self.refused: dict[int, Position] = {}
        """By vbucket, the position from which the bucket refused to go on."""
        self._waiting: dict[int, _Wait] = {}
        self._retry_for_s = retry_for_s
        self._on_trouble = on_trouble

    def __bool__(self) -> bool:
        """Whether vbuckets wait for their next attempt."""
        return bool(self._waiting)

    def waiting(self, now: float) -> list[int]:
        """VBuckets that are not to be read yet."""
        return [vbucket for vbucket, wait in self._waiting.items() if wait.until > now]

    def nothing_left(self, known: Container[int], now: float) -> None:
        """Note that nothing is left to read: ``known`` vbuckets whose wait is over need no more attempts."""
        for vbucket, wait in list(self._waiting.items()):
            if wait.until <= now and vbucket in known:
                del self._waiting[vbucket]

    def went_back(self, vbuckets: Iterable[int]) -> None:
        """Note that vbuckets stand elsewhere now, at positions that the bucket has not refused."""
        for vbucket in vbuckets:
            self.refused.pop(vbucket, None)

    def committed(self, answers: Iterable[TaskAnswer]) -> None:
        """Note that the tables have what the tasks answered: these vbuckets need not be read anew."""
        for answer in answers:
            self.anew.difference_update(answer.positions)

    def note(self, answers: Iterable[TaskAnswer], now: float) -> None:
        """Note what the tasks of a round say; `OutOfReach` if a vbucket could not be read for too long."""
        reasons: dict[str, None] = {}  # each once, for however many vbuckets
        for answer in answers:
            for vbucket in answer.positions:
                self.refused.pop(vbucket, None)
                self._waiting.pop(vbucket, None)
            self.refused.update(answer.refused)
            for vbucket, why in answer.failed.items():
                if now - self._wait(vbucket, now) >= self._retry_for_s:
                    raise OutOfReach(f"vbucket {vbucket} can't be read for {self._retry_for_s:g} s: {why}")
                reasons[why] = None
            for vbucket, why in answer.held.items():  # without a limit: this is not a failure
                self._waiting[vbucket] = _Wait(now, now + _HELD_S)
                reasons[why] = None
        for why in reasons:
            self._on_trouble(why)

    def _wait(self, vbucket: int, now: float) -> float:
        """Leave a vbucket alone for a while, for longer each time; since when it waits."""
        wait = self._waiting.get(vbucket)
        since = now if wait is None else wait.since
        self._waiting[vbucket] = _Wait(since, now + min(5.0, 0.2 + (now - since) / 2))
        return since


class HeldBack:
    """Changes that wait until every copy has them on disk; reports it when that takes long."""

    AFTER_S, EVERY_S = 3.0, 60.0

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        self._on_trouble = on_trouble
        self._say_at: float | None = None

    def __bool__(self) -> bool:
        """Whether something is held back."""
        return self._say_at is not None

    def hold(self, reasons: Mapping[int, str], now: float) -> None:
        """Note, by vbucket, which copy the changes wait for."""
        if self._say_at is None:
            self._say_at = now + self.AFTER_S
        elif now >= self._say_at:
            self._say_at = now + self.EVERY_S
            self._on_trouble(f"waits until the changes are on disk everywhere; {counted(reasons)}")

    def release(self) -> None:
        """Nothing is held back."""
        self._say_at = None
