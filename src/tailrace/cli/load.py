"""``tailrace load``: writes many documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import click

from ..clock import SYSTEM
from ..connstr import ConnectionString
from ..errors import UsageError
from .client_options import open_kv, tls_options
from .common import (
    DURATION,
    INPUT_FILE,
    INTEGER,
    SHARE,
    SIZE,
    Integer,
    JsonLines,
    counted,
    json_option,
    note,
    progress,
    standard_input,
    url_argument,
)
from .common import command as make_command

if TYPE_CHECKING:
    from ..client.pipeline import WriteBatch

MAX_SIZE = 20 << 20


@make_command(
    "load",
    example="""
tailrace load couchbase://127.0.0.1 --docs 100000 --size 256 --deletes 10% --seed 7
tailrace load couchbase://127.0.0.1 --from documents.jsonl
tailrace dump couchbase://127.0.0.1 | tailrace load couchbase://127.0.0.1:11310 --from -
""",
)
@url_argument
@click.option("--docs", type=INTEGER, default=None, help="Number of documents to generate.  [default: 1000]")
@click.option("--size", type=SIZE, default=256, show_default=True, help="Size of a value in bytes.")
@click.option("--deletes", type=SHARE, default=0.0, help="Share of the documents to delete at the end.")
@click.option("--expiry", type=SHARE, default=0.0, help="Share of the documents that get an expiry.")
@click.option("--ttl", type=DURATION, default=3600.0, help="Time until those expire.  [default: 1h]")
@click.option("--rate", type=Integer(1), help="At most this many writes a second.")
@click.option(
    "--seed", type=INTEGER, default=0, show_default=True, help="The same seed makes the same documents."
)
@click.option("--prefix", default="doc::", show_default=True, help="Prefix of the generated keys.")
@click.option(
    "--from",
    "source",
    type=INPUT_FILE,
    metavar="FILE.jsonl",
    help='Load lines {"key":…,"value":…} instead, or the output of tail --json or dump; - is stdin.',
)
@json_option("Write the number of writes that the server took, and the seconds, as JSON.")
@tls_options
def command(
    url: ConnectionString,
    docs: int | None,
    size: int,
    deletes: float,
    expiry: float,
    ttl: float,
    rate: int | None,
    seed: int,
    prefix: str,
    source: Path | None,
    as_json: bool,
    **tls: Any,
) -> None:
    """Write documents, generated or from a file.

    Returns when the server has taken all of them; they are on disk within its flush interval. A line that
    names a collection is written there, with its xattrs, if the bucket has that collection; CAS and revision
    are new ('replicate' keeps them).
    """
    from ..client.load import MadeUp, from_json_lines
    from ..client.manifest import collection_ids

    if source is not None and docs is not None:
        raise UsageError("give either --docs N or --from FILE, not both")
    if size > MAX_SIZE:
        raise UsageError(f"a value has up to {MAX_SIZE} bytes, not {size}")
    if not 0 < len(prefix.encode()) <= 200:
        raise UsageError("a prefix has 1 to 200 bytes")
    most = 1 << 30 if rate is None else max(1, rate // 20)
    expires_at_s = int(SYSTEM.time_ns() / 1e9 + ttl)
    with open_kv(url, tls, wants_seqnos=False) as client:
        shape: dict[str, Any] = {
            "collections": client.collections,
            "json_type": client.json_type,
            "most": most,
        }
        total: int | None = None
        if source is None:
            made_up = MadeUp(
                1000 if docs is None else docs, size, deletes, expiry, expires_at_s, prefix, seed
            )
            batches: Iterator[WriteBatch] = made_up.batches(client.vbucket_count, **shape)
            total = made_up.writes
        else:
            ids = collection_ids(client.manifest()) if client.collections else {}
            shape |= {"collection_ids": ids, "xattrs": client.xattrs, "pack": client.packed}
            batches = from_json_lines(_lines(source), client.vbucket_count, **shape)
        begin_s = SYSTEM.monotonic()
        taken = needless = 0
        with progress("writing", total) as bar:
            for written in client.write_many(batches):
                taken += written.taken
                needless += written.needless
                bar.advance(written.answered)
                if rate is not None:
                    sleep(max(0.0, begin_s + (taken + needless) / rate - SYSTEM.monotonic()))
        seconds = SYSTEM.monotonic() - begin_s
    if as_json:
        about = {"needless": needless} if needless else {}
        JsonLines().write({"writes": taken, **about, "seconds": round(seconds, 3)})
    else:
        besides = f"; {needless} deletions of documents that did not exist" if needless else ""
        pace = f"{taken / max(seconds, 1e-9):,.0f} a second"
        note(f"{counted(taken, 'write')} in {seconds:.1f} s, {pace}{besides}")


def _lines(source: Path) -> Iterator[bytes]:
    with standard_input() if str(source) == "-" else source.open("rb") as file:
        yield from file
