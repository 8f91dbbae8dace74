"""``tailrace set``: stores one document."""

from __future__ import annotations

from typing import Any

import click

from ..clock import SYSTEM
from ..connstr import ConnectionString
from ..errors import ConnectError, StatusError, TailraceError
from ..wire.codes import Datatype, Status
from ..wire.fields import is_json
from .client_options import collection_option, explained, key_argument, open_kv, tell_written, tls_options
from .common import CAS, DURATION, Integer, json_option, standard_input, url_argument
from .common import command as make_command

_SAFE_BYTES = 20 << 20
"""Every server accepts frames of this size; it disconnects a client that announces one above its limit."""
_SMALLER = (
    "store less, or raise the limits of a node of your own: serve --set max_value=SIZE --set max_frame=SIZE"
)


@make_command(
    "set",
    example="""
tailrace set couchbase://127.0.0.1 user::1 '{"name":"Ada"}'
tailrace set couchbase://127.0.0.1 photo::1 < photo.jpg
tailrace set couchbase://127.0.0.1 session::9 '{}' --expiry 30m
""",
)
@url_argument
@key_argument
@click.argument("value", required=False)
@collection_option
@click.option("--expiry", type=DURATION, help="Delete the document after this time.")
@click.option("--flags", type=Integer(0, 0xFFFF_FFFF), default=0, help="A number to store with the document.")
@click.option("--cas", type=CAS, default=0, help="Store only if the document still has this CAS; 0 is any.")
@json_option("Write the new CAS, vbucket and seqno as JSON.")
@tls_options
def command(
    url: ConnectionString,
    key: bytes,
    value: str | None,
    collection: str,
    expiry: float | None,
    flags: int,
    cas: int,
    as_json: bool,
    **tls: Any,
) -> None:
    """Store a document.

    Without VALUE, the value is read from stdin, byte for byte. Valid JSON is stored as JSON.
    """
    data = standard_input().read() if value is None else value.encode("utf-8", "surrogateescape")
    expires_at_s = 0 if expiry is None else max(1, int(SYSTEM.time_ns() / 1e9 + expiry))
    with open_kv(url, tls) as client:
        try:
            stored = client.set(
                key,
                data,
                collection=collection,
                flags=flags,
                expiry=expires_at_s,
                cas=cas,
                datatype=int(Datatype.JSON) if is_json(data) else 0,
            )
        except StatusError as error:
            if error.status != Status.E2BIG:
                raise
            raise explained(error, _SMALLER) from None
        except ConnectError as error:
            if len(data) <= _SAFE_BYTES:
                raise
            trouble = f"the server closed the connection at a value of {len(data)} bytes ({error})"
            raise TailraceError(f"{trouble}, {_SMALLER}") from None
    if as_json:
        tell_written(key, stored)
    else:
        click.echo(f"stored in vbucket {stored.vbucket}, seqno {stored.seqno}, cas {stored.cas}")
