"""The line on a terminal that shows a command's progress, and the messages without a terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from tailrace.cli.common import ProgressDisplay, note, progress
from tailrace.cli.mirror import _View
from tailrace.clock import ManualClock
from tailrace.model import Position
from tailrace.spark.rounds.planning import ReadRange
from tailrace.spark.rounds.progress import RoundProgress, RoundUnderway
from tailrace.web.http import exposition_text
from tailrace.web.mirror_figures import MirrorFigures


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, *, total: float | None, expected: float | None = None) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("mirroring", total) as bar:
        bar.advance(1500)
        if expected is not None:
            bar.expect(expected)
    assert isinstance(sys.stderr, Terminal)
    return sys.stderr.getvalue()


def test_how_much_is_left_is_shown_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1,500/3,000" in shown(monkeypatch, total=3000)
    text = shown(monkeypatch, total=None)
    assert "mirroring" in text and "0:00:00" in text
    assert not any(word in text for word in ("/?", "left", "\u2501"))
    assert "1,500/4,000" in shown(monkeypatch, total=None, expected=4000)


def test_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("mirroring", 5) as bar:
        bar.advance(1)
        bar.describe("more")
        bar.expect(7)
    assert capfd.readouterr() == ("", "")


def test_a_message_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    text = f"the bucket took [changes] back: {'word ' * 20}".strip()
    with progress("mirroring") as bar:
        bar.describe("round [0]")
        note(text)
    assert f"tailrace: {text}\n" in terminal.getvalue().replace("\r", ""), "whole, for whoever copies it"
    assert "round [0]" in terminal.getvalue()
    note("after it")
    assert terminal.getvalue().endswith("tailrace: after it\n")


def test_no_bar_where_results_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams on one terminal would overwrite each other."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    with progress("mirroring", beside_results=True) as bar:
        assert not bar.is_shown
    with progress("mirroring") as bar:
        assert bar.is_shown


class Watched:
    """A mirror whose rounds take as long as a test says."""

    def __init__(self, bar: ProgressDisplay) -> None:
        self.clock = ManualClock()
        self.figures = MirrorFigures("default", "people")
        self.view = _View(self.figures, bar, None, as_json=False, clock=self.clock)

    def wait(self, doing: str | RoundUnderway, seconds: float) -> None:
        """Look at it every second."""
        for second in range(1, int(seconds) + 1):
            self.clock.advance(1)
            status: dict[str, Any] = {"message": str(doing), "seconds": second}
            if isinstance(doing, RoundUnderway):
                status["round"] = doing.to_json()
            self.view.wait(status)

    def first_round(self) -> RoundUnderway:
        underway = RoundUnderway(0, 0, 500, self.clock)
        underway.read([{0: ReadRange(Position.BEGINNING, 600)}, {1: ReadRange(Position.BEGINNING, 400)}])
        return underway


def test_what_takes_long_is_told_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched(ProgressDisplay())
    underway = watched.first_round()
    watched.wait(underway, 5)
    underway.done(0)
    watched.wait(underway, 8)
    watched.view.show(RoundProgress(0, 1000, (), (1,)))
    for _ in range(100):  # rounds of the usual length
        watched.wait(underway, 2)
        watched.wait("waiting for changes", 30)
    watched.wait("compacting 16 files of tier 0", 12)
    assert capfd.readouterr() == (
        "",
        "tailrace: round 0: reading 1,000 changes of 2 vbuckets; 500 are left to later rounds\n"
        "tailrace: round 0: 600 of 1,000 changes, 1 of 2 vbuckets, 120/s; 500 are left to later rounds\n"
        "tailrace: compacting 16 files of tier 0\n",
    )


def test_a_long_round_moves_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    bar = ProgressDisplay(describe=said.append, expect=said.append, reach=said.append, is_shown=True)
    watched = Watched(bar)
    underway = watched.first_round()
    watched.wait(underway, 1)
    watched.clock.advance(1)
    underway.done(0)
    watched.wait(underway, 1)
    assert said == [
        "mirroring, round 0: reading 1,000 changes of 2 vbuckets; 500 are left to later rounds",
        1500,
        600,
        "mirroring, 300/s, 1 of 2 vbuckets",
    ]
    figures = watched.figures.stats()["mirror"]
    assert figures["round"]["changes"] == 600 and figures["message"] == str(underway)
    assert b'_round_read_changes{bucket="default",table="people"} 600.0' in exposition_text(
        watched.figures.metrics()
    )
    said.clear()
    watched.view.show(RoundProgress(0, 1000, (), (1,), lag_changes=5))
    assert said[:2] == [1000, 1005]
    said.clear()
    watched.wait(underway, 1)
    watched.wait("waiting for changes", 1)
    assert not said, "rounds of the usual length are shown when they are committed"
