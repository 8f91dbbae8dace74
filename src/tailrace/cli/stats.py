"""``tailrace stats``: the server's statistics."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from ..errors import StatusError
from .client_options import explained, open_kv, tls_options
from .common import JsonLines, json_option, printable, url_argument
from .common import command as make_command


@make_command(
    "stats",
    example="""
tailrace stats couchbase://127.0.0.1
tailrace stats couchbase://127.0.0.1 'vbucket-seqno 7'
tailrace stats couchbase://127.0.0.1 dcp --json
""",
)
@url_argument
@click.argument("group", default="")
@json_option("Write one JSON object, of names and texts.")
@tls_options
def command(url: ConnectionString, group: str, as_json: bool, **tls: Any) -> None:
    """Show the server's statistics.

    GROUP is one of the server's groups, such as vbucket-seqno, failovers or dcp.
    """
    with open_kv(url, tls) as client:
        try:
            figures = client.stats(group)
        except StatusError as error:
            raise explained(error, f"the server may not know a group {group!r}") from error
    if as_json:
        JsonLines().write(figures)
        return
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        click.echo(f"{printable(name):{width}}  {printable(value)}")
