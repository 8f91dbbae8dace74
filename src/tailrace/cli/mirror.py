"""``tailrace mirror``: a Delta table that stays equal to a bucket."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..clock import SYSTEM, Clock
from ..connstr import ConnectionString
from ..errors import UsageError
from ..files import atomic_write
from .client_options import (
    every_version_option,
    left_out_options,
    persisted_options,
    retry_option,
    tls_options,
)
from .common import (
    DURATION,
    FILE,
    TABLE,
    Integer,
    ProgressDisplay,
    TablePath,
    counted,
    json_option,
    note,
    progress,
    url_argument,
)
from .common import command as make_command
from .http_options import http_options, serving_http
from .spark_options import (
    collection_paths,
    explained_query_error,
    java_may_be_gone,
    open_spark,
    parse_storage_options,
    source_options_of,
    spark_options,
    storage_option,
    undo_options,
)

if TYPE_CHECKING:
    from ..spark.rounds.progress import RoundProgress
    from ..web.mirror_figures import MirrorFigures


@make_command(
    "mirror",
    example="""
tailrace mirror couchbase://127.0.0.1/default ./people --once
tailrace mirror couchbase://127.0.0.1/default ./typed --once --schema infer
tailrace mirror couchbase://127.0.0.1/shop ./shop --collection eu.orders --collection eu.users
""",
)
@url_argument
@click.argument("table", type=TABLE)
@click.option("--once", is_flag=True, help="Stop once the table has everything the bucket had at the start.")
@click.option("--to", "end", type=click.Choice(["now", "forever"]), hidden=True)
@click.option(
    "--collection",
    "collections",
    multiple=True,
    metavar="SCOPE.NAME[=PATH]",
    help="Mirror this collection, into TABLE/SCOPE.NAME or PATH; may be repeated.",
)
@click.option(
    "--schema",
    metavar="DDL|infer",
    help="Make columns of the documents' fields: 'name STRING, tags ARRAY<STRING>', or infer them from a "
    "sample.",
)
@click.option("--no-value-column", is_flag=True, help="Leave the document itself out of a typed table.")
@click.option(
    "--evolve/--no-evolve",
    default=None,
    help="Whether fields that appear later become columns.  [default: with --schema infer]",
)
@click.option("--keep-deletes", is_flag=True, help="Keep deleted documents as rows, marked as deleted.")
@click.option(
    "--changes",
    type=TablePath("change log"),
    metavar="PATH",
    help="Append every change to this Delta table too.",
)
@click.option(
    "--changes-keep", type=DURATION, help="How long the change log keeps a change.  [default: forever]"
)
@click.option("--trigger", type=DURATION, help="Time between two commits.  [default: as short as possible]")
@click.option(
    "--max-rows",
    "--max-offsets-per-trigger",
    "max_rows",
    type=Integer(1),
    help="At most this many changes per round, as far as snapshots allow.",
)
@persisted_options
@left_out_options
@every_version_option
@undo_options
@click.option(
    "--accept-new-bucket",
    is_flag=True,
    help="Accept a bucket that was deleted and created again: all rows are replaced by what it holds.",
)
@click.option("--no-maintenance", is_flag=True, help="Leave compaction and cleaning to 'tailrace maintain'.")
@click.option(
    "--metrics-file",
    type=FILE,
    help="Write figures for Prometheus here, at each commit and every 10 s (for node_exporter's textfile "
    "collector).",
)
@storage_option
@retry_option
@spark_options
@json_option("Write one JSON object per commit.")
@tls_options
@http_options
def command(
    url: ConnectionString,
    table: str,
    once: bool,
    end: str | None,
    collections: tuple[str, ...],
    schema: str | None,
    no_value_column: bool,
    evolve: bool | None,
    keep_deletes: bool,
    changes: str | None,
    changes_keep: float | None,
    trigger: float | None,
    max_rows: int | None,
    persisted_only: bool,
    replica_patience: float | None,
    include_system: bool,
    every_version: bool,
    include_transactions: bool,
    undo: float | None,
    undo_size: int | None,
    accept_new_bucket: bool,
    no_maintenance: bool,
    metrics_file: Path | None,
    storage_options: tuple[str, ...],
    retry_for: float,
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Keep a table in step with the bucket, on Spark.

    TABLE is a Delta table that any engine with deletion vectors can read, with one row per live document.
    The position of every vbucket is committed together with the rows, so the mirror can be killed and
    started again at any moment. When the bucket takes changes back (a failover that lost data), the table
    takes them back too.
    """
    if changes_keep is not None and changes is None:
        raise UsageError("--changes-keep is for a change log, but there is none: give --changes too")
    more = {"retryFor": f"{retry_for:g}"}
    if max_rows:
        more["maxOffsetsPerTrigger"] = str(max_rows)
    if persisted_only:
        more["persistedOnly"] = "true"
    if replica_patience is not None:
        more["replicaPatience"] = f"{replica_patience:g}"
    if every_version:
        more["everyVersion"] = "true"
    if include_system:
        more["includeSystem"] = "true"
    if include_transactions:
        more["includeTransactions"] = "true"
    from ..web import HttpFigures
    from ..web.mirror_figures import MirrorFigures

    paths = collection_paths(table, collections)
    figures = MirrorFigures(url.bucket, table, paths if isinstance(paths, dict) else None)
    first_table = paths if isinstance(paths, str) else next(iter(paths.values()))
    storage = parse_storage_options(storage_options)

    figures.last_verdict = _remembered(first_table, storage)
    shown = HttpFigures("mirror", figures.stats, figures.metrics, figures.why_not_ready, figures.sample)
    with (
        serving_http(options, shown),
        progress("starting Spark", beside_results=as_json) as bar,
        open_spark(master, conf, name="tailrace mirror") as spark,
    ):
        from ..spark.api import prepare_mirror
        from ..spark.java_process import check_java

        view = _View(figures, bar, metrics_file, as_json=as_json)

        bar.describe("connecting")
        mirror = prepare_mirror(
            spark,
            url,
            paths,
            once=once or end == "now",
            trigger_s=trigger,
            schema=schema,
            value_column=not no_value_column,
            evolve=evolve,
            on_schema=note,
            keep_deletes=keep_deletes,
            changes=changes,
            changes_keep_s=changes_keep,
            undo_s=undo,
            undo_bytes=undo_size,
            maintenance=not no_maintenance,
            accept_new_bucket=accept_new_bucket,
            options=source_options_of(url, options, more),
            storage_options=storage,
            on_progress=view.show,
            on_trouble=view.tell_trouble,
        )
        figures.standing = lambda: mirror.handle.standing
        figures.note_versions(table.version for table in mirror.tables)
        for path in mirror.asked.missing:
            note(f"the bucket has no collection {path!r} any more: its table is emptied")
        started = SYSTEM.monotonic()
        with _signals() as received:
            bar.describe("mirroring")
            handle = mirror.start()
            try:
                while not received and not handle.awaitTermination(1):
                    view.wait(handle.status)
                    check_java()
            except Exception as error:
                if not received:  # a signal ends Java too, which is no error then
                    raise explained_query_error(error) from error
            finally:
                with java_may_be_gone():
                    handle.stop()
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        figures.note_versions(table.version for table in mirror.tables)
        view.write_metrics()
        versions = ", ".join(str(table.version) for table in mirror.tables)
        tables = "the table is" if len(mirror.tables) == 1 else "the tables are"
        seconds = SYSTEM.monotonic() - started
        note(f"{counted(figures.total.changes, 'change')} in {seconds:.1f} s; {tables} at version {versions}")
        if figures.total.rescued:
            rescued = counted(figures.total.rescued, "row")
            note(f"{rescued} with values that don't fit their columns: see _rescued")


_METRICS_S = 10.0
"""How old the figures in a file may become while no round is done."""
_VERDICT_S = 10.0
"""How often a page may ask for the last verdict, which is a request to an object store."""


def _remembered(table: str, storage: dict[str, str]) -> Callable[[], dict[str, Any] | None]:
    last: tuple[float, dict[str, Any] | None] = (-_VERDICT_S, None)

    def verdict() -> dict[str, Any] | None:
        nonlocal last
        from ..table.last_verdict import last_verdict

        now = SYSTEM.monotonic()
        if now - last[0] >= _VERDICT_S:
            last = now, last_verdict(table, storage)
        return last[1]

    return verdict


_LONG_S = 2.0
"""A round that takes longer is shown while it runs, not only when it is committed."""
_LINE_S = 10.0
"""Without a terminal: how often a long step is reported."""


class _View:
    """What people and scripts see of a mirror."""

    def __init__(
        self,
        figures: MirrorFigures,
        bar: ProgressDisplay,
        metrics_file: Path | None,
        *,
        as_json: bool,
        clock: Clock = SYSTEM,
    ) -> None:
        self.figures = figures
        self._bar = bar
        self._metrics_file = metrics_file
        self._as_json = as_json
        self._clock = clock
        self._has_shown = False
        self._told_at = -_LINE_S
        self._written_at = -_METRICS_S

    def wait(self, status: Mapping[str, Any]) -> None:
        """Called every second, with the handle's status."""
        message, underway = status["message"], status.get("round")
        self.figures.status = status
        is_work = underway is not None or message.startswith(("compacting", "cleaning"))
        took_s, now = status["seconds"], self._clock.monotonic()
        if now - self._written_at >= _METRICS_S:
            self.write_metrics()
        if not self._has_shown or (is_work and took_s >= _LONG_S):
            self._show_step(message, underway)
        is_due = now - self._told_at >= _LINE_S and (took_s >= _LINE_S or not self._has_shown)
        if is_work and is_due and not self._bar.is_shown:
            self._told_at = now
            note(message)

    def _show_step(self, message: str, underway: Mapping[str, Any] | None) -> None:
        if underway is None or underway["step"] != "read" or not underway["tasks"]:
            self._bar.describe(f"mirroring, {message}")
            return
        before = self.figures.total.changes
        self._bar.expect(before + underway["changes_planned"] + underway["changes_later"])
        self._bar.reach(before + underway["changes"])
        vbuckets = f"{underway['vbuckets']:,} of {underway['vbuckets_planned']:,} vbuckets"
        rate = f"{underway['rate']:,.0f}/s, " if underway["rate"] else ""
        self._bar.describe(f"mirroring, {rate}{vbuckets}")

    def show(self, done: RoundProgress) -> None:
        """Called when a round is done."""
        self._has_shown = True
        figures = self.figures
        figures.add(done)
        self._bar.reach(figures.total.changes)
        self._bar.expect(figures.total.changes + done.lag_changes)
        rescued = f", {figures.total.rescued:,} rescued" if figures.total.rescued else ""
        self._bar.describe(f"mirroring, {done.rate:,.0f}/s, {done.lag_changes:,} behind{rescued}")
        if done.rolled_back:
            note(f"the bucket took changes back: rolled back {counted(len(done.rolled_back), 'vbucket')}")
        if self._as_json:
            click.echo(json.dumps(done.to_json()))
        self.write_metrics()

    def tell_trouble(self, text: str) -> None:
        """Called when something went wrong and will be tried again."""
        self.figures.trouble(text)
        note(text)

    def write_metrics(self) -> None:
        """Write the figures for Prometheus, atomically."""
        self._written_at = self._clock.monotonic()
        if self._metrics_file is None:
            return
        from ..web.http import exposition_text

        atomic_write(self._metrics_file, exposition_text(self.figures.metrics()))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals to stop; a second Ctrl-C is raised at once. Spark's own handler would call Java in
    the middle of another call, and log at length about it.
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
