"""The line on a terminal that says how far a command is."""

from __future__ import annotations

import io
import sys

import pytest

from tailrace.cli.common import progress


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
