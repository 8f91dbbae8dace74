"""``tailrace export``: live rows for engines without deletion vectors."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from .common import INTEGER, TABLE, TablePath, counted, json_option, note
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option


@make_command(
    "export",
    example="""
tailrace export ./people ./people-plain
tailrace export ./people ./people-parquet --format parquet
""",
)
@click.argument("table", type=TABLE)
@click.argument("path", type=TablePath("path of the export"))
@click.option(
    "--format",
    "form",
    type=click.Choice(["delta", "parquet"]),
    default="delta",
    show_default=True,
    help="Write a Delta table of reader version 1, or a folder of Parquet files.",
)
@click.option("--version", type=INTEGER, help="Version of the table to write.  [default: the newest]")
@json_option("Write what was exported as JSON.")
@storage_option
def command(
    table: str, path: str, form: str, version: int | None, as_json: bool, storage_options: tuple[str, ...]
) -> None:
    """Write the live rows of a table as a plain table that every engine can read.

    A second run replaces what the first one wrote: a Delta table in one commit, a folder of Parquet files by
    a new folder. Replaced files of a Delta table are deleted after a week, or after that table's own
    delta.deletedFileRetentionDuration.
    """
    from ..table.exporting import export_table

    report = export_table(
        table, path, format=form, version=version, storage_options=parse_storage_options(storage_options)
    )
    if as_json:
        click.echo(json.dumps(asdict(report)))
    note(f"{counted(report.rows, 'row')} of version {report.version} written to {path}")
