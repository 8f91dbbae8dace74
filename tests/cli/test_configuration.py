"""One file for all commands: what it may contain, what takes precedence, and how it is printed back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.cli.main import main
from tailrace.testing.running import RunningNode


@dataclass
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_once(*arguments: str | Path) -> Done:
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run_once


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tailrace.toml"


def test_a_command_takes_arguments_and_options_from_the_file(run: Run, file: Path) -> None:
    with RunningNode() as node:
        file.write_text(f'url = "couchbase://127.0.0.1:{node.port}"\n[load]\ndocs = 7\n')
        assert run("--config", file, "load").code == 0
        assert json.loads(run("--config", file, "stats", "--json").out)["curr_items"] in (7, "7")


def test_the_file_may_be_named_behind_the_command(run: Run, file: Path) -> None:
    with RunningNode() as node:
        file.write_text(
            f'url = "couchbase://127.0.0.1:{node.port}"\n[load]\ndocs = 7\n[cluster.start]\nnodes = 3\n'
        )
        assert run("load", "--config", file, "--size", "10").code == 0
        assert json.loads(run("stats", "--json", "--config", file).out)["curr_items"] in (7, "7")
    for line in (("config", "--config", file), ("--config", file, "config")):
        printed = tomllib.loads(run(*line).out)
        assert (printed["load"]["docs"], printed["cluster"]["start"]["nodes"]) == ("7", "3")
    wrong = run("get", "--config", file.with_name("none.toml"), "k")
    assert (wrong.code, len(wrong.err.splitlines())) == (2, 1)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('[load]\ndocs = 7\nsize = 10\nseed = 1\nurl = "couchbase://127.0.0.1:1"\n')
    monkeypatch.setenv("TAILRACE_LOAD_SIZE", "20")
    monkeypatch.setenv("TAILRACE_CONFIG", str(file))
    rows = [json.loads(line) for line in run("config", "load", "--json").out.splitlines()]
    assert {row["option"]: (row["value"], row["from"]) for row in rows} == {
        "url": ("couchbase://127.0.0.1:1", "file"),
        "docs": ("7", "file"),
        "size": ("20", "$TAILRACE_LOAD_SIZE"),
        "seed": ("1", "file"),
    }


def test_what_is_printed_back_is_a_file_without_passwords(run: Run, file: Path) -> None:
    file.write_text(
        'url = "couchbase://ada:hunter2@h"\n[serve]\nuser = ["ada:hunter2"]\nmemory = true\n'
        '[mirror]\nstorage-option = ["aws_secret_access_key=hunter2"]\n[cluster.start]\nnodes = 3\n'
    )
    printed = run("--config", file, "config").out
    assert "hunter2" not in printed
    content = tomllib.loads(printed)
    assert content["serve"] == {"user": ["ada:***"], "memory": True}
    assert content["mirror"]["storage-option"] == ["aws_secret_access_key=***"]
    assert content["mirror"]["url"] == "couchbase://ada:***@h"
    assert content["cluster"]["start"]["nodes"] == "3"
    everything = tomllib.loads(run("--config", file, "config", "serve", "--all").out)["serve"]
    assert everything["host"] == "127.0.0.1" and everything["user"] == ["ada:***"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[mirror]\nconf = ['spark.hadoop.fs.s3a.secret.key=hunter2']", "spark.hadoop.fs.s3a.secret.key=***"),
        ("[verify]\nconf = ['spark.hadoop.fs.azure.account.key.x=hunter2']", "account.key.x=***"),
        ("[mirror]\nconf = ['spark.driver.extraJavaOptions=-DtrustStorePassword=hunter2']", "Options=***"),
        ("[mirror]\nconf = ['spark.driver.memory=2g']", "spark.driver.memory=2g"),
        ("[mirror]\nstorage-option = ['hunter2']", "***"),
        ("[serve]\nuser = ['hunter2']", "***"),
        ("[tail]\ngroup-store = 'redis://:hunt@hunter2@h/0'", "redis://:***@h/0"),
        ("[serve]\nfault-token = 'hunter2'", "***"),
    ],
)
def test_no_secret_of_an_option_is_printed_back(run: Run, file: Path, written: str, shown: str) -> None:
    file.write_text(written)
    for form in ([], ["--json"]):
        done = run("--config", file, "config", *form)
        assert "hunter2" not in done.out + done.err
        assert shown in done.out


def test_a_second_name_of_an_option_is_not_printed(run: Run, file: Path) -> None:
    """Otherwise `once = "now"` would be printed beside `to = "now"`, which no command accepts."""
    file.write_text('[tail]\nurl = "couchbase://h"\nto = "now"\n')
    assert tomllib.loads(run("--config", file, "config", "tail").out) == {
        "tail": {"url": "couchbase://h", "to": "now"}
    }


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[tail]\nonce = true\n", "[tail] in {file} has 'once', which is not an option"),
        ("[serv]\n", "[serv] in {file} is not a command; you may mean 'serve'"),
        ("[serve]\nprot = 1\n", "[serve] in {file} has 'prot', which is not an option; you may mean 'port'"),
        (
            "[serve]\nport = {a = 1}\n",
            "port of [serve] in {file} must be a string, a number, true, false, or a list of those",
        ),
        ("serve = 1\n", "serve in {file} is a command, write [serve] and its options below it"),
        (
            "[cluster.start]\nnode = 1\n",
            "start of [cluster] in {file} has 'node', which is not an option; you may mean 'nodes'",
        ),
        ("[serve]\nport = 'x'\n", "port of [serve]: 'x' is not a whole number"),
        ("prot = 1\n", "{file} has 'prot', which is not an option of any command; you may mean 'port'"),
        ("[serve\n", "the configuration {file} is not TOML"),
    ],
)
def test_what_is_wrong_is_said(run: Run, file: Path, text: str, what: str) -> None:
    file.write_text(text)
    done = run("--config", file, "config")
    assert done.code == 2
    assert what.format(file=repr(str(file))) in done.err


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    done = run("--config", tmp_path / "none.toml", "serve")
    assert done.code == 2 and "none.toml" in done.err


def test_every_option_is_in_the_environment_by_its_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only by the internal name of its parameter, which nobody could know: secrets go there."""
    monkeypatch.setenv("TAILRACE_SERVE_USER", "ada:hunter2")
    monkeypatch.setenv("TAILRACE_SERVE_HTTP_PORT", "9210")
    monkeypatch.setenv("TAILRACE_MIRROR_STORAGE_OPTION", "a=hunter2 b=hunter2")
    monkeypatch.setenv("TAILRACE_CLUSTER_START_SET", "idle_timeout=10m")
    monkeypatch.setenv("TAILRACE_VERIFY_STORAGE_OPTIONS", "c=hunter2")  # the parameter's name
    printed = run("config").out
    assert tomllib.loads(printed) == {
        "serve": {"user": ["ada:***"], "http-port": "9210"},
        "mirror": {"storage-option": ["a=***", "b=***"]},
        "verify": {"storage-option": ["c=***"]},
        "cluster": {"start": {"set": ["idle_timeout=10m"]}},
    }
    for variable in ("SERVE_USER", "MIRROR_STORAGE_OPTION", "VERIFY_STORAGE_OPTIONS"):
        assert f"# $TAILRACE_{variable}\n" in printed
    monkeypatch.setenv("TAILRACE_SERVE_USER", "hunter2")
    done = run("serve", "--memory", "--port", "0")
    assert done.code == 2 and "a user is written NAME:PASSWORD" in done.err
