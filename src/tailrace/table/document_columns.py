"""Which columns a typed table has for the fields of its documents, and what they are called.

A column has the name of its field, as far as a table allows:

- one of the table's own names (``key``, ``value``, ``cas``, …) is prefixed with ``doc_``;
- characters that Delta does not allow (blanks, ``,;{}()=`` and line breaks) become ``_``;
- names that differ only in case are the same to Spark: the second gets the suffix ``_2``.

A field inside another follows the last two rules. The table itself keeps which columns it has, with the names
that the documents use; columns are only ever added, at the end, so that names never change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import pyarrow as pa

from .ddl import format_ddl, parse_ddl
from .inferring import common_type, count_parts, extended_type
from .nested import with_names
from .typed import RESCUED, DocumentShape

__all__ = ["INFER", "MAX_COLUMNS", "DocumentColumns"]

INFER = "infer"
"""In place of a schema: it is inferred from a sample of the bucket."""
MAX_COLUMNS = 1000
"""How many columns a table may get from new fields, those inside others included."""

_TAKEN = frozenset(
    [
        "key",
        "key_base64",
        "value",
        "value_base64",
        "vbucket",
        "vb_uuid",
        "seqno",
        "cas",
        "rev",
        "flags",
        "expiry",
        "datatype",
        "event_time",
        "deleted",
        "_rescued",
        "_metadata",
        "_change_type",
        "_commit_version",
        "_commit_timestamp",
    ]
)
_ODD_SIGNS = re.compile(r"[ ,;{}()\n\t=]")
_OWN_PREFIX = "doc_"


@dataclass(frozen=True)
class DocumentColumns:
    """How documents become columns of a table; picklable."""

    fields: pa.Schema
    """By their names in the documents."""
    evolve: bool = False
    """Whether a field that appears later becomes a column."""
    keep_value: bool = True
    """Whether the document itself is kept too, in ``value``."""

    @classmethod
    def from_text(cls, text: str, *, evolve: bool | None = None, keep_value: bool = True) -> DocumentColumns:
        """From a schema as people write it. Fields that appear later become columns only with ``evolve``."""
        return cls(parse_ddl(text), bool(evolve), keep_value)

    def to_json(self) -> str:
        """As a table keeps it."""
        fields = format_ddl(self.fields)
        return json.dumps({"fields": fields, "evolve": self.evolve, "value": self.keep_value})

    @classmethod
    def from_json(cls, text: str) -> DocumentColumns:
        """Reads what `to_json` wrote."""
        kept = json.loads(text)
        fields = parse_ddl(kept["fields"]) if kept["fields"] else pa.schema([])
        return cls(fields, kept["evolve"], kept["value"])

    @cached_property
    def columns(self) -> pa.Schema:
        """The columns of the table, by their names there."""
        names = _unique_names(self.fields, taken=_TAKEN)
        return pa.schema(
            [pa.field(name, _named(field.type)) for name, field in zip(names, self.fields, strict=True)]
        )

    def shape(self) -> DocumentShape:
        """The parser of the documents."""
        room = sum(count_parts(field.type) for field in self.fields) < MAX_COLUMNS
        return DocumentShape(self.fields, self.evolve and room, rescue_documents=not self.keep_value)

    def parse(self, values: pa.ChunkedArray) -> tuple[pa.Table, DocumentColumns]:
        """The columns of documents and `_rescued`; and these columns with new ones, if any appeared."""
        parsed = self.shape().parse(values)
        if parsed.extended is not None:
            more = replace(self, fields=_limited(self.fields, parsed.extended))
            if more.fields != self.fields:
                return more.parse(values)
        arrays = [
            pa.chunked_array([with_names(chunk, field.type) for chunk in column.chunks], field.type)
            for column, field in zip(parsed.columns, self.columns, strict=True)
        ]
        return pa.table([parsed.rescued, *arrays], names=[RESCUED, *self.columns.names]), self

    def joined(self, others: Iterable[DocumentColumns]) -> DocumentColumns:
        """These columns with the new fields of several tasks; known fields keep their types."""
        kinds = [pa.struct(list(other.fields)) for other in others]
        if not kinds:
            return self
        fields = self._with(reduce(common_type, kinds))
        if fields == self.fields:  # all together have no room: take the first that has more and fits
            fields = next((more for kind in kinds if (more := self._with(kind)) != self.fields), fields)
        return replace(self, fields=fields)

    def _with(self, seen: pa.DataType) -> pa.Schema:
        """The fields, and those that only documents of a type have."""
        fields = pa.schema(list(extended_type(pa.struct(list(self.fields)), seen)))
        return _limited(self.fields, fields)

    def holds(self, other: DocumentColumns) -> bool:
        """Whether what was written with other columns can be read with these, which have all of them."""
        return other._places <= self._places

    @cached_property
    def _places(self) -> frozenset[_ColumnPlace]:
        return frozenset(_places(self.fields, taken=_TAKEN))

    def __str__(self) -> str:
        return format_ddl(self.fields)


def _limited(known: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """New fields while there is room for them; there is always room for those already known."""
    room = MAX_COLUMNS - sum(count_parts(field.type) for field in known)
    fields = []
    for field in wanted:
        before = known.field(field.name) if field.name in known.names else None
        more = count_parts(field.type) - (count_parts(before.type) if before is not None else 0)
        if more <= room:
            fields.append(field)
            room -= more
        elif before is not None:
            fields.append(before)
    return pa.schema(fields)


# names


def _unique_names(fields: Iterable[pa.Field], taken: frozenset[str] = frozenset()) -> list[str]:
    names: list[str] = []
    used = set(taken)
    for field in fields:
        plain = _ODD_SIGNS.sub("_", field.name)
        if plain.lower() in taken or not plain or plain.lower().startswith("__tailrace"):
            plain = _OWN_PREFIX + plain
        name, number = plain, 2
        while name.lower() in used:
            name, number = f"{plain}_{number}", number + 1
        used.add(name.lower())
        names.append(name)
    return names


_ColumnPlace = tuple[tuple[str, ...], tuple[str, ...], pa.DataType]


def _places(
    fields: Iterable[pa.Field],
    within: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    taken: frozenset[str] = frozenset(),
) -> Iterator[_ColumnPlace]:
    """For every value in documents: the fields and the columns that lead to it, and its type."""
    fields = list(fields)
    path, columns = within
    for field, name in zip(fields, _unique_names(fields, taken=taken), strict=True):
        kind, inner = field.type, ((*path, field.name), (*columns, name))
        while pa.types.is_list(kind):
            kind, inner = kind.value_type, ((*inner[0], "[]"), (*inner[1], "[]"))
        if pa.types.is_struct(kind):
            yield from _places(kind, inner)
        else:
            yield (*inner, kind)


def _named(kind: pa.DataType) -> pa.DataType:
    """A type with its parts renamed as a table allows."""
    if pa.types.is_struct(kind):
        names = _unique_names(kind)
        return pa.struct([pa.field(name, _named(part.type)) for name, part in zip(names, kind, strict=True)])
    if pa.types.is_list(kind):
        return pa.list_(_named(kind.value_type))
    return pa.map_(pa.string(), _named(kind.item_type)) if pa.types.is_map(kind) else kind
