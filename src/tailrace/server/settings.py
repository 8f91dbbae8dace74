"""One table of everything that can be set: name, kind, default, what it is.

``tailrace serve --set NAME=VALUE`` and ``--set help``, the store's settings and the docs page all come from
here. Each peer-driven growth has a limit in this table.
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


_STORE = StoreSettings()  # the defaults of what goes on to it


def _setting(kind: _Kind, default: Any, about: str, minimum: float = 0) -> Any:
    return field(default=default, metadata={"kind": kind, "about": about, "minimum": minimum})


@dataclass(slots=True)
class Settings:
    """The limits and intervals of a node; those of the same name go on to the store."""

    # connections
    max_connections: int = _setting(_NUMBER, 10_000, "connections at once; one more is closed at once", 1)
    auth_timeout: float = _setting(_SECONDS, 30.0, "for a peer that must log in and doesn't", 0.1)
    max_logins: int = _setting(_NUMBER, 6, "failed logins on a connection before it is closed", 1)
    idle_timeout: float = _setting(_SECONDS, 360.0, "without a whole frame from the peer; 0: never")
    max_frame: int = _setting(_SIZE, MAX_FRAME, "the largest frame; more closes the connection", 1024)
    max_frame_before_login: int = _setting(_SIZE, MAX_FRAME_BEFORE_LOGIN, "... before the login", 1024)
    max_output: int = _setting(
        _SIZE, 1 << 20, "answers that wait for a peer before it is no longer read", 4096
    )
    max_unread: int = _setting(
        _SIZE,
        256 << 20,
        "answers that wait for all peers together; beyond it, who takes none for longest is disconnected",
        1 << 20,
    )
    max_unprocessed: int = _setting(
        _SIZE,
        256 << 20,
        "requests of all peers together that came only in part; beyond it, who began first is disconnected",
        1 << 20,
    )
    max_in_flight: int = _setting(_NUMBER, 32, "unfinished commands of a peer before it is no longer read", 1)
    drain_timeout: float = _setting(
        _SECONDS,
        5.0,
        "for unfinished commands when the node stops, and a peer that takes no more of its last answers",
    )

    # documents
    max_value: int = _setting(_SIZE, _STORE.max_value, "the largest value of a document", 1)
    max_inflated: int = _setting(_SIZE, 30 << 20, "the largest value that is inflated", 1)
    max_json_check: int = _setting(
        _SIZE, 1 << 20, "the largest value that is looked through for JSON; above it the writer is believed"
    )
    answer_cache: int = _setting(_SIZE, 32 << 20, "ready-made answers to gets, a bucket")
    persist_timeout: float = _setting(_SECONDS, 30.0, "for a command that waits for the disk", 0.001)

    compact_timeout: float = _setting(
        _SECONDS, 600.0, "for a compaction or a rewind that is waited for", 0.001
    )

    # change streams
    backfill_buffer: int = _setting(_SIZE, 8 << 20, "read from disk and not yet sent, a connection", 65536)
    slow_backfill_timeout: float = _setting(_SECONDS, 720.0, "for a backfill that nobody reads")
    takeover_max_time: float = _setting(_SECONDS, 60.0, "of a takeover before writes are held up", 0.1)
    replication_buffer: int = _setting(
        _SIZE, 10 << 20, "sent by another node and not yet acknowledged, a connection", 65536
    )
    replication_noop_interval: float = _setting(
        _SECONDS, 5.0, "between signs of life of another node that is replicated", 0.1
    )
    tap_keepalive: float = _setting(_SECONDS, 0.0, "that a TAP reader's place is kept; at most an hour")
    tap_noop_interval: float = _setting(_SECONDS, 200.0, "silence after which a TAP reader gets a no-op", 0.1)
    tap_ack_interval: int = _setting(_NUMBER, 1_000, "messages between two TAP acks", 1)
    tap_ack_window: int = _setting(_NUMBER, 10, "ack intervals that a TAP reader may be behind", 1)
    tap_ack_grace: float = _setting(_SECONDS, 300.0, "for a TAP reader whose window is full", 0.1)
    tap_backoff: float = _setting(_SECONDS, 5.0, "for a TAP reader that asks for time", 0.001)
    tap_seed_checkpoints: bool = _setting(
        _BOOLEAN, False, "TAP checkpoint messages as the document draws them"
    )
    max_tap_clients: int = _setting(_NUMBER, 1_000, "TAP readers of a bucket, those that are kept too", 1)

    # the store
    memory_quota: int = _setting(
        _SIZE, _STORE.memory_quota, "for changes in memory; beyond it writes wait", 1 << 20
    )
    checkpoint_share: float = _setting(
        _SHARE, _STORE.checkpoint_share, "of memory_quota: changes in memory for streams"
    )
    checkpoint_items: int = _setting(
        _NUMBER, _STORE.checkpoint_items, "changes of a vbucket in one checkpoint", 1
    )
    flush_interval: float = _setting(_SECONDS, _STORE.flush_interval, "between group commits", 0.001)
    segment_fanout: int = _setting(
        _NUMBER, _STORE.segment_fanout, "sealed segments of a size before they are merged", 2
    )
    quiet_time: float = _setting(_SECONDS, _STORE.quiet_time, "without a commit before merging for readers")
    garbage_share: float = _setting(
        _SHARE, _STORE.garbage_share, "of sealed bytes superseded before all are merged"
    )
    history_changes: int = _setting(
        _NUMBER, _STORE.history_changes, "newest changes of a vbucket that rewind can undo"
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
        known = {one.name: one for one in table()}
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
        """The part that the store wants to know."""
        names = {one.name for one in fields(self)}
        return StoreSettings(
            **{one.name: getattr(self, one.name) for one in fields(StoreSettings) if one.name in names}
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
    for one in fields(Settings):
        data = one.metadata
        yield Setting(one.name, data["kind"], one.default, data["minimum"], data["about"])
