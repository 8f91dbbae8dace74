"""What a campaign is made of: schedules from seeds, what they count, and bugs that they must catch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Bug", "Campaign", "Tally"]


@dataclass(frozen=True)
class Bug:
    """What is wrong, and how it is made so: a change of the product's code for the time of a ``with``."""

    name: str
    about: str
    plant: Callable[[], AbstractContextManager[Any]]
    seed: int = 0
    """The schedule that is tried first; it catches the bug while nothing changes in the campaign."""


@dataclass
class Tally:
    """What happened in some schedules."""

    schedules: int = 0
    kills: int = 0
    frames: int = 0
    faults: int = 0
    differences: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.schedules + other.schedules,
            self.kills + other.kills,
            self.frames + other.frames,
            self.faults + other.faults,
            self.differences + other.differences,
        )


@dataclass(frozen=True)
class Campaign:
    """Schedules without end: each is played from its seed, and must find nothing wrong."""

    name: str
    about: str
    play: Callable[[int, Path], Tally]
    bugs: tuple[Bug, ...] = field(default=())
    catches: tuple[type[BaseException], ...] = (AssertionError,)
    """What a schedule raises that has found something wrong."""
