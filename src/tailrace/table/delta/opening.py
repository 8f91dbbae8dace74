"""Tells a mirror's table of this format from one that a mirror must not touch, and makes new ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ... import rng
from ...clock import Clock
from ...errors import UsageError
from ..contract import StorageError, TableDamaged
from ..document_columns import DocumentColumns
from ..store import TableStore
from .actions import CommitInfo, DomainMetadata, Metadata
from .log import DeltaLog
from .schema import schema_to_json
from .state import PROTOCOL, RUN, TableState, check_readable

__all__ = [
    "DOCUMENTS",
    "SECRET",
    "SOURCE",
    "check_mirror",
    "check_place",
    "create_mirror",
    "load_mirror",
    "source_text",
]

FORMAT, SOURCE, SECRET = "tailrace.format", "tailrace.source", "tailrace.secret"
DOCUMENTS = "tailrace.documents"
"""How documents become columns: `DocumentColumns` as JSON; a table without it is not typed."""
FORMAT_VERSION = "2"
_NAME = "tailrace mirror"
"""The name of a mirror's tables, those of the old layout too."""


def load_mirror(store: TableStore) -> TableState | None:
    """The newest state of the mirror's table in a store; None if there is no table."""
    state = DeltaLog(store).load()
    if state is not None:
        check_mirror(state, store)
    return state


def check_mirror(state: TableState, store: TableStore) -> None:
    """UsageError if it is not a table that a mirror of this version can continue."""
    if state.metadata is None:
        raise TableDamaged(f"the log of the table at {store.uri} has no metadata")
    configuration = state.metadata.configuration
    layout = configuration.get(FORMAT)
    if layout is None and state.metadata.name == _NAME:
        raise UsageError(
            f"the table at {store.uri} has the layout of an earlier Tailrace, which is no longer written; "
            "give another path to make a new table beside it, and delete this one when that has caught up"
        )
    if layout is None or not {SOURCE, SECRET} <= configuration.keys():
        raise UsageError(
            f"the Delta table at {store.uri} was not made by 'tailrace mirror'; choose another path"
        )
    if layout != FORMAT_VERSION:
        raise UsageError(
            f"the table at {store.uri} was written by a newer Tailrace (format {layout[:20]}); use that one"
        )
    check_readable(state, store.uri)


def check_place(store: TableStore) -> None:
    """UsageError if a new table would lie inside another one, whose VACUUM would delete it."""
    for outer in store.parents():
        try:
            is_table = any(True for _ in outer.list("_delta_log/"))
        except (StorageError, OSError):
            return  # we have no access there, so presumably nor has whoever cleans
        if is_table:
            raise UsageError(
                f"{store.uri} lies inside the table at {outer.uri}, and whoever cleans that one up takes "
                "it for waste; choose another path"
            )


def create_mirror(
    store: TableStore,
    schema: pa.Schema,
    source: Mapping[str, Any],
    clock: Clock,
    documents: DocumentColumns | None = None,
) -> None:
    """Make version 0; if somebody else was faster, theirs stands."""
    check_place(store)
    now_ms = clock.time_ns() // 1_000_000
    name = rng.unique_name()
    metadata = Metadata(
        id="-".join([name[:8], name[8:12], name[12:16], name[16:20], name[20:]]),
        schema_string=schema_to_json(schema),
        configuration={
            "delta.enableDeletionVectors": "true",
            FORMAT: FORMAT_VERSION,
            SOURCE: json.dumps(dict(source)),
            SECRET: rng.unique_name(),
            **({} if documents is None else {DOCUMENTS: documents.to_json()}),
        },
        name=_NAME,
        description=f"mirror of {source_text(source)}",
        created_ms=now_ms,
    )
    info = {
        "timestamp": now_ms,
        "operation": "TAILRACE CREATE",
        "operationParameters": {},
        "txnId": rng.unique_name(),
        RUN: "create",
    }
    DeltaLog(store).commit(0, [CommitInfo(info), PROTOCOL, metadata, DomainMetadata(RUN, "")])


def is_same_source(held: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two have the same name; their uuids, which tell buckets of one name apart, are not compared."""
    return {**held, "uuid": None} == {**other, "uuid": None}


def source_text(source: Mapping[str, Any]) -> str:
    name = ".".join(str(source.get(part)) for part in ("bucket", "scope", "collection"))
    return f"{name} ({source['vbuckets']} vbuckets)" if "vbuckets" in source else name
