"""The modules behind our public names are those that ruff asks docstrings of (see pyproject.toml)."""

from __future__ import annotations

import re
import tomllib
from importlib.util import resolve_name
from pathlib import Path

import tailrace
from tailrace import spark

ROOT = Path(__file__).resolve().parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PUBLIC = {"__init__", "errors", "testing/__init__", "testing/running", "spark/__init__", "client/kv"}
"""Those that people import directly; the others are the homes of names of `tailrace` and `.spark`."""
INSIDE = {"protocol/tap/reader"}
"""Homes of which only a dataclass of settings is public."""


def documented() -> set[str]:
    """The modules of the one pattern that excuses all the others from docstring rules."""
    (pattern,) = (key for key in CONFIG["tool"]["ruff"]["lint"]["per-file-ignores"] if key.startswith("!"))
    listed = re.fullmatch(r"!src/tailrace/\{(.+)\}\.py", pattern)
    assert listed is not None
    return set(listed[1].split(","))


def test_every_module_of_the_pattern_is_there() -> None:
    assert [name for name in documented() if not (ROOT / "src" / "tailrace" / f"{name}.py").exists()] == []


def test_every_home_of_a_public_name_is_in_the_pattern() -> None:
    homes = {home.lstrip(".").replace(".", "/") for home in tailrace._HOMES.values()}
    homes |= {resolve_name(home, "tailrace.spark")[9:].replace(".", "/") for home in spark._HOMES.values()}
    assert (homes | PUBLIC) - INSIDE - documented() == set()
