"""``tailrace index``: keeps a full-text index of a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import end_option, retry_option, tls_from, tls_options
from .common import DIRECTORY, run, url_argument
from .common import command as make_command
from .http_options import http_options, reading_over_http


@make_command(
    "index",
    example="""
tailrace index couchbase://127.0.0.1/default ./people.index
tailrace index couchbase://127.0.0.1 ./people.index --to now && tailrace search ./people.index ada
""",
)
@url_argument
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@end_option()
@retry_option
@tls_options
@http_options
def command(url: ConnectionString, directory: Path, end: str, retry_for: float, **options: Any) -> None:
    """Keep a full-text index of a bucket up to date.

    The index holds the text and keys of all live documents. Positions are committed with the documents, so
    the command continues exactly where it stopped, whatever ended it. Needs an extra: pip install
    "tailrace[index]".
    """
    from ..client.fulltext import FullText, follow

    index = FullText(directory, bucket=url.bucket)
    try:
        with reading_over_http(options, "index", url.bucket) as watched:
            taken = run(
                follow(
                    url,
                    index,
                    end=end,
                    purpose="index",
                    retry_for_s=retry_for,
                    tls=tls_from(options) if url.tls else None,
                    **watched,
                )
            )
    finally:
        index.close()
    click.echo(f"{taken} changes indexed", err=True)
