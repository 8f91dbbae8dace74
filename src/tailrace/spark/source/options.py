"""The options of the Spark source: one table, from which parsing, errors and the docs page are made.

Names are those that Spark users know from the Kafka source and Couchbase users from its connectors. Spark
does not keep their case."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...connstr import ConnectionString, parse
from ...errors import UsageError
from ...model import Position
from ...units import KAFKA_PLACES, parse_duration_s, parse_integer, parse_size, parse_vbuckets
from .columns import COLUMN_TYPES
from .offsets import parse_offsets

__all__ = ["OPTIONS", "Option", "Options", "parse_mirror_options", "parse_options", "partition_map"]

_PLACES = {own: kafka for kafka, own in KAFKA_PLACES.items()}


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _count(text: str) -> int:
    try:
        return parse_integer(text, minimum=1)
    except UsageError:
        raise ValueError("must be a whole number above 0") from None


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError:
        raise ValueError("must be a size such as 20m") from None


def _seconds(text: str) -> float:
    try:
        return parse_duration_s(text)
    except UsageError:
        raise ValueError("must be a number of seconds, or a duration such as 5m") from None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be {' or '.join(words)}")
        return text.lower()

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("must be names with commas between them")
    return names


class GivenOffsets(dict[int, Position]):
    """Positions that somebody gave."""

    def __init__(self, positions: Mapping[int, Position], bucket: str | None) -> None:
        super().__init__(positions)
        self.bucket = bucket
        """The bucket of the positions, if that is known."""


def _columns(text: str) -> tuple[str, ...]:
    names = _names(text.lower())
    for name in names:
        if name not in COLUMN_TYPES:
            raise ValueError(f"there is no column {name!r}; there are {', '.join(COLUMN_TYPES)}")
    if len(set(names)) < len(names):
        raise ValueError("names a column twice")
    return names


def _ops(text: str) -> tuple[str, ...]:
    from ...columns.row_kinds import ALL_OPS

    names = _names(text.lower())
    if not set(names) <= set(ALL_OPS):
        raise ValueError(f"must be some of {', '.join(ALL_OPS)}")
    return names


def _offsets(text: str) -> str | GivenOffsets:
    word = _PLACES.get(text.lower(), text.lower())
    if word in ("earliest", "latest"):
        return word
    try:
        return GivenOffsets(*parse_offsets(text))
    except UsageError as error:
        raise ValueError(f"must be earliest, latest or offsets as the stream reports them: {error}") from None


def _vbuckets(text: str) -> tuple[int, ...] | None:
    try:
        chosen = parse_vbuckets(text.replace(" ", ""))
    except UsageError as error:
        raise ValueError(f"must be vbuckets such as 0-511 or 3,7: {error}") from None
    return None if chosen is None else tuple(chosen)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, its allowed values, its meaning."""

    name: str
    attribute: str
    parse: Callable[[str], Any]
    default: Any
    about: str
    is_for_mirrors: bool = True
    """False for options that choose: a mirror takes the whole bucket, from the position of its table."""


OPTIONS = (
    Option("connectionString", "connection_string", _text, None, "`couchbase://host[:port][,host2]/bucket`"),
    Option("username", "username", _text, None, "user to log in as; also `TAILRACE_USERNAME`"),
    Option("password", "password", str, None, "the password; also `TAILRACE_PASSWORD`"),
    Option("bucket", "bucket", _text, None, "the bucket; overrides the connection string's"),
    Option("scope", "scope", _text, None, "only the collections of this scope", False),
    Option(
        "collections",
        "collections",
        _names,
        None,
        "only these: `scope.collection`, separated by commas",
        False,
    ),
    Option(
        "vbuckets",
        "vbuckets",
        _vbuckets,
        None,
        "only these, such as `0-511`: two queries can share a bucket",
        False,
    ),
    Option(
        "columns",
        "columns",
        _columns,
        None,
        "only these, such as `key,value`, in this order; without `value` and `datatype` the node sends no "
        "values",
        False,
    ),
    Option(
        "ops",
        "ops",
        _ops,
        None,
        "only these rows, such as `mutation,deletion,rollback`; without `rollback` the query does not see "
        "when the bucket takes changes back",
        False,
    ),
    Option(
        "keyPrefix",
        "key_prefix",
        _text,
        None,
        "only documents whose key has this prefix; rows that are not changes of documents still come",
        False,
    ),
    Option(
        "keyFormat",
        "key_format",
        _one_of("binary", "string"),
        "binary",
        "type of the column `key`: `binary` or `string`; in a string, U+FFFD replaces what is not UTF-8",
        False,
    ),
    Option(
        "valueFormat",
        "value_format",
        _one_of("binary", "string"),
        "binary",
        "type of the column `value`, likewise",
        False,
    ),
    Option(
        "startingOffsets",
        "starting_offsets",
        _offsets,
        None,
        "`earliest`, `latest` (or `beginning`, `now`, as the commands say), or offsets as the stream reports "
        "them; by default a batch starts at `earliest`, a stream at `latest`; a checkpoint overrides it",
        False,
    ),
    Option(
        "endingOffsets",
        "ending_offsets",
        _offsets,
        "latest",
        "where a batch ends: `latest` (or `now`) or offsets",
        False,
    ),
    Option(
        "maxOffsetsPerTrigger",
        "max_rows",
        _count,
        None,
        "maximum number of rows in a micro-batch; also `maxRows`",
    ),
    Option(
        "maxBytesPerTrigger",
        "max_bytes",
        _bytes,
        None,
        "approximate maximum size of a micro-batch, such as `256m`",
    ),
    Option(
        "minPartitions",
        "min_partitions",
        _count,
        None,
        "number of tasks of a batch; vbuckets are never split",
    ),
    Option(
        "failOnDataLoss",
        "fail_on_data_loss",
        _boolean,
        True,
        "whether the query fails if deletions were purged before it read them; if not, the vbucket starts "
        "over",
        False,
    ),
    Option(
        "onRollback",
        "on_rollback",
        _one_of("emit", "fail"),
        "emit",
        "when the bucket takes changes back: `emit` a `rollback` row before the first row of the new "
        "branch, or `fail`",
        False,
    ),
    Option(
        "includeXattrs", "include_xattrs", _boolean, False, "whether the column `xattrs` is filled", False
    ),
    Option(
        "includeSystem",
        "include_system",
        _boolean,
        False,
        "whether collections of system scopes such as `_system` are included; one that is named always is",
    ),
    Option(
        "includeTransactions",
        "include_transactions",
        _boolean,
        False,
        "whether transaction records are included: documents whose key begins with `_txn:`",
    ),
    Option(
        "everyVersion",
        "every_version",
        _boolean,
        False,
        "whether every version of a document is read, as far back as the bucket keeps its history",
    ),
    Option("noValue", "no_value", _boolean, False, "keys and metadata only", False),
    Option("flowControlBuffer", "flow_control_buffer", _bytes, 20 << 20, "bytes in flight per connection"),
    Option(
        "compression",
        "compression",
        _one_of("off", "snappy"),
        "off",
        "compress values on the wire, for slow networks: `off` or `snappy`; rows have them uncompressed",
    ),
    Option(
        "persistedOnly",
        "persisted_only",
        _boolean,
        False,
        "whether changes wait until the active and every replica have them on disk: no failover takes "
        "them back",
    ),
    Option(
        "replicaPatience",
        "replica_patience_s",
        _seconds,
        None,
        "with `persistedOnly`, seconds to wait for a replica that can't be reached; by default until it is "
        "back or failed over",
    ),
    Option("tlsCaFile", "tls_ca_file", _text, None, "certificates to trust, PEM"),
    Option("tlsClientCert", "tls_client_cert", _text, None, "certificate to log in with, PEM"),
    Option("tlsClientKey", "tls_client_key", _text, None, "its key, PEM"),
    Option(
        "connectTimeout", "connect_timeout_s", _seconds, 10.0, "seconds until a host counts as unreachable"
    ),
    Option(
        "retryFor", "retry_for_s", _seconds, 60.0, "seconds to keep reconnecting after a connection is lost"
    ),
    Option(
        "spoolDir",
        "spool_dir",
        _text,
        None,
        "folder in which changes wait for their batch; if executors are on other hosts, one that they share, "
        "or `s3://`, `gs://` or `az://`",
        False,
    ),
    Option(
        "spoolSize",
        "spool_bytes",
        _bytes,
        1 << 30,
        "how much may wait in `spoolDir` before the stream is held up",
        False,
    ),
    Option(
        "storageOption.NAME",
        "storage_options",
        str,
        None,
        "for a `spoolDir` on an object store, in addition to the usual environment variables, such as "
        "`storageOption.aws_region`",
        False,
    ),
)

_BY_NAME = {option.name.lower(): option for option in OPTIONS}
_STORAGE = "storageoption."
_ALSO = {
    "path": "connectionstring",  # what ``.load("couchbase://…")`` gives
    "maxrows": "maxoffsetspertrigger",  # what the commands call it
    "rollbackmitigation": "persistedonly",  # what other clients call it
}
_SPARK_OWN = frozenset({"paths", "datetimeformat", "timestampformat"})


class Options(SimpleNamespace):
    """The options of one read, parsed: an attribute each, see `OPTIONS`."""

    def __repr__(self) -> str:
        """Without values: there are secrets among them."""
        return f"Options({', '.join(sorted(vars(self)))})"


def partition_map(options: Options, vbuckets: Sequence[int]) -> dict[int, int]:
    """Partition by vbucket: dealt out in turn."""
    wanted = options.min_partitions or min(8, os.cpu_count() or 2)
    partitions = max(1, min(wanted, len(vbuckets)))
    return {vbucket: number % partitions for number, vbucket in enumerate(vbuckets)}


def parse_options(given: Mapping[str, str]) -> Options:
    """Parse what Spark passes; `UsageError`, which says what to write, if something is wrong."""
    values: dict[str, Any] = {option.attribute: option.default for option in OPTIONS}
    values["storage_options"] = {}
    for name, text in given.items():
        if name.lower().startswith(_STORAGE) and len(name) > len(_STORAGE):
            values["storage_options"][name.lower()[len(_STORAGE) :]] = text
            continue
        other = _ALSO.get(name.lower(), "")
        if other in {known.lower() for known in given}:
            raise UsageError(
                f"{name} and {_BY_NAME[other].name} are two names of one option; give one of them"
            )
        option = _BY_NAME.get(other or name.lower())
        if option is None:
            if name.lower() in _SPARK_OWN:
                continue
            raise UsageError(f"there is no option '{name}'{_nearest(name)}")
        try:
            values[option.attribute] = option.parse(text)
        except ValueError as error:
            shown = "…" if option.attribute == "password" else f"'{text[:80]}'"
            raise UsageError(f"option {option.name} is {shown}, but {error}") from None
    if values["connection_string"] is None:
        raise UsageError(
            "the option connectionString is missing; give one such as couchbase://127.0.0.1/default"
        )
    where = parse(values["connection_string"])
    if values["bucket"] is None:
        values["bucket"] = where.bucket
    for name in ("starting_offsets", "ending_offsets"):
        if isinstance(values[name], GivenOffsets) and values[name].bucket not in (None, values["bucket"]):
            raise UsageError(
                f"the offsets are of bucket {values[name].bucket!r}, but {values['bucket']!r} is to be read"
            )
    _log_in_from(os.environ, where, values)
    if values["scope"] is not None and values["collections"] is not None:
        raise UsageError("scope and collections exclude each other; write scope.collection in collections")
    return Options(**values)


def parse_mirror_options(given: Mapping[str, str]) -> Options:
    """The same for a mirror and its other commands, which refuse the options that are only for reads."""
    for name in given:
        option = _BY_NAME.get(name.lower())
        if option is not None and not option.is_for_mirrors:
            raise UsageError(
                f"the option {option.name} is for reads; a mirror takes a bucket whole or, by its tables, "
                "whole collections"
            )
    return parse_options(given)


def _log_in_from(environ: Mapping[str, str], where: ConnectionString, values: dict[str, Any]) -> None:
    """Take user and password from the environment if neither an option nor the connection string has them.

    This happens here, in the driver: executors have an environment of their own.
    """
    if values["username"] is None and where.username is None:
        values["username"] = environ.get("TAILRACE_USERNAME") or None
    has_user = values["username"] is not None or where.username is not None
    if has_user and values["password"] is None and where.password is None:
        values["password"] = environ.get("TAILRACE_PASSWORD")


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.4)
    return (
        f"; did you mean '{_BY_NAME[close[0]].name}'?"
        if close
        else f"; there are {', '.join(o.name for o in OPTIONS)}"
    )
