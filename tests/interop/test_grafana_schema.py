"""The dashboard against Grafana's own types: `@grafana/schema` from npm, checked by TypeScript's compiler.

Members that the types do not know are errors, too. Grafana itself can't be had from a registry.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "tailrace.json"
WANTED = "@grafana/schema@13", "typescript@5"
OPTIONS = ["--strict", "--noEmit", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"]
# JSON has plain values where the types have enumerations, which TypeScript does not accept.
PLAIN = """
import type { Dashboard, Panel, RowPanel } from "@grafana/schema";
type Plain<T> = T extends string ? `${T}` : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the compiler and the types are."""
    folder = tmp_path_factory.mktemp("schema")
    quietly = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--loglevel=error"]
    install = ["npm", "install", *quietly, *WANTED]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["npm failed"])[-1]
        pytest.skip(f"Grafana's schema can't be installed: {reason}")
    return folder


def complaints(schema: Path, **typed: tuple[str, object]) -> str:
    """The compiler's errors about values that are declared with these types."""
    told = ((name, kind, json.dumps(value)) for name, (kind, value) in typed.items())
    lines = [f"export const {name}: Plain<{kind}> = {text};" for name, kind, text in told]
    (schema / "board.ts").write_text(PLAIN + "\n".join(lines))
    command = ["node", "node_modules/typescript/bin/tsc", *OPTIONS, "board.ts"]
    return subprocess.run(command, cwd=schema, capture_output=True, text=True, check=False).stdout


def test_it_has_what_the_types_ask_for_and_nothing_else(schema: Path) -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = board.pop("panels")
    for mark in board["annotations"]["list"]:
        del mark["titleFormat"]  # Prometheus' own: the schema is that of all data sources
        assert set(mark["target"]) == {"refId", "expr"}
        del mark["target"]["expr"]
    typed: dict[str, tuple[str, object]] = {"board": ("Dashboard", board)}
    for panel in panels:
        typed[f"panel{panel['id']}"] = ("RowPanel" if panel["type"] == "row" else "Panel", panel)
    assert len(typed) > 30
    assert complaints(schema, **typed) == ""


def test_a_mistake_is_seen(schema: Path) -> None:
    board = json.loads(DASHBOARD.read_text())
    assert "schemaVersion" in complaints(schema, board=("Dashboard", {"title": "Tailrace"}))
    panel = board["panels"][1] | {"gridPos": {"x": "left", "y": 1, "w": 6, "h": 5}}
    assert "is not assignable" in complaints(schema, panel=("Panel", panel))
    assert "known properties" in complaints(schema, panel=("Panel", board["panels"][1] | {"colour": 1}))
