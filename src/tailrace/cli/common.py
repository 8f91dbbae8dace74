"""What all commands share: their class, options, parameter types and output.

Results go to stdout, everything else to stderr. An error is raised, never printed: `main` turns it into one
line and an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from .. import paths
from ..connstr import Address, parse
from ..errors import TailraceError, UsageError
from ..logs import LEVELS, configure_logging
from ..tracing import configure_tracing
from ..units import parse_duration_s, parse_integer, parse_share, parse_size
from . import config_file
from .signals import on_signal, run_loop

__all__ = [
    "CAS",
    "DIRECTORY",
    "DURATION",
    "EXISTING_FILE",
    "FILE",
    "INPUT_FILE",
    "INTEGER",
    "SHARE",
    "SIZE",
    "TABLE",
    "URL",
    "DocumentedCommand",
    "Group",
    "Integer",
    "JsonLines",
    "LocalPath",
    "Parsed",
    "ProgramRun",
    "ProgressDisplay",
    "TablePath",
    "cant_listen",
    "command",
    "counted",
    "group",
    "json_option",
    "note",
    "progress",
    "run",
    "standard_input",
    "url_argument",
    "use_colour",
]

if TYPE_CHECKING:
    from rich.console import RenderableType

    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic for type checkers only, in older releases

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class ProgramRun:
    """One run of the program."""

    debug: bool = False
    log_level: str = "warning"
    log_json: bool = False


# commands


def _set_debug(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    if given:
        ctx.find_root().ensure_object(ProgramRun).debug = True


def _set_log_level(ctx: click.Context, _param: click.Parameter, level: str | None) -> None:
    if level is not None:
        ctx.find_root().ensure_object(ProgramRun).log_level = level


def _set_log_json(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    if given:
        ctx.find_root().ensure_object(ProgramRun).log_json = True


def _take_from_file(ctx: click.Context, _param: click.Parameter, file: Path | None) -> None:
    """``--config`` after a command means the same as before it."""
    if file is None:
        return
    _program, *names = ctx.command_path.split()
    section: Any = config_file.configure(ctx.find_root(), names[0], file)
    for name in names[1:]:
        section = section.get(name, {})
    ctx.default_map = section


class _Documented(click.Command):
    """A command with ``--debug``, ``--config`` and logging options; its help ends with examples."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example.strip()
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_set_debug,
                help="Show a traceback with an error.",
            )
        )
        if not any(parameter.name == "config" for parameter in self.params):
            self.params.append(
                click.Option(
                    ["--config"],
                    type=EXISTING_FILE,
                    is_eager=True,
                    expose_value=False,
                    callback=_take_from_file,
                    help="Read options from this TOML file; see 'tailrace config'.",
                )
            )
        self.params += [
            click.Option(
                ["--log-level"],
                type=click.Choice(LEVELS),
                expose_value=False,
                callback=_set_log_level,
                help="Lowest level to log, on stderr.  [default: warning]",
            ),
            click.Option(
                ["--log-json"],
                is_flag=True,
                expose_value=False,
                callback=_set_log_json,
                help="Write the log as JSON, one object per line.",
            ),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        config_file.name_variables(ctx, self)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        session = ctx.find_root().ensure_object(ProgramRun)
        configure_logging(sys.stderr, session.log_level, as_json=session.log_json)
        if trouble := configure_tracing():
            note(trouble)
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = self.example.splitlines()
        with formatter.section("Examples" if len(lines) > 1 else "Example"):
            for line in lines:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class DocumentedCommand(_Documented):
    """A command of Tailrace; it returns None when it is done, or the exit code."""


class Group(_Documented, click.Group):
    """A command with commands of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("no_args_is_help", False)  # a missing command is a one-line error
        super().__init__(*args, **kwargs)


def command(
    name: str, *, example: str, **attributes: Any
) -> Callable[[Callable[..., Any]], DocumentedCommand]:
    """Make a function a command; its docstring is the help, ``example`` one or more command lines."""
    return click.command(name, cls=DocumentedCommand, example=example, **attributes)


def group(name: str, *, example: str, **attributes: Any) -> Callable[[Callable[..., Any]], Group]:
    """Make a function a command that has commands of its own."""
    return click.group(name, cls=Group, example=example, **attributes)


# parameters


class Parsed(_ParamType):
    """A type whose values are parsed by a function of `units` or `connstr`."""

    def __init__(self, name: str, parser: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # a default is parsed already
        try:
            return self._parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Integer(Parsed):
    """A whole number within bounds; unlike click's own type it accepts only ASCII digits."""

    def __init__(self, minimum: int = 0, maximum: int = (1 << 63) - 1) -> None:
        super().__init__("integer", lambda text: parse_integer(text, minimum=minimum, maximum=maximum))


class LocalPath(Parsed):
    """A path on this machine by the rules of `paths`, as a `Path`."""

    def __init__(self, name: str, *, must_exist: bool = False, allow_dash: bool = False) -> None:
        check = paths.directory if name == "directory" else paths.file
        super().__init__(name, lambda text: check(text, f"the {name}", must_exist=must_exist))
        self._allow_dash = allow_dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._allow_dash and str(value) == "-":
            return Path("-")
        return super().convert(str(value), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="dir" if self.name == "directory" else "file")]


class TablePath(Parsed):
    """A directory or the prefix of an object store by the rules of `paths`, as text.

    An invalid one is refused before anything is connected or Spark is started.
    """

    def __init__(self, name: str = "table") -> None:
        super().__init__(name, lambda text: paths.location(text, f"the {name}").text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="dir")]


INTEGER = Integer()
TABLE = TablePath()
FILE = LocalPath("file")
EXISTING_FILE = LocalPath("file", must_exist=True)
INPUT_FILE = LocalPath("file", must_exist=True, allow_dash=True)
DIRECTORY = LocalPath("directory")
CAS = Integer(0, (1 << 64) - 1)
SIZE = Parsed("size", parse_size)
DURATION = Parsed("duration", parse_duration_s)
SHARE = Parsed("share", parse_share)
URL = Parsed("url", lambda text: parse(text, os.environ))


def url_argument(function: F) -> F:
    """The argument URL, as ``url: ConnectionString``."""
    return click.argument("url", type=URL, metavar="URL")(function)


def json_option(help_text: str = "Write the result as JSON.") -> Callable[[F], F]:
    """The option ``--json``, as ``as_json: bool``."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def cant_listen(host: str, port: int, error: OSError, option: str = "--port") -> TailraceError:
    """The error for an address that can't be listened on; ``option`` gave its port."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    if error.errno != errno.EADDRINUSE:
        option = f"--host or {option}"
    return TailraceError(f"can't listen on {Address(host, port)}: {reason}, choose another {option}")


def printable(text: str, instead: str = "?") -> str:
    """Without control characters: names and reasons come from elsewhere, and a terminal would obey them."""
    return "".join(character if character.isprintable() else instead for character in text)


def standard_input() -> IO[bytes]:
    """The input of a command that is given no file."""
    if sys.stdin is None:  # the parent process closed it
        raise UsageError("stdin is closed, so there is nothing to read: give a file")
    return sys.stdin.buffer


# output


_above_bar: list[Callable[[str], None]] = []
"""Functions that write above the progress bars now shown, the innermost last."""


def note(text: str) -> None:
    """A message for people, on stderr."""
    if _above_bar:
        _above_bar[-1](f"tailrace: {text}")
    else:
        click.echo(f"tailrace: {text}", err=True)


def counted(count: int, what: str) -> str:
    """``1 vbucket``, ``2 vbuckets``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def use_colour(stream: IO[Any]) -> bool:
    """Whether to use colours: only on a terminal, and not if NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class JsonLines:
    """Writes objects to stdout, one per line, as UTF-8 whatever the locale."""

    def __init__(self, stream: IO[bytes] | None = None) -> None:
        self._stream = sys.stdout.buffer if stream is None else stream
        self._encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

    def write(self, value: Any) -> None:
        """Write one object; only `flush` makes sure it is output."""
        self._stream.write(self._encode(value).encode() + b"\n")

    def flush(self) -> None:
        """Hand over everything that was written."""
        self._stream.flush()


class ProgressDisplay:
    """Shows a command's progress; silent without a terminal."""

    def __init__(
        self,
        advance: Callable[[float], None] = lambda _amount: None,
        describe: Callable[[str], None] = lambda _text: None,
        expect: Callable[[float], None] = lambda _total: None,
        reach: Callable[[float], None] = lambda _done: None,
        *,
        is_shown: bool = False,
    ) -> None:
        self.advance = advance
        self.describe = describe
        self.expect = expect
        """Set the total, where it is not known from the start."""
        self.reach = reach
        """Set how much is done so far, where that is known rather than each step."""
        self.is_shown = is_shown
        """Whether there is a terminal."""


@contextlib.contextmanager
def progress(
    description: str, total: float | None = None, *, beside_results: bool = False
) -> Iterator[ProgressDisplay]:
    """A progress bar on stderr while the block runs, if stderr is a terminal.

    ``beside_results``: the block writes to stdout, so there is no bar if stdout is a terminal too.
    """
    if not sys.stderr.isatty() or (beside_results and sys.stdout.isatty()):
        yield ProgressDisplay()
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.markup import escape

    class Display(bars.Progress):
        """One line; bar and time left appear once the total is known."""

        def get_renderables(self) -> Iterator[RenderableType]:
            is_known = all(task.total is not None for task in self.tasks)
            self.columns = (*shown, *(of_a_total if is_known else ()), bars.TimeElapsedColumn())
            yield from super().get_renderables()

    shown = (bars.SpinnerColumn(), bars.TextColumn("{task.description}"))
    of_a_total = (
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        bars.TextColumn("left:"),
        bars.TimeRemainingColumn(),
    )
    with Display(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        _above_bar.append(lambda text: bar.console.out(text, highlight=False))
        try:
            yield ProgressDisplay(
                lambda amount: bar.advance(task, amount),
                lambda text: bar.update(task, description=escape(text)),
                lambda amount: bar.update(task, total=amount),
                lambda amount: bar.update(task, completed=amount),
                is_shown=True,
            )
        finally:
            _above_bar.pop()


# running


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; Ctrl-C and SIGTERM cancel it, so that its ``finally`` blocks run.

    Ctrl-C then ends the program with 130, SIGTERM with 0.
    """
    terminated = False

    async def supervised() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        with on_signal(asyncio.get_running_loop(), signal.SIGTERM, terminate):
            return await work

    try:
        return run_loop(supervised())
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(0) from None
        raise
