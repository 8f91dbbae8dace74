"""`verify` as a person runs it, with tasks that run here instead of on Spark."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from spark.local_jobs import LocalJobs
from tailrace.cli.main import main
from tailrace.spark.rounds.setup import build_mirror


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
