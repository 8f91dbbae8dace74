"""Columns of objects and arrays, with their parts renamed or missing parts added."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["is_part", "leaf_columns", "leaf_paths", "with_names", "with_parts"]


def with_parts(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column with the parts of a type, matched by name; parts that it lacks are null."""
    return _rebuilt(column, kind, by_name=True)


def with_names(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column whose parts have the names of another type, one for one."""
    return _rebuilt(column, kind, by_name=False)


def _rebuilt(column: pa.Array, kind: pa.DataType, *, by_name: bool) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_struct(kind):
        own = [part.name for part in column.type]
        parts = []
        for number, part in enumerate(kind):
            place = number if not by_name else own.index(part.name) if part.name in own else None
            parts.append(
                pa.nulls(len(column), part.type)
                if place is None
                else _rebuilt(column.field(place), part.type, by_name=by_name)
            )
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=column.is_null())
    if pa.types.is_map(kind):
        entries = pa.struct([pa.field("key", pa.string()), pa.field("value", kind.item_type)])
        items = column.cast(pa.list_(pa.struct([("key", pa.string()), ("value", column.type.item_type)])))
        rebuilt = _rebuilt(items, pa.list_(entries), by_name=False)
        keys, values = rebuilt.flatten().flatten()
        return pa.MapArray.from_arrays(_offsets(rebuilt), keys, values, type=kind)
    if pa.types.is_list(kind):
        inner = _rebuilt(column.flatten(), kind.value_type, by_name=by_name)
        return pa.ListArray.from_arrays(_offsets(column), inner, type=kind)
    return column.cast(kind)


def _offsets(column: pa.Array) -> pa.Array:
    """Where each list begins; null where the list is."""
    sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    places = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    is_null = np.append(column.is_null().to_numpy(zero_copy_only=False), False)
    return pa.array(places, pa.int32(), mask=is_null)


def leaf_columns(name: str, column: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """The columns that Parquet makes of a column, with their paths."""
    kind = column.type
    if pa.types.is_struct(kind):
        for number, part in enumerate(kind):
            yield from leaf_columns(f"{name}.{part.name}", column.field(number))
    elif pa.types.is_map(kind):
        yield f"{name}.key_value.key", column.keys
        yield from leaf_columns(f"{name}.key_value.value", column.items)
    elif pa.types.is_list(kind):
        yield from leaf_columns(f"{name}.list.element", column.flatten())
    else:
        yield name, column


def leaf_paths(name: str, kind: pa.DataType) -> list[str]:
    """The paths of the columns that Parquet makes of a column of this type."""
    return [path for path, _ in leaf_columns(name, pa.array([], kind))]


def is_part(part: pa.DataType, whole: pa.DataType) -> bool:
    """Whether a type has nothing that ``whole`` lacks."""
    if pa.types.is_struct(part) and pa.types.is_struct(whole):
        types = {field.name: field.type for field in whole}
        return all(field.name in types and is_part(field.type, types[field.name]) for field in part)
    if pa.types.is_list(part) and pa.types.is_list(whole):
        return is_part(part.value_type, whole.value_type)
    return bool(part == whole)
