"""Which values of a document fit a column, and why others don't, value by value.

This defines the rule; `typed` reads many documents together and must give the same result.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from decimal import Context, Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from .ddl import format_type

__all__ = [
    "DATE",
    "TIME",
    "Misfits",
    "NoNumber",
    "fit",
    "rescued_json",
    "step_path",
    "try_document",
]

Misfits = dict[str, tuple[Any, str]]
"""By path: a value that does not fit, and why."""

_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d\d\d)"
DATE = _YEAR + r"-\d\d-\d\d"
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
TIME = (
    DATE
    + "[T ]"
    + _CLOCK
    + r"(:[0-5]\d(\.\d{1,6})?)?(Z|[+-]"
    + _CLOCK.replace(":", ":?")
    + "|[+-]([01][0-9]|2[0-3]))"
)
"""A moment; a time without a zone is not one."""
_DATE, _TIME = re.compile(DATE, re.ASCII), re.compile(TIME, re.ASCII)
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DIGITS = Context(prec=76)
"""More than any column has; Python's own context has 28 digits."""
_LONG_NUMBER = 1000
"""Python refuses to parse integers of more than some thousand digits."""


class NoNumber:
    """NaN and the like, which some writers put into documents though JSON has no such thing."""

    def __init__(self, name: str) -> None:
        self.name = name


def try_document(text: str | None, wrong: Misfits) -> dict[str, Any]:
    """A parsed document; if the text is not one, an empty document and a note in ``wrong``."""
    if text is None:
        return {}
    try:
        document = json.loads(text, parse_float=Decimal, parse_int=_whole_number, parse_constant=NoNumber)
    except RecursionError:
        wrong[""] = (text, "nested too deep")
        return {}
    except ValueError:
        document = NoNumber("")
    if isinstance(document, NoNumber):
        wrong[""] = (text, "no JSON")
        return {}
    if not isinstance(document, dict):
        wrong[""] = (text, "JSON, but no object")
        return {}
    return document


def _whole_number(text: str) -> int | Decimal:
    return int(text) if len(text) < _LONG_NUMBER else Decimal(text)


def step_path(path: str, name: str) -> str:
    """The path of a field of the value at ``path``; a name that looks like a path is in back quotes."""
    if not name or "." in name or "`" in name:
        name = "`" + name.replace("`", "``") + "`"
    return f"{path}.{name}" if path else name


def fit(value: Any, kind: pa.DataType, path: str, wrong: Misfits) -> Any:
    """A value as a column of this type holds it; None, and a note in ``wrong``, if it does not fit."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        if isinstance(value, dict):
            return {
                part.name: fit(value.get(part.name), part.type, step_path(path, part.name), wrong)
                for part in kind
            }
    elif pa.types.is_map(kind):
        if isinstance(value, dict):
            inner: Misfits = {}
            items = [(name, fit(item, kind.item_type, name, inner)) for name, item in value.items()]
            if not inner and all(is_text(name) for name in value):
                return items
            reasons = [reason for _, reason in inner.values()] or ["half of a surrogate pair"]
            wrong[path] = (value, reasons[0])
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
        if not _is_nothing(value):
            wrong[path] = (value, reason)
        return None
    if not _is_nothing(value):
        wrong[path] = (value, f"{_kind_of(value)}, not {_shown_type(kind)}")
    return None


def _shown_type(kind: pa.DataType) -> str:
    """A type for people, without an object's parts: more may be added later, but a reason must not change."""
    if pa.types.is_struct(kind):
        return "STRUCT"
    if pa.types.is_map(kind):
        return f"MAP<STRING, {_shown_type(kind.item_type)}>"
    return f"ARRAY<{_shown_type(kind.value_type)}>" if pa.types.is_list(kind) else format_type(kind)


def _is_nothing(value: Any) -> bool:
    """Whether a value is empty or has only nulls inside: a field with nothing else has no column, so such a
    value fits whatever the field becomes.
    """
    if isinstance(value, dict):
        return all(map(_is_nothing, value.values()))
    return value is None or (isinstance(value, list) and all(map(_is_nothing, value)))


def _scalar(value: Any, kind: pa.DataType) -> tuple[Any, str | None]:
    """The value of a column without parts, or None with the reason why it does not fit."""
    unfit = f"{_kind_of(value)}, not {format_type(kind)}"
    if pa.types.is_string(kind):
        if not isinstance(value, str):
            return None, unfit
        return (value, None) if is_text(value) else (None, "half of a surrogate pair")
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
    # a decimal is often written as text, so that no reader turns it into a float
    if not isinstance(value, int | Decimal) and not (isinstance(value, str) and _DECIMAL.fullmatch(value)):
        return None, unfit
    number = Decimal(value)
    if not number:
        return Decimal(0).scaleb(-kind.scale), None
    if number.adjusted() >= kind.precision - kind.scale:
        return None, f"too large for {format_type(kind)}"
    try:
        scaled = number.quantize(Decimal(1).scaleb(-kind.scale), context=_DIGITS)
    except InvalidOperation:
        return None, f"too large for {format_type(kind)}"
    if scaled != number or len(scaled.as_tuple().digits) > kind.precision:
        return None, f"more digits than {format_type(kind)} has"
    return scaled, None


def _moment(text: str, kind: pa.DataType) -> date | datetime | None:
    """A date or time in ISO 8601, in the forms that the columnar reader accepts too."""
    try:
        if pa.types.is_timestamp(kind):
            return datetime.fromisoformat(text).astimezone(UTC) if _TIME.fullmatch(text) else None
        return date.fromisoformat(text) if _DATE.fullmatch(text) else None
    except (ValueError, OverflowError):
        return None


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON may have half of a surrogate pair."""
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
        case NoNumber():
            return f"{value.name}, which is no JSON"
        case _:
            return "an object"


def rescued_json(wrong: Misfits, *, with_document: bool) -> str:
    """The text for the column ``_rescued``.

    If the text is not a document at all, only the reason, unless ``with_document``: ``value`` has the rest.
    """
    shown = {}
    for path, (value, reason) in wrong.items():
        shown[path] = (
            {"reason": reason} if not path and not with_document else {"value": value, "reason": reason}
        )
    return _json(shown)


def _json(value: Any) -> str:
    """JSON that keeps every digit of a number."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, NoNumber):
        return json.dumps(value.name)
    return str(value) if isinstance(value, Decimal) else json.dumps(value)
