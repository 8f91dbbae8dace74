"""``tailrace verify``: checks that bucket and table are equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..clock import SYSTEM
from ..connstr import ConnectionString
from .client_options import tls_options
from .common import TABLE, counted, json_option, note, progress, url_argument
from .common import command as make_command
from .spark_options import (
    explained_query_error,
    open_spark,
    parse_storage_options,
    source_options_of,
    spark_options,
    storage_option,
)

if TYPE_CHECKING:
    from ..spark.rounds.compare import Difference
    from ..spark.rounds.verify import Verdict


@make_command(
    "verify",
    example="""
tailrace verify couchbase://127.0.0.1/default ./people
tailrace verify couchbase://127.0.0.1/default ./people --repair
""",
)
@url_argument
@click.argument("table", type=TABLE)
@click.option("--as-of-table", is_flag=True, help="Ignore changes newer than the table's position.")
@click.option("--repair", is_flag=True, help="Read vbuckets with differences again and replace their rows.")
@storage_option
@spark_options
@json_option("Write one JSON object per difference, then one with the verdict.")
@tls_options
def command(
    url: ConnectionString,
    table: str,
    as_of_table: bool,
    repair: bool,
    storage_options: tuple[str, ...],
    master: str | None,
    conf: tuple[str, ...],
    as_json: bool,
    **tls: Any,
) -> int:
    """Compare a table with its bucket, document by document.

    Compares key, value, CAS, rev, flags and expiry, and prints one line per difference, with the key. Exit
    code 1 if there is any.
    """
    options = source_options_of(url, tls, {})
    storage = parse_storage_options(storage_options)
    with contextlib.ExitStack() as stack:
        with progress("starting Spark"):
            spark = stack.enter_context(open_spark(master, conf, name="tailrace verify"))
        from ..spark.api import repair as repair_vbuckets
        from ..spark.api import verify
        from ..table.opening import TableOptions, open_table

        def compared() -> tuple[Verdict, list[Difference]]:
            with progress("comparing bucket and table") as bar:

                def show(done: int, planned: int) -> None:
                    bar.expect(planned)
                    bar.reach(done)

                verdict = verify(
                    spark, url, table, options=options, storage_options=storage, on_progress=show
                )
            return verdict, [each for each in verdict.differences if not (as_of_table and each.newer)]

        try:
            verdict, differences = compared()
            for difference in differences:
                click.echo(json.dumps(asdict(difference)) if as_json else str(difference))
            if differences and repair:
                vbuckets = sorted({difference.vbucket for difference in differences})
                note(f"reading {counted(len(vbuckets), 'vbucket')} again, to replace the rows")
                with progress("repairing") as bar:
                    repair_vbuckets(
                        spark,
                        url,
                        table,
                        vbuckets,
                        options=options,
                        storage_options=storage,
                        on_status=lambda status: bar.describe(f"repairing, {status['message']}"),
                    )
                repaired = counted(len(differences), "difference")
                note(f"repaired {repaired} in {counted(len(vbuckets), 'vbucket')}")
                verdict, differences = compared()
            if repair and not differences:
                held = open_table(table, TableOptions(storage))
                if held.accept_rows(verdict.table_version):
                    note("something else wrote to the table, but its rows are right: its mirror can continue")
        except Exception as error:
            raise explained_query_error(error) from error
    answer = "equal" if not differences else counted(len(differences) + verdict.omitted, "difference")
    behind = f", {verdict.behind} changes behind" if verdict.behind else ""
    note(
        f"{answer}: {verdict.documents} documents in the bucket, {verdict.rows} rows in the table at version "
        f"{verdict.table_version}{behind}; the bucket was read up to seqno {_newest(verdict.bucket_seqnos)}"
    )
    from ..table.last_verdict import keep_verdict

    summary = {
        "equal": not differences,
        "differences": len(differences) + (verdict.omitted if differences else 0),
        "documents": verdict.documents,
        "rows": verdict.rows,
        "table_version": verdict.table_version,
        "behind": verdict.behind,
        "rescued": verdict.rescued,
    }
    keep_verdict(table, storage, {"time": SYSTEM.time_ns() / 1e9, **summary})  # for the mirror's page
    if as_json:
        click.echo(json.dumps(summary))
    if verdict.rescued:
        note(f"{counted(verdict.rescued, 'row')} with values that don't fit their columns: see _rescued")
    return 1 if differences else 0


def _newest(seqnos: Mapping[int, int]) -> str:
    """The seqnos up to which the bucket was read, in few words."""
    if len(set(seqnos.values())) <= 1:
        return f"{max(seqnos.values(), default=0)} in {counted(len(seqnos), 'vbucket')}"
    return f"{min(seqnos.values())} to {max(seqnos.values())} in {counted(len(seqnos), 'vbucket')}"
