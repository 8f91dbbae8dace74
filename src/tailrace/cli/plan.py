"""``tailrace plan``: what a restart of a mirror would do."""

from __future__ import annotations

import json
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import open_kv, tls_from, tls_options
from .common import TABLE, json_option, note, url_argument
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option


@make_command("plan", example="tailrace plan couchbase://127.0.0.1/default ./people")
@url_argument
@click.argument("table", type=TABLE)
@storage_option
@json_option("Write one JSON object per vbucket.")
@tls_options
def command(
    url: ConnectionString, table: str, storage_options: tuple[str, ...], as_json: bool, **tls: Any
) -> None:
    """Show what a restart of a mirror would do.

    Prints one line per vbucket: resume, backfill, roll back to N, or start over. Changes nothing, and does
    not start Spark.
    """
    from ..client.blocking import connect_sync
    from ..spark.rounds.forecast import forecast, summary
    from ..spark.rounds.same_bucket import check_same_bucket
    from ..table.opening import TableOptions, open_table

    mirror = open_table(table, TableOptions(parse_storage_options(storage_options)))
    with connect_sync(url, purpose="plan", tls=tls_from(tls) if url.tls else None) as source:
        check_same_bucket(mirror, source.bucket_uuid)
        logs, high = source.failover_logs(), source.high_seqnos()
    with open_kv(url, tls) as client:
        stats = dict(client.stats("vbucket-seqno"))
    purged = {vbucket: int(stats.get(f"vb_{vbucket}:purge_seqno", 0)) for vbucket in logs}
    plans = forecast(mirror, logs, high, purged)
    for plan in plans:
        click.echo(json.dumps(plan.to_json()) if as_json else str(plan))
    note(f"{summary(plans)}; the table is at version {mirror.version}")
