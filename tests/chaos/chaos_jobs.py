"""Executors that have accidents, in this process: tasks are repeated, run twice, and come back from the dead.

Whatever they do, only what the driver was answered counts."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar


class Killed(BaseException):
    """The process is gone at this place: nobody catches it, nothing is tidied up."""


class ChaosJobs:
    """Runs the tasks of a mirror one after the other, each through pickle as on its way to an executor."""

    parallelism = 3
    lost: ClassVar[list[Any]] = []
    """Answers that nobody got, the last ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._zombies: list[tuple[bytes, bytes]] = []
        """Tasks that hang; their rounds are over when they go on."""
        self.repeated = self.risen = 0

    def run(
        self,
        work: Callable[[Any], Any],
        pieces: Sequence[Any],
        description: str,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Any]:
        assert description
        sent = pickle.dumps(work)
        self._rise()
        answers = []
        for piece in pieces:
            own = pickle.dumps(piece)
            answer = self._attempt(sent, own)
            chance = self._rng.random()
            if chance < 0.1:  # its answer is lost with its executor, or the other one was faster
                self.repeated += 1
                self.lost[:] = [answer]
                answer = self._attempt(sent, own)
            elif chance < 0.2:  # nobody is interested in it any more, and it does not know
                self._attempt(sent, own)
            elif chance < 0.25:
                self._zombies.append((sent, own))
            answers.append(answer)
        self._rng.shuffle(answers)
        return answers

    def _rise(self) -> None:
        """What hung goes on, with the table as it was in its own time."""
        if self._zombies and self._rng.random() < 0.5:
            self._attempt(*self._zombies.pop(0))
            self.risen += 1

    def _attempt(self, sent: bytes, piece: bytes) -> Any:
        return pickle.loads(pickle.dumps(pickle.loads(sent)(pickle.loads(piece))))

    def is_waiting(self) -> bool:
        return False

    def cancel(self) -> None:
        pass
