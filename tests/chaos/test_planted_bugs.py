"""The suite catches the bugs that mirrors have: each is planted, and a script must fail.

`docs/proof.md` has the table of them, which is checked here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.local_engine import Chaos
from chaos.planted import BUGS, Bug
from chaos.script import NotEqual
from tailrace.errors import TailraceError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Writers that a kill left behind say so when they are collected."""

SCRIPTS = 100
ROUNDS = 4
PROOF = Path(__file__).parents[2] / "docs" / "proof.md"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.name, marks=[pytest.mark.long] if bug.rare else []) for bug in BUGS]
)
def test_a_planted_bug_is_caught(tmp_path: Path, bug: Bug) -> None:
    for seed in dict.fromkeys((bug.seed, *range(SCRIPTS))):
        directory = tmp_path / str(seed)
        directory.mkdir()
        chaos = Chaos(seed, directory)
        try:
            with bug.plant():
                chaos.run(ROUNDS)
        except (NotEqual, TailraceError):  # wrong, or a mirror that can't go on
            return
    pytest.fail(f"{SCRIPTS} scripts did not catch it: {bug.about}")


def test_the_page_lists_the_bugs() -> None:
    rows = "\n".join(f"| {bug.name} | {bug.about} |" for bug in BUGS)
    assert f"| bug | what is wrong with it |\n|---|---|\n{rows}\n" in PROOF.read_text()
