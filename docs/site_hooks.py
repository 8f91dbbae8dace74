"""Hooks for the site, named in `mkdocs.yml`.

The pages are also read in a repository, and their examples are run by a test. So a code block says more than
its language, a link may lead to a file that is not part of the site, and a diagram is Mermaid, which
repositories show as a picture: for the site it is drawn here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from drawing import draw

_FENCE = re.compile(r"^(\s*)(```+)(\w+) [\w ]+$", re.MULTILINE)
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:tests|examples|src|bench|[A-Z]+\.md)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page as the site shows it."""
    drawn = _DIAGRAM.sub(lambda match: f"<figure>\n{draw(match[1])}\n</figure>", markdown)
    return _OUTSIDE.sub(r"\1", _FENCE.sub(r"\1\2\3", drawn))


def on_config(config: Any) -> None:
    """Replace a folder in the navigation by its pages, the first one first."""
    folder = Path(config["docs_dir"])
    config["nav"] = [_expanded(entry, folder) for entry in config["nav"]]


def _expanded(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(member, folder) for title, member in entry.items()}
    if isinstance(entry, list):
        return [_expanded(member, folder) for member in entry]
    if not entry.endswith("/"):
        return entry
    pages = sorted((folder / entry).glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
    return [str(page.relative_to(folder)) for page in pages]
