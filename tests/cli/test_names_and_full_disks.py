"""Whatever a file is called, commands find it; and a full disk is a one-line error."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tailrace.testing
from tailrace.cli.main import main
from unmeasured import unmeasured

NAMES = ["with space", "größe", "a#b", "a?b", "a%41b"]


def run(*arguments: object, cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=options.get("stdout") is None,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def node() -> Any:
    with tailrace.testing.node(vbuckets=4) as running:
        for number in range(20):
            running.set(f"k{number}", {"n": number, "text": "x" * 1000})
        yield running


def ways(folder: Path, name: str, file: str) -> list[tuple[object, Path]]:
    """The same file in the ways people may write it, and the current folder."""
    target = folder / name / file
    (folder / name).mkdir()
    link = folder / f"link to {name}"
    link.symlink_to(folder / name)
    return [
        (target, folder),
        (f"{name}/{file}", folder),
        (f"./{file}", folder / name),
        (target.as_uri(), folder),
        (link / file, folder),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_file_however_it_is_written(
    tmp_path: Path, node: Any, name: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    target = tmp_path / name / f"{name}.json"
    for given, cwd in ways(tmp_path, name, f"{name}.json"):
        monkeypatch.chdir(cwd)
        tail = ["tail", node.url, "--to", "now", "--state", str(given), "--json"]
        assert main(tail) == 0
        assert b'"mutation"' in capfdbinary.readouterr().out
        assert json.loads(target.read_text())["tailrace_state"] == 1
        assert sorted(path.name for path in target.parent.iterdir()) == [target.name]
        assert main(tail) == 0
        assert b'"mutation"' not in capfdbinary.readouterr().out  # it resumed from there
        target.unlink()
        assert main(["dump", node.url, "--out", str(given)]) == 0
        assert len(target.read_text().splitlines()) == 20
        assert main(["load", node.url, "--from", str(given)]) == 0
        target.unlink()
        assert main(["record", node.url, str(given), "--to", "now"]) == 0
        target.unlink()


def test_a_link_to_a_state_file_stays_one(tmp_path: Path, node: Any) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "state"
    link.symlink_to("real/state.json")
    assert run("tail", node.url, "--to", "now", "--state", link).returncode == 0
    assert link.is_symlink()
    assert (tmp_path / "real" / "state.json").is_file()


@pytest.mark.parametrize(
    "given", ["", "a/", "nowhere/x", "s3://bucket/x", "file://host/x", "file:///a#b", "http://x/y", "."]
)
def test_a_name_that_can_not_be_is_refused_before_anything_is_made(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even before anything is connected: there is no node at this address."""
    monkeypatch.chdir(tmp_path)
    url = "couchbase://127.0.0.1:1"
    for arguments in (
        ["tail", url, "--state", given],
        ["dump", url, "--out", given],
        ["record", url, given],
        ["replicate", url, url, "--state", given],
        ["serve", "--memory", "--ready-file", given],
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert said.startswith("tailrace: error: ")
        assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["s3://bucket/x", "file://host/x", "", "file"])
def test_a_directory_that_can_not_be(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    for arguments in (
        ["serve", "--data", given],
        ["cluster", "status", "--dir", given],
        ["search", given, "x"],
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert said.startswith("tailrace: error: ")
        assert said.count("\n") == 1


def small_files() -> None:
    """No file may grow beyond half a KiB, as on a disk that is nearly full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))


@pytest.mark.parametrize(
    "arguments",
    [
        ["dump", "URL", "--out", "out.jsonl"],
        ["dump", "URL", "--out", "out.parquet"],
        ["record", "URL", "out.rec", "--to", "now"],
        ["serve", "--data", "data", "--port", "0"],
        ["index", "URL", "words", "--to", "now"],
    ],
)
def test_a_disk_that_is_full(tmp_path: Path, node: Any, arguments: list[str]) -> None:
    if arguments[0] == "index":
        pytest.importorskip("tantivy")
    given = [node.url if word == "URL" else word for word in arguments]
    done = run(*given, cwd=tmp_path, preexec_fn=small_files, env=unmeasured())
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("tailrace: error: ")
    assert done.stderr.count("\n") == 1
    assert "too large" in done.stderr.lower()
    assert "bug" not in done.stderr
    assert not (tmp_path / arguments[-1]).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["dump", "URL"], ["stats", "URL"], ["tail", "URL", "--to", "now"]],
)
def test_nobody_takes_the_output(node: Any, arguments: list[str]) -> None:
    given = [node.url if word == "URL" else word for word in arguments]
    with Path("/dev/full").open("wb") as full:
        done = run(*given, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.startswith("tailrace: error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_temporary_folder_that_can_not_be_used(tmp_path: Path) -> None:
    """If nothing can be written at all, one line names the cause."""
    done = run("demo", "--dir", "/proc/nowhere", env={**os.environ, "TMPDIR": "/proc"})
    assert done.returncode in (1, 2)
    assert done.stderr.count("tailrace: error: ") == 1
    assert "Traceback" not in done.stderr
