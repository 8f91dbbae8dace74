"""Jobs of a mirror in this process: pieces of work go through pickle, as on their way to executors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from tailrace.spark.rounds.jobs import OnDone, Work


class LocalJobs:
    """Runs what an executor would run, here and immediately."""

    parallelism = 3

    def __init__(self) -> None:
        self.descriptions: list[str] = []

    def run(
        self, work: Work, pieces: Sequence[Any], description: str, on_done: OnDone | None = None
    ) -> list[Any]:
        self.descriptions.append(description)
        sent = pickle.dumps(work)
        answers = []
        for number, piece in enumerate(pieces):
            answers.append(self.attempt(sent, pickle.dumps(piece)))
            if on_done is not None:
                on_done(number)
        return answers

    def attempt(self, work: bytes, piece: bytes) -> Any:
        """What a task answers; both are pickled."""
        return pickle.loads(pickle.dumps(pickle.loads(work)(pickle.loads(piece))))

    def is_waiting(self) -> bool:
        return False

    def cancel(self) -> None:
        pass
