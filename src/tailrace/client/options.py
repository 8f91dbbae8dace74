"""The options of a source: one table for both pumps, checked in one place."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

from ..connstr import ConnectionString, parse
from ..errors import UsageError
from ..keywords import check_names, check_types, check_values, is_by_vbucket
from ..model import Position, parse_positions
from ..protocol.dcp.reader import ReaderSettings
from ..protocol.tap.reader import TapSettings
from ..units import KAFKA_PLACES
from ..wire.header import MAX_NAME_BYTES
from .dialects import CANNOT, DIALECTS, Speech, speech_of
from .groups.record import Slot, parse_slot
from .read_options import End, ReadOptions, Start
from .state_store import FileState, StateStore
from .tls import TlsOptions

__all__ = ["SourceKeywords", "SourceOptions", "read_options", "resolve", "vbucket_numbers"]

_TAP = TapSettings()
_LEAST_BUFFER = 1 << 10
_MOST_BUFFER = 1 << 31
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to connect, and what to read. All are keyword arguments of `connect` and `connect_sync`."""

    username: str | None = None
    password: str | None = None
    dialect: str = "dcp"
    purpose: str = "reader"
    """Part of the connection's name, by which operators recognise it: ``tailrace:HOST:PID:PURPOSE:N``."""
    scope: str = ""
    """Only the collections of this scope."""
    collections: Sequence[str] = ()
    """Only these collections, written ``scope.name``."""
    include_xattrs: bool = False
    include_system: bool = False
    """Also the collections of system scopes, such as ``_system``; naming one in ``scope`` or ``collections``
    includes it, too."""
    include_transactions: bool = False
    """Also the records that transactions keep in the bucket: documents whose keys begin with ``_txn:``."""
    out_of_order: bool = False
    """Let the server send what is there at the beginning in the order that is fastest for it, which it can do
    for streams of one collection. Inside that part there is no position to save or resume from."""
    every_version: bool = False
    """Every version of each document, as far back as the bucket keeps its history (see `Snapshot.history`);
    an error if the server can't keep one."""
    sync_replication: bool = False
    """Durable writes step by step: `Prepared`, `Committed` and `Aborted` events. Otherwise a durable write is
    a change like any other, when it is committed. For streams of a whole bucket, and not for `batches`."""
    no_value: bool = False
    """Keys and metadata only."""
    compression: bool = False
    """Have the server compress values on the wire."""
    flow_control_buffer: int = 20 << 20
    """How many bytes each node may send ahead of the application."""
    noop_interval_s: float = 20.0
    """A node that is silent for twice as long is given up."""
    retry_for_s: float = 60.0
    """How long to try to reconnect when a connection is lost, before that is an error."""
    connect_timeout_s: float = 10.0
    """How long a node may take to accept a connection."""
    persisted_only: bool = False
    """Hold changes back until the active and every replica that the cluster map names have them on disk."""
    replica_patience_s: float | None = None
    """How long to wait for a replica that can't be reached. None: until it is back, or failed over."""
    persisted_timeout_s: float | None = None
    """How long changes may be held back before that is a `NotPersistedYet`. None: for ever."""
    rollback_points: Callable[[int], Iterable[int | Position]] | None = None
    """The only seqnos of a vbucket that the application can go back to, if those are not the ends of the
    snapshots that it was given: a table has its own versions. An application that lags behind what it was
    given names positions instead; those on a branch that was taken back since don't count."""
    state: StateStore | str | Path | None = None
    """Where positions are saved after each whole snapshot, and resumed from."""
    autosave: bool = True
    """Save to ``state`` whenever there is time; if False, only when `save` is called."""
    tls: TlsOptions | None = None
    allow_plain: bool = False
    """Allow a login that sends the password in clear on a connection without TLS."""
    on_wire: Callable[[int, bool, bytes | memoryview], None] | None = None
    """Called with everything sent or received: number of the connection, whether we sent it, whole frames."""
    on_open: Callable[[Any], None] | None = None
    """Called with the `Source` when it is connected, on its loop: for monitoring."""
    priority: str = ""
    """``low``, ``medium`` or ``high``, for the server to defer or prefer this reader."""
    tap_settings: TapSettings = _TAP
    """Settings of the dialect ``tap`` only: the reader's name, by which a node remembers it, and so on."""
    backfill_order: str = ""
    """``sequential``: one vbucket after the other, so each is whole early; or ``round-robin``."""
    group: str | None = None
    """The name of a group of readers that share the bucket's vbuckets."""
    group_store: str | Path | None = None
    """Where the group keeps who reads what, and the positions: a directory that all members see, or
    ``redis://host``."""
    group_slot: str = ""
    """A fixed share: ``0/3`` is the first of three, ``statefulset/3`` takes the number from the host name.
    Without ``group_store`` nothing watches over it, and positions go to ``state``."""
    group_timeout_s: float = 30.0
    """A member that is silent for this long is given up, and others get its vbuckets."""

    def __post_init__(self) -> None:
        check_types(self)
        check_types(self.tap_settings)
        if self.tls is not None:
            check_types(self.tls)
        if self.dialect not in DIALECTS:
            raise UsageError(f"there is no dialect {self.dialect!r}; known are {', '.join(DIALECTS)}")
        for name in CANNOT[self.dialect]:
            if getattr(self, name) != type(self)._defaults()[name]:
                raise UsageError(f"{self.dialect} has no {name}; read with dcp, or without it")
        if not _LEAST_BUFFER <= self.flow_control_buffer <= _MOST_BUFFER:
            raise UsageError(f"flow_control_buffer must be {_LEAST_BUFFER} to {_MOST_BUFFER} bytes")
        if not 0.1 <= self.noop_interval_s <= 10_800:
            raise UsageError("noop_interval_s must be 0.1 to 10800")
        if self.priority not in ("", "low", "medium", "high"):
            raise UsageError("priority must be low, medium or high")
        if self.backfill_order not in ("", "round-robin", "sequential"):
            raise UsageError("backfill_order must be round-robin or sequential")
        if self.retry_for_s < 0:
            raise UsageError("retry_for_s must be 0 or more")
        if self.replica_patience_s is not None and self.replica_patience_s < 0:
            raise UsageError("replica_patience_s must be 0 or more")
        if self.persisted_timeout_s is not None and self.persisted_timeout_s <= 0:
            raise UsageError("persisted_timeout_s must be more than 0")
        if self.out_of_order and self.persisted_only:
            raise UsageError("out_of_order and persisted_only exclude each other")
        if self.sync_replication and (self.scope or self.collections):
            raise UsageError("sync_replication is for a whole bucket; leave out scope and collections")
        if self.connect_timeout_s <= 0:
            raise UsageError("connect_timeout_s must be more than 0")
        self._check_group()

    def _check_group(self) -> None:
        if self.group_store is not None and not self.group:
            raise UsageError("group_store is where a group is kept: name the group with group")
        if self.group and self.group_store is None and not self.group_slot:
            raise UsageError(
                f"the group {self.group[:40]!r} needs group_store, a directory that all members see or "
                "redis://host, or group_slot, a fixed share such as 0/3"
            )
        if self.group_store is not None and self.state is not None:
            raise UsageError("a group with group_store keeps the positions itself; leave out state")
        if self.group_timeout_s < 0.1:
            raise UsageError("group_timeout_s must be 0.1 or more")
        self.slot()

    def slot(self) -> Slot | None:
        """The fixed share, if there is one."""
        return parse_slot(self.group_slot, socket.gethostname()) if self.group_slot else None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SourceOptions:
        """From keyword arguments; an unknown one is an error that names the nearest."""
        check_names(cls, options)
        return cls(**options)

    def settings(self) -> ReaderSettings:
        """The settings of the connections."""
        return ReaderSettings(
            name=connection_name(self.purpose),
            buffer_bytes=self.flow_control_buffer,
            noop_interval_s=self.noop_interval_s,
            include_xattrs=self.include_xattrs,
            no_value=self.no_value,
            compress=self.compression,
            priority=self.priority,
            backfill_order=self.backfill_order,
            every_version=self.every_version,
            out_of_order=self.out_of_order,
            sync_writes=self.sync_replication,
        )

    def speech(self) -> Speech:
        """The dialect of the connections."""
        return speech_of(self.dialect, xattrs=self.include_xattrs, tap=self.tap_settings)

    @classmethod
    def _defaults(cls) -> Mapping[str, Any]:
        return {field.name: field.default for field in fields(cls)}

    def state_store(self, bucket: str) -> StateStore | None:
        """Where positions are kept."""
        if isinstance(self.state, str | Path):
            return FileState(self.state, bucket=bucket)
        return self.state


class SourceKeywords(TypedDict, total=False):
    """The fields of `SourceOptions`, as keyword arguments that a type checker sees."""

    username: str | None
    password: str | None
    dialect: str
    purpose: str
    scope: str
    collections: Sequence[str]
    include_xattrs: bool
    include_system: bool
    include_transactions: bool
    out_of_order: bool
    every_version: bool
    sync_replication: bool
    no_value: bool
    compression: bool
    flow_control_buffer: int
    noop_interval_s: float
    retry_for_s: float
    connect_timeout_s: float
    persisted_only: bool
    replica_patience_s: float | None
    persisted_timeout_s: float | None
    rollback_points: Callable[[int], Iterable[int | Position]] | None
    state: StateStore | str | Path | None
    autosave: bool
    tls: TlsOptions | None
    allow_plain: bool
    on_wire: Callable[[int, bool, bytes | memoryview], None] | None
    on_open: Callable[[Any], None] | None
    priority: str
    tap_settings: TapSettings
    backfill_order: str
    group: str | None
    group_store: str | Path | None
    group_slot: str
    group_timeout_s: float


def connection_name(purpose: str) -> str:
    """A unique name that an operator recognises, of up to `MAX_NAME_BYTES`."""
    host = socket.gethostname().encode("ascii", "replace").decode()
    printable = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in purpose)
    tail = f":{os.getpid()}:{printable[:100]}:{next(_numbers)}"
    return f"tailrace:{host}"[: MAX_NAME_BYTES - len(tail)] + tail


def resolve(url: str | ConnectionString, options: SourceOptions) -> ConnectionString:
    """The connection string with user and password from the options, where those are given."""
    check_values(resolve, {"url": url})
    target = parse(url, os.environ) if isinstance(url, str) else url
    if options.username is not None:
        target = replace(target, username=options.username, password=options.password)
    elif options.password is not None:
        target = replace(target, password=options.password)
    return target


def complete(options: SourceOptions, where: ConnectionString) -> SourceOptions:
    """The options, with default values replaced by those of the connection string, if it has any."""
    defaults = SourceOptions._defaults()
    given_by_url = {"connect_timeout_s": where.connect_timeout_s, "compression": where.compression}
    taken: dict[str, Any] = {
        name: value
        for name, value in given_by_url.items()
        if value is not None and getattr(options, name) == defaults[name]
    }
    return replace(options, **taken) if taken else options


def vbucket_numbers(vbuckets: Iterable[int]) -> list[int]:
    """The vbuckets that somebody named, in order."""
    check_values(vbucket_numbers, {"vbuckets": vbuckets})
    named = set(vbuckets)
    if not all(type(vbucket) is int for vbucket in named):
        raise UsageError("vbuckets must be a list of whole numbers")
    return sorted(named)


def read_options(
    options: SourceOptions,
    start: Start | str,
    end: End,
    vbuckets: Iterable[int] | None,
) -> ReadOptions:
    """The options of one reading; ``start`` may also be positions as JSON text."""
    chosen = None if vbuckets is None else vbucket_numbers(vbuckets)
    if isinstance(start, str):
        start = KAFKA_PLACES.get(start, start)
    if isinstance(start, str) and start.lstrip().startswith("{"):
        start = parse_positions(start)
    if not (isinstance(start, str) or is_by_vbucket(start, Position)) or not (
        isinstance(end, str) or is_by_vbucket(end, Integral)
    ):
        raise UsageError(
            "start must be beginning, now, or a mapping of vbucket to Position; "
            "end must be now, forever, or a mapping of vbucket to seqno"
        )
    if chosen is not None and options.group_slot:
        raise UsageError("the slot says which vbuckets are read; leave out vbuckets")
    if options.group_store is not None and (chosen is not None or end != "forever"):
        raise UsageError("a group shares all vbuckets and reads for ever; leave out vbuckets and end")
    if options.dialect == "tap" and not (isinstance(start, str) and isinstance(end, str)):
        raise UsageError("tap has no seqnos: a reading starts at the beginning or now, and ends now or never")
    return ReadOptions(
        start,
        end,
        None if chosen is None else tuple(chosen),
        options.retry_for_s,
        options.persisted_only,
        options.replica_patience_s,
        options.persisted_timeout_s,
        options.rollback_points,
        options.group_store is not None,
    )
