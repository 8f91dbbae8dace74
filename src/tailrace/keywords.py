"""Keyword arguments that are declared elsewhere: shown by `help`, and checked when they are given."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import UsageError

__all__ = [
    "check_known",
    "check_names",
    "check_types",
    "check_values",
    "is_by_vbucket",
    "shows_keywords",
    "shows_keywords_of",
]

F = TypeVar("F", bound=Callable[..., Any])


def shows_keywords(kind: type) -> Callable[[F], F]:
    """Show the fields of a dataclass as keyword arguments in place of a function's ``**options``."""
    named = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in fields(kind)
    ]
    return lambda function: _shows(function, named)


def shows_keywords_of(other: Callable[..., Any], names: Collection[str]) -> Callable[[F], F]:
    """Show these keyword arguments of another function in place of a function's ``**settings``."""
    known = inspect.signature(other).parameters
    named = [known[name] for name in names]
    return lambda function: _shows(function, named)


def _shows(function: F, named: Sequence[inspect.Parameter]) -> F:
    signature = inspect.signature(function)
    given = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    function.__signature__ = signature.replace(parameters=[*given, *named])  # type: ignore[attr-defined]
    return function


def check_names(kind: type, given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a name that the dataclass does not have, with the nearest one."""
    check_known([field.name for field in fields(kind)], given)


def check_known(known: Sequence[str], given: Iterable[str], what: str = "option") -> None:
    """Raise `UsageError` for a name that is not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise UsageError(f"there is no {what} {name!r}{hint}")


def check_types(options: Any) -> None:
    """Raise `UsageError` for a field of a dataclass whose value is not of its type."""
    check_values(type(options), {field.name: getattr(options, field.name) for field in fields(options)})


def check_values(kind: type | Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a value that is not of the type that ``kind`` declares for its name."""
    hints = get_type_hints(kind)
    for name, value in given.items():
        if not _fits(value, hints[name]):
            text = f"{str(value)[:40]!r} ({type(value).__name__})"
            raise UsageError(f"{name} must be {_words(hints[name])}, not {text}")


def is_by_vbucket(given: object, *kinds: type) -> bool:
    """Whether it is a mapping of vbucket to something of these kinds; numbers may be NumPy's."""
    return isinstance(given, Mapping) and all(
        isinstance(vbucket, Integral) and isinstance(value, kinds) for vbucket, value in given.items()
    )


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if hint is float:
        return type(value) in (int, float) and not math.isnan(value)
    if hint in (bool, int, type(None)):
        return type(value) is hint
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is collections.abc.Sequence:
        (member,) = get_args(hint)
        is_list = isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)
        return is_list and all(_fits(element, member) for element in value)
    if origin is collections.abc.Mapping:
        keys, values = get_args(hint)
        is_mapping = isinstance(value, collections.abc.Mapping)
        return is_mapping and all(_fits(key, keys) and _fits(value[key], values) for key in value)
    if origin is collections.abc.Iterable:
        return isinstance(value, origin) and not isinstance(value, str | bytes)
    if origin is not None:
        return isinstance(value, origin)
    if getattr(hint, "_is_protocol", False):
        has_facts = all(hasattr(value, name) for name in _facts(hint))
        methods = (name for name in vars(hint) if not name.startswith("_"))
        return has_facts and all(callable(getattr(value, name, None)) for name in methods)
    return isinstance(value, hint)


def _facts(protocol: type) -> list[str]:
    """The attributes of a protocol, beside its methods."""
    return list(vars(protocol).get("__annotations__", ()))


_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "None",
    os.PathLike: "a path",
    collections.abc.Callable: "a function",
    collections.abc.Iterable: "a list",
    collections.abc.Mapping: "a dictionary",
    collections.abc.Sequence: "a list",
}


def _words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(choice) for choice in get_args(hint))
    if hint == Sequence[str]:
        return "a list of names"
    if hint == Mapping[str, str]:
        return "a dictionary of texts"
    if getattr(hint, "_is_protocol", False) and (facts := _facts(hint)):
        return f"something with {' and '.join(facts)}"
    name = getattr(hint, "__name__", str(hint))
    return _NAMES.get(origin or hint) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
