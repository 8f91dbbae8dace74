"""Odd names of tables, and damaged tables: commands that need no Spark report them in one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cli.test_table_commands import people
from tailrace.cli.main import main

assert people  # a fixture

NAMES = ["with space", "größe", "a#b", "a?b"]
COMMANDS = {
    "query": ["query", "TABLE", "select count(*) n, sum(seqno) s from t", "--json"],
    "export": ["export", "TABLE", "OUT"],
    "parquet": ["export", "TABLE", "OUT", "--format", "parquet"],
    "wait": ["wait", "TABLE", "--token", "3:11:5", "--timeout", "1s"],
    "maintain": ["maintain", "TABLE"],
}


def run(command: str, table: object, out: object = "out") -> int:
    return main([str({"TABLE": table, "OUT": out}.get(word, word)) for word in COMMANDS[command]])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_table_however_it_is_written(
    people: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = people.parent / name
    folder.mkdir()
    table = people.rename(folder / "table")
    link = folder / "link"
    link.symlink_to("table")
    monkeypatch.chdir(folder)
    for number, given in enumerate([table, f"{table}/", "table", "./table", table.as_uri(), link]):
        for command in COMMANDS:
            out = folder / f"{command} {number}"
            ways = [out, f"{out}/", out.name, out.as_uri()]
            assert run(command, given, ways[number % 4]) == 0, (command, given, capsys.readouterr().err)
            assert out.is_dir() == (command in ("export", "parquet"))
    assert not (folder / "file:").exists()


@pytest.mark.parametrize("command", ["query", "export", "parquet"])
def test_a_name_that_the_engine_would_decode(
    people: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = people.rename(people.with_name("a%41b"))
    if command == "parquet":
        assert run(command, table, people.with_name("%41")) == 0
        return
    assert run(command, table, people.with_name("%41")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'%41'" in said
    assert not people.with_name("%41").exists()


def garbled_commit(table: Path) -> str:
    path = table / "_delta_log" / "00000000000000000001.json"
    path.write_text(path.read_text()[:200] + "\0garbage\n")
    return path.name


def missing_commit(table: Path) -> str:
    path = table / "_delta_log" / "00000000000000000001.json"
    path.unlink()
    return path.name


def missing_file(table: Path) -> str:
    path = max(table.glob("**/*.parquet"), key=lambda file: file.stat().st_size)
    path.unlink()
    return path.name


def garbled_file(table: Path) -> str:
    path = max(table.glob("**/*.parquet"), key=lambda file: file.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes(len(data) - 40) + data[-20:])
    return path.name


def missing_vector(table: Path) -> str:
    path = next(table.glob("**/deletion_vector_*.bin"))
    path.unlink()
    return path.name


def garbled_vector(table: Path) -> str:
    path = next(table.glob("**/deletion_vector_*.bin"))
    path.write_bytes(bytes(path.stat().st_size))
    return path.name


def missing_checkpoint(table: Path) -> str:
    """Our own reader gets by with the commits; the engine does not."""
    DeltaTable(str(table)).create_checkpoint()
    for path in table.glob("_delta_log/*.checkpoint*.parquet"):
        path.unlink()
    return "_last_checkpoint"


DAMAGES = [
    *(garbled_commit, missing_commit, missing_file, garbled_file),
    *(missing_vector, garbled_vector, missing_checkpoint),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named(
    people: Path,
    damage: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that names the file and does not call it a bug, from every command that reads the damage."""
    monkeypatch.chdir(people.parent)
    log_only = ("wait", "maintain")
    for command in COMMANDS:
        table = people.with_name(f"copy for {command}")
        shutil.copytree(people, table)
        name = damage(table)
        code = run(command, table, people.with_name(f"out of {command}"))
        said = capsys.readouterr().err
        if code == 0 and command in log_only and damage not in (garbled_commit, missing_commit):
            continue  # it did not need to read it
        if code == 0 and damage is missing_checkpoint and command != "query":
            continue
        assert code == 1, (command, code, said)
        last = said.strip().splitlines()[-1]
        assert last.startswith("tailrace: error: "), (command, said)
        assert name in last, (command, said)
        assert "bug" not in last, (command, said)
        assert "Traceback" not in said
