"""One table of everything that can be set: name, kind, default, what it is.

``tailrace serve --set NAME=VALUE`` and ``--set help``, the store's settings and the docs page all come from
here. Everything that a peer can make grow has a limit in this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ..errors import UsageError
from ..store.base import StoreSettings
from ..units import format_size, parse_duration_s, parse_integer, parse_share, parse_size
from ..wire.header import MAX_FRAME, MAX_FRAME_BEFORE_LOGIN

__all__ = ["Setting", "Settings", "table"]

_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _parse_boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise UsageError(f"{text[:40]!r} is neither true nor false") from None


class _Kind(NamedTuple):
    name: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str]


_SIZE = _Kind("size", parse_size, format_size)
_SECONDS = _Kind("seconds", parse_duration_s, lambda value: f"{value:g} s")
_NUMBER = _Kind("number", parse_integer, str)
_SHARE = _Kind("share", parse_share, lambda value: f"{value:g}")
_BOOLEAN = _Kind("true|false", _parse_boolean, lambda value: str(value).lower())


_STORE = StoreSettings()  # the defaults of what is passed on to it


def _setting(kind: _Kind, default: Any, about: str, minimum: float = 0) -> Any:
    return field(default=default, metadata={"kind": kind, "about": about, "minimum": minimum})


@dataclass(slots=True)
class Settings:
    """The limits and intervals of a node; those that the store has too are passed on to it."""

    # connections
    max_connections: int = _setting(_NUMBER, 10_000, "open connections; any more are closed at once", 1)
    auth_timeout: float = _setting(_SECONDS, 30.0, "for a peer to log in", 0.1)
    max_logins: int = _setting(_NUMBER, 6, "failed logins before a connection is closed", 1)
    idle_timeout: float = _setting(
        _SECONDS, 360.0, "without a complete frame before a peer is disconnected; 0: never"
    )
    max_frame: int = _setting(_SIZE, MAX_FRAME, "largest frame; a larger one closes the connection", 1024)
    max_frame_before_login: int = _setting(
        _SIZE, MAX_FRAME_BEFORE_LOGIN, "largest frame before the login", 1024
    )
    max_output: int = _setting(
        _SIZE, 1 << 20, "unsent answers to a peer before its requests are no longer read", 4096
    )
    max_unread: int = _setting(
        _SIZE,
        256 << 20,
        "unsent answers to all peers; above this, the peer that has read none for longest is disconnected",
        1 << 20,
    )
    max_unprocessed: int = _setting(
        _SIZE,
        256 << 20,
        "incomplete requests of all peers; above this, the peer with the oldest one is disconnected",
        1 << 20,
    )
    max_in_flight: int = _setting(
        _NUMBER, 32, "unfinished commands of a peer before its requests are no longer read", 1
    )
    drain_timeout: float = _setting(
        _SECONDS,
        5.0,
        "to finish commands and deliver the last answers when the node stops",
    )

    # documents
    max_value: int = _setting(_SIZE, _STORE.max_value, "largest value of a document", 1)
    max_inflated: int = _setting(_SIZE, 30 << 20, "largest value after inflating", 1)
    max_json_check: int = _setting(
        _SIZE, 1 << 20, "largest value that is checked for JSON; above this the writer is trusted"
    )
    answer_cache: int = _setting(_SIZE, 32 << 20, "cache of ready-made answers to gets, per bucket")
    persist_timeout: float = _setting(_SECONDS, 30.0, "a command may wait for the disk", 0.001)

    slow_command: float = _setting(_SECONDS, 1.0, "a command may take before it is reported as slow")
    compact_timeout: float = _setting(
        _SECONDS, 600.0, "a compaction or rewind may take while a command waits for it", 0.001
    )

    # change streams
    backfill_buffer: int = _setting(_SIZE, 8 << 20, "read from disk and not yet sent, per connection", 65536)
    slow_backfill_timeout: float = _setting(_SECONDS, 720.0, "a backfill may go unread")
    takeover_max_time: float = _setting(_SECONDS, 60.0, "a takeover may take before writes are held up", 0.1)
    former_active_silence: float = _setting(
        _SECONDS, 5.0, "a replica that was the active gives readers no stream; they look for the new one"
    )
    replication_buffer: int = _setting(
        _SIZE, 10 << 20, "sent by another node and not yet acknowledged, per connection", 65536
    )
    replication_noop_interval: float = _setting(
        _SECONDS, 5.0, "between no-ops of a node that is replicated", 0.1
    )
    tap_keepalive: float = _setting(
        _SECONDS, 0.0, "to keep a TAP reader's place after it leaves; at most an hour"
    )
    tap_noop_interval: float = _setting(_SECONDS, 200.0, "of silence before a TAP reader gets a no-op", 0.1)
    tap_ack_interval: int = _setting(_NUMBER, 1_000, "messages between two TAP acks", 1)
    tap_ack_window: int = _setting(_NUMBER, 10, "ack intervals that a TAP reader may be behind", 1)
    tap_ack_grace: float = _setting(_SECONDS, 300.0, "a TAP reader's window may stay full", 0.1)
    tap_backoff: float = _setting(_SECONDS, 5.0, "to pause when a TAP reader asks for time", 0.001)
    tap_seed_checkpoints: bool = _setting(
        _BOOLEAN, False, "send TAP checkpoint messages as the document draws them"
    )
    max_tap_clients: int = _setting(_NUMBER, 1_000, "TAP readers of a bucket, remembered ones included", 1)

    max_range_scans: int = _setting(_NUMBER, 256, "unfinished range scans of a bucket", 1)
    range_scan_lifetime: float = _setting(_SECONDS, 180.0, "a range scan may take", 0.001)

    # the store
    memory_quota: int = _setting(
        _SIZE, _STORE.memory_quota, "for changes in memory; above this, writes wait", 1 << 20
    )
    checkpoint_share: float = _setting(
        _SHARE, _STORE.checkpoint_share, "share of memory_quota for changes that streams read from memory"
    )
    checkpoint_items: int = _setting(
        _NUMBER, _STORE.checkpoint_items, "changes of a vbucket in one checkpoint", 1
    )
    flush_interval: float = _setting(_SECONDS, _STORE.flush_interval, "between group commits", 0.001)
    segment_fanout: int = _setting(
        _NUMBER, _STORE.segment_fanout, "sealed segments of similar size before they are merged", 2
    )
    quiet_time: float = _setting(
        _SECONDS, _STORE.quiet_time, "without a commit before segments are merged for readers"
    )
    garbage_share: float = _setting(
        _SHARE, _STORE.garbage_share, "share of superseded bytes at which all segments are merged"
    )
    history_changes: int = _setting(
        _NUMBER, _STORE.history_changes, "newest changes of each vbucket that rewind can undo"
    )
    history_retention_seconds: float = _setting(
        _SECONDS,
        _STORE.history_retention_seconds,
        "for which every version is kept, for readers that ask for all; 0: of any age",
    )
    history_retention_bytes: int = _setting(
        _SIZE,
        _STORE.history_retention_bytes,
        "size of a bucket up to which every version is kept; 0: any size, or none at all if both are 0",
    )
    tombstone_age: float = _setting(_SECONDS, _STORE.tombstone_age, "before compaction forgets a deletion")
    expiry_pager_interval: float = _setting(
        _SECONDS, _STORE.expiry_pager_interval, "between searches for expired documents", 0.01
    )
    failover_entries: int = _setting(
        _NUMBER, _STORE.failover_entries, "branches that a failover log holds", 1
    )
    last_write_wins: bool = _setting(
        _BOOLEAN, _STORE.last_write_wins, "conflict resolution by CAS, not by rev"
    )

    @classmethod
    def parse(cls, assignments: Iterable[str]) -> Settings:
        """From ``NAME=VALUE`` texts; `UsageError` says what is wrong and what would be right."""
        made = cls()
        known = {setting.name: setting for setting in table()}
        for text in assignments:
            name, equals, value = text.partition("=")
            if not equals:
                raise UsageError(f"--set {text[:40]!r}: write NAME=VALUE, or 'help' for a list")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else "--set help lists them"
                raise UsageError(f"there is no setting {name[:40]!r}, {hint}")
            made._assign(known[name], value)
        return made

    def _assign(self, setting: Setting, text: str) -> None:
        try:
            value = setting.kind.parse(text)
        except UsageError as error:
            raise UsageError(f"setting {setting.name}: {error}") from None
        if value < setting.minimum:
            raise UsageError(f"setting {setting.name}: at least {setting.kind.show(setting.minimum)}")
        setattr(self, setting.name, value)

    def for_store(self) -> StoreSettings:
        """The part that the store needs."""
        names = {option.name for option in fields(self)}
        return StoreSettings(
            **{
                option.name: getattr(self, option.name)
                for option in fields(StoreSettings)
                if option.name in names
            }
        )


class Setting(NamedTuple):
    """A row of the table."""

    name: str
    kind: _Kind
    default: Any
    minimum: float
    about: str

    def __str__(self) -> str:
        return f"{self.name:<24} {self.kind.name:<11} {self.kind.show(self.default):<11} {self.about}"


def table() -> Iterator[Setting]:
    """Every setting, in the order of the table."""
    for option in fields(Settings):
        data = option.metadata
        yield Setting(option.name, data["kind"], option.default, data["minimum"], data["about"])
