"""`verify` as a person runs it, with tasks that run here instead of on Spark."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.local_jobs import LocalJobs
from spark.naive import bucket_state, table_state
from table.test_foreign_tools import foreign_commit, state_of
from tailrace.cli.main import main
from tailrace.errors import ConnectError, ForeignRows
from tailrace.spark.api import verify
from tailrace.spark.rounds.setup import build_mirror
from tailrace.spark.rounds.verify import Verdict, _StateTaker
from tailrace.testing.running import RunningNode


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def open_spark(*_arguments: Any, **_settings: Any) -> Any:
        yield None

    monkeypatch.setattr("tailrace.cli.verify.open_spark", open_spark)
    monkeypatch.setattr("tailrace.spark.api._jobs", lambda _spark, _given: LocalJobs())


def test_a_script_hears_the_verdict(
    no_spark: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tailrace.testing.node(vbuckets=2, buckets=["other"]) as node:
        node.set("a", {"n": 1})
        mirror = build_mirror(LocalJobs(), node.url, tmp_path, once=True, in_background=False)
        mirror.prepare()
        mirror.run()
        assert main(["verify", node.url, str(tmp_path), "--json"]) == 0
        (verdict,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert verdict["equal"] is True
        assert (verdict["documents"], verdict["rows"], verdict["differences"]) == (1, 1, 0)
        node.set("b", {"n": 2})
        assert main(["verify", node.url, str(tmp_path), "--json"]) == 1
        difference, verdict = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert difference["key"] == "b"
        assert verdict["equal"] is False and verdict["differences"] == 1
        wrong = node.url.replace("/default", "/other")
        assert main(["verify", wrong, str(tmp_path)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said == [
            "tailrace: error: the table mirrors bucket 'default', not 'other'; compare it with that"
        ]


def test_rows_that_somebody_rewrote_as_they_were(
    no_spark: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by an UPDATE that changes nothing: the mirror asks for a repair, and there is nothing to do."""
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("a", {"n": 1})
        once(node.url, tmp_path / "t")
        rewritten = []
        for add in state_of(tmp_path / "t").files.values():
            copy = f"theirs-{add.path}"
            shutil.copy(tmp_path / "t" / add.path, tmp_path / "t" / copy)
            new = {name: fact for name, fact in add.to_json().items() if name != "tags"} | {"path": copy}
            rewritten += [{"remove": add.removed(1, data_change=True).to_json()}, {"add": new}]
        foreign_commit(tmp_path / "t", "UPDATE", rewritten)
        node.set("b", {"n": 2})
        with pytest.raises(ForeignRows, match="verify --repair"):
            once(node.url, tmp_path / "t")
        assert main(["verify", node.url, str(tmp_path / "t"), "--as-of-table"]) == 0
        with pytest.raises(ForeignRows):  # only --repair changes anything
            once(node.url, tmp_path / "t")
        assert main(["verify", node.url, str(tmp_path / "t"), "--as-of-table", "--repair"]) == 0
        assert "its rows are right: its mirror can continue" in capsys.readouterr().err
        once(node.url, tmp_path / "t")
        assert table_state(str(tmp_path / "t")) == bucket_state("127.0.0.1", node.port)


def test_a_vbucket_that_goes_back_meanwhile_is_read_again(
    no_spark: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its branch has now counts, and nothing of what was taken back."""
    add = _StateTaker.add
    rewound: list[int] = []

    def rewinds(taker: _StateTaker, batch: Any) -> None:
        add(taker, batch)
        if not rewound:
            rewound.append(batch["vbucket"][0].as_py())
            node.rewind(rewound, 5)

    monkeypatch.setattr("tailrace.spark.rounds.verify._FOLD_ROWS", 3)
    monkeypatch.setattr("tailrace.spark.rounds.verify._GROUP_CHANGES", 50)
    with node_with_mirror(tmp_path / "t") as node:
        monkeypatch.setattr(_StateTaker, "add", rewinds)
        verdict = compared(node.url, tmp_path / "t")
        assert (verdict.documents, verdict.rows) == (5 + 7 * 40, 8 * 40)
        different = {(difference.vbucket, difference.key) for difference in verdict.differences}
        assert different == {(*rewound, f"k{number}") for number in range(5, 40)}


def test_a_vbucket_that_can_not_be_read_is_not_compared(
    no_spark: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes back whenever it is read, or its node is gone."""
    add, left = _StateTaker.add, [30, 25, 20, 15, 10]
    attempts: list[_StateTaker] = []

    def rewinds(taker: _StateTaker, batch: Any) -> None:
        add(taker, batch)
        if batch["vbucket"][0].as_py() == 0 and taker not in attempts:
            attempts.append(taker)
            node.rewind(0, left.pop(0))

    def breaks(taker: _StateTaker, batch: Any) -> None:
        node.kill()

    with node_with_mirror(tmp_path / "t") as node:
        monkeypatch.setattr(_StateTaker, "add", rewinds)
        with pytest.raises(ConnectError, match="takes changes of vbucket 0 back time and again"):
            compared(node.url, tmp_path / "t")
        assert not left
        monkeypatch.setattr(_StateTaker, "add", breaks)
        with pytest.raises(ConnectError, match="can't connect"):
            compared(node.url, tmp_path / "t", retryFor="0.1s")


def test_a_change_log_is_no_mirror(
    no_spark: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tailrace.testing.node(vbuckets=2) as node:
        node.set("a", {"n": 1})
        once(node.url, tmp_path / "t", changes=tmp_path / "changes")
        assert main(["verify", node.url, str(tmp_path / "changes"), "--repair"]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"tailrace: error: {tmp_path}/changes is a change log, which holds more than the bucket; "
            "verify the table that it was written with"
        ]


@contextlib.contextmanager
def node_with_mirror(path: Path) -> Iterator[RunningNode]:
    """A node with 40 documents in each of 8 vbuckets, and a table of them."""
    with tailrace.testing.node(vbuckets=8) as node:
        for vbucket in range(8):
            node.set_many({f"k{number}": "x" * 400 for number in range(40)}, vbucket=vbucket)
        once(node.url, path)
        yield node


def compared(url: str, table: Path, **options: str) -> Verdict:
    """The verdict, with so small a window that a stream has not come whole when its first batch is read."""
    spark: Any = None
    return verify(spark, url, table, options={"flowControlBuffer": "1024", **options})


def once(url: str, path: Path, **settings: Any) -> None:
    mirror = build_mirror(LocalJobs(), url, path, once=True, in_background=False, **settings)
    mirror.prepare()
    mirror.run()
