"""The public calls, such as `mirror` and `verify`: they take a URL and a path, not options and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from ..connstr import ConnectionString
from ..keywords import check_known, check_values, shows_keywords_of
from ..rng import unique_name
from ..table.opening import TableOptions, open_table
from .rounds.handle import MirrorHandle
from .rounds.jobs import SparkJobs
from .rounds.mirror import Mirror
from .rounds.setup import BucketAndTables, MirrorKeywords, StrPath, build_mirror, source_options
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
    check_values(BucketAndTables, {"url": url, "tables": tables})
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
    """Keep a table equal to a bucket; return a handle with the methods of a streaming query.

    ``tables`` is the path of the default collection's table, or paths by ``scope.collection``; a path may be
    an ``s3://``, ``gs://`` or ``az://`` URI, with ``storage_options``. Every change is applied exactly once,
    whatever is killed: the table itself holds the position. When the bucket takes changes back, so does the
    table.

    Settings:

    ``once``
        end when the table has caught up with the moment of the mirror's start
    ``trigger_s``
        seconds between two commits; by default as few as possible
    ``schema``, ``value_column``, ``evolve``, ``on_schema``
        columns for the documents' fields: ``schema`` is DDL such as ``"name STRING, tags ARRAY<STRING>"``, or
        ``"infer"`` to take them from a sample of the bucket and pass a description to ``on_schema`` before
        they are used. ``value_column`` keeps ``value`` beside them, ``evolve`` adds a column for a field that
        appears later (the default with ``"infer"``). The table keeps these settings, so a restart needs none
        of them. What does not fit its column goes to ``_rescued``
    ``keep_deletes``
        keep deleted documents as rows that are marked as deleted
    ``changes``, ``changes_keep_s``
        the path of a change log, to which every change is appended once (see `live_changes`), and how long
        it keeps them
    ``undo_s``, ``undo_bytes``
        how long, and in how many bytes at most, earlier versions are kept for rollbacks to return to
    ``accept_new_bucket``
        replace all rows if the bucket was deleted and created again; without it that is an error
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

    ``on_progress`` is called with the number of changes compared so far, and the total.
    """
    check_values(BucketAndTables, {"url": url})
    check_values(
        MirrorKeywords,
        {"options": options, "storage_options": storage_options, "on_progress": on_progress},
    )
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
    """Read vbuckets again from the beginning and replace their rows, one commit per round.

    ``on_status`` is called once a second with `MirrorHandle.status`.
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
