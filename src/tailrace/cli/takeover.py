"""``tailrace takeover``: vbuckets move from one node to another."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from ..units import parse_vbuckets
from .client_options import tls_from, tls_options
from .common import URL, JsonLines, json_option
from .common import command as make_command


@make_command(
    "takeover",
    example="""
tailrace takeover couchbase://127.0.0.1 couchbase://127.0.0.1:11310 --vbucket 0-31
tailrace takeover couchbase://127.0.0.1 couchbase://127.0.0.1:11310 --vbucket 7 --dialect tap
""",
)
@click.argument("source", type=URL)
@click.argument("target", type=URL)
@click.option("--vbucket", "vbuckets", metavar="V", required=True, help="Move these: 7, 0-7 or 0,3,8-15.")
@click.option(
    "--dialect",
    type=click.Choice(["dcp", "tap"]),
    default="dcp",
    show_default=True,
    help="Protocol to take over with.",
)
@tls_options
@json_option("Write what was moved as JSON.")
def command(
    source: ConnectionString, target: ConnectionString, vbuckets: str, dialect: str, as_json: bool, **tls: Any
) -> None:
    """Move vbuckets from one node to another while clients read and write.

    For nodes without a coordinator; in a cluster use 'tailrace cluster rebalance'. No acknowledged write is
    lost, a vbucket is never active on both nodes, and clients of either node are told where it is. If the
    command fails half-way, run it again: it continues. With dcp, readers continue where they are. With tap,
    which has no seqnos and no collections, the vbucket begins a new history, and readers roll back to its
    beginning. With couchbases:// both this command and the target connect to the source over TLS; the target
    is told which certificates to trust.
    """
    from ..cluster.takeover import take_over

    moved = take_over(source, target, parse_vbuckets(vbuckets) or [], dialect=dialect, tls=tls_from(tls))
    if as_json:
        JsonLines().write({"vbuckets": moved.vbuckets, "map": moved.rev})
    else:
        count = len(moved.vbuckets)
        click.echo(f"{count} vbucket{'s' * (count != 1)} moved to {target.addresses[0]}, map {moved.rev}")
