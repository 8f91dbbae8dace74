"""What people install: the sdist and the wheel that is built from it, in an environment with nothing else.

The environment has the dependencies that the package declares and none that merely happen to be here: they
are links into our own, so nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from time import sleep

import pytest

import tailrace

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

pytestmark = pytest.mark.xdist_group("package")  # it is built once


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    if importlib.util.find_spec("uplot") is None:
        pytest.skip("this environment is older than pyproject.toml: pip install -e '.[spark,dev]'")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def required(name: str) -> set[str]:
    """The distributions that a package needs on this machine, without any of its extras."""
    needed: set[str] = set()
    for requirement in distribution(name).requires or []:
        spec, _, marker = requirement.partition(";")
        if not re.search("extra|platform|version", marker):
            dependency = re.split(r"[^\w.-]", spec.strip())[0]
            needed |= {dependency, *required(dependency)}
    return needed


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment in which the wheel is installed."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[^\w.-]", spec)[0] for spec in declared}
    for name in names.union(*map(required, names)):
        installed = distribution(name)
        for part in {path.parts[0] for path in installed.files or []} - {"..", "__pycache__"}:
            (packages / part).symlink_to(str(installed.locate_file(part)))
    (wheel,) = built.glob("*.whl")
    python = str(home / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(command, check=True)
    return home / "bin"


def run(*command: object) -> str:
    """What a program prints, far away from the repository."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_installed_and_nothing_of_the_repository_is_used(bare: Path) -> None:
    assert run(bare / "tailrace", "--version").split()[-1] == tailrace.__version__
    home = run(bare / "python", "-c", "import tailrace; print(tailrace.__file__)")
    assert Path(home.strip()).is_relative_to(bare.parent)
    code = "import importlib.util as u; print([n for n in ('pyspark', 'pandas', 'pytest') if u.find_spec(n)])"
    assert run(bare / "python", "-c", code) == "[]\n"


def test_a_node_serves_and_a_client_reads(bare: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    serve = [bare / "tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "4", "--ready-file", ready]
    with subprocess.Popen(
        [str(word) for word in serve], stdout=subprocess.DEVNULL, cwd="/", env=ENVIRONMENT
    ) as node:
        try:
            while not ready.exists():
                assert node.poll() is None, "the node ended before it was ready"
                sleep(0.02)
            url = f"couchbase://127.0.0.1:{json.loads(ready.read_text())['port']}"
            run(bare / "tailrace", "set", url, "user::1", '{"name": "Ada"}')
            assert json.loads(run(bare / "tailrace", "get", url, "user::1")) == {"name": "Ada"}
            lines = run(bare / "tailrace", "tail", url, "--to", "now", "--json").splitlines()
            assert [line["key"] for line in map(json.loads, lines) if "key" in line] == ["user::1"]
        finally:
            node.terminate()
            assert node.wait(60) == 0


def test_every_command_can_be_asked_for_help(bare: Path) -> None:
    """Those that need an extra say so when they run, not when they are loaded."""
    code = """
from tailrace.cli.main import COMMANDS, main
for command in COMMANDS:
    assert main([command, "--help"]) == 0, command
"""
    run(bare / "python", "-c", code)


def test_what_is_in_them(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert ours <= names
    charts = ("vendor/uPlot.iife.js", "vendor/uPlot.min.css", "uPlot-license.txt")
    assert {f"tailrace/web/{name}" for name in charts} <= names, "the pages bring their chart library"
    assert "tailrace/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "tailrace",
        "pyspark_tailrace",
        f"tailrace-{tailrace.__version__}.dist-info",
    }
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as tree:
        inside = {name.split("/", 1)[-1] for name in tree.getnames()}
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"} <= inside
    assert {"tests/conftest.py", "docs/README.md", "bench/store.py"} <= inside
    assert not {name for name in inside if name.startswith((".venv", ".git/", ".mypy_cache"))}


def test_the_version_has_its_place_in_the_changelog() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert tailrace.__version__ in headings or headings[0] == "Unreleased"


def test_changes_are_told_in_groups() -> None:
    """People look for what concerns them: in each version, every line is below a heading."""
    text = (ROOT / "CHANGELOG.md").read_text()
    for version in re.split(r"^## ", text, flags=re.M)[1:]:
        ungrouped = re.split(r"^### ", version, flags=re.M)[0]
        assert not re.findall(r"^- .*", ungrouped, re.M), version.partition("\n")[0]
