"""Named places at which a test can kill the process, to show that nothing is lost there.

``TAILRACE_CRASH_AT=mirror.after-commit:3`` ends the process hard, as kill -9 does, when it reaches that place
for the third time. Without the variable a crash point costs one comparison."""

from __future__ import annotations

import os
import signal

__all__ = ["CRASH_POINTS", "TABLE_CRASH_POINTS", "crash_point"]

CRASH_POINTS = (
    "source.after-plan",
    "source.in-read",
    "mirror.in-recovery",
    "mirror.before-rollback",
    "mirror.after-rollback",
    "mirror.after-plan",
    "mirror.in-task",
    "mirror.in-read",
    "table.in-lookup",
    "table.in-write",
    "mirror.after-task",
    "mirror.before-commit",
    "mirror.after-changes",
    "mirror.after-commit",
    "table.after-compaction",
    "mirror.before-compaction-commit",
    "mirror.after-compaction-commit",
    "mirror.before-cleaning",
)
"""Every name that may be given, in the order in which a batch of the source or a round of the mirror reaches
them (in-recovery: at the start). Others are refused: a misspelt name would make a test that can't fail."""

TABLE_CRASH_POINTS = (
    *("table.in-mask", "table.before-commit", "table.after-commit"),
    *("table.in-checkpoint", "table.in-cleaning"),
)
"""The places at which a table is written, by any writer."""

_AT, _, _COUNT = os.environ.get("TAILRACE_CRASH_AT", "").partition(":")
if _AT and _AT not in CRASH_POINTS + TABLE_CRASH_POINTS:
    known = ", ".join(CRASH_POINTS + TABLE_CRASH_POINTS)
    raise ValueError(f"TAILRACE_CRASH_AT: there is no crash point {_AT!r}; there are {known}")
_left = int(_COUNT or "1") if _AT else 0


def crash_point(name: str) -> None:
    """Die here if a test asked for it."""
    global _left  # noqa: PLW0603
    if name == _AT:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows: at once, too
