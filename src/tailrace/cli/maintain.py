"""``tailrace maintain``: compact and clean a mirror's table, once."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from .common import TABLE, Integer, counted, json_option, note, progress
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option, undo_options


@make_command(
    "maintain",
    example="""
tailrace maintain ./people
tailrace maintain ./people --dry-run --undo 1h
""",
)
@click.argument("table", type=TABLE)
@undo_options
@click.option("--dry-run", is_flag=True, help="Only report what is due.")
@click.option("--no-compact", is_flag=True, help="Only clean up.")
@click.option("--force", is_flag=True, help="Compact even if a mirror seems to be running; it is stopped.")
@storage_option
@json_option("Write what was done, or is due, as one JSON object.")
@click.option("--keep-hours", type=Integer(1), hidden=True)  # what `vacuum` called --undo
def command(
    table: str,
    undo: float | None,
    undo_size: int | None,
    dry_run: bool,
    no_compact: bool,
    force: bool,
    storage_options: tuple[str, ...],
    as_json: bool,
    keep_hours: int | None,
) -> None:
    """Compact and clean a mirror's table, once.

    A mirror does this by itself; the command is for tables whose mirror runs with --no-maintenance, or not
    at all. A rollback returns to an earlier version: one that goes back further than the oldest of them
    reads its vbuckets again from the beginning. Does not start Spark.
    """
    from ..spark.rounds.maintenance_once import maintain_once
    from ..table.opening import TableOptions, open_table

    if keep_hours is not None and undo is None:
        undo = keep_hours * 3600.0
    how = TableOptions(parse_storage_options(storage_options), undo, undo_size)
    with progress("opening the table") as bar:
        held = open_table(table, how)
        done = maintain_once(
            held, dry_run=dry_run, compact=not no_compact, force=force, say=note, on_step=bar.describe
        )
    if as_json:
        click.echo(json.dumps({**asdict(done.cleaned), "steps": done.steps, "dry_run": dry_run}))
        return
    for step in done.steps:
        click.echo(f"{'would compact' if dry_run else 'compacted'} {step}")
    cleaned = done.cleaned
    verb = "would go" if dry_run else "deleted"
    note(
        f"{counted(cleaned.files_removed, 'file')} ({cleaned.bytes_removed:,} bytes) and "
        f"{counted(cleaned.log_files_removed, 'file')} of the log {verb}; "
        f"{counted(cleaned.versions_kept, 'version')} to go back to"
    )
