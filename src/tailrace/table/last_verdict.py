"""The last result of `tailrace verify`, kept beside the table for the mirror's page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import StorageError
from .store import TableStore

__all__ = ["keep_verdict", "last_verdict"]

_PATH = "_tailrace/verdict.json"
_MAX_BYTES = 64 << 10


def keep_verdict(uri: str, storage_options: Mapping[str, str], verdict: Mapping[str, Any]) -> bool:
    """Keep a verdict; return whether that worked: whoever verifies may lack permission to write."""
    try:
        TableStore(uri, storage_options).put(_PATH, json.dumps(dict(verdict)).encode())
    except (OSError, StorageError):
        return False
    return True


def last_verdict(uri: str, storage_options: Mapping[str, str]) -> dict[str, Any] | None:
    """The last verdict; None if there is none that can be read. Costs a request to an object store."""
    try:
        verdict = json.loads(TableStore(uri, storage_options).read(_PATH, 0, _MAX_BYTES))
    except (OSError, StorageError, ValueError):
        return None
    return verdict if isinstance(verdict, dict) else None
