"""``tailrace search``: searches a full-text index."""

from __future__ import annotations

from pathlib import Path

import click

from .common import DIRECTORY, json_option
from .common import command as make_command


@make_command(
    "search",
    example="""
tailrace search ./people.index ada
tailrace search ./people.index 'doc.city:paris AND "difference engine"' --json
""",
)
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.argument("query")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Show this many at most."
)
@json_option("Write one JSON object per line.")
def command(directory: Path, query: str, limit: int, as_json: bool) -> None:
    """Search the full-text index of a bucket.

    Prints scores and keys of the documents that match, best first; exit code 1 if there are none. A query
    has words, "phrases", AND, OR and -not; doc.member:word searches a member of JSON documents.
    """
    from ..client.fulltext import FullText
    from ..client.jsonlines import key_member

    hits = FullText(directory).search(query, limit=limit)
    for hit in hits:
        if as_json:
            click.echo(
                f'{{{key_member(hit.key)},"score":{hit.score:.4f},"vbucket":{hit.vbucket},'
                f'"collection_id":{hit.collection_id},"seqno":{hit.seqno}}}'
            )
        else:
            click.echo(f"{hit.score:8.4f}  {hit.key.decode('utf-8', 'backslashreplace')}")
    if not hits:
        click.get_current_context().exit(1)
