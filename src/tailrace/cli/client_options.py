"""Options of commands that talk to a bucket, what is made of them, and explanations of refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..connstr import ConnectionString
from ..errors import StatusError, TailraceError, UsageError
from ..units import KAFKA_PLACES
from .common import DURATION, EXISTING_FILE, FILE, Parsed

if TYPE_CHECKING:
    from ..client.kv import KvClient, Stored
    from ..client.tls import TlsOptions
    from ..protocol.tap.reader import TapSettings

__all__ = [
    "collection_option",
    "connect_options",
    "dialect_option",
    "end_option",
    "every_version_option",
    "explained",
    "key_argument",
    "left_out_options",
    "no_such_document",
    "open_kv",
    "persisted_options",
    "retry_option",
    "source_options",
    "start_option",
    "state_option",
    "sync_replication_option",
    "tell_written",
    "tls_from",
    "tls_options",
]

F = TypeVar("F", bound=Callable[..., Any])

_TLS_PARAMETERS = ("tls_ca", "tls_cert", "tls_key", "tls_no_verify")


def tls_options(function: F) -> F:
    """The options for ``couchbases://``; pass them on with ``**tls``, see `tls_from`."""
    for option in (
        click.option("--tls-no-verify", is_flag=True, help="Accept any certificate; for tests only."),
        click.option("--tls-key", type=EXISTING_FILE, help="Private key of the client certificate."),
        click.option("--tls-cert", type=EXISTING_FILE, help="Client certificate, if the server wants one."),
        click.option(
            "--tls-ca", type=EXISTING_FILE, help="CA certificates to trust, instead of the system's."
        ),
    ):
        function = option(function)
    return function


def tls_from(options: dict[str, Any]) -> TlsOptions:
    """TLS settings, made from the options of `tls_options`."""
    from ..client.tls import TlsOptions

    ca_file, cert_file, key_file, no_verify = (options[name] for name in _TLS_PARAMETERS)
    return TlsOptions(ca_file, cert_file, key_file, verify=not no_verify)


_KEY = Parsed("key", lambda text: text.encode("utf-8", "surrogateescape"))
"""The bytes of an argument as they were given: a key need not be UTF-8."""


def key_argument(function: F) -> F:
    """The argument KEY, as ``key: bytes``."""
    return click.argument("key", type=_KEY, metavar="KEY")(function)


def no_such_document(key: bytes) -> TailraceError:
    """The error for a key that nothing is stored under."""
    shown = key.decode("utf-8", "backslashreplace")
    return TailraceError(f"there is no document {shown!r}, check the key and the bucket")


def tell_written(key: bytes, change: Stored) -> None:
    """What ``set --json`` and ``delete --json`` write."""
    from ..client.jsonlines import change_as_json

    click.echo(change_as_json(key, change).encode())


def collection_option(function: F) -> F:
    """The option ``--collection``."""
    return click.option(
        "--collection",
        default="",
        metavar="SCOPE.NAME",
        help="Collection of the document.  [default: _default]",
    )(function)


def open_kv(url: ConnectionString, options: dict[str, Any], *, wants_seqnos: bool = True) -> KvClient:
    """A key-value client for a command."""
    from ..client.kv import KvClient

    tls = tls_from(options) if url.tls else None
    return KvClient(url, tls=tls, wants_seqnos=wants_seqnos, agent="tailrace-cli")


def source_options(function: F) -> F:
    """The options that limit what is read; they go into ``**options``, see `connect_options`."""
    for option in (
        click.option("--xattrs", is_flag=True, help="Include extended attributes."),
        click.option("--no-value", is_flag=True, help="Read keys and metadata only."),
        click.option("--scope", default="", help="Read only the collections of this scope."),
        click.option(
            "--collection",
            "collections",
            multiple=True,
            metavar="SCOPE.NAME",
            help="Read only this collection; may be repeated.",
        ),
    ):
        function = option(function)
    return function


def left_out_options(function: F) -> F:
    """Options for what is otherwise left out; they go into ``**options``, see `connect_options`."""
    for option in (
        click.option(
            "--include-transactions",
            is_flag=True,
            help="Include transaction records, whose keys begin with _txn:.",
        ),
        click.option(
            "--include-system", is_flag=True, help="Include collections of system scopes, such as _system."
        ),
    ):
        function = option(function)
    return function


def every_version_option(function: F) -> F:
    """The option ``--every-version``."""
    return click.option(
        "--every-version",
        is_flag=True,
        help="Read every version of a document, as far back as the bucket keeps its history.",
    )(function)


def persisted_options(function: F) -> F:
    """The options ``--persisted-only`` and ``--replica-patience``."""
    for option in (
        click.option(
            "--replica-patience",
            type=DURATION,
            help="With --persisted-only: how long to wait for a replica that is down.  [default: forever]",
        ),
        click.option(
            "--persisted-only",
            "--rollback-mitigation",
            "persisted_only",
            is_flag=True,
            help="Take only changes that the active and every replica have on disk: no failover undoes them.",
        ),
    ):
        function = option(function)
    return function


def sync_replication_option(function: F) -> F:
    """The option ``--sync-replication``."""
    return click.option(
        "--sync-replication",
        is_flag=True,
        help="Show durable writes step by step: prepare, commit, abort.",
    )(function)


class _StartChoice(click.Choice[str]):
    """``beginning`` or ``now``; Kafka's words for them are accepted too."""

    def __init__(self) -> None:
        super().__init__(["beginning", "now"])

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(KAFKA_PLACES.get(value, value), param, ctx)


def _start_or_file(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    return KAFKA_PLACES.get(value, value)


def start_option(*, files: bool = False, state: bool = True) -> Callable[[F], F]:
    """The option ``--from``, as ``start``; ``files``: it may name a file; ``state``: ``--state`` exists."""
    words = ["beginning", "now"]
    return click.option(
        "--from",
        "start",
        type=str if files else _StartChoice(),
        callback=_start_or_file if files else None,
        metavar="|".join([*words, "FILE"]) if files else None,
        default="beginning",
        show_default=True,
        help=f"Where to start{'; FILE holds positions as JSON' if files else ''}."
        + (" A state file takes precedence." if state else ""),
    )


def end_option(default: str = "forever") -> Callable[[F], F]:
    """The option ``--to``, as ``end``; ``--once``, as the mirror calls ``--to now``, is accepted too."""

    def decorated(function: F) -> F:
        function = click.option("--once", "end", flag_value="now", hidden=True)(function)
        return click.option(
            "--to",
            "end",
            type=click.Choice(["now", "forever"]),
            default=default,
            show_default=True,
            help="When to stop: after the changes that exist at the start, or never.",
        )(function)

    return decorated


def dialect_option(function: F) -> F:
    """The option ``--dialect``."""
    return click.option(
        "--dialect",
        type=click.Choice(["dcp", "upr-a", "upr-b", "tap"]),
        default="dcp",
        show_default=True,
        help="Protocol to read with.",
    )(function)


def tap_name_option(function: F) -> F:
    """The option ``--tap-name``, for `remembered`."""
    return click.option(
        "--tap-name",
        metavar="NAME",
        help="With --dialect tap: a name by which the node remembers where this reader stopped.",
    )(function)


def remembered(tap_name: str, dialect: str) -> TapSettings:
    """The options of a TAP reader that the node knows by name."""
    if dialect != "tap":
        raise UsageError("--tap-name goes with --dialect tap; elsewhere --state FILE keeps the place")
    from ..protocol.tap.reader import TapSettings

    return TapSettings(name=tap_name, registered=True)


def state_option(help_text: str) -> Callable[[F], F]:
    """The option ``--state``, as ``state: Path | None``."""
    return click.option("--state", type=FILE, metavar="FILE", help=help_text)


def group_options(function: F) -> F:
    """The options of a group of readers; they go into ``**options``, see `group_from`."""
    for option in (
        click.option(
            "--group-timeout",
            type=DURATION,
            default=30.0,
            help="Consider a member dead after this much silence.  [default: 30s]",
        ),
        click.option(
            "--slot",
            default="",
            metavar="N/TOTAL",
            help="A fixed share of the vbuckets: 0/3 is the first of three, statefulset/3 takes the "
            "number from the host name.",
        ),
        click.option(
            "--group-store",
            metavar="PLACE",
            help="Where the group keeps its members and positions: a directory, or redis://HOST.",
        ),
        click.option(
            "--group",
            default="",
            metavar="NAME",
            help="Share the vbuckets with the other members of this group.",
        ),
    ):
        function = option(function)
    return function


def group_from(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `tailrace.connect` for a group."""
    return {
        "group": options["group"] or None,
        "group_store": options["group_store"],
        "group_slot": options["slot"],
        "group_timeout_s": options["group_timeout"],
    }


def retry_option(function: F) -> F:
    """The option ``--retry-for``, as ``retry_for: float`` in seconds."""
    return click.option(
        "--retry-for",
        type=DURATION,
        default=60.0,
        help="How long to keep trying to reconnect after a lost connection.  [default: 60s]",
    )(function)


def connect_options(url: ConnectionString, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Keyword arguments of `tailrace.connect`, made from the options above."""
    return {
        "include_xattrs": options["xattrs"],
        "no_value": options["no_value"],
        "scope": options["scope"],
        "collections": options["collections"],
        "every_version": options.get("every_version", False),
        "sync_replication": options.get("sync_replication", False),
        "include_system": options.get("include_system", False),
        "include_transactions": options.get("include_transactions", False),
        "persisted_only": options.get("persisted_only", False),
        "replica_patience_s": options.get("replica_patience"),
        "tls": tls_from(options) if url.tls else None,
        **more,
    }


def explained(error: StatusError, advice: str) -> TailraceError:
    """A refusal, in the server's own words if it gave any, and what to do about it."""
    try:
        words = str(json.loads(error.body)["error"]["context"])[:500]
    except (ValueError, RecursionError, KeyError, TypeError):
        return TailraceError(f"{error}, {advice}")
    return TailraceError(f"{words}, {advice}")
