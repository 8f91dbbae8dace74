"""Errors about a data file that is gone or can't be read: one line that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .contract import DataFile, TableDamaged

__all__ = ["damage", "damage_named"]


def damage(file: DataFile, what: str) -> TableDamaged:
    """The error for a damaged file; ``what`` is wrong with it."""
    return TableDamaged(
        f"the file {file.path} of the table is damaged ({what}): restore it, "
        "or make a new table beside this one"
    )


@contextmanager
def damage_named(file: DataFile) -> Iterator[None]:
    """Errors while reading a file are raised as one that names it and says what to do."""
    try:
        yield
    except FileNotFoundError:
        raise TableDamaged(
            f"the file {file.path} of the table is gone: somebody deleted it; restore it, "
            "or make a new table beside this one"
        ) from None
    except (OSError, ValueError) as error:
        raise damage(file, str(error).partition("\n")[0]) from error
