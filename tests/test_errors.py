"""The tree of exceptions is complete, can be imported from where the docs say, and survives pickling."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
import re
from pathlib import Path

import pytest

import tailrace
from syntax_trees import parse
from tailrace import errors

SOURCE = Path(__file__).resolve().parents[1] / "src" / "tailrace"
NO_ERRORS = {"PowerCut"}
"""What a test raises through everything, like a power cut."""


def exception_classes() -> dict[str, str]:
    """Every class of the package that is an exception, with its module."""
    bases: dict[str, tuple[str, list[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                bases[node.name] = (str(path.relative_to(SOURCE)), names)

    def is_exception(name: str, depth: int = 0) -> bool:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return True
        return name in bases and depth < 10 and any(is_exception(base, depth + 1) for base in bases[name][1])

    return {name: where for name, (where, _) in bases.items() if is_exception(name)}


def test_the_tree_is_complete() -> None:
    text = errors.__doc__ or ""
    listed = set(re.findall(r"\w+", text))
    for name, where in exception_classes().items():
        if name.startswith("_") or name in NO_ERRORS:
            continue  # it never leaves its module
        assert name in listed, f"{name} of {where} is not in the tree"
        if where != "errors.py":
            assert f"``{where}``" in text, f"{name} is in {where}, which the tree does not say"
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.TailraceError)
        assert name in listed


def raises_the_base(code: str) -> bool:
    return any(
        isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise TailraceError(")
        for node in ast.walk(parse(code))
    )


def test_only_commands_raise_the_base() -> None:
    assert raises_the_base("if x:\n    raise TailraceError('no') from error")
    raising = [path for path in SOURCE.rglob("*.py") if raises_the_base(path.read_text())]
    assert {path.relative_to(SOURCE).parts[0] for path in raising} <= {"cli"}


def test_the_drawing_is_the_tree() -> None:
    """Each name is below its base."""
    stack: list[str] = []
    drawn = 0
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:│   |    )*)(?:[├└]── )?(\w+)(?:  .*)?$", line)
        if match is None or match[2] not in errors.__all__:
            continue
        depth = len(match[1]) // 4 + (0 if match[2] == "TailraceError" else 1)
        del stack[depth:]
        if stack:
            assert stack[-1] in {base.__name__ for base in getattr(errors, match[2]).__bases__}, match[2]
        stack.append(match[2])
        drawn += 1
    assert drawn == len(errors.__all__)


def test_where_they_are_imported_from() -> None:
    assert tailrace.errors is errors
    for name in ("TailraceError", "UsageError", "ConnectError", "LoginError", "StatusError"):
        assert getattr(tailrace, name) is getattr(errors, name)
        assert name in tailrace.__all__


@pytest.mark.parametrize("name", errors.__all__)
def test_they_survive_pickling(name: str) -> None:
    kind = getattr(errors, name)
    values = {"int": 5, "str": "x", "bytes": b"x", "bool": True, "list[str]": ["x", "y"]}
    given: list[object] = ["what happened"]
    if "__init__" in vars(kind):
        parameters = inspect.signature(kind).parameters.values()
        given = [values[str(parameter.annotation)] for parameter in parameters]
    made = kind(*given)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is kind
    assert again.args == made.args
    assert str(again) == str(made)
