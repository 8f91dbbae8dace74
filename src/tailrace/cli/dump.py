"""``tailrace dump``: a bounded export of the current state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import left_out_options, retry_option, source_options, tls_options
from .common import FILE, note, progress, run, url_argument
from .common import command as make_command


@make_command(
    "dump",
    example="""
tailrace dump couchbase://127.0.0.1 --out documents.parquet
tailrace dump couchbase://127.0.0.1 > documents.jsonl
""",
)
@url_argument
@click.option(
    "--out",
    type=FILE,
    metavar="FILE",
    help="Where to write; the file appears when it is complete.  [default: stdout]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["jsonl", "parquet"]),
    help="Output format.  [default: by the file's name, jsonl on stdout]",
)
@retry_option
@source_options
@left_out_options
@tls_options
def command(
    url: ConnectionString, out: Path | None, kind: str | None, retry_for: float, **options: Any
) -> None:
    """Write all documents as they are now.

    Writes every live document once, each vbucket as of one moment. JSON lines are those of 'tail --json',
    and 'load --from' reads them; Parquet has the columns of the Spark source.
    """
    from .client_options import connect_options

    kind = kind or ("parquet" if out is not None and out.suffix == ".parquet" else "jsonl")
    run(_dump(url, out, kind, connect_options(url, options, purpose="dump", retry_for_s=retry_for)))


async def _dump(url: ConnectionString, out: Path | None, kind: str, options: dict[str, Any]) -> None:
    import contextlib

    from ..client.aio import connect
    from ..client.export import as_json_lines, documents
    from ..columns.batch import SCHEMA

    written = 0
    async with connect(url, **options) as source:
        total = sum((await source.high_seqnos()).values())
        with progress("reading", total) as bar, contextlib.ExitStack() as stack:
            sink: Any = sys.stdout.buffer if out is None else stack.enter_context(_whole_file(out))
            writer: Any = None
            if kind == "parquet":
                import pyarrow.parquet as pq

                writer = stack.enter_context(pq.ParquetWriter(sink, SCHEMA, compression="zstd"))
            async for table in documents(source, bar.advance):
                written += table.num_rows
                if writer is not None:
                    writer.write_table(table)
                else:
                    sink.writelines(
                        as_json_lines(table, source.collection_names, no_value=options["no_value"])
                    )
    if out is not None:
        note(f"{written} documents in {str(out)!r}")


def _whole_file(path: Path) -> Any:
    """A file to write that gets its name when it is closed without an error."""
    from ..files import whole_file

    return whole_file(path)
