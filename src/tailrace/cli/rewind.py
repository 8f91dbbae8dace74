"""``tailrace rewind``: a vbucket forgets its newest changes, as after a failover with data loss."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from ..errors import StatusError, UsageError
from ..units import parse_vbuckets
from .client_options import explained, open_kv, tls_options
from .common import INTEGER, Integer, JsonLines, json_option, url_argument
from .common import command as make_command


@make_command(
    "rewind",
    example="""
tailrace rewind couchbase://127.0.0.1 --vbucket 7 --to-seqno 100
tailrace rewind couchbase://127.0.0.1 --vbucket 0-7 --vbucket 12 --to-seqno 0
tailrace rewind couchbase://127.0.0.1 --vbucket all --lose 10
""",
)
@url_argument
@click.option(
    "--vbucket",
    "vbuckets",
    multiple=True,
    required=True,
    metavar="V",
    help="Which vbuckets: 7, 0-7 or all; may be repeated.",
)
@click.option("--to-seqno", type=INTEGER, help="Forget everything after this seqno.")
@click.option("--lose", type=Integer(1), metavar="K", help="Forget the last K changes of each vbucket.")
@json_option("Write the seqno that each vbucket now ends at, as JSON.")
@tls_options
def command(
    url: ConnectionString,
    vbuckets: tuple[str, ...],
    to_seqno: int | None,
    lose: int | None,
    as_json: bool,
    **tls: Any,
) -> None:
    """Forget the newest changes of vbuckets, as a failover with data loss does.

    Older versions come back with their cas, rev and seqno, and a new branch of history begins. Either all
    given vbuckets are rewound or none, and the result is on disk when the command returns. Exit code 1 if
    the history no longer reaches back that far.
    """
    if (to_seqno is None) == (lose is None):
        raise UsageError("give either --to-seqno N or --lose K")
    chosen = _chosen(vbuckets)
    with open_kv(url, tls) as client:
        try:
            ends = client.rewind(chosen, to_seqno=to_seqno, lose=lose)
        except StatusError as error:
            raise explained(error, "choose a seqno that this vbucket can go back to") from error
    if as_json:
        JsonLines().write({str(vbucket): ends[vbucket] for vbucket in sorted(ends)})
        return
    for vbucket in sorted(ends):
        click.echo(f"vbucket {vbucket} now ends at seqno {ends[vbucket]}")


def _chosen(vbuckets: tuple[str, ...]) -> list[int] | None:
    chosen: set[int] = set()
    for text in vbuckets:
        parsed = parse_vbuckets(text)
        if parsed is None:
            return None
        chosen.update(parsed)
    return sorted(chosen)
