"""Paths and URIs as users write them, checked once and by the same rules everywhere.

The rules:

* A path is taken literally. A space, a letter outside ASCII, ``#``, ``?`` and ``%41`` are characters of the
  name; nothing is decoded, and ``~`` is left to the shell.
* ``file:///path`` is a URI, so ``%41`` in it is ``A``. A bare ``#`` or ``?`` would begin a fragment or a
  query and is refused, as is a host other than ``localhost``. ``file:path`` is not a URI but a path.
* ``s3://``, ``gs://``, ``az://`` and the like are objects in a store; they are kept as they are, except for
  slashes at the end. Everything that opens them, other engines too, reads them as URIs: ``%41`` is ``A``, and
  the part after a bare ``#`` or ``?`` would be dropped, so these are refused. A password in one is refused,
  and not repeated. Where only a local path will do they are refused.
* A relative path is made absolute at once, so it means the same in a worker process or after a ``chdir``.
* Symbolic links are followed. So a rename replaces the file, and not the link to it.
* A slash at the end is dropped for a directory, and refused for a file.
* Empty names, NUL and names that are not Unicode are refused.

A refusal is a `UsageError` in one line, before anything is created.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from .errors import UsageError, reason_of

__all__ = ["OBJECT_STORES", "Location", "directory", "file", "location"]

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
"""Schemes of object stores."""

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Location:
    """A directory on this machine, or a prefix in an object store."""

    text: str
    """An absolute path, or the URI of an object store; neither ends with a slash."""
    is_local: bool = True

    def __str__(self) -> str:
        return self.text

    @property
    def path(self) -> Path:
        """The local path."""
        if not self.is_local:
            raise UsageError(f"{self.text!r} is not a path on this machine")
        return Path(self.text)

    @property
    def uri(self) -> str:
        """A URI that every tool reads the same way: percent-encoded if it is local."""
        return f"file://{quote(self.text)}" if self.is_local else self.text


def location(given: str | os.PathLike[str], what: str = "the path") -> Location:
    """A directory on this machine or a prefix in an object store; ``what`` names it in errors."""
    text = _text(given, what)
    match = _URI.fullmatch(text)
    if match is None or match[1].lower() == "file":
        return Location(str(directory(given, what)))
    scheme, rest = match[1].lower(), match[2].strip("/")
    login, at, host = rest.partition("/")[0].rpartition("@")
    if at and ":" in login:
        raise UsageError(f"{what} {scheme}://…@{host} holds a secret; give it as a storage option")
    if scheme not in OBJECT_STORES:
        known = ", ".join(f"{name}://" for name in ("file", *OBJECT_STORES))
        shown = text.partition("?")[0]
        raise UsageError(f"{what} {shown!r} has the unknown scheme {scheme!r}; known are {known}")
    if "#" in rest or "?" in rest:  # a secret may follow: don't show it
        raise UsageError(
            f"{what} {scheme}://… has a bare '#' or '?', write %23 or %3F in a URI; "
            "what is for the store is a storage option"
        )
    if not rest or match[2].startswith("/"):
        raise UsageError(f"{what} {text!r} names no bucket; write {scheme}://bucket/prefix")
    if "//" in rest:
        raise UsageError(f"{what} {text!r} has two slashes side by side, and no store takes an empty name")
    return Location(f"{scheme}://{rest}", is_local=False)


def directory(
    given: str | os.PathLike[str], what: str = "the directory", *, must_exist: bool = False
) -> Path:
    """The absolute path of a directory on this machine, which need not be there yet."""
    path = _resolved(_local(given, what), what)
    mode = _mode(path, what)
    if mode is None and must_exist:
        raise UsageError(f"{what} {str(path)!r} is not there")
    if mode is not None and not stat.S_ISDIR(mode):
        raise UsageError(f"{what} {str(path)!r} is a file, not a folder; choose another path")
    return path


def file(given: str | os.PathLike[str], what: str = "the file", *, must_exist: bool = False) -> Path:
    """The absolute path of a file on this machine, whose directory must be there."""
    text = _local(given, what)
    if text.endswith("/") or os.path.basename(text) in (".", ".."):  # noqa: PTH119 - a path drops both
        raise UsageError(f"{what} {text!r} is the name of a directory, write that of a file")
    path = _resolved(text, what)
    mode = _mode(Path(text), what)  # not of `path`: what /dev/stdin or /dev/fd/63 lead to may have no name
    if mode is not None and not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        return Path(os.path.abspath(text))  # noqa: PTH100 - the links are kept
    if mode is None:
        if must_exist:
            raise UsageError(f"{what} {str(path)!r} is not there")
        if not path.parent.is_dir():
            raise UsageError(f"{what} can't be made: there is no directory {str(path.parent)!r}")
    elif stat.S_ISDIR(mode):
        raise UsageError(f"{what} {str(path)!r} is a directory, write the name of a file")
    return path


def _text(given: str | os.PathLike[str], what: str) -> str:
    try:
        text = os.fspath(given)
    except TypeError:
        raise UsageError(f"{what} is a path, not {str(given)[:40]!r} ({type(given).__name__})") from None
    if not isinstance(text, str):
        raise UsageError(f"{what} is given as bytes, give it as text")
    if not text:
        raise UsageError(f"{what} has an empty name")
    if len(text) > _MAX_LENGTH:
        raise UsageError(f"{what} has a name of {len(text)} characters, more than {_MAX_LENGTH}")
    if "\0" in text:
        raise UsageError(f"{what} {text!r} has a NUL in its name")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} {text!r} has a name that is not Unicode") from None
    return text


def _local(given: str | os.PathLike[str], what: str) -> str:
    """The path that was given, decoded if it is a URI."""
    text = _text(given, what)
    match = _URI.fullmatch(text)
    if match is None:
        return text
    if match[1].lower() != "file":
        shown = text.partition("?")[0]
        raise UsageError(f"{what} {shown!r} must be on this machine, write a path")
    host, slash, rest = match[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(f"{what} {text!r} names another machine, write file:///path")
    if "#" in rest or "?" in rest:
        raise UsageError(f"{what} {text!r} has a bare '#' or '?', write %23 or %3F in a URI, or write a path")
    try:
        return _text("/" + unquote_to_bytes(rest).decode(), what)
    except UnicodeDecodeError:
        raise UsageError(f"{what} {text!r} is not UTF-8 when it is decoded") from None


def _resolved(text: str, what: str) -> Path:
    try:
        return Path(text).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        reason = getattr(error, "strerror", None) or "its links form a loop"
        raise UsageError(f"{what} {text!r} can't be followed: {reason}") from None


def _mode(path: Path, what: str) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UsageError(f"{what} {str(path)!r} lies below something that is not a directory") from None
    except OSError as error:
        raise UsageError(f"{what} {str(path)!r} can't be used: {reason_of(error)}") from None
