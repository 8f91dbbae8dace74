"""``tailrace config``: the options that commands would run with, from file, environment and defaults."""

from __future__ import annotations

import json
from typing import Any

import click

from ..errors import UsageError
from .common import command as make_command
from .common import json_option
from .config_file import effective, shown


@make_command(
    "config",
    example="""
tailrace --config tailrace.toml config
tailrace --config tailrace.toml config mirror --all
""",
)
@click.argument("names", nargs=-1, metavar="[COMMAND]...")
@click.option("--all", "everything", is_flag=True, help="Show defaults too.")
@json_option("Write one JSON object per line.")
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Print the options that commands would run with: from file, environment or default.

    The output is a configuration file; passwords are not shown. All tables of the given file are checked: a
    value that its command would refuse is an error.
    """
    root = ctx.find_root()
    program = root.command
    assert isinstance(program, click.Group)
    if unknown := [name for name in names if program.get_command(root, name) is None]:
        raise UsageError(f"there is no command {unknown[0]!r}")
    for name in names or program.list_commands(root):
        member = program.get_command(root, name)
        assert member is not None
        _print(root, member, (name,), everything=everything, as_json=as_json)


def _print(
    parent: click.Context, command: click.Command, path: tuple[str, ...], *, everything: bool, as_json: bool
) -> None:
    ctx = click.Context(command, parent=parent, info_name=path[-1])
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            member = command.get_command(ctx, name)
            assert member is not None
            _print(ctx, member, (*path, name), everything=everything, as_json=as_json)
        return
    rows = [row for row in effective(ctx, command) if everything or row[2] != "default"]
    if not rows:
        return
    title = ".".join(path)
    if as_json:
        for name, value, origin in rows:
            row = {"command": title, "option": name, "value": shown(name, value), "from": origin}
            click.echo(json.dumps(row))
        return
    click.echo(f"[{title}]")
    for name, value, origin in rows:
        if value is None:
            click.echo(f"# {name} is not set")
        else:
            click.echo(f"{name} = {_toml(shown(name, value))}  # {origin}")
    click.echo()


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(member) for member in value) + "]"
    return json.dumps(value, ensure_ascii=False)  # TOML writes true, numbers and strings as JSON does
