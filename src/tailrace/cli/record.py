"""``tailrace record``: keeps a stream in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..connstr import ConnectionString
from .client_options import end_option, retry_option, source_options, start_option, tls_options
from .common import FILE, note, run, url_argument
from .common import command as make_command


@make_command(
    "record",
    example="""
tailrace record couchbase://127.0.0.1 stream.rec
tailrace record couchbase://127.0.0.1/default stream.rec --from now --to forever
""",
)
@url_argument
@click.argument("file", type=FILE)
@start_option(state=False)
@end_option("now")
@retry_option
@source_options
@tls_options
def command(
    url: ConnectionString, file: Path, start: str, end: str, retry_for: float, **options: Any
) -> None:
    """Save a stream to a file, byte for byte.

    For bug reports and benchmarks: 'replay' serves the file as a producer. The file holds documents, so
    protect it as you protect them. Ctrl-C ends a recording that has no other end, and keeps what it has.
    """
    from .client_options import connect_options

    # the file is to have every byte, so nothing is left out
    whole = {"include_system": True, "include_transactions": True}
    connecting = connect_options(url, options, purpose="record", retry_for_s=retry_for, **whole)
    run(_record(url, file, start, end, connecting))


async def _record(url: ConnectionString, file: Path, start: str, end: str, options: dict[str, Any]) -> None:
    from ..client.aio import connect
    from ..client.recording import Recorder
    from ..files import whole_file

    changes = 0
    with whole_file(file, keep=True) as sink:
        recorder = Recorder(sink)
        async with connect(url, on_wire=recorder, **options) as source:
            recorder.begin(
                {
                    "bucket": url.bucket,
                    "vbuckets": source.vbucket_count,
                    "collections": source.has_collections,
                }
            )
            async for portion in source.portions(start, end):
                changes += portion.row_count
    note(f"{changes} changes, {recorder.bytes} bytes in {str(file)!r}")
