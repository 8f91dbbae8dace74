"""Paths inside JSON texts, compared with what the standard library makes of the same texts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.server import subdoc
from tailrace.server.subdoc import CREATE_PARENTS, SubdocError, parse_path
from tailrace.wire.codes import Status

names = st.text(max_size=6).filter(lambda text: "\ud800" not in ascii(text)) | st.sampled_from(
    ["a", "b", "a.b", "x[0]", "`", '"', "\\", "é", "\n"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
indents = st.sampled_from([None, 0, 1, 3])


def path_text(steps: tuple[int | str, ...]) -> bytes:
    """Steps as a client writes them: every name in backticks."""
    out = ""
    for step in steps:
        if isinstance(step, int):
            out += f"[{step}]"
        else:
            out += ("." if out else "") + "`" + step.replace("`", "``") + "`"
    return out.encode()


def paths_of(value: Any, steps: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Every path in a value, with what is there."""
    yield steps, value
    if isinstance(value, dict):
        for name, inner in value.items():
            if name:
                yield from paths_of(inner, (*steps, name))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from paths_of(inner, (*steps, at))


def at(value: Any, steps: tuple[int | str, ...]) -> Any:
    for step in steps:
        value = value[step]
    return value


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, Any, tuple[int | str, ...], Any]:
    """A text, what it means, and a path in it that is there."""
    value = draw(st.lists(values, max_size=4) | st.dictionaries(names, values, max_size=4))
    text = json.dumps(value, indent=draw(indents), ensure_ascii=draw(st.booleans()))
    steps, member = draw(st.sampled_from(list(paths_of(value))))
    return text, value, steps, member


@given(documents())
def test_every_path_is_found(document: tuple[str, Any, tuple[int | str, ...], Any]) -> None:
    text, _, steps, member = document
    path = parse_path(path_text(steps))
    assert path == steps
    if steps:
        assert json.loads(subdoc.get(text, path)) == member
        assert subdoc.exists(text, path) == ""
    if isinstance(member, dict | list):
        assert subdoc.get_count(text, path) == str(len(member))


@given(documents(), values)
def test_upsert_replace_delete(document: tuple[str, Any, tuple[int | str, ...], Any], new: Any) -> None:
    text, value, steps, _ = document
    if not steps:
        return
    raw = json.dumps(new)
    expected = copy.deepcopy(value)
    at(expected, steps[:-1])[steps[-1]] = new
    assert json.loads(subdoc.replace(text, steps, raw, 0)[0]) == expected
    if isinstance(steps[-1], str):
        assert json.loads(subdoc.dict_upsert(text, steps, raw, 0)[0]) == expected
        with pytest.raises(SubdocError) as error:
            subdoc.dict_add(text, steps, raw, 0)
        assert error.value.status == Status.SUBDOC_PATH_EEXISTS
    expected = copy.deepcopy(value)
    del at(expected, steps[:-1])[steps[-1]]
    assert json.loads(subdoc.delete(text, steps, "", 0)[0]) == expected


@given(documents(), names.filter(bool), names.filter(bool), values)
def test_members_are_made(
    document: tuple[str, Any, tuple[int | str, ...], Any], name: str, deeper: str, new: Any
) -> None:
    text, value, steps, member = document
    if not isinstance(member, dict) or name in member:
        return
    expected = copy.deepcopy(value)
    at(expected, steps)[name] = new
    raw = json.dumps(new)
    for make in (subdoc.dict_add, subdoc.dict_upsert):
        assert json.loads(make(text, (*steps, name), raw, 0)[0]) == expected
        path = (*steps, name, deeper)
        with pytest.raises(SubdocError) as error:
            make(text, path, raw, 0)
        assert error.value.status == Status.SUBDOC_PATH_ENOENT
        at(expected, steps)[name] = {deeper: new}
        assert json.loads(make(text, path, raw, CREATE_PARENTS)[0]) == expected
        at(expected, steps)[name] = new


@given(documents(), st.lists(values, min_size=1, max_size=3), st.data())
def test_arrays_grow(
    document: tuple[str, Any, tuple[int | str, ...], Any], new: list[Any], data: st.DataObject
) -> None:
    text, value, steps, member = document
    if not isinstance(member, list):
        return
    raw = json.dumps(new)[1:-1]
    for grow, place in ((subdoc.array_push_last, len(member)), (subdoc.array_push_first, 0)):
        expected = copy.deepcopy(value)
        at(expected, steps)[place:place] = new
        assert json.loads(grow(text, steps, raw, 0)[0]) == expected
    place = data.draw(st.integers(0, len(member)))
    expected = copy.deepcopy(value)
    at(expected, steps)[place:place] = new
    assert json.loads(subdoc.array_insert(text, (*steps, place), raw, 0)[0]) == expected
    with pytest.raises(SubdocError) as error:
        subdoc.array_insert(text, (*steps, len(member) + 1), raw, 0)
    assert error.value.status == Status.SUBDOC_PATH_ENOENT
    if member:
        assert json.loads(subdoc.get(text, (*steps, -1))) == member[-1]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1).filter(bool))
def test_counters(old: int, delta: int) -> None:
    text = json.dumps({"n": old})
    if not -(1 << 63) <= old + delta < 1 << 63:
        with pytest.raises(SubdocError) as error:
            subdoc.counter(text, ("n",), str(delta), 0)
        assert error.value.status == Status.SUBDOC_VALUE_CANTINSERT
        return
    new, result = subdoc.counter(text, ("n",), str(delta), 0)
    assert json.loads(new) == {"n": old + delta}
    assert result == str(old + delta)


def test_what_is_not_touched_keeps_its_bytes() -> None:
    text = '{ "big" : 1e400,\t"exact":1.10000000000000000001, "a":{"b":[ 1 , 2 ]} ,"z":"\\u00e9" }'
    new, _ = subdoc.dict_upsert(text, ("a", "c"), "true", 0)
    assert (
        new
        == '{ "big" : 1e400,\t"exact":1.10000000000000000001, "a":{"b":[ 1 , 2 ],"c":true} ,"z":"\\u00e9" }'
    )
    assert subdoc.get(text, ("exact",)) == "1.10000000000000000001"
    assert subdoc.delete(text, ("a",), "", 0)[0] == (
        '{ "big" : 1e400,\t"exact":1.10000000000000000001, "z":"\\u00e9" }'
    )
    assert subdoc.delete(text, ("z",), "", 0)[0].endswith('{"b":[ 1 , 2 ]}  }')


@pytest.mark.parametrize(
    ("raw", "steps"),
    [
        (b"", ()),
        (b"a", ("a",)),
        (b"a.b", ("a", "b")),
        (b"a[0].b", ("a", 0, "b")),
        (b"[3]", (3,)),
        (b"[-1][0]", (-1, 0)),
        (b"`a.b[0]`.c", ("a.b[0]", "c")),
        (b"```x```", ("`x`",)),
        (b"a b.c-d", ("a b", "c-d")),
        (b"0.1", ("0", "1")),
        ("é.ü".encode(), ("é", "ü")),
    ],
)
def test_paths(raw: bytes, steps: tuple[str, ...]) -> None:
    assert parse_path(raw) == steps


BROKEN = b". a. .a a..b a[ a[x] a[01] a[-2] a] `a a`b [0]a \xff a[0]b a[\xd9\xa1]".split()


@pytest.mark.parametrize("raw", BROKEN)
def test_broken_paths(raw: bytes) -> None:
    with pytest.raises(SubdocError) as error:
        parse_path(raw)
    assert error.value.status == Status.SUBDOC_PATH_EINVAL


def test_long_and_deep_paths() -> None:
    assert len(parse_path(b".".join([b"a"] * 32))) == 32
    for raw in (b".".join([b"a"] * 33), b"a" * 1025):
        with pytest.raises(SubdocError) as error:
            parse_path(raw)
        assert error.value.status == Status.SUBDOC_PATH_E2BIG


DOC = (
    '{"a":{"b":[1,"x",{"c":null}]},"n":5,"f":1.5,"big":99999999999999999999,"huge":' + "9" * 30 + ',"s":"t"}'
)


@pytest.mark.parametrize(
    ("operation", "path", "raw", "status"),
    [
        (subdoc.dict_upsert, ("n", "x"), "1", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.dict_upsert, ("a", "b", 0), "1", Status.SUBDOC_PATH_EINVAL),
        (subdoc.dict_upsert, (), "1", Status.SUBDOC_PATH_EINVAL),
        (subdoc.dict_upsert, ("x",), "{", Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.dict_upsert, ("x",), "", Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.dict_upsert, ("x",), '1,"y":2', Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.dict_upsert, ("x",), "[" * 100_000, Status.SUBDOC_VALUE_E2DEEP),
        (subdoc.replace, ("nope",), "1", Status.SUBDOC_PATH_ENOENT),
        (subdoc.replace, (), "1", Status.SUBDOC_PATH_EINVAL),
        (subdoc.delete, ("nope",), "", Status.SUBDOC_PATH_ENOENT),
        (subdoc.delete, ("a", "b", 7), "", Status.SUBDOC_PATH_ENOENT),
        (subdoc.delete, ("n", "x"), "", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.array_push_last, ("a",), "1", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.array_push_last, ("nope",), "1", Status.SUBDOC_PATH_ENOENT),
        (subdoc.array_push_last, ("a", "b"), "1,", Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.array_push_last, ("a", "b"), "1],[2", Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.array_push_last, ("a", "b"), "", Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.array_insert, ("a", "b"), "1", Status.SUBDOC_PATH_EINVAL),
        (subdoc.array_insert, ("a", "b", -1), "1", Status.SUBDOC_PATH_EINVAL),
        (subdoc.array_insert, ("n", 0), "1", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.array_add_unique, ("a", "b"), "2", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.array_add_unique, ("a", "b"), "[]", Status.SUBDOC_VALUE_CANTINSERT),
        (subdoc.counter, ("n",), "0", Status.SUBDOC_DELTA_EINVAL),
        (subdoc.counter, ("n",), "1.5", Status.SUBDOC_DELTA_EINVAL),
        (subdoc.counter, ("n",), "1_0", Status.SUBDOC_DELTA_EINVAL),
        (subdoc.counter, ("n",), "9223372036854775808", Status.SUBDOC_DELTA_EINVAL),
        (subdoc.counter, ("n",), "-", Status.SUBDOC_DELTA_EINVAL),
        (subdoc.counter, ("f",), "1", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.counter, ("s",), "1", Status.SUBDOC_PATH_MISMATCH),
        (subdoc.counter, ("big",), "1", Status.SUBDOC_NUM_ERANGE),
        (subdoc.counter, ("huge",), "1", Status.SUBDOC_NUM_ERANGE),
        (subdoc.counter, ("a", "x", "y"), "1", Status.SUBDOC_PATH_ENOENT),
        (subdoc.counter, (), "1", Status.SUBDOC_PATH_EINVAL),
    ],
)
def test_refusals(operation: Callable[..., Any], path: tuple[int | str, ...], raw: str, status: int) -> None:
    with pytest.raises(SubdocError) as error:
        operation(DOC, path, raw, 0)
    assert Status(error.value.status) == status


def test_unique_elements() -> None:
    text, _ = subdoc.array_add_unique('{"a":[1,"x"]}', ("a",), "2", 0)
    assert text == '{"a":[1,"x",2]}'
    for raw in ("2", '"x"', " 1 "):
        with pytest.raises(SubdocError) as error:
            subdoc.array_add_unique(text, ("a",), raw, 0)
        assert error.value.status == Status.SUBDOC_PATH_EEXISTS
    assert subdoc.array_add_unique("{}", ("new", "list"), "1", CREATE_PARENTS)[0] == '{"new":{"list":[1]}}'


def test_deep_documents_are_refused_and_not_a_crash() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    acts: list[Callable[[], object]] = [
        lambda: subdoc.get(deep, (0, 0)),
        lambda: subdoc.get_count(deep, ()),
    ]
    for act in acts:
        with pytest.raises(SubdocError) as error:
            act()
        assert error.value.status == Status.SUBDOC_DOC_E2DEEP
