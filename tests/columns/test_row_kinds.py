"""Only one module knows what kinds of rows there are; the others use it."""

from __future__ import annotations

import ast
from pathlib import Path

import pyarrow as pa

from syntax_trees import parse
from tailrace.columns.batch import SCHEMA
from tailrace.columns.row_kinds import (
    ALL_OPS,
    CHANGE_OPS,
    are_changes,
    are_mutations,
    kind_of,
    rollback_rows,
    single_row,
)
from tailrace.spark.source.options import OPTIONS

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tailrace"
HOMES = ("spark/source/options.py",)
"""Modules with their own words, as they must not import anything heavy; compared with `row_kinds` below."""


def rows_of_all_kinds() -> pa.Table:
    return pa.Table.from_pylist([{"op": op} for op in ALL_OPS], schema=SCHEMA)


def test_what_is_what() -> None:
    rows = rows_of_all_kinds()
    assert are_mutations(rows).to_pylist() == [op == "mutation" for op in ALL_OPS]
    assert are_changes(rows).to_pylist() == [op in CHANGE_OPS for op in ALL_OPS]
    assert [kind_of(single_row({"op": op})) for op in CHANGE_OPS] == [None, None, None]
    assert [kind_of(single_row({"op": op})) for op in ALL_OPS[3:]] == ["rollback", "flush", "system"]
    assert kind_of(rollback_rows([(1, 2, 3)])) == "rollback"
    assert kind_of(rollback_rows([])) is None


def test_the_option_of_the_source_has_them_all() -> None:
    (ops,) = (option for option in OPTIONS if option.name == "ops")
    assert ops.parse(",".join(ALL_OPS)) == ALL_OPS


def looks_at_ops(code: str) -> list[int]:
    """The lines that compare the column ``op`` with a word of their own."""
    lines = []
    for node in ast.walk(parse(code)):
        match node:
            case ast.Compare() | ast.Call():
                inside = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if "op" in inside and inside & set(ALL_OPS):
                    lines.append(node.lineno)
            case ast.Constant(value=str(text)) if any(f"op {sign} '" in text for sign in ("=", "!=", "<>")):
                lines.append(node.lineno)
    return lines


def test_nobody_else_looks_at_ops() -> None:
    assert {
        module: lines
        for folder in ("spark", "table")
        for path in (SOURCE / folder).rglob("*.py")
        if not (module := str(path.relative_to(SOURCE))).startswith(HOMES)
        and (lines := looks_at_ops(path.read_text()))
    } == {}


def test_who_looks_is_noticed() -> None:
    code = (
        'pc.equal(batch["op"], "mutation")\n'
        'batch["op"][0].as_py() == "rollback"\n'
        "frame.where(\"op = 'rollback'\")\n"
        'batch["op"]\n'
    )
    assert sorted(set(looks_at_ops(code))) == [1, 2, 3]
