"""The conventions that every command keeps: help, errors in one line, exit codes, signals, pipes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import click
import pytest

import tailrace
from tailrace import errors
from tailrace.cli import common, main


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    command = [sys.executable, "-m", "tailrace", *arguments]
    done: subprocess.CompletedProcess[str] = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )
    return done


def all_commands() -> list[tuple[str, click.Command]]:
    """Every command with its full name, commands of groups too."""
    commands: list[tuple[str, click.Command]] = []

    def walk(path: str, command: click.Command) -> None:
        commands.append((path, command))
        if isinstance(command, click.Group):
            ctx = click.Context(command, info_name=path)
            for name in command.list_commands(ctx):
                inner = command.get_command(ctx, name)
                assert inner is not None
                walk(f"{path} {name}", inner)

    walk("tailrace", main.cli)
    return commands


@pytest.fixture
def add_command(monkeypatch: pytest.MonkeyPatch) -> object:
    """Adds a command `probe` that does what a test gives it to do."""

    def add(action: object) -> None:
        @common.command("probe", example="tailrace probe")
        def command() -> object:
            """Do what a test wants."""
            return action()  # type: ignore[operator]

        module = types.ModuleType("tailrace.cli.probe")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tailrace.cli.probe", module)
        monkeypatch.setitem(main.COMMANDS, "probe", "Do what a test wants.")

    return add


# help


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tailrace {tailrace.__version__}\n", "")


@pytest.mark.parametrize(("path", "command"), all_commands(), ids=[path for path, _ in all_commands()])
def test_every_command_has_help_with_an_example(
    path: str, command: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--help", "-h"):
        assert main.main([*path.split()[1:], flag]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert re.search(r"^Examples?:\n  .*tailrace ", shown.out, re.M), shown.out
        assert "--debug" in shown.out
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{path} {option.opts[0]} has no help"


def test_commands_are_grouped_by_what_people_want(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{title}:\n") for title in main.COMMAND_GROUPS]
    assert places == sorted(places)
    listed = [name for group in main.COMMAND_GROUPS.values() for name in group]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_the_table_tells_what_the_docstring_tells(name: str) -> None:
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None and command.help is not None
    assert command.name == name
    assert command.help.strip().splitlines()[0] == main.COMMANDS[name]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], ["completion", "bash"]])
def test_the_program_starts_without_heavy_imports(arguments: list[str]) -> None:
    code = """
        import sys
        from tailrace.cli.main import main
        main(sys.argv[1:])
        heavy = {"numpy", "pyarrow", "pyspark", "pandas", "rich", "asyncio.sslproto"} & set(sys.modules)
        sys.exit(f"imported: {heavy}" if heavy - {"asyncio.sslproto"} else 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


# errors


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "the command is missing, see 'tailrace --help'"),
        (["nonsense"], "no such command 'nonsense', see 'tailrace --help'"),
        (["serv"], "no such command 'serv'; you may mean 'serve', see 'tailrace --help'"),
        (["put"], "no such command 'put'; you may mean 'set', see 'tailrace --help'"),
        (["exprt"], "no such command 'exprt'; you may mean 'export', see 'tailrace --help'"),
        (["vacum"], "no such command 'vacum'; you may mean 'maintain', see 'tailrace --help'"),
        (["--nonsense"], "--nonsense"),
        (["completion"], "missing argument "),
        (
            ["completion", "tcsh"],
            "'tcsh' is not one of 'bash', 'zsh', 'fish', see 'tailrace completion --help'",
        ),
        (["completion", "bash", "x"], "got unexpected extra argument (x), see 'tailrace completion --help'"),
    ],
)
def test_a_usage_error_is_one_line_and_2(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"tailrace: error: [^\n]+\n", shown.err)
    assert what in shown.err


def test_another_name_of_a_command_is_no_command() -> None:
    """Otherwise a typing error in the command's name would suggest the other one."""
    other_names = {**main.OLD_NAMES, **main.SYNONYMS}
    assert not other_names.keys() & main.COMMANDS.keys()
    assert set(other_names.values()) <= set(main.COMMANDS)


ERRORS = [
    (errors.UsageError("no such setting, see --set help"), 2, "no such setting, see --set help"),
    (errors.ConnectError("can't reach h:1, is it running?"), 3, "can't reach h:1, is it running?"),
    (errors.LoginError("the login was refused, check the password"), 3, "the login was refused"),
    (errors.StoreLocked("the directory is in use, stop the other node"), 1, "the directory is in use"),
    (errors.StatusError(1, "get"), 1, "get: KEY_ENOENT (0x01)"),
    (errors.FrameTooLarge(40, 30), 1, "a frame of 40 bytes is announced, the limit is 30"),
    (
        ConnectionResetError(104, "Connection reset by peer"),
        3,
        "the connection was lost (Connection reset by peer)",
    ),
    (EOFError("0 bytes read of 24"), 3, "the connection was lost (0 bytes read of 24)"),
    (PermissionError(13, "Permission denied", "/x/y"), 1, "can't use '/x/y': Permission denied"),
    (OSError(28, "No space left on device"), 1, "No space left on device"),
    (
        ValueError("a\nb\x1b[31m\0c"),
        1,
        "a bug in Tailrace (ValueError: a b [31m c), run it again with --debug",
    ),
    (MemoryError(), 1, "out of memory"),
    (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), 2, "'a\\udcff' is not text"),
    (UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal not in range"), 1, "a bug in Tailrace"),
    (click.ClickException("Something else."), 1, "something else"),
]


@pytest.mark.parametrize(
    ("error", "code", "what"), ERRORS, ids=[type(error).__name__ for error, _, _ in ERRORS]
)
def test_every_error_is_one_line_with_its_exit_code(
    error: Exception, code: int, what: str, add_command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    add_command(fail)  # type: ignore[operator]
    for arguments, traceback in ((["probe"], 0), (["probe", "--debug"], 1), (["--debug", "probe"], 1)):
        assert main.main(arguments) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.strip().splitlines()[-1].startswith(f"tailrace: error: {what}")
        assert shown.err.count("Traceback") == traceback
        if not traceback:
            assert shown.err.count("\n") == 1
            assert "\x1b" not in shown.err


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("obstore", "spark", "mirror couchbase://127.0.0.1:1 table"),
        ("pyroaring", "spark", "mirror couchbase://127.0.0.1:1 table"),
        ("pyspark", "spark", "mirror couchbase://127.0.0.1:1 table"),
        ("pyspark", "spark", "verify couchbase://127.0.0.1:1 table"),
        ("pyspark", "spark", "demo"),
        ("tantivy", "index", "index couchbase://127.0.0.1:1 folder"),
        ("tantivy", "index", "search folder word"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    package: str, extra: str, command: str, tmp_path: Path
) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import tailrace.cli.main as m; sys.exit(m.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (2, "")
    assert last.startswith("tailrace: error: ") and f"pip install 'tailrace[{extra}]'" in last.replace(
        '"', "'"
    )


def test_a_command_may_return_its_exit_code(add_command: object) -> None:
    add_command(lambda: 1)  # type: ignore[operator]
    assert main.main(["probe"]) == 1
    add_command(lambda: None)  # type: ignore[operator]
    assert main.main(["probe"]) == 0


def test_ctrl_c_is_130_without_a_word(add_command: object, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    add_command(interrupt)  # type: ignore[operator]
    assert main.main(["probe"]) == 130
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.strip() == ""


# signals and pipes, with a process of their own

PROBE = """
    import asyncio, signal, sys, time, types
    from tailrace.cli import common, main

    @common.command("probe", example="tailrace probe")
    def command():
        {body}

    module = types.ModuleType("tailrace.cli.probe")
    module.command = command
    sys.modules["tailrace.cli.probe"] = module
    main.COMMANDS["probe"] = ""
    sys.exit(main.main(["probe"]))
"""

BLOCKING = """
        try:
            print("ready", flush=True)
            for _ in range(600):
                time.sleep(0.1)  # a signal between Python's look and the system's sleep waits for its end
        finally:
            print("cleaned up", flush=True)
"""
COROUTINE = """
        async def work():
            try:
                print("ready", flush=True)
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                print("cleaned up", flush=True)
        common.run(work())
"""


@pytest.mark.parametrize("body", [BLOCKING, COROUTINE], ids=["blocking", "coroutine"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_a_client_command_cleanly(body: str, number: signal.Signals, code: int) -> None:
    script = textwrap.dedent(PROBE.format(body=body.strip()))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (code, "cleaned up\n", "")


DROPPED = """
    import weakref

    class Module: pass

    module = Module()
    number = {number}
    # importlib has callbacks like this one
    lock = weakref.ref(module, lambda _: signal.raise_signal(number))
    try:
        print("ready", flush=True)
        del module
        for _ in range(600):
            time.sleep(0.1)  # as above
    finally:
        time.sleep(0.5)  # it comes once
        print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_that_the_interpreter_drops_comes_again(number: signal.Signals, code: int) -> None:
    body = textwrap.indent(textwrap.dedent(DROPPED.format(number=int(number))), " " * 8)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROBE.format(body=body.strip()))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (code, "ready\ncleaned up\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_interpreter_drops_at_the_end_of_a_command_ends_nothing_else(
    number: signal.Signals,
) -> None:
    """If it came again with nobody left to handle it, the exit code would be that of a killed process."""
    body = f"""
        import weakref
        class Module: pass
        module = Module()
        lock = weakref.ref(module, lambda _: signal.raise_signal({int(number)}))
        del module
        return 1
        """
    ending = """
        import threading
        main._AGAIN_S = 10.0  # so long after its end
        code = main.main(["probe"])
        for thread in set(threading.enumerate()) - {threading.main_thread()}:
            thread.join()
        sys.exit(code)
        """
    script = textwrap.dedent(PROBE.format(body=body.strip())).rpartition("sys.exit")[0]
    script += textwrap.dedent(ending)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", "")


EARLY = """
    import importlib.abc, os, signal, sys

    wanted, number = sys.argv[1], int(sys.argv[2])

    class Interrupt(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == wanted:
                os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    sys.meta_path.insert(0, Interrupt())
    from tailrace.cli.start import main
    del sys.argv[1:3]
    sys.exit(main())
"""


_STATS = ["stats", "couchbase://127.0.0.1:1"]
_SERVE = ["serve", "--memory", "--port=0"]
_EVERY = ("tailrace.cli.main", "click", "tailrace.errors")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("module", "line"),
    [
        *((module, line) for module in _EVERY for line in (_STATS, _SERVE)),
        ("tailrace.cli.main", ["--debug", *_SERVE]),
        ("tailrace.cli.stats", _STATS),
        ("tailrace.cli.serve", _SERVE),
        ("tailrace.server.settings", _SERVE),
        ("tailrace.server.allocator", _SERVE),
    ],
)
def test_signals_while_the_program_is_being_imported(
    module: str, line: list[str], number: signal.Signals
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EARLY), module, str(int(number)), *line],
        capture_output=True,
        text=True,
        check=False,
    )
    code = 130 if number == signal.SIGINT and line is _STATS else 0
    assert (done.returncode, done.stdout, done.stderr.strip()) == (code, "", "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    body = """
        lines = common.JsonLines()
        for number in range(200_000):
            lines.write({"number": number})
        """
    script = textwrap.dedent(PROBE.format(body=body.strip()))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == '{"number":0}\n'
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_a_broken_pipe_that_is_not_stdout_is_a_lost_connection(
    add_command: object, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    add_command(fail)  # type: ignore[operator]
    assert main.main(["probe"]) == 3
    assert "the connection was lost" in capfd.readouterr().err


# completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    shown = capsys.readouterr()
    assert f"_TAILRACE_COMPLETE={shell}_complete" in shown.out
    assert shown.err == ""


def test_commands_and_options_are_completed() -> None:
    def complete(words: str, index: int) -> list[str]:
        environ = {"_TAILRACE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        done = run(env={**os.environ, **environ})
        assert done.stderr == ""
        return done.stdout.splitlines()

    assert "plain,completion" in complete("tailrace comp", 1)
    assert "plain,--version" in complete("tailrace --v", 1)
    assert complete("tailrace completion z", 2) == ["plain,zsh"]


# output


def test_json_lines_are_compact_utf_8(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = common.JsonLines()
    lines.write({"key": "Grüße", "n": [1, 2]})
    lines.flush()
    assert capfdbinary.readouterr().out == '{"key":"Grüße","n":[1,2]}\n'.encode()
    with pytest.raises(ValueError):
        lines.write(float("nan"))


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with common.progress("loading", total=10) as bar:
        bar.advance(3)
        bar.describe("still loading")
    assert capsys.readouterr() == ("", "")


def test_an_option_takes_only_plain_digits(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command("x")
    @click.option("--n", type=common.Integer(1, 10), default=3)
    @click.option("--size", type=common.SIZE, default="256m")
    def command(n: int, size: int) -> tuple[int, int]:
        return n, size

    assert command.main([], standalone_mode=False) == (3, 256 << 20)
    assert command.main(["--n", "10", "--size", "1k"], standalone_mode=False) == (10, 1024)
    for text in ("1_0", "11", "x"):
        with pytest.raises(click.BadParameter):
            command.main(["--n", text], standalone_mode=False)
