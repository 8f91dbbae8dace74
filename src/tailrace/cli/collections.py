"""``tailrace collections``: scopes and collections of a bucket."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from ..errors import StatusError
from .client import explained, open_kv, tls_options
from .common import JsonLines, json_option, url_argument
from .common import command as make_command


@make_command(
    "collections",
    example="""
tailrace collections couchbase://127.0.0.1
tailrace collections couchbase://127.0.0.1 --create shop.orders --create shop.customers
tailrace collections couchbase://127.0.0.1 --drop shop.orders
""",
)
@url_argument
@click.option(
    "--create", multiple=True, metavar="SCOPE.NAME", help="Create a collection, and its scope if need be."
)
@click.option(
    "--drop", multiple=True, metavar="SCOPE.NAME", help="Drop a collection, or without .NAME a whole scope."
)
@json_option("Write the manifest as JSON.")
@tls_options
def command(
    url: ConnectionString, create: tuple[str, ...], drop: tuple[str, ...], as_json: bool, **tls: Any
) -> None:
    """Show, create and drop scopes and collections."""
    from ..client.manifest import with_changes

    with open_kv(url, tls) as client:
        manifest = client.manifest()
        if create or drop:
            try:
                client.set_manifest(with_changes(manifest, create, drop))
            except StatusError as error:
                raise explained(error, "see which names a collection may have") from error
            manifest = client.manifest()
    if as_json:
        JsonLines().write(manifest)
        return
    for scope in manifest.get("scopes", []):
        for collection in scope.get("collections", []):
            click.echo(f"{scope['name']}.{collection['name']}  (id 0x{collection['uid']})")
