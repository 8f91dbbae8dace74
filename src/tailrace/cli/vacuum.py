"""``tailrace vacuum``: delete the files of a mirror's table that nobody needs any more."""

from __future__ import annotations

import click

from .common import INTEGER, Integer, counted, note
from .common import command as make_command


@make_command(
    "vacuum",
    example="""
tailrace vacuum ./people
tailrace vacuum ./people --keep-hours 24 --keep-versions 20
""",
)
@click.argument("table")
@click.option(
    "--keep-hours",
    type=Integer(1),
    default=168,
    show_default=True,
    help="Keep every file that was needed within this time.",
)
@click.option(
    "--keep-versions",
    type=INTEGER,
    default=100,
    show_default=True,
    help="Keep the newest versions of the mirror, whatever their age.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go, a path a line.")
def command(table: str, keep_hours: int, keep_versions: int, dry_run: bool) -> None:
    """Delete the files of a mirror's table that nobody needs any more.

    Old versions of the table are the way back when the bucket takes changes back. A rollback to a state older
    than all versions that are kept reads those vbuckets again from the beginning, which is slower and as
    right. Works while the mirror runs; files that a killed mirror left behind go too.
    """
    from ..spark.table import MirrorTable

    gone = MirrorTable.open(table).vacuum(keep_hours=keep_hours, keep_versions=keep_versions, dry_run=dry_run)
    if dry_run:
        for path in gone:
            click.echo(path)
    note(f"{counted(len(gone), 'file')} {'would go' if dry_run else 'deleted'}")
