"""Documents whose fields appear, vanish and change their type, with rollbacks: every row right or rescued.

The bucket is read over a plain socket and the table by polars and delta-rs; the loop below decides what a row
must be, and uses nothing of our parser.
"""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.naive import bucket_state
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.compaction import CompactionPolicy
from tailrace.table.opening import open_table
from tailrace.table.rows import TABLE_SCHEMA

VBUCKETS = 4
CHANGES = 1000
COLUMN = {"key": "doc_key", "we ird": "we_ird", "x{y}": "x_y_"}
OWN = {field.name for field in TABLE_SCHEMA}
FIELDS = ["id", "name", "key", "dot.ted", "we ird", "x{y}", "tags", "who", "lines", "deep"]
ODD = [b"", b"no json", b"\xff\xfe", b"[1,2]", b'{"id":1,"id":2}', b'{"id":NaN}', b'{"name":"a\nb"}', b"{}"]


class Writer:
    """Writes documents whose fields change their types."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.habits: dict[str, int] = {}

    def document(self) -> Any:
        rng = self.rng
        if rng.random() < 0.02:
            return rng.choice(ODD)
        if rng.random() < 0.02:
            self.habits[rng.choice(FIELDS)] = rng.randrange(9)
        fields = [*rng.sample(FIELDS, rng.randrange(len(FIELDS))), *self.new_field()]
        return {name: self.value(name) for name in fields}

    def new_field(self) -> list[str]:
        return [f"later{self.rng.randrange(40)}"] if self.rng.random() < 0.01 else []

    def value(self, name: str, depth: int = 0) -> Any:
        rng = self.rng
        habit = self.habits.setdefault(name, rng.randrange(9))
        kind = rng.randrange(9) if rng.random() < 0.01 else habit
        if depth > 2:
            kind %= 6
        match kind:
            case 0:
                return rng.randrange(-100, 1 << 40)
            case 1:
                return rng.choice([1 << 70, -(1 << 63), (1 << 63) - 1, 5])
            case 2:
                return rng.random() * 10 ** rng.randrange(-5, 20)
            case 3:
                return rng.choice(["", "x", "2026-11-16", "Zoë\n", "12"])
            case 4:
                return rng.random() < 0.5
            case 5:
                return None
            case 6:
                return [self.value(f"{name}[]", depth + 1) for _ in range(rng.randrange(4))]
            case _:
                names = rng.sample(["a", "b", "c d", "e.f"], rng.randrange(4))
                return {part: self.value(f"{name}.{part}", depth + 1) for part in names}


def is_nothing(value: Any) -> bool:
    """Whether a value is null or has only nulls in it: such a field need not have a column."""
    if isinstance(value, dict | list):
        return all(map(is_nothing, value.values() if isinstance(value, dict) else value))
    return value is None


def same(value: Any, held: Any) -> bool:
    """Whether a column shows what a document has, with nothing rescued inside."""
    if is_nothing(value):
        return is_nothing(held)
    if isinstance(value, dict):
        if not isinstance(held, dict):
            return False
        names = {part: part.replace(" ", "_") for part in value}
        others = [held[name] for name in held if name not in names.values()]
        return all(map(is_nothing, others)) and all(
            same(item, held.get(names[part])) for part, item in value.items()
        )
    if isinstance(value, list):
        return isinstance(held, list) and len(held) == len(value) and all(map(same, value, held))
    if isinstance(held, Decimal) and isinstance(value, str):  # decimals may be written as text
        return value == str(held)
    if isinstance(value, bool) or isinstance(held, bool) or isinstance(value, str):
        return type(value) is type(held) and value == held
    return not isinstance(held, str) and held is not None and float(held) == float(value)


def wrong_parts(value: Any, held: Any, path: str, rescued: dict[str, Any]) -> list[str]:
    """Paths of a document at which the table is neither right nor says why."""
    if path in rescued:
        kept = rescued.pop(path)
        return [] if held is None and kept["value"] == value and kept["reason"] else [path]
    if isinstance(value, dict) and value and isinstance(held, dict):
        wrong = []
        for part, item in value.items():
            inner = f"{path}.`{part}`" if "." in part else f"{path}.{part}"
            wrong += wrong_parts(item, held.get(part.replace(" ", "_")), inner, rescued)
        return wrong
    return [] if same(value, held) else [path]


def wrong_rows(bucket: dict[bytes, bytes], rows: dict[bytes, dict[str, Any]]) -> list[str]:
    wrong = [str(key) for key in bucket.keys() ^ rows.keys()]
    for key in bucket.keys() & rows.keys():
        raw, row = bucket[key], dict(rows[key])
        rescued = json.loads(row.pop("_rescued") or "{}")
        try:
            document = json.loads(raw)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            if set(rescued) != {""} or any(value is not None for value in row.values()):
                wrong.append(f"{key!r}: {raw!r} {row} {rescued}")
            continue
        for name, value in document.items():
            held = row.pop(COLUMN.get(str(name), str(name)), None)
            if isinstance(value, float) and math.isnan(value):
                wrong += [] if held is None and rescued.pop(str(name), None) else [f"{key!r} {name}"]
                continue
            path = f"`{name}`" if "." in name else name
            wrong += [f"{key!r} {where}: {value} {held}" for where in wrong_parts(value, held, path, rescued)]
        wrong += [f"{key!r}: {name} has {value}" for name, value in row.items() if not is_nothing(value)]
        wrong += [f"{key!r}: rescued {path}" for path in rescued]
    return wrong


def by_key(rows: list[dict[str, Any]]) -> dict[bytes, dict[str, Any]]:
    assert len({row["key"] for row in rows}) == len(rows)
    return {
        row["key"].encode(): {name: value for name, value in row.items() if name not in OWN} for row in rows
    }


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "keep_value", "rounds"), [(1, True, 10), (2, False, 4)])
def test_every_row_is_right_or_rescued(seed: int, keep_value: bool, rounds: int, tmp_path: Path) -> None:
    writer = Writer(seed)
    rng = writer.rng
    path = tmp_path / "chaos"
    policy = CompactionPolicy(tier_files=3, least_rows=200)
    rollbacks = changes = 0
    with tailrace.testing.node(vbuckets=VBUCKETS) as node:
        for number in range(rounds):
            node.set_many({f"k{rng.randrange(2000)}": writer.document() for _ in range(CHANGES)})
            for key in {f"k{rng.randrange(2000)}" for _ in range(20)}:
                if node.get(key) is not None:
                    node.delete(key)
            changes += CHANGES
            if number % 3 == 2:
                vbucket = rng.randrange(VBUCKETS)
                node.rewind(vbucket, max(1, node.high_seqno(vbucket) - rng.randrange(1, 400)))
                rollbacks += 1
            asked: dict[str, Any] = {}
            if number == 0:
                asked = {"schema": "infer", "value_column": keep_value, "on_schema": lambda _: None}
            mirror = build_mirror(
                LocalJobs(), node.url, path, once=True, in_background=False, policy=policy, **asked
            )
            mirror.prepare()
            mirror.run()
            if number in (3, rounds - 1):
                bucket = {key: doc.value for (_, key), doc in bucket_state(node.host, node.port).items()}
                delta = DeltaTable(str(path))
                read = QueryBuilder().register("t", delta).execute("select * from t").read_all()
                rows = by_key(pa.table(read).to_pylist())
                assert wrong_rows(bucket, rows) == []
                assert wrong_rows(bucket, by_key(polars.read_delta(str(path)).to_dicts())) == []
                verdict = verify_table(LocalJobs(), source_options(node.url), open_table(path))
                assert verdict.differences == ()
        close_idle_sources()
    assert changes == rounds * CHANGES
    assert rollbacks
    assert any(row["_rescued"] for row in rows.values())
    assert sum(1 for row in rows.values() if not row["_rescued"]) > len(rows) // 20
