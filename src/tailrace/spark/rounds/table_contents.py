"""Which documents of its collection a table holds; the mirror and `verify` must agree on it.

Transaction records are left out of a mirror unless they are asked for. A table with them has a note of it in
its source, so a later run, `verify` and a repair read the same documents without being told. System
collections need no such note: a table is of one collection, and naming it asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...client.internal_documents import is_system_scope
from ...errors import UsageError
from ...table.contract import Table

__all__ = ["mirror_contents", "options_of_table", "source_note"]

_NOTE = "transactions"
_TRANSACTIONS, _SYSTEM = "includeTransactions", "includeSystem"


def source_note(*, has_transactions: bool) -> dict[str, Any]:
    """The note in the source of a table with transaction records; empty for one without."""
    return {_NOTE: True} if has_transactions else {}


def options_of_table(given: Mapping[str, str], table: Table) -> dict[str, str]:
    """Options of the source, to read what a table holds and nothing else."""
    return _with(
        given,
        has_transactions=bool(table.source.get(_NOTE)),
        has_system=is_system_scope(str(table.source["scope"])),
    )


def mirror_contents(
    given: Mapping[str, str], wants_transactions: bool, scopes: Sequence[str], held: Sequence[Table | None]
) -> tuple[dict[str, str], bool]:
    """Options of the source for a mirror, and whether its tables have transaction records.

    ``scopes`` are those of the tables, ``held`` the tables that are there already.
    """
    there = [table for table in held if table is not None]
    has = wants_transactions or any(table.source.get(_NOTE) for table in there)
    lacking = next((table for table in there if has and not table.source.get(_NOTE)), None)
    if lacking is not None:
        raise UsageError(
            f"the table at {lacking.uri} was made without transaction records, and has read past them; "
            "choose another path, or leave them out"
        )
    return _with(given, has_transactions=has, has_system=any(map(is_system_scope, scopes))), has


def _with(given: Mapping[str, str], *, has_transactions: bool, has_system: bool) -> dict[str, str]:
    ours = (_TRANSACTIONS.lower(), _SYSTEM.lower()) if has_system else (_TRANSACTIONS.lower(),)
    options = {name: value for name, value in given.items() if name.lower() not in ours}
    if has_transactions:
        options[_TRANSACTIONS] = "true"
    if has_system:
        options[_SYSTEM] = "true"
    return options
