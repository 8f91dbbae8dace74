"""``tailrace replicate``: one bucket's changes applied to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import (
    dialect_option,
    end_option,
    remembered,
    retry_option,
    start_option,
    state_option,
    tap_name_option,
    tls_from,
    tls_options,
)
from .common import URL, note, progress, url_argument
from .common import command as make_command
from .http_options import http_options, reading_over_http


@make_command(
    "replicate",
    example="""
tailrace replicate couchbase://127.0.0.1 couchbase://127.0.0.1:11310 --to now
tailrace replicate couchbase://old.example/default couchbase://127.0.0.1/default --dialect tap --tap-name copy
tailrace replicate couchbase://127.0.0.1 couchbase://127.0.0.1:11310 --state positions.json
""",
)
@url_argument
@click.argument("target", type=URL)
@start_option()
@end_option()
@dialect_option
@tap_name_option
@state_option("Save positions here once the target has the changes on disk, and resume from them.")
@retry_option
@tls_options
@http_options
def command(
    url: ConnectionString,
    target: ConnectionString,
    start: str,
    end: str,
    dialect: str,
    tap_name: str | None,
    state: Path | None,
    retry_for: float,
    **options: Any,
) -> None:
    """Apply the changes of one bucket to another, with their metadata.

    Documents arrive with their CAS, revision, flags and expiry. A document that is newer in TARGET stays.
    When the source takes changes back, the vbucket is compared and made equal: documents that only TARGET
    has there are deleted. The older dialects carry only the default collection, upr-a no xattrs, and tap has
    no positions: use --tap-name instead of --state.
    """
    from ..client.replicate import Replicator

    given: dict[str, Any] = {"dialect": dialect, "state": state, "retry_for_s": retry_for}
    if url.tls or target.tls:
        given["tls"] = tls_from(options)
    if tap_name is not None:
        given["tap_settings"] = remembered(tap_name, dialect)
    with (
        reading_over_http(options, "replicate", url.bucket) as watched,
        Replicator(url, target, **given, **watched) as replicator,
    ):
        with progress("replicating", replicator.total() if end == "now" else None) as bar:
            for count in replicator.run(start, end):
                bar.advance(count)
        done = replicator.done
        note(f"{done.changes} changes, {done.rollbacks} vbuckets made equal after a rollback")
