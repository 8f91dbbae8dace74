"""Typed tables from a real node to their readers, without Spark: the mirror's own loop on a Delta table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.errors import UsageError
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import Verdict, verify_table
from tailrace.table.opening import open_table

VBUCKETS = 4
SCHEMA = "name STRING, age INT, tags ARRAY<STRING>, address STRUCT<city: STRING, zip: INT>, key STRING"


@pytest.fixture(scope="module")
def running_node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=VBUCKETS) as running:
        yield running
    close_idle_sources()


@pytest.fixture
def node(running_node: Any) -> Any:
    running_node.flush()
    return running_node


def built(node: Any, path: Path, said: list[str] | None = None, **settings: Any) -> Mirror:
    return build_mirror(
        LocalJobs(),
        node.url,
        path,
        once=True,
        in_background=False,
        on_schema=(said if said is not None else []).append,
        **settings,
    )


def once(node: Any, path: Path, said: list[str] | None = None, **settings: Any) -> list[RoundProgress]:
    rounds: list[RoundProgress] = []
    mirror = built(node, path, said, on_progress=rounds.append, **settings)
    mirror.prepare()
    mirror.run()
    return rounds


def test_whoever_gives_no_callback_reads_the_inferred_schema_on_stderr(
    node: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.set("k", {"n": 1})
    build_mirror(LocalJobs(), node.url, tmp_path / "t", once=True, in_background=False, schema="infer")
    assert capsys.readouterr().err == "tailrace: schema inferred from 1 documents: n BIGINT\n"


def verdict(node: Any, path: Path) -> Verdict:
    return verify_table(LocalJobs(), source_options(node.url), open_table(path))


def rows(path: Path, *columns: str, version: int | None = None) -> dict[str, tuple[Any, ...]]:
    live_rows = tailrace.read_table(path, version=version, columns=["key", *columns]).to_arrow().to_pylist()
    return {row["key"]: tuple(row[name] for name in columns) for row in live_rows}


def test_documents_become_columns_and_what_does_not_fit_is_kept(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "people"
    node.set("a", {"name": "Ada", "age": 36, "tags": ["x"], "address": {"city": "London", "zip": 1}})
    node.set("b", {"name": "Bob", "age": "many", "key": "own", "unknown": 1})
    node.set("c", "no json at all")
    node.set("d", b"\xff\xfe")
    (progress,) = once(node, path, schema=SCHEMA)
    assert progress.rescued == 3
    assert progress.to_json()["rescued"] == 3
    by_key = rows(path, "name", "age", "tags", "address", "doc_key", "_rescued")
    assert by_key["a"] == ("Ada", 36, ["x"], {"city": "London", "zip": 1}, None, None)
    assert by_key["b"][:5] == ("Bob", None, None, None, "own")
    assert json.loads(by_key["b"][5]) == {"age": {"value": "many", "reason": "a string, not INT"}}
    assert json.loads(by_key["c"][5]) == {"": {"reason": "JSON, but no object"}}
    assert json.loads(by_key["d"][5]) == {"": {"reason": "no text"}}
    assert rows(path, "value")["c"] == ('"no json at all"',)
    said = verdict(node, path)
    assert said.equal
    assert said.rescued == 3
    # a restart needs no schema, and the columns stay what they are
    node.set("e", {"name": "Eve", "unknown": 2})
    node.delete("b")
    once(node, path)
    assert rows(path, "name", "doc_key")["e"] == ("Eve", None)
    assert verdict(node, path).rescued == 2


def test_without_the_value_column_nothing_is_lost_either(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "slim"
    node.set("a", {"name": "Ada", "age": 1.5})
    node.set("b", b"\xff\xfe")
    node.set("c", "text")
    once(node, path, schema=SCHEMA, value_column=False)
    assert "value" not in open_table(path).schema.names
    rescued_by_key = {key: json.loads(rescued) for key, (rescued,) in rows(path, "_rescued").items()}
    assert rescued_by_key["a"] == {
        "age": {"value": 1.5, "reason": "a number with a fraction or an exponent, not INT"}
    }
    assert rescued_by_key["b"] == {"": {"value_base64": "//4=", "reason": "no text"}}
    assert rescued_by_key["c"] == {"": {"value": '"text"', "reason": "JSON, but no object"}}
    assert verdict(node, path).equal
    node.set("a", {"name": "Bea"})
    (difference,) = verdict(node, path).differences
    assert "its columns are not what the document has" in difference.what
    once(node, path)
    assert verdict(node, path).equal


def test_a_sample_says_which_columns_there_are(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "inferred"
    said: list[str] = []
    for number in range(20):
        node.set(f"k{number}", {"n": number, "who": {"first name": "x"}, "Who": 1.5, "big": 1 << 70})
    once(node, path, said, schema="INFER")
    assert said == [
        "schema inferred from 20 documents: n BIGINT, who STRUCT<`first name`: STRING>, Who DOUBLE, "
        "big DECIMAL(38,0)"
    ]
    assert rows(path, "n", "who", "Who_2", "big")["k7"] == (7, {"first_name": "x"}, 1.5, 1 << 70)
    # fields that come later become columns, even inside another column
    node.set("k7", {"n": 1, "who": {"first name": "y", "last": ["z"]}, "later": "now"})
    once(node, path)
    by_key = rows(path, "n", "who", "later")
    assert by_key["k7"] == (1, {"first_name": "y", "last": ["z"]}, "now")
    assert by_key["k8"] == (8, {"first_name": "x", "last": None}, None)
    assert verdict(node, path).equal
    once(node, path, said, schema="infer")
    assert len(said) == 1


def test_an_empty_bucket_gets_its_columns_with_its_documents(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    said: list[str] = []
    once(node, path, said, schema="infer")
    assert said == ["the bucket has no document yet: fields become columns when they appear"]
    for number in range(50):  # tasks that see a field with different types agree on one
        node.set(f"k{number}", {"x": number if number % 2 else "text", "only": {f"f{number % 3}": number}})
    once(node, path)
    assert verdict(node, path).equal
    kinds = {type(x) for x, _ in rows(path, "x", "only").values()}
    assert kinds in ({int, type(None)}, {str, type(None)})
    assert set(rows(path, "only")["k5"][0]) == {"f0", "f1", "f2"}


def test_more_columns_can_be_asked_for_and_filled(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "more"
    said: list[str] = []
    node.set("a", {"name": "Ada", "age": 36, "address": {"city": "London", "zip": 5}})
    once(node, path, schema="name STRING, address STRUCT<city: STRING>")
    more = "name STRING, address STRUCT<zip: INT>, age INT"
    once(node, path, said, schema=more)
    assert "gets more columns" in said[0]
    assert rows(path, "age", "address")["a"] == (None, {"city": "London", "zip": None})
    (difference,) = verdict(node, path).differences
    assert difference.what == "its columns are not what the document has"
    once(node, path, start_over=[difference.vbucket])
    assert rows(path, "age", "address")["a"] == (36, {"city": "London", "zip": 5})
    assert verdict(node, path).equal
    # the older version is what it was
    assert "age" not in tailrace.read_table(path, version=2).schema.names


@pytest.mark.parametrize(
    ("first", "then", "problem"),
    [
        ({"schema": "a INT"}, {"schema": "a STRING"}, "has a as INT, not STRING; leave out the schema"),
        ({"schema": "a INT"}, {"value_column": False}, "can't be removed; continue with it"),
        ({}, {"schema": "a INT"}, "is not typed; leave out the schema"),
        ({}, {"schema": "infer"}, "is not typed; leave out the schema"),
        (None, {"value_column": False}, "leaving the value column out is for typed tables; give a schema"),
        (None, {"evolve": True}, "columns for new fields are for typed tables; give a schema"),
        (None, {"schema": " "}, "the schema is empty"),
        (None, {"schema": "a TEXT"}, "there is no type TEXT"),
    ],
)
def test_a_schema_that_can_not_be_is_said_in_one_line(
    node: Any, tmp_path: Path, first: dict[str, Any] | None, then: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "table"
    if first is not None:
        built(node, path, **first)
    with pytest.raises(UsageError, match=problem) as raised:
        built(node, path, **then)
    assert "\n" not in str(raised.value)
    assert "--" not in str(raised.value)  # callers from Python have no command-line options


def test_a_rollback_across_a_change_of_the_columns(node: Any, tmp_path: Path) -> None:
    path = tmp_path / "back"
    node.set("a", {"name": "old"})
    node.set("b", {"name": "stays"})
    once(node, path, schema="infer")
    before = open_table(path)
    vbucket = node.vbucket_of("a")
    seqno = before.current.position(vbucket).seqno
    node.set("a", {"name": "new", "later": {"x": 1}})
    once(node, path)
    assert rows(path, "name", "later")["a"] == ("new", {"x": 1})
    node.rewind(vbucket=vbucket, to_seqno=seqno)
    (progress, *_) = once(node, path)
    assert progress.rolled_back == (vbucket,)
    assert rows(path, "name", "later") == {"a": ("old", None), "b": ("stays", None)}
    assert verdict(node, path).equal
    node.set("a", {"later": {"x": 2, "y": "z"}})
    once(node, path)
    assert rows(path, "name", "later")["a"] == (None, {"x": 2, "y": "z"})
    assert verdict(node, path).equal
