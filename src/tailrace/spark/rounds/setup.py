"""Setting up a mirror from a URL and paths: look at the bucket, then open or create the tables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypedDict

from ...clock import SYSTEM, Clock
from ...connstr import ConnectionString, parse
from ...errors import UsageError
from ...table.compaction import CompactionPolicy
from ...table.document_columns import INFER, DocumentColumns
from ...table.opening import TableOptions, open_or_create, open_table, table_exists
from ...table.rows import table_schema
from ...table.store import TableStore
from ..source.feed import collection_paths, open_source
from ..source.options import Options, parse_mirror_options
from .assignment import Assignment, MirrorSettings
from .change_log import CHANGES_SCHEMA
from .jobs import Jobs
from .mirror import Mirror
from .progress import RoundProgress
from .same_bucket import UUID, check_same_bucket, is_replaced
from .table_contents import mirror_contents, source_note
from .typed_tables import TypedWish, sample_documents, show_schema, shown_schema

__all__ = ["BucketAndTables", "MirrorKeywords", "StrPath", "build_mirror", "source_options"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CollectionTable:
    """Which collection goes into which table."""

    uri: str
    scope: str = "_default"
    collection: str = "_default"

    @property
    def path(self) -> str:
        """The collection as ``scope.collection``."""
        return f"{self.scope}.{self.collection}"

    @property
    def is_default(self) -> bool:
        """Whether it is the default collection, which every bucket has."""
        return self.path == "_default._default"


class BucketAndTables(TypedDict):
    """What to keep equal to what."""

    url: str | ConnectionString
    tables: StrPath | Mapping[str, StrPath]


class MirrorKeywords(TypedDict, total=False):
    """The settings of a mirror, as keyword arguments that a type checker sees."""

    once: bool
    trigger_s: float | None
    keep_deletes: bool
    changes: StrPath | None
    changes_keep_s: float | None
    undo_s: float | None
    undo_bytes: int | None
    maintenance: bool
    options: Mapping[str, str] | None
    storage_options: Mapping[str, str] | None
    on_progress: Callable[[RoundProgress], None] | None
    on_trouble: Callable[[str], None]
    start_over: Iterable[int]
    accept_new_bucket: bool
    policy: CompactionPolicy | None
    schema: str | None
    value_column: bool
    evolve: bool | None
    on_schema: Callable[[str], None]


def source_options(url: str | ConnectionString, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Options of the source for a URL."""
    where = parse(url) if isinstance(url, str) else url
    given = {"connectionString": str(where), "bucket": where.bucket}
    if where.username is not None:
        given["username"] = where.username
    if where.password is not None:
        given["password"] = where.password
    return {**given, **(options or {})}


def build_mirror(
    jobs: Jobs,
    url: str | ConnectionString,
    tables: StrPath | Mapping[str, StrPath],
    *,
    once: bool = False,
    trigger_s: float | None = None,
    keep_deletes: bool = False,
    changes: StrPath | None = None,
    changes_keep_s: float | None = None,
    undo_s: float | None = None,
    undo_bytes: int | None = None,
    maintenance: bool = True,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_progress: Callable[[RoundProgress], None] | None = None,
    on_trouble: Callable[[str], None] = lambda _: None,
    start_over: Iterable[int] = (),
    accept_new_bucket: bool = False,
    policy: CompactionPolicy | None = None,
    schema: str | None = None,
    value_column: bool = True,
    evolve: bool | None = None,
    on_schema: Callable[[str], None] = show_schema,
    clock: Clock = SYSTEM,
    in_background: bool = True,
) -> Mirror:
    """A mirror that has not been started; `tailrace.spark.mirror` says what its settings mean."""
    limits = {"trigger_s": trigger_s, "changes_keep_s": changes_keep_s, "undo_s": undo_s}
    for name, value in {**limits, "undo_bytes": undo_bytes}.items():
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} must be 0 or more, and finite")
    if changes is None and changes_keep_s is not None:
        raise UsageError("changes_keep_s needs a change log; give its path with changes")
    given = source_options(url, options)
    chosen = _chosen(tables)
    # No filter for the node: it would name collections by id, and one that is dropped and created again has
    # another id, so the position would pass over its documents. The tables choose their rows by name.
    parsed = parse_mirror_options(given)
    how = TableOptions(dict(storage_options or {}), undo_s, undo_bytes, clock)
    _check_apart([place.uri for place in chosen] + ([] if changes is None else [os.fspath(changes)]))
    tables_there = [open_table(place.uri, how) if table_exists(place.uri, how) else None for place in chosen]
    given, has_transactions = mirror_contents(
        given, parsed.include_transactions, [place.scope for place in chosen], tables_there
    )
    parsed = parse_mirror_options(given)
    with open_source(parsed, "spark-mirror") as source:
        vbucket_count, bucket_uuid = source.vbucket_count, source.bucket_uuid
    missing = _missing(chosen, parsed, given["bucket"], how)
    about: dict[str, Any] = {"bucket": given["bucket"], "vbuckets": vbucket_count}
    if bucket_uuid:
        about[UUID] = bucket_uuid
    wish = TypedWish(schema, evolve, value_column)
    opened, columns = [], []
    note = source_note(has_transactions=has_transactions)
    for place, held in zip(chosen, tables_there, strict=True):
        wanted: DocumentColumns | None
        if held is None and wish.schema == INFER:
            sample = sample_documents(parsed, place.scope, place.collection)
            wanted = wish.inferred(sample)
            on_schema(shown_schema(wanted, len(sample), place.path))
        else:
            wanted = wish.wanted(held)
            if held is not None and held.documents and wanted and wanted.fields != held.documents.fields:
                on_schema(
                    f"the table at {place.uri} gets more columns; existing documents get them when they "
                    "change, or now with 'tailrace verify --repair'"
                )
        # columns that a table does not have yet are added when the mirror has claimed it
        there = wanted if held is None else held.documents
        opened.append(
            open_or_create(
                place.uri,
                schema=table_schema(keep_deletes=keep_deletes, documents=there),
                source={**about, "scope": place.scope, "collection": place.collection, **note},
                documents=there,
                options=how,
            )
        )
        columns.append(wanted)
    log = None
    if changes is not None:
        source_of_log = {**about, "scope": "*", "collection": "*", "changes": True}
        log = open_or_create(changes, schema=CHANGES_SCHEMA, source=source_of_log, options=how)
    every = [*opened, *([] if log is None else [log])]
    if any(is_replaced(table, bucket_uuid) for table in every):
        if not accept_new_bucket:
            for table in every:
                check_same_bucket(table, bucket_uuid)
        start_over = range(vbucket_count)
    return Mirror(
        Assignment(
            jobs,
            given,
            opened,
            given["bucket"],
            MirrorSettings(
                trigger_s=trigger_s,
                once=once,
                max_changes=parsed.max_rows,
                maintenance=maintenance,
                changes_keep_s=changes_keep_s,
            ),
            log=log,
            missing=missing,
            start_over=frozenset(start_over),
            columns=columns,
            on_progress=on_progress,
            on_trouble=on_trouble,
            clock=clock,
            policy=policy,
            in_background=in_background,
            bucket_uuid=bucket_uuid,
        )
    )


def _chosen(tables: StrPath | Mapping[str, StrPath]) -> list[CollectionTable]:
    if not isinstance(tables, Mapping):
        return [CollectionTable(os.fspath(tables))]
    chosen = []
    for path, uri in tables.items():
        scope, dot, collection = path.partition(".")
        if not (scope and dot and collection):
            raise UsageError(f"{path!r} is not a collection; write scope.collection")
        chosen.append(CollectionTable(os.fspath(uri), scope, collection))
    return chosen


def _check_apart(uris: Sequence[str]) -> None:
    """Raise `UsageError` for tables in the same place or inside each other, before any of them is made."""
    places = [TableStore(uri).uri for uri in uris]
    for first, second in permutations(places, 2):
        if first == second:
            raise UsageError(f"two tables can't be at {first}; choose another path for one of them")
        if second.startswith(f"{first}/"):
            raise UsageError(
                f"{second} lies inside the table at {first}, and cleaning that table up would delete it; "
                "choose another path"
            )


def _missing(
    chosen: list[CollectionTable], options: Options, bucket: str, how: TableOptions
) -> tuple[str, ...]:
    """The collections that the bucket does not have.

    If a missing collection has a table, it was dropped, and the table will be emptied. Without a table it was
    never there, or is misspelt: that is a `UsageError`.
    """
    if all(collection.is_default for collection in chosen):
        return ()
    there = collection_paths(options)
    missing = [collection for collection in chosen if collection.path not in there]
    for collection in missing:
        if not table_exists(collection.uri, how):
            known = ", ".join(sorted(there)[:20])
            raise UsageError(
                f"bucket {bucket!r} has no collection {collection.path!r}, there are: {known}; "
                f"'tailrace collections' with --create {collection.path} makes one"
            )
    return tuple(collection.path for collection in missing)
