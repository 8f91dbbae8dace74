"""Nothing grows too large for one sitting: objects by their attributes, modules by their text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "tailrace"

MOST_ATTRIBUTES = 22
MOST_BYTES = 24 << 10

LARGE_CLASSES = {
    "server/settings.py Settings": "a field for each setting of a node",
    "client/options.py SourceOptions": "a field for each keyword of connect()",
    "spark/rounds/mirror.py Mirror": "being divided",
}


def attributes(made: ast.ClassDef) -> set[str]:
    """What a class's own methods set on ``self``, and the fields of a dataclass."""
    names = {
        node.attr
        for node in ast.walk(made)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    if any("dataclass" in ast.unparse(decorator) for decorator in made.decorator_list):
        for item in made.body:
            if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
                names.add(ast.unparse(item.target))
    return names


def large_classes(module: str, code: str) -> Iterator[str]:
    """The classes of a module that have too many attributes."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef) and len(attributes(node)) > MOST_ATTRIBUTES:
            yield f"{module} {node.name}"


def test_no_object_holds_too_much() -> None:
    large = [
        name
        for path in SOURCE.rglob("*.py")
        for name in large_classes(str(path.relative_to(SOURCE)), path.read_text())
    ]
    assert [name for name in large if name not in LARGE_CLASSES] == []


def test_no_module_is_too_long() -> None:
    large = [
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.stat().st_size > MOST_BYTES
    ]
    assert large == []


def test_too_many_attributes_are_noticed() -> None:
    lines = "\n".join(f"        self.a{number} = {number}" for number in range(MOST_ATTRIBUTES + 1))
    code = f"class Large:\n    def __init__(self):\n{lines}\n"
    assert list(large_classes("x.py", code)) == ["x.py Large"]
    assert list(large_classes("x.py", code.replace("        self.a0 = 0\n", ""))) == []
