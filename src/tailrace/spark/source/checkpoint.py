"""The checkpoint of a streaming query: which of its files is damaged, and what to do.

A checkpoint belongs to Spark, whose errors about it often don't name the file: an emptied ``metadata`` is "No
content to map due to end-of-input", missing offsets are "assertion failed". Spark does not tell a source
where the checkpoint is, so only the user can start this check.

The first line of a file in ``offsets`` or ``commits`` is the version of its format, the others are JSON. The
batch of the newest offsets is repeated after a restart unless it is among the commits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...errors import InputError, UsageError, reason_of
from ...paths import directory
from .offsets import bucket_of, from_offset, rollbacks_of

__all__ = ["check_checkpoint"]

_NO_OFFSET = "-"
"""The line of a source without an offset."""
_OVER = "give the query a checkpointLocation of its own, which begins anew"


def check_checkpoint(path: str | os.PathLike[str], bucket: str | None = None) -> int:
    """How many batches the checkpoint of a query says are committed; `InputError` if it is damaged.

    The error names the file and says what to do. With ``bucket``, offsets of another bucket are refused.
    """
    folder = directory(path, "the checkpoint", must_exist=True)
    _check_metadata(folder)
    offsets, commits = _numbers(folder / "offsets"), _numbers(folder / "commits")
    for number in offsets[-2:]:  # older ones are never read again
        _check_offset(folder, number, bucket)
    for number in commits[-1:]:
        _parsed(folder / "commits" / str(number), _ways(folder, number))
    if commits and (not offsets or offsets[-1] < commits[-1]):
        lost = folder / "offsets" / str(commits[-1])
        raise InputError(
            f"{str(lost)!r} is missing, though its batch was committed: {_ways(folder, commits[-1])}"
        )
    if offsets and offsets[-1] > (commits[-1] if commits else -1) + 1:
        lost = folder / "commits" / str(offsets[-1] - 1)
        raise InputError(f"{str(lost)!r} is missing, though the next batch was begun: {_OVER}")
    return len(commits) and commits[-1] + 1


def _check_metadata(folder: Path) -> None:
    path = folder / "metadata"
    there = any(_numbers(folder / name) for name in ("offsets", "commits"))
    if not path.exists():
        if there:
            raise InputError(f"{str(path)!r} is missing: restore it from a copy, or {_OVER}")
        return
    try:
        query = json.loads(_text(path))["id"]
    except (ValueError, KeyError, TypeError):
        query = None
    if not isinstance(query, str):
        raise InputError(f"{str(path)!r} is damaged: restore it from a copy, or {_OVER}")


def _numbers(folder: Path) -> list[int]:
    """The batches that have a file in a folder, in order."""
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"{str(folder)!r} is a file, but must be a folder: restore it from a copy, or {_OVER}"
        )
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return []


def _check_offset(folder: Path, number: int, bucket: str | None) -> None:
    path = folder / "offsets" / str(number)
    for offset in _parsed(path, _ways(folder, number))[1:]:
        try:
            if not isinstance(offset, dict):
                raise UsageError("an offset is not an object")
            from_offset(offset)
            rollbacks_of(offset)
            other = bucket_of(offset)
        except UsageError as error:
            raise InputError(f"{str(path)!r} has an invalid offset ({error}): {_OVER}") from None
        if bucket is not None and other not in (None, bucket):
            raise InputError(f"{str(path)!r} is of bucket {other!r}, not of {bucket!r}: {_OVER}")


def _parsed(path: Path, way_out: str) -> list[object]:
    """The JSON lines of a file, without those of sources that have no offset."""
    version, *lines = _text(path).splitlines() or [""]
    try:
        if not (version[:1] == "v" and version[1:].isdecimal() and lines):
            raise ValueError("no version")
        return [json.loads(line) for line in lines if line != _NO_OFFSET]
    except (ValueError, RecursionError):
        raise InputError(f"{str(path)!r} is damaged: {way_out}") from None


def _ways(folder: Path, number: int) -> str:
    """What to do if a file of this batch can't be used."""
    for before in reversed(_numbers(folder / "offsets")):
        if before < number and _is_whole(folder / "offsets" / str(before)):
            return (
                "restore it from a copy, or give the query a checkpointLocation of its own and the last line "
                f"of {str(folder / 'offsets' / str(before))!r} as startingOffsets"
            )
    return f"restore it from a copy, or {_OVER}"


def _is_whole(path: Path) -> bool:
    try:
        return len(_parsed(path, "")) > 1
    except InputError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise InputError(f"{str(path)!r} can't be read ({reason_of(error)}): make it readable") from error
