"""What a mirror says of itself for Prometheus, after every round and whole."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tailrace.cli.mirror import _View
from tailrace.spark.rounds.progress import RoundProgress
from tailrace.web.mirror_figures import MirrorFigures


def test_the_figures_of_a_mirror_are_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mirror.prom"
    figures = MirrorFigures("default", "out/people")
    view = _View(figures, mock.MagicMock(), path, as_json=False)
    view.write_metrics()
    assert 'tailrace_mirror_changes_total{bucket="default",table="out/people"} 0.0\n' in path.read_text()
    view.show(RoundProgress(0, 40, (), (2,), bytes_written=900, lag_changes=7, lag_s=0.5))
    view.show(RoundProgress(1, 2, (3, 4), (3,), bytes_written=100))
    text = path.read_text()
    labels = '{bucket="default",table="out/people"}'
    for name, value in {
        "changes_total": 42,
        "rollbacks_total": 2,
        "written_bytes_total": 1000,
        "lag_changes": 0,
        "batch": 1,
        "version": 3,
    }.items():
        assert f"tailrace_mirror_{name}{labels} {float(value)}\n" in text
    assert [file.name for file in tmp_path.iterdir()] == ["mirror.prom"]
