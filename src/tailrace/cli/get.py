"""``tailrace get``: one document."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import collection_option, key_argument, no_such_document, open_kv, tls_options
from .common import command as make_command
from .common import json_option, url_argument


@make_command(
    "get",
    example="""
tailrace get couchbase://127.0.0.1 user::1
tailrace get couchbase://127.0.0.1/default user::1 --json
""",
)
@url_argument
@key_argument
@collection_option
@json_option("Write key, value and metadata as one JSON object.")
@tls_options
def command(url: ConnectionString, key: bytes, collection: str, as_json: bool, **tls: Any) -> None:
    """Show a document.

    Writes the value as it is stored, followed by a line feed only on a terminal. Exit code 1 if there is no
    such document.
    """
    with open_kv(url, tls) as client:
        document = client.get(key, collection=collection)
        if document is None:
            raise no_such_document(key)
        if as_json:
            from ..client.jsonlines import document_as_json

            meta = client.get_meta(key, collection=collection)
            click.echo(document_as_json(key, document, meta, client.vbucket_of(key)).encode())
            return
    sys.stdout.buffer.write(document.value)
    if sys.stdout.isatty():
        sys.stdout.buffer.write(b"\n")
