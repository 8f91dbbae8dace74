"""What people call: `mirror` and `verify`, with a URL and a path instead of options and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from ..connstr import ConnectionString, parse
from ..errors import UsageError
from .fold import DELETED
from .mirroring import Applied, Mirror, TableSpec
from .source.feed import collection_paths, open_source
from .source.options import Options, parse_options
from .table import MirrorTable
from .verifying import Verdict
from .verifying import verify as verify_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["mirror", "prepare_mirror", "repair", "source_options", "verify"]


def source_options(url: str | ConnectionString, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Options of the source for a URL."""
    where = parse(url) if isinstance(url, str) else url
    found = {"connectionString": str(where), "bucket": where.bucket}
    if where.username is not None:
        found["username"] = where.username
    if where.password is not None:
        found["password"] = where.password
    return {**found, **(options or {})}


def prepare_mirror(
    spark: SparkSession,
    url: str | ConnectionString,
    tables: str | Mapping[str, str],
    *,
    keep_deletes: bool = False,
    changes: str | None = None,
    work_dir: str | Path | None = None,
    options: Mapping[str, str] | None = None,
    storage_options: dict[str, str] | None = None,
    on_applied: Callable[[Applied], None] | None = None,
    start_over: Iterable[int] = (),
) -> Mirror:
    """A mirror that has not been started; see `mirror`."""
    given = source_options(url, options)
    specs = _specs(tables)
    # No filter for the node: it names collections by their id, and one that is dropped and made again has
    # another. The position would move on over its documents. The tables take what is theirs by name.
    parsed = parse_options(given)
    with open_source(parsed, "spark-mirror") as source:
        vbucket_count = source.vbucket_count
    missing = _missing(specs, parsed, given["bucket"], storage_options)
    return Mirror(
        spark,
        given,
        specs,
        given["bucket"],
        vbucket_count,
        None if work_dir is None else Path(work_dir),
        keep_deletes,
        storage_options,
        on_applied,
        frozenset(start_over),
        changes,
        missing,
    )


def mirror(
    spark: SparkSession,
    url: str | ConnectionString,
    tables: str | Mapping[str, str],
    *,
    once: bool = False,
    trigger_s: float | None = None,
    keep_deletes: bool = False,
    changes: str | None = None,
    work_dir: str | Path | None = None,
    options: Mapping[str, str] | None = None,
    storage_options: dict[str, str] | None = None,
    on_applied: Callable[[Applied], None] | None = None,
) -> StreamingQuery:
    """Keep a Delta table equal to a bucket; gives the streaming query.

    ``tables`` is the path of the default collection's table, or paths by ``scope.collection``. With ``once``
    the query ends when it has caught up with the moment of its start. Exactly once, whatever is killed: the
    position stands in the table itself. When the bucket takes changes back, so does the table.

    ``changes`` is the path of a change log: a Delta table to which every change is appended, once; see
    `live_changes`.

    ``work_dir`` is for this run's checkpoint, staged rows and spool; on a cluster all executors must see it.
    What is in it is removed when the process ends, or by the next mirror if it was killed.
    ``options`` are options of the source, such as ``maxOffsetsPerTrigger``.
    """
    made = prepare_mirror(
        spark,
        url,
        tables,
        keep_deletes=keep_deletes,
        changes=changes,
        work_dir=work_dir,
        options=options,
        storage_options=storage_options,
        on_applied=on_applied,
    )
    return made.start(once=once, trigger_s=trigger_s)


def verify(
    spark: SparkSession,
    url: str | ConnectionString,
    table: str,
    *,
    options: Mapping[str, str] | None = None,
    storage_options: dict[str, str] | None = None,
) -> Verdict:
    """Compare every document of a bucket with its mirror, in parallel."""
    return verify_options(spark, source_options(url, options), table, storage_options=storage_options)


def repair(
    spark: SparkSession,
    url: str | ConnectionString,
    table: str,
    vbuckets: Iterable[int],
    *,
    work_dir: str | Path | None = None,
    options: Mapping[str, str] | None = None,
    storage_options: dict[str, str] | None = None,
) -> None:
    """Read vbuckets again from the beginning and replace their rows, in one commit each batch."""
    held = MirrorTable.open(table, storage_options=storage_options)
    collection = f"{held.source['scope']}.{held.source['collection']}"
    made = prepare_mirror(
        spark,
        url,
        table if collection == "_default._default" else {collection: table},
        keep_deletes=DELETED.name in held.schema.names,
        work_dir=work_dir,
        options=options,
        storage_options=storage_options,
        start_over=vbuckets,
    )
    made.start(once=True).awaitTermination()
    made.tidy_up()


def _specs(tables: str | Mapping[str, str]) -> list[TableSpec]:
    if isinstance(tables, str):
        return [TableSpec(tables)]
    found = []
    for path, uri in tables.items():
        scope, dot, collection = path.partition(".")
        if not (scope and dot and collection):
            raise UsageError(f"{path!r} is no collection; write scope.collection")
        found.append(TableSpec(uri, scope, collection))
    return found


def _missing(
    specs: list[TableSpec], options: Options, bucket: str, storage_options: dict[str, str] | None
) -> tuple[str, ...]:
    """The collections that the bucket does not have.

    One with a table has been dropped, and the table will be emptied; one without has never been there, or is
    misspelt.
    """
    if all(spec.is_default for spec in specs):
        return ()
    there = collection_paths(options)
    missing = [spec for spec in specs if spec.path not in there]
    for spec in missing:
        if not DeltaTable.is_deltatable(spec.uri, storage_options):
            known = ", ".join(sorted(there)[:20])
            raise UsageError(
                f"bucket {bucket!r} has no collection {spec.path!r}, there are: {known}; "
                f"'tailrace collections' with --create {spec.path} makes one"
            )
    return tuple(spec.path for spec in missing)
