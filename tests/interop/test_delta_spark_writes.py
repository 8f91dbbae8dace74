"""delta-spark writes to a mirrored table: the mirror goes on correctly, or says in one line what to do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from interop.delta_jars import SPARK, NoJars, delta_jars
from interop.spark_environment import program_environment, python_with_spark
from spark.local_jobs import LocalJobs
from spark.naive import bucket_state, table_state
from tailrace.errors import ForeignRows, UnknownFeature
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.opening import open_table

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1800), pytest.mark.xdist_group(f"spark-{SPARK}")]

DOCS = 400


class Console:
    """A session of delta-spark in a process of its own."""

    def __init__(self) -> None:
        try:
            jars = delta_jars()
        except NoJars as error:
            pytest.skip(str(error))
        program = Path(__file__).parent / "delta_spark_console.py"
        self._process = subprocess.Popen(
            [python_with_spark(SPARK), str(program), str(jars)],
            env=program_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def sql(self, statement: str) -> list[list[Any]]:
        """The rows of a statement."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(statement + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer: "):
                answer = json.loads(line.removeprefix("answer: "))
                assert "error" not in answer, (statement, answer)
                rows: list[list[Any]] = answer["rows"]
                return rows
        raise AssertionError(f"delta-spark ended at {statement!r}")

    def close(self) -> None:
        with self._process as process:  # closes its pipes, and waits for it
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture(scope="module")
def console() -> Iterator[Console]:
    console = Console()
    yield console
    console.close()


class World:
    """A node, its mirror, and delta-spark."""

    def __init__(self, node: Any, path: Path, console: Console) -> None:
        self.node, self.path, self.console = node, path, console

    def sql(self, statement: str) -> list[list[Any]]:
        return self.console.sql(statement.format(t=f"delta.`{self.path}`"))

    def mirror(self, start_over: Iterable[int] = ()) -> None:
        made = build_mirror(
            LocalJobs(), self.node.url, self.path, once=True, in_background=False, start_over=start_over
        )
        made.prepare()
        made.run()

    def write(self, numbers: Iterable[int], word: str) -> None:
        for number in numbers:
            self.node.set(f"key::{number}", {word: number})

    def check(self) -> None:
        """Our reader, an independent one and delta-spark all see what the bucket has."""
        bucket = bucket_state("127.0.0.1", self.node.port)
        assert self.verdict().equal
        assert table_state(str(self.path)) == bucket
        seen = {(row[0], row[1]): row[2] for row in self.sql("SELECT vbucket, key, value FROM {t}")}
        assert seen == {(vbucket, key.decode()): doc.value.decode() for (vbucket, key), doc in bucket.items()}

    def verdict(self) -> Any:
        return verify_table(LocalJobs(), source_options(self.node.url), open_table(self.path))

    def repair(self) -> None:
        """As `tailrace verify --repair` does it."""
        verdict = self.verdict()
        if verdict.differences:
            self.mirror({difference.vbucket for difference in verdict.differences})
        else:
            assert open_table(self.path).accept_rows(verdict.table_version)


@pytest.fixture
def world(console: Console, tmp_path: Path) -> Iterator[World]:
    with tailrace.testing.node(vbuckets=8) as node:
        world = World(node, tmp_path / "table", console)
        world.write(range(DOCS), "first")
        world.mirror()
        world.write(range(0, DOCS, 7), "second")
        world.mirror()
        yield world
        close_idle_sources()


@pytest.mark.parametrize(
    "statement",
    [
        "VACUUM {t} RETAIN 0 HOURS",
        "OPTIMIZE {t}",
        "REORG TABLE {t} APPLY (PURGE)",
        "ALTER TABLE {t} ADD COLUMN note STRING",
    ],
)
def test_what_leaves_the_rows_alone(world: World, statement: str) -> None:
    marks = {vbucket: world.node.high_seqno(vbucket) for vbucket in range(8)}
    world.write(range(0, DOCS, 5), "third")
    world.mirror()
    world.sql(statement)
    world.check()
    world.write(range(0, DOCS, 3), "fourth")
    world.mirror()
    world.check()
    for vbucket, seqno in marks.items():  # where it goes back to may be gone, and then it starts over
        world.node.rewind(vbucket, seqno)
    world.mirror()
    world.check()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM {t} WHERE vbucket = 3",
        "DELETE FROM {t} WHERE seqno % 5 = 0",
        "UPDATE {t} SET value = 'theirs' WHERE vbucket IN (1, 5)",
        "UPDATE {t} SET flags = flags",
        "INSERT INTO {t} SELECT * FROM {t} WHERE vbucket = 2",
        "MERGE INTO {t} t USING (SELECT 'key::1' AS k) s ON t.key = s.k WHEN MATCHED THEN DELETE",
        "RESTORE TABLE {t} TO VERSION AS OF 2",
    ],
)
def test_what_changes_rows(world: World, statement: str) -> None:
    world.sql(statement)
    world.write(range(0, DOCS, 3), "third")
    with pytest.raises(ForeignRows, match="verify --repair"):
        world.mirror()
    world.repair()
    world.mirror()
    world.check()
    world.write(range(0, DOCS, 11), "fourth")
    world.mirror()
    world.check()


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')", "enableChangeDataFeed"),
        ("ALTER TABLE {t} CLUSTER BY (key)", "clustering"),
    ],
)
def test_settings_that_a_mirror_can_not_keep(world: World, statement: str, says: str) -> None:
    world.sql(statement)
    world.write(range(3), "third")
    with pytest.raises(UnknownFeature, match=says):
        world.mirror()
