"""Nothing grows too large to read in one sitting: a module has up to 24 KiB, an object up to about twenty
attributes of its own and of its bases.

A record is not such an object: a dataclass of which no method assigns anything may have as many fields as
there are settings. One whose methods assign has state, and its fields count as well.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from syntax_trees import parse

PACKAGE = Path(__file__).parents[1] / "src" / "tailrace"
MAX_ATTRIBUTES = 21
MAX_MODULE_BYTES = 24 << 10


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def own_attributes(node: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to ``self``, setters of properties aside."""
    assigned = {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    return assigned - {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}


def fields(node: ast.ClassDef) -> set[str]:
    """What a dataclass declares."""
    if not is_dataclass(node):
        return set()
    return {
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and "ClassVar" not in ast.unparse(line.annotation)
    }


def is_record(node: ast.ClassDef) -> bool:
    return is_dataclass(node) and not own_attributes(node)


@cache
def classes() -> dict[str, ast.ClassDef]:
    trees = (parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@cache
def attributes(name: str) -> frozenset[str]:
    node = classes().get(name)
    if node is None:
        return frozenset()
    bases = (ast.unparse(base).split("[")[0] for base in node.bases)
    own = own_attributes(node) | fields(node)
    return frozenset(own).union(*(attributes(base) for base in bases if base != name))


def test_no_object_is_large() -> None:
    counted = [len(attributes(name)) for name in ("EngineBucket", "TapReader", "Progress", "Settings")]
    assert min(counted) > 10, "nothing is counted"
    large = {
        name: sorted(attributes(name))
        for name, node in classes().items()
        if len(attributes(name)) > MAX_ATTRIBUTES and not is_record(node)
    }
    assert large == {}


def test_no_module_is_too_long() -> None:
    large = [path for path in PACKAGE.rglob("*.py") if path.stat().st_size > MAX_MODULE_BYTES]
    assert [str(path.relative_to(PACKAGE)) for path in large] == []
