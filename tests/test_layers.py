"""The layers hold: who imports whom, and who may touch sockets, clocks, dice, files and threads.

The table in CONTRIBUTING.md says who may import whom. The other rules are here; a module that breaks one has
a line with its reason, and a line that is no longer needed is an error too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
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


def imports_of(node: ast.AST, module: str) -> dict[str, str]:
    """What a statement or a call imports, as dotted names, by the names that these get in the module."""
    package = ["tailrace", *module.split("/")]

    def absolute(level: int, name: str) -> str:
        return ".".join([*package[: -level or -len(package)], *filter(None, [name])])

    match node:
        case ast.Import(names=aliases):
            return {alias.asname or alias.name: alias.name for alias in aliases}
        case ast.ImportFrom(names=aliases):
            base = absolute(node.level, node.module or "")
            return {alias.asname or alias.name: f"{base}.{alias.name}" for alias in aliases}
        case ast.Call(
            func=ast.Attribute(attr=called) | ast.Name(id=called), args=[ast.Constant(value=str(name)), *_]
        ):
            if called in ("import_module", "__import__"):
                return {"": absolute(len(name) - len(name.lstrip(".")), name.lstrip("."))}
    return {}


@functools.cache
def imports(module: str, code: str) -> list[tuple[str, bool]]:
    """What a module imports, as a dotted name, and whether only the type checker sees it."""
    tree = parse(code)
    checked_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return [
        (name, id(node) in checked_only)
        for node in ast.walk(tree)
        for name in imports_of(node, module).values()
    ]


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
    own_part = part(module)
    for name, checked_only in imports(module, code):
        words = [*name.split("."), "*"]
        if words[0] != "tailrace" or words[1] in (own_part, "__version__"):
            continue
        if words[1] not in (for_types if checked_only else at_run_time)[own_part]:
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
        ("client/aio.py", "from .. import spark as files"),
        ("client/aio.py", "import tailrace as files"),
        ("client/aio.py", "from tailrace import *"),
        ("web/http.py", "if not TYPE_CHECKING:\n    from ..client.aio import Source"),
        ("web/http.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..client.aio import Source"),
        ("client/aio.py", "importlib.import_module('tailrace.spark.api')"),
        ("client/aio.py", "import_module('..spark.api', __package__)"),
        ("client/aio.py", "__import__('tailrace.server')"),
    ],
)
def test_a_wrong_import_is_noticed(module: str, code: str) -> None:
    assert len(list(broken_imports(module, code))) == 1


# sockets, clocks, dice, files, threads


def origins(code: str) -> dict[str, str]:
    """What the names of a module are: ``import time as t``, ``from os import replace``, ``f = open``."""
    tree = parse(code)
    known = {"open": "open"}
    for node in ast.walk(tree):
        for name, origin in imports_of(node, "module.py").items():
            first, dot, _ = name.partition(".")
            known[first] = first if dot else origin  # ``import os.path`` binds ``os``
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Attribute() as value):
                text = dotted(value, known)
                if ast.unparse(value).partition(".")[0] in known:
                    known[name] = text
    return known


def dotted(node: ast.AST, known: Mapping[str, str]) -> str:
    """An expression as text, with the names of the modules that its parts are from."""
    match node:
        case ast.Name(id=name):
            return known.get(name, name).removeprefix("builtins.")
        case ast.Attribute(value=value, attr=name):
            return f"{dotted(value, known)}.{name}".removeprefix("builtins.")
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            return f"{dotted(value, known)}.{name}"
        case ast.Call(func=func):
            return f"{dotted(func, known)}()"
        case ast.Subscript(value=value):
            return f"{dotted(value, known)}[]"
    return "?"


@functools.cache
def uses(code: str) -> list[tuple[str, ast.Call | None]]:
    """Every name that a module uses other than as a type, whether it calls it, hands it over or inherits from
    it; and the call.
    """
    tree, known = parse(code), origins(code)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if hint is not None
        for inner in ast.walk(hint)
    }
    return [
        (dotted(node, known), calls.get(id(node)))
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute | ast.Call) and id(node) not in annotations
    ]


def imported(*wanted: str) -> Callable[[str, str], bool]:
    """The module imports one of these, or something in it."""
    starts = tuple(f"{name}." for name in wanted)
    return lambda module, code: any(f"{name}.".startswith(starts) for name, _ in imports(module, code))


@functools.cache
def names(module: str, code: str) -> frozenset[str]:
    """Every name that a module uses or imports."""
    return frozenset(name for name, _ in [*uses(code), *imports(module, code)])


def used(*patterns: str) -> Callable[[str, str], bool]:
    """The module uses something whose name is one of these."""
    pattern = re.compile("|".join(patterns))
    return lambda module, code: any(pattern.fullmatch(name) for name in names(module, code))


def either(*rules: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """One of the rules is broken."""
    return lambda module, code: any(rule(module, code) for rule in rules)


_NOT_FILES = r"(?!(?:.*[._])?(?:files|vbucket)\.\w+$)"
"""What a `files.Files` does is fine; the touch and replace of a vbucket are key-value commands."""
_OPENS = (
    *("open", "io.open", "io.FileIO", "os.fdopen", "codecs.open"),
    *("gzip.open", "gzip.GzipFile", "bz2.open", "bz2.BZ2File", "lzma.open", "lzma.LZMAFile"),
)
_OPENING_METHOD = re.compile(_NOT_FILES + r".*\.(open|memmap|OSFile|memory_map)")
_TO_WRITE = re.compile("[rbt+]*[wax+][rwaxbt+]*")


def opens_to_write(_module: str, code: str) -> bool:
    """The module opens a file in a mode in which it can write, or in one that is not known here."""
    for name, call in uses(code):
        if name not in _OPENS and not _OPENING_METHOD.fullmatch(name):
            continue
        if call is None:  # handed over: who knows for what
            return True
        if name.endswith(".memmap") and not any(word.arg in ("mode", None) for word in call.keywords):
            return True  # numpy's opens to write if it is not told otherwise
        modes = [word.value for word in call.keywords if word.arg in ("mode", None)]
        if name in _OPENS:
            modes += call.args[1:2]
        else:
            modes += [mode for mode in call.args[:2] if isinstance(mode, ast.Constant)]
        for mode in modes:
            if not isinstance(mode, ast.Constant) or _TO_WRITE.fullmatch(str(mode.value)):
                return True
    return False


def replaces_a_file(_module: str, code: str) -> bool:
    """The module uses `Path.replace`, which has one argument, the target.

    The `replace` of a text has two, and is never handed over.
    """
    return any(
        re.fullmatch(_NOT_FILES + r".*\.replace", name)
        and name not in ("dataclasses.replace", "copy.replace")
        and (
            call is None
            or name.endswith("Path.replace")
            or [*(1 for _ in call.args), *(word.arg for word in call.keywords)] in ([1], ["target"])
        )
        for name, call in uses(code)
    )


RULES: dict[str, Callable[[str, str], bool]] = {
    "sockets": imported(
        *("socket", "_socket", "asyncio", "select", "selectors", "ssl", "socketserver"),
        *("http", "urllib.request", "ftplib", "smtplib", "xmlrpc", "multiprocessing.connection"),
    ),
    "clocks": either(
        lambda module, code: any(
            re.match(r"time(it)?\b", name) and name != "time.sleep" for name, _ in imports(module, code)
        ),
        used(r"(.*\.)?(datetime|date|Timestamp)\.(now|utcnow|today)", r"os\.times"),
    ),
    "sleeping": imported("time.sleep"),
    "dice": either(
        lambda module, code: any(name in ("random.Random", "random.SystemRandom") for name, _ in uses(code)),
        used(
            r"random\.([a-z_]\w*|\*)",
            r"uuid\.uuid[14678]",
            r"os\.(urandom|getrandom)",
            r"secrets\..*",
            r"numpy\.random\..*",
        ),
    ),
    "writes": either(
        used(
            r"os\.(open|replace|renames?|remove|removedirs|unlink|rmdir|mkdir|makedirs|mkfifo|mknod)",
            r"os\.(link|symlink|truncate|ftruncate|fsync|fdatasync|utime|[fl]?chmod|[fl]?chown)",
            r"os\.(p?writev?|sendfile|copy_file_range|splice|posix_fallocate|setxattr|removexattr)",
            r"filelock\.\w*Lock",
            r"shutil\.(rmtree|move|copy\w*|chown|make_archive|unpack_archive)",
            r"tempfile\..*",
            r"numpy\.save\w*|pyarrow\.(output_stream|create_memory_map)|.*\.open_(output|append)_stream",
            r"logging\.(FileHandler|handlers\..*)",
            r"(sqlite3|dbm|shelve|zipfile|tarfile)\..*",
            _NOT_FILES + r".*\.(write_text|write_bytes|mkdir|touch|unlink|rename|rmdir|l?chmod)",
            _NOT_FILES + r".*\.(symlink_to|hardlink_to|tofile|to_parquet|to_csv|write_parquet|write_csv)",
        ),
        opens_to_write,
        replaces_a_file,
    ),
    "threads": used(
        r"threading\.(Thread|Timer)",
        r"_thread\..*",
        r"(.*\.)?\w*PoolExecutor",
        r".*\.run_in_executor",
        r"(.*\.)?to_thread",
    ),
    "processes": either(
        imported("subprocess", "multiprocessing", "pty"),
        used(
            r"os\.(fork\w*|exec[lv]\w*|spawn\w*|posix_spawnp?|popen|system|startfile)",
            r"(.*\.)?(create_)?subprocess_\w+",
            r"(.*\.)?ProcessPoolExecutor",
        ),
    ),
    "C calls": imported("ctypes", "cffi"),
    "imports by name": used(
        r"importlib\.(import_module|__import__|util|machinery|reload).*",
        "__import__",
        r"runpy\..*",
        r"pkgutil\.resolve_name|pydoc\.locate",
        "exec",
        "eval",
    ),
}


ROOMS = {
    "sockets": ["server/", "client/", "web/", "cluster/", "testing/", "cli/serve.py"],
    "clocks": ["clock.py"],
    "sleeping": ["cli/", "client/", "cluster/", "testing/"],
    "dice": ["rng.py"],
    "writes": ["files.py"],
    "threads": [],
    "processes": [],
    "C calls": [],
    "imports by name": [],
}
"""Where a thing belongs: a folder, or a module."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "sockets": {
        "cli/http_options.py": "what a certificate is handed over as",
        "cli/common.py": "runs the coroutine of a command, and ends it on a signal",
        "cli/main.py": "asks whether the reader of our output has gone",
        "cli/replay.py": "waits until it is stopped; client/replay.py has the sockets",
        "cli/signals.py": "the loop that a signal is told to",
        "store/merge_process.py": "waits for room in the pipe to its process",
    },
    "clocks": {},
    "sleeping": {},
    "dice": {"client/load.py": "numpy's generator, with a seed from rng.py"},
    "writes": {
        "cli/main.py": "the null device in place of a closed stdout",
        "spark/source/scratch.py": "folders that go with the process that made them",
        "spark/source/spool_place.py": "segments that Spark has done with; a kill leaves them to scratch.py",
        "spark/spark_session.py": "the folder of the Java shim",
        "store/merge_process.py": "an order for its process, into a pipe",
        "testing/faulty_files.py": "hands what it does not refuse to the files that it stands for",
    },
    "threads": {
        "cli/demo.py": "the writer and the sampler of a demonstration",
        "cli/main.py": "a signal that comes again a moment later",
        "cli/serve.py": "what is derived of new passwords, beside the loop",
        "client/aio.py": "a lookup of names, beside the loop",
        "client/autosave.py": "a state's own I/O, beside the loop",
        "client/blocking.py": "the loop of a blocking source",
        "client/groups/reader.py": "the store of a group, beside the loop",
        "server/aio.py": "jobs of the store, which may wait for the disk",
        "spark/rounds/handle.py": "the loop of a mirror",
        "spark/rounds/housekeeping.py": "a compaction beside the rounds",
        "spark/source/stream.py": "a watcher that ends the reader's process when Spark has gone",
        "table/delta/log.py": "log files of an object store, many at once",
        "testing/running.py": "the loop of a node inside a test",
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
        "spark/worker_python.py": "becomes the interpreter of a worker",
        "store/merge_process.py": "merges in a process of their own",
    },
    "C calls": {
        "cluster/member.py": "has Linux end a node whose coordinator has gone",
        "large_bytes.py": "makes large bytes objects without a second copy",
        "server/allocator.py": "settings of the C library's allocator",
    },
    "imports by name": {
        "__init__.py": "public names, when they are first used",
        "cli/main.py": "a command, when it is run",
        "spark/__init__.py": "public names, when they are first used",
        "spark/spark_session.py": "asks for packages that Spark needs",
    },
}
"""Which modules may break a rule, and why."""


def breaks(rule: str, texts: dict[str, str]) -> set[str]:
    """The modules that do what a rule is about, outside its room."""
    return {
        module
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
        ("sockets", "import asyncio as a"),
        ("sockets", "from socket import create_connection"),
        ("sockets", "importlib.import_module('asyncio.streams')"),
        ("sockets", "from urllib import request"),
        ("sockets", "import select"),
        ("clocks", "import time\ntime.sleep(1)"),
        ("clocks", "import time as t"),
        ("clocks", "from time import monotonic"),
        ("clocks", "__import__('time').time()"),
        ("clocks", "import datetime\ndatetime.datetime.now()"),
        ("clocks", "from datetime import datetime as d\nd.now()"),
        ("clocks", "from datetime import date\ncall(date.today)"),
        ("clocks", "import pandas\npandas.Timestamp.now()"),
        ("clocks", "import os\nos.times()"),
        ("sleeping", "from time import sleep"),
        ("sleeping", "from time import sleep as rest"),
        ("dice", "import random\nrandom.Random(7)"),
        ("dice", "from random import Random as R\nR(7)"),
        ("dice", "from random import choice as pick"),
        ("dice", "import random\nfield(default_factory=random.Random)"),
        ("dice", "from random import Random\nclass Dice(Random): pass"),
        ("dice", "import numpy as n\nn.random.default_rng()"),
        ("dice", "import uuid\nname = uuid.uuid4().hex"),
        ("dice", "import uuid\nuuid.uuid7()"),
        ("dice", "from random import *\nrandom()"),
        ("dice", "import secrets\nsecrets.token_bytes(8)"),
        ("dice", "from os import urandom as u\nu(8)"),
        ("writes", "Path('x').write_text('y')"),
        ("writes", "Path('x').touch()"),
        ("writes", "path.replace(other)"),
        ("writes", "path.rename(other)"),
        ("writes", "call(path.unlink)"),
        ("writes", "open(path, 'wb')"),
        ("writes", "open(path, mode)"),
        ("writes", "import io\nio.open(path, 'x')"),
        ("writes", "import gzip as g\ng.open(path, 'wb')"),
        ("writes", "import builtins\nbuiltins.open(path, 'a')"),
        ("writes", "f = open\nf(path, 'wb')"),
        ("writes", "call(open, path, 'wb')"),
        ("writes", "path.open(mode='a')"),
        ("writes", "path.open(mode=mode)"),
        ("writes", "open(path, **how)"),
        ("writes", "call(path.open, 'wb')"),
        ("writes", "import io\ncall(io.open, path, 'wb')"),
        ("writes", "import gzip\ngzip.GzipFile(path, 'wb')"),
        ("writes", "call(path.replace, other)"),
        ("writes", "path.replace(target=other)"),
        ("writes", "for inner in path.iterdir():\n    inner.unlink()"),
        ("writes", "from pathlib import Path\nPath.replace(a, b)"),
        ("writes", "from ..files import scratch_folder\nscratch_folder().joinpath('y').open('wb')"),
        ("writes", "from ..files import temporary_folder as t\nt('x').joinpath('y').write_text('z')"),
        ("writes", "import os\nos.replace(a, b)"),
        ("writes", "from os import replace as r\nr(a, b)"),
        ("writes", "import os\nmove = os.rename"),
        ("writes", "import os\ngetattr(os, 'remove')(a)"),
        ("writes", "import os\nos.open(path, flags)"),
        ("writes", "import os\nos.write(fd, data)"),
        ("writes", "import os\nos.pwritev(fd, parts, 0)"),
        ("writes", "import os\nos.fchmod(fd, 0o600)"),
        ("writes", "import os\nos.sendfile(fd, other, 0, 9)"),
        ("writes", "from filelock import FileLock\nFileLock(path)"),
        ("writes", "import numpy\nnumpy.memmap(path, numpy.uint8)"),
        ("writes", "from pyarrow import fs\nfs.LocalFileSystem().open_output_stream(path)"),
        ("writes", "frame.to_parquet(path)"),
        ("writes", "from shutil import copyfile"),
        ("writes", "import shutil\nshutil.move(a, b)"),
        ("writes", "from tempfile import TemporaryFile as T\nT()"),
        ("writes", "(directory / 'x').unlink(missing_ok=True)"),
        ("threads", "import threading\nthreading.Thread(target=f).start()"),
        ("threads", "import threading\nclass Loop(threading.Thread): pass"),
        ("threads", "from threading import Thread as T\nT(target=f)"),
        ("threads", "from concurrent.futures import ThreadPoolExecutor as P\nP()"),
        ("threads", "loop.run_in_executor(None, f)"),
        ("processes", "from subprocess import Popen"),
        ("processes", "import os\nos.fork()"),
        ("processes", "import os as o\no.system(command)"),
        ("processes", "from concurrent.futures import ProcessPoolExecutor"),
        ("processes", "await_(asyncio.create_subprocess_exec('ls'))"),
        ("imports by name", "import importlib\nimportlib.import_module(name)"),
        ("imports by name", "from importlib import import_module as load\nload(name)"),
        ("imports by name", "exec('import socket')"),
        ("imports by name", "import pkgutil\npkgutil.resolve_name(name)"),
        ("C calls", "import ctypes\nctypes.CDLL(None).fork()"),
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
            "self._files.unlink(path)\nfiles.open(path)\npath.open('rb')\nopen(path)\nx.replace(a, b)\n"
            "import numpy\nnumpy.memmap(path, mode='r')",
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
    assert users == {"table/delta/delta_rs.py"}


def test_only_the_opening_chooses_a_format() -> None:
    """... and the export, whose format users choose."""
    users = {
        module
        for module, code in modules().items()
        for name, _ in imports(module, code)
        if name.startswith("tailrace.table.delta") and not module.startswith("table/delta/")
    }
    assert users == {"table/exporting.py", "table/opening.py"}
