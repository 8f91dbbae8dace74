"""A clone is self-contained: neither the suite nor the repository's tools look at anything outside it."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from syntax_trees import parse

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = [
    path
    for folder in ("tests", "bench", "docs", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)  # it has examples of violations
]


def looks_outside(code: str, depth: int) -> Iterator[str]:
    """What in a module, ``depth`` folders below the root, names a place outside the repository."""
    for node in ast.walk(parse(code)):
        match node:
            case ast.Constant(value=str(text)) if text.startswith("../") or "/../" in text:
                yield f"line {node.lineno}: {text!r}"
            case ast.BinOp(right=ast.Constant(value="..")):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(attr="home" | "expanduser")):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(attr="join" | "joinpath"), args=steps) if any(
                isinstance(step, ast.Constant) and step.value == ".." for step in steps
            ):
                yield f"line {node.lineno}: {ast.unparse(node)}"
            case ast.Attribute() | ast.Subscript() if _climbs(node) > depth + 1:
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _climbs(node: ast.expr) -> int:
    """How many folders up from ``__file__`` an expression such as ``Path(__file__).parents[2]`` leads."""
    steps = 0
    while True:
        match node:
            case ast.Attribute(value=inner, attr="parent"):
                steps += 1
            case ast.Subscript(
                value=ast.Attribute(value=inner, attr="parents"), slice=ast.Constant(value=int(up))
            ):
                steps += up + 1
            case ast.Call(func=ast.Attribute(value=inner)):  # Path(__file__).resolve()
                pass
            case ast.Call(args=[ast.Name(id="__file__")]):
                return steps
            case _:
                return 0
        node = inner


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_looks_outside_of_the_repository(path: Path) -> None:
    depth = len(path.relative_to(ROOT).parts) - 1
    assert list(looks_outside(path.read_text(), depth)) == []


@pytest.mark.parametrize(
    "code",
    [
        'SEEDS = Path(__file__).resolve().parents[3] / "shared"',
        "SEEDS = Path(__file__).parent.parent.parent.parent",
        'SEEDS = ROOT / ".." / "shared"',
        'SEEDS = open("../shared/notes.md")',
        'SEEDS = os.path.join(HERE, "..", "..", "shared")',
        'SEEDS = Path(__file__).parent.joinpath("..", "shared")',
        "SEEDS = Path.home()",
    ],
)
def test_what_looks_outside_is_noticed(code: str) -> None:
    assert len(list(looks_outside(code, 2))) == 1
    assert list(looks_outside("ROOT = Path(__file__).resolve().parents[2] / 'docs'", 2)) == []


def test_nothing_that_others_wrote_is_committed() -> None:
    """The chart library comes from a build requirement; git ignores where the build puts it."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    command = ["git", "ls-files", "--", "src/tailrace/web/vendor", "*.min.js", "*.iife.js"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert tracked.stdout == ""
