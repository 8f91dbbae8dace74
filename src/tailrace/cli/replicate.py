"""``tailrace replicate``: one bucket's changes applied to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..connstr import ConnectionString
from .client import tls_from, tls_options
from .common import DURATION, URL, note, progress, url_argument
from .common import command as make_command


@make_command(
    "replicate",
    example="""
tailrace replicate couchbase://127.0.0.1 couchbase://127.0.0.1:11310 --to now
tailrace replicate couchbase://old.example/default couchbase://127.0.0.1/default --dialect tap
tailrace replicate couchbase://127.0.0.1 couchbase://127.0.0.1:11310 --state positions.json
""",
)
@url_argument
@click.argument("target", type=URL)
@click.option(
    "--from",
    "start",
    type=click.Choice(["beginning", "now"]),
    default="beginning",
    show_default=True,
    help="Where to start. A state file wins.",
)
@click.option(
    "--to",
    "end",
    type=click.Choice(["now", "forever"]),
    default="forever",
    show_default=True,
    help="Where to end: with what is there at the start, or never.",
)
@click.option(
    "--dialect",
    type=click.Choice(["dcp", "upr-a", "upr-b", "tap"]),
    default="dcp",
    show_default=True,
    help="Protocol to read with.",
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save positions here once the target has the changes on disk, and resume from them.",
)
@click.option(
    "--retry-for",
    type=DURATION,
    default=60.0,
    help="How long to take up a lost connection again.  [default: 60s]",
)
@tls_options
def command(
    url: ConnectionString,
    target: ConnectionString,
    start: str,
    end: str,
    dialect: str,
    state: Path | None,
    retry_for: float,
    **options: Any,
) -> None:
    """Apply the changes of one bucket to another, with their metadata.

    Documents arrive with their CAS, revision, flags and expiry. What TARGET has of its own stays where it is
    newer. When the source takes changes back, the vbucket is compared and made equal.
    """
    from ..client.replicate import Replicator

    tls = tls_from(options) if url.tls or target.tls else None
    with Replicator(url, target, tls=tls, dialect=dialect, state=state, retry_for_s=retry_for) as replicator:
        with progress("replicating", replicator.total() if end == "now" else None) as bar:
            for count in replicator.run(start, end):
                bar.advance(count)
        done = replicator.done
        note(f"{done.changes} changes, {done.rollbacks} vbuckets made equal after a rollback")
