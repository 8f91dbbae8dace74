"""The glossary is true: one word for one thing, and every place that it names exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from syntax_trees import parse

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tailrace"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def class_name_of(node: ast.AST) -> str | None:
    """The class or type alias that a statement defines, if it defines one."""
    match node:
        case ast.ClassDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
            return name
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Subscript() | ast.BinOp()):
            return name if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) else None
    return None


def defined_twice(modules: dict[str, str]) -> dict[str, list[str]]:
    """The names that more than one class or type alias has, with their modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, code in modules.items():
        for node in ast.walk(parse(code)):
            if (name := class_name_of(node)) is not None:
                places[name].append(module)
    return {name: sorted(where) for name, where in places.items() if len(where) > 1}


def test_a_class_name_is_defined_once() -> None:
    """Unless the glossary says why; and what it excuses exists."""
    excused = re.findall(r"^\| `(\w+)` \|", GLOSSARY.split("## Class names that are defined twice")[1], re.M)
    modules = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    twice = defined_twice(modules)
    assert {name: where for name, where in twice.items() if name not in excused} == {}
    assert [name for name in excused if name not in twice] == []


def test_a_second_definition_is_noticed() -> None:
    modules = {"a.py": "class Chunk: pass", "b.py": "def f():\n class Chunk: pass\nclass Other: pass"}
    assert defined_twice(modules) == {"Chunk": ["a.py", "b.py"]}


@pytest.mark.parametrize(
    "alias",
    ["Chunk: TypeAlias = 'bytes | None'", "Chunk = dict[str, int]", "Chunk = int | str", "Chunk = Other"],
)
def test_an_alias_is_a_second_definition(alias: str) -> None:
    assert defined_twice({"a.py": "class Chunk: pass", "b.py": alias}) == {"Chunk": ["a.py", "b.py"]}


def test_a_value_is_no_definition() -> None:
    assert (
        defined_twice({"a.py": "CHUNK = Other\nT = TypeVar('T')", "b.py": "CHUNK = Other\nT = TypeVar('T')"})
        == {}
    )


def words() -> list[tuple[str, str]]:
    """The lines of the tables: a word, and the places that it names."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in GLOSSARY.splitlines()]
    return [(row[0], row[3]) for row in rows if len(row) == 4 and row[0] not in ("word", "---")]


def test_the_places_of_words_exist() -> None:
    for word, where in words():
        for place in re.findall(r"`([\w/.]+)`", where):
            base = ROOT if place.startswith("tests") else SOURCE
            assert (base / place).exists(), f"{word}: {place}"


def test_words_are_in_alphabetical_order() -> None:
    """Within each table, so that a word is easy to find."""
    for table in re.findall(r"(?:^\|.*\n)+", GLOSSARY, re.M):
        column = [row.split("|")[1].strip().strip("`").lower() for row in table.splitlines()[2:]]
        assert column == sorted(column)


def test_a_word_has_one_line() -> None:
    known = [word for word, _ in words()]
    assert len(known) > 50
    assert sorted(known) == sorted(set(known))


EMPTY_NAMES = {"one", "found"}
"""They say that something is there, but not what it is."""


def empty_names(code: str) -> list[int]:
    """The lines that bind a variable or a parameter to a name that says nothing."""
    lines = []
    for node in ast.walk(parse(code)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchAs(name=name):
                if name in EMPTY_NAMES:
                    lines.append(node.lineno)
    return sorted(lines)


def test_variables_say_what_they_hold() -> None:
    folders = ("src", "tests", "bench", "docs", "examples")
    assert {
        str(path.relative_to(ROOT)): lines
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if (lines := empty_names(path.read_text()))
    } == {}


def test_a_variable_that_says_nothing_is_noticed() -> None:
    code = "for one in range(3):\n found = [one for key, one in {}]\nlambda one: 1\nfor number in one: pass"
    assert empty_names(code) == [1, 2, 2, 3]
