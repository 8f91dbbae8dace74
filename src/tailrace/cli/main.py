"""The program ``tailrace``: the table of commands, and how errors and signals end it.

Exit codes: 0 done; 1 it ran and the answer is no; 2 the command line is wrong; 3 the peer can't be reached or
refuses the login; 130 Ctrl-C (`serve`: 0). SIGTERM and a reader that has gone (``| head``) end with 0.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from .. import __version__
from ..errors import ConnectError, StatusError, TailraceError, UsageError, reason_of
from . import config_file
from .common import EXISTING_FILE, Group, ProgramRun, printable
from .start import interrupted_code

__all__ = ["COMMANDS", "COMMAND_GROUPS", "cli", "main"]

PROGRAM = "tailrace"
COMPLETE_VARIABLE = "_TAILRACE_COMPLETE"

COMMAND_GROUPS: dict[str, dict[str, str]] = {
    "Run a node": {
        "serve": "Run a node: embedded store, key-value front end and change streams.",
        "rewind": "Forget the newest changes of vbuckets, as a failover with data loss does.",
    },
    "Inspect": {
        "tail": "Show changes as they come.",
        "get": "Show a document.",
        "stats": "Show the server's statistics.",
        "collections": "Show, create, modify and drop scopes and collections.",
    },
    "Move data": {
        "load": "Write documents, generated or from a file.",
        "set": "Store a document.",
        "delete": "Delete a document.",
        "dump": "Write all documents as they are now.",
        "replicate": "Apply the changes of one bucket to another, with their metadata.",
        "invalidate": "Remove documents from a cache when they change in a bucket.",
        "index": "Keep a full-text index of a bucket up to date.",
        "search": "Search the full-text index of a bucket.",
    },
    "Mirror into a table": {
        "mirror": "Keep a table in step with the bucket, on Spark.",
        "plan": "Show what a restart of a mirror would do.",
        "verify": "Compare a table with its bucket, document by document.",
        "query": "Query the live rows of a table.",
        "export": "Write the live rows of a table as a plain table that every engine can read.",
        "wait": "Wait until a table holds the given changes.",
        "maintain": "Compact and clean a mirror's table, once.",
    },
    "Several nodes": {
        "cluster": "Run several nodes on one machine: replicas, failover, rebalance.",
        "takeover": "Move vbuckets from one node to another while clients read and write.",
    },
    "Tools": {
        "doctor": "Check for problems between here, a bucket and a table.",
        "decode": "Show hex, raw bytes or a capture as readable frames.",
        "record": "Save a stream to a file, byte for byte.",
        "replay": "Serve a recording as a producer, byte for byte.",
        "bench": "Measure this machine, side by side with the peers that are installed.",
        "demo": "Run a demo: a node, a mirror, a failover that loses changes, the repair.",
        "config": "Print the options that commands would run with: from file, environment or default.",
        "completion": "Print a completion script for your shell.",
    },
}
"""Every command and the first line of its help, by what people want to do. ``foo-bar`` is `command` in the
module ``foo_bar``.

The lines are repeated here so that ``tailrace --help`` imports no command; a test compares them with the
docstrings.
"""

COMMANDS = {name: about for group in COMMAND_GROUPS.values() for name, about in group.items()}

OLD_NAMES = {"vacuum": "maintain"}
"""Former names of commands, which still work."""

SYNONYMS = {
    "cat": "get",
    "check": "doctor",
    "compare": "verify",
    "diagnose": "doctor",
    "follow": "tail",
    "import": "load",
    "put": "set",
    "remove": "delete",
    "rollback": "rewind",
    "server": "serve",
    "start": "serve",
    "sync": "mirror",
    "watch": "tail",
}
"""Other names that people may try, for the hint in the error."""

DONE, ANSWER_IS_NO, WRONG_USAGE, NO_PEER = 0, 1, 2, 3


class _Program(Group):
    """The top-level command; it imports a subcommand only when that is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = OLD_NAMES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{cmd_name.replace('-', '_')}", __package__)
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, members in COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", about) for name, about in members.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and name not in OLD_NAMES and not name.startswith("-"):
            other_names = {**OLD_NAMES, **SYNONYMS}
            near = difflib.get_close_matches(name.lower(), [*COMMANDS, *other_names], 1)
            meant = other_names.get(near[0], near[0]) if near else None
            hint = "" if meant is None else f"; you may mean '{meant}'"
            raise click.UsageError(f"no such command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [
            CompletionItem(name, help=help_text)
            for name, help_text in COMMANDS.items()
            if name.startswith(incomplete)
        ]


@click.group(
    PROGRAM,
    cls=_Program,
    example="tailrace COMMAND --help",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(
    __version__, prog_name=PROGRAM, message="%(prog)s %(version)s", allow_from_autoenv=False
)
@click.option(
    "--config",
    type=EXISTING_FILE,
    envvar="TAILRACE_CONFIG",
    help="Read options of commands from this TOML file; see 'config'.",
)
@click.pass_context
def cli(ctx: click.Context, config: Path | None) -> None:
    """Carries a document store's change stream into Spark, and keeps it true."""
    name = ctx.invoked_subcommand
    if name is None:
        raise click.UsageError("the command is missing", ctx)
    if config is not None:
        config_file.configure(ctx, OLD_NAMES.get(name, name), config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; only a bug escapes as an exception."""
    session = ProgramRun()
    arguments = sys.argv[1:] if argv is None else list(argv)
    _open_what_is_closed()
    try:
        with _sigterm_ends_with_0():
            result = _run(arguments, session)
            sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (KeyboardInterrupt, click.Abort):
        if session.debug:
            traceback.print_exc()
        return interrupted_code(arguments)
    except BrokenPipeError as error:
        if _reader_of_stdout_has_gone():
            _discard_stdout()
            return DONE
        return _report(error, session)
    except Exception as error:  # noqa: BLE001  (the one place where every error becomes a line)
        return _report(error, session)
    return result if isinstance(result, int) else DONE


def _run(arguments: list[str], session: ProgramRun) -> object:
    """What click's own ``main`` does, without its handling of errors, end of file and broken pipes."""
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    try:
        prefix = config_file.ENVIRONMENT_PREFIX
        with cli.make_context(PROGRAM, arguments, obj=session, auto_envvar_prefix=prefix) as ctx:
            return cli.invoke(ctx)
    except click.exceptions.Exit as end:
        return end.exit_code


# errors


# Packages that only some commands need, and the extra that brings each.
_EXTRAS = dict.fromkeys(("pyspark", "deltalake", "pyroaring", "obstore", "pandas"), "spark")


def _report(error: Exception, session: ProgramRun) -> int:
    """Print an error as one line; returns the exit code."""
    if session.debug:
        traceback.print_exception(error)
    code, message = _explain(_of_java(error) or error)
    # one line, even if a peer or a file name put line feeds into the text
    with contextlib.suppress(OSError):
        click.echo(f"{PROGRAM}: error: {' '.join(printable(message, ' ').split())}", err=True)
    return code


def _of_java(error: Exception) -> TailraceError | None:
    """The error to report if Spark's Java is gone: it may look like a lost connection to a peer."""
    if "py4j" not in sys.modules:
        return None
    from ..spark.java_process import lost_java

    return lost_java(error)


def _explain(error: Exception) -> tuple[int, str]:
    match error:
        case click.UsageError():
            return WRONG_USAGE, _usage(error)
        case click.ClickException():
            return ANSWER_IS_NO, _lowered(error.format_message())
        case UsageError():
            return WRONG_USAGE, str(error)
        case ConnectError():
            return NO_PEER, str(error)
        case StatusError():
            return ANSWER_IS_NO, f"{error}, {_advice(error.status)}"
        case TailraceError():
            return ANSWER_IS_NO, str(error)
        case ConnectionError() | EOFError():
            return NO_PEER, f"the connection was lost ({reason_of(error)}), try again when the peer is back"
        case OSError() if error.filename is not None:
            return ANSWER_IS_NO, f"can't use {os.fsdecode(error.filename)!r}: {reason_of(error)}"
        case OSError():
            return ANSWER_IS_NO, reason_of(error)
        case ModuleNotFoundError(name=name) if name in _EXTRAS:
            return WRONG_USAGE, f"{name} is not installed; run: pip install 'tailrace[{_EXTRAS[name]}]'"
        case UnicodeEncodeError() if any("\ud800" <= c <= "\udfff" for c in error.object):
            return WRONG_USAGE, f"{error.object!r} is not text in UTF-8, encode it as UTF-8"
        case MemoryError():
            return ANSWER_IS_NO, "out of memory, give the command less to do at once"
    kind = type(error).__name__
    return ANSWER_IS_NO, f"a bug in Tailrace ({kind}: {error}), run it again with --debug and report it"


def _advice(status: int) -> str:
    """Advice for a request that the server refused with this status."""
    from ..wire.codes import Status

    match status:
        case Status.KEY_ENOENT:
            return "there is no such document, check the key and the bucket"
        case Status.KEY_EEXISTS:
            return "the document's CAS has changed: get it again"
        case Status.LOCKED:
            return "somebody has locked the document: try again when it is unlocked"
        case Status.UNKNOWN_COLLECTION | Status.UNKNOWN_SCOPE:
            return "'tailrace collections URL' lists them"
        case Status.ETMPFAIL | Status.EBUSY | Status.ENOMEM:
            return "the server is busy: try again later"
        case Status.EACCESS | Status.AUTH_ERROR:
            return "log in as a user who may do that"
        case Status.UNKNOWN_COMMAND | Status.NOT_SUPPORTED:
            return "this server can't do that"
    return "the server's log may say more"


def _usage(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx else PROGRAM
    return f"{_lowered(error.format_message())}, see '{path} --help'"


def _lowered(text: str) -> str:
    """The text as it follows "error:", without a capital at the start or a full stop at the end."""
    sentences = re.split(r"\.\s+(?=[A-Z])", " ".join(text.split()).rstrip(".?"))
    return ", ".join(
        sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() else sentence for sentence in sentences
    )


# signals and pipes


def _open_what_is_closed() -> None:
    """Replace stdout and stderr if the parent process closed them (``>&-``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


_AGAIN_S = 0.01


@contextlib.contextmanager
def _sigterm_ends_with_0() -> Iterator[None]:
    """While the block runs, SIGTERM unwinds the program as `SystemExit`, which asyncio lets through.

    An exception raised in a weak reference's callback or in a ``__del__`` unwinds nothing: the interpreter
    drops it, and importlib has such callbacks. A signal lost that way is sent again, unless the block has
    ended by then: there is nothing left for it to end, and nobody to handle it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return

    coming: list[threading.Timer] = []

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(DONE)

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt | SystemExit):
            number = signal.SIGINT if issubclass(what.exc_type, KeyboardInterrupt) else signal.SIGTERM
            again = threading.Timer(_AGAIN_S, os.kill, [os.getpid(), number])  # now it would be dropped too
            again.daemon = True
            coming.append(again)
            again.start()
        else:
            hook_before(what)

    before = signal.signal(signal.SIGTERM, end)
    hook_before, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        for again in coming:
            again.cancel()
        signal.signal(signal.SIGTERM, before)


def _reader_of_stdout_has_gone() -> bool:
    """Whether the broken pipe is stdout, not a socket."""
    if not hasattr(select, "poll"):  # Windows: sockets have errors of their own there
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard_stdout() -> None:
    """Discard the interpreter's last flush, so it does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
