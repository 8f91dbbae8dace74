"""``tailrace delete``: deletes one document."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import (
    collection_option,
    key_argument,
    no_such_document,
    open_kv,
    tell_written,
    tls_options,
)
from .common import CAS, json_option, url_argument
from .common import command as make_command


@make_command("delete", example="tailrace delete couchbase://127.0.0.1 user::1")
@url_argument
@key_argument
@collection_option
@click.option("--cas", type=CAS, default=0, help="Delete only if the document still has this CAS; 0 is any.")
@json_option("Write vbucket, seqno and CAS of the deletion as JSON.")
@tls_options
def command(url: ConnectionString, key: bytes, collection: str, cas: int, as_json: bool, **tls: Any) -> None:
    """Delete a document.

    Exit code 1 if there is no such document.
    """
    with open_kv(url, tls) as client:
        gone = client.delete(key, collection=collection, cas=cas)
    if gone is None:
        raise no_such_document(key)
    if as_json:
        tell_written(key, gone)
    else:
        click.echo(f"deleted in vbucket {gone.vbucket}, seqno {gone.seqno}")
