"""CONTRIBUTING.md is true: what it names is there, and a change stays in few files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CHANGES = PAGE.split("## Twelve changes")[1].split("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in CHANGES.splitlines() if line.startswith("| ")][1:]
MAX_FILES = 6


def paths(text: str) -> list[str]:
    """The names in backticks that look like paths in the repository or in the package."""
    named = re.findall(r"`([\w./-]+)`", text)
    return [name for name in named if "/" in name or re.search(r"\.(py|md|toml|jsonl?)$", name)]


@pytest.mark.parametrize("path", sorted(set(paths(PAGE))))
def test_what_it_names_is_there(path: str) -> None:
    if path.startswith((".venv/", "dist/")):
        return
    assert (ROOT / path).exists() or (ROOT / "src" / "tailrace" / path).exists()


def test_the_twelve_changes() -> None:
    assert len(ROWS) == 12
    for change, package, others in ROWS:
        files = set(paths(package) + paths(others))
        assert files, change
        assert len(files) <= MAX_FILES or "the protocol forces it" in others, f"{change}: {len(files)} files"


def test_what_make_can_do() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z]+)", PAGE)) <= targets
