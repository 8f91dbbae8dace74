"""``tailrace doctor``: looks for problems between here, bucket and table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..connstr import ConnectionString
from ..errors import TailraceError
from .client_options import tls_from, tls_options
from .common import (
    DIRECTORY,
    DURATION,
    TABLE,
    JsonLines,
    counted,
    json_option,
    note,
    printable,
    url_argument,
    use_colour,
)
from .common import command as make_command
from .spark_options import parse_storage_options, storage_option

if TYPE_CHECKING:
    from ..client.doctor.examination import BucketFacts
    from ..client.doctor.findings import Finding

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@make_command(
    "doctor",
    example="""
tailrace doctor couchbases://cb.example.com/travel
tailrace doctor couchbase://127.0.0.1/default ./people --json
tailrace doctor couchbase://127.0.0.1/default --checkpoint ./query.checkpoint
""",
)
@url_argument
@click.argument("table", type=TABLE, required=False)
@click.option(
    "--checkpoint",
    type=DIRECTORY,
    metavar="DIR",
    help="Also check the checkpoint of a streaming query that reads the bucket.",
)
@click.option("--strict", is_flag=True, help="Exit with code 1 on a warning too.")
@click.option(
    "--timeout", "timeout_s", type=DURATION, default=5.0, help="How long to wait for a node.  [default: 5s]"
)
@storage_option
@json_option("Write one JSON object per finding, then one with the counts.")
@tls_options
def command(
    url: ConnectionString,
    table: str | None,
    checkpoint: Path | None,
    strict: bool,
    timeout_s: float,
    storage_options: tuple[str, ...],
    as_json: bool,
    **tls: Any,
) -> int:
    """Check for problems between here, a bucket and a table.

    Checks names, networks, TLS, login, privileges, features, map, nodes, vbuckets, clocks, replicas and
    purging, and with TABLE the table's positions. Each line is ok, warning or error, with what to do about
    it. Nothing is changed. Exit code 1 on an error, also if no node can be reached.
    """
    from ..client.doctor.examination import Examination

    examination = Examination(url, tls=tls_from(tls) if url.tls else None, timeout_s=timeout_s)
    lines = JsonLines()
    counts: Counter[str] = Counter()

    def show(finding: Finding) -> None:
        counts[finding.severity] += 1
        if as_json:
            lines.write(finding.to_json())
            lines.flush()
            return
        word = str(finding.severity).ljust(7)
        if use_colour(sys.stdout):
            word = click.style(word, fg=_COLOURS[finding.severity])
        click.echo(f"{word}  {finding.check}: {printable(finding.text)}")
        if finding.way_out:
            click.echo(f"{'':9}-> {printable(finding.way_out)}")

    for finding in examination.findings():
        show(finding)
    if table is not None:
        storage = parse_storage_options(storage_options)
        for finding in _of_table(table, storage, url.bucket, examination.facts):
            show(finding)
    if checkpoint is not None:
        show(_of_checkpoint(checkpoint, url.bucket))
    if as_json:
        lines.write({"errors": counts["error"], "warnings": counts["warning"], "ok": counts["ok"]})
        lines.flush()
    note(f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}, {counts['ok']} ok")
    return 1 if counts["error"] or (strict and counts["warning"]) else 0


def _of_table(uri: str, storage: dict[str, str], bucket: str, facts: BucketFacts | None) -> Iterator[Finding]:
    from ..client.doctor.findings import error
    from ..spark.rounds.table_findings import examine_table
    from ..table.opening import TableOptions, open_table

    try:
        opened = open_table(uri, TableOptions(storage))
    except TailraceError as problem:
        yield error("table", str(problem), "check the path and the storage options")
        return
    if facts is not None:
        yield from examine_table(opened, bucket, facts)


def _of_checkpoint(path: Path, bucket: str) -> Finding:
    from ..client.doctor.findings import error, ok
    from ..spark.source.checkpoint import check_checkpoint

    try:
        batches = check_checkpoint(path, bucket)
    except TailraceError as problem:
        what, _, way_out = str(problem).rpartition(": ")
        return error("checkpoint", what or way_out, way_out if what else "check the path")
    return ok("checkpoint", f"whole, with {counted(batches, 'commit')}")
