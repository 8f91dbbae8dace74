"""``tailrace wait``: read your writes."""

from __future__ import annotations

import click

from .common import DURATION, TABLE, note
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option


@make_command("wait", example="tailrace wait ./people --token 7:187349:12 --timeout 10s")
@click.argument("table", type=TABLE)
@click.option(
    "--token",
    "tokens",
    multiple=True,
    required=True,
    metavar="VB:UUID:SEQNO",
    help="A mutation token, as SDKs return them; may be repeated.",
)
@click.option("--timeout", type=DURATION, default="60s", show_default=True, help="How long to wait.")
@storage_option
def command(table: str, tokens: tuple[str, ...], timeout: float, storage_options: tuple[str, ...]) -> None:
    """Wait until a table holds the given changes.

    Exit code 0 when it does, 1 when the bucket has taken one of them back or the time is up.
    """
    from ..table.mutation_tokens import wait_for

    version = wait_for(table, tokens, timeout, storage_options=parse_storage_options(storage_options))
    note(f"the table holds them; it is at version {version}")
