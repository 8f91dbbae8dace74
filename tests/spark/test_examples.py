"""The examples run as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_examples(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tailrace.testing.node(vbuckets=4) as node:
        for number in range(20):
            node.set(f"k{number}", {"name": f"n{number}", "age": number})
        monkeypatch.setenv("NODE", node.url)
        runpy.run_path(str(EXAMPLES / "notebook.py"), run_name="__main__")
        assert "|mutation|   20|" in capsys.readouterr().out
        job = runpy.run_path(str(EXAMPLES / "job.py"))
        assert job["main"](node.url, str(tmp_path / "table")) == 0
        assert "20 documents, 20 rows, 0 differences" in capsys.readouterr().out
