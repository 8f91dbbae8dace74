"""Between the consumer and Spark: changes as rows of the source, and where the vbuckets stand after them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ...client.blocking import BlockingSource, connect_sync
from ...client.bounds import check_vbuckets
from ...client.events import Rollback
from ...client.kv import KvClient
from ...client.portion import Portion
from ...client.tls import TlsOptions
from ...clock import SYSTEM
from ...columns import SCHEMA
from ...connstr import ConnectionString, parse
from ...errors import TailraceError
from ...history import Action, plan, rollback_seqno
from ...model import Position
from .options import Options
from .spool import FeedDelivery, segment_rows

__all__ = [
    "DataLoss",
    "Feed",
    "RolledBack",
    "collection_paths",
    "open_source",
    "position_rows",
    "refuse_loss",
    "signed",
]

if TYPE_CHECKING:
    from ..table import MirrorTable

_FRESH_S = 2.0


class RolledBack(TailraceError):
    """The bucket took changes back, and the query is to fail then."""


class DataLoss(TailraceError):
    """Changes were purged before the query read them."""


def _where(options: Options) -> tuple[ConnectionString, TlsOptions | None]:
    """What the options say of the bucket's address."""
    where = parse(options.connection_string)
    where = replace(
        where,
        bucket=options.bucket or where.bucket,
        username=options.username or where.username,
        password=where.password if options.password is None else options.password,
    )
    tls = None
    if options.tls_ca_file or options.tls_client_cert:
        tls = TlsOptions(
            ca_file=options.tls_ca_file, cert_file=options.tls_client_cert, key_file=options.tls_client_key
        )
    return where, tls


def collection_paths(options: Options) -> set[str]:
    """The collections that the bucket has now, as ``scope.collection``."""
    where, tls = _where(options)
    with KvClient(where, tls=tls) as client:
        manifest = client.manifest() if client.collections else {}
    return {"_default._default"} | {
        f"{scope['name']}.{collection['name']}"
        for scope in manifest.get("scopes", ())
        for collection in scope["collections"]
    }


def open_source(options: Options, purpose: str, ways_back: _WaysBack | None = None) -> BlockingSource:
    """A consumer as the options of a Spark read describe it."""
    where, tls = _where(options)
    if ways_back is None and options.mirror is not None:
        ways_back = _WaysBack(options)
    return connect_sync(
        where,
        purpose=purpose,
        scope=options.scope or "",
        collections=options.collections or (),
        include_xattrs=options.include_xattrs,
        no_value=options.no_value,
        compression=options.compression == "snappy",
        flow_control_buffer=options.flow_control_buffer,
        retry_for_s=options.retry_for_s,
        rollback_points=None if ways_back is None else ways_back.points,
        backfill_order="sequential" if options.mirror is not None else "",
        tls=tls,
    )


def refuse_loss(
    options: Options, source: BlockingSource, held: Mapping[int, Position], back: Mapping[int, int]
) -> None:
    """Raise if vbuckets went ``back`` to these seqnos from where they were ``held``, and the options say that
    a query ends then.
    """
    for vbucket, seqno in back.items():
        if options.on_rollback == "fail":
            raise RolledBack(
                f"the bucket took changes back (vbucket {vbucket} to seqno {seqno}) and onRollback "
                "is fail; start with a new checkpoint, or set onRollback to emit"
            )
        before = held.get(vbucket, Position.BEGINNING)
        if seqno == 0 < before.seqno and options.fail_on_data_loss:
            # to the producer both are a rollback to 0: a branch that it does not have, and a purge; but
            # after a purge the place is still on a branch that it has
            log, high = source.failover_logs([vbucket])[vbucket], source.high_seqnos()[vbucket]
            if plan(before, None, producer_log=log, high_seqno=high).action is Action.RESUME:
                raise DataLoss(
                    f"changes of vbucket {vbucket} after seqno {before.seqno} were purged before this query "
                    "read them; set failOnDataLoss to false to have the vbucket once more from the beginning"
                )


class _WaysBack:
    """Where a mirror can go back to: what its tables say.

    A failover takes back many vbuckets at once, and a table is slow to open: one that was opened a moment ago
    only takes note of later commits. Not longer, because files that a vacuum takes are missed by opening.
    """

    def __init__(self, options: Options) -> None:
        self._uris = options.mirror.tables
        self._storage_options = options.mirror.storage_options
        self._tables: list[MirrorTable] = []
        self._offered: dict[int, dict[int, list[int]]] = {}
        self._opened_at = -inf
        self._using = threading.Lock()

    def points(self, vbucket: int) -> list[Position]:
        """Where all tables stood, newest first. They are behind the stream: of what was taken back meanwhile
        they don't know yet.
        """
        found: dict[Position, list[int]] | None = None
        with self._using:
            for table in self._fresh_tables():
                own: dict[Position, int] = {}
                for version, position in table.lineage(vbucket):
                    own.setdefault(Position.at(position.vb_uuid, position.seqno), version)
                if found is None:
                    found = {at: [version] for at, version in own.items()}
                else:
                    found = {at: [*before, own[at]] for at, before in found.items() if at in own}
            found = found or {}
            self._offered[vbucket] = {at.seqno: found[at] for at in reversed(found)}
        return list(found)

    def versions(self, vbucket: int, seqno: int) -> list[int] | None:
        """The version of each table that stands there, as it was when the vbucket was told to go back."""
        return self._offered.get(vbucket, {}).get(seqno)

    def _fresh_tables(self) -> list[MirrorTable]:
        from ..table import MirrorTable  # a source without a mirror starts faster without Delta

        now = SYSTEM.monotonic()
        if now - self._opened_at > _FRESH_S:
            self._opened_at = now
            self._tables = [
                MirrorTable.open(uri, storage_options=self._storage_options) for uri in self._uris
            ]
        else:
            for table in self._tables:
                table.refresh()
        return self._tables


class Feed:
    """One reading of a bucket for a streaming query."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ways_back = _WaysBack(options) if options.mirror is not None else None
        purpose = "spark-stream" if self._ways_back is None else "spark-mirror"
        self._source = open_source(options, purpose, self._ways_back)
        self._source.__enter__()
        self._segment_rows = self._room = segment_rows(options.max_rows)
        self._latest: dict[int, Position] = {}

    @property
    def vbucket_count(self) -> int:
        """Of the bucket."""
        return self._source.vbucket_count

    def vbuckets(self) -> list[int]:
        """Those that are read."""
        options = self._options
        check_vbuckets(self.vbucket_count, options.vbuckets, options.starting_offsets, options.ending_offsets)
        return list(range(self.vbucket_count) if options.vbuckets is None else options.vbuckets)

    def high_seqnos(self) -> dict[int, int]:
        """The newest seqno of every vbucket that is read."""
        high = self._source.high_seqnos()
        return {vbucket: high.get(vbucket, 0) for vbucket in self.vbuckets()}

    def starting_positions(self, starting: str | Mapping[int, Position]) -> dict[int, Position]:
        """Where a query begins."""
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
        """Of positions that are given, those that the bucket no longer has, and where they go back to.

        It is found out before the end is: what was taken back may lie above it.
        """
        held = {vbucket: start for vbucket, start in starts.items() if start.seqno}
        if not held:
            return {}
        logs, high = self._source.failover_logs(held), self.high_seqnos()
        found = {
            vbucket: rollback_seqno(start, logs[vbucket], high_seqno=high[vbucket])
            for vbucket, start in held.items()
        }
        back = {vbucket: seqno for vbucket, seqno in found.items() if seqno is not None}
        refuse_loss(self._options, self._source, held, back)
        return {
            vbucket: Position.at(held[vbucket].vb_uuid, seqno) if seqno else Position.BEGINNING
            for vbucket, seqno in back.items()
        }

    def latest_positions(self) -> dict[int, Position]:
        """Where the bucket is now, for those who compute a lag."""
        return {
            vbucket: Position.at(self._latest.get(vbucket, Position.BEGINNING).vb_uuid, seqno)
            for vbucket, seqno in self.high_seqnos().items()
        }

    def deliveries(self, start: Mapping[int, Position], *, end: str) -> Iterator[FeedDelivery]:
        """Everything from these positions on: ``forever``, or what is there ``now``."""
        self._latest = dict(start)
        if self._options.mirror is not None and self._options.mirror.resets:
            yield _first_of_all(self._options.mirror.resets)
        for portion in self._source.portions(dict(start), end, vbuckets=self.vbuckets()):
            for delivery in self._of(portion):
                self._latest.update(delivery.positions)
                yield delivery

    def close(self) -> None:
        """Close the connections."""
        self._source.close()

    def _of(self, portion: Portion) -> Iterator[FeedDelivery]:
        """A portion as deliveries, each with the positions after its last row. They are cut wherever as many
        rows have come as fill a segment of the spool: whole ones would leave batches short.
        """
        back = {
            told.event.vbucket: told.position
            for told in portion.told
            if isinstance(told.event, Rollback) and told.position is not None
        }
        refuse_loss(self._options, self._source, self._latest, {v: at.seqno for v, at in back.items()})
        found = portion.batches(no_value=self._options.no_value, by_snapshot=False)
        batches = [self._with_way_back(batch) for batch in found]
        rows = 0
        for number, batch in enumerate(batches):
            is_last = number + 1 == len(batches)
            first = 0
            while first < batch.num_rows:
                part = batch.slice(first, self._room)
                first += part.num_rows
                self._room = self._room - part.num_rows or self._segment_rows
                changes = _is_change(batch)
                if is_last and first == batch.num_rows:
                    positions = {**back, **portion.ends}
                elif changes:
                    positions = portion.positions_at(slice(rows, rows + part.num_rows))
                else:
                    vbucket = part["vbucket"][0].as_py()
                    positions = {vbucket: back[vbucket]} if vbucket in back else {}
                rows += part.num_rows if changes else 0
                rolled: dict[int, Position] = {}
                if not changes and part["op"][0].as_py() == "rollback":
                    vbucket = part["vbucket"][0].as_py()
                    rolled = {vbucket: back[vbucket]} if vbucket in back else {}
                yield FeedDelivery(part, positions, rolled)
        if not batches and (portion.ends or back):
            yield FeedDelivery(_EMPTY, {**back, **portion.ends}, back)

    def _with_way_back(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """For the mirror a rollback row says which versions of the tables the vbucket returns to."""
        if self._ways_back is None or batch.num_rows != 1 or batch["op"][0].as_py() != "rollback":
            return batch
        vbucket, seqno = batch["vbucket"][0].as_py(), batch["seqno"][0].as_py()
        versions = self._ways_back.versions(vbucket, seqno) if seqno else None
        if seqno and versions is None:
            raise TailraceError(f"no table version of vbucket {vbucket} stands at seqno {seqno} any more")
        value = json.dumps({"versions": versions}).encode()
        return batch.set_column(SCHEMA.get_field_index("value"), "value", pa.array([value], pa.binary()))


def _first_of_all(resets: Mapping[int, tuple[int, int, list[int] | None]]) -> FeedDelivery:
    """What a mirror has to set right before it goes on."""
    rows = [
        {
            "op": "rollback",
            "vbucket": vbucket,
            "vb_uuid": signed(vb_uuid),
            "seqno": seqno,
            "value": json.dumps({"versions": versions}).encode(),
        }
        for vbucket, (vb_uuid, seqno, versions) in resets.items()
    ]
    positions = {vbucket: Position.at(vb_uuid, seqno) for vbucket, (vb_uuid, seqno, _) in resets.items()}
    return FeedDelivery(pa.RecordBatch.from_pylist(rows, schema=SCHEMA), positions, positions)


# made of nulls because Arrow imports pandas when it sees a list, and every process that reads would wait
_EMPTY = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in SCHEMA], schema=SCHEMA)


def _is_change(batch: pa.RecordBatch) -> bool:
    return batch.num_rows > 1 or batch["op"][0].as_py() in ("mutation", "deletion", "expiration")


def position_rows(positions: Mapping[int, Position]) -> pa.RecordBatch:
    """Where vbuckets stand, as rows with op ``position``: how the mirror learns what it may publish."""
    rows: list[dict[str, Any]] = [
        {
            "op": "position",
            "vbucket": vbucket,
            "vb_uuid": signed(position.vb_uuid),
            "seqno": signed(position.seqno),
            "snapshot_start": signed(position.snapshot_start),
            "snapshot_end": signed(position.snapshot_end),
        }
        for vbucket, position in sorted(positions.items())
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def signed(number: int) -> int:
    """64 bits of the wire as Arrow and Spark have them."""
    return number - (1 << 64) if number >= 1 << 63 else number
