"""What keeps the tables of a mirror small: one compaction step at a time beside the rounds, and cleaning.

A step runs as a job of its own; its files become part of the table when the loop has time for the commit.
The commit then allows for what has changed in the table meanwhile, or the step is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pyarrow as pa

from ...clock import SYSTEM, Clock
from ...crashpoints import crash_point
from ...logs import log_event
from ...table.compaction import CompactionPolicy, CompactionStep, finish_step, next_step
from ...table.contract import Commit, DataFile, Table, TableChanged
from ...table.store import TableStore
from .change_log import LOG_POLICY, expired_files, mergeable
from .jobs import Jobs

__all__ = ["Housekeeping", "due_step"]

_log = logging.getLogger(__name__)

CLEAN_EVERY_S = 30.0

_ATTEMPTS = 3
"""After this many failed steps in a row the mirror fails, too."""


@dataclass(frozen=True)
class _StepWork:
    """What runs on an executor."""

    store: TableStore
    schema: pa.Schema
    secret: bytes

    def __call__(self, step: CompactionStep) -> list[DataFile]:
        return step.run(self.store, self.schema, self.secret)


@dataclass
class _RunningStep:
    """A step that is running, or done and not committed."""

    table: Table
    step: CompactionStep
    began_ms: int
    took_s: float = 0.0
    thread: threading.Thread | None = None
    written: list[DataFile] | None = None
    error: BaseException | None = None


class _SmallFiles:
    """A change log that shows only its small files."""

    def __init__(self, log: Table) -> None:
        self._log = log

    def files(self, version: int | None = None) -> list[DataFile]:
        return mergeable(self._log.files(version))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def due_step(table: Table, policy: CompactionPolicy | None = None) -> CompactionStep | None:
    """The step of compaction that is due, if any; ``policy`` does not apply to change logs."""
    if table.source.get("changes"):
        return next_step(cast(Table, _SmallFiles(table)), LOG_POLICY)
    return next_step(table, policy)


class Housekeeping:
    """The maintenance of all tables of a mirror; called from the mirror's own thread."""

    def __init__(
        self,
        tables: Sequence[Table],
        jobs: Jobs,
        *,
        log: Table | None = None,
        log_keep_s: float | None = None,
        policy: CompactionPolicy | None = None,
        clock: Clock = SYSTEM,
        in_background: bool = True,
    ) -> None:
        self._tables = [*tables, *([] if log is None else [log])]
        self._log = log
        self._log_keep_s = log_keep_s
        self._jobs = jobs
        self._policy = policy
        self._clock = clock
        self._in_background = in_background
        self._running: _RunningStep | None = None
        self._looked_at: dict[int, int] = {}
        """The version of each table in which a step was last looked for."""
        self._cleaned_at = clock.monotonic()
        self._failures = 0
        self.steps = 0
        self.step_s = 0.0
        """How long the last committed step took, beside the rounds."""

    def turn(self) -> str:
        """Commit a step that is done and begin the next; what was committed, in words."""
        committed = self.finish_step()
        if self._running is None:
            self._begin_step()
        return committed

    def finish_step(self, *, wait: bool = False) -> str:
        """Commit the step that runs, if it is done."""
        running = self._running
        if running is None:
            return ""
        if running.thread is not None:
            if running.thread.is_alive() and not wait:
                return ""
            running.thread.join()
        self._running = None
        if running.error is not None:
            self._failures += 1
            if self._failures >= _ATTEMPTS:
                raise running.error
            self._looked_at.clear()
            return ""
        self._failures = 0
        if running.written is None:
            return ""
        table = running.table
        crash_point("mirror.before-compaction-commit")
        commit = finish_step(table, running.step, running.written)
        if commit is None:
            return ""
        try:
            table.commit(commit)
        except TableChanged:
            return ""  # cleaning removes the files
        crash_point("mirror.after-compaction-commit")
        self.steps += 1
        self.step_s = running.took_s
        log_event(
            _log,
            logging.INFO,
            "compaction",
            table=table.uri,
            what=running.step.why,
            seconds=round(running.took_s, 3),
            version=table.version,
        )
        return running.step.why

    def clean(self, *, now: bool = False) -> None:
        """Thin out earlier versions, shorten the log and delete unused files, every `CLEAN_EVERY_S`."""
        if not now and self._clock.monotonic() - self._cleaned_at < CLEAN_EVERY_S:
            return
        self._cleaned_at = self._clock.monotonic()
        busy = None if self._running is None else self._running.began_ms
        crash_point("mirror.before-cleaning")
        self._expire_log()
        for table in self._tables:
            table.maintain(busy_since_ms=busy)

    def drain(self, say: Callable[[str], None]) -> None:
        """At the end of a run that has caught up: wait for the running step, or do one that is due; clean."""
        self._wait_for_step(say)
        if not self.steps:
            self._begin_step()
            self._wait_for_step(say)
        say("cleaning")
        self.clean(now=True)

    def _wait_for_step(self, say: Callable[[str], None]) -> None:
        if self._running is not None:
            say(f"compacting {self._running.step.why}")
        self.finish_step(wait=True)

    def close(self) -> None:
        """Don't wait for a step that runs; cleaning removes its files."""
        self._running = None

    def _expire_log(self) -> None:
        if self._log is None or self._log_keep_s is None:
            return
        now = datetime.fromtimestamp(self._clock.time_ns() / 1e9, tz=UTC)
        gone = expired_files(self._log.files(), now - timedelta(seconds=self._log_keep_s))
        if gone:
            self._log.commit(Commit("TAILRACE EXPIRE", removed=gone, counts={"files": len(gone)}))

    def _begin_step(self) -> None:
        for number, table in enumerate(self._tables):
            if self._looked_at.get(number) == table.version:
                continue
            self._looked_at[number] = table.version
            step = due_step(table, self._policy)
            if step is None:
                continue
            running = self._running = _RunningStep(table, step, self._clock.time_ns() // 1_000_000)
            if not self._in_background:
                self._run(running)
                return
            running.thread = threading.Thread(
                target=self._run, args=(running,), name="tailrace-compaction", daemon=True
            )
            running.thread.start()
            return

    def _run(self, running: _RunningStep) -> None:
        table = running.table
        began = self._clock.monotonic()
        try:
            work = _StepWork(table.store, table.schema, table.secret)
            description = f"tailrace mirror: compaction of {running.step.why}"
            (running.written,) = self._jobs.run(work, [running.step], description)
        except BaseException as error:  # noqa: BLE001 - raised in the mirror's own thread
            running.error = error
        running.took_s = self._clock.monotonic() - began
