"""Maintenance of a table without its mirror: compact now, clean now, or say what is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ...clock import SYSTEM, Clock
from ...table.compaction import finish_step
from ...table.contract import MaintenanceReport, Table
from .housekeeping import due_step

__all__ = ["MaintenanceDone", "maintain_once"]

_RUNS_MS = 120_000
"""A table whose last commit is younger than this may have a running mirror."""
_STEPS = 1000


@dataclass
class MaintenanceDone:
    """What was done, or is due."""

    cleaned: MaintenanceReport = field(default_factory=MaintenanceReport)
    steps: list[str] = field(default_factory=list)


def maintain_once(
    table: Table,
    *,
    dry_run: bool,
    compact: bool,
    force: bool,
    say: Callable[[str], None],
    on_step: Callable[[str], None] = lambda _step: None,
    clock: Clock = SYSTEM,
) -> MaintenanceDone:
    """Compact while a step is due, then clean. ``on_step`` is called with what is being done."""
    done = MaintenanceDone()
    if compact and not dry_run and not force:
        age_ms = clock.time_ns() // 1_000_000 - table.current.timestamp_ms
        if table.current.run and age_ms < _RUNS_MS:
            say("a mirror wrote to the table a moment ago, and compacts it by itself; only cleaning")
            compact = False
    if compact and dry_run:
        step = due_step(table)
        if step is not None:
            done.steps.append(step.why)
    elif compact and due_step(table) is not None:
        table.claim()
        while len(done.steps) < _STEPS and (step := due_step(table)) is not None:
            on_step(f"step {len(done.steps) + 1}: compacting {step.why}")
            written = step.run(table.store, table.schema, table.secret)
            commit = finish_step(table, step, written)
            if commit is None:
                break
            table.commit(commit)
            done.steps.append(step.why)
    on_step("cleaning")
    done.cleaned = rest = table.maintain(dry_run=dry_run, force=True)
    while rest.more and not dry_run:
        rest = table.maintain(force=True)
        done.cleaned = replace(
            rest,
            checkpoint=done.cleaned.checkpoint,
            versions_dropped=done.cleaned.versions_dropped + rest.versions_dropped,
            log_files_removed=done.cleaned.log_files_removed + rest.log_files_removed,
            files_removed=done.cleaned.files_removed + rest.files_removed,
            bytes_removed=done.cleaned.bytes_removed + rest.bytes_removed,
        )
    return done
