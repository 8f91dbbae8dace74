"""Tailrace carries a document store's change stream into Spark, and keeps it true.

    async with tailrace.connect("couchbase://127.0.0.1/default") as source:
        async for change in source.changes(start="beginning"):
            ...

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from . import testing as testing
    from .client.aio import Source as Source
    from .client.aio import connect as connect
    from .client.blocking import BlockingSource as BlockingSource
    from .client.blocking import connect_sync as connect_sync
    from .client.events import Aborted as Aborted
    from .client.events import Committed as Committed
    from .client.events import Deletion as Deletion
    from .client.events import Expiration as Expiration
    from .client.events import Flush as Flush
    from .client.events import Mutation as Mutation
    from .client.events import Prepared as Prepared
    from .client.events import Rollback as Rollback
    from .client.events import SeqnoAdvanced as SeqnoAdvanced
    from .client.events import Snapshot as Snapshot
    from .client.events import StreamEnd as StreamEnd
    from .client.events import SystemEvent as SystemEvent
    from .client.state_store import FileState as FileState
    from .client.state_store import MemoryState as MemoryState
    from .client.tls import TlsOptions as TlsOptions
    from .errors import ConnectError as ConnectError
    from .errors import LoginError as LoginError
    from .errors import ProtocolError as ProtocolError
    from .errors import StatusError as StatusError
    from .errors import StoreError as StoreError
    from .errors import TailraceError as TailraceError
    from .errors import UsageError as UsageError
    from .model import Position as Position
    from .protocol.tap.reader import TapSettings as TapSettings
    from .table.reading import read_table as read_table

__version__ = "0.1.0"

_EVENTS = (
    "Aborted",
    "Committed",
    "Deletion",
    "Expiration",
    "Flush",
    "Mutation",
    "Prepared",
    "Rollback",
    "SeqnoAdvanced",
    "Snapshot",
    "StreamEnd",
    "SystemEvent",
)
_ERRORS = (
    "ConnectError",
    "LoginError",
    "ProtocolError",
    "StatusError",
    "StoreError",
    "TailraceError",
    "UsageError",
)
_MODULES = ("errors", "testing")
_HOMES = {
    "BlockingSource": ".client.blocking",
    "FileState": ".client.state_store",
    "MemoryState": ".client.state_store",
    "Position": ".model",
    "Source": ".client.aio",
    "TapSettings": ".protocol.tap.reader",
    "TlsOptions": ".client.tls",
    "connect": ".client.aio",
    "connect_sync": ".client.blocking",
    **dict.fromkeys(_ERRORS, ".errors"),
    "read_table": ".table.reading",
    **dict.fromkeys(_EVENTS, ".client.events"),
}

__all__ = ["__version__", *_MODULES, *_HOMES]  # noqa: PLE0604 - the names are those of the table


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
