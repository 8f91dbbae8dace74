"""The documentation is true: generated pages are up to date, every example runs, every link leads somewhere.

How a block is run is described in docs/README.md.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tokenize
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from syntax_trees import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
SPEC = sorted((ROOT / "docs" / "spec").glob("*.md"))
PACKAGE = ROOT / "src" / "tailrace"

RUN = {"console", "sh", "bash", "shell", "python", "py"}
NOT_RUN = {"text", "mermaid", "json", "toml", "yaml", "sql", "xml", "go", "java", "javascript", ""}
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One example of a page."""

    line: int
    language: str
    words: frozenset[str]
    text: str

    @property
    def runs(self) -> bool:
        return self.language in RUN and "norun" not in self.words


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for fence in _FENCE.finditer(text):
        language, *words = fence[1].split() or [""]
        line = text.count("\n", 0, fence.start()) + 1
        blocks.append(Block(line, language, frozenset(words), fence[2]))
    return blocks


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# generated pages


def test_made_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(build)
    finally:
        sys.path[:] = before
    for path, text in build.pages().items():
        written = path.read_text() if path.exists() else ""
        changes = list(difflib.unified_diff(written.splitlines(), text.splitlines(), lineterm="", n=0))
        assert written == text, f"run `make docs`; {name(path)}:\n" + "\n".join(changes[:20])


def test_every_message_and_command_has_a_place() -> None:
    from tailrace.cli.main import COMMANDS
    from tailrace.wire.dialect import DIALECTS, KV_MESSAGES

    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "protocol").glob("*.md"))
    for declared in {
        *KV_MESSAGES,
        *(message for dialect in DIALECTS.values() for message in dialect.messages),
    }:
        assert f"\n## {declared.name()}\n" in pages
    commands = (ROOT / "docs" / "cli.md").read_text()
    for command in COMMANDS:
        assert f"\n## tailrace {command}\n" in commands


def test_every_part_of_the_package_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("## Where things are")[1].split("\n## ")[0]
    for path in sorted((ROOT / "src" / "tailrace").iterdir()):
        if path.is_dir() and any(path.glob("*.py")):
            assert f"`{path.name}/" in table, path.name
            assert f"<b>{path.name}</b>" in page or f"<b>{path.name} · " in page or f" · {path.name}" in page
        elif path.suffix == ".py" and not path.name.startswith("__"):
            assert f"`{path.name}`" in table, path.name


def test_all_59_errata_are_listed_once() -> None:
    text = (ROOT / "docs" / "dialects.md").read_text()
    listed = re.findall(r"^\| ([ABTD]\d+) \|", text, re.M)
    wanted = [
        f"{letter}{n}"
        for letter, count in (("A", 20), ("B", 10), ("T", 19), ("D", 10))
        for n in range(1, count + 1)
    ]
    assert listed == wanted and len(wanted) == 59


def test_every_dependency_is_explained() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [
        *project["dependencies"],
        *(requirement for extra in project["optional-dependencies"].values() for requirement in extra),
    ]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    told: dict[str, str] = {}
    for packages, bounds in re.findall(r"^\| ([a-z0-9, -]+) \| (\d[^|]+) \|", page, re.M):
        if ", below " in bounds:
            told[packages] = ">={},<{}".format(*bounds.split(", below "))
            continue
        for package, bound in zip(packages.split(", "), bounds.split(", "), strict=True):
            told[package] = f">={bound}"
    assert told == dict(re.split("(?=>=)", re.sub(r"\[.*?\]", "", name)) for name in names)
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page] == []


def test_decisions_have_a_number_a_state_and_four_parts() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((\d{4}-[\w-]+\.md)\) \| (.+) \|$", (folder / "README.md").read_text(), re.M
    )
    records = sorted(folder.glob("[0-9]*.md"))
    assert [record.name for record in records] == [path for _, _, path, _ in listed]
    for number, (record, (listed_number, title, _, state)) in enumerate(zip(records, listed, strict=True), 1):
        text = record.read_text()
        assert int(listed_number) == number == int(record.name[:4])
        assert text.startswith(f"# {number}. {title}\n\nState: {state}.\n"), record.name
        assert re.findall("^## (.+)$", text, re.M) == ["Context", "Decision", "Why", "Consequences"], (
            record.name
        )


# links


_EXPLICIT_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')


def _headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.M)


def _github_slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _mkdocs_slug(heading: str) -> str:
    """As Python-Markdown's table of contents makes it."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


@functools.cache
def _anchors(page: Path) -> set[str]:
    return {*map(_github_slug, _headings(page)), *_EXPLICIT_ANCHOR.findall(page.read_text())}


@pytest.mark.parametrize("page", SPEC, ids=name)
def test_anchors_of_the_norm_are_the_same_everywhere(page: Path) -> None:
    """Code cites them: they must be unique, and the same on GitHub and on a site made by MkDocs."""
    headings = _headings(page)
    assert list(map(_github_slug, headings)) == list(map(_mkdocs_slug, headings))
    anchors = [*map(_github_slug, headings), *_EXPLICIT_ANCHOR.findall(page.read_text())]
    assert sorted({anchor for anchor in anchors if anchors.count(anchor) > 1}) == []
    assert all(re.fullmatch("[a-z0-9-]+", anchor) for anchor in anchors)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{name(page)}: {target}"
        if anchor and other.suffix == ".md":
            assert anchor in _anchors(other), f"{name(page)}: {target}"


@pytest.mark.parametrize("folder", ["docs", "docs/spec", "docs/protocol", "docs/decisions"])
def test_every_page_can_be_found(folder: str) -> None:
    """The first page of a folder leads to all others."""
    index = (ROOT / folder / "README.md").read_text()
    pages = [page.name for page in (ROOT / folder).glob("*.md") if page.name != "README.md"]
    assert [page for page in sorted(pages) if f"]({page}" not in index] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "bench" / "README.md"], ids=name)
def test_modules_that_pages_name_are_there(page: Path) -> None:
    """A module is named by its path in the repository, in `src` or in the package, or by its name alone."""
    for module in re.findall(r"`([\w./-]+\.py)(?:::\w+)?`", page.read_text()):
        places = (ROOT, ROOT / "src", PACKAGE, ROOT / "tests", page.parent)
        assert any((place / module).exists() for place in places) or (
            "/" not in module and any(PACKAGE.rglob(module))
        ), f"{name(page)}: {module}"


# Citations: comments and docstrings name a rule by page and anchor, `docs/spec/dcp.md#flow-control`. Where
# the docstring of a module cites numbered rules, comments may name them by their numbers alone.


SOURCES = sorted(path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
_CITATION = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
_NAMES_A_PAGE = re.compile(r"[\w./-]*\w\.md\b")
_NUMBER_OF_SOMETHING = re.compile(r"\b(?:sections?|steps?|issues?) \d[\d.]*", re.I)
_RULES = re.compile(r"\brules? (\d+(?:(?:, | and )\d+)*)", re.I)


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings of a module, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def wrong_citations(source: str, folder: Path = ROOT) -> list[str]:
    """What a module in a folder cites and nobody can look up."""
    wrong: list[str] = []
    if not any(rule.search(source) for rule in (_NAMES_A_PAGE, _NUMBER_OF_SOMETHING, _RULES)):
        return wrong  # most modules: not worth parsing
    numbered = {
        rule.rpartition("-")[2]
        for citation in _CITATION.findall(ast.get_docstring(parse(source)) or "")
        for rule in _anchors(ROOT / citation.partition("#")[0])
        if re.fullmatch(re.escape(citation.partition("#")[2]) + r"-\d+", rule)
    }
    for line, text in prose(source):
        for citation in _CITATION.findall(text):
            path, _, anchor = citation.partition("#")
            page = ROOT / path
            if not page.is_file() or (anchor and anchor not in _anchors(page)):
                wrong.append(f"{line}: {citation}")
        for page_name in _NAMES_A_PAGE.findall(text):
            if not any((place / page_name).is_file() for place in (ROOT, folder)):
                wrong.append(f"{line}: {page_name} is no page of the repository")
        if "RFC" not in text:
            wrong += [f"{line}: {number} of what?" for number in _NUMBER_OF_SOMETHING.findall(text)]
        for rules in _RULES.findall(text):
            wrong += [
                f"{line}: rule {number}" for number in re.findall(r"\d+", rules) if number not in numbered
            ]
    return wrong


def test_citations_lead_somewhere() -> None:
    assert [
        f"{name(path)}:{wrong}"
        for path in SOURCES
        for wrong in wrong_citations(path.read_text(), path.parent)
    ] == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('"""As docs/spec/dcp.md#flow-control says."""\n# docs/spec/tap.md, RFC 5802 section 5', []),
        ("# docs/spec/dcp.md#flow-manners", ["1: docs/spec/dcp.md#flow-manners"]),
        ("# dcp.md says so", ["1: dcp.md is no page of the repository"]),
        ('x = 1\n"""Section 5.2 of something."""', ["2: Section 5.2 of what?"]),
        ("# as step 3 asks", ["1: step 3 of what?"]),
        ("# the limit of issue 2", ["1: issue 2 of what?"]),
        ('"""docs/spec/dcp.md#stream-request"""\nx = 1  # rules 6, 7', []),
        ('"""docs/spec/dcp.md#stream-request"""\nx = 1  # rules 6 and 77', ["2: rule 77"]),
        ("x = 1  # rule 6", ["1: rule 6"]),
        ('PAGE = "docs/spec/smtp.md"', []),  # not a citation but data of the code
    ],
)
def test_a_citation_that_leads_nowhere_would_be_noticed(source: str, wrong: list[str]) -> None:
    assert wrong_citations(source) == wrong


@pytest.mark.parametrize("file", sorted((ROOT / "tests" / "vectors").glob("*.json*")), ids=name)
def test_sources_of_golden_packets_lead_somewhere(file: Path) -> None:
    """A rule of the norm or another page of ours, a drawing, or a document of the server with its name."""
    sources = re.findall(r'"source": "([^"]*)"', file.read_text())
    assert sources
    for source in sources:
        if re.match(r"\d{3} L\d+$|kv_engine \w+\.md$|an example of the notes: ", source):
            continue
        citations = _CITATION.findall(source)
        assert citations, source
        for citation in citations:
            path, _, anchor = citation.partition("#")
            assert not anchor or anchor in _anchors(ROOT / path), source
            assert (ROOT / path).is_file(), source


def test_errata_that_the_codec_cites_are_listed() -> None:
    listed = set(re.findall(r"^\| ([ABTD]\d+) \|", (ROOT / "docs" / "dialects.md").read_text(), re.M))
    cited = {
        erratum
        for path in (PACKAGE / "wire").glob("*.py")
        for _, text in prose(path.read_text())
        for erratum in re.findall(r"\b([ABTD]\d{1,2})\b", text)
    }
    assert len(cited) > 20 and cited <= listed


# examples


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where examples run: `tailrace` and `python` are those under test."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, arguments in (("tailrace", "-m tailrace "), ("python", ""), ("python3", "")):
        script = programs / program
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
        script.chmod(0o755)
    (tmp_path / "work").mkdir()
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "REPO": str(ROOT),
        "PYTHONPATH": str(ROOT / "src"),
        "NO_COLOR": "1",
    }


@contextlib.contextmanager
def running_node(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """A node in memory; its connection string."""
    ready = folder / "node.json"
    command = ["tailrace", "serve", "--memory", "--port", "0", "--vbuckets", "16", "--ready-file", str(ready)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            while not ready.exists():
                assert process.poll() is None, "the node ended before it was ready"
                time.sleep(0.02)
            yield f"couchbase://127.0.0.1:{json.loads(ready.read_text())['port']}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def _expected(output: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, output.split("…"))), re.S)


def run_block(block: Block, folder: Path, environment: dict[str, str]) -> None:
    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
            check=False,
        )

    if block.language in ("python", "py"):
        done = run([sys.executable, "-W", "error", "-c", block.text])
        assert done.returncode == 0, done.stdout
    elif block.language == "console":
        for step in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
            command, _, output = step.partition("\n")
            done = run(["bash", "-c", command])
            assert _expected(output).fullmatch(done.stdout), f"$ {command}\n{done.stdout}"
    else:
        done = run(["bash", "-euo", "pipefail", "-c", block.text])
        assert done.returncode == 0, done.stdout


def with_examples() -> Iterator[ParameterSet]:
    """Pages with examples that run; those that start a Spark or a cluster are slow."""
    for page in PAGES:
        text = "\n".join(block.text for block in blocks(page) if block.runs)
        is_slow = re.search("tailrace (mirror|verify|cluster start)", text)
        if text:
            yield pytest.param(page, id=name(page), marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("page", list(with_examples()))
def test_examples_run(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "work"
    with contextlib.ExitStack() as stack:
        for block in blocks(page):
            if not block.runs:
                continue
            if "node" in block.words and "NODE" not in environment:
                environment["NODE"] = stack.enter_context(running_node(tmp_path, environment))
            try:
                run_block(block, folder, environment)
            except AssertionError as error:
                raise AssertionError(f"{name(page)}, line {block.line}: {error}") from None


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        assert block.language in RUN | NOT_RUN, f"{name(page)}, line {block.line}: ```{block.language}"
        assert block.words <= {"node", "norun"}, f"{name(page)}, line {block.line}: {set(block.words)}"
        if block.language == "console" and block.runs:
            assert block.text.startswith("$ "), f"{name(page)}, line {block.line}: no command"


def test_an_example_that_is_wrong_would_be_noticed(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "work"
    right = Block(1, "console", frozenset(), "$ echo hello; echo you\nhello\ny…\n$ true\n")
    run_block(right, folder, environment)
    for language, text in (
        ("console", "$ echo hello\nhello you\n"),
        ("console", "$ echo hello\n"),
        ("sh", "false\ntrue\n"),
        ("python", "assert 1 == 2"),
    ):
        with pytest.raises(AssertionError):
            run_block(Block(1, language, frozenset(), text), folder, environment)


def test_a_node_is_there_for_examples_that_need_one(tmp_path: Path, environment: dict[str, str]) -> None:
    with running_node(tmp_path, environment) as url:
        port = int(url.rsplit(":", 1)[1])
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).close()"
        run_block(Block(1, "python", frozenset({"node"}), code), tmp_path / "work", environment)
