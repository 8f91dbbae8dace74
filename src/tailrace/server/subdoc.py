"""Paths inside JSON texts: find a value, cut it out, put another in its place.

The text is edited, not parsed and written again: whatever a path does not touch keeps its bytes, the order of
its members, its whitespace and the digits of its numbers. The standard library's scanner skips values.

    path      a.b[0]."c"...    members by name, elements by [number], [-1] is the last; `a.b` in backticks
                               is one name, and a doubled backtick in it stands for itself
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # it is there, undocumented
from typing import NamedTuple, TypeAlias

from ..errors import MalformedMessage
from ..wire.codes import Op, Status
from ..wire.fields import JSON_SHAPE

__all__ = [
    "CREATE_PARENTS",
    "LOOKUPS",
    "MUTATIONS",
    "Path",
    "SubdocError",
    "members",
    "new_root",
    "parse_path",
]

Path: TypeAlias = "tuple[str | int, ...]"

MAX_PATH_BYTES = 1024
MAX_DEPTH = 32
CREATE_PARENTS = 0x01
_INT64 = range(-(1 << 63), 1 << 63)

_BLANKS = re.compile(r"[ \t\n\r]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,19})", re.ASCII)
_INDEX = re.compile(r"\[(-1|0|[1-9][0-9]{0,8})\]", re.ASCII)


class SubdocError(MalformedMessage):
    """A path can't be followed or changed; the status says why."""

    def __init__(self, status: int, what: str = "") -> None:
        super().__init__(what, status)


def parse_path(raw: bytes) -> Path:
    """A path's steps: names and indexes."""
    if len(raw) > MAX_PATH_BYTES:
        raise SubdocError(Status.SUBDOC_PATH_E2BIG, f"a path has up to {MAX_PATH_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "a path is UTF-8") from None
    steps: list[str | int] = []
    at = 0
    while at < len(text):
        if index := _INDEX.match(text, at):
            steps.append(int(index[1]))
            at = index.end()
        else:
            if steps:
                if text[at] != ".":
                    raise SubdocError(Status.SUBDOC_PATH_EINVAL, "a dot is missing in the path")
                at += 1
            name, at = _name(text, at)
            steps.append(name)
    if len(steps) > MAX_DEPTH:
        raise SubdocError(Status.SUBDOC_PATH_E2BIG, f"a path has up to {MAX_DEPTH} steps")
    return tuple(steps)


def _name(text: str, at: int) -> tuple[str, int]:
    """The name that starts at ``at``, and where it ends."""
    if text.startswith("`", at):
        parts = []
        while True:
            end = text.find("`", at + 1)
            if end < 0:
                raise SubdocError(Status.SUBDOC_PATH_EINVAL, "a backtick is not closed in the path")
            parts.append(text[at + 1 : end])
            at = end
            if not text.startswith("``", at):
                return "`".join(parts), at + 1
            at += 1
    end = at
    while end < len(text) and text[end] not in ".[":
        if text[end] in "]`":
            raise SubdocError(Status.SUBDOC_PATH_EINVAL, "a bracket or backtick stands alone in the path")
        end += 1
    if end == at:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "a name is empty in the path")
    return text[at:end], end


# reading


class Span(NamedTuple):
    """Where a value is in a text."""

    start: int
    end: int


def members(text: str, at: int = 0) -> Iterator[tuple[str, int, Span]]:
    """The members of the object that starts at ``at``: name, where the name starts, the value."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        name_at = at
        name, at = scanstring(text, at + 1)
        at = _skip(text, _skip(text, at) + 1)
        end = _end(text, at)
        yield name, name_at, Span(at, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _elements(text: str, at: int) -> Iterator[Span]:
    """The elements of the array that starts at ``at``."""
    at = _skip(text, at + 1)
    while text[at] != "]":
        end = _end(text, at)
        yield Span(at, end)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    assert blanks is not None
    return blanks.end()


def _end(text: str, at: int) -> int:
    """Where the value that starts at ``at`` ends."""
    try:
        return JSON_SHAPE.raw_decode(text, at)[1]
    except RecursionError:
        raise SubdocError(Status.SUBDOC_DOC_E2DEEP) from None
    except ValueError:
        raise SubdocError(Status.SUBDOC_DOC_NOT_JSON) from None


def _root(text: str) -> Span:
    at = _skip(text, 0)
    return Span(at, _end(text, at))


def _step(text: str, at: Span, step: str | int) -> Span | None:
    """The value one step further; None if it is missing, an error if there can't be such a step."""
    if isinstance(step, int):
        if text[at.start] != "[":
            raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
        last = None
        for number, element in enumerate(_elements(text, at.start)):
            if number == step:
                return element
            last = element
        return last if step == -1 else None
    if text[at.start] != "{":
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    for name, _, value in members(text, at.start):
        if name == step:
            return value
    return None


def _follow(text: str, path: Path) -> tuple[Span, int]:
    """Follow a path as far as it goes: the last value found, and how many steps that took."""
    span = _root(text)
    for done, step in enumerate(path):
        next_span = _step(text, span, step)
        if next_span is None:
            return span, done
        span = next_span
    return span, len(path)


def _find(text: str, path: Path) -> Span:
    span, done = _follow(text, path)
    if done < len(path):
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    return span


def get(text: str, path: Path) -> str:
    """The value at a path, as it is in the text."""
    if not path:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "an empty path names the whole document")
    start, end = _find(text, path)
    return text[start:end]


def exists(text: str, path: Path) -> str:
    """Nothing if there is a value at the path, otherwise an error."""
    get(text, path)
    return ""


def get_count(text: str, path: Path) -> str:
    """How many members or elements a value has."""
    start, _ = _find(text, path)
    if text[start] == "{":
        return str(sum(1 for _ in members(text, start)))
    if text[start] == "[":
        return str(sum(1 for _ in _elements(text, start)))
    raise SubdocError(Status.SUBDOC_PATH_MISMATCH)


LOOKUPS: dict[int, Callable[[str, Path], str]] = {
    Op.SUBDOC_GET: get,
    Op.SUBDOC_EXISTS: exists,
    Op.SUBDOC_GET_COUNT: get_count,
}

# writing: each takes the text, the path, the new value and the flags, and returns the new text and a result


def new_root(path: Path) -> str:
    """What a path is written into if there is no document."""
    return "[]" if not path or isinstance(path[0], int) else "{}"


def _value(raw: str) -> str:
    """A value to insert, checked."""
    text = raw.strip(" \t\r\n")
    if not text:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT, "the value is empty")
    try:
        JSON_SHAPE.decode(text)
    except RecursionError:
        raise SubdocError(Status.SUBDOC_VALUE_E2DEEP) from None
    except ValueError:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT, "the value is not JSON") from None
    return text


def _values(raw: str) -> str:
    """Values to insert into an array, separated by commas, checked."""
    return _value(f"[{raw}]")[1:-1].strip(" \t\r\n") or _value("")


def _replace(text: str, span: Span, new: str) -> str:
    return text[: span.start] + new + text[span.end :]


def _inserted(text: str, container: Span, new: str) -> str:
    """A text with a new last member or element in a container."""
    inside = text[container.start + 1 : container.end - 1]
    at = container.start + 1 + len(inside.rstrip(" \t\r\n"))
    comma = "," if inside.strip(" \t\r\n") else ""
    return text[:at] + comma + new + text[at:]


def _created(text: str, path: Path, flags: int, value: str) -> str:
    """A text with a value at a path that is not there yet; the parents too if the flags say so."""
    span, done = _follow(text, path)
    missing = path[done:]
    if len(missing) > 1 and not flags & CREATE_PARENTS:
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    if any(isinstance(step, int) for step in missing):
        raise SubdocError(Status.SUBDOC_PATH_ENOENT, "array elements are not made on the way")
    for step in reversed(missing[1:]):
        value = f"{{{json.dumps(step, ensure_ascii=False)}:{value}}}"
    return _inserted(text, span, f"{json.dumps(missing[0], ensure_ascii=False)}:{value}")


def _named(path: Path) -> None:
    """Refuse a path that does not end in a name, for dictionary operations."""
    if not path or isinstance(path[-1], int):
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "the path does not end in a name")


def dict_upsert(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Write a member, new or not."""
    _named(path)
    value = _value(raw)
    span, done = _follow(text, path)
    if done == len(path):
        return _replace(text, span, value), ""
    return _created(text, path, flags, value), ""


def dict_add(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Write a member that is not there yet."""
    _named(path)
    value = _value(raw)
    if _follow(text, path)[1] == len(path):
        raise SubdocError(Status.SUBDOC_PATH_EEXISTS)
    return _created(text, path, flags, value), ""


def replace(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Write a value that is there."""
    if not path:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "an empty path names the whole document")
    return _replace(text, _find(text, path), _value(raw)), ""


def delete(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Remove a member or element, with the comma that belongs to it."""
    if not path:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "an empty path names the whole document")
    parent = _find(text, path[:-1])
    target = _step(text, parent, path[-1])
    if target is None:
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    start = target.start
    if isinstance(path[-1], str):
        start = next(at for _, at, value in members(text, parent.start) if value == target)
    after = _skip(text, target.end)
    if text[after] == ",":
        return text[:start] + text[_skip(text, after + 1) :], ""
    before = text[:start].rstrip(" \t\r\n")
    return before.removesuffix(",") + text[target.end :], ""


def _array(text: str, path: Path, flags: int) -> tuple[str, Span]:
    """The array at a path; it is made if the flags say so."""
    span, done = _follow(text, path)
    if done < len(path):
        if not flags & CREATE_PARENTS:
            raise SubdocError(Status.SUBDOC_PATH_ENOENT)
        text = _created(text, path, flags, "[]")
        span = _find(text, path)
    if text[span.start] != "[":
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    return text, span


def array_push_last(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Add values at an array's end."""
    values = _values(raw)
    text, span = _array(text, path, flags)
    return _inserted(text, span, values), ""


def array_push_first(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Add values at an array's start."""
    values = _values(raw)
    text, span = _array(text, path, flags)
    at = span.start + 1
    comma = "" if text[_skip(text, at)] == "]" else ","
    return text[:at] + values + comma + text[at:], ""


def array_insert(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Add values before the element that the path names; one past the last is the end."""
    if not path or not isinstance(path[-1], int) or path[-1] < 0:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "the path does not end in an index from 0 on")
    values = _values(raw)
    span = _find(text, path[:-1])
    if text[span.start] != "[":
        raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
    elements = list(_elements(text, span.start))
    if path[-1] > len(elements):
        raise SubdocError(Status.SUBDOC_PATH_ENOENT)
    if path[-1] == len(elements):
        return _inserted(text, span, values), ""
    at = elements[path[-1]].start
    return text[:at] + values + "," + text[at:], ""


def array_add_unique(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Add a plain value to an array of plain values if it is not there yet."""
    value = _value(raw)
    if value[0] in "{[":
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT, "only plain values can be unique")
    text, span = _array(text, path, flags)
    for start, end in _elements(text, span.start):
        if text[start] in "{[":
            raise SubdocError(Status.SUBDOC_PATH_MISMATCH)
        if text[start:end] == value:
            raise SubdocError(Status.SUBDOC_PATH_EEXISTS)
    return _inserted(text, span, value), ""


def counter(text: str, path: Path, raw: str, flags: int) -> tuple[str, str]:
    """Add to a whole number; a missing one counts as 0."""
    delta = int(raw) if _INTEGER.fullmatch(raw) else 0
    if not delta or delta not in _INT64:
        raise SubdocError(Status.SUBDOC_DELTA_EINVAL)
    if not path:
        raise SubdocError(Status.SUBDOC_PATH_EINVAL, "an empty path names the whole document")
    span, done = _follow(text, path)
    if done < len(path):
        return _created(text, path, flags, str(delta)), str(delta)
    old = text[span.start : span.end]
    if _INTEGER.fullmatch(old) is None:
        is_long = old.lstrip("-").isdigit()
        raise SubdocError(Status.SUBDOC_NUM_ERANGE if is_long else Status.SUBDOC_PATH_MISMATCH)
    if int(old) not in _INT64:
        raise SubdocError(Status.SUBDOC_NUM_ERANGE)
    new = int(old) + delta
    if new not in _INT64:
        raise SubdocError(Status.SUBDOC_VALUE_CANTINSERT, "the sum is out of range")
    return _replace(text, span, str(new)), str(new)


PathMutation: TypeAlias = Callable[[str, Path, str, int], tuple[str, str]]

MUTATIONS: dict[int, PathMutation] = {
    Op.SUBDOC_DICT_ADD: dict_add,
    Op.SUBDOC_DICT_UPSERT: dict_upsert,
    Op.SUBDOC_DELETE: delete,
    Op.SUBDOC_REPLACE: replace,
    Op.SUBDOC_ARRAY_PUSH_LAST: array_push_last,
    Op.SUBDOC_ARRAY_PUSH_FIRST: array_push_first,
    Op.SUBDOC_ARRAY_INSERT: array_insert,
    Op.SUBDOC_ARRAY_ADD_UNIQUE: array_add_unique,
    Op.SUBDOC_COUNTER: counter,
}
