"""One file for the options of every command, in TOML: ``--config FILE``, before or after the command.

A table has the name of a command and holds its options, named as on the command line but without the dashes,
and its arguments in lower case. Entries above all tables are for every command that has such an option.
The command line wins, then the environment (``TAILRACE_SERVE_PORT``), then the file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import UsageError, reason_of

__all__ = ["ENVIRONMENT_PREFIX", "configure", "effective", "name_variables", "shown"]

ENVIRONMENT_PREFIX = "TAILRACE"
MAX_BYTES = 1 << 20
HIDDEN = "***"
_PASSWORD = re.compile(r"(://[^/@:]*:)[^/]*(@)")
_SECRET = re.compile(r"(?i)secret|passw|passphrase|token|credential|(access|account)[._-]?key|sas[._-]?key")
"""Names of Spark settings with secrets: those Spark itself hides (``spark.redaction.regex``), and more."""

Section = dict[str, Any]


def read(path: Path) -> Section:
    """The content of a file; its names are not checked yet."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the configuration {str(path)!r} can't be read: {reason_of(error)}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"the configuration {str(path)!r} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration {str(path)!r} is not TOML: {error}") from None


def configure(program: click.Context, name: str, path: Path) -> Section:
    """Let a command take options from a file; ``config``, which prints them, gets those of all commands.

    Returns the part of the file that is for the command. The names of all tables are checked.
    """
    assert isinstance(program.command, click.Group)
    content, names = read(path), program.command.list_commands(program)
    check_sections(content, names, path)
    program.default_map = {}
    known: set[str] = set()
    for wanted in names if name == "config" else (name,):
        command = program.command.get_command(program, wanted)
        assert command is not None
        assert command.name is not None
        program.default_map[command.name] = default_map(content, command, command.name, path)
        known |= _all_names(command)
    if name == "config":  # other commands don't wait until all are loaded
        _check_common(content, known, path)
    return dict(program.default_map.get(name, {}))


def default_map(content: Mapping[str, Any], command: click.Command, name: str, path: Path) -> Section:
    """The part of a file that is for a command, by click's names of its parameters."""
    common = {key: value for key, value in content.items() if not isinstance(value, dict)}
    section = content.get(name, {})
    if not isinstance(section, dict):
        raise UsageError(f"{name} in {str(path)!r} is a command, write [{name}] and its options below it")
    return _for(command, common, section, f"[{name}] in {str(path)!r}")


def _for(command: click.Command, common: Section, section: Section, where: str) -> Section:
    parameters = _names(command)
    values = {parameters[key].name: _plain(common[key], key, where) for key in parameters if key in common}
    members = dict(command.commands) if isinstance(command, click.Group) else {}
    for key, value in section.items():
        if key in members:
            if not isinstance(value, dict):
                raise UsageError(f"{key} of {where} is a command, and has a table of its own")
            continue
        if key not in parameters:
            raise UsageError(
                f"{where} has {key!r}, which is not an option{_hint(key, [*parameters, *members])}"
            )
        values[parameters[key].name] = _plain(value, key, where)
    for name, member in members.items():
        values[name] = _for(member, common, section.get(name, {}), f"{name} of {where}")
    return {name: value for name, value in values.items() if name is not None}


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """The parameters of a command by their names in a file."""
    return {_name(parameter): parameter for parameter in command.params if is_setting(parameter)}


def _all_names(command: click.Command) -> set[str]:
    """The names of a command and of the commands below it."""
    members = command.commands.values() if isinstance(command, click.Group) else ()
    return set(_names(command)).union(*map(_all_names, members))


def _check_common(content: Mapping[str, Any], known: set[str], path: Path) -> None:
    """Raise if an entry above all tables is an option of no command."""
    for key, value in content.items():
        if not isinstance(value, dict) and key not in known:
            hint = _hint(key, sorted(known)) if difflib.get_close_matches(key, known, 1) else ""
            raise UsageError(f"{str(path)!r} has {key!r}, which is not an option of any command{hint}")


def is_setting(parameter: click.Parameter) -> bool:
    """Whether a file may set it: what is passed to the command, and its logging options, but no hidden
    alias.
    """
    if isinstance(parameter, click.Option) and parameter.hidden:
        return False
    return parameter.expose_value or parameter.name in ("log_level", "log_json")


def name_variables(ctx: click.Context, command: click.Command) -> None:
    """Name an option's variable like the option. Click's own choice, the name of our parameter, works too:
    ``TAILRACE_MIRROR_STORAGE_OPTION``, and ``…_OPTIONS``.
    """
    for parameter in command.params if ctx.auto_envvar_prefix else ():
        if isinstance(parameter, click.Option) and parameter.envvar is None and is_setting(parameter):
            parameter.envvar = f"{ctx.auto_envvar_prefix}_{_name(parameter)}".replace("-", "_").upper()


def _name(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len).lstrip("-")
    return (parameter.name or "").replace("_", "-")


def check_sections(content: Mapping[str, Any], commands: Sequence[str], path: Path) -> None:
    """Raise if a table is not named after a command."""
    for key, value in content.items():
        if isinstance(value, dict) and key not in commands:
            raise UsageError(f"[{key}] in {str(path)!r} is not a command{_hint(key, [*commands])}")


def _hint(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), names, 1)
    return f"; you may mean {near[0]!r}" if near else f"; there are {', '.join(sorted(names))}"


def _plain(value: object, key: str, where: str) -> object:
    """A value as it would be on the command line."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return [str(_plain(member, key, where)) for member in value]
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{key} of {where} must be a string, a number, true, false, or a list of those")


# printed back


def effective(ctx: click.Context, command: click.Command) -> Iterator[tuple[str, Any, str]]:
    """The parameters of a command: name, value, and where the value comes from."""
    name_variables(ctx, command)
    for parameter in command.params:
        if not is_setting(parameter):
            continue
        value, source = parameter.consume_value(ctx, {})
        if source is ParameterSource.ENVIRONMENT:
            origin = f"${_variable(ctx, parameter)}"
        elif source is ParameterSource.DEFAULT_MAP:
            origin = "file"
        else:
            origin = "default"
            value = parameter.get_default(ctx)
            if isinstance(parameter, click.Option) and parameter.multiple and not value:
                value = []
        if origin != "default":
            _check(ctx, parameter, value)
        yield _name(parameter), value, origin


def _check(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
    try:
        parameter.type_cast_value(ctx, value)
    except click.BadParameter as error:
        where = (ctx.command_path or "").partition(" ")[2]
        raise UsageError(f"{_name(parameter)} of [{where}]: {error.message}") from None


def _variable(ctx: click.Context, parameter: click.Parameter) -> str:
    given = parameter.envvar
    if isinstance(given, str) and os.environ.get(given):
        return given
    return f"{ctx.auto_envvar_prefix}_{(parameter.name or '').upper()}"


def shown(name: str, value: object) -> object:
    """A value without the secrets in it."""
    if isinstance(value, list | tuple):
        return [shown(name, member) for member in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    text = str(value)
    if name == "fault-token":
        return HIDDEN
    if name in ("user", "http-user"):
        return _first_part(text, ":")
    if name == "storage-option" or (name == "conf" and _SECRET.search(text)):
        return _first_part(text, "=")
    return _PASSWORD.sub(rf"\1{HIDDEN}\2", text)


def _first_part(text: str, separator: str) -> str:
    """The name before a secret; a text without a name may be all secret."""
    name, has_name, _ = text.partition(separator)
    return f"{name}{separator}{HIDDEN}" if has_name else HIDDEN
