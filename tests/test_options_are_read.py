"""Every declared option is read somewhere: one that does nothing is a lie."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from syntax_trees import parse
from tailrace.cli.main import COMMANDS, cli
from tailrace.cli.spark_options import source_options_of
from tailrace.client.options import SourceOptions
from tailrace.client.tls import TlsOptions
from tailrace.connstr import _OPTIONS as URL_OPTIONS
from tailrace.connstr import ConnectionString
from tailrace.connstr import parse as parse_url
from tailrace.errors import UsageError
from tailrace.protocol.dcp.controls import ConnectionOptions
from tailrace.protocol.tap.reader import TapSettings
from tailrace.server.settings import Settings
from tailrace.spark.rounds.setup import MirrorKeywords, build_mirror
from tailrace.spark.source.feed import check_bucket
from tailrace.spark.source.options import OPTIONS, parse_options
from tailrace.store.base import StoreSettings

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tailrace"
MODULES = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


@cache
def accesses() -> dict[str, set[str]]:
    """The attributes that each module reads. Not computed on import, which every worker does."""
    return {
        name: {node.attr for node in ast.walk(parse(text)) if isinstance(node, ast.Attribute)}
        for name, text in MODULES.items()
    }


def readers(attribute: str, *, without: str) -> list[str]:
    """The modules that read an attribute of this name, except the one that declares it."""
    return [name for name, attributes in accesses().items() if attribute in attributes and name != without]


def test_options_of_the_spark_source() -> None:
    here = "spark/source/options.py"
    unread = [
        option.name
        for option in OPTIONS
        if not readers(option.attribute, without=here) and f"options.{option.attribute}" not in MODULES[here]
    ]
    assert unread == []


def test_settings_of_a_node() -> None:
    for_store = {field.name for field in fields(StoreSettings)}
    unread = [
        field.name
        for field in fields(Settings)
        if not readers(
            field.name, without="store/base.py" if field.name in for_store else "server/settings.py"
        )
    ]
    assert unread == []


def test_options_of_a_source() -> None:
    text = MODULES["client/options.py"]
    unread = [
        field.name
        for field in fields(SourceOptions)
        if not readers(field.name, without="client/options.py")
        and not re.search(rf"(self|options)\.{field.name}\b(?!.* = )", text.split("def settings")[1])
    ]
    assert unread == []


def test_options_of_a_dcp_connection() -> None:
    """What a control key sets is read by the sender, or by a property beside its declaration."""
    here = "protocol/dcp/controls.py"
    derived = MODULES[here].split("# What follows from them.")[1].split("\ndef ")[0]
    unread = [
        field.name
        for field in fields(ConnectionOptions)
        if not readers(field.name, without=here) and f"self.{field.name}" not in derived
    ]
    assert unread == []


def test_settings_of_tap_and_tls() -> None:
    for kind, here, held in (
        (TapSettings, "protocol/tap/reader.py", "self._tap"),
        (TlsOptions, "client/tls.py", "self"),
    ):
        read = set(re.findall(rf"\b{re.escape(held)}\.(\w+)", MODULES[here]))
        assert {field.name for field in fields(kind) if not readers(field.name, without=here)} <= read


def test_settings_of_a_mirror() -> None:
    tree = parse(inspect.getsource(build_mirror))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert {*MirrorKeywords.__annotations__, "clock", "in_background"} - used == set()
    assert MirrorKeywords.__annotations__.keys() <= inspect.signature(build_mirror).parameters.keys()


def test_options_of_connection_strings() -> None:
    """Each is documented, kept in a field, and read by those that connect."""
    page = (ROOT / "docs" / "finding.md").read_text().split("## Options")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert documented == {name for names in URL_OPTIONS.values() for name in names}
    kept = {field.name for field in fields(ConnectionString)}
    assert URL_OPTIONS.keys() - kept == {"nameserver_port"}  # it is the port of `nameserver`
    reads = re.compile(r"\b_?(?:where|url|target|source)\.(\w+)")
    read = {
        name for module, text in MODULES.items() if module != "connstr.py" for name in reads.findall(text)
    }
    assert kept - read == set()


def test_environment_variables() -> None:
    """Those that the package reads are documented, and those that are documented are read."""
    with click.Context(cli) as ctx:
        of_commands = {
            "_".join(["TAILRACE", *path.split(), option]).replace("-", "_").upper()
            for path, command in commands(cli, ctx)
            for parameter in command.params
            for option in [name.lstrip("-") for name in parameter.opts]
        }
    variable = re.compile(r"\bTAILRACE_[A-Z_]*[A-Z]\b")
    read = {
        node.value
        for text in MODULES.values()
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and variable.fullmatch(node.value)
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*")]
    named = {name for page in pages if page.is_file() for name in variable.findall(page.read_text())}
    assert read - named == set()
    assert named - read - of_commands == set()


def commands(group: click.Group, ctx: click.Context, path: str = "") -> list[tuple[str, click.Command]]:
    made = []
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        made.append((f"{path}{name}", command))
        if isinstance(command, click.Group):
            made += commands(command, ctx, f"{path}{name} ")
    return made


def words(text: str) -> set[str]:
    """The strings of a module, outside of declarations of options."""
    tree = parse(text)
    declared = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.option", "click.argument")
        for inner in ast.walk(node)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in declared
    }


def test_options_of_the_commands() -> None:
    """An option is an argument of its function that is used there, or is passed on with ``**``."""
    unread = []
    with click.Context(cli) as ctx:
        for path, command in commands(cli, ctx):
            function = getattr(command.callback, "__wrapped__", command.callback)
            if function is None:
                continue
            tree = parse(inspect.cleandoc("\n" + inspect.getsource(function)))
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            module = inspect.getmodule(function)
            assert module is not None
            shared = ("cli/client_options.py", "cli/spark_options.py", "cli/http_options.py")
            looked_up = words(inspect.getsource(module)).union(*(words(MODULES[part]) for part in shared))
            parameters = inspect.signature(function).parameters
            for parameter in command.params:
                name = parameter.name
                if name is None or not parameter.expose_value:
                    continue
                if name in parameters:
                    is_read = name in used
                else:
                    is_read = name in looked_up
                if not is_read:
                    unread.append(f"{path}: {name}")
    assert unread == []
    assert COMMANDS


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key", "tls_no_verify"])
def test_commands_hand_each_option_of_tls_to_spark(name: str) -> None:
    unset: dict[str, Any] = {"tls_ca": None, "tls_cert": None, "tls_key": None, "tls_no_verify": False}
    given = unset | {name: True if name == "tls_no_verify" else "/a/file"}
    url = parse_url("couchbases://h")
    assert source_options_of(url, given, {}) != source_options_of(url, unset, {})


def test_a_key_without_a_certificate_is_no_login(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()
    options = parse_options({"connectionString": "couchbases://127.0.0.1:1", "tlsClientKey": str(key)})
    with pytest.raises(UsageError, match="a key file without a certificate"):
        check_bucket(options)


def test_a_login_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_USERNAME", "eve")
    monkeypatch.setenv("TAILRACE_PASSWORD", "secret")

    def login(**given: str) -> tuple[str | None, str | None]:
        options = parse_options({"connectionString": "couchbase://h", **given})
        return options.username, options.password

    assert login() == ("eve", "secret")
    assert login(username="ada") == ("ada", "secret")
    assert login(username="ada", password="x") == ("ada", "x")
    assert login(connectionString="couchbase://bob:y@h") == (None, None)  # as the connection string says
    assert login(connectionString="couchbase://bob@h") == (None, "secret")
    monkeypatch.delenv("TAILRACE_USERNAME")
    assert login() == (None, None)


def test_times_of_the_source() -> None:
    options = parse_options({"connectionString": "couchbase://h", "connectTimeout": "3s", "retryFor": "2m"})
    assert (options.connect_timeout_s, options.retry_for_s) == (3.0, 120.0)
    with pytest.raises(UsageError, match="connectTimeout"):
        parse_options({"connectionString": "couchbase://h", "connectTimeout": "soon"})
