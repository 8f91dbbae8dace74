"""The change log beside a mirror: an append-only Delta table with every change, each at most once.

Its commits carry the position of every vbucket, as the mirror's do, and a batch is committed here first: what
comes again after a crash is already there, and is left out. A change of the log is never touched again. When
the bucket takes changes back, a row with op ``rollback`` is appended: the changes of its vbucket that were
logged before it (``log_version``) and lie above its seqno are no longer true. `live_changes` leaves them out.

A change that is taken back before its batch was committed leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError
from numpy.typing import NDArray

from ..history import FailoverLog
from ..model import Position
from ..rng import unique_name
from .fold import as_text
from .source.feed import open_source
from .source.options import parse_options
from .table import GroupFile, MirrorTable, read_rows, write_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["CHANGES_SCHEMA", "ChangeLog", "Logged", "Logger", "live_changes"]

CHANGES_SCHEMA = pa.schema(
    [
        ("log_version", pa.int64()),
        ("op", pa.string()),
        ("key", pa.string()),
        ("key_base64", pa.string()),
        ("value", pa.string()),
        ("value_base64", pa.string()),
        ("scope", pa.string()),
        ("collection", pa.string()),
        ("vbucket", pa.int32()),
        ("vb_uuid", pa.int64()),
        ("seqno", pa.int64()),
        ("rev", pa.int64()),
        ("cas", pa.int64()),
        ("flags", pa.int32()),
        ("expiry", pa.int64()),
        ("datatype", pa.string()),
        ("event_time", pa.timestamp("us", tz="UTC")),
        ("snapshot_start", pa.int64()),
        ("snapshot_end", pa.int64()),
    ]
)
"""A row per change. ``log_version`` is the version of the log that brought it."""

_OPS = pa.array(["mutation", "deletion", "expiration", "system"])
_BACK = pa.array(["rollback", "flush"])
_WIDTH = 1 << 64


def live_changes(frame: DataFrame) -> DataFrame:
    """The changes of a log that are still true, without the rows that say what is not."""
    from pyspark.sql import functions as sf

    back = frame.where("op = 'rollback'").select(
        sf.col("vbucket").alias("_vbucket"),
        sf.col("seqno").alias("_seqno"),
        sf.col("log_version").alias("_version"),
    )
    undone = (
        (sf.col("vbucket") == sf.col("_vbucket"))
        & (sf.col("seqno") > sf.col("_seqno"))
        & (sf.col("log_version") < sf.col("_version"))
    )
    return frame.where("op != 'rollback'").join(sf.broadcast(back), undone, "left_anti")


@dataclass(frozen=True)
class ChangeLog:
    """What a task must know of the log; pickled to the executors."""

    uri: str
    given: Mapping[str, str]
    """Options of the source, for the failover logs."""
    positions: Mapping[int, Position]
    """Up to where each vbucket is in the log."""
    version: int
    """The one that this batch will make."""
    storage_options: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    """What a task has for the log."""

    added: tuple[GroupFile, ...]
    positions: dict[int, Position]
    changes: int


@dataclass
class Logger:
    """Gathers the changes of one task and writes them as one file."""

    log: ChangeLog
    _rows: list[pa.Table] = field(default_factory=list)
    _positions: dict[int, Position] = field(default_factory=dict)

    def add(self, rows: pa.Table, whole: Mapping[int, Position]) -> None:
        """Rows of vbuckets that are whole, in the order in which they came, and where the vbuckets stand."""
        branched = {
            vbucket: position
            for vbucket, position in whole.items()
            if (held := self._held(vbucket)).seqno and held.vb_uuid != position.vb_uuid
        }
        back = self._branch_points(branched)
        known = np.zeros(max(whole, default=0) + 1, dtype=np.int64)
        for vbucket, position in whole.items():
            stays = back.get(vbucket, self._held(vbucket).seqno)
            known[vbucket] = 0 if vbucket in back else stays
            self._positions[vbucket] = (
                position if position.seqno > stays else Position.at(position.vb_uuid, stays)
            )
        rows = _after_rollbacks(rows)
        new = rows["seqno"].to_numpy() > known[rows["vbucket"].to_numpy()]
        for vbucket, seqno in back.items():
            new &= ~self._standing(rows, vbucket, seqno)
            if seqno < self._held(vbucket).seqno:
                self._rows.append(_rollback_row(vbucket, branched[vbucket].vb_uuid, seqno, self.log.version))
        changes = rows.filter(pa.array(new))
        if changes.num_rows:
            self._rows.append(_logged(changes, self.log.version))

    def finish(self) -> Logged:
        """Write what was gathered."""
        if not self._rows:
            return Logged((), self._positions, 0)
        rows = pa.concat_tables(self._rows).sort_by([("vbucket", "ascending"), ("seqno", "ascending")])
        name = f"changes-{self.log.version:012d}-{unique_name()}.parquet"
        file = write_file(rows, self.log.uri, name, storage_options=self.log.storage_options)
        return Logged((file,), self._positions, rows.num_rows)

    def _held(self, vbucket: int) -> Position:
        return self.log.positions.get(vbucket, Position.BEGINNING)

    # a history that branched

    def _branch_points(self, branched: Mapping[int, Position]) -> dict[int, int]:
        """Up to where the logged history of vbuckets is still the bucket's; asked of the bucket itself."""
        if not branched:
            return {}
        with open_source(parse_options(self.log.given), "spark-changes") as source:
            logs = source.failover_logs(list(branched))
        return {vbucket: self._branch_point(vbucket, logs[vbucket]) for vbucket in branched}

    def _branch_point(self, vbucket: int, producer: FailoverLog) -> int:
        for version in self._table().versions():
            held = version.position(vbucket)
            branch = producer.range_of(held.vb_uuid, held.seqno)
            if branch is not None:
                return min(held.seqno, branch.upper)
        return 0

    def _standing(self, rows: pa.Table, vbucket: int, seqno: int) -> NDArray[np.bool_]:
        """Which rows of a vbucket up to ``seqno`` are in the log already.

        That is not all of them: a change that was left out because a later one covered it comes now, if the
        later one was taken back.
        """
        seqnos: NDArray[np.int64] = rows["seqno"].to_numpy()
        vbuckets: NDArray[np.int32] = rows["vbucket"].to_numpy()
        own: NDArray[np.bool_] = (vbuckets == vbucket) & (seqnos <= seqno)
        if not own.any():
            return own
        low = int(seqnos[own].min())
        wanted = (
            (pc.field("vbucket") == vbucket)
            & (pc.field("seqno") >= low)
            & (pc.field("seqno") <= seqno)
            & (pc.field("op") != "rollback")
        )
        files = list(self._files_since(vbucket, low))
        schema = pa.schema([CHANGES_SCHEMA.field(name) for name in ("op", "vbucket", "seqno")])
        held = read_rows(self.log.uri, files, schema, wanted, storage_options=self.log.storage_options)
        return own & np.isin(seqnos, held["seqno"].to_numpy())

    def _files_since(self, vbucket: int, seqno: int) -> Iterator[str]:
        """The files that may have changes of a vbucket from ``seqno`` on."""
        table = self._table()
        before: set[str] = set()
        for version in table.versions():
            if version.position(vbucket).seqno < seqno:
                try:
                    before = {file.path for file in table.files(version.version)}
                except (DeltaError, OSError):  # too old to be opened: look at all files
                    before = set()
                break
        for file in table.files():
            if file.path not in before and file.overlaps(vbucket, vbucket):
                yield file.path

    def _table(self) -> MirrorTable:
        return MirrorTable.open(self.log.uri, storage_options=self.log.storage_options)


def _after_rollbacks(rows: pa.Table) -> pa.Table:
    """The changes that no rollback of their vbucket follows."""
    vbuckets = rows["vbucket"].to_numpy()
    at = np.flatnonzero(pc.is_in(rows["op"], value_set=_BACK).to_numpy(zero_copy_only=False))
    last = np.full(int(vbuckets.max(initial=0)) + 1, -1, dtype=np.int64)
    np.maximum.at(last, vbuckets[at], at)
    rows = rows.filter(pa.array(np.arange(len(vbuckets)) > last[vbuckets]))
    return rows.filter(pc.is_in(rows["op"], value_set=_OPS))


def _logged(changes: pa.Table, version: int) -> pa.Table:
    key, key_base64 = as_text(changes["key"])
    value, value_base64 = as_text(changes["value"])
    made = {"key": key, "key_base64": key_base64, "value": value, "value_base64": value_base64}
    made["log_version"] = pa.chunked_array([pa.array([version] * changes.num_rows, pa.int64())])
    columns = [
        made[one.name] if one.name in made else changes[one.name].cast(one.type) for one in CHANGES_SCHEMA
    ]
    return pa.table(columns, schema=CHANGES_SCHEMA)


def _rollback_row(vbucket: int, vb_uuid: int, seqno: int, version: int) -> pa.Table:
    signed = vb_uuid - _WIDTH if vb_uuid >= _WIDTH >> 1 else vb_uuid
    row = {"log_version": version, "op": "rollback", "vbucket": vbucket, "vb_uuid": signed, "seqno": seqno}
    return pa.Table.from_pylist([row], schema=CHANGES_SCHEMA)
