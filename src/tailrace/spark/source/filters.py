"""Limits on what a batch read reads, made from the filters of a query that Spark passes to it.

Filters are recognized by their class names, because Spark 4.0 has no such classes. Spark applies every filter
again to what it gets, so a limit may let too much pass, but never too little. Only filters that stand alone
or in a conjunction come here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .selection import Selection

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

__all__ = ["Limits", "limits_of"]

_MOST_VBUCKETS = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What a batch read is limited to."""

    selection: Selection
    vbuckets: frozenset[int] | None = None
    """None is all."""

    def of_vbuckets(self, allowed: Iterable[int]) -> Limits:
        """The same limits, with vbuckets only from those in ``allowed``."""
        both = frozenset(allowed) if self.vbuckets is None else self.vbuckets & frozenset(allowed)
        return replace(self, vbuckets=both)


def limits_of(filters: Iterable[Filter], selection: Selection) -> Limits:
    """A selection narrowed by filters; those that can't be used are ignored."""
    limits = Limits(selection)
    for condition in filters:
        limits = _limited(limits, condition)
    return limits


def _limited(limits: Limits, condition: Filter) -> Limits:
    attribute: tuple[str, ...] = getattr(condition, "attribute", ())
    values = _values(condition)
    match ".".join(attribute):
        case "vbucket":
            allowed = _range(condition) if values is None else values
            return limits if allowed is None else limits.of_vbuckets(allowed)
        case "op" if values is not None:
            return replace(limits, selection=limits.selection.limited(ops=values))
        case "collection" if values is not None:
            return replace(limits, selection=limits.selection.limited(collections=values))
        case "scope" if values is not None:
            return replace(limits, selection=limits.selection.limited(scopes=values))
        case "key":
            is_prefix = type(condition).__name__ == "StringStartsWith"
            prefixes = (_value(condition),) if is_prefix else values
            if prefixes is not None:
                encoded = [_bytes(prefix) for prefix in prefixes]
                return replace(limits, selection=limits.selection.limited(key_prefixes=encoded))
    return limits


def _value(condition: Filter) -> Any:
    return getattr(condition, "value", None)


def _values(condition: Filter) -> tuple[Any, ...] | None:
    """The values that an attribute may have; None if the filter is not a list of values."""
    match type(condition).__name__:
        case "EqualTo" | "EqualNullSafe":
            values: tuple[Any, ...] = (_value(condition),)
        case "In":
            values = tuple(_value(condition))
        case _:
            return None
    return None if None in values else values


def _range(condition: Filter) -> range | None:
    match type(condition).__name__:
        case "GreaterThan":
            return range(max(0, _value(condition) + 1), _MOST_VBUCKETS)
        case "GreaterThanOrEqual":
            return range(max(0, _value(condition)), _MOST_VBUCKETS)
        case "LessThan":
            return range(max(0, _value(condition)))
        case "LessThanOrEqual":
            return range(max(0, _value(condition) + 1))
    return None


def _bytes(key: str | bytes | bytearray) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)
