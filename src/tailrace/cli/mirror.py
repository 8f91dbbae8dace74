"""``tailrace mirror``: a Delta table that stays equal to a bucket."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..clock import SYSTEM
from ..connstr import ConnectionString
from ..files import atomic_write
from .client import retry_option, tls_options
from .common import DURATION, Integer, counted, json_option, note, progress, url_argument
from .common import command as make_command
from .spark_options import (
    collection_paths,
    explained_query_error,
    java_may_be_gone,
    open_spark,
    source_options_of,
    spark_options,
)


@make_command(
    "mirror",
    example="""
tailrace mirror couchbase://127.0.0.1/default ./people --once
tailrace mirror couchbase://127.0.0.1/shop ./shop --collection eu.orders --collection eu.users
""",
)
@url_argument
@click.argument("table")
@click.option("--once", is_flag=True, help="Stop when it has caught up with the moment of the start.")
@click.option(
    "--collection",
    "collections",
    multiple=True,
    metavar="SCOPE.NAME[=PATH]",
    help="Mirror this collection, into TABLE/SCOPE.NAME or PATH; may be repeated.",
)
@click.option("--keep-deletes", is_flag=True, help="Keep deleted documents as rows that are marked as such.")
@click.option("--changes", metavar="PATH", help="Append every change to this Delta table too.")
@click.option("--trigger", type=DURATION, help="Time between two commits.  [default: as fast as it goes]")
@click.option("--max-rows", type=Integer(1), help="The most changes of a batch.")
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False),
    help="Write figures for Prometheus here after each batch (node_exporter's textfile collector).",
)
@click.option(
    "--work-dir", type=click.Path(file_okay=False), help="For this run's checkpoint, staged rows and spool."
)
@retry_option
@spark_options
@json_option("Write one JSON object per commit.")
@tls_options
def command(
    url: ConnectionString,
    table: str,
    once: bool,
    collections: tuple[str, ...],
    keep_deletes: bool,
    changes: str | None,
    trigger: float | None,
    max_rows: int | None,
    metrics_file: str | None,
    work_dir: str | None,
    retry_for: float,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
    **tls: Any,
) -> None:
    """Keep a table in step with the bucket, on Spark.

    TABLE is a Delta table that any engine reads: one row per live document. The position of every vbucket is
    committed together with the rows, so it can be killed and started again at any moment. When the bucket
    takes changes back (a failover that lost data), the table takes them back too.
    """
    more = {"retryFor": f"{retry_for:g}"}
    if max_rows:
        more["maxOffsetsPerTrigger"] = str(max_rows)
    with open_spark(master, conf, name="tailrace mirror") as spark, progress("mirroring", None) as bar:
        from ..spark.api import prepare_mirror
        from ..spark.mirroring import Applied
        from ..spark.source.lag import Lag, LagListener, prometheus_text

        total = rollbacks = 0

        def applied(what: Applied) -> None:
            nonlocal total, rollbacks
            total += what.changes
            rollbacks += len(what.rolled_back)
            bar.advance(what.changes)
            if what.rolled_back:
                note(f"the bucket took changes back: rolled back {counted(len(what.rolled_back), 'vbucket')}")
            if as_json and (what.changes or what.rolled_back):
                click.echo(
                    json.dumps(
                        {
                            "batch": what.batch,
                            "changes": what.changes,
                            "rolled_back": list(what.rolled_back),
                            "versions": list(what.versions),
                        }
                    )
                )

        def reported(lag: Lag) -> None:
            left = f", {lag.eta_s:.0f} s left" if lag.eta_s else ""
            bar.describe(f"mirroring, {lag.rows_per_second:,.0f}/s, {lag.changes:,} behind{left}")
            if metrics_file is not None:
                figures = {
                    "tailrace_mirror_changes_total": ("counter", "Changes applied in this run.", total),
                    "tailrace_mirror_rollbacks_total": ("counter", "VBuckets that went back.", rollbacks),
                    "tailrace_mirror_lag_changes": ("gauge", "Changes behind the bucket.", lag.changes),
                    "tailrace_mirror_rate": ("gauge", "Rows a second, last batch.", lag.rows_per_second),
                    "tailrace_mirror_batch": ("gauge", "Number of the last batch.", lag.batch),
                    "tailrace_mirror_version": ("gauge", "Version of the table.", mirror.tables[0].version),
                    "tailrace_mirror_reported_seconds": ("gauge", "When, unix time.", SYSTEM.time_ns() / 1e9),
                }
                text = prometheus_text(figures, {"bucket": url.bucket, "table": table})
                atomic_write(metrics_file, text.encode())

        spark.streams.addListener(LagListener(reported))
        mirror = prepare_mirror(
            spark,
            url,
            collection_paths(table, collections),
            keep_deletes=keep_deletes,
            changes=changes,
            work_dir=work_dir,
            options=source_options_of(url, tls, more),
            on_applied=applied,
        )
        for path in mirror.missing:
            note(f"the bucket has no collection {path!r} any more: its table is emptied")
        started = SYSTEM.monotonic()
        with _signals() as received:
            query = mirror.start(once=once, trigger_s=trigger)
            try:
                while not received and not query.awaitTermination(1):
                    pass
            except Exception as error:
                if not received:  # else Java was told to stop as well, and is gone
                    raise explained_query_error(error) from error
            finally:
                with java_may_be_gone():
                    query.stop()
                mirror.tidy_up()
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        versions = ", ".join(str(one.version) for one in mirror.tables)
        tables = "the table is" if len(mirror.tables) == 1 else "the tables are"
        seconds = SYSTEM.monotonic() - started
        note(f"{counted(total, 'change')} in {seconds:.1f} s; {tables} at version {versions}")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to stop that have come; a second Ctrl-C is an error wherever it falls. Spark's own handler
    would speak to Java in the middle of another call, and much would be said about it.
    """
    received: list[int] = []

    def note_it(number: int, _frame: object) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note_it) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
