"""Makes the pages that come from declarations: ``docs/protocol/*.md``, ``cli.md``, ``settings.md``,
``spark-options.md`` and ``dialect-coverage.md``.

    python docs/build.py            write them
    python docs/build.py --check    exit 1 if one of them is not up to date

A test does the check, so a message, a status or a command that changes without its page fails the suite. The
examples on the protocol pages are golden packets of ``tests/vectors``, shown by `tailrace decode`'s own code.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from dialects.coverage_table import implemented, rows  # noqa: E402
from tailrace.cli.main import COMMANDS, cli  # noqa: E402
from tailrace.protocol.states import MACHINES  # noqa: E402
from tailrace.server.settings import table  # noqa: E402
from tailrace.spark.source.options import OPTIONS  # noqa: E402
from tailrace.wire import admin, codes, dcp, dcp_replication, describe, header, kv, subdoc, tap, upr  # noqa: E402
from tailrace.wire.dialect import DCP, KV, KV_MESSAGES, TAP, UPR_A, UPR_B, Dialect  # noqa: E402
from tailrace.wire.header import Frame  # noqa: E402
from tailrace.wire.message import Direction, Message, Part, Response  # noqa: E402
from tailrace.wire.offline import Observer, read  # noqa: E402
from vectors.corpus import Vector, vectors  # noqa: E402

MADE = "<!-- made by `make docs` from the declarations in the code: change those, not this page -->"

GROUPS: tuple[tuple[str, str, Dialect, tuple[ModuleType, ...], str], ...] = (
    ("documents", "Document commands", KV, (kv,), "Reading and writing documents, and their metadata."),
    ("server", "Server, vbucket and collection commands", KV, (admin,), "Everything but documents."),
    ("subdoc", "Sub-document commands", KV, (subdoc,), "Paths inside a JSON document."),
    (
        "dcp",
        "DCP",
        DCP,
        (dcp, dcp_replication),
        "The change stream of today's servers: opcodes 0x50 to 0x67.",
    ),
    ("upr-a", "UPR draft A", UPR_A, (upr,), "The first draft: five opcodes, the subtype in byte 5."),
    ("upr-b", "UPR draft B", UPR_B, (upr,), "The second draft: opcodes 0x50 to 0x5a."),
    ("tap", "TAP", TAP, (tap,), "The stream before UPR: per connection, with acks."),
)

ENUMS: tuple[type[enum.IntEnum] | type[enum.IntFlag], ...] = (
    codes.Magic,
    codes.Status,
    codes.Datatype,
    codes.Feature,
    codes.VBucketState,
    codes.UprBVBucketState,
    codes.OpenFlag,
    codes.AddStreamFlag,
    codes.MarkerFlag,
    codes.OsoFlag,
    codes.StreamEndStatus,
    codes.SystemEventId,
    codes.DurabilityLevel,
    codes.TapConnectFlag,
    codes.TapFlag,
    codes.TapOpaque,
    codes.UprBStreamEnd,
    codes.WithMetaOption,
    codes.RequestFrameId,
    codes.ResponseFrameId,
)

_TYPES = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}
_PARTS = {Part.FORBIDDEN: "none", Part.OPTIONAL: "optional", Part.REQUIRED: "required"}


# protocol pages


def messages_of(dialect: Dialect, modules: Iterable[ModuleType]) -> list[type[Message]]:
    """The messages of a group, in the order of their declaration."""
    if dialect is not KV:
        return list(dialect.messages)
    return [one for one in KV_MESSAGES if sys.modules[one.__module__] in modules]


def protocol_page(title: str, about: str, dialect: Dialect, messages: list[type[Message]]) -> str:
    """The page of a group."""
    lines = [
        MADE,
        "",
        f"# {title}",
        "",
        f"{about} How frames look is on [the protocol's first page](README.md).",
        "",
    ]
    lines += ["| opcode | message | goes | extras | key | value | answer |", "|---|---|---|---|---|---|---|"]
    for one in messages:
        sizes = " or ".join(str(layout.size) for layout in one.LAYOUTS)
        lines.append(
            f"| {_opcode(one)} | [{one.name()}](#{_anchor(one)}) | {_goes(one)} | {sizes} "
            f"| {_PARTS[one.KEY]} | {_PARTS[one.VALUE]} | {one.REPLY} |"
        )
    lines.append("")
    answers: dict[type[Response], None] = {}
    for one in messages:
        lines += _message(one, dialect)
        if one.RESPONSE is not None and one.RESPONSE is not Response:
            answers[one.RESPONSE] = None
    if answers:
        lines += ["## Answers", ""]
        for answer in answers:
            lines += _answer(answer)
    return "\n".join(lines).rstrip() + "\n"


def _message(one: type[Message], dialect: Dialect) -> list[str]:
    lines = [f"## {one.name()}", "", _doc(one), ""]
    facts = [f"Opcode {_opcode(one)}, {_goes(one)}.", f"Key {_PARTS[one.KEY]}, value {_PARTS[one.VALUE]}"]
    facts[-1] += ", CAS must be 0." if one.CAS is Part.FORBIDDEN else "."
    if one.DATATYPES:
        names = [flag.name for flag in codes.Datatype if flag.value & one.DATATYPES]
        facts.append(f"Datatypes that are allowed: {', '.join(map(str, names))}.")
    facts.append(f"Answered: {one.REPLY}{_answer_link(one)}.")
    lines += [" ".join(facts), ""]
    lines += _layouts(one)
    lines += _example(one, dialect)
    return lines


def _answer(answer: type[Response]) -> list[str]:
    lines = [f"### {answer.name()}", "", _doc(answer), ""]
    if set(answer.OK) - {codes.Status.SUCCESS}:
        names = ", ".join(f"{codes.status_name(status)} (0x{status:02x})" for status in sorted(answer.OK))
        lines += [f"Statuses with this shape: {names}.", ""]
    lines += [f"Key {_PARTS[answer.KEY]}, value {_PARTS[answer.VALUE]}.", ""]
    return [*lines, *_layouts(answer)]


def _layouts(one: type[Message]) -> Iterator[str]:
    filled = [layout for layout in one.LAYOUTS if layout.fields]
    for layout in filled:
        yield f"Extras, {layout.size} byte{'s' * (layout.size != 1)}:" + _or_none(one, layout is filled[0])
        yield ""
        yield "| offset | type | field | meaning |"
        yield "|---|---|---|---|"
        for field in layout.fields:
            kind = _TYPES.get(field.code, f"{field.size} bytes")
            yield f"| {field.offset} | {kind} | `{field.name}` | {_meaning(one, field.name, field.about)} |"
        yield ""


def _or_none(one: type[Message], first: bool) -> str:
    has_none = any(not layout.fields for layout in one.LAYOUTS)
    return " or none at all." if has_none and first and len(one.LAYOUTS) == 2 else ""


def _meaning(one: type[Message], name: str, about: str) -> str:
    names = describe._meaning(one, name)
    text = about.replace("|", "\\|")
    if names is None:
        return text
    link = f"[{names.__name__}](codes.md#{names.__name__.lower()})"
    return (
        text.replace(f"see {names.__name__}", f"see {link}") if names.__name__ in text else f"{text} ({link})"
    )


def _example(one: type[Message], dialect: Dialect) -> Iterator[str]:
    found = next((vector for vector in _golden(dialect) if _names(vector, dialect) is one), None)
    if found is None:
        return
    (shown,) = read(found.data, Observer(dialect, Direction(found.direction)))
    yield f"Example (`{found.id}`):"
    yield ""
    yield "```text"
    digits = found.data.hex()
    for at in range(0, len(digits), 64):
        yield digits[at : at + 64]
    yield ""
    for kind, text in shown.to_text():
        yield text if kind == "head" else f"    {text}"
    yield "```"
    yield ""


def _golden(dialect: Dialect) -> list[Vector]:
    """The packets of a dialect that are right in every way."""
    return [
        vector
        for vector in vectors()
        if vector.dialect == dialect.name and vector.framable and not vector.notes and vector.error is None
    ]


def _names(vector: Vector, dialect: Dialect) -> type[Message]:
    return dialect.find(Frame.parse(vector.data), Direction(vector.direction))


def _opcode(one: type[Message]) -> str:
    subtype = getattr(one, "TYPE", None)
    return f"0x{one.OPCODE:02x}" + ("" if subtype is None else f" type {int(subtype)}")


def _goes(one: type[Message]) -> str:
    return "both ways" if one.DIRECTION is None else one.DIRECTION.value.replace("-", " ")


def _answer_link(one: type[Message]) -> str:
    answer = one.RESPONSE
    if answer is None or one.REPLY == "never":
        return ""
    return ", without a body" if answer is Response else f", with [{answer.name()}](#{_anchor(answer)})"


def _anchor(one: type[Message]) -> str:
    return one.name().replace(" ", "-")


def _doc(one: type[Message]) -> str:
    text = inspect.getdoc(one) or ""
    return text.replace("``", "`")


def index_page() -> str:
    """The first page of the protocol: the header, and where everything is."""
    lines = [MADE, "", "# The protocol, message by message", ""]
    lines += [
        "Every message is declared once, in `src/tailrace/wire`; encoder, decoder, validator and these pages",
        "are made from the declaration. What the four dialects have in common and where they differ is in",
        "[dialects.md](../dialects.md).",
        "",
        "| page | messages | what |",
        "|---|---|---|",
    ]
    for name, title, dialect, modules, about in GROUPS:
        lines.append(f"| [{title}]({name}.md) | {len(messages_of(dialect, modules))} | {about} |")
    lines += [
        f"| [Codes](codes.md) | | Every number that has a name: {len(ENUMS)} lists. |",
        f"| [States](states.md) | | {len(MACHINES)} machines and their transitions. |",
        "",
    ]
    layout = inspect.getdoc(header) or ""
    lines += ["## The frame", "", "```text", layout, "```", ""]
    lines += [
        "All numbers are big-endian. `to producer` also means: to a key-value server. A frame has up to 30",
        "MiB, and up to 16 KiB before the login. The value is what is left of the body.",
        "",
    ]
    return "\n".join(lines).rstrip() + "\n"


def codes_page() -> str:
    """Every enum."""
    lines = [MADE, "", "# Codes", "", "Numbers that are not listed survive a round trip as they came.", ""]
    for one in ENUMS:
        lines += [f"## {one.__name__}", "", inspect.getdoc(one) or "", "", "| number | name |", "|---|---|"]
        lines += [f"| 0x{member.value:02x} | {name} |" for name, member in one.__members__.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


# command line


def cli_page() -> str:
    """Every command with its options."""
    lines = [
        MADE,
        "",
        "# The command line",
        "",
        _CLI_CONVENTIONS.strip(),
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    lines += [f"| [`{name}`](#tailrace-{name}) | {about} |" for name, about in COMMANDS.items()]
    lines.append("")
    ctx = click.Context(cli, info_name="tailrace")
    for name in COMMANDS:
        found = cli.get_command(ctx, name)
        assert found is not None
        lines += _command(f"tailrace {name}", found)
    return "\n".join(lines).rstrip() + "\n"


def _command(path: str, command: click.Command) -> list[str]:
    lines = [f"## {path}", "", inspect.cleandoc(command.help or ""), ""]
    options = [param for param in command.params if isinstance(param, click.Option)]
    arguments = [_argument(param) for param in command.params if isinstance(param, click.Argument)]
    if isinstance(command, click.Group):
        arguments.append("COMMAND")
    lines += ["```text", " ".join([path, "[OPTIONS]", *arguments]), "```", ""]
    lines += ["| option | meaning | default |", "|---|---|---|"]
    lines += [_option(option) for option in options]
    lines += ["| `-h`, `--help` | Show the help. | |", ""]
    lines += ["```text", getattr(command, "example", ""), "```", ""]
    if isinstance(command, click.Group):
        ctx = click.Context(command, info_name=path)
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            lines += _command(f"{path} {name}", inner)
    return lines


def _argument(param: click.Argument) -> str:
    name = param.metavar or _type(param) or (param.name or "").upper()
    name = name.strip("[].")
    return (name if param.required else f"[{name}]") + ("..." if param.nargs == -1 else "")


def _option(param: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in param.opts)
    value = "" if param.is_flag else f" `{param.metavar or _type(param) or param.type.name.upper()}`"
    about, _, said = (param.help or "").partition("  [default: ")
    default = said.removesuffix("]") if said else _default(param)
    return "| " + " | ".join(_cell(one) for one in (names + value, about, default)) + " |"


def _cell(text: str) -> str:
    """Text in a table, whose bars are its own."""
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _type(param: click.Parameter) -> str | None:
    return (
        "{" + "\\|".join(map(str, param.type.choices)) + "}" if isinstance(param.type, click.Choice) else None
    )


def _default(param: click.Option) -> str:
    shown: Any = param.show_default if isinstance(param.show_default, str) else param.default
    # "not given" is None, or in newer clicks an object of its own
    if param.is_flag or param.required or not isinstance(shown, str | int | float | list | tuple):
        return ""
    if isinstance(shown, list | tuple):
        return ", ".join(f"`{one}`" for one in shown)
    return f"`{shown}`" if shown != "" else ""


_CLI_CONVENTIONS = """
Results go to stdout, progress and messages to stderr; progress bars are shown on a terminal only. `--json` is
there where a script may want the result. `--help` is there everywhere, with an example, and so is `--debug`,
which shows the traceback of an error; it may stand before or behind the command's name. `NO_COLOR` turns
colours off.

| exit code | meaning |
|---|---|
| 0 | done; also after SIGTERM, and when the reader of a pipe has gone (`\\| head`) |
| 1 | it ran, and the answer is no: differences found, no such document, port in use, unusable input |
| 2 | the command line is wrong |
| 3 | the peer can't be reached, refuses the login or has no such bucket |
| 130 | Ctrl-C (`serve`: 0) |

An error is one line on stderr: `tailrace: error: WHAT, and what to do`.

Where a command takes a URL, it is a connection string:
`couchbase://[user[:password]@]host[:port][,host2…][/bucket]`, with `couchbases://` for TLS. The port is 11210
(11207 for TLS) and the bucket `default` unless it says otherwise. User, password and bucket may be
percent-encoded, an IPv6 address stands in brackets. What it leaves out of user and password comes from
`TAILRACE_USERNAME` and `TAILRACE_PASSWORD`. Sizes are bytes or have a unit (`64k`, `256m`, `1g`; powers of
1024), durations are seconds or have a unit (`250ms`, `60s`, `5m`).

Completion for bash, zsh and fish: see [`tailrace completion`](#tailrace-completion).
"""


def settings_page() -> str:
    """What ``tailrace serve --set`` knows."""
    lines = [
        MADE,
        "",
        "# Settings of the node",
        "",
        "`tailrace serve --set NAME=VALUE`, as often as needed; `--set help` prints this list. In Python",
        "`tailrace.testing.node(settings={...})` takes the same names. Everything that a peer can make grow",
        "has its limit here.",
        "",
        "| name | kind | default | what it is |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{one.name}` | {one.kind.name.replace('|', ' or ')} "
        f"| {one.kind.show(one.default)} | {one.about} |"
        for one in table()
    ]
    return "\n".join(lines) + "\n"


def spark_options_page() -> str:
    """The options of the Spark source."""
    lines = [
        MADE,
        "",
        "# Options of the Spark source",
        "",
        'For `spark.read.format("tailrace")` and `spark.readStream.format("tailrace")`; upper and lower case',
        "are the same. An option that is not here is an error that names the nearest one. See",
        "[the source](spark.md).",
        "",
        "| option | default | what it is |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{one.name}` | {_value(one.default)} | {one.about.replace('|', chr(92) + '|')} |"
        for one in OPTIONS
        if one.about
    ]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "none" if value is None else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


# the state machines


def states_page() -> str:
    """Every machine of `protocol/states.py`, drawn from its table."""
    lines = [
        MADE,
        "",
        "# States and transitions",
        "",
        "Every machine of `src/tailrace/protocol/states.py`, drawn from its table. What is not drawn",
        "can't happen: it is a protocol error of the peer, or a bug.",
    ]
    for about, transitions in MACHINES.items():
        states = list(type(next(iter(transitions))[0]))
        place = {state: f"s{number}" for number, state in enumerate(states)}
        lines += ["", f"## {about}", "", "```mermaid", "stateDiagram-v2"]
        lines += [f'    state "{state.value}" as {place[state]}' for state in states]
        lines.append(f"    [*] --> {place[states[0]]}")
        lines += [
            f"    {place[state]} --> {place[target]}: {happened.value}"
            for (state, happened), target in transitions.items()
        ]
        lines.append("```")
    return "\n".join(lines) + "\n"


# what the older dialects are tested with


def coverage_page() -> str:
    """Every message and flag of TAP and UPR, where it is, and who sends it over a real socket."""
    lines = [
        MADE,
        "",
        "# Messages and flags of TAP and UPR, and their tests",
        "",
        "Each row is a message, flag or control code of the protocol documents: what declares it, the",
        "modules of `src/tailrace` that act on it, and the tests that send or receive it over a real socket:",
        "those of the node, and those of our reader. The rows come from the declarations, the tests from",
        "their marks; a row without a test of either fails the suite, unless it says why.",
        "",
        "| message or flag | declared as | implemented in | tests of the node | tests of the reader |",
        "|---|---|---|---|---|",
    ]
    for row in rows():
        places = ", ".join(f"`{one}`" for one in implemented(row.declared))
        tests, readers = (
            "<br>".join(f"`{one.removeprefix('tests/')}`" for one in some)
            for some in (row.node_tests, row.reader_tests)
        )
        lines.append(f"| {row.id} | `{row.declared}` | {places} | {tests} | {readers or row.why_no_reader} |")
    return "\n".join(lines) + "\n"


# all of them


def pages() -> dict[Path, str]:
    """Every made page and what it should be."""
    folder = ROOT / "docs"
    found = {
        folder / "cli.md": cli_page(),
        folder / "settings.md": settings_page(),
        folder / "spark-options.md": spark_options_page(),
        folder / "dialect-coverage.md": coverage_page(),
        folder / "protocol" / "README.md": index_page(),
        folder / "protocol" / "codes.md": codes_page(),
        folder / "protocol" / "states.md": states_page(),
    }
    for name, title, dialect, modules, about in GROUPS:
        messages = messages_of(dialect, modules)
        found[folder / "protocol" / f"{name}.md"] = protocol_page(title, about, dialect, messages)
    return found


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not up to date, run: make docs", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    print(f"{len(pages())} pages, {len(stale)} of them new or changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
