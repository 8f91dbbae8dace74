"""Documents as typed columns: many together give the same as one by one, and nothing is dropped."""

from __future__ import annotations

import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import UsageError
from tailrace.table.ddl import format_ddl, parse_ddl
from tailrace.table.inferring import common_type, type_of
from tailrace.table.typed import DocumentShape

SHAPE = DocumentShape(
    parse_ddl(
        "name STRING, age INT, big BIGINT, score DOUBLE, ok BOOLEAN, price DECIMAL(8,2), "
        "day DATE, at TIMESTAMP, "
        "tags ARRAY<STRING>, address STRUCT<city: STRING, zip: INT, geo: STRUCT<lat: DOUBLE>>, "
        "counts MAP<STRING, INT>, lines ARRAY<STRUCT<sku: STRING, n: INT>>, times ARRAY<TIMESTAMP>"
    )
)
PLAIN_SHAPE = DocumentShape(pa.schema([field for field in SHAPE.schema if field.name != "counts"]))
"""Without a map, which Arrow's reader does not know: all fields can be read at once."""


def parsed(*documents: str | None, shape: DocumentShape = SHAPE) -> tuple[list[dict[str, Any]], list[Any]]:
    result = shape.parse(pa.chunked_array([pa.array(documents, pa.string())]))
    rows = pa.table(result.columns, schema=shape.schema).to_pylist()
    kept = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return kept, [None if text is None else json.loads(text) for text in result.rescued.to_pylist()]


@pytest.mark.parametrize(
    ("document", "row"),
    [
        ('{"name":"Ada","age":36}', {"name": "Ada", "age": 36}),
        ('{"name":null}', {}),
        ("{}", {}),
        (None, {}),
        ('{"big":9223372036854775807}', {"big": 2**63 - 1}),
        ('{"score":5}', {"score": 5.0}),
        ('{"score":1e3}', {"score": 1000.0}),
        ('{"price":12.5}', {"price": Decimal("12.50")}),
        ('{"price":"12.5"}', {"price": Decimal("12.50")}),
        ('{"day":"2026-11-16"}', {"day": date(2026, 11, 16)}),
        ('{"at":"2026-11-16T12:00:00Z"}', {"at": datetime(2026, 11, 16, 12, tzinfo=UTC)}),
        ('{"at":"2026-11-16T12:00:00.25+01:00"}', {"at": datetime(2026, 11, 16, 11, 0, 0, 250000, UTC)}),
        ('{"tags":["a",null,"b"]}', {"tags": ["a", None, "b"]}),
        ('{"tags":[]}', {"tags": []}),
        (
            '{"address":{"city":"Wien","geo":{"lat":48.2}}}',
            {"address": {"city": "Wien", "zip": None, "geo": {"lat": 48.2}}},
        ),
        ('{"counts":{"a":1,"b":2}}', {"counts": [("a", 1), ("b", 2)]}),
        ('{"lines":[{"sku":"x","n":2}]}', {"lines": [{"sku": "x", "n": 2}]}),
        ('{\n "name":\n "a\\nb" }', {"name": "a\nb"}),
        ('{"unknown":{"deep":[1]},"age":1}', {"age": 1}),
    ],
)
def test_what_fits(document: str | None, row: dict[str, Any]) -> None:
    assert parsed(document, '{"name":"beside"}') == ([row, {"name": "beside"}], [None, None])
    if "counts" not in row:
        beside = parsed(document, '{"name":"beside"}', shape=PLAIN_SHAPE)
        assert beside == ([row, {"name": "beside"}], [None, None])


@pytest.mark.parametrize(
    ("document", "row", "path", "value", "reason"),
    [
        ('{"age":"12","name":"x"}', {"name": "x"}, "age", "12", "a string, not INT"),
        ('{"age":1.5}', {}, "age", 1.5, "a number with a fraction or an exponent, not INT"),
        ('{"age":true}', {}, "age", True, "true or false, not INT"),
        ('{"age":3000000000}', {}, "age", 3000000000, "too large for INT"),
        (
            '{"big":123456789012345678901234567890}',
            {},
            "big",
            123456789012345678901234567890,
            "too large for BIGINT",
        ),
        ('{"score":1e400}', {}, "score", float("inf"), "too large for DOUBLE"),
        ('{"name":12}', {}, "name", 12, "a number, not STRING"),
        ('{"name":"\\ud800"}', {}, "name", "\ud800", "half of a surrogate pair"),
        ('{"ok":"yes"}', {}, "ok", "yes", "a string, not BOOLEAN"),
        ('{"price":1.234}', {}, "price", 1.234, "more digits than DECIMAL(8,2) has"),
        ('{"day":"yesterday"}', {}, "day", "yesterday", "no DATE"),
        ('{"at":"2026-11-16T12:00:00"}', {}, "at", "2026-11-16T12:00:00", "no TIMESTAMP"),
        ('{"at":5}', {}, "at", 5, "a number, not TIMESTAMP"),
        ('{"tags":"a"}', {}, "tags", "a", "a string, not ARRAY<STRING>"),
        ('{"tags":["a",1]}', {}, "tags", ["a", 1], "an element is a number, not STRING"),
        ('{"counts":{"a":"b"}}', {}, "counts", {"a": "b"}, "a string, not INT"),
        ("[1,2]", {}, "", "[1,2]", "JSON, but no object"),
        ("{bad", {}, "", "{bad", "no JSON"),
        ("", {}, "", "", "no JSON"),
        ("NaN", {}, "", "NaN", "no JSON"),
    ],
)
def test_what_does_not_fit_is_rescued(
    document: str, row: dict[str, Any], path: str, value: Any, reason: str
) -> None:
    for shape in (SHAPE, PLAIN_SHAPE) if path != "counts" else (SHAPE,):
        rows, rescued = parsed('{"name":"before"}', document, '{"name":"behind"}', shape=shape)
        assert rows == [{"name": "before"}, row, {"name": "behind"}]
        assert rescued == [None, {path: {"value": value, "reason": reason}}, None]


def test_a_part_of_a_struct_that_does_not_fit_leaves_the_rest() -> None:
    rows, rescued = parsed('{"address":{"city":"Wien","zip":"1010"}}')
    assert rows == [{"address": {"city": "Wien", "zip": None, "geo": None}}]
    assert rescued == [{"address.zip": {"value": "1010", "reason": "a string, not INT"}}]


def test_a_number_keeps_its_digits_when_it_is_rescued() -> None:
    result = SHAPE.parse(pa.chunked_array([['{"age":1.10}']]))
    assert '"value":1.10' in result.rescued[0].as_py()


def any_value(rng: random.Random, depth: int = 0) -> Any:
    choices: list[Any] = [
        None,
        True,
        rng.randrange(-5, 100),
        rng.randrange(1 << 40),
        1 << 70,
        round(rng.random() * 100, rng.randrange(4)),
        "text",
        "12",
        "",
        'Zoë\n\\"',
        "2026-02-28",
        "2026-02-30",
        "2026-11-16T01:02:03Z",
        "2026-11-16 01:02:03.5+0200",
    ]
    if depth < 3:
        choices.append([any_value(rng, depth + 1) for _ in range(rng.randrange(3))])
        names = ["city", "zip", "geo", "lat", "sku", "n", "a"]
        choices.append({rng.choice(names): any_value(rng, depth + 1) for _ in range(rng.randrange(3))})
    return rng.choice(choices)


HOSTILE = [
    None,
    "",
    " ",
    "[1]",
    "null",
    "no json",
    '{"name":"\\udc00"}',
    '{"other":"\\udc00"}',
    '{"age":1,"age":"x"}',
    '{"age":1,"age":2}',
    # texts that are documents only together with their neighbours
    '{"name":"a"',
    ',"age":1}',
    '{"name":"a"} {"name":"b"}',
    '{"name":"a"}{"name":"b"}',
    '{"name":"a"},',
    '{"name":"a},{',
    '{"name":["}',
    '{"name":"a\nb"}',
    '{"name":"a\tb"}',
    '\ufeff{"name":"a"}',
    '{"name":"a"}\0',
    ' \r\n{\n"age"\n:\n1}\n',
    # numbers
    '{"score":NaN}',
    '{"score":-Infinity}',
    '{"score":Inf}',
    '{"other":NaN}',
    '{"other":Infinity}',
    '{"other":-Inf}',
    '{"name":"NaN"}',
    '{"score":-0.0}',
    '{"age":-0}',
    '{"age":01}',
    '{"age":1E1}',
    '{"other":' + "9" * 6000 + "}",
    '{"score":' + "9" * 6000 + "}",
    '{"big":' + "9" * 6000 + "}",
    '{"price":1e2}',
    '{"price":"1e2"}',
    '{"price":"+1"}',
    '{"price":".5"}',
    '{"price":1e400}',
    '{"price":1e-400}',
    '{"price":0e99}',
    '{"price":999999.99}',
    '{"price":1000000}',
    # moments
    '{"at":"2026-11-16T24:00:00Z"}',
    '{"at":"2026-11-16T12Z"}',
    '{"at":"2026-11-16T12:00Z"}',
    '{"at":"2026-11-16T12:00:60Z"}',
    '{"at":"2026-11-16T12:00:00+25:00"}',
    '{"at":"2026-11-16T12:00:00+01"}',
    '{"at":"2026-11-16T12:00:00.1234567Z"}',
    '{"at":"0001-01-01T00:00:00+01:00"}',
    '{"at":"9999-12-31T23:59:59.999999-00:01"}',
    '{"at":"0000-01-01T00:00:00Z"}',
    '{"at":"1500-02-29T00:00:00Z"}',
    '{"day":"0000-01-01"}',
    '{"day":"1582-10-10"}',
    '{"day":"2026-1-1"}',
    '{"times":["2026-11-16T12:00:00+0100",null]}',
    '{"times":["2026-11-16"]}',
    # depth and size
    '{"other":' + "[" * 300 + "]" * 300 + "}",
    '{"other":' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"tags":' + "[" * 5_000 + "]" * 5_000 + "}",
    '{"other":' + '{"a":' * 2_000 + "1" + "}" * 2_000 + "}",
    json.dumps({"lines": [{"sku": "s", "n": n} for n in range(1000)]}),
    json.dumps({"tags": ["t"] * 10_000}),
]


def any_document(rng: random.Random, mostly: float) -> str | None:
    """Documents that fit, except for some."""
    if rng.random() < 0.02:
        return rng.choice(HOSTILE)
    good = {
        "name": "x" * rng.randrange(5),
        "age": rng.randrange(100),
        "big": rng.randrange(1 << 60),
        "score": rng.random(),
        "ok": rng.random() < 0.5,
        "price": rng.randrange(1000) / 4,
        "day": "2026-01-31",
        "at": "2026-11-16T12:00:00Z",
        "tags": ["a", "b"],
        "address": {"city": "Wien", "zip": 1010, "geo": {"lat": 48.25}},
        "counts": {"a": 1},
        "lines": [{"sku": "s", "n": 1}],
        "times": ["2026-11-16T12:00:00Z"],
    }
    document = {name: value for name, value in good.items() if rng.random() < 0.8}
    for name in good:
        if rng.random() > mostly:
            document[name] = any_value(rng)
    return json.dumps(document, ensure_ascii=rng.random() < 0.5)


@pytest.mark.parametrize(("seed", "mostly"), [(0, 1.0), (1, 0.999), (2, 0.97), (3, 0.5)])
def test_many_at_once_are_the_same_as_one_by_one(seed: int, mostly: float) -> None:
    rng = random.Random(seed)
    texts = [any_document(rng, mostly) for _ in range(2500)]
    documents = pa.chunked_array([pa.array(texts[:900], pa.string()), pa.array(texts[900:], pa.string())])
    shape = DocumentShape(SHAPE.schema, find_unknown=seed % 2 == 1)
    together = shape.parse(documents)
    apart = shape._one_by_one(documents.combine_chunks())
    extended = None if together.extended is None else pa.struct(list(together.extended))
    assert (extended is None) == (apart.seen is None)
    assert together.rescued.to_pylist() == apart.rescued.to_pylist()
    for field, column, other in zip(SHAPE.schema, together.columns, apart.columns, strict=True):
        assert column.to_pylist() == other.to_pylist(), field.name


def check_against_one_by_one(shape: DocumentShape, texts: list[str | None]) -> None:
    documents = pa.chunked_array([pa.array(texts, pa.string())])
    together, apart = shape.parse(documents), shape._one_by_one(documents.combine_chunks())
    assert together.rescued.to_pylist() == apart.rescued.to_pylist(), texts
    assert (together.extended is None) == (apart.seen is None), texts
    for field, column, other in zip(shape.schema, together.columns, apart.columns, strict=True):
        assert column.to_pylist() == other.to_pylist(), (field.name, texts)


@pytest.mark.parametrize("find_unknown", [False, True])
def test_each_hostile_document_among_those_that_fit(find_unknown: bool) -> None:
    rng = random.Random(18)
    shape = DocumentShape(PLAIN_SHAPE.schema, find_unknown)
    good = '{"name":"a","age":1,"score":1.5,"address":{"city":"Wien","geo":{"lat":1}},"tags":["b"]}'
    for hostile in HOSTILE:
        check_against_one_by_one(shape, [good, hostile, good])
    for _ in range(200):
        check_against_one_by_one(shape, [good, *rng.choices(HOSTILE[:60], k=rng.randrange(2, 5))])


NO_NUMBERS = ("NaN", "-NaN", "Inf", "-Inf", "Infinity", "-Infinity")


@pytest.mark.parametrize("no_number", NO_NUMBERS)
def test_a_number_that_json_has_not_fits_no_column(no_number: str) -> None:
    """Arrow's reader takes it for a number, wherever it is."""
    places = [f'"{field.name}":%s' for field in PLAIN_SHAPE.schema]
    places += ['"tags":[%s]', '"times":[%s]', '"lines":[{"n":%s}]', '"address":{"geo":{"lat":%s}}']
    places += ['"address":{"other":%s}', '"lines":[{"other":%s}]', '"other":%s', '"other":[{"a":%s}]']
    good = '{"name":"a","score":1.5}'
    for place in places:
        for find_unknown in (False, True):
            shape = DocumentShape(PLAIN_SHAPE.schema, find_unknown)
            check_against_one_by_one(shape, [good, "{" + place % no_number + "}", good])


@pytest.mark.parametrize(
    "more",
    ['"other":1', '"other":null', '"other":{}', '"address":{"street":"x"}', '"lines":[{"sku":"s","m":1}]'],
)
def test_a_field_that_some_documents_have_more(more: str) -> None:
    """In blocks that are read together, and in one that is not."""
    rows = 3 * 4096
    texts = [f'{{"age":{number}}}' for number in range(rows)]
    texts[5000] = f'{{"age":5000,{more}}}'
    for find_unknown in (False, True):
        result = DocumentShape(PLAIN_SHAPE.schema, find_unknown).parse(pa.chunked_array([texts]))
        assert result.columns[PLAIN_SHAPE.schema.get_field_index("age")].to_pylist() == list(range(rows))
        assert result.rescued.null_count == rows
        assert (result.extended is not None) == (find_unknown and "null" not in more and "{}" not in more)


def test_a_long_decimal_is_the_same_beside_what_does_not_fit() -> None:
    """Python's decimals have 28 digits by default."""
    shape = DocumentShape(parse_ddl("whole DECIMAL(38,0), part DECIMAL(38,10)"))
    whole, part = "9" * 38, "-" + "8" * 28 + "." + "7" * 10
    document = f'{{"whole":{whole},"part":{part}}}'
    row = {"whole": Decimal(whole), "part": Decimal(part)}
    for others in ((), ('{"whole":true,"part":true}',) * 6, (f'{{"part":"{part}"}}',) * 3):
        rows, rescued = parsed(*others, document, shape=shape)
        assert (rows[-1], rescued[-1]) == (row, None), others
    rows, rescued = parsed(f'{{"whole":1{whole}}}', f'{{"part":1{part[1:]}}}', shape=shape)
    assert rows == [{}, {}] and all(rescued)


def test_fields_that_are_not_in_the_schema_are_found() -> None:
    shape = DocumentShape(parse_ddl("name STRING"), find_unknown=True)
    texts = [
        '{"name":"a","age":1,"deep":{"x":[1]}}',
        '{"name":"b","age":1.5,"none":null}',
        '{"name":3,"odd":true}',
    ]
    extended = shape.parse(pa.chunked_array([texts])).extended
    assert extended is not None
    assert format_ddl(extended) == "name STRING, age DOUBLE, deep STRUCT<x: ARRAY<BIGINT>>, odd BOOLEAN"
    assert DocumentShape(extended, find_unknown=True).parse(pa.chunked_array([texts])).extended is None


def test_fields_inside_of_others_are_found_and_known_types_stay() -> None:
    shape = DocumentShape(parse_ddl("a STRUCT<x: INT>, l ARRAY<STRUCT<x: INT>>, m MAP<STRING, INT>"), True)
    texts = ['{"a":{"x":"no","y":{"z":1}},"l":[{"x":2.5},{"d":"2026-01-01"}],"m":{"k":1},"e":{},"n":[[]]}']
    extended = shape.parse(pa.chunked_array([texts])).extended
    assert extended is not None
    assert format_ddl(extended) == (
        "a STRUCT<x: INT, y: STRUCT<z: BIGINT>>, l ARRAY<STRUCT<x: INT, d: STRING>>, m MAP<STRING, INT>"
    )


def test_paths_of_odd_names() -> None:
    shape = DocumentShape(parse_ddl("`a.b` INT, s STRUCT<`c.d`: INT, `e``f`: INT>"))
    result = shape.parse(pa.chunked_array([['{"a.b":"x","s":{"c.d":"x","e`f":"x"}}']]))
    assert list(json.loads(result.rescued[0].as_py())) == ["`a.b`", "s.`c.d`", "s.`e``f`"]


def test_a_type_for_all() -> None:
    assert common_type(pa.int64(), pa.float64()) == pa.float64()
    assert common_type(pa.string(), pa.int64()) == pa.string()
    assert common_type(pa.int64(), pa.decimal128(38, 0)) == pa.decimal128(38, 0)
    assert common_type(pa.decimal128(38, 0), pa.float64()) == pa.float64()
    assert type_of(1 << 64) == pa.decimal128(38, 0)
    assert type_of(10**38) == pa.float64()
    first, second = type_of({"a": 1, "b": None}), type_of({"b": ["x"], "a": Decimal("1.5")})
    assert first is not None
    assert second is not None
    assert common_type(first, second) == pa.struct([("a", pa.float64()), ("b", pa.list_(pa.string()))])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "at least one column"),
        ("name", "lacks a type at its end"),
        ("name TEXT", "there is no type TEXT"),
        ("name STRING age INT", "lacks ',' between two columns"),
        ("name STRING, name INT", "has 'name' twice"),
        ("a ARRAY<STRING", "lacks '>'"),
        ("a MAP<INT, STRING>", "MAP<STRING"),
        ("a DECIMAL(50,2)", "1 to 38 digits"),
        ("a " + "ARRAY<" * 40 + "INT" + ">" * 40, "nested more than"),
        ("; drop table", "lacks the name of a column"),
    ],
)
def test_a_schema_that_is_none(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_ddl(text)


def test_a_schema_can_be_written_and_read_again() -> None:
    odd = parse_ddl(
        "`a b` STRING, `c.d` ARRAY<STRUCT<`x``y`: INT>>, e decimal(5), f map<string, double>, `` INT"
    )
    for schema in (SHAPE.schema, odd):
        assert parse_ddl(format_ddl(schema)) == schema
