"""What leaves the reader: which columns, in which form, and which rows.

Spark does not prune the columns of Python sources: whatever a reader returns travels to Java, even if the
query does not use it. So columns are chosen here, by the option ``columns`` or by ``.schema(...)``, and the
others are never decoded; without ``value`` the node does not even send it. Rows are chosen by the options
``ops`` and ``keyPrefix``, or by the filters of a query if Spark passes them.

Nothing here imports pandas. Many small functions of Arrow do, which costs half a second in every task. Where
rows are only passed on, nothing of the protocol is imported either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ...errors import UsageError
from .columns import COLUMN_TYPES, TEXT_OR_BINARY, column_types

if TYPE_CHECKING:
    from .options import Options

__all__ = ["Selection"]

_DATATYPE, _VALUE, _XATTRS = "datatype", "value", "xattrs"


@dataclass(frozen=True)
class Selection:
    """Columns with their types, and conditions that rows must meet; picklable."""

    types: Mapping[str, str]
    """In the order in which they leave; types as Spark writes them."""
    ops: frozenset[str] | None = None
    key_prefixes: tuple[bytes, ...] | None = None
    """Prefixes of a document's key; rows that are not changes of documents pass."""
    collections: frozenset[str] | None = None
    scopes: frozenset[str] | None = None

    @classmethod
    def of(cls, options: Options, schema: Any = None) -> Selection:
        """The selection of the options; with a ``schema`` of Spark, exactly its columns."""
        types = column_types(options)
        if schema is not None:
            types = _checked({field.name: field.dataType.simpleString() for field in schema.fields})
        return cls(
            types,
            None if options.ops is None else frozenset(options.ops),
            None if options.key_prefix is None else (options.key_prefix.encode(),),
        )

    @property
    def takes_values(self) -> bool:
        """Whether the node must send values.

        The datatype comes with the value; a stream without values says "raw" for every document.
        """
        from ...columns.row_kinds import DELETING_OPS, ROLLBACK

        has_column = _VALUE in self.types or _DATATYPE in self.types
        return has_column and (self.ops is None or bool(self.ops - {*DELETING_OPS, ROLLBACK}))

    @property
    def has_only_changes(self) -> bool:
        """Whether it takes nothing but changes of documents."""
        from ...columns.row_kinds import CHANGE_OPS

        return self.ops is not None and self.ops <= set(CHANGE_OPS)

    def limited(
        self,
        *,
        ops: Iterable[str] | None = None,
        key_prefixes: Iterable[bytes] | None = None,
        collections: Iterable[str] | None = None,
        scopes: Iterable[str] | None = None,
    ) -> Selection:
        """The selection with more conditions."""
        prefixes = self.key_prefixes
        if key_prefixes is not None:
            prefixes = tuple(
                longer
                for longer in dict.fromkeys(key_prefixes)
                if prefixes is None or longer.startswith(prefixes)
            )
        return replace(
            self,
            ops=_allowed_by_both(self.ops, ops),
            key_prefixes=prefixes,
            collections=_allowed_by_both(self.collections, collections),
            scopes=_allowed_by_both(self.scopes, scopes),
        )

    def rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch that meet the conditions, with all columns."""
        if (self.ops, self.key_prefixes, self.collections, self.scopes) == (None, None, None, None):
            return batch
        import pyarrow.compute as pc

        from ...columns.batch import strings_of
        from ...columns.row_kinds import are_changes

        for column, words in (("op", self.ops), ("collection", self.collections), ("scope", self.scopes)):
            if words is not None and batch.num_rows:
                batch = batch.filter(pc.is_in(batch[column], value_set=strings_of(sorted(words))))
        if self.key_prefixes is not None and batch.num_rows:
            keys = batch["key"]
            passes = pc.invert(are_changes(batch))
            for prefix in self.key_prefixes:
                passes = pc.or_(passes, pc.fill_null(pc.starts_with(keys, pattern=prefix), False))
            batch = batch.filter(passes)
        return batch

    def columns_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a batch, in the form that was asked for."""
        if self.types == COLUMN_TYPES:
            return batch
        arrays = [
            _as_text(batch[name]) if type_ == "string" and name in TEXT_OR_BINARY else batch[name]
            for name, type_ in self.types.items()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow_schema)

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of the batches that leave."""
        from ...columns.batch import SCHEMA

        return pa.schema(
            [
                (name, pa.string() if type_ == "string" else SCHEMA.field(name).type)
                for name, type_ in self.types.items()
            ]
        )


def _allowed_by_both(mine: frozenset[str] | None, others: Iterable[str] | None) -> frozenset[str] | None:
    if others is None:
        return mine
    return frozenset(others) if mine is None else mine & frozenset(others)


def _checked(types: Mapping[str, str]) -> dict[str, str]:
    """Columns and types of a user's schema; `UsageError` if the source can't have them."""
    if not types:
        raise UsageError("the schema has no columns; leave it out to have all of them")
    for name, type_ in types.items():
        if name not in COLUMN_TYPES:
            raise UsageError(
                f"the source has no column {name!r}; it has {', '.join(COLUMN_TYPES)}. Fields of documents "
                "become columns by ts.typed(frame, schema)"
            )
        wanted = ("binary", "string") if name in TEXT_OR_BINARY else (COLUMN_TYPES[name],)
        if type_ not in wanted:
            raise UsageError(
                f"the column {name} is {type_.upper()} in the schema, but must be "
                f"{' or '.join(word.upper() for word in wanted)}"
            )
    return dict(types)


def _as_text(column: pa.Array) -> pa.Array:
    """Bytes as text; U+FFFD replaces what is not UTF-8, as in Spark's ``make_valid_utf8``."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if raw is None else raw.decode("utf-8", "replace") for raw in column.to_pylist()]
        return pa.array(texts, pa.string())
