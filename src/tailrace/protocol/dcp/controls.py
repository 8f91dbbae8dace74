"""What a DCP connection agreed on: the flags of Open, and the control keys.

The rules are docs/spec/dcp.md#open and docs/spec/dcp.md#control-keys.

One function per key, found by name. Each takes the value as text and either sets an option or gives the
status with which the key is refused. Most keys apply to streams that are requested afterwards. The options
are here too, next to the keys that set them: a new key is a field and a function.

This is the producer's half. What a reader asks for is in `reader` (`ReaderSettings.controls`), what a replica
asks for in `replica_controls`.

``change_streams`` is accepted whether or not the bucket retains a history, as by a server with a retention of
0: no snapshot is marked as history then. ``cache_transfer`` is refused (0x83), unlike by servers of the
newest line: it warms a replica's cache with documents, and this store has no cache apart from its documents.
Replicas that ask for it accept the refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...wire.codes import ControlKey, Feature, OpenFlag, Status
from .flow_control import SendWindow
from .liveness import MAX_INTERVAL_S, MIN_INTERVAL_S

__all__ = ["BackfillOrder", "ConnectionOptions", "Oso"]

_DECIMAL = re.compile(r"[0-9]{1,10}")
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_MAX_BUFFER = 0xFFFF_FFFF
_PRIORITIES = ("high", "medium", "low")
_TRUE = "true"

# Plain integers: an operator of an IntFlag costs a call or two, and each of a thousand streams uses them all.
_XATTRS = int(OpenFlag.INCLUDE_XATTRS)
_DELETED_USER_XATTRS = int(OpenFlag.INCLUDE_DELETED_USER_XATTRS)
_DELETE_TIMES = int(OpenFlag.INCLUDE_DELETE_TIMES)
_KEEP_DATATYPE = int(OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
_NO_VALUE = int(OpenFlag.NO_VALUE) | _KEEP_DATATYPE
_SKIP_DELETES = int(OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL)


class Oso(Enum):
    """Whether the first backfill may come out of order, and whether its end is then announced."""

    OFF = ""
    ON = "true"
    WITH_SEQNO_ADVANCED = "true_with_seqno_advanced"


class BackfillOrder(Enum):
    """Which backfills of a connection run at the same time."""

    ROUND_ROBIN = "round-robin"
    SEQUENTIAL = "sequential"


@dataclass(slots=True)
class ConnectionOptions:
    """Everything that was negotiated on a connection; the features are those granted by HELLO before Open."""

    features: frozenset[int]
    name: bytes = b""
    flags: int = 0  # OpenFlag, as a plain integer
    window: SendWindow = field(default_factory=SendWindow)
    noop: bool = False
    noop_interval_s: float | None = None
    priority: str = "medium"
    force_compression: bool = False
    end_on_close: bool = False
    expiry_opcode: bool = False
    stream_ids: bool = False
    sync_writes: bool = False
    consumer_name: str = ""
    oso: Oso = Oso.OFF
    backfill_order: BackfillOrder = BackfillOrder.ROUND_ROBIN
    v7_status_codes: bool = False
    flatbuffers: bool = False
    change_streams: bool = False
    marker_v2_2: bool = False

    # What follows from them.

    @property
    def collections(self) -> bool:
        return Feature.COLLECTIONS in self.features

    @property
    def snappy(self) -> bool:
        return Feature.SNAPPY in self.features or Feature.SNAPPY_EVERYWHERE in self.features

    @property
    def xattrs(self) -> bool:
        return bool(self.flags & _XATTRS)

    @property
    def deleted_user_xattrs(self) -> bool:
        return bool(self.flags & _DELETED_USER_XATTRS)

    @property
    def delete_times(self) -> bool:
        return bool(self.flags & _DELETE_TIMES)

    @property
    def expirations(self) -> bool:
        """Expirations have their own message; it has a delete time, so both must have been asked for."""
        return self.expiry_opcode and self.delete_times

    @property
    def no_value(self) -> bool:
        return bool(self.flags & _NO_VALUE)

    @property
    def keep_datatype(self) -> bool:
        return bool(self.flags & _KEEP_DATATYPE)

    @property
    def skip_deletes(self) -> bool:
        return bool(self.flags & _SKIP_DELETES)

    @property
    def sync_replication(self) -> bool:
        return self.sync_writes and bool(self.consumer_name)

    def control(self, key: bytes, value: bytes) -> Status:
        """Apply a control message; returns the status to answer."""
        apply = _CONTROLS.get(key)
        if apply is None:
            return Status.EINVAL
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return Status.EINVAL
        return apply(self, text)


def _switch(name: str) -> Callable[[ConnectionOptions, str], Status]:
    """On with ``true``, off with anything else."""

    def apply(options: ConnectionOptions, value: str) -> Status:
        setattr(options, name, value == _TRUE)
        return Status.SUCCESS

    return apply


def _one_way(
    name: str, refused: Callable[[ConnectionOptions], Status | None] | None = None
) -> Callable[[ConnectionOptions, str], Status]:
    """Only ``true`` is accepted, and it stays on; something else that was agreed may exclude it."""

    def apply(options: ConnectionOptions, value: str) -> Status:
        if value != _TRUE:
            return Status.EINVAL
        if refused is not None and (status := refused(options)) is not None:
            return status
        setattr(options, name, True)
        return Status.SUCCESS

    return apply


def _noop_interval(options: ConnectionOptions, value: str) -> Status:
    if _SECONDS.fullmatch(value) is None or not MIN_INTERVAL_S <= float(value) <= MAX_INTERVAL_S:
        return Status.EINVAL
    options.noop_interval_s = float(value)
    return Status.SUCCESS


def _buffer_size(options: ConnectionOptions, value: str) -> Status:
    if _DECIMAL.fullmatch(value) is None or int(value) > _MAX_BUFFER:
        return Status.EINVAL
    options.window.resize(int(value))
    return Status.SUCCESS


def _priority(options: ConnectionOptions, value: str) -> Status:
    if value not in _PRIORITIES:
        return Status.EINVAL
    options.priority = value
    return Status.SUCCESS


def _force_compression(options: ConnectionOptions, value: str) -> Status:
    if not options.snappy:
        return Status.EINVAL
    options.force_compression = value == _TRUE
    return Status.SUCCESS


def _end_on_close(options: ConnectionOptions, value: str) -> Status:
    options.end_on_close = options.end_on_close or value == _TRUE
    return Status.SUCCESS


def _consumer_name(options: ConnectionOptions, value: str) -> Status:
    options.consumer_name = value
    return Status.SUCCESS


def _oso(options: ConnectionOptions, value: str) -> Status:
    try:
        options.oso = Oso(value)
    except ValueError:
        return Status.EINVAL
    return Status.SUCCESS


def _backfill_order(options: ConnectionOptions, value: str) -> Status:
    try:
        options.backfill_order = BackfillOrder(value)
    except ValueError:
        return Status.EINVAL
    return Status.SUCCESS


def _deleted_user_xattrs(options: ConnectionOptions, value: str) -> Status:
    return Status.SUCCESS if value == _TRUE and options.deleted_user_xattrs else Status.EINVAL


def _marker_version(options: ConnectionOptions, value: str) -> Status:
    if value != "2.2":
        return Status.EINVAL
    if not options.collections:
        return Status.NOT_SUPPORTED
    options.marker_v2_2 = True
    return Status.SUCCESS


def _no_effect(options: ConnectionOptions, value: str) -> Status:
    """Accept a key that allows what this node never does.

    A cursor here is a seqno, which need not be dropped, and how often documents are used is not counted.
    """
    return Status.SUCCESS


def _not_supported(options: ConnectionOptions, value: str) -> Status:
    return Status.NOT_SUPPORTED


_CONTROLS: Mapping[bytes, Callable[[ConnectionOptions, str], Status]] = {
    ControlKey.ENABLE_NOOP: _switch("noop"),
    ControlKey.SET_NOOP_INTERVAL: _noop_interval,
    ControlKey.CONNECTION_BUFFER_SIZE: _buffer_size,
    ControlKey.STREAM_BUFFER_SIZE: _not_supported,
    ControlKey.SET_PRIORITY: _priority,
    ControlKey.FORCE_VALUE_COMPRESSION: _force_compression,
    ControlKey.SUPPORTS_CURSOR_DROPPING: _no_effect,
    ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN: _no_effect,
    ControlKey.SUPPORTS_HIFI_MFU: _no_effect,
    ControlKey.SEND_STREAM_END_ON_CLOSE: _end_on_close,
    ControlKey.ENABLE_EXPIRY_OPCODE: _switch("expiry_opcode"),
    ControlKey.ENABLE_STREAM_ID: _one_way(
        "stream_ids", lambda options: Status.NOT_SUPPORTED if options.sync_writes else None
    ),
    ControlKey.ENABLE_SYNC_WRITES: _one_way(
        "sync_writes", lambda options: Status.NOT_SUPPORTED if options.stream_ids else None
    ),
    ControlKey.CONSUMER_NAME: _consumer_name,
    ControlKey.ENABLE_OSO: _oso,
    ControlKey.BACKFILL_ORDER: _backfill_order,
    ControlKey.INCLUDE_DELETED_USER_XATTRS: _deleted_user_xattrs,
    ControlKey.V7_STATUS_CODES: _one_way("v7_status_codes"),
    ControlKey.FLATBUFFERS_SYSTEM_EVENTS: _one_way("flatbuffers"),
    ControlKey.CHANGE_STREAMS: _one_way("change_streams"),
    ControlKey.MAX_MARKER_VERSION: _marker_version,
    ControlKey.CACHE_TRANSFER: _not_supported,
}
