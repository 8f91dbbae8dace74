"""Executors that have accidents, in this process: tasks are repeated, run twice, and come back from the dead.

Whatever they do, only what they answer to the driver counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from spark.local_jobs import LocalJobs
from tailrace.spark.rounds.jobs import OnDone, Work


class Killed(BaseException):
    """The process is gone at this place: nothing catches this, nothing is tidied up."""


class ChaosJobs(LocalJobs):
    """Runs the tasks of a mirror one after the other, and answers in any order."""

    lost: ClassVar[list[Any]] = []
    """The last answers that were lost."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._zombies: list[tuple[bytes, bytes]] = []
        """Tasks that hang; their rounds are over when they go on."""
        self.repeated = self.risen = 0

    def run(
        self, work: Work, pieces: Sequence[Any], description: str, on_done: OnDone | None = None
    ) -> list[Any]:
        assert description
        self._rise()
        answers = super().run(work, pieces, description, on_done)
        self._rng.shuffle(answers)
        return answers

    def attempt(self, work: bytes, piece: bytes) -> Any:
        answer = super().attempt(work, piece)
        chance = self._rng.random()
        if chance < 0.1:  # its answer is lost with its executor, or the other one was faster
            self.repeated += 1
            self.lost[:] = [answer]
            answer = super().attempt(work, piece)
        elif chance < 0.2:  # its result is no longer wanted, and it does not know
            super().attempt(work, piece)
        elif chance < 0.25:
            self._zombies.append((work, piece))
        return answer

    def _rise(self) -> None:
        """What hung goes on, with the table as it was in its own time."""
        if self._zombies and self._rng.random() < 0.5:
            super().attempt(*self._zombies.pop(0))
            self.risen += 1
