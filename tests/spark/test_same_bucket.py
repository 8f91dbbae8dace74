"""A bucket that was deleted and created again under its name: nothing goes on with it unless told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
from spark.local_jobs import LocalJobs
from tailrace.cli.main import main
from tailrace.errors import BucketReplaced
from tailrace.spark.rounds.idle_sources import close_idle_sources
from tailrace.spark.rounds.setup import build_mirror, source_options
from tailrace.spark.rounds.verify import verify_table
from tailrace.table.delta.opening import SOURCE
from tailrace.table.opening import open_table
from tailrace.testing.running import RunningNode


@pytest.fixture
def nodes() -> Iterator[tuple[RunningNode, RunningNode]]:
    """Before and after: two buckets of one name."""
    with RunningNode(vbuckets=4) as old, RunningNode(vbuckets=4) as new:
        for number in range(20):
            old.set(f"old-{number}", {"n": number})
            new.set(f"new-{number}", {"n": number})
        yield old, new
    close_idle_sources()


def mirrored(node: RunningNode, table: Path, **settings: Any) -> None:
    mirror = build_mirror(LocalJobs(), node.url, table, once=True, in_background=False, **settings)
    mirror.prepare()
    mirror.run()


def keys(table: Path) -> set[str]:
    return set(tailrace.read_table(table, columns=["key"]).to_arrow()["key"].to_pylist())


def test_it_is_an_error_until_it_is_accepted(
    nodes: tuple[RunningNode, RunningNode], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old, new = nodes
    table, log = tmp_path / "table", tmp_path / "log"
    mirrored(old, table, changes=log)
    mirrored(old, table, changes=log)
    held = open_table(table)
    before = held.version
    with pytest.raises(BucketReplaced, match=r"deleted and created again.*new table.*--accept-new-bucket"):
        mirrored(new, table, changes=log)
    with pytest.raises(BucketReplaced):
        mirrored(new, tmp_path / "other", changes=log)
    with pytest.raises(BucketReplaced):
        verify_table(LocalJobs(), source_options(new.url), held)
    assert main(["plan", new.url, str(table)]) == 1
    said = capfd.readouterr()
    assert not said.out and said.err.startswith("tailrace: error: the table at ")
    assert len(said.err.splitlines()) == 1
    assert main(["doctor", new.url, str(table)]) == 1
    assert "--accept-new-bucket" in capfd.readouterr().out
    held.refresh()
    assert held.version == before, "nothing was written"

    mirrored(new, table, changes=log, accept_new_bucket=True)
    assert keys(table) == {f"new-{number}" for number in range(20)}
    assert verify_table(LocalJobs(), source_options(new.url), open_table(table)).equal
    mirrored(new, table, changes=log)
    with pytest.raises(BucketReplaced):
        mirrored(old, table)


def test_a_table_from_before_takes_it_over(nodes: tuple[RunningNode, RunningNode], tmp_path: Path) -> None:
    old, new = nodes
    table = tmp_path / "table"
    mirrored(old, table)
    source = {name: value for name, value in open_table(table).source.items() if name != "uuid"}
    (first,) = (tmp_path / "table" / "_delta_log").glob("*000.json")
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    for line in lines:
        if "metaData" in line:
            line["metaData"]["configuration"][SOURCE] = json.dumps(source)
    first.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "uuid" not in open_table(table).source
    mirrored(old, table)
    assert open_table(table).source["uuid"]
    with pytest.raises(BucketReplaced):
        mirrored(new, table)
