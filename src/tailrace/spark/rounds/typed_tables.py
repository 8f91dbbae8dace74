"""Typed tables: the columns asked for, those that the table has, and a sample of the bucket to infer them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from ...columns.row_kinds import are_mutations, kind_of
from ...errors import UsageError
from ...model import Position
from ...table.column_values import try_document
from ...table.contract import Table
from ...table.ddl import format_type
from ...table.document_columns import INFER, DocumentColumns
from ...table.inferring import extended_type, infer_fields
from ...table.nested import is_part
from ..source.feed import open_source
from ..source.options import Options

__all__ = ["SAMPLE", "TypedWish", "sample_documents", "show_schema", "shown_schema"]

SAMPLE = 2_000
"""How many documents a schema is inferred from."""
_SAMPLE_BYTES = 64 << 20
_SAMPLE_VBUCKETS = 64


@dataclass(frozen=True)
class TypedWish:
    """What the user who starts a mirror asks of its columns."""

    schema: str | None = None
    """DDL, ``infer``, or None for the table's columns; then a new table has no columns of documents."""
    evolve: bool | None = None
    value_column: bool = True

    def __post_init__(self) -> None:
        if self.schema is not None and not self.schema.strip():
            raise UsageError("the schema is empty; write one such as 'name STRING, age INT', or infer")
        if self.schema is not None and self.schema.strip().lower() == INFER:
            object.__setattr__(self, "schema", INFER)

    def inferred(self, sample: Sequence[str | None]) -> DocumentColumns:
        """Columns for a new table, from documents."""
        documents = [try_document(text, {}) for text in sample]
        evolve = True if self.evolve is None else self.evolve
        columns = DocumentColumns(pa.schema([]), evolve, self.value_column)
        return columns.joined([replace(columns, fields=infer_fields(documents))])

    def wanted(self, held: Table | None) -> DocumentColumns | None:
        """The columns that a table is to have; None if it is not typed, `UsageError` if that can't be."""
        if held is None:
            return self._of_new_table()
        columns = held.documents
        if columns is None:
            self._check_untyped(held)
            return None
        if not self.value_column and columns.keep_value:
            raise UsageError(
                f"the table at {held.uri} has a value column, which can't be removed; continue with "
                "it, or give another path to make a new table beside it"
            )
        if self.evolve is not None:
            columns = replace(columns, evolve=self.evolve)
        if self.schema is None or self.schema == INFER:
            return columns
        asked = DocumentColumns.from_text(self.schema)
        known = {field.name: field.type for field in columns.fields}
        for field in asked.fields:
            kind = known.get(field.name)
            if kind is not None and not is_part(field.type, extended_type(kind, field.type)):
                raise UsageError(
                    f"the table at {held.uri} has {field.name} as {format_type(kind)}, not "
                    f"{format_type(field.type)}; leave out the schema to keep the columns that it has, "
                    "or give another path to make a new table beside it"
                )
        return columns.joined([asked])

    def _of_new_table(self) -> DocumentColumns | None:
        if self.schema is not None:
            return DocumentColumns.from_text(self.schema, evolve=self.evolve, keep_value=self.value_column)
        if not self.value_column or self.evolve is not None:
            asked = "columns for new fields are" if self.value_column else "leaving the value column out is"
            raise UsageError(f"{asked} for typed tables; give a schema: the columns, or infer")
        return None

    def _check_untyped(self, held: Table) -> None:
        if self.schema is not None or not self.value_column or self.evolve is not None:
            raise UsageError(
                f"the table at {held.uri} is not typed; leave out the schema to keep it as it is, or "
                "give another path to make a typed table beside it"
            )


def sample_documents(options: Options, scope: str, collection: str) -> list[str | None]:
    """Some documents of a collection, from vbuckets all over the bucket."""
    texts: list[str | None] = []
    with open_source(options, "spark-sample") as source:
        high = source.high_seqnos()
        filled = sorted(vbucket for vbucket, seqno in high.items() if seqno)
        spread = filled[:: max(1, len(filled) // _SAMPLE_VBUCKETS)]
        for vbuckets in (spread, sorted(set(filled) - set(spread))):
            if vbuckets and len(texts) < SAMPLE:
                ends = {vbucket: high[vbucket] for vbucket in vbuckets}
                start = dict.fromkeys(vbuckets, Position.BEGINNING)
                with closing(source.batches(start, ends, vbuckets=vbuckets)) as batches:
                    _take_sample(batches, scope, collection, texts)
    return texts[:SAMPLE]


def _take_sample(
    batches: Iterable[pa.RecordBatch], scope: str, collection: str, texts: list[str | None]
) -> None:
    """Add texts until there are enough; only some of each batch, since its documents may be much alike."""
    size = 0
    for batch in batches:
        if kind_of(batch) is not None:
            continue
        own = pc.and_(pc.equal(batch["scope"], scope), pc.equal(batch["collection"], collection))
        own = pc.and_(pc.fill_null(own, False), are_mutations(batch))
        size += batch.nbytes
        for data in batch["value"].filter(own).slice(0, SAMPLE // 8).to_pylist():
            texts.append(None if data is None else data.decode(errors="replace"))
        if len(texts) >= SAMPLE or size >= _SAMPLE_BYTES:
            return


def shown_schema(columns: DocumentColumns, documents: int, collection: str) -> str:
    """The inferred schema as a sentence for people."""
    where = "" if collection == "_default._default" else f" of {collection}"
    if not documents:
        return f"the bucket has no document{where} yet: fields become columns when they appear"
    return f"schema inferred from {documents} documents{where}: {columns}"


def show_schema(text: str) -> None:
    """Write a message about the schema to stderr: the default of ``on_schema``."""
    sys.stderr.write(f"tailrace: {text}\n")
