"""Read your writes: what a table knows of a mutation token, and how long the wait for it is."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tailrace
from table.test_table_model import changes_table
from tailrace.clock import ManualClock
from tailrace.errors import TokensNotHeld, UsageError
from tailrace.model import Position
from tailrace.table.contract import Commit
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.mutation_tokens import MutationToken, TokenState, token_state, wait_for
from tailrace.table.rollback import roll_back
from tailrace.table.rows import TABLE_SCHEMA
from tailrace.table.sink import TableWriter

OLD, NEW = 11, 1 << 63
"""Branches; the second one shows as negative in a column."""


class Written:
    """A table with one vbucket that is mirrored by hand."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "table"
        self.table = DeltaMirrorTable.open_or_create(self.path, schema=TABLE_SCHEMA, source={"bucket": "b"})
        self.table.claim()

    def round(self, vb_uuid: int, *seqnos: int, to: int | None = None) -> int:
        """Changes of different keys on a branch."""
        changes = changes_table((3, f"k{seqno}", seqno, "{}") for seqno in seqnos)
        signed = vb_uuid - (1 << 64) if vb_uuid >> 63 else vb_uuid
        place = changes.column_names.index("vb_uuid")
        changes = changes.set_column(place, changes.field(place), [[signed] * len(changes)])
        table = self.table
        sink = TableWriter(table.store, table.schema, table.secret, tuple(table.files())).sink()
        sink.add(changes)
        result = sink.finish()
        position = {3: Position.at(vb_uuid, to or max(seqnos))}
        return table.commit(Commit("TAILRACE ROUND", position, result.added))

    def back(self, version: int, vb_uuid: int, seqno: int) -> None:
        commit = roll_back(self.table, {3: version}).commit()
        self.table.commit(
            Commit(
                commit.operation,
                {3: Position.at(vb_uuid, seqno)},
                vectors=commit.vectors,
                readded=commit.readded,
                resets={3: seqno},
            )
        )

    def state(self, vb_uuid: int, seqno: int) -> TokenState:
        return token_state(self.table, MutationToken(3, vb_uuid, seqno))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_on_the_branch_where_the_table_stands(written: Written) -> None:
    written.round(OLD, 1, 2, 5)
    assert written.state(OLD, 5) is TokenState.HELD
    assert written.state(OLD, 4) is TokenState.HELD
    assert written.state(OLD, 6) is TokenState.AHEAD
    assert written.state(NEW, 3) is TokenState.AHEAD, "a branch that the table has not seen may come"


def test_a_failover_that_lost_nothing_of_it(written: Written) -> None:
    written.round(OLD, 1, 2, 5)
    written.round(NEW, 6, 9)
    assert written.state(OLD, 5) is TokenState.HELD
    assert written.state(NEW, 9) is TokenState.HELD
    assert written.state(NEW, 10) is TokenState.AHEAD


def test_a_failover_that_took_it_back(written: Written) -> None:
    before = written.round(OLD, 1, 2)
    written.round(OLD, 5, 7)
    written.back(before, OLD, 2)
    assert written.state(OLD, 5) is TokenState.AHEAD, "it can come again while the branch is the same"
    written.round(NEW, 4, 8)
    assert written.state(OLD, 2) is TokenState.HELD
    assert written.state(OLD, 5) is TokenState.LOST


def test_a_failover_between_two_rounds(written: Written) -> None:
    written.round(OLD, 1, 2)
    written.round(NEW, 6, 9)
    assert written.state(OLD, 7) is TokenState.LOST, "the new branch has a change before it"
    assert written.state(OLD, 4) is TokenState.AHEAD, "nobody can tell: neither branch has a row there"


def test_a_row_of_the_old_branch_shows_that_it_got_so_far(written: Written) -> None:
    written.round(OLD, 1, 2)
    written.round(OLD, 5, to=4)  # the position says less than the table has
    written.round(NEW, 12)
    assert written.state(OLD, 5) is TokenState.HELD


@pytest.mark.parametrize(
    "token",
    [
        "3:11:5",
        (3, 11, 5),
        [3, 11, 5],
        MutationToken(3, 11, 5),
        SimpleNamespace(partition_id=3, partition_uuid=11, sequence_number=5),
        SimpleNamespace(partition_id=lambda: 3, partition_uuid=lambda: 11, sequence_number=lambda: 5),
    ],
    ids=["text", "tuple", "list", "own", "sdk", "sdk of calls"],
)
def test_tokens_in_all_forms(written: Written, token: Any) -> None:
    version = written.round(OLD, 5)
    assert wait_for(written.path, [token], 0) == version
    assert wait_for(written.path, [token, "3:11:4", token], 0) == version
    assert wait_for(written.path, token, 0) == version, "one alone, as a write returns it"


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("3:11", "write VBUCKET:VB_UUID:SEQNO"),
        ("3:x:5", "must be a string of decimal digits"),
        ((3, -1, 5), "must be an integer from 0"),
        (object(), "a object is not a mutation token"),
    ],
)
def test_what_is_no_token(token: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        MutationToken.of(token)


def test_it_waits_until_a_mirror_has_come_so_far(written: Written) -> None:
    written.round(OLD, 1)
    clock = ManualClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)
        if len(slept) == 3:
            written.round(OLD, 2, 3)

    version = wait_for(written.path, ["3:11:3", "3:11:1"], 10.0, clock=clock, sleep=sleep)
    assert version == written.table.version
    assert len(slept) == 3


def test_it_says_in_time_that_it_can_not(written: Written) -> None:
    written.round(OLD, 1)
    clock = ManualClock()
    with pytest.raises(TokensNotHeld, match="does not hold 3:11:9 yet") as late:
        wait_for(written.path, ["3:11:9"], 1.0, clock=clock, sleep=clock.advance)
    written.round(NEW, 4)
    with pytest.raises(TokensNotHeld, match="will never hold 3:11:9: the bucket has taken that back") as lost:
        wait_for(written.path, ["3:11:9", "3:11:1"], 1000.0, clock=clock, sleep=clock.advance)
    for error in (late.value, lost.value):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_state_at_a_position_on_any_branch(tmp_path: Path) -> None:
    """A position on a newer branch than the table had then: earlier versions are on the way to it."""
    written = Written(tmp_path)
    written.round(OLD, 1, 2)
    kept = written.round(OLD, 3)
    written.round(OLD, 4, 5)
    written.back(kept, NEW, 3)
    written.round(NEW, 8, 9)

    def seqnos(at: Any) -> list[int]:
        return sorted(
            tailrace.read_table(written.path, at=at, columns=["seqno"]).to_arrow()["seqno"].to_pylist()
        )

    assert seqnos({3: Position.at(NEW, 9)}) == [1, 2, 3, 8, 9]
    assert seqnos({3: Position.at(NEW, 7)}) == seqnos({3: Position.at(OLD, 3)}) == [1, 2, 3]
    assert seqnos({3: Position.at(OLD, 2)}) == seqnos({3: 2}) == [1, 2]
    # 4 and 5 were taken back; a reader that has saved them sees what was there before
    assert seqnos({3: Position.at(OLD, 5)}) == [1, 2, 3]
    saved = {"3": {**Position(NEW, 8, 3, 9).to_json(), "failover_log": [], "points": [3]}}
    assert seqnos(json.dumps(saved)) == [1, 2, 3]
    with pytest.raises(UsageError, match="no version that is kept stands on branch 77"):
        seqnos({3: Position.at(77, 9)})
