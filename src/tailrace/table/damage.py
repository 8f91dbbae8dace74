"""A data file that is gone or can't be read: said in one line that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .contract import DataFile, TableDamaged

__all__ = ["damage", "damage_named"]


def damage(file: DataFile, what: str) -> TableDamaged:
    """The error that says what is wrong with a file."""
    return TableDamaged(
        f"the file {file.path} of the table is damaged ({what}): restore it, "
        "or make a new table beside this one"
    )


@contextmanager
def damage_named(file: DataFile) -> Iterator[None]:
    """An error of reading a file says which one it is, and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise TableDamaged(
            f"the file {file.path} of the table is gone: somebody deleted it; restore it, "
            "or make a new table beside this one"
        ) from None
    except (OSError, ValueError) as error:
        raise damage(file, str(error).partition("\n")[0]) from error
