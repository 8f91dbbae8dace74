"""Every declared option is read somewhere: one that does nothing is a lie."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

from syntax_trees import parse
from tailrace.cli.main import COMMANDS, cli
from tailrace.client.options import SourceOptions
from tailrace.errors import UsageError
from tailrace.protocol.dcp.controls import ConnectionOptions
from tailrace.server.settings import Settings
from tailrace.spark.source.options import OPTIONS, parse_options
from tailrace.store.base import StoreSettings

SOURCE = Path(__file__).resolve().parents[1] / "src" / "tailrace"
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


def commands(group: click.Group, ctx: click.Context, path: str = "") -> list[tuple[str, click.Command]]:
    made = []
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        made.append((f"{path}{name}", command))
        if isinstance(command, click.Group):
            made += commands(command, ctx, f"{path}{name} ")
    return made


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
            shared = ("cli/client.py", "cli/spark_options.py", "cli/http_options.py")
            text = inspect.getsource(module) + "".join(MODULES[part] for part in shared)
            parameters = inspect.signature(function).parameters
            for parameter in command.params:
                name = parameter.name
                if name is None or not parameter.expose_value:
                    continue
                if name in parameters:
                    is_read = name in used
                else:
                    is_read = f'"{name}"' in text or f"'{name}'" in text
                if not is_read:
                    unread.append(f"{path}: {name}")
    assert unread == []
    assert COMMANDS


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
