"""What must be true of a change log, whatever happened: read by delta-rs, compared with the bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from chaos.script import NotEqual
from spark.naive import Doc, _bytes


def check_change_log(path: str, bucket: Mapping[tuple[int, bytes], Doc], *, purged: bool) -> int:
    """Check that every change is there once, and those that are still true lead to what the bucket has.

    A deletion that was ``purged`` before it was read is in no log: then documents may be left that the bucket
    no longer has. Returns the number of rows.
    """
    query = QueryBuilder().register("changes", DeltaTable(path)).execute("select * from changes")
    rows: list[dict[str, Any]] = pa.table(query.read_all()).to_pylist()
    changes = [row for row in rows if row["op"] in ("mutation", "deletion", "expiration")]
    stands = Counter((row["vbucket"], row["vb_uuid"], row["seqno"]) for row in changes)
    twice = [name for name, count in stands.items() if count > 1]
    if twice:
        raise NotEqual(f"a change is in the log twice: vbucket, vb_uuid and seqno {twice[0]}")
    back: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        if row["op"] == "rollback":
            back.setdefault(row["vbucket"], []).append((row["log_version"], row["seqno"]))
    live = [
        row
        for row in changes
        if not any(
            row["log_version"] < version and row["seqno"] > seqno
            for version, seqno in back.get(row["vbucket"], ())
        )
    ]
    state: dict[tuple[int, bytes], tuple[int, bytes]] = {}
    for row in sorted(live, key=lambda row: (row["vbucket"], row["seqno"])):
        document = (row["vbucket"], _bytes(row, "key"))
        if row["op"] == "mutation":
            state[document] = (row["seqno"], _bytes(row, "value"))
        else:
            state.pop(document, None)
    expected = {document: (doc.seqno, doc.value) for document, doc in bucket.items()}
    if purged:
        state = {document: row for document, row in state.items() if document in expected}
    if state != expected:
        wrong = min(d for d in state.keys() | expected.keys() if state.get(d) != expected.get(d))
        raise NotEqual(
            f"the log leads to another state: {wrong} is {state.get(wrong)}, not {expected.get(wrong)}"
        )
    return len(rows)
