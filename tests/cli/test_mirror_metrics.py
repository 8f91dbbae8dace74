"""What a mirror writes for Prometheus: after every round, and never a partial file."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tailrace.cli.mirror import _View
from tailrace.clock import ManualClock
from tailrace.spark.rounds.progress import RoundProgress, Standing, TableCounts, TableFigures
from tailrace.web.http import exposition_text
from tailrace.web.mirror_figures import MirrorFigures


def round_of(
    *done: tuple[int, int],
    batch: int = 0,
    rolled_back: tuple[int, ...] = (),
    version: int = 2,
    lag_changes: int = 0,
) -> RoundProgress:
    """A round with the changes and bytes of each table."""
    tables = tuple(
        TableFigures("ignored", 1, 0, 1, 0.0, version, TableCounts(changes=changes, bytes_written=written))
        for changes, written in done
    )
    changes, written = (sum(column) for column in zip(*done, strict=True))
    return RoundProgress(
        batch, changes, rolled_back, (version,), bytes_written=written, lag_changes=lag_changes, tables=tables
    )


def test_the_figures_of_a_mirror_are_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mirror.prom"
    figures = MirrorFigures("default", "out/people")
    view = _View(figures, mock.MagicMock(), path, as_json=False)
    view.write_metrics()
    run = 'bucket="default",table="out/people"'
    of_table = 'bucket="default",collection="_default._default",table="out/people"'
    text = path.read_text()
    assert f"tailrace_mirror_changes_total{{{of_table}}} 0.0\n" in text
    assert "tailrace_mirror_lag_changes{" not in text, "nobody has asked the bucket yet"
    figures.standing = lambda: Standing(0.0, (3,))
    view.show(round_of((40, 900), lag_changes=7))
    view.show(round_of((2, 100), batch=1, rolled_back=(3, 4), version=3))
    text = path.read_text()
    for name, value in {
        "changes_total": 42,
        "rollbacks_total": 2,
        "written_bytes_total": 1000,
        "lag_changes": 3,
        "version": 3,
    }.items():
        assert f"tailrace_mirror_{name}{{{of_table}}} {float(value)}\n" in text
    assert f"tailrace_mirror_batch{{{run}}} 1.0\n" in text
    assert [file.name for file in tmp_path.iterdir()] == ["mirror.prom"]


def test_each_table_has_its_own_figures() -> None:
    figures = MirrorFigures("default", "out", {"shop.orders": "out/shop.orders", "shop.users": "elsewhere"})
    figures.note_versions([7, 9])
    figures.add(round_of((5, 500), (1, 100), version=10, rolled_back=(2,)))
    figures.standing = lambda: Standing(0.0, (0, 12))
    text = exposition_text(figures.metrics()).decode()
    orders = 'bucket="default",collection="shop.orders",table="out/shop.orders"'
    users = 'bucket="default",collection="shop.users",table="elsewhere"'
    for labels, changes, written, behind in ((orders, 5, 500, 0), (users, 1, 100, 12)):
        assert f"tailrace_mirror_changes_total{{{labels}}} {float(changes)}\n" in text
        assert f"tailrace_mirror_written_bytes_total{{{labels}}} {float(written)}\n" in text
        assert f"tailrace_mirror_lag_changes{{{labels}}} {float(behind)}\n" in text
        assert f"tailrace_mirror_version{{{labels}}} 10.0\n" in text
        assert f"tailrace_mirror_files{{{labels}}} 1.0\n" in text
    assert figures.total.changes == 6


def test_the_age_of_a_table_grows_only_while_nothing_newer_is_known() -> None:
    """It must not stay what the last round said, for hours if the next one takes that long or none comes."""
    clock = ManualClock(1_000)
    figures = MirrorFigures("default", "people", clock=clock)
    clock.advance(40)
    assert figures.stats()["mirror"]["lag_s"] == 40, "since it was started: a first load shows nothing yet"
    assert figures.stats()["mirror"]["lag_changes"] is None
    standing = Standing(clock.monotonic(), (0,))
    figures.standing = lambda: standing
    assert figures.stats()["mirror"]["lag_s"] == 0
    clock.advance(600)
    assert figures.stats()["mirror"]["lag_s"] == 600, "a long round, or a bucket that is away"
    figures.add(RoundProgress(0, 5, (), (1,), lag_s=600.0))
    standing = Standing(clock.monotonic(), (0,))
    assert figures.stats()["mirror"]["lag_s"] == 0, "it has nothing to do since"
