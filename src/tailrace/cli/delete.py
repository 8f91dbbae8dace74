"""``tailrace delete``: deletes one document."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from ..errors import TailraceError
from .client import collection_option, open_kv, tls_options
from .common import CAS, url_argument
from .common import command as make_command


@make_command("delete", example="tailrace delete couchbase://127.0.0.1 user::1")
@url_argument
@click.argument("key")
@collection_option
@click.option("--cas", type=CAS, default=0, help="Only if the document still has this CAS.")
@tls_options
def command(url: ConnectionString, key: str, collection: str, cas: int, **tls: Any) -> None:
    """Delete a document.

    Exit code 1 if there is no such document.
    """
    with open_kv(url, tls) as client:
        gone = client.delete(key, collection=collection, cas=cas)
    if gone is None:
        raise TailraceError(f"there is no document {key!r}, check the key and the bucket")
    click.echo(f"deleted in vbucket {gone.vbucket}, seqno {gone.seqno}")
