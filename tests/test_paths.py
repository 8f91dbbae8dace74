"""Paths and URIs as people write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace import paths
from tailrace.errors import UsageError

NAMES = [
    "plain",
    "with space",
    "größe",
    "名前",
    "a#b",
    "a?b",
    "a%41b",
    "a%b",
    "a&b=c",
    "-",
    "a'b\"c",
    "new\nline",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_taken_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = tmp_path / name
    for given in (
        wanted,
        str(wanted),
        name,
        f"./{name}",
        f"{wanted}/",
        wanted.as_uri(),
        f"{wanted.as_uri()}/",
    ):
        assert paths.directory(given) == wanted
        assert paths.location(given).path == wanted
    for given in (str(wanted), name, wanted.as_uri(), f"file://localhost{wanted.as_uri()[7:]}"):
        assert paths.file(given) == wanted
    place = paths.location(name)
    assert place.is_local
    assert paths.location(place.uri) == place


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "to-file").symlink_to("real/file")
    assert paths.directory(tmp_path / "link") == tmp_path / "real"
    assert paths.file(tmp_path / "link" / "new") == tmp_path / "real" / "new"
    assert paths.file(tmp_path / "to-file") == tmp_path / "real" / "file"
    (tmp_path / "circle").symlink_to("circle")
    checks: tuple[Callable[[Path], object], ...] = (paths.file, paths.directory, paths.location)
    for check in checks:
        with pytest.raises(UsageError, match="circle"):
            check(tmp_path / "circle")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("a\udcffb", "not Unicode"),
        ("x" * 5000, "5000 characters"),
        ("file://host/x", "another machine"),
        ("file://", "another machine"),
        ("file:///a#b", "%23"),
        ("file:///a?b", "%3F"),
        ("file:///%ff", "not UTF-8"),
        ("file:///%00", "NUL"),
        ("http://host/x", "machine"),
        ("s3://bucket/x", "machine"),
    ],
)
def test_what_is_no_local_path(given: str, reason: str) -> None:
    for check in (paths.file, paths.directory):
        with pytest.raises(UsageError, match=reason) as error:
            check(given, "the state file")
        assert str(error.value).startswith("the state file")


def test_files_and_directories_are_not_each_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a folder"):
        paths.directory(tmp_path / "file")
    with pytest.raises(UsageError, match="below something"):
        paths.directory(tmp_path / "file" / "x")
    with pytest.raises(UsageError, match="is a directory"):
        paths.file(tmp_path)
    for given in (f"{tmp_path}/new/", f"{tmp_path}/.."):
        with pytest.raises(UsageError, match="name of a directory"):
            paths.file(given)
    with pytest.raises(UsageError, match="no directory"):
        paths.file(tmp_path / "nowhere" / "x")
    for check in (paths.file, paths.directory):
        with pytest.raises(UsageError, match="is not there"):
            check(tmp_path / "nothing", must_exist=True)


def test_what_is_open_already_keeps_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    assert paths.file(tmp_path / "link") == tmp_path / "link"
    assert paths.file("/dev/null") == Path("/dev/null")


@pytest.mark.parametrize("scheme", paths.OBJECT_STORES)
def test_object_stores(scheme: str) -> None:
    place = paths.location(f"{scheme.upper()}://bucket/a b/%41/")
    assert str(place) == place.uri == f"{scheme}://bucket/a b/%41"
    assert not place.is_local
    with pytest.raises(UsageError):
        _ = place.path


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("http://host/x", "unknown scheme"),
        ("https://account.example/box?sig=hush", "unknown scheme"),
        ("hdfs://x/y", "unknown scheme"),
        ("s3://bucket?sig=hush", "storage option"),
        ("s3://bucket/a#b", "write %23 or %3F"),
        ("s3://bucket#b", "write %23 or %3F"),
        ("az://box/a?sig=hush", "storage option"),
        ("gs://bucket/a//b", "two slashes"),
    ],
)
def test_what_is_no_location(given: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        paths.location(given)
    assert "hush" not in str(error.value)
