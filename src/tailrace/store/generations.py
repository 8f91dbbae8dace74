"""A bucket's changes that are in memory: until they are sealed, and after that while there is room.

A generation is everything between two rotations of the log. It is sealed into a segment on another thread,
and stays in memory after that while the room for checkpoints allows, because streams read from memory first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .base import StoreSettings
from .checkpoint import Tail
from .log import LoggedColumns
from .write_queue import WriteQueue

if TYPE_CHECKING:
    from .vbucket_history import History

__all__ = ["Generation", "Generations"]


@dataclass(slots=True, eq=False)
class Generation:
    """The changes between two rotations of the log, which together become a segment."""

    state: dict[str, Any]  # the bucket's state at its end
    last_log: int
    next_batch: int
    tails: list[tuple[int, Tail]] = field(default_factory=list)
    logged: list[LoggedColumns] = field(default_factory=list)  # of its changes, if nothing was rolled back
    bytes: int = 0
    sealed: bool = False


class Generations:
    """The complete generations whose changes are in memory, oldest first, and what grows to be the next."""

    def __init__(self, settings: StoreSettings, queue: WriteQueue) -> None:
        self.room_bytes = int(settings.memory_quota * settings.checkpoint_share)
        # Half of the room for checkpoints: one generation grows, the one before serves slower streams.
        self.full_bytes = self.room_bytes // 2
        self.logged: list[LoggedColumns] = []  # of the batches since the last complete generation
        self._complete: list[Generation] = []
        self._complete_bytes = 0
        self._queue = queue
        self._leaving: list[tuple[int, Tail]] = []  # nobody reads them; they wait for `take_leaving`
        self._waiting_bytes = 0  # of those
        self._leaving_bytes = 0  # ... and of those that were taken and are not freed yet

    def __len__(self) -> int:
        return len(self._complete)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._complete)

    @property
    def growing_bytes(self) -> int:
        """Bytes of the changes that are in no complete generation."""
        return self._queue.memory_bytes - self._complete_bytes - self._leaving_bytes

    @property
    def is_full(self) -> bool:
        """Enough has grown for a generation."""
        return self.growing_bytes >= self.full_bytes

    @property
    def next_to_seal(self) -> Generation | None:
        return next((generation for generation in self._complete if not generation.sealed), None)

    def complete(self, generation: Generation, vbuckets: Iterable[History]) -> None:
        """Everything that has grown and is on disk becomes this generation."""
        for vbucket in vbuckets:
            tail = vbucket.rotate(generation)
            if tail is not None:
                generation.tails.append((vbucket.id, tail))
        generation.logged, self.logged = self.logged, []
        self._complete.append(generation)
        self._complete_bytes += generation.bytes

    def recount(self, vbuckets: Iterable[History]) -> None:
        """Count again, after a rollback took changes out of the middle."""
        self.logged = []
        for generation in self._complete:
            generation.bytes = 0
            generation.tails, generation.logged = [], []
        memory_bytes = 0
        for vbucket in vbuckets:
            for tail in vbucket.tails():
                size = sum(map(len, tail.frames()))
                memory_bytes += size
                if tail.generation is not None:
                    tail.generation.bytes += size
                    tail.generation.tails.append((vbucket.id, tail))
        self._queue.memory_bytes = memory_bytes + self._leaving_bytes
        self._complete_bytes = sum(generation.bytes for generation in self._complete)

    def forget(self, room: int, vbuckets: Iterable[History], *, later: bool) -> None:
        """Drop sealed changes from memory, oldest first, until no more than ``room`` bytes are left. Freeing
        them takes time: with ``later`` the caller of `take_leaving` does it, and until then they count.
        """
        vbuckets = list(vbuckets)
        queue = self._queue
        while self._complete and self._complete[0].sealed and queue.memory_bytes - self._leaving_bytes > room:
            generation = self._complete.pop(0)
            for vbucket in vbuckets:
                vbucket.forget_tail(generation)
            # Tails and generation refer to each other: without this the frames would stay until the garbage
            # collector runs, and a node hardly ever lets it.
            tails, generation.tails = generation.tails, []
            self._complete_bytes -= generation.bytes
            self._leaving_bytes += generation.bytes
            self._waiting_bytes += generation.bytes
            self._leaving += tails
        if not later:
            tails, size = self.take_leaving()
            tails.clear()
            self.freed(size)

    def take_leaving(self) -> tuple[list[tuple[int, Tail]], int]:
        """The changes that nobody reads any more, and their size in bytes. The caller frees them and then
        calls `freed`.
        """
        leaving, self._leaving = self._leaving, []
        size, self._waiting_bytes = self._waiting_bytes, 0
        return leaving, size

    def freed(self, size: int) -> None:
        """This many bytes that were leaving are no longer in memory."""
        self._leaving_bytes -= size
        self._queue.memory_bytes -= size
