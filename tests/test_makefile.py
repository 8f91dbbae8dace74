"""What `make demo` and `make test` set up: a newcomer waits for no more than the demo needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REQUIRES = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def steps(target: str) -> str:
    """What make would do for it in a fresh clone."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", "--always-make", target]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    return done.stdout


def installed(target: str) -> list[str]:
    """What of the package is installed, in turn."""
    return re.findall(r'pip install .*(--editable \.|"tailrace\[.*\]")$', steps(target), re.M)


def test_the_demo_installs_what_it_needs_and_the_tests_the_rest() -> None:
    demo = ["--editable .", '"tailrace[spark]"']
    assert installed("demo") == demo
    assert installed("test") == [*demo, '"tailrace[spark,dev]"']


def test_a_newcomer_is_told_first_what_is_installed() -> None:
    told, *rest = steps("demo").split("pip install")
    assert re.search(r"echo .*\d+ MB", told) and len(rest) > 1
    assert "--quiet" not in rest[-1], "the longest step shows its progress"


@pytest.mark.parametrize("requirement", REQUIRES)
def test_what_builds_the_package_is_there_before_it_is_built(requirement: str) -> None:
    """Without isolation pip does not look."""
    assert f'"{requirement}"' in steps("demo").partition("--no-build-isolation")[0]
