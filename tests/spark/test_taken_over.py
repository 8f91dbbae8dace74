"""A mirror that was paused in the middle of a round, while others went on with the table and cleaned up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroaring import BitMap

import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.errors import Fenced, TableChanged, TableDamaged
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.mirror import Mirror
from tailrace.spark.rounds.setup import build_mirror
from tailrace.table.compaction import CompactionPolicy, finish_step, next_step
from tailrace.table.contract import Commit, Table
from tailrace.table.delta.table import DeltaMirrorTable
from tailrace.table.opening import open_table


class Standing(LocalJobs):
    """Something happens when the tasks are done, as if the mirror's machine slept then."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None

    def run(self, work: Any, pieces: Any, description: str, on_done: Any = None) -> list[Any]:
        answers = super().run(work, pieces, description, on_done)
        self.meanwhile()
        return answers


@pytest.fixture
def node() -> Iterator[Any]:
    with tailrace.testing.node(vbuckets=2) as node:
        for number in range(40):
            node.set(f"k{number}", {"n": number}, vbucket=number % 2)
        yield node
    close_idle_sources()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def mirrored(node: Any, path: Path, jobs: LocalJobs | None = None) -> Mirror:
    made = build_mirror(
        jobs or LocalJobs(), node.url, path, once=True, in_background=False, maintenance=False
    )
    made.prepare()
    return made


def delete_files(table: Table) -> None:
    """As the cleaning does with files that no version names."""
    for file in table.files():
        Path(table.uri, file.path).unlink()


@pytest.mark.parametrize("is_another_mirror", [True, False])
def test_files_that_others_cleaned_away_are_not_called_damage(
    node: Any, path: Path, is_another_mirror: bool
) -> None:
    mirrored(node, path).run()
    jobs = Standing()
    late = mirrored(node, path, jobs)
    for vbucket in range(2):
        node.rewind(vbucket, 0)  # every row is looked for, to be taken back
    node.set("new", {}, vbucket=0)

    def others_go_on() -> None:
        table = open_table(path)
        gone = [file.path for file in table.files()]
        if is_another_mirror:
            table.claim()
        else:
            table._run = late.tables[0].current.run  # type: ignore[attr-defined]
        delete_files(table)
        table.commit(Commit("TAILRACE COMPACT", removed=gone, data_change=False))

    jobs.meanwhile = others_go_on
    with pytest.raises(Fenced if is_another_mirror else TableChanged):
        late.turn()


def test_files_that_somebody_deleted_are_damage(node: Any, path: Path) -> None:
    mirrored(node, path).run()
    jobs = Standing()
    late = mirrored(node, path, jobs)
    for vbucket in range(2):
        node.rewind(vbucket, 0)
    node.set("new", {}, vbucket=0)
    jobs.meanwhile = lambda: delete_files(open_table(path))
    with pytest.raises(TableDamaged, match="somebody deleted it"):
        late.turn()


def test_a_step_whose_file_is_gone_is_in_vain(node: Any, path: Path) -> None:
    for number in range(3):
        for more in range(4):
            node.set(f"more{number}-{more}", {}, vbucket=0)
        mirrored(node, path).run()
    table = open_table(path)
    table.claim()
    step = next_step(table, CompactionPolicy(tier_files=2, least_rows=1))
    assert step is not None
    written = step.run(table.store, table.schema, table.secret)
    source = step.sources[0]
    table.commit(Commit("TAILRACE ROUND", masked={source.file.path: BitMap([source.wanted().min()])}))
    assert finish_step(table, step, written) is not None
    for file in written:
        Path(path, file.path).unlink()
    assert finish_step(table, step, written) is None


def test_of_two_mirrors_that_start_at_once_one_has_all_tables(
    node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is paused between the claims of its two tables, right before the commit of the second claim."""
    commit = DeltaMirrorTable._try_commit

    def start() -> Mirror:
        return build_mirror(
            LocalJobs(),
            node.url,
            tmp_path / "table",
            changes=str(tmp_path / "changes"),
            once=True,
            in_background=False,
        )

    start().prepare()  # the tables are made
    sleeper, others = start(), list[Mirror]()
    second = max(sleeper.asked.all_tables, key=lambda table: table.uri)

    def sleepy(table: DeltaMirrorTable, *what: Any) -> bool:
        if table is second and not others:
            others.append(start())
            others[0].prepare()
        return commit(table, *what)

    monkeypatch.setattr(DeltaMirrorTable, "_try_commit", sleepy)
    with pytest.raises(Fenced, match="was taken over by another mirror"):
        sleeper.prepare()
    others[0].run()  # it still has both tables
    assert sum(file.live_rows for file in others[0].tables[0].files()) == 40
