"""What `verify` says of two sides that differ, and of two that don't."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.spark.rounds.compare import DIGEST_SCHEMA, Digester, compare, newest
from tailrace.table.rows import DELETED, TABLE_SCHEMA, table_schema

VBUCKETS = 4


def row(
    key: str, vbucket: int = 0, seqno: int = 1, value: str | None = "{}", **more: object
) -> dict[str, object]:
    base: dict[str, object] = {
        "key": key, "value": value, "vbucket": vbucket, "vb_uuid": 1, "seqno": seqno, "cas": seqno, "rev": 1,
        "flags": 0, "expiry": 0, "datatype": "json", "event_time": 0, "deleted": False,
    }  # fmt: skip
    return {**base, **more}


def differences(
    bucket: list[dict[str, object]], table: list[dict[str, object]], position: int = 100
) -> list[str]:
    digester = Digester(b"s" * 16)
    rows = pa.Table.from_pylist(bucket, schema=table_schema(keep_deletes=True))
    deleted = DIGEST_SCHEMA.get_field_index("deleted")
    compared = compare(
        digester.of_rows(rows).set_column(deleted, "deleted", rows["deleted"]),
        digester.of_rows(pa.Table.from_pylist(table, schema=TABLE_SCHEMA)),
        np.full(VBUCKETS, position),
    )
    return [
        f"{difference.kind} {difference.key}{' newer' if difference.newer else ''}" for difference in compared
    ]


def test_equal_sides_have_no_difference() -> None:
    rows = [row("a"), row("b", 1), row("a", 2)]
    assert differences([*rows, row("gone", deleted=True)], rows) == []
    assert differences([], []) == []


def test_each_kind_of_difference_is_named() -> None:
    assert differences([row("a")], []) == ["missing a"]
    assert differences([], [row("a")]) == ["extra a"]
    assert differences([row("a", deleted=True)], [row("a")]) == ["extra a"]
    assert differences([row("a", 1)], [row("a", 2)]) == ["extra a", "missing a"]
    others: dict[str, Any] = {
        "value": "1",
        "cas": 9,
        "rev": 9,
        "flags": 9,
        "expiry": 9,
        "datatype": "raw",
    }
    for column, other in others.items():
        assert differences([row("a")], [row("a", **{column: other})]) == ["different a"], column


def test_a_row_that_stands_twice_is_one_too_many() -> None:
    assert differences([row("a"), row("b")], [row("a"), row("b"), row("a")]) == ["extra a"]


def test_a_change_above_the_tables_position_is_said_to_be_newer() -> None:
    assert differences([row("a", seqno=7)], [row("a", seqno=3)], position=5) == ["different a newer"]
    assert differences([row("a", seqno=7)], [], position=5) == ["missing a newer"]
    assert differences([row("a", seqno=7, deleted=True)], [row("a")], position=5) == ["extra a newer"]


def test_keys_that_are_no_text() -> None:
    binary = {**row("x"), "key": None, "key_base64": "/w=="}
    assert differences([binary], [binary]) == []
    assert differences([binary], []) == ["missing base64:/w=="]


def test_against_plain_dicts() -> None:
    rng = random.Random(5)
    for _ in range(200):

        def side() -> dict[tuple[int, str], int]:
            return {(rng.randrange(VBUCKETS), rng.choice("abcdef")): rng.randrange(3) for _ in range(8)}

        left, right = side(), side()
        told = differences(
            [row(key, vbucket, cas=cas) for (vbucket, key), cas in left.items()],
            [row(key, vbucket, cas=cas) for (vbucket, key), cas in right.items()],
        )
        wanted = [f"extra {key}" for _, key in right.keys() - left.keys()]
        wanted += [f"missing {key}" for _, key in left.keys() - right.keys()]
        wanted += [f"different {at[1]}" for at in left.keys() & right.keys() if left[at] != right[at]]
        assert sorted(told) == sorted(wanted)


def test_of_several_changes_the_last_one_counts() -> None:
    digester = Digester(b"s" * 16)
    parts = [
        digester.of_rows(
            pa.Table.from_pylist([row("a", seqno=seqno), row("b", 1, seqno)], schema=TABLE_SCHEMA)
        )
        for seqno in (1, 2, 3)
    ]
    assert newest(parts).select(["key", "seqno"]).to_pylist() == [
        {"key": b"a", "seqno": 3},
        {"key": b"b", "seqno": 3},
    ]
    assert newest([]).num_rows == 0


def test_the_column_of_deletions_is_the_last() -> None:
    assert table_schema(keep_deletes=True).names[-1] == DELETED.name
