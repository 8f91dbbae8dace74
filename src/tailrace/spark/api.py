"""What people call: `mirror` and `verify`, with a URL and a path instead of options and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from ..client.keywords import check_known, check_values, shows_keywords_of
from ..connstr import ConnectionString
from ..rng import unique_name
from ..table.opening import TableOptions, open_table
from .rounds.handle import MirrorHandle
from .rounds.jobs import SparkJobs
from .rounds.mirror import Mirror
from .rounds.setup import MirrorKeywords, StrPath, build_mirror, source_options
from .rounds.verify import Verdict, verify_table
from .source.options import parse_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["mirror", "prepare_mirror", "repair", "source_options", "verify"]


def prepare_mirror(
    spark: SparkSession,
    url: str | ConnectionString,
    tables: StrPath | Mapping[str, StrPath],
    **settings: Unpack[MirrorKeywords],
) -> Mirror:
    """A mirror that has not been started; see `mirror`."""
    check_known(list(MirrorKeywords.__annotations__), settings, "setting")
    check_values(MirrorKeywords, settings)
    given = source_options(url, settings.get("options"))
    return build_mirror(_jobs(spark, given), url, tables, **settings)


def _jobs(spark: SparkSession, given: Mapping[str, str]) -> SparkJobs:
    return SparkJobs(spark, f"tailrace-{unique_name()}", parse_options(given).min_partitions)


@shows_keywords_of(build_mirror, list(MirrorKeywords.__annotations__))
def mirror(
    spark: SparkSession,
    url: str | ConnectionString,
    tables: StrPath | Mapping[str, StrPath],
    **settings: Unpack[MirrorKeywords],
) -> MirrorHandle:
    """Keep a table equal to a bucket; gives a handle with the calls of a streaming query.

    ``tables`` is the path of the default collection's table, or paths by ``scope.collection``; a path may be
    an ``s3://``, ``gs://`` or ``az://`` URI, with ``storage_options``. Exactly once, whatever is killed: the
    position stands in the table itself. When the bucket takes changes back, so does the table.

    Settings:

    ``once``
        the mirror ends when it has caught up with the moment of its start
    ``trigger_s``
        time between two commits; without it as fast as it goes
    ``schema``, ``value_column``, ``evolve``, ``on_schema``
        columns of the documents' fields: DDL such as ``"name STRING, tags ARRAY<STRING>"``, or ``"infer"``
        for those of a sample of the bucket, which ``on_schema`` is told before they are used; whether
        ``value`` stays beside them, and whether a field that comes later becomes a column (with ``"infer"``
        it does). The table keeps them: a restart needs none of these. What does not fit its column stands in
        ``_rescued``
    ``keep_deletes``
        deleted documents stay as rows that are marked as such
    ``changes``, ``changes_keep_s``
        the path of a change log, to which every change is appended once (see `live_changes`), and for how
        long it keeps them
    ``undo_s``, ``undo_bytes``
        for how long, and with how many bytes at most, earlier versions are kept that a rollback can return to
    ``accept_new_bucket``
        a bucket that was deleted and made again is an error, unless this is True: then all rows are replaced
    ``maintenance``
        False leaves compaction and cleaning to `tailrace maintain`
    ``options``
        options of the source, such as ``maxOffsetsPerTrigger``
    ``storage_options``
        for object stores
    ``on_progress``, ``on_trouble``
        called in the mirror's thread with each commit, and with what it waits for
    """
    return prepare_mirror(spark, url, tables, **settings).start()


def verify(
    spark: SparkSession,
    url: str | ConnectionString,
    table: StrPath,
    *,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _planned: None,
) -> Verdict:
    """Compare every document of a bucket with its mirror, in parallel.

    ``on_progress`` is called with the number of changes that are compared, and that of all.
    """
    given = source_options(url, options)
    held = open_table(table, TableOptions(dict(storage_options or {})))
    return verify_table(_jobs(spark, given), given, held, on_progress)


def repair(
    spark: SparkSession,
    url: str | ConnectionString,
    table: StrPath,
    vbuckets: Iterable[int],
    *,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_status: Callable[[Mapping[str, Any]], None] = lambda _status: None,
) -> None:
    """Read vbuckets again from the beginning and replace their rows, in one commit each round.

    ``on_status`` is called once a second with `MirrorHandle.status`: what is being done.
    """
    held = open_table(table, TableOptions(dict(storage_options or {})))
    collection = f"{held.source['scope']}.{held.source['collection']}"
    handle = mirror(
        spark,
        url,
        {collection: table},
        once=True,
        keep_deletes="deleted" in held.schema.names,
        options=options,
        storage_options=storage_options,
        start_over=vbuckets,
    )
    while not handle.awaitTermination(1):
        on_status(handle.status)
