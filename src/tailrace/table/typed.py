"""JSON documents as typed columns.

Arrow's reader parses many documents together, strictly: a number is not a text, 1.5 is not a whole number.
Where it meets a document that does not fit, the documents are divided until those that fit are separate; the
few that are left are parsed one by one by `column_values`, which defines what a value must be and what is
wrong with it. Nothing is dropped: values that do not fit are in the column ``_rescued``, an object by field
path:

    {"age": {"value": "12", "reason": "a string, not INT"}, "address.zip": {…}}

A document that is not a JSON object is there under the empty path. The result for a document never depends on
its neighbours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from numpy.typing import NDArray

from .column_values import DATE, TIME, Misfits, fit, rescued_json, step_path, try_document
from .inferring import common_type, extended_type, has_more, type_of

__all__ = ["RESCUED", "DocumentShape", "ParsedDocuments"]

RESCUED = "_rescued"
"""The column for values that do not fit."""

_BLOCK = 4096
"""Documents that are read together, to share the cost of a call."""
_FAILURES = 3
"""After this many blocks that hold more than the columns, no further block is expected to fit as a whole."""
_STRIKES = 3
"""A field that more documents of a block than this don't fit is read separately, document by document."""
_SOME = 256
"""With at most this many documents a field is read separately at once, if no document is known to blame."""
_FEW = 16
"""Up to this many that can't be read together are parsed one by one, if no document is known to blame."""
_TRIES = 12
"""After this many attempts the rest of a block is parsed one by one: that is faster than looking for parts
that can be read together."""
_BRACKETS = 400
"""A document with more of them is parsed alone: Arrow's reader dies of deep nesting when it infers."""
_GROUP = 32
"""How many documents are checked together for that."""
_CASE_BIT = ord("[") ^ ord("{")
"""The only bit in which the two brackets differ."""
_IN_ROW = re.compile(r" in row (\d+)$")
_OF_TYPE = re.compile(r"Failed to convert JSON to (\w+)")
_IN_FIELD = re.compile(r"Column\(/([^/)]+)")
_NO_NUMBER = "NaN|Inf"
_WINDOW = 64 << 10
_BLANKS = " \t\r\n"
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, which every engine has."""


@dataclass
class ParsedDocuments:
    """Columns of documents, and what did not fit."""

    columns: list[pa.ChunkedArray]
    rescued: pa.ChunkedArray
    """As JSON, null where everything fits."""
    extended: pa.Schema | None = None
    """The fields and those that only documents have, if there are any and they were looked for."""


@dataclass(frozen=True)
class DocumentShape:
    """The fields of documents that become columns; picklable."""

    schema: pa.Schema
    find_unknown: bool = False
    """Whether to look for fields that are not in the schema."""
    rescue_documents: bool = True
    """Whether a value that is not a document is rescued whole."""

    def parse(self, values: pa.ChunkedArray) -> ParsedDocuments:
        """The columns of documents; ``values`` are texts, null where there is no document."""
        parts: list[_Part] = []
        failures = 0
        for first in range(0, len(values), _BLOCK):
            block = _flat(values.slice(first, _BLOCK))
            part = self._read_strictly(block) if failures < _FAILURES else None
            if part is None:
                failures += 1
                parts += self._parse_block(block)
            else:
                parts.append(part)
        columns = [
            pa.chunked_array([part.columns[number] for part in parts], field.type)
            for number, field in enumerate(self.schema)
        ]
        rescued = pa.chunked_array([part.rescued for part in parts], pa.string())
        seen: pa.DataType | None = None
        for part in parts:
            seen = _type_of_both(seen, part.seen)
        extended = None
        if seen is not None:
            extended = pa.schema(list(extended_type(pa.struct(list(self.schema)), seen)))
        return ParsedDocuments(columns, rescued, extended)

    def _read_strictly(self, values: pa.Array) -> _Part | None:
        """All of them, if they have only these fields and everything fits; else None.

        The texts need not be searched for what Arrow's reader must not see: a number that JSON does not have
        fits no column, and neither does anything nested deeper than the columns.
        """
        if any(_has_map(field.type) for field in self.schema):
            return None
        if not pc.all(_is_bare_object(values), min_count=0).as_py():
            return None
        try:
            return self._read(values, strict=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None

    def _parse_block(self, values: pa.Array) -> Iterator[_Part]:
        odd = _odd_documents(values)
        tries = count(1)
        edges = [0, *(np.flatnonzero(np.diff(odd)) + 1).tolist(), len(values)]
        for first, last in pairwise(edges):
            piece = values.slice(first, last - first)
            if odd[first]:
                yield self._one_by_one(piece)
            else:
                yield from self._parse(piece, tries)

    def _parse(self, values: pa.Array, tries: Iterator[int]) -> Iterator[_Part]:
        """Read documents together as far as possible.

        A document that does not fit is taken out; a field that several do not fit is read separately.
        """
        apart = {field.name for field in self.schema if _has_map(field.type)}
        strikes: Counter[str] = Counter()
        while len(values):
            try:
                yield self._filled(values, self._read(values, apart), apart)
                return
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                problem = str(error)
            if next(tries) > _TRIES:
                yield self._one_by_one(values)
                return
            to_blame, row = self._to_blame(problem) - apart, _row_of(problem)
            strikes.update(to_blame)
            is_often = any(strikes[name] > _STRIKES for name in to_blame)
            if to_blame and (is_often or (row is None and len(values) <= _SOME)):
                apart |= to_blame
            elif row is not None and row < len(values) - values.null_count and not is_often:
                row = _place(values, row)
                if row:
                    yield from self._parse(values.slice(0, row), tries)
                yield self._one_by_one(values.slice(row, 1))
                values = values.slice(row + 1)
            elif len(values) > _FEW:
                half = len(values) // 2
                yield from self._parse(values.slice(0, half), tries)
                values = values.slice(half)
            else:
                yield self._one_by_one(values)
                return

    def _to_blame(self, problem: str) -> set[str]:
        """The fields that an error of Arrow's reader may mean; it names a field or a type."""
        name = _IN_FIELD.search(problem)
        if name:
            return {name[1]} & set(self.schema.names)
        kind = _OF_TYPE.search(problem)
        if kind:
            return {field.name for field in self.schema if kind[1] in str(field.type)}
        return set()

    def _read(self, values: pa.Array, apart: Collection[str] = (), *, strict: bool = False) -> _Part:
        """Parse all with Arrow's reader, which raises if one does not fit. Fields in ``apart`` are left null.

        With ``strict`` it also raises for a field that is not in the schema.
        """
        there = values.drop_null() if values.null_count else values
        if not len(there):
            return _Part.empty(self.schema, len(values))
        text = _joined(there)
        wanted = [field for field in self.schema if field.name not in apart]
        finding = self.find_unknown and not apart and not strict
        rows = pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=text.size + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([pa.field(field.name, _read_as(field.type)) for field in wanted]),
                newlines_in_values=False,
                unexpected_field_behavior="error" if strict else "infer" if finding else "ignore",
            ),
        )
        if rows.num_rows != len(there):  # some text has two documents
            raise pa.ArrowInvalid("not one document a text")
        columns = [
            pa.nulls(len(there), field.type)
            if field.name in apart
            else _converted(_flat(rows[field.name]), field.type)
            for field in self.schema
        ]
        if values.null_count:
            places = pc.subtract(pc.cumulative_sum(pc.cast(values.is_valid(), pa.int64())), 1)
            places = pc.if_else(values.is_valid(), places, None)
            columns = [column.take(places) for column in columns]
        seen = None
        known = pa.struct(list(self.schema))
        if finding and has_more(pa.struct(list(rows.schema)), known):
            seen = self._seen(there, known)
        return _Part(columns, pa.nulls(len(values), pa.string()), seen)

    def _seen(self, values: pa.Array, known: pa.DataType) -> pa.DataType | None:
        """The type of documents with unknown fields. Not Arrow's: that takes texts for times."""
        seen: pa.DataType | None = None
        for text in values.to_pylist():
            kind = type_of(try_document(text, {}))
            if kind is not None and has_more(kind, known):
                seen = _type_of_both(seen, kind)
        return seen

    def _filled(self, values: pa.Array, part: _Part, apart: Collection[str]) -> _Part:
        """A part with the fields added that were left out, read document by document."""
        if not apart:
            return part
        fields = pa.schema([field for field in self.schema if field.name in apart])
        own = replace(self, schema=fields)._one_by_one(values, pa.struct(list(self.schema)))
        filled = dict(zip(fields.names, own.columns, strict=True))
        columns = [
            filled.get(field.name, column) for field, column in zip(self.schema, part.columns, strict=True)
        ]
        return _Part(columns, own.rescued, own.seen)

    def _one_by_one(self, values: pa.Array, known: pa.DataType | None = None) -> _Part:
        columns: list[list[Any]] = [[] for _ in self.schema]
        rescued: list[str | None] = []
        seen: pa.DataType | None = None
        known = pa.struct(list(self.schema)) if known is None else known
        for text in values.to_pylist():
            wrong: Misfits = {}
            document = try_document(text, wrong)
            for column, field in zip(columns, self.schema, strict=True):
                column.append(fit(document.get(field.name), field.type, step_path("", field.name), wrong))
            if self.find_unknown:
                kind = type_of(document)
                if kind is not None and has_more(kind, known):
                    seen = _type_of_both(seen, kind)
            rescued.append(rescued_json(wrong, with_document=self.rescue_documents) if wrong else None)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self.schema, strict=True)]
        return _Part(arrays, pa.array(rescued, pa.string()), seen)


@dataclass
class _Part:
    columns: list[pa.Array]
    rescued: pa.Array
    seen: pa.DataType | None = None
    """The type of the documents that have more fields than the schema."""

    @classmethod
    def empty(cls, schema: pa.Schema, rows: int) -> _Part:
        return cls([pa.nulls(rows, field.type) for field in schema], pa.nulls(rows, pa.string()))


def _type_of_both(first: pa.DataType | None, second: pa.DataType | None) -> pa.DataType | None:
    if first is None or second is None:
        return second if first is None else first
    return common_type(first, second)


# what can't be read together


def _odd_documents(values: pa.Array) -> NDArray[np.bool_]:
    """Texts that Arrow's reader must not see among others.

    It reads all texts as one, so each must begin and end as an object does: if it then finds as many objects
    as there are texts, each text is one object. It also accepts numbers that JSON does not have, and its
    stack is limited.
    """
    plain = _is_bare_object(values)
    if not pc.all(plain, min_count=0).as_py():
        plain = _is_bare_object(pc.ascii_trim(values, _BLANKS))
    odd: NDArray[np.bool_] = ~_as_mask(plain, null=True)
    data, offsets = _bytes_of(values)
    if _has(data, b"NaN") or _has(data, b"Inf"):
        odd |= _as_mask(pc.match_substring_regex(values, _NO_NUMBER), null=False)
    edges = offsets.tolist()
    for first in range(0, len(values), _GROUP):
        last = min(first + _GROUP, len(values))
        if _brackets(data[edges[first] : edges[last]]) > _BRACKETS:
            for row in range(first, last):
                odd[row] |= _brackets(data[edges[row] : edges[row + 1]]) > _BRACKETS
    return odd


def _is_bare_object(values: pa.Array) -> pa.Array:
    """Which texts begin and end as an object does."""
    return pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}"))


def _as_mask(flags: pa.Array, *, null: bool) -> NDArray[np.bool_]:
    return np.asarray(pc.fill_null(flags, null).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _bytes_of(values: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The bytes of texts, and where each begins; nulls are empty."""
    _, places, data = values.buffers()
    offsets = np.frombuffer(places, np.int32)[values.offset : values.offset + len(values) + 1]
    if data is None:
        return np.zeros(0, np.uint8), offsets - offsets[0]
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]], offsets - offsets[0]


def _brackets(data: NDArray[np.uint8]) -> int:
    return int(np.count_nonzero((data | _CASE_BIT) == ord("{")))


def _has(data: NDArray[np.uint8], word: bytes) -> bool:
    """Whether the data contains a word of three letters; much faster than ``in`` of bytes."""
    for first in range(0, len(data), _WINDOW):  # a window stays in the processor's cache
        window = data[first : first + _WINDOW + 2]
        places = np.flatnonzero(window[: max(0, len(window) - 2)] == word[0])
        if len(places):
            places = places[window[places + 1] == word[1]]
            if (window[places + 2] == word[2]).any():
                return True
    return False


# together


def _row_of(problem: str) -> int | None:
    """Which document Arrow's reader complains about, where it says so."""
    row = _IN_ROW.search(problem)
    return int(row[1]) if row else None


def _place(values: pa.Array, row: int) -> int:
    """The place of the document that is number ``row`` among those that are not null."""
    if not values.null_count:
        return row
    return int(pc.indices_nonzero(values.is_valid())[row].as_py())


def _joined(values: pa.Array) -> pa.Buffer:
    """Documents as lines; a line break inside one becomes a tab, which is no more allowed in a string."""
    data, _ = _bytes_of(values)
    if (data == ord("\n")).any():
        values = pc.replace_substring(values, "\n", "\t")
    lines = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    return pc.binary_join(lines, "\n")[0].as_buffer()


def _has_map(kind: pa.DataType) -> bool:
    """Whether a type contains a map, which Arrow's reader does not know."""
    if pa.types.is_struct(kind):
        return any(_has_map(part.type) for part in kind)
    if pa.types.is_list(kind):
        return _has_map(kind.value_type)
    return bool(pa.types.is_map(kind))


def _read_as(kind: pa.DataType) -> pa.DataType:
    """The type for Arrow's reader: dates and times are read as text."""
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, _read_as(part.type)) for part in kind])
    return pa.list_(_read_as(kind.value_type)) if pa.types.is_list(kind) else kind


def _converted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """What was read, as a column of this type; ArrowInvalid if a value does not fit."""
    if pa.types.is_struct(kind):
        names = [part.name for part in column.type]
        parts = [_converted(column.field(names.index(part.name)), part.type) for part in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=column.is_null())
    if pa.types.is_list(kind):
        inner = _converted(column.flatten(), kind.value_type)
        sizes = pc.fill_null(pc.list_value_length(column), 0)
        offsets = np.concatenate([[0], np.cumsum(sizes.to_numpy(zero_copy_only=False))]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), inner, type=kind, mask=column.is_null())
    if pa.types.is_floating(kind):
        if not pc.all(pc.is_finite(column), min_count=0).as_py():
            raise pa.ArrowInvalid("Failed to convert JSON to " + str(kind))
        return column
    if pa.types.is_decimal(kind):
        try:
            column.validate(full=True)  # the reader accepts numbers with one digit too many
        except pa.ArrowInvalid:
            raise pa.ArrowInvalid("Failed to convert JSON to decimal128") from None
        return column
    if pa.types.is_timestamp(kind):
        return _moments(column, kind, TIME)
    if pa.types.is_date(kind):
        return _moments(column, kind, DATE)
    return column


def _moments(column: pa.Array, kind: pa.DataType, pattern: str) -> pa.Array:
    if not pc.all(pc.match_substring_regex(column, f"^{pattern}$"), min_count=0).as_py():
        raise pa.ArrowInvalid("Failed to convert JSON to " + str(kind).partition("[")[0])
    moments = column.cast(kind)
    if pa.types.is_timestamp(kind):
        span = pc.min_max(moments.cast(pa.int64()))
        low, high = span["min"].as_py(), span["max"].as_py()
        if low is not None and not _FIRST_US <= low <= high <= _LAST_US:
            raise pa.ArrowInvalid("Failed to convert JSON to timestamp")
    return moments


def _flat(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
