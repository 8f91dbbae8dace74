"""Python still imports from archives on the path after some of its finders were dropped."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from zipimport import zipimporter

import pytest

from tailrace.spark.archived_modules import forget_packages_in_archives

NAME = "packed_for_this_test"


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "packed.zip"
    pack(path, "one", "two")
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))
    for place in [place for place in sys.path_importer_cache if place.startswith(str(path))]:
        del sys.path_importer_cache[place]
    for module in [module for module in sys.modules if module.partition(".")[0] == NAME]:
        del sys.modules[module]


def pack(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{NAME}/__init__.py", "")
        for name in names:
            file.writestr(f"{NAME}/{name}.py", f"word = {name!r}")


def word(name: str) -> str:
    return str(importlib.import_module(f"{NAME}.{name}").word)


def finders(path: Path) -> list[str]:
    own = (importer for place, importer in sys.path_importer_cache.items() if place.startswith(str(path)))
    return [importer.prefix for importer in own if isinstance(importer, zipimporter)]


def test_only_the_archive_itself_is_read_again(archive: Path) -> None:
    assert word("one") == "one"
    assert sorted(finders(archive)) == ["", f"{NAME}/"]
    forget_packages_in_archives()
    assert finders(archive) == [""]


def test_its_modules_are_found_as_before(archive: Path) -> None:
    assert word("one") == "one"
    forget_packages_in_archives()
    assert word("two") == "two"


def test_what_was_added_is_found_after_python_was_told(archive: Path) -> None:
    assert word("one") == "one"
    forget_packages_in_archives()
    pack(archive, "one", "two", "three")
    importlib.invalidate_caches()
    assert word("three") == "three"
