"""``tailrace collections``: scopes and collections of a bucket."""

from __future__ import annotations

from typing import Any

import click

from ..connstr import ConnectionString
from ..errors import StatusError, UsageError
from .client_options import explained, open_kv, tls_options
from .common import JsonLines, json_option, url_argument
from .common import command as make_command

_MAX_TTL_S = (1 << 31) - 1


@make_command(
    "collections",
    example="""
tailrace collections couchbase://127.0.0.1
tailrace collections couchbase://127.0.0.1 --create shop.orders --create shop.customers
tailrace collections couchbase://127.0.0.1 --modify shop.orders --max-ttl 3600
tailrace collections couchbase://127.0.0.1 --drop shop.orders
""",
)
@url_argument
@click.option(
    "--create", multiple=True, metavar="SCOPE.NAME", help="Create a collection, and its scope if missing."
)
@click.option(
    "--modify", multiple=True, metavar="SCOPE.NAME", help="Change a collection's --max-ttl or --history."
)
@click.option(
    "--drop", multiple=True, metavar="SCOPE.NAME", help="Drop a collection, or without .NAME a whole scope."
)
@click.option(
    "--max-ttl",
    metavar="SECONDS",
    help="With --create or --modify: documents expire after this time at the latest; 0 is never, 'default' "
    "the bucket's value.",
)
@click.option(
    "--history/--no-history",
    default=None,
    help="With --create or --modify: whether to keep every version, if the bucket keeps a history.  "
    "[default: yes]",
)
@json_option("Write the manifest as JSON.")
@tls_options
def command(
    url: ConnectionString,
    create: tuple[str, ...],
    modify: tuple[str, ...],
    drop: tuple[str, ...],
    max_ttl: str | None,
    history: bool | None,
    as_json: bool,
    **tls: Any,
) -> None:
    """Show, create, modify and drop scopes and collections."""
    from ..client.manifest import with_changes

    properties = _properties(max_ttl, history)
    if properties and not create and not modify:
        raise UsageError("--max-ttl and --history apply to collections that --create or --modify names")
    if modify and not properties:
        raise UsageError("--modify needs --max-ttl, --history or --no-history")
    with open_kv(url, tls) as client:
        manifest = client.manifest()
        if create or drop or modify:
            try:
                client.set_manifest(with_changes(manifest, create, drop, modify, properties))
            except StatusError as error:
                raise explained(error, "see which names a collection may have") from error
            manifest = client.manifest()
    if as_json:
        JsonLines().write(manifest)
        return
    for scope in manifest.get("scopes", []):
        for collection in scope.get("collections", []):
            click.echo(f"{scope['name']}.{collection['name']}  ({', '.join(_described(collection))})")


def _properties(max_ttl: str | None, history: bool | None) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    if max_ttl is not None:
        is_number = max_ttl.isascii() and max_ttl.isdigit() and len(max_ttl) < 11
        if max_ttl != "default" and not (is_number and int(max_ttl) <= _MAX_TTL_S):
            raise UsageError(f"--max-ttl {max_ttl!r} is neither 'default' nor seconds from 0 to {_MAX_TTL_S}")
        properties["maxTTL"] = None if max_ttl == "default" else int(max_ttl)
    if history is not None:
        properties["history"] = history
    return properties


def _described(collection: dict[str, Any]) -> list[str]:
    about = [f"id 0x{collection['uid']}"]
    if "maxTTL" in collection:
        seconds = collection["maxTTL"]
        about.append(f"expires after {seconds} s" if seconds else "never expires")
    if "history" in collection:
        about.append("with history" if collection["history"] else "no history")
    return about
