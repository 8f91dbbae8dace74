"""JSON documents as typed columns."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.errors import UsageError
from tailrace.spark.documents import RESCUED, infer_schema, rescued_count, typed

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

DOCUMENTS = [
    ("ada", b'{"name":"Ada","age":36}'),
    ("wrong", b'{"name":"Bob","age":"old"}'),
    ("none", b"not json"),
    ("gone", None),
    ("more", b'{"name":"Eve","age":1,"city":"Paris"}'),
]


@pytest.fixture
def frame(spark: Any) -> Any:
    return spark.createDataFrame(
        [(k, bytearray(v) if v else None) for k, v in DOCUMENTS], "key STRING, value BINARY"
    )


def rows(frame: Any) -> dict[str, Any]:
    return {row.key: row for row in frame.collect()}


def test_documents_become_columns_and_none_is_dropped(frame: Any) -> None:
    by_key = rows(typed(frame, "name STRING, age INT"))
    assert len(by_key) == len(DOCUMENTS)
    assert (by_key["ada"].name, by_key["ada"].age, by_key["ada"][RESCUED]) == ("Ada", 36, None)
    assert (by_key["wrong"].name, by_key["wrong"].age) == ("Bob", None)
    assert by_key["wrong"][RESCUED] == '{"name":"Bob","age":"old"}'
    assert by_key["none"][RESCUED] == "not json"
    assert by_key["gone"][RESCUED] is None
    assert rescued_count(typed(frame, "name STRING, age INT")) == 2


def test_fields_in_a_struct(frame: Any) -> None:
    by_key = rows(typed(frame, "name STRING, age INT", into="person"))
    assert by_key["ada"].person.name == "Ada"
    assert by_key["gone"].person is None


def test_variant_keeps_any_shape(frame: Any) -> None:
    made = typed(frame, "VARIANT").selectExpr(
        "key", "variant_get(document, '$.city', 'string') AS city", "document is null AS no_json", RESCUED
    )
    by_key = rows(made)
    assert by_key["more"].city == "Paris"
    assert by_key["none"][RESCUED] == "not json"
    assert by_key["gone"].no_json
    assert by_key["gone"][RESCUED] is None


def test_a_schema_is_inferred_from_a_sample(frame: Any) -> None:
    schema = infer_schema(frame)
    assert set(schema.fieldNames()) == {"name", "age", "city"}
    assert rows(typed(frame, schema))["more"].city == "Paris"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("name STRINGG", "is not a schema"),
        ("key STRING", "give into="),
        (f"{RESCUED} STRING", "rename yours"),
    ],
)
def test_what_is_wrong_is_said(frame: Any, schema: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        typed(frame, schema)
