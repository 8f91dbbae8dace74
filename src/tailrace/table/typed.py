"""JSON documents as typed columns.

Arrow's reader parses many documents at once, strictly: a number is no text, 1.5 is no whole number. Where it
finds a document that does not fit, the documents are divided until those that fit are apart; the few that are
left are taken one by one, by `fit`, which says what a value must be and what is wrong with it. Nothing is
dropped: what does not fit stands in the column ``_rescued``, an object of the field's path:

    {"age": {"value": "12", "reason": "a string, not INT"}, "address.zip": {…}}

A document that is no JSON object stands there under the empty path.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from .ddl import format_type

__all__ = ["RESCUED", "DocumentShape", "ParsedDocuments", "fit"]

RESCUED = "_rescued"
"""The column of what does not fit."""

_BLOCK = 2048
"""Documents that are read at once."""
_STRIKES = 3
"""A field in which more documents of a block don't fit is read apart, document by document."""
_SOME = 256
"""Of so many a field is read apart at once, where it is not known which document is to blame."""
_FEW = 16
"""So few that can't be read together are taken one by one, where it is not known which one is to blame."""
_IN_ROW = re.compile(r" in row (\d+)$")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_OF_TYPE = re.compile(r"Failed to convert JSON to (\w+)")
_IN_FIELD = re.compile(r"Column\(/([^/)]+)")
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?" + _ZONE)


@dataclass
class ParsedDocuments:
    """Columns of documents, and what did not fit."""

    columns: list[pa.ChunkedArray]
    rescued: pa.ChunkedArray
    """As JSON, null where all fits."""
    unknown: dict[str, pa.DataType] = field(default_factory=dict)
    """Fields that the documents have and the shape has not, with a type that fits those that were seen."""


@dataclass(frozen=True)
class DocumentShape:
    """The fields of documents that become columns; picklable."""

    schema: pa.Schema
    find_unknown: bool = False
    """Whether to look for fields that are not in the schema."""

    def parse(self, values: pa.ChunkedArray) -> ParsedDocuments:
        """The columns of documents; ``values`` are texts, null where there is no document."""
        parts: list[_Part] = []
        for first in range(0, len(values), _BLOCK):
            parts += self._parse(values.slice(first, _BLOCK))
        if not parts:
            parts = [_Part.empty(self.schema, 0)]
        columns = [
            pa.chunked_array([part.columns[number] for part in parts], one.type)
            for number, one in enumerate(self.schema)
        ]
        rescued = pa.chunked_array([part.rescued for part in parts], pa.string())
        return ParsedDocuments(columns, rescued, _Part.joined(parts, pa.schema([])).unknown)

    def _parse(self, values: pa.ChunkedArray) -> Iterator[_Part]:
        """Read together what fits together.

        A document that does not fit is taken out; a field in which several don't is read apart from the
        others.
        """
        apart = {one.name for one in self.schema if _is_read_apart(one.type)}
        strikes: Counter[str] = Counter()
        while len(values):
            try:
                yield self._filled(values, self._read(values, apart), apart)
                return
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                problem = str(error)
            to_blame, row = self._to_blame(problem) - apart, _row_of(problem)
            strikes.update(to_blame)
            is_often = any(strikes[name] > _STRIKES for name in to_blame)
            if to_blame and (is_often or (row is None and len(values) <= _SOME)):
                apart |= to_blame
            elif row is not None and row < len(values) - values.null_count and not is_often:
                row = _place(values, row)
                if row:
                    yield from self._parse(values.slice(0, row))
                yield self._one_by_one(values.slice(row, 1))
                values = values.slice(row + 1)
            elif len(values) > _FEW:
                half = len(values) // 2
                yield from self._parse(values.slice(0, half))
                values = values.slice(half)
            else:
                yield self._one_by_one(values)
                return

    def _to_blame(self, problem: str) -> set[str]:
        """The fields that Arrow's reader may mean; it names one, or a type."""
        name = _IN_FIELD.search(problem)
        if name:
            return {name[1]} & set(self.schema.names)
        kind = _OF_TYPE.search(problem)
        if kind:
            return {one.name for one in self.schema if kind[1] in str(one.type)}
        return set()

    def _read(self, values: pa.ChunkedArray, apart: Collection[str] = ()) -> _Part:
        """All of them by Arrow's reader; it raises if one does not fit. Fields ``apart`` are left null."""
        there = values.drop_null() if values.null_count else values
        if not len(there):
            return _Part.empty(self.schema, len(values))
        text = _joined(there)
        wanted = [one for one in self.schema if one.name not in apart]
        rows = pj.read_json(
            io.BytesIO(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([_read_as(one) for one in wanted]),
                newlines_in_values=False,
                unexpected_field_behavior="infer" if self.find_unknown and not apart else "ignore",
            ),
        )
        if rows.num_rows != len(there):  # a line without a document
            raise pa.ArrowInvalid("empty documents")
        columns = [
            pa.nulls(len(there), one.type) if one.name in apart else _converted(rows[one.name], one.type)
            for one in self.schema
        ]
        if values.null_count:
            places = pc.subtract(pc.cumulative_sum(pc.cast(values.is_valid(), pa.int64())), 1)
            places = pc.if_else(values.is_valid(), places, None)
            columns = [column.take(places) for column in columns]
        known = set(self.schema.names)
        unknown = {
            one.name: one.type
            for one in rows.schema
            if one.name not in known and not pa.types.is_null(one.type)
        }
        return _Part([_flat(column) for column in columns], pa.nulls(len(values), pa.string()), unknown)

    def _filled(self, values: pa.ChunkedArray, part: _Part, apart: Collection[str]) -> _Part:
        """The fields that were left out, document by document."""
        if not apart:
            return part
        shape = DocumentShape(pa.schema([one for one in self.schema if one.name in apart]), self.find_unknown)
        own = shape._one_by_one(values, set(self.schema.names))
        filled = dict(zip(shape.schema.names, own.columns, strict=True))
        columns = [
            filled.get(one.name, column) for one, column in zip(self.schema, part.columns, strict=True)
        ]
        return _Part(columns, own.rescued, own.unknown)

    def _one_by_one(self, values: pa.ChunkedArray, known: Collection[str] | None = None) -> _Part:
        columns: list[list[Any]] = [[] for _ in self.schema]
        rescued: list[str | None] = []
        unknown: dict[str, pa.DataType] = {}
        known = set(self.schema.names) if known is None else known
        for text in values.to_pylist():
            wrong: dict[str, tuple[Any, str]] = {}
            document = _document(text, wrong)
            for column, one in zip(columns, self.schema, strict=True):
                column.append(fit(document.get(one.name), one.type, one.name, wrong))
            if self.find_unknown:
                for name in document.keys() - set(known):
                    kind = type_of(document[name])
                    if kind is not None:
                        unknown[name] = common_type(unknown[name], kind) if name in unknown else kind
            rescued.append(_rescue(wrong) if wrong else None)
        arrays = [pa.array(column, one.type) for column, one in zip(columns, self.schema, strict=True)]
        return _Part(arrays, pa.array(rescued, pa.string()), unknown)


@dataclass
class _Part:
    columns: list[pa.Array]
    rescued: pa.Array
    unknown: dict[str, pa.DataType] = field(default_factory=dict)

    @classmethod
    def empty(cls, schema: pa.Schema, rows: int) -> _Part:
        return cls([pa.nulls(rows, one.type) for one in schema], pa.nulls(rows, pa.string()))

    @classmethod
    def joined(cls, parts: Sequence[_Part], schema: pa.Schema) -> _Part:
        unknown: dict[str, pa.DataType] = {}
        for part in parts:
            for name, kind in part.unknown.items():
                unknown[name] = common_type(unknown[name], kind) if name in unknown else kind
        columns = [
            pa.concat_arrays([part.columns[number] for part in parts]) for number in range(len(schema))
        ]
        return cls(columns, pa.concat_arrays([part.rescued for part in parts]), unknown)


# together


def _row_of(problem: str) -> int | None:
    """Which document Arrow's reader complains about, where it says so."""
    row = _IN_ROW.search(problem)
    return int(row[1]) if row else None


def _place(values: pa.ChunkedArray, row: int) -> int:
    """Where the document stands that is number ``row`` of those that are not null."""
    if not values.null_count:
        return row
    return int(pc.indices_nonzero(values.is_valid())[row].as_py())


def _joined(values: pa.ChunkedArray) -> bytes:
    """Documents as lines; a line break inside of one is white space, for in texts JSON writes it as \\n."""
    texts = pc.replace_substring(values, "\n", " ")
    return b"\n".join(pc.cast(texts, pa.binary()).to_pylist())


def _is_read_apart(kind: pa.DataType, *, inside: bool = False) -> bool:
    """Arrow's reader knows no maps, and inside of something else no times with a zone."""
    if pa.types.is_struct(kind):
        return any(_is_read_apart(one.type, inside=True) for one in kind)
    if pa.types.is_map(kind):
        return True
    if pa.types.is_list(kind):
        return _is_read_apart(kind.value_type, inside=True)
    return inside and (pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _read_as(one: pa.Field) -> pa.Field:
    """What Arrow's reader makes of a column: dates and times are made of text."""
    is_moment = pa.types.is_date(one.type) or pa.types.is_timestamp(one.type)
    return pa.field(one.name, pa.string()) if is_moment else one


def _converted(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    if pa.types.is_timestamp(kind):
        return _timestamps(column, kind)
    return column.cast(kind)


def _timestamps(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Only with a zone: a time without one is not a moment."""
    zoned = pc.match_substring_regex(column, _ZONE + "$")
    if not pc.all(zoned, min_count=0).as_py():
        raise pa.ArrowInvalid("a time without a zone")
    return column.cast(kind)


def _flat(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return flat.chunk(0) if isinstance(flat, pa.ChunkedArray) else flat


def _is_known_type(kind: pa.DataType) -> bool:
    return not pa.types.is_null(kind)


# one by one


def _document(text: str | None, wrong: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        document = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        wrong[""] = (text, "no JSON")
        return {}
    if not isinstance(document, dict):
        wrong[""] = (text, "JSON, but no object")
        return {}
    return document


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def fit(value: Any, kind: pa.DataType, path: str, wrong: dict[str, tuple[Any, str]]) -> Any:
    """A value as a column of this type has it; None, and a note in ``wrong``, if it does not fit."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if isinstance(value, dict):
            return {one.name: fit(value.get(one.name), one.type, f"{path}.{one.name}", wrong) for one in kind}
    elif pa.types.is_map(kind):
        if isinstance(value, dict):
            inner: dict[str, tuple[Any, str]] = {}
            items = [(name, fit(item, kind.item_type, name, inner)) for name, item in value.items()]
            if not inner:
                return items
            wrong[path] = (value, next(iter(inner.values()))[1])
            return None
    elif pa.types.is_list(kind):
        if isinstance(value, list):
            inner = {}
            fitted = [fit(item, kind.value_type, "", inner) for item in value]
            if not inner:
                return fitted
            # an array with holes would be another array: the whole of it is rescued
            wrong[path] = (value, f"an element is {next(iter(inner.values()))[1]}")
            return None
    else:
        fitted, reason = _scalar(value, kind)
        if reason is None:
            return fitted
        wrong[path] = (value, reason)
        return None
    wrong[path] = (value, f"{_kind_of(value)}, not {format_type(kind)}")
    return None


def _scalar(value: Any, kind: pa.DataType) -> tuple[Any, str | None]:
    """A value of a column without parts, and why it is none."""
    unfit = f"{_kind_of(value)}, not {format_type(kind)}"
    if pa.types.is_string(kind):
        if not isinstance(value, str):
            return None, unfit
        return (value, None) if _is_text(value) else (None, "half of a surrogate pair")
    if pa.types.is_boolean(kind):
        return (value, None) if isinstance(value, bool) else (None, unfit)
    if isinstance(value, bool):
        return None, unfit
    if pa.types.is_integer(kind):
        if not isinstance(value, int):
            return None, unfit
        limit = 1 << (kind.bit_width - 1)
        return (value, None) if -limit <= value < limit else (None, f"too large for {format_type(kind)}")
    if pa.types.is_floating(kind):
        return _floating(value, kind, unfit)
    if pa.types.is_decimal(kind):
        return _decimal(value, kind, unfit)
    if isinstance(value, str):
        moment = _moment(value, kind)
        return (moment, None) if moment is not None else (None, f"no {format_type(kind)}")
    return None, unfit


def _floating(value: Any, kind: pa.DataType, unfit: str) -> tuple[Any, str | None]:
    if not isinstance(value, int | Decimal):
        return None, unfit
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number in (float("inf"), float("-inf")) or (kind == pa.float32() and abs(number) > 3.4028234e38):
        return None, f"too large for {format_type(kind)}"
    return number, None


def _decimal(value: Any, kind: pa.DataType, unfit: str) -> tuple[Any, str | None]:
    # a decimal is often written as text, so that nobody makes a float of it
    if not isinstance(value, int | Decimal) and not (isinstance(value, str) and _DECIMAL.fullmatch(value)):
        return None, unfit
    number = Decimal(value)
    try:
        scaled = number.quantize(Decimal(1).scaleb(-kind.scale))
    except InvalidOperation:
        return None, f"too large for {format_type(kind)}"
    if scaled != number or len(scaled.as_tuple().digits) > kind.precision:
        return None, f"more digits than {format_type(kind)} has"
    return scaled, None


def _moment(text: str, kind: pa.DataType) -> date | datetime | None:
    """A date or a time as ISO 8601 has it, as far as the columnar reader reads it too."""
    try:
        if pa.types.is_timestamp(kind):
            return datetime.fromisoformat(text).astimezone(UTC) if _TIME.fullmatch(text) else None
        return date.fromisoformat(text) if _DATE.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case str():
            return "a string"
        case int():
            return "a number"
        case Decimal():
            return "a number with a fraction or an exponent"
        case list():
            return "an array"
        case _:
            return "an object"


def _rescue(wrong: dict[str, tuple[Any, str]]) -> str:
    return _json({path: {"value": value, "reason": reason} for path, (value, reason) in wrong.items()})


def _json(value: Any) -> str:
    """JSON with every digit that a number had."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


# which type


def type_of(value: Any) -> pa.DataType | None:
    """The type that a value of a parsed document has by itself; None of a null or of what is empty."""
    match value:
        case bool():
            return pa.bool_()
        case str():
            return pa.string()
        case int():
            return pa.int64() if -(1 << 63) <= value < 1 << 63 else pa.float64()
        case Decimal() | float():
            return pa.float64()
        case dict():
            fields = [
                pa.field(name, kind) for name, item in value.items() if (kind := type_of(item)) is not None
            ]
            return pa.struct(fields) if fields else None
        case list():
            kinds = [kind for item in value if (kind := type_of(item)) is not None]
            return pa.list_(_common(kinds)) if kinds else None
    return None


def _common(kinds: Sequence[pa.DataType]) -> pa.DataType:
    kind = kinds[0]
    for other in kinds[1:]:
        kind = common_type(kind, other)
    return kind


def common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """A type that takes both; where there is none, the first: the others are rescued."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        fields = {one.name: one.type for one in first}
        for one in second:
            fields[one.name] = common_type(fields[one.name], one.type) if one.name in fields else one.type
        return pa.struct(list(fields.items()))
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(common_type(first.value_type, second.value_type))
    numbers = (pa.types.is_integer, pa.types.is_floating)
    if all(any(is_number(kind) for is_number in numbers) for kind in (first, second)):
        return pa.float64()
    return first
