"""``tailrace invalidate``: removes documents from a cache when they change in a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import end_option, retry_option, start_option, state_option, tls_from, tls_options
from .common import command as make_command
from .common import run, url_argument
from .http_options import http_options, reading_over_http


@make_command(
    "invalidate",
    example="""
tailrace invalidate couchbase://127.0.0.1/default redis://127.0.0.1:6379/0 --state positions.json
tailrace invalidate couchbase://127.0.0.1 memcached://127.0.0.1:11211 --prefix doc: --from now
""",
)
@url_argument
@click.argument("cache", metavar="CACHE")
@click.option("--prefix", default="", help="Prefix of document keys in the cache.")
@start_option()
@end_option()
@state_option("Save positions here once the cache has removed the keys, and resume from them.")
@retry_option
@tls_options
@http_options
def command(
    url: ConnectionString,
    cache: str,
    prefix: str,
    start: str,
    end: str,
    state: Path | None,
    retry_for: float,
    **options: Any,
) -> None:
    """Remove documents from a cache when they change in a bucket.

    CACHE is redis://[[user]:password@]host[:port][/db] or memcached://host[:port]. Keys of documents that
    were changed, deleted, expired or rolled back are removed. After a flush, a dropped collection, or a
    rollback too long to remember, everything is removed: with Redis and a --prefix every key with that
    prefix, otherwise the whole database.
    """
    from ..client.invalidate import cache_at, follow

    with reading_over_http(options, "invalidate", url.bucket) as watched:
        taken = run(
            follow(
                url,
                cache_at(cache, prefix=prefix, retry_for_s=retry_for),
                start=start,
                end=end,
                purpose="invalidate",
                state=state,
                retry_for_s=retry_for,
                tls=tls_from(options) if url.tls else None,
                **watched,
            )
        )
    click.echo(f"{taken} changes invalidated", err=True)
