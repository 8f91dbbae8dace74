"""A table's columns, converted between Arrow and the JSON of a Delta log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ...errors import UsageError
from ..contract import TableDamaged

__all__ = ["schema_from_json", "schema_to_json"]

_NAMES: dict[pa.DataType, str] = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.timestamp("us", tz="UTC"): "timestamp",
}
_TYPES: dict[str, pa.DataType] = {
    name: kind for kind, name in _NAMES.items() if kind not in (pa.large_string(), pa.large_binary())
}


def schema_to_json(schema: pa.Schema) -> str:
    """The ``schemaString`` of a table."""
    return json.dumps(_struct_to_json(schema), separators=(",", ":"))


def schema_from_json(text: str) -> pa.Schema:
    """The columns of a ``schemaString``."""
    try:
        return pa.schema([_field_from_json(field) for field in json.loads(text)["fields"]])
    except (ValueError, KeyError, TypeError) as error:
        raise TableDamaged(f"the columns in the table's log can't be read: {error}") from None


def _struct_to_json(fields: Any) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {
                "name": field.name,
                "type": _type_to_json(field.type),
                "nullable": field.nullable,
                "metadata": {},
            }
            for field in fields
        ],
    }


def _type_to_json(kind: pa.DataType) -> Any:
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        return _struct_to_json(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {
            "type": "array",
            "elementType": _type_to_json(kind.value_type),
            "containsNull": kind.value_field.nullable,
        }
    if pa.types.is_map(kind):
        return {
            "type": "map",
            "keyType": _type_to_json(kind.key_type),
            "valueType": _type_to_json(kind.item_type),
            "valueContainsNull": kind.item_field.nullable,
        }
    try:
        return _NAMES[kind]
    except KeyError:
        raise UsageError(f"a Delta table has no type for {kind}") from None


def _field_from_json(field: Mapping[str, Any]) -> pa.Field:
    return pa.field(field["name"], _type_from_json(field["type"]), nullable=field["nullable"])


def _type_from_json(kind: Any) -> pa.DataType:
    if isinstance(kind, str):
        if kind.startswith("decimal("):
            precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
            return pa.decimal128(int(precision), int(scale))
        return _TYPES[kind]
    match kind["type"]:
        case "struct":
            return pa.struct([_field_from_json(field) for field in kind["fields"]])
        case "array":
            element = _type_from_json(kind["elementType"])
            return pa.list_(pa.field("element", element, nullable=kind["containsNull"]))
        case "map":
            value = pa.field("value", _type_from_json(kind["valueType"]), nullable=kind["valueContainsNull"])
            return pa.map_(_type_from_json(kind["keyType"]), value)
        case other:
            raise ValueError(f"unknown type {other!r}")
