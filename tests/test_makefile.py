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


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make, but not as a part of the make that may have started the tests."""
    own = ("MAKE", "MFLAGS", "GNUMAKEFLAGS")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=outside, capture_output=True, text=True, check=False
    )


def steps(target: str) -> str:
    """What make would do for it in a fresh clone."""
    done = make("--dry-run", "--always-make", target)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(target: str) -> list[str]:
    """What of the package is installed, in order."""
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


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the Makefile needs, with a Python whose `-m venv` pretends that everything is installed."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "quick_java.py").touch()
    program(tmp_path / "python", 'mkdir -p .venv/bin && cp installed .venv/bin/python && echo "$@" >> made')
    program(tmp_path / "installed", 'echo "$@" >> asked')
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_environment_that_was_only_begun_is_made_again(clone: Path) -> None:
    """Debian's `python3 -m venv` fails without python3-venv, and leaves an environment without pip. After
    installing python3-venv, make must not fail with "No module named pip".
    """
    program(clone / ".venv" / "bin" / "python", "exit 1")
    for told in (1, 0):
        done = make("PYTHON=./python", ".venv/.demo", folder=clone)
        assert done.returncode == 0, done.stderr
        assert (clone / "made").read_text() == "-m venv .venv\n", "once"
        assert done.stdout.count("MB to download") == told
        later = (clone / ".venv" / ".demo").stat().st_mtime_ns + 10**9
        os.utime(clone / "pyproject.toml", ns=(later, later))  # its requirements have changed a little


def test_an_installation_that_fails_is_not_taken_for_done(clone: Path) -> None:
    make("PYTHON=./python", ".venv/.demo", folder=clone)
    (clone / ".venv" / ".demo").unlink()
    program(clone / ".venv" / "bin" / "python", 'case $* in *"tailrace[spark]"*) exit 1;; esac')
    assert make("PYTHON=./python", ".venv/.demo", folder=clone).returncode == 2
    assert not (clone / ".venv" / ".demo").exists()


def test_tests_run_where_no_archive_of_classes_can_be_made(clone: Path) -> None:
    """Nor a folder for it: `build` is a file here, which stops even root."""
    make("PYTHON=./python", ".venv/.installed", folder=clone)
    program(clone / ".venv" / "bin" / "python", "exit 1")
    (clone / "build").touch()
    done = make("build/spark.jsa", folder=clone)
    assert done.returncode == 0, done.stderr
    assert "build/spark.jsa could not be made" in done.stderr
