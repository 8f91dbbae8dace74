"""The suite catches the bugs that mirrors have: each is planted, and a script must fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.bug import Bug
from chaos.local_engine import Chaos
from chaos.planted import BUGS
from chaos.script import NotEqual
from tailrace.errors import TailraceError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Writers that a kill left behind warn when they are collected."""

SCRIPTS = 100
ROUNDS = 4
RARE = ("a dead branch restored",)
"""These take several schedules, and which ones depends on the machine, so they are left to make chaos. For
`make test` there is a dedicated schedule in `test_dead_branch`."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=bug.name, marks=[pytest.mark.long] if bug.name in RARE else []) for bug in BUGS],
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
