"""The layers hold: who imports whom, and who may touch sockets, clocks, dice, files and threads.

The table in CONTRIBUTING.md says who may import whom. The other rules are here; a module that breaks one has
a line with its reason, and a line that is no longer needed is an error too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syntax_trees import parse

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tailrace"
pytestmark = pytest.mark.xdist_group("layers")  # each module is parsed once


@functools.cache
def modules() -> dict[str, str]:
    """The text of every module of the package by its path."""
    return {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def part(module: str) -> str:
    """The folder of a module, or the module itself if it is in none."""
    return module.partition("/")[0].removesuffix(".py")


# imports


@functools.cache
def imports(module: str, code: str) -> list[tuple[str, bool]]:
    """What a module imports, as a dotted name, and whether only the type checker sees it."""
    tree = parse(code)
    imported_names: list[tuple[str, bool]] = []
    checked_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = ["tailrace", *module.split("/")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: -node.level]) + "." if node.level else ""
            base = f"{start}{node.module or ''}".strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        imported_names += [(name, id(node) in checked_only) for name in names]
    return imported_names


@functools.cache
def calls(code: str) -> list[str]:
    """What a module calls, as text."""
    return [ast.unparse(node) for node in ast.walk(parse(code)) if isinstance(node, ast.Call)]


@functools.cache
def allowed() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The table of CONTRIBUTING.md: what each part may import, and what only for types."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Layers")[1].split("\n## ")[0]
    at_run_time: dict[str, set[str]] = {}
    for_types: dict[str, set[str]] = {}
    for line in table.splitlines():
        cells = line.strip("|").split("|")
        if len(cells) != 4 or "`" not in cells[0]:
            continue
        parts, may, types = (set(re.findall(r"`(\w+)`", cell)) for cell in cells[:3])
        for name in parts:
            at_run_time[name] = may | ({"errors"} if name != "errors" else set())
            for_types[name] = at_run_time[name] | types
    return at_run_time, for_types


def broken_imports(module: str, code: str) -> Iterator[str]:
    """The imports of a module that the table does not allow."""
    at_run_time, for_types = allowed()
    mine = part(module)
    for name, checked_only in imports(module, code):
        words = name.split(".")
        if words[0] != "tailrace" or words[1] in (mine, "__version__"):
            continue
        if words[1] not in (for_types if checked_only else at_run_time)[mine]:
            yield f"{module} imports {name}"


def test_every_part_is_in_the_table() -> None:
    assert set(allowed()[0]) == {part(module) for module in modules()}


def test_nothing_is_allowed_that_nobody_needs() -> None:
    """Otherwise the table would not show how data flows. Parts in one row share what it allows."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Layers")[1].split("\n## ")[0]
    needed: dict[str, set[str]] = {name: set() for name in allowed()[0]}
    for module, code in modules().items():
        names = [name.split(".")[1] for name, _ in imports(module, code) if name.startswith("tailrace.")]
        needed[part(module)].update(names)
    for row in (row.split("|") for row in table.splitlines() if row.startswith("| `")):
        parts, may, types = (set(re.findall(r"`(\w+)`", cell)) for cell in row[1:4])
        used = set().union(*(needed[name] for name in parts if name in needed))
        assert (may | types) - used == set(), parts


def test_imports_follow_the_layers() -> None:
    assert [line for module, code in modules().items() for line in broken_imports(module, code)] == []


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("wire/dcp.py", "from ..protocol import states"),
        ("protocol/dcp/reader.py", "from ...store.base import Bucket"),
        ("store/engine.py", "def late():\n    import tailrace.server.node"),
        ("columns/batch.py", "if TYPE_CHECKING:\n    from ..client.aio import Source"),
        ("client/aio.py", "from tailrace import spark"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, code: str) -> None:
    assert len(list(broken_imports(module, code))) == 1


# sockets, clocks, dice, files, threads


def imported(*names: str) -> Callable[[str, str], bool]:
    """The module imports one of these, or something in it."""
    return lambda module, code: any(
        name == wanted or name.startswith(f"{wanted}.")
        for name, _ in imports(module, code)
        for wanted in names
    )


def called(*patterns: str) -> Callable[[str, str], bool]:
    """The module calls something whose text matches one of these."""
    pattern = re.compile("|".join(patterns))
    return lambda _module, code: any(pattern.match(call) for call in calls(code))


_NOT_FILES = r"(?!(?:.*[._])?(?:files|inner)\.)"  # calls of a `files.Files` are fine

RULES: dict[str, Callable[[str, str], bool]] = {
    "sockets": imported("socket", "asyncio", "selectors", "ssl", "http", "socketserver", "urllib.request"),
    "clocks": lambda module, code: (
        any(name.startswith("time") and name != "time.sleep" for name, _ in imports(module, code))
        or called(r"(\w+\.)*(datetime|date)\.(now|utcnow|today)\(")(module, code)
    ),
    "sleeping": imported("time.sleep"),
    "dice": called(
        r"(random\.)?(Random|SystemRandom)\(",
        r"random\.(random|randint|randrange|choice|shuffle|seed|uniform|randbytes)\(",
        r"(uuid\.)?uuid[14]\(",
        r"(os\.)?urandom\(",
        r"secrets\.",
        r"(np|numpy)\.random\.",
    ),
    "writes": called(
        _NOT_FILES
        + r".*\b(write_text|write_bytes|mkdir|makedirs|rmtree|unlink|rename|symlink|chmod|mkdtemp)\(",
        r"os\.(open|replace|remove|rmdir|link|truncate|fsync|fdatasync)\(",
        r"(.*\.)?open\((.*, )?(mode=)?'[rb+]*[wax+][wab+]*'",
        r"tempfile\.",
    ),
    "threads": called(
        r"(threading\.)?(Thread|Timer)\(",
        r"(.*\.)?\w*PoolExecutor\(",
        r".*\.run_in_executor\(",
        r".*to_thread\(",
    ),
    "processes": imported("subprocess", "multiprocessing"),
}

ROOMS = {
    "sockets": ["server/", "client/", "web/", "cluster/", "testing/", "cli/serve.py"],
    "clocks": ["clock.py"],
    "sleeping": ["cli/", "client/", "cluster/", "testing/"],
    "dice": ["rng.py"],
    "writes": ["files.py"],
    "threads": [],
    "processes": [],
}
"""Where a thing belongs: a folder, or a module."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "sockets": {
        "cli/http_options.py": "what a certificate is handed over as",
        "cli/common.py": "runs the coroutine of a command, and ends it on a signal",
        "cli/replay.py": "waits until it is stopped; client/replay.py has the sockets",
        "cli/signals.py": "the loop that a signal is told to",
    },
    "clocks": {},
    "sleeping": {},
    "dice": {"client/load.py": "numpy's generator, with a seed from rng.py"},
    "writes": {
        "cli/main.py": "the null device in place of a closed stdout",
        "spark/scratch.py": "folders that go with the process that made them",
        "spark/spool_place.py": "segments that Spark has done with; a kill leaves them to scratch.py",
        "spark/spark_session.py": "the folder of the Java shim",
    },
    "threads": {
        "cli/demo.py": "the writer and the sampler of a demonstration",
        "cli/main.py": "a signal that comes again a moment later",
        "cli/serve.py": "what is derived of new passwords, beside the loop",
        "client/aio.py": "a lookup of names, beside the loop",
        "client/autosave.py": "a state's own I/O, beside the loop",
        "client/blocking.py": "the loop of a blocking source",
        "client/reader.py": "the store of a group, beside the loop",
        "server/aio.py": "jobs of the store, which may wait for the disk",
        "spark/handle.py": "the loop of a mirror",
        "spark/housekeeping.py": "a compaction beside the rounds",
        "spark/stream.py": "a watcher that ends the reader's process when Spark has gone",
        "table/log.py": "log files of an object store, many at once",
        "testing/running.py": "the loop of a node inside of a test",
        "web/http_thread.py": "answers while a command does its work",
        "web/node.py": "the text of many metrics, beside the loop",
    },
    "processes": {
        "cli/bench.py": "each measurement is a process",
        "cli/cluster.py": "the coordinator",
        "cli/demo.py": "the node of a demonstration",
        "cluster/member.py": "the nodes of a cluster",
        "spark/java_process.py": "asks how Spark's Java ended",
        "spark/spark_session.py": "asks Java for its version",
        "store/merge_process.py": "merges in a process of their own",
    },
}
"""Which modules may break a rule, and why: by part and name, wherever they are inside the part."""


def breaks(rule: str, texts: dict[str, str]) -> set[str]:
    """The modules that do what a rule is about, outside its room."""
    return {
        f"{part(module)}/{module.rpartition('/')[2]}" if "/" in module else module
        for module, code in texts.items()
        if not any(module.startswith(room) for room in ROOMS[rule]) and RULES[rule](module, code)
    }


@pytest.mark.parametrize("rule", RULES)
def test_it_stays_in_its_room(rule: str) -> None:
    assert breaks(rule, modules()) == set(EXCEPTIONS[rule])


def test_every_exception_has_a_reason() -> None:
    assert all(len(reason) > 10 for reasons in EXCEPTIONS.values() for reason in reasons.values())


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("sockets", "import asyncio"),
        ("sockets", "from socket import create_connection"),
        ("clocks", "import time\ntime.sleep(1)"),
        ("clocks", "from time import monotonic"),
        ("clocks", "import datetime\ndatetime.datetime.now()"),
        ("sleeping", "from time import sleep"),
        ("dice", "import random\nrandom.Random(7)"),
        ("dice", "name = uuid.uuid4().hex"),
        ("writes", "Path('x').write_text('y')"),
        ("writes", "open(path, 'wb')"),
        ("writes", "path.open(mode='a')"),
        ("writes", "os.replace(a, b)"),
        ("writes", "(directory / 'x').unlink(missing_ok=True)"),
        ("threads", "threading.Thread(target=f).start()"),
        ("threads", "loop.run_in_executor(None, f)"),
        ("processes", "from subprocess import Popen"),
    ],
)
def test_a_break_is_noticed(rule: str, code: str) -> None:
    assert breaks(rule, {"wire/header.py": code}) == {"wire/header.py"}


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("clocks", "from time import sleep"),
        ("dice", "def roll(rng: random.Random) -> int:\n    return rng.randrange(6)"),
        (
            "writes",
            "self._files.unlink(path)\nfiles.open(path)\npath.open('rb')\nopen(path)\nx.replace(a, b)",
        ),
    ],
)
def test_what_is_allowed_is_not_noticed(rule: str, code: str) -> None:
    assert breaks(rule, {"wire/header.py": code}) == set()


def test_delta_rs_is_named_in_one_module() -> None:
    """A second format of tables is a second folder; nothing else knows the libraries of the first."""
    users = {
        module
        for module, code in modules().items()
        for name, _ in imports(module, code)
        if name.partition(".")[0] == "deltalake"
    }
    assert users == {"table/delta/engine.py"}


def test_only_the_opening_chooses_a_format() -> None:
    """... and the export, whose format users choose."""
    users = {
        module
        for module, code in modules().items()
        for name, _ in imports(module, code)
        if name.startswith("tailrace.table.delta") and not module.startswith("table/delta/")
    }
    assert users == {"table/exporting.py", "table/opening.py"}
