"""Which types documents have, if no schema is given.

Numbers are whole or not, and everything else is what JSON has: a text that looks like a date is a text. Where
documents disagree about a field, the type of the first stays, unless another type can hold both; what does
not fit is rescued.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa

from .column_values import is_text

__all__ = ["common_type", "count_parts", "extended_type", "has_more", "infer_fields", "type_of"]

_MAX_DEPTH = 16
"""What is nested deeper does not become a column; it stays in the document only."""
_ALIKE = 8
"""How many recent types a new one is compared with: the documents of a bucket are much alike."""
_LONG_WHOLE = pa.decimal128(38, 0)


def type_of(value: Any, depth: int = 0) -> pa.DataType | None:
    """The type that a value of a parsed document has by itself; None for a null or an empty value."""
    match value:
        case bool():
            return pa.bool_()
        case str():
            return pa.string()
        case int():
            if -(1 << 63) <= value < 1 << 63:
                return pa.int64()
            return _LONG_WHOLE if abs(value) < 10**38 else pa.float64()
        case Decimal() | float():
            return pa.float64()
        case dict() if depth < _MAX_DEPTH:
            fields = [
                (name, kind)
                for name, item in value.items()
                if (kind := type_of(item, depth + 1)) is not None and is_text(name)
            ]
            return pa.struct(fields) if fields else None
        case list() if depth < _MAX_DEPTH:
            kinds = [kind for item in value if (kind := type_of(item, depth + 1)) is not None]
            return pa.list_(_common(kinds)) if kinds else None
    return None


def infer_fields(documents: Iterable[dict[str, Any]]) -> pa.Schema:
    """Fields that can hold what documents have, in the order in which they appear."""
    kinds = [kind for document in documents if (kind := type_of(document)) is not None]
    return pa.schema(list(_common(kinds))) if kinds else pa.schema([])


def _common(kinds: list[pa.DataType]) -> pa.DataType:
    """A type for all of them; repeated types are skipped."""
    distinct = kinds[:1]
    for kind in kinds[1:]:
        if kind not in distinct[-_ALIKE:]:
            distinct.append(kind)
    return reduce(common_type, distinct)


def common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """A type that can hold both; if there is none, the first: values of the other are rescued."""
    if first == second:
        return first
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _joined(first, second, common_type)
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(common_type(first.value_type, second.value_type))
    if _is_number(first) and _is_number(second):
        wholes = all(pa.types.is_integer(kind) or kind == _LONG_WHOLE for kind in (first, second))
        return _LONG_WHOLE if wholes else pa.float64()
    return first


def extended_type(known: pa.DataType, seen: pa.DataType) -> pa.DataType:
    """``known`` with the fields that only ``seen`` has; what is known keeps its type."""
    if pa.types.is_struct(known) and pa.types.is_struct(seen):
        return _joined(known, seen, extended_type)
    if pa.types.is_list(known) and pa.types.is_list(seen):
        return pa.list_(extended_type(known.value_type, seen.value_type))
    return known


def _joined(first: pa.DataType, second: pa.DataType, join: Any) -> pa.DataType:
    fields = {part.name: part.type for part in first}
    for part in second:
        fields[part.name] = join(fields[part.name], part.type) if part.name in fields else part.type
    return pa.struct(list(fields.items()))


def has_more(seen: pa.DataType, known: pa.DataType) -> bool:
    """Whether ``seen`` has fields that ``known`` lacks and that are not all null."""
    if pa.types.is_struct(seen) and pa.types.is_struct(known):
        types = {part.name: part.type for part in known}
        return any(
            has_more(part.type, types[part.name]) if part.name in types else _says_something(part.type)
            for part in seen
        )
    if pa.types.is_list(seen) and pa.types.is_list(known):
        return has_more(seen.value_type, known.value_type)
    return False


def count_parts(kind: pa.DataType) -> int:
    """How many columns of a file a type takes."""
    if pa.types.is_struct(kind):
        return sum(count_parts(part.type) for part in kind)
    if pa.types.is_list(kind):
        return count_parts(kind.value_type)
    return 1 + count_parts(kind.item_type) if pa.types.is_map(kind) else 1


def _says_something(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_says_something(part.type) for part in kind)
    if pa.types.is_list(kind):
        return _says_something(kind.value_type)
    return not pa.types.is_null(kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or kind == _LONG_WHOLE)
