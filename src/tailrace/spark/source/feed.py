"""The link between reader and Spark: changes as rows of the source, and the positions after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...client.blocking import BlockingSource, connect_sync
from ...client.catalog import full_path
from ...client.events import Rollback
from ...client.internal_documents import is_system_scope
from ...client.kv import KvClient
from ...client.portion import Portion
from ...client.read_options import check_vbuckets
from ...client.tls import TlsOptions
from ...columns.row_kinds import ROLLBACK, kind_of, no_rows
from ...connstr import ConnectionString, parse
from ...errors import ChangesTakenBack, DataLoss, UsageError
from ...history import FailoverLog, RestartAction, plan, rollback_seqno
from ...model import MAX_U64, Position
from .options import Options
from .selection import Selection
from .spool import FeedDelivery, segment_rows

__all__ = [
    "Feed",
    "check_bucket",
    "check_collections",
    "collection_paths",
    "limited_collections",
    "open_source",
    "refuse_loss",
]


def _where(options: Options) -> tuple[ConnectionString, TlsOptions | None]:
    """The bucket's address and TLS settings, from the options."""
    where = parse(options.connection_string)
    where = replace(
        where,
        bucket=options.bucket,
        username=options.username or where.username,
        password=where.password if options.password is None else options.password,
    )
    tls = None
    if options.tls_ca_file or options.tls_client_cert or options.tls_client_key:
        tls = TlsOptions(
            ca_file=options.tls_ca_file, cert_file=options.tls_client_cert, key_file=options.tls_client_key
        )
    return where, tls


def collection_paths(options: Options) -> set[str]:
    """The collections that the bucket has now, as ``scope.collection``."""
    where, tls = _where(options)
    with KvClient(where, tls=tls, timeout_s=options.connect_timeout_s) as client:
        manifest = client.manifest() if client.collections else {}
    return {"_default._default"} | {
        f"{scope['name']}.{collection['name']}"
        for scope in manifest.get("scopes", ())
        for collection in scope["collections"]
    }


def check_bucket(options: Options) -> None:
    """Raise if the options don't fit the bucket, before anything runs."""
    check_collections(options)
    feed = Feed(options)
    try:
        feed.vbuckets()
    finally:
        feed.close()


def check_collections(options: Options) -> None:
    """Raise if the options name a scope or a collection that the bucket does not have."""
    if options.scope is None and options.collections is None:
        return
    there = sorted(collection_paths(options))
    known = f"there are {', '.join(there[:20])}{', …' if len(there) > 20 else ''}"
    bucket = options.bucket
    if options.scope is not None and options.scope not in {path.partition(".")[0] for path in there}:
        raise UsageError(f"bucket {bucket!r} has no scope {options.scope!r} with a collection; {known}")
    for path in options.collections or ():
        if full_path(path) not in there:
            raise UsageError(f"bucket {bucket!r} has no collection {path!r}; {known}")


def limited_collections(options: Options, selection: Selection) -> tuple[str, ...] | None:
    """The collections to stream for a selection that takes no others; None means those of the options.

    A selection with system events is not limited: these are also about collections that are gone.
    """
    names, scopes = selection.collections, selection.scopes
    if not selection.has_only_changes or (names is None and scopes is None):
        return None
    chosen = None if options.collections is None else set(map(full_path, options.collections))
    streamed = []
    # a stream of named collections leaves nothing out, so don't name what an unlimited stream leaves out
    is_named = options.scope is not None or chosen is not None
    there = {
        path
        for path in collection_paths(options)
        if is_named or options.include_system or not is_system_scope(path.partition(".")[0])
    }
    for path in sorted(there):
        scope, _, name = path.partition(".")
        if (
            (names is None or name in names)
            and (scopes is None or scope in scopes)
            and options.scope in (None, scope)
            and (chosen is None or path in chosen)
        ):
            streamed.append(path)
    return None if len(streamed) == len(there) else tuple(streamed)


def open_source(
    options: Options,
    purpose: str,
    selection: Selection | None = None,
    collections: tuple[str, ...] | None = None,
    **more: Any,
) -> BlockingSource:
    """A source as the options of a Spark read describe it, with ``more`` of `SourceOptions`.

    ``collections`` replaces those of the options.
    """
    where, tls = _where(options)
    return connect_sync(
        where,
        purpose=purpose,
        scope=(options.scope or "") if collections is None else "",
        collections=(options.collections or ()) if collections is None else collections,
        include_xattrs=options.include_xattrs,
        include_system=options.include_system,
        include_transactions=options.include_transactions,
        every_version=options.every_version,
        no_value=options.no_value or (selection is not None and not selection.takes_values),
        compression=options.compression == "snappy",
        flow_control_buffer=options.flow_control_buffer,
        retry_for_s=options.retry_for_s,
        connect_timeout_s=options.connect_timeout_s,
        persisted_only=options.persisted_only,
        replica_patience_s=options.replica_patience_s,
        tls=tls,
        **more,
    )


def refuse_loss(
    options: Options,
    log_of: Callable[[int], FailoverLog | None],
    held: Mapping[int, Position],
    back: Mapping[int, int],
) -> None:
    """Raise if vbuckets that stood at ``held`` went ``back`` to these seqnos and the options say that this
    ends the query. ``log_of`` gives the failover log that made a vbucket go back.
    """
    for vbucket, seqno in back.items():
        if options.on_rollback == "fail":
            raise ChangesTakenBack(
                f"the bucket took changes back (vbucket {vbucket} to seqno {seqno}) and onRollback "
                "is fail; start with a new checkpoint, or set onRollback to emit"
            )
        before = held.get(vbucket, Position.BEGINNING)
        if seqno == 0 < before.seqno and options.fail_on_data_loss:
            # The producer answers a rollback to 0 both for a branch that it does not have and after a purge;
            # but after a purge the position is still on a branch that it has.
            log = log_of(vbucket)
            is_purged = log is not None and (
                plan(before, None, producer_log=log, high_seqno=MAX_U64).action is RestartAction.RESUME
            )
            if is_purged:
                raise DataLoss(
                    f"changes of vbucket {vbucket} after seqno {before.seqno} were purged before this query "
                    "read them; set failOnDataLoss to false to read the vbucket again from the beginning"
                )


class Feed:
    """A connection to a bucket that feeds a query with changes."""

    def __init__(self, options: Options, selection: Selection | None = None) -> None:
        self._options = options
        self._selection = selection or Selection.of(options)
        self._source = open_source(options, "spark-stream", self._selection)
        self._source.__enter__()
        self._segment_rows = self._room = segment_rows(options.max_rows)
        self._latest: dict[int, Position] = {}

    @property
    def vbucket_count(self) -> int:
        """How many vbuckets the bucket has."""
        return self._source.vbucket_count

    def vbuckets(self) -> list[int]:
        """The vbuckets that are read."""
        options = self._options
        check_vbuckets(self.vbucket_count, options.vbuckets, options.starting_offsets, options.ending_offsets)
        return list(range(self.vbucket_count) if options.vbuckets is None else options.vbuckets)

    def high_seqnos(self) -> dict[int, int]:
        """The newest seqno of every vbucket that is read."""
        high = self._source.high_seqnos()
        return {vbucket: high.get(vbucket, 0) for vbucket in self.vbuckets()}

    def starting_positions(self, starting: str | Mapping[int, Position]) -> dict[int, Position]:
        """The positions at which a query begins."""
        if not isinstance(starting, str):
            return {vbucket: starting.get(vbucket, Position.BEGINNING) for vbucket in self.vbuckets()}
        if starting == "earliest":
            return dict.fromkeys(self.vbuckets(), Position.BEGINNING)
        logs = self._source.failover_logs(self.vbuckets())
        return {
            vbucket: Position.at(logs[vbucket].newest.vb_uuid, seqno) if seqno else Position.BEGINNING
            for vbucket, seqno in self.high_seqnos().items()
        }

    def taken_back(self, starts: Mapping[int, Position]) -> dict[int, Position]:
        """The vbuckets whose given start the bucket no longer has, and the positions they go back to.

        This is determined before the end, because what was taken back may lie above the end.
        """
        held = {vbucket: start for vbucket, start in starts.items() if start.seqno}
        if not held:
            return {}
        logs, high = self._source.failover_logs(held), self.high_seqnos()
        back_to = {
            vbucket: rollback_seqno(start, logs[vbucket], high_seqno=high[vbucket])
            for vbucket, start in held.items()
        }
        back = {vbucket: seqno for vbucket, seqno in back_to.items() if seqno is not None}
        refuse_loss(self._options, logs.get, held, back)
        return {
            vbucket: Position.at(held[vbucket].vb_uuid, seqno) if seqno else Position.BEGINNING
            for vbucket, seqno in back.items()
        }

    def latest_positions(self) -> dict[int, Position]:
        """Where the bucket is now, for computing the lag; a vbucket whose node does not answer is where it
        was last read.
        """
        high, beginning = self._source.high_seqnos(reachable_only=True), Position.BEGINNING
        latest = {vbucket: self._latest.get(vbucket, beginning) for vbucket in self.vbuckets()}
        return {
            vbucket: Position.at(position.vb_uuid, high.get(vbucket, position.seqno))
            for vbucket, position in latest.items()
        }

    def deliveries(self, start: Mapping[int, Position], *, end: str) -> Iterator[FeedDelivery]:
        """Everything from these positions on; ``end`` is ``forever``, or ``now`` for what is there now."""
        self._latest = dict(start)
        for portion in self._source.portions(dict(start), end, vbuckets=self.vbuckets()):
            for delivery in self._of(portion):
                self._latest.update(delivery.positions)
                yield delivery

    def close(self) -> None:
        """Close the connections."""
        self._source.close()

    def _of(self, portion: Portion) -> Iterator[FeedDelivery]:
        """A portion as deliveries, each with the positions after its last row. They are cut where a segment
        of the spool is full: uncut ones would leave segments, and so batches, short.
        """
        back = {
            placed.event.vbucket: placed.position
            for placed in portion.between
            if isinstance(placed.event, Rollback) and placed.position is not None
        }
        # The log comes with the portion: asking for it might have to wait until this portion is taken.
        refuse_loss(self._options, portion.log_of, self._latest, {v: at.seqno for v, at in back.items()})
        no_value = self._source.options.no_value
        batches = list(portion.batches(no_value=no_value, by_snapshot=False))
        rows = 0
        for number, batch in enumerate(batches):
            is_last = number + 1 == len(batches)
            first = 0
            while first < batch.num_rows:
                part = batch.slice(first, self._room)
                first += part.num_rows
                self._room = self._room - part.num_rows or self._segment_rows
                kind = kind_of(batch)
                if is_last and first == batch.num_rows:
                    positions = {**back, **portion.ends}
                elif kind is None:
                    positions = portion.positions_at(slice(rows, rows + part.num_rows))
                else:
                    vbucket = part["vbucket"][0].as_py()
                    positions = {vbucket: back[vbucket]} if vbucket in back else {}
                rows += part.num_rows if kind is None else 0
                rolled: dict[int, Position] = {}
                if kind == ROLLBACK:
                    vbucket = part["vbucket"][0].as_py()
                    rolled = {vbucket: back[vbucket]} if vbucket in back else {}
                yield FeedDelivery(self._selection.rows_of(part), positions, rolled)
        if not batches and (portion.ends or back):
            yield FeedDelivery(no_rows(), {**back, **portion.ends}, back)
