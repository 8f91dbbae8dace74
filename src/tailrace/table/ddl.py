"""Schemas as people write them: ``name STRING, tags ARRAY<STRING>, address STRUCT<city: STRING>``.

The types are those of Spark that a JSON document can fill. They are parsed here because Spark's own parser
needs a running Java.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa

from ..errors import UsageError

__all__ = ["format_ddl", "format_type", "parse_ddl"]

_SIMPLE = {
    "STRING": pa.string(),
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "BYTE": pa.int8(),
    "SMALLINT": pa.int16(),
    "SHORT": pa.int16(),
    "INT": pa.int32(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "LONG": pa.int64(),
    "FLOAT": pa.float32(),
    "REAL": pa.float32(),
    "DOUBLE": pa.float64(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
}
_NAMES = {kind: name for name, kind in reversed(_SIMPLE.items())}
_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|([A-Za-z_][\w.]*)|(\d+)|([<>(),:]))")
_MAX_DEPTH = 32
_MAX_DECIMAL = 38


def parse_ddl(text: str) -> pa.Schema:
    """The columns that a text names; a `UsageError` says what is wrong with it."""
    parser = _DdlParser(text)
    fields = list(parser.fields(end=None))
    if not fields:
        raise UsageError("a schema needs at least one column, such as 'name STRING, age INT'")
    return pa.schema(fields)


def format_ddl(schema: pa.Schema) -> str:
    """A schema as `parse_ddl` reads it."""
    return ", ".join(f"{_quoted(field.name)} {format_type(field.type)}" for field in schema)


def format_type(kind: pa.DataType) -> str:
    """A type as people write it."""
    if kind in _NAMES:
        return _NAMES[kind]
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"MAP<STRING, {format_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{format_type(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"STRUCT<{', '.join(f'{_quoted(field.name)}: {format_type(field.type)}' for field in kind)}>"
    raise UsageError(f"a column can't be of the type {kind}")


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else "`" + name.replace("`", "``") + "`"


class _DdlParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def fields(self, end: str | None) -> Iterator[pa.Field]:
        """Names and types separated by commas, up to ``end``; None is the end of the text."""
        seen: set[str] = set()
        while not (self._is_over() if end is None else self._take(end)):
            if seen and not self._take(","):
                raise self._error("',' between two columns")
            name = self._name()
            if name in seen:
                raise UsageError(f"the schema has {name!r} twice")
            seen.add(name)
            self._take(":")
            yield pa.field(name, self._type())

    def _type(self) -> pa.DataType:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UsageError(f"the schema is nested more than {_MAX_DEPTH} deep")
        word = self._word().upper()
        if word in _SIMPLE:
            kind = _SIMPLE[word]
        elif word in ("DECIMAL", "DEC", "NUMERIC"):
            kind = self._decimal()
        elif word == "ARRAY":
            self._need("<")
            kind = pa.list_(self._type())
            self._need(">")
        elif word == "MAP":
            self._need("<")
            if self._type() != pa.string():
                raise UsageError("the names of a JSON object are text: write MAP<STRING, …>")
            self._need(",")
            kind = pa.map_(pa.string(), self._type())
            self._need(">")
        elif word == "STRUCT":
            self._need("<")
            kind = pa.struct(list(self.fields(end=">")))
        else:
            known = ", ".join([*dict.fromkeys(_NAMES.values()), "DECIMAL(p,s)", "ARRAY<…>", "MAP<STRING, …>"])
            raise UsageError(f"there is no type {word}; the types are {known}, STRUCT<name: …>")
        self._depth -= 1
        return kind

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._take("("):
            precision = self._number()
            if self._take(","):
                scale = self._number()
            self._need(")")
        if not 1 <= precision <= _MAX_DECIMAL or scale > precision:
            raise UsageError(f"DECIMAL({precision},{scale}) is impossible; it has 1 to {_MAX_DECIMAL} digits")
        return pa.decimal128(precision, scale)

    # tokens

    def _next(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._at)

    def _is_over(self) -> bool:
        return not self._text[self._at :].strip()

    def _take(self, sign: str) -> bool:
        token = self._next()
        if token is None or token[4] != sign:
            return False
        self._at = token.end()
        return True

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise self._error(f"'{sign}'")

    def _name(self) -> str:
        token = self._next()
        if token is None or not (token[1] or token[2]):
            raise self._error("the name of a column")
        self._at = token.end()
        return token[1][1:-1].replace("``", "`") if token[1] else token[2]

    def _word(self) -> str:
        token = self._next()
        if token is None or not token[2]:
            raise self._error("a type")
        self._at = token.end()
        return token[2]

    def _number(self) -> int:
        token = self._next()
        if token is None or not token[3] or len(token[3]) > 3:
            raise self._error("a number")
        self._at = token.end()
        return int(token[3])

    def _error(self, wanted: str) -> UsageError:
        rest = self._text[self._at :].strip()
        where = f"before {rest[:30]!r}" if rest else "at its end"
        return UsageError(
            f"the schema lacks {wanted} {where}; write it like 'name STRING, tags ARRAY<STRING>'"
        )
